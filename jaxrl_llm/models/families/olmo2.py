"""OLMo 2 (arXiv 2501.00656): norms of what attention and feed-forward add, and over all queries and all keys."""

from typing import Any

from jaxrl_llm.models.families import decoder
from jaxrl_llm.models.families.decoder import LAYER, TensorName
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "olmo2"
ARCHITECTURE = "Olmo2"
KEYS = (
    *decoder.ENDS,
    TensorName("layers/attention_out_norm/scale", f"{LAYER}post_attention_layernorm.weight"),
    TensorName("layers/mlp_out_norm/scale", f"{LAYER}post_feedforward_layernorm.weight"),
    *decoder.ATTENTION,
    *decoder.QK_NORMS,
    *decoder.FEED_FORWARD,
)
DEFAULTS = {"rms_norm_eps": 1e-5}  # for entries that are left out


def common(hf: dict[str, Any]) -> dict[str, Any]:
    """The ModelConfig fields that OLMo 2 and 3 share."""
    return {"norms": "post", "qk_norm": "whole", **decoder.attention_biases(hf)}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    return decoder.to_config(DEFAULTS | hf, ARCHITECTURE, common(hf), overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, {"attention_bias": config.attention_bias})
