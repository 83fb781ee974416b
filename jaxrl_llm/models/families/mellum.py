"""Mellum 2 (JetBrains): Qwen3's mixtures of experts with windows in some layers, which have rotary positions of their
own."""

import functools
from typing import Any

from jaxrl_llm.models.families import decoder, layer_types, qwen3_moe, rotary
from jaxrl_llm.models.families.entries import dense_layers, mlp_types
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "mellum"
ARCHITECTURE = "Mellum"
KEYS, OTHER_KEYS = qwen3_moe.KEYS, qwen3_moe.OTHER_KEYS
UNREAD = ("mtp.",)
DEFAULTS = {
    **qwen3_moe.DEFAULTS,
    "head_dim": 128,
    "sliding_window": 1024,
    "moe_intermediate_size": 896,
    "num_local_experts": 64,
    "norm_topk_prob": True,
}  # for entries that are left out
ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 500_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
with_ropes = functools.partial(rotary.with_default_sets, ROPES)


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = with_ropes(DEFAULTS | hf)
    own = {
        "qk_norm": "head",
        **decoder.attention_biases(hf),
        **layer_types.read(hf, lambda _: False),
        **qwen3_moe.experts(hf | {"decoder_sparse_step": 1}),
        "dense_layers": dense_layers(hf, 0),
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, rope={"by_type": True, "partial": True})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = {"attention_bias": config.attention_bias, **layer_types.write(config, base)}
    own |= qwen3_moe.expert_entries(config, {})
    own |= {"num_local_experts": config.experts, "mlp_layer_types": mlp_types(config)} if base is None else {}
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own, rope=with_ropes, write=rotary.write_sets)
