"""Granite 3's mixtures of experts: Granite with experts in every layer."""

from typing import Any

from jaxrl_llm.models.families import decoder, granite, granitemoehybrid, mixtral
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "granitemoe"
ARCHITECTURE = "GraniteMoe"
KEYS = (*decoder.ENDS, *decoder.PRE_NORMS, *decoder.ATTENTION, *granitemoehybrid.EXPERT_KEYS)
MODULE_KEYS = granitemoehybrid.as_modules(KEYS)
DEFAULTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    return decoder.to_config(DEFAULTS | hf, ARCHITECTURE, own_fields(hf), overrides)


def own_fields(hf: dict[str, Any]) -> dict[str, Any]:
    """The ModelConfig fields of the family's own entries."""
    hf = DEFAULTS | hf
    return {**granite.multipliers(hf), **decoder.attention_biases(hf), **mixtral.experts(hf)}


def own_entries(config: ModelConfig) -> dict[str, Any]:
    """The entries of config.json that `own_fields` reads."""
    return {
        **granite.multiplier_entries(config),
        **mixtral.expert_entries(config),
        "attention_bias": config.attention_bias,
        "intermediate_size": config.expert_ffn,
    }


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own_entries(config))
