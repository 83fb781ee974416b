"""dots.llm1 (arXiv 2506.05767): attention as Qwen3, experts as DeepSeek-V3."""

from typing import Any

from jaxrl_llm.models.families import decoder, deepseek_v3, glm4_moe, layer_types
from jaxrl_llm.models.families.entries import positive
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "dots1"
ARCHITECTURE = "Dots1"
KEYS, OTHER_KEYS = glm4_moe.KEYS, glm4_moe.OTHER_KEYS
DEFAULTS = {
    "num_key_value_heads": 32,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "sliding_window": 4096,
    "max_window_layers": 62,
}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    windowed = hf["sliding_window"] is not None
    own = {
        **deepseek_v3.experts(hf),
        **decoder.attention_biases(hf),
        **layer_types.read(hf, lambda layer: windowed and layer >= positive(hf, "max_window_layers")),
        "qk_norm": "head",
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = deepseek_v3.expert_entries(config, base) | layer_types.write(config, base)
    own |= {"attention_bias": config.attention_bias}
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
