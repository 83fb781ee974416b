"""Mixtral (arXiv 2401.04088): Mistral with a mixture of experts in every layer."""

from typing import Any

from jaxrl_llm.models.families import decoder, layer_types
from jaxrl_llm.models.families.entries import refuse
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "mixtral"
ARCHITECTURE = "Mixtral"
WORDS = {"gate": "w1", "up": "w3", "down": "w2"}
KEYS, OTHER_KEYS = decoder.expert_tables(
    (*decoder.ENDS, *decoder.PRE_NORMS, *decoder.ATTENTION), "block_sparse_moe", WORDS, stacked="mlp"
)
DEFAULTS = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.001,
}  # for entries that are left out
FIELDS = {
    "experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
    "router_aux_loss_coef": "router_aux_loss_coef",
}  # that are an entry each
THETA = 1_000_000.0


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    own = layer_types.read_uniform(hf) | experts(hf)
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, rope={"theta": THETA})


def experts(hf: dict[str, Any]) -> dict[str, Any]:
    """The ModelConfig fields of the experts, all of whose entries are there."""
    if hf.get("router_jitter_noise"):
        refuse("router_jitter_noise", hf["router_jitter_noise"], "0")
    return decoder.read_fields(hf, FIELDS | {"expert_ffn": "intermediate_size"}) | {"normalize_top_k": True}


def expert_entries(config: ModelConfig) -> dict[str, Any]:
    """The entries of config.json that `experts` reads, but for the sizes that all families have."""
    return decoder.write_fields(config, FIELDS)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = {"sliding_window": config.sliding_window, **expert_entries(config)}
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
