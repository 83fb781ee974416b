"""SmolVLM and SmolVLM2 (arXiv 2504.05299): Idefics3 with a small encoder and SmolLM2; videos are not read."""

from typing import Any

from jaxrl_llm.models.families import idefics3
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "smolvlm"
ARCHITECTURE = {"lm": "SmolVLMForConditionalGeneration", "score": "SmolVLMForSequenceClassification"}
KEYS = idefics3.KEYS


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    return idefics3.config_of(hf, ARCHITECTURE, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return idefics3.entries_of(config, base, ARCHITECTURE, MODEL_TYPE)
