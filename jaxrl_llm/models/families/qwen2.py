"""Qwen2 and Qwen2.5 (arXiv 2407.10671): biases on queries, keys and values."""

from typing import Any

from jaxrl_llm.models.families import decoder
from jaxrl_llm.models.transformer import ModelConfig

MODEL_TYPE = "qwen2"
ARCHITECTURE = "Qwen2"
KEYS = decoder.KEYS


def fits(config: ModelConfig) -> bool:
    """True when the family has every part of the net: biases on queries, keys and values alone."""
    return config.attention_bias and not (config.attention_output_bias or config.mlp_bias or config.qk_norm)


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    """The ModelConfig of a config.json; raises ConfigError for what the network does not compute."""
    return decoder.to_config(hf, ARCHITECTURE, {"attention_bias": True}, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The config.json of a net, over the entries of `base`."""
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, {})
