"""GLM-4.5 (arXiv 2508.06471): experts as DeepSeek-V3 has them, attention as GLM, half of each head rotated."""

from typing import Any

from jaxrl_llm.models.families import decoder, deepseek_v3
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "glm4_moe"
ARCHITECTURE = "Glm4Moe"
KEYS, OTHER_KEYS = decoder.expert_tables((*decoder.KEYS, *decoder.QK_NORMS, *deepseek_v3.beside_experts("mlp")))
DEFAULTS = {
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    return decoder.to_config(hf, ARCHITECTURE, own_fields(hf), overrides, rope={"partial": True})


def own_fields(hf: dict[str, Any]) -> dict[str, Any]:
    """The ModelConfig fields of the family's own entries, all of which are there."""
    return {
        **deepseek_v3.experts(hf),
        "attention_bias": bool(hf.get("attention_bias", False)),
        "qk_norm": "head" if hf.get("use_qk_norm") else "",
    }


def own_entries(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The entries of config.json that `own_fields` reads."""
    return {
        **deepseek_v3.expert_entries(config, base),
        "attention_bias": config.attention_bias,
        "use_qk_norm": bool(config.qk_norm),
    }


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own_entries(config, base))
