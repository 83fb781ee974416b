"""Granite (IBM, 3.0 to 4.0 dense): Llama's shape with four multipliers in the manner of muP (arXiv 2203.03466)."""

from typing import Any

from jaxrl_llm.models.families import decoder, llama
from jaxrl_llm.models.families.entries import number
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "granite"
ARCHITECTURE = "Granite"
KEYS = decoder.KEYS
MULTIPLIERS = {
    "embed_scale": "embedding_multiplier",
    "query_scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_divisor": "logits_scaling",
}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    return decoder.to_config(hf, ARCHITECTURE, decoder.read_fields(hf, llama.FIELDS) | multipliers(hf), overrides)


def multipliers(hf: dict[str, Any]) -> dict[str, float]:
    """The ModelConfig fields of the multipliers."""
    return {field: number(entry, hf.get(entry, 1.0), above=0) for field, entry in MULTIPLIERS.items()}


def multiplier_entries(config: ModelConfig) -> dict[str, float]:
    """The entries of config.json that `multipliers` reads."""
    entries = decoder.write_fields(config, MULTIPLIERS)
    return entries | ({"attention_multiplier": config.head_dim**-0.5} if config.query_scale is None else {})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = decoder.write_fields(config, llama.FIELDS) | multiplier_entries(config)
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
