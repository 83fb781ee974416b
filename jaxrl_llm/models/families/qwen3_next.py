"""Qwen3-Next (Qwen3-Next-80B-A3B): gated delta nets in three of four layers, gated attention in the fourth, experts."""

from typing import Any

from jaxrl_llm.models.attention import Attention
from jaxrl_llm.models.delta_net import GatedDeltaNet
from jaxrl_llm.models.families import decoder, qwen2_moe, qwen3_moe
from jaxrl_llm.models.families.decoder import LAYER, TensorName, linear
from jaxrl_llm.models.families.entries import positive, refuse
from jaxrl_llm.models.transformer import ModelConfig

MODEL_TYPE = "qwen3_next"
ARCHITECTURE = "Qwen3Next"
_COMMON = (
    *decoder.KEYS,
    *decoder.QK_NORMS,
    *linear("layers/delta/qkvz", f"{LAYER}linear_attn.in_proj_qkvz"),
    *linear("layers/delta/ba", f"{LAYER}linear_attn.in_proj_ba"),
    TensorName("layers/delta/conv", f"{LAYER}linear_attn.conv1d.weight"),
    TensorName("layers/delta/log_decay", f"{LAYER}linear_attn.A_log"),
    TensorName("layers/delta/step_bias", f"{LAYER}linear_attn.dt_bias"),
    TensorName("layers/delta/norm_scale", f"{LAYER}linear_attn.norm.weight"),
    *linear("layers/delta/out", f"{LAYER}linear_attn.out_proj"),
    *qwen2_moe.SHARED,
)
KEYS = (*_COMMON, *decoder.experts("mlp", "gate_proj", "up_proj", "down_proj"))
OTHER_KEYS = ((*_COMMON, *decoder.stacked_experts("mlp")),)
MIXERS = {"linear_attention": GatedDeltaNet, "full_attention": Attention}
# The fields that are an entry each, integers from 1, and what they mean that are left out.
SIZES = {
    "delta_conv": ("linear_conv_kernel_dim", 4),
    "delta_key_dim": ("linear_key_head_dim", 128),
    "delta_value_dim": ("linear_value_head_dim", 128),
    "delta_key_heads": ("linear_num_key_heads", 16),
    "delta_value_heads": ("linear_num_value_heads", 32),
    "shared_expert_ffn": ("shared_expert_intermediate_size", 512),
}
DEFAULTS = {
    **dict(SIZES.values()),
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "moe_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
    "full_attention_interval": 4,
}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    """The ModelConfig of a config.json; raises ConfigError for what the network does not compute."""
    hf = DEFAULTS | hf
    layers, every = positive(hf, "num_hidden_layers"), positive(hf, "full_attention_interval")
    types = hf.get("layer_types") or [list(MIXERS)[(layer + 1) % every == 0] for layer in range(layers)]
    if len(types) != layers or set(types) - set(MIXERS):
        refuse("layer_types", types, f"{' or '.join(MIXERS)} for each of the {layers} layers")
    sizes = {field: positive(hf, entry) for field, (entry, _) in SIZES.items()}
    if sizes["delta_conv"] < 2:
        refuse("linear_conv_kernel_dim", 1, "numbers from 2")
    if sizes["delta_value_heads"] % sizes["delta_key_heads"]:
        keys = sizes["delta_key_heads"]
        refuse("linear_num_value_heads", sizes["delta_value_heads"], f"multiples of linear_num_key_heads = {keys}")
    bias = bool(hf.get("attention_bias", False))
    own = {
        **sizes,
        **qwen3_moe.experts(hf),
        "mixers": tuple(MIXERS[kind] for kind in types),
        "norm_offset": 1.0,
        "qk_norm": True,
        "attention_gate": True,
        "attention_bias": bias,
        "attention_output_bias": bias,
        "shared_expert_gate": True,
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, rope={"partial": True})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The config.json of a net, over the entries of `base`."""
    own = {
        **{entry: getattr(config, field) for field, (entry, _) in SIZES.items()},
        **qwen3_moe.expert_entries(config, base),
        "attention_bias": config.attention_bias,
    }
    if base is None:
        names = {mixer: kind for kind, mixer in MIXERS.items()}
        own["layer_types"] = [names.get(kind.mixer) for kind in config.layer_configs]
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
