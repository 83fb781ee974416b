"""OLMoE (arXiv 2409.02060): experts in every layer, norms over all queries and all keys."""

from typing import Any

from jaxrl_llm.models.families import decoder, qwen3_moe
from jaxrl_llm.models.families.entries import positive, refuse
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "olmoe"
ARCHITECTURE = "Olmoe"
KEYS, OTHER_KEYS = qwen3_moe.KEYS, qwen3_moe.OTHER_KEYS
DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.01,
}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    if hf.get("clip_qkv") is not None:
        refuse("clip_qkv", hf["clip_qkv"], "null")
    own = {
        "qk_norm": "whole",
        **decoder.attention_biases(hf),
        **qwen3_moe.experts({**hf, "moe_intermediate_size": positive(hf, "intermediate_size")}),
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides)


def own_entries(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The entries of config.json of attention and experts."""
    own: dict[str, Any] = {
        "attention_bias": config.attention_bias,
        "num_experts_per_tok": config.experts_per_token,
        "norm_topk_prob": config.normalize_top_k,
        "router_aux_loss_coef": config.router_aux_loss_coef,
    }
    return own | ({"num_experts": config.experts} if base is None else {})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own_entries(config, base))
