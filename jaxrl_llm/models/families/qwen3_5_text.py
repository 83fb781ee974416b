"""Qwen3.5's decoder (Qwen3.5-27B without its vision): Qwen3-Next's layers, with other projections, and dense."""

from typing import Any

from jaxrl_llm.models.families import decoder, qwen3_next
from jaxrl_llm.models.families.decoder import LAYER, maps
from jaxrl_llm.models.mixers.delta_net import SplitDeltaNet
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "qwen3_5_text"
ARCHITECTURE = {"lm": "Qwen3_5ForCausalLM", "score": "Qwen3_5TextForSequenceClassification"}
KEYS = (
    *qwen3_next.DELTA_KEYS,
    *maps("layers/delta", f"{LAYER}linear_attn", {name: f"in_proj_{name}" for name in ("qkv", "z", "b", "a")}),
)
DEFAULTS = qwen3_next.DELTA_DEFAULTS | {"num_key_value_heads": 4}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    return decoder.to_config(hf, ARCHITECTURE, fields(hf), overrides, rope={"partial": True})


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    """The ModelConfig fields that are this family's own, of entries with their defaults."""
    return qwen3_next.delta_fields(hf, SplitDeltaNet)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, qwen3_next.delta_entries(config, base))
