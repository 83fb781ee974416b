"""LLaVA-OneVision (arXiv 2408.03326): SigLIP tiles, which are put together as in LLaVA-1.6, and interpolated where they
would be many tokens; videos are not read."""

import re
from typing import Any

from jaxrl_llm.models.families import llava_1_5
from jaxrl_llm.models.families.entries import refuse
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "llava_onevision"
ARCHITECTURE = {"lm": "LlavaOnevisionForConditionalGeneration", "score": "LlavaOnevisionForSequenceClassification"}
KEYS, MODULE_KEYS, OTHER_KEYS = llava_1_5.KEYS, llava_1_5.MODULE_KEYS, llava_1_5.OTHER_KEYS
# For entries that are left out.
DEFAULTS = {
    "image_token_index": 151_646,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "vision_aspect_ratio": "anyres_max_9",
}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | _named(hf)
    if not re.fullmatch(r"anyres_max_[1-9]\d*", str(hf["vision_aspect_ratio"])):
        refuse("vision_aspect_ratio", hf["vision_aspect_ratio"], "anyres_max_9, or another number of tiles")
    return llava_1_5.config_of(hf, ARCHITECTURE, overrides, "siglip_vision_model", "interpolated")


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    named = None if base is None else _named(base)
    return llava_1_5.entries_of(config, named, ARCHITECTURE, {"model_type": MODEL_TYPE})


def _named(hf: dict[str, Any]) -> dict[str, Any]:
    """The entries of a config.json, whose decoder is a Qwen2 where it does not say which it is."""
    given = hf.get("text_config")
    return hf | {"text_config": {"model_type": "qwen2"} | given} if isinstance(given, dict) else hf
