"""GLM-4 of 2024 (arXiv 2406.12793): half of each head rotated, neighbours together; gate and up in one tensor."""

from typing import Any

from jaxrl_llm.models.families import decoder
from jaxrl_llm.models.families.decoder import LAYER, maps
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "glm"
ARCHITECTURE = "Glm"
FEED_FORWARD = maps("layers/mlp", f"{LAYER}mlp", decoder.GATED | dict.fromkeys(("gate", "up"), "gate_up_proj"))
KEYS = (*decoder.ENDS, *decoder.PRE_NORMS, *decoder.ATTENTION, *FEED_FORWARD)
DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "rms_norm_eps": 1.5625e-07,
}  # for entries that are left out


def read(hf: dict[str, Any], family: str, overrides: dict[str, Any], **own) -> ModelConfig:
    """The ModelConfig of a `family` with the shape of GLM and fields of its `own`."""
    hf = DEFAULTS | hf
    own |= {"rope_interleaved": True, "attention_bias": bool(hf["attention_bias"])}
    return decoder.to_config(hf, family, own, overrides, rope={"partial": True})


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    return read(hf, ARCHITECTURE, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, {"attention_bias": config.attention_bias})
