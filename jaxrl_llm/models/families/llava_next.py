"""LLaVA-1.6, or LLaVA-NeXT: LLaVA-1.5 with a tile of the whole image and tiles of a grid, which are put together."""

from typing import Any

from jaxrl_llm.models.families import llava_1_5
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "llava_next"
ARCHITECTURE = {"lm": "LlavaNextForConditionalGeneration", "score": "LlavaNextForSequenceClassification"}
KEYS, MODULE_KEYS, OTHER_KEYS = llava_1_5.KEYS, llava_1_5.MODULE_KEYS, llava_1_5.OTHER_KEYS


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    return llava_1_5.config_of(llava_1_5.DEFAULTS | hf, ARCHITECTURE, overrides, newline="exact")


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return llava_1_5.entries_of(config, base, ARCHITECTURE, {"model_type": MODEL_TYPE})
