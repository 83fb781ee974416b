"""Arcee's Trinity models: experts behind dense layers, which a sigmoid router chooses, and gated attention.

Three of four layers have a window and rotary positions, the others neither; each part has norms before and behind it.
"""

import math
from typing import Any

from jaxrl_llm.models.families import decoder, layer_types
from jaxrl_llm.models.families.decoder import LAYER, TensorName, linear
from jaxrl_llm.models.families.entries import number, positive, refuse
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "afmoe"
ARCHITECTURE = "Afmoe"
ROUTER = "layers/mlp/router/kernel"


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
        TensorName(ROUTER, f"{LAYER}mlp.router.gate.weight", transpose=True),
        TensorName("layers/mlp/correction", f"{LAYER}mlp.expert_bias"),
        *linear("layers/mlp/shared/gate", f"{LAYER}mlp.shared_experts.gate_proj"),
        *linear("layers/mlp/shared/up", f"{LAYER}mlp.shared_experts.up_proj"),
        *linear("layers/mlp/shared/down", f"{LAYER}mlp.shared_experts.down_proj"),
        *(key for key in experts if key.path != ROUTER),
    )


KEYS = _keys(decoder.experts("mlp", "gate_proj", "up_proj", "down_proj"))
OTHER_KEYS = (_keys(decoder.stacked_experts("mlp")),)
SIZES = {"experts": "num_experts", "experts_per_token": "num_experts_per_tok", "expert_ffn": "moe_intermediate_size"}
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
# Entries of the files for transformers 4, with which routers do what those of transformers 5 do.
FIXED = {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    """The ModelConfig of a config.json; raises ConfigError for what the network does not compute."""
    hf = DEFAULTS | hf
    layers, every = positive(hf, "num_hidden_layers"), positive(hf, "global_attn_every_n_layers")
    dense = int(number("num_dense_layers", hf["num_dense_layers"]))
    sizes = {field: positive(hf, entry) for field, entry in SIZES.items()}
    for entry, value in FIXED.items():
        if hf.get(entry, value) != value:
            refuse(entry, hf[entry], f"{value}")
    if dense >= layers:
        refuse("num_dense_layers", dense, f"numbers below num_hidden_layers = {layers}")
    if sizes["experts_per_token"] > sizes["experts"]:
        refuse("num_experts_per_tok", sizes["experts_per_token"], f"up to num_experts = {sizes['experts']}")
    windows = layer_types.read(hf, lambda layer: (layer + 1) % every != 0)
    own = {
        **sizes,
        **windows,
        **decoder.attention_biases(hf),
        "unrotated_layers": tuple(i for i in range(layers) if i not in windows.get("sliding_layers", ())),
        "norms": "both",
        "qk_norm": True,
        "attention_gate_map": True,
        "embed_scale": math.sqrt(positive(hf, "hidden_size")) if hf["mup_enabled"] else 1.0,
        "shared_expert_ffn": sizes["expert_ffn"] * positive(hf, "num_shared_experts"),
        "dense_layers": tuple(range(dense)),
        "router_sigmoid": True,
        "router_correction": True,
        "normalize_top_k": True,
        "routed_scale": number("route_scale", hf["route_scale"]),
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The config.json of a net, over the entries of `base`."""
    own: dict[str, Any] = {
        **{entry: getattr(config, field) for field, entry in SIZES.items()},
        "attention_bias": config.attention_bias,
        "mup_enabled": config.embed_scale != 1.0,
        "num_shared_experts": config.shared_expert_ffn // max(config.expert_ffn, 1),
        "num_dense_layers": len(config.dense_layers),
        "route_scale": config.routed_scale,
    }
    if config.sliding_layers:
        own["sliding_window"] = config.sliding_window
    if base is None:
        own |= layer_types.write(config) | decoder.NO_IDS
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
