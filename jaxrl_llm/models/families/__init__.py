"""Model families: one file per Hugging Face `model_type`, with its config and its tensor names in both directions.

A family is a module with `MODEL_TYPE`, `ARCHITECTURE`, `KEYS`, `to_config`, `from_config` and `fits`.
"""

from types import ModuleType
from typing import Any

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.families import llama, qwen2, qwen3
from jaxrl_llm.models.transformer import ModelConfig

FAMILIES = {module.MODEL_TYPE: module for module in (llama, qwen2, qwen3)}


def family_of(hf: dict[str, Any]) -> ModuleType:
    """The family module of a config.json; raises ConfigError for an unsupported model_type."""
    model_type = hf.get("model_type")
    if model_type not in FAMILIES:
        raise ConfigError(f"model_type {model_type!r} is not supported; supported are {', '.join(FAMILIES)}.")
    return FAMILIES[model_type]


def family_for(config: ModelConfig) -> ModuleType:
    """The first family that can hold a net of this shape; raises ConfigError where none can."""
    for module in FAMILIES.values():
        if module.fits(config):
            return module
    raise ConfigError(
        f"no family of {', '.join(FAMILIES)} has attention_bias={config.attention_bias}, attention_output_bias="
        f"{config.attention_output_bias}, mlp_bias={config.mlp_bias} and qk_norm={config.qk_norm} together."
    )
