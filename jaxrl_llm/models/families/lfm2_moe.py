"""LFM2's mixtures of experts (LFM2-8B-A1B): experts behind the first layers, which a sigmoid router chooses."""

from typing import Any

from jaxrl_llm.models.families import decoder, lfm2, mixtral
from jaxrl_llm.models.families.decoder import LAYER, TensorName
from jaxrl_llm.models.families.entries import first_layers
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
FIELDS = decoder.EXPERTS | {
    "router_correction": "use_expert_bias",
    "normalize_top_k": "norm_topk_prob",
    "routed_scale": "routed_scaling_factor",
}  # that are an entry each


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    own = lfm2.mixer_fields(hf) | {
        **decoder.read_fields(hf, FIELDS),
        "dense_layers": first_layers(hf, "num_dense_layers"),
        "router_sigmoid": True,
        "top_k_epsilon": 1e-6,
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, rope={"theta": lfm2.THETA})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = lfm2.mixer_entries(config, base) | decoder.write_fields(config, FIELDS)
    own["num_dense_layers"] = len(config.dense_layers)
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
