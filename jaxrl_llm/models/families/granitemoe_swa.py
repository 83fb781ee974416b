"""Granite's mixtures of experts with a shared one, and attention as Granite with windows."""

from typing import Any

from jaxrl_llm.models.families import decoder, granite_swa, granitemoe, granitemoehybrid, granitemoeshared
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "granitemoe_swa"
ARCHITECTURE = "GraniteMoeSWA"
KEYS = (*granitemoehybrid.as_modules(granitemoeshared.KEYS), granite_swa.SINKS)
DEFAULTS = granitemoe.DEFAULTS | {"sliding_window": 128}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    own = granitemoeshared.own_fields(hf) | granite_swa.attention(hf)
    return decoder.to_config(hf, ARCHITECTURE, own, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = granitemoeshared.own_entries(config) | granite_swa.entries(config, base)
    return decoder.from_config(granite_swa.one_rope(config, base), base, ARCHITECTURE, MODEL_TYPE, own)
