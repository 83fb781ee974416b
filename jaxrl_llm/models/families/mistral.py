"""Mistral (arXiv 2310.06825): Llama's shape, with a window over the latest tokens in every layer of some models."""

from typing import Any

from jaxrl_llm.models.families import decoder, layer_types
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "mistral"
ARCHITECTURE = "Mistral"
KEYS = decoder.KEYS
DEFAULTS = {"num_key_value_heads": 8, "sliding_window": 4096}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    return decoder.to_config(hf, ARCHITECTURE, layer_types.read_uniform(hf), overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, {"sliding_window": config.sliding_window})
