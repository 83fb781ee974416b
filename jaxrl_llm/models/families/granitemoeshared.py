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
    """The ModelConfig of a config.json; raises ConfigError for what the network does not compute."""
    shared = positive(hf, "shared_intermediate_size") if hf.get("shared_intermediate_size") else 0
    return decoder.to_config(
        granitemoe.DEFAULTS | hf, ARCHITECTURE, granitemoe.own_fields(hf) | {"shared_expert_ffn": shared}, overrides
    )


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The config.json of a net, over the entries of `base`."""
    own = granitemoe.own_entries(config) | {"shared_intermediate_size": config.shared_expert_ffn}
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
