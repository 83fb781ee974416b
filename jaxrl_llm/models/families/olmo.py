"""OLMo 1 (arXiv 2402.00838): Llama's shape with layer norms that have no parameters."""

from typing import Any

from jaxrl_llm.models.families import decoder
from jaxrl_llm.models.families.entries import number
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "olmo"
ARCHITECTURE = "Olmo"
KEYS = (*decoder.ENDS, *decoder.ATTENTION, *decoder.FEED_FORWARD)


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    clip = hf.get("clip_qkv")
    own = {
        **decoder.attention_biases(hf),
        "norm_centred": True,
        "norm_scale": False,
        "norm_eps": 1e-5,
        "qkv_clip": None if clip is None else number("clip_qkv", clip, above=0),
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = {"attention_bias": config.attention_bias, "clip_qkv": config.qkv_clip}
    return decoder.from_own_names(config, base, {}, {}, ARCHITECTURE, MODEL_TYPE, own, ("rms_norm_eps",))
