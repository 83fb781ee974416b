"""Mixtral (arXiv 2401.04088): Mistral with a mixture of experts in every layer."""

from typing import Any

from jaxrl_llm.models.families import decoder, layer_types
from jaxrl_llm.models.families.entries import number, positive, refuse
from jaxrl_llm.models.transformer import ModelConfig

MODEL_TYPE = "mixtral"
ARCHITECTURE = "Mixtral"
_COMMON = (*decoder.ENDS, *decoder.PRE_NORMS, *decoder.ATTENTION)
KEYS = (*_COMMON, *decoder.experts("block_sparse_moe", "w1", "w3", "w2"))
OTHER_KEYS = ((*_COMMON, *decoder.stacked_experts("mlp")),)
DEFAULTS = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.001,
}  # for entries that are left out
THETA = 1_000_000.0


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    """The ModelConfig of a config.json; raises ConfigError for what the network does not compute."""
    hf = DEFAULTS | hf
    experts, chosen = positive(hf, "num_local_experts"), positive(hf, "num_experts_per_tok")
    if chosen > experts:
        refuse("num_experts_per_tok", chosen, f"up to num_local_experts = {experts}")
    if hf.get("router_jitter_noise"):
        refuse("router_jitter_noise", hf["router_jitter_noise"], "0")
    own = {
        **layer_types.read_uniform(hf),
        "experts": experts,
        "experts_per_token": chosen,
        "expert_ffn": positive(hf, "intermediate_size"),
        "normalize_top_k": True,
        "router_aux_loss_coef": number("router_aux_loss_coef", hf["router_aux_loss_coef"]),
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, rope={"theta": THETA})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The config.json of a net, over the entries of `base`."""
    own = {
        "sliding_window": config.sliding_window,
        "num_local_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "router_aux_loss_coef": config.router_aux_loss_coef,
    }
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
