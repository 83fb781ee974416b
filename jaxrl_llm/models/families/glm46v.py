"""GLM-4.6V's own type in transformers: glm4v under another name, around parts that have glm4v's."""

from typing import Any

from jaxrl_llm.models.families import glm4v, qwen_vl
from jaxrl_llm.models.families.entries import refuse
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "glm46v"
ARCHITECTURE = {"lm": "Glm46VForConditionalGeneration", "score": "Glm46VForSequenceClassification"}
KEYS = glm4v.KEYS
FAMILY = glm4v.FAMILY._replace(architecture=ARCHITECTURE)
TEXT = f"{glm4v.MODEL_TYPE}_text"


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    if (kind := (hf.get("text_config") or {}).get("model_type", TEXT)) != TEXT:
        refuse("text_config.model_type", kind, TEXT)
    return glm4v.read(hf, FAMILY, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    hf = qwen_vl.entries_of(config, base, FAMILY, {}, glm4v.encoder_entries(config))
    return hf | {"model_type": MODEL_TYPE}
