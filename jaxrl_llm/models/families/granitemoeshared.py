"""Granite's mixtures of experts with an expert that every token uses."""

from typing import Any

from jaxrl_llm.models.families import decoder, granitemoe, granitemoehybrid
from jaxrl_llm.models.families.entries import positive
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "granitemoeshared"
ARCHITECTURE = "GraniteMoeShared"
KEYS = (*granitemoe.KEYS, *granitemoehybrid.shared_keys("layers/mlp/shared"))
MODULE_KEYS = granitemoehybrid.as_modules(KEYS)


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    return decoder.to_config(granitemoe.DEFAULTS | hf, ARCHITECTURE, own_fields(hf), overrides)


def own_fields(hf: dict[str, Any]) -> dict[str, Any]:
    """The ModelConfig fields of the family's own entries."""
    shared = positive(hf, "shared_intermediate_size") if hf.get("shared_intermediate_size") else 0
    return granitemoe.own_fields(hf) | {"shared_expert_ffn": shared}


def own_entries(config: ModelConfig) -> dict[str, Any]:
    """The entries of config.json that `own_fields` reads."""
    return granitemoe.own_entries(config) | {"shared_intermediate_size": config.shared_expert_ffn}


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own_entries(config))
