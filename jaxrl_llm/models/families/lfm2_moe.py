"""LFM2's mixtures of experts (LFM2-8B-A1B): experts behind the first layers, which a sigmoid router chooses."""

from typing import Any

from jaxrl_llm.models.families import decoder, lfm2
from jaxrl_llm.models.families.decoder import LAYER, TensorName
from jaxrl_llm.models.families.entries import number, positive, refuse
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "lfm2_moe"
ARCHITECTURE = "Lfm2Moe"
_COMMON = (*lfm2.KEYS, TensorName("layers/mlp/correction", f"{LAYER}feed_forward.expert_bias"))
KEYS = (*_COMMON, *decoder.experts("feed_forward", "w1", "w3", "w2"))
OTHER_KEYS = ((*_COMMON, *decoder.stacked_experts("feed_forward")),)
DEFAULTS = lfm2.MIXER_DEFAULTS | {
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "use_expert_bias": True,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    """The ModelConfig of a config.json; raises ConfigError for what the network does not compute."""
    hf = DEFAULTS | hf
    layers, dense = positive(hf, "num_hidden_layers"), int(number("num_dense_layers", hf["num_dense_layers"]))
    experts, chosen = positive(hf, "num_experts"), positive(hf, "num_experts_per_tok")
    if dense >= layers:
        refuse("num_dense_layers", dense, f"numbers below num_hidden_layers = {layers}")
    if chosen > experts:
        refuse("num_experts_per_tok", chosen, f"up to num_experts = {experts}")
    own = lfm2.mixer_fields(hf) | {
        "dense_layers": tuple(range(dense)),
        "experts": experts,
        "experts_per_token": chosen,
        "expert_ffn": positive(hf, "moe_intermediate_size"),
        "router_sigmoid": True,
        "router_correction": bool(hf["use_expert_bias"]),
        "normalize_top_k": bool(hf["norm_topk_prob"]),
        "top_k_epsilon": 1e-6,
        "routed_scale": number("routed_scaling_factor", hf["routed_scaling_factor"]),
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, rope={"theta": lfm2.THETA})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The config.json of a net, over the entries of `base`."""
    own = lfm2.mixer_entries(config, base) | {
        "num_dense_layers": len(config.dense_layers),
        "num_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_ffn,
        "use_expert_bias": config.router_correction,
        "norm_topk_prob": config.normalize_top_k,
        "routed_scaling_factor": config.routed_scale,
    }
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
