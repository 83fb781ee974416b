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
    """The ModelConfig of a config.json; raises ConfigError for what the network does not compute."""
    hf = DEFAULTS | hf
    if hf.get("text_config") is not None and "model_type" not in hf["text_config"]:
        hf |= {"text_config": {"model_type": "qwen2"} | hf["text_config"]}
    if not re.fullmatch(r"anyres_max_[1-9]\d*", str(hf["vision_aspect_ratio"])):
        refuse("vision_aspect_ratio", hf["vision_aspect_ratio"], "anyres_max_9, or another number of tiles")
    return llava_1_5.config_of(hf, ARCHITECTURE, overrides, "siglip_vision_model", "interpolated")


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The config.json of a net, over the entries of `base`; raises ConfigError for one without vision."""
    return llava_1_5.entries_of(config, base, ARCHITECTURE, {"model_type": MODEL_TYPE})
