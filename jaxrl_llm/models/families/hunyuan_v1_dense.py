"""Hunyuan's dense models: Llama's shape, with norms of each head's rotated queries and keys."""

from typing import Any

from jaxrl_llm.models.families import decoder, rotary
from jaxrl_llm.models.families.decoder import LAYER, norms
from jaxrl_llm.models.families.entries import number, positive
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "hunyuan_v1_dense"
ARCHITECTURE = "HunYuanDenseV1"
KEYS = (
    *decoder.KEYS,
    *norms("layers/attention/", f"{LAYER}self_attn.", {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}),
)
DEFAULTS = {"rms_norm_eps": 1e-5}  # for entries that are left out
THETA = 10_000.0


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    return decoder.to_config(stretched(DEFAULTS | hf), ARCHITECTURE, own_fields(hf), overrides)


def own_fields(hf: dict[str, Any]) -> dict[str, Any]:
    """The ModelConfig fields of attention."""
    return {**decoder.attention_biases(hf), "qk_norm": "rotated"}


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own_entries(config), rope=stretched)


def own_entries(config: ModelConfig) -> dict[str, Any]:
    """The entries of config.json that `own_fields` reads, and the size of a head."""
    return {"attention_bias": config.attention_bias, "head_dim": config.head_dim}


def stretched(hf: dict[str, Any]) -> dict[str, Any]:
    """The entries with the rotary base that an `alpha` beside the type `dynamic` means: it is longer, and stays so."""
    given = rotary.parameters_of(hf)
    if rotary.kind_of(given) != "dynamic" or not given.get("alpha"):
        return hf
    heads = positive(hf, "num_attention_heads")
    size = positive(hf, "hidden_size") // heads if hf.get("head_dim") is None else positive(hf, "head_dim")
    theta = number("rope_theta", given.get("rope_theta") or hf.get("rope_theta") or THETA, above=1)
    theta *= number("alpha", given["alpha"], above=0) ** (size / (size - 2))
    return {**hf, "rope_scaling": None, "rope_theta": theta, "rope_parameters": {"rope_type": "default"}}
