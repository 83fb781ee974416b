"""Llama 1 to 3 (arXiv 2302.13971, 2407.21783), and the models that share their shape, such as SmolLM2."""

from typing import Any

from jaxrl_llm.models.families import decoder
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "llama"
ARCHITECTURE = "Llama"
KEYS = decoder.KEYS
FIELDS = decoder.ATTENTION_BIAS | {"mlp_bias": "mlp_bias"}  # of the ModelConfig, and their entries


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    """The ModelConfig of a config.json; raises ConfigError for what the network does not compute."""
    return decoder.to_config(hf, ARCHITECTURE, decoder.read_fields(hf, FIELDS), overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The config.json of a net, over the entries of `base`."""
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, decoder.write_fields(config, FIELDS))
