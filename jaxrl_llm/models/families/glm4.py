"""GLM-4 of 2025 (GLM-4-0414, GLM-Z1): GLM with norms after attention and feed-forward as well as before."""

from typing import Any

from jaxrl_llm.models.families import decoder, glm
from jaxrl_llm.models.families.decoder import LAYER, norms
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "glm4"
ARCHITECTURE = "Glm4"
KEYS = (
    *decoder.ENDS,
    *decoder.PRE_NORMS,
    *norms("layers/", LAYER, {"attention_out_norm": "post_self_attn_layernorm", "mlp_out_norm": "post_mlp_layernorm"}),
    *decoder.ATTENTION,
    *glm.FEED_FORWARD,
)


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    return glm.read(hf, ARCHITECTURE, overrides, norms="both")


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, {"attention_bias": config.attention_bias})
