"""Ministral 8B (Mistral AI, 2024): Mistral with windows in some layers."""

from typing import Any

from jaxrl_llm.models.families import decoder, layer_types, mistral
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "ministral"
ARCHITECTURE = "Ministral"
KEYS = decoder.KEYS


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = mistral.DEFAULTS | hf
    windows = layer_types.read(hf, lambda _: hf["sliding_window"] is not None)
    return decoder.to_config(hf, ARCHITECTURE, windows, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, layer_types.write(config, base))
