"""Arcee's Trinity models: experts behind dense layers, which a sigmoid router chooses, and gated attention.

Three of four layers have a window and rotary positions, the others neither; each part has norms before and behind it.
"""

import math
from typing import Any

from jaxrl_llm.models.families import decoder, deepseek_v3, layer_types
from jaxrl_llm.models.families.decoder import LAYER, TensorName, linear
from jaxrl_llm.models.families.entries import computed, first_layers, positive
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "afmoe"
ARCHITECTURE = "Afmoe"
ROUTER = "router.gate"


def _keys(experts: tuple[TensorName, ...]) -> tuple[TensorName, ...]:
    return (
        *decoder.ENDS,
        TensorName("layers/input_norm/scale", f"{LAYER}input_layernorm.weight"),
        TensorName("layers/attention_out_norm/scale", f"{LAYER}post_attention_layernorm.weight"),
        TensorName("layers/post_attention_norm/scale", f"{LAYER}pre_mlp_layernorm.weight"),
        TensorName("layers/mlp_out_norm/scale", f"{LAYER}post_mlp_layernorm.weight"),
        *decoder.ATTENTION,
        *decoder.QK_NORMS,
        *linear("layers/attention/gate", f"{LAYER}self_attn.gate_proj"),
        *decoder.FEED_FORWARD,
        *deepseek_v3.beside_experts("mlp", "expert_bias"),
        *experts,
    )


KEYS = _keys(decoder.experts("mlp", router=ROUTER))
OTHER_KEYS = (_keys(decoder.stacked_experts("mlp", ROUTER)),)
DEFAULTS = {
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "sliding_window": 1024,
    "global_attn_every_n_layers": 4,
    "mup_enabled": False,
    "num_dense_layers": 1,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "num_shared_experts": 2,
    "moe_intermediate_size": 1408,
    "route_scale": 1.0,
}  # for entries that are left out
FIELDS = decoder.EXPERTS | decoder.ATTENTION_BIAS | {"routed_scale": "route_scale"}  # that are an entry each
# Entries of the files for transformers 4, with which routers do what those of transformers 5 do.
FIXED = {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    computed(hf, FIXED)
    every, channels = positive(hf, "global_attn_every_n_layers"), positive(hf, "moe_intermediate_size")
    windows = layer_types.read(hf, lambda layer: (layer + 1) % every != 0)
    own = {
        **windows,
        **decoder.read_fields(hf, FIELDS),
        "unrotated_layers": layer_types.outside(hf, windows),
        "norms": "both",
        "qk_norm": "head",
        "attention_gate": "numbers",
        "embed_scale": math.sqrt(positive(hf, "hidden_size")) if hf["mup_enabled"] else 1.0,
        "shared_expert_ffn": channels * positive(hf, "num_shared_experts"),
        "dense_layers": first_layers(hf, "num_dense_layers"),
        "router_sigmoid": True,
        "router_correction": True,
        "normalize_top_k": True,
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = {
        **layer_types.write(config, base),
        **decoder.write_fields(config, FIELDS),
        "mup_enabled": config.embed_scale != 1.0,
        "num_shared_experts": config.shared_expert_ffn // max(config.expert_ffn, 1),
        "num_dense_layers": len(config.dense_layers),
    }
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
