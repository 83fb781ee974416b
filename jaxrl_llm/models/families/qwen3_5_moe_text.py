"""Qwen3.5's mixtures of experts (Qwen3.5-35B-A3B without its vision): Qwen3.5's layers with Qwen3-Next's experts."""

from typing import Any

from jaxrl_llm.models.families import decoder, qwen2_moe, qwen3_5_text, qwen3_next
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "qwen3_5_moe_text"
ARCHITECTURE = "Qwen3_5Moe"
KEYS, OTHER_KEYS = decoder.expert_tables((*qwen3_5_text.KEYS, *qwen2_moe.SHARED))
DEFAULTS = qwen3_next.DEFAULTS | {"num_experts_per_tok": 8, "num_experts": 256}  # for entries that are left out
# Other families' entries, which this one does not read: every layer has experts, whose weights add up to 1.
FIXED = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = with_defaults(hf)
    return decoder.to_config(hf, ARCHITECTURE, fields(hf), overrides, rope={"partial": True})


def with_defaults(hf: dict[str, Any]) -> dict[str, Any]:
    """The entries, and those that are left out; no layer has the feed-forward of `intermediate_size`."""
    hf = DEFAULTS | hf | FIXED
    return {"intermediate_size": hf["moe_intermediate_size"]} | hf


def fields(hf: dict[str, Any]) -> dict[str, Any]:
    """The ModelConfig fields that are this family's own, of entries with their defaults."""
    return qwen3_5_text.fields(hf) | qwen2_moe.experts(hf)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, entries(config, base))


def entries(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The entries of config.json that `fields` reads."""
    return qwen3_next.delta_entries(config, base) | qwen2_moe.expert_entries(config, base)
