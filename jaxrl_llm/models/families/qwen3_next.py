"""Qwen3-Next (Qwen3-Next-80B-A3B): gated delta nets in three of four layers, gated attention in the fourth, experts."""

from typing import Any

from jaxrl_llm.models.families import decoder, qwen2_moe
from jaxrl_llm.models.families.decoder import LAYER, TensorName, linear, maps
from jaxrl_llm.models.families.entries import mixers_of, positive, refuse
from jaxrl_llm.models.mixers.attention import Attention
from jaxrl_llm.models.mixers.delta_net import GatedDeltaNet
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "qwen3_next"
ARCHITECTURE = "Qwen3Next"
# All but the delta nets' projections and the experts.
DELTA_KEYS = (
    *decoder.KEYS,
    *decoder.QK_NORMS,
    TensorName("layers/delta/conv", f"{LAYER}linear_attn.conv1d.weight"),
    TensorName("layers/delta/log_decay", f"{LAYER}linear_attn.A_log"),
    TensorName("layers/delta/step_bias", f"{LAYER}linear_attn.dt_bias"),
    TensorName("layers/delta/norm_scale", f"{LAYER}linear_attn.norm.weight"),
    *linear("layers/delta/out", f"{LAYER}linear_attn.out_proj"),
)
MAPS = maps("layers/delta", f"{LAYER}linear_attn", {"qkvz": "in_proj_qkvz", "ba": "in_proj_ba"})
KEYS, OTHER_KEYS = decoder.expert_tables((*DELTA_KEYS, *MAPS, *qwen2_moe.SHARED))
LINEAR, FULL = "linear_attention", "full_attention"
# The fields of delta nets that are an entry each, integers from 1, and their values where they are left out.
SIZES = {
    "delta_conv": ("linear_conv_kernel_dim", 4),
    "delta_key_dim": ("linear_key_head_dim", 128),
    "delta_value_dim": ("linear_value_head_dim", 128),
    "delta_key_heads": ("linear_num_key_heads", 16),
    "delta_value_heads": ("linear_num_value_heads", 32),
}
DELTA_DEFAULTS = {
    **dict(SIZES.values()),
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
}
EXPERT_DEFAULTS = {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
}
DEFAULTS = DELTA_DEFAULTS | EXPERT_DEFAULTS | {"num_experts_per_tok": 10, "num_experts": 512}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    own = delta_fields(hf, GatedDeltaNet) | qwen2_moe.experts(hf)
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, rope={"partial": True})


def delta_fields(
    hf: dict[str, Any], net: type[GatedDeltaNet], attention: type[Attention] = Attention
) -> dict[str, Any]:
    """The ModelConfig fields of delta nets beside gated `attention`, of entries with their defaults.

    Raises ConfigError for types of layers and sizes that the network does not compute.
    """
    every = positive(hf, "full_attention_interval")
    sizes = {field: positive(hf, entry) for field, (entry, _) in SIZES.items()}
    if sizes["delta_conv"] < 2:
        refuse("linear_conv_kernel_dim", 1, "numbers from 2")
    if sizes["delta_value_heads"] % sizes["delta_key_heads"]:
        keys = sizes["delta_key_heads"]
        refuse("linear_num_value_heads", sizes["delta_value_heads"], f"multiples of linear_num_key_heads = {keys}")
    return {
        **sizes,
        "mixers": mixers_of(hf, {LINEAR: net, FULL: attention}, lambda layer: LINEAR if (layer + 1) % every else FULL),
        "norm_offset": 1.0,
        "qk_norm": "head",
        "attention_gate": "queries",
        **decoder.attention_biases(hf),
    }


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = delta_entries(config, base) | qwen2_moe.expert_entries(config, base)
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)


def delta_entries(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The entries of config.json that `delta_fields` reads."""
    entries = {entry: getattr(config, field) for field, (entry, _) in SIZES.items()}
    entries["attention_bias"] = config.attention_bias
    if base is None:
        attends = (issubclass(kind.mixer, Attention) for kind in config.layer_configs)
        entries["layer_types"] = [FULL if full else LINEAR for full in attends]
    return entries
