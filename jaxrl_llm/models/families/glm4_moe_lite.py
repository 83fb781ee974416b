"""GLM-4.7-Flash: DeepSeek-V3 with the experts of GLM-4.5, not in groups."""

from typing import Any

from jaxrl_llm.models.families import decoder, deepseek_v3
from jaxrl_llm.models.families.entries import dense_before_sparse, mlp_types
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "glm4_moe_lite"
ARCHITECTURE = "Glm4MoeLite"
KEYS, OTHER_KEYS = deepseek_v3.KEYS, deepseek_v3.OTHER_KEYS
DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "rope_interleave": True,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    dense = {"first_k_dense_replace": dense_before_sparse(hf, 1)}
    return deepseek_v3.read(DEFAULTS | hf | dense, ARCHITECTURE, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = deepseek_v3.entries(config, base) | {"mlp_layer_types": mlp_types(config)}
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
