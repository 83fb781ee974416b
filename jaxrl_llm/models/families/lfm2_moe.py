"""LFM2's mixtures of experts (LFM2-8B-A1B): experts behind the first layers, which a sigmoid router chooses."""

from typing import Any

from jaxrl_llm.models.families import decoder, lfm2, mixtral
from jaxrl_llm.models.families.decoder import LAYER, TensorName
from jaxrl_llm.models.families.entries import experts_of, first_layers, number, positive
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "lfm2_moe"
ARCHITECTURE = "Lfm2Moe"
KEYS, OTHER_KEYS = decoder.expert_tables(
    (*lfm2.KEYS, TensorName("layers/mlp/correction", f"{LAYER}feed_forward.expert_bias")), "feed_forward", mixtral.WORDS
)
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
    own = lfm2.mixer_fields(hf) | {
        **experts_of(hf, "num_experts", "num_experts_per_tok"),
        "dense_layers": first_layers(hf, "num_dense_layers"),
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
