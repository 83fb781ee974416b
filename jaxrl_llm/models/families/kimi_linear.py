"""Kimi Linear (arXiv 2510.26692): Kimi delta attention in three of four layers, latent attention without rotary
positions in the fourth, and experts as DeepSeek-V3."""

import math
from typing import Any

from jaxrl_llm.models.families import decoder, deepseek_v3, mixtral, olmo_hybrid
from jaxrl_llm.models.families.decoder import LAYER, TensorName, linear, maps
from jaxrl_llm.models.families.entries import (
    computed,
    dense_before_sparse,
    mixer_types,
    mixers_of,
    mlp_types,
    positive,
    refuse,
)
from jaxrl_llm.models.mixers.kimi_delta import KimiDelta
from jaxrl_llm.models.mixers.latent_attention import LatentAttention
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "kimi_linear"
ARCHITECTURE = "KimiLinear"
NET = f"{LAYER}self_attn"
MIXERS = {"linear_attention": KimiDelta, "full_attention": LatentAttention}


def table(block: str, gate: str, experts: tuple[TensorName, ...]) -> tuple[TensorName, ...]:
    """The keys of files in which the experts' names begin with `block`, and those of the decays with `gate`."""
    return (
        *decoder.ENDS,
        *decoder.PRE_NORMS,
        *deepseek_v3.LATENT_KEYS,
        *olmo_hybrid.conv_keys(NET),
        *linear("layers/delta/f_a", f"{NET}.{gate}f_a_proj"),
        *linear("layers/delta/f_b", f"{NET}.{gate}f_b_proj"),
        TensorName("layers/delta/log_decay", f"{NET}.{gate}A_log"),
        TensorName("layers/delta/step_bias", f"{NET}.{gate}dt_bias"),
        *maps("layers/delta", NET, {"g_a": "g_a_proj", "g_b": "g_b_proj"}),
        *decoder.FEED_FORWARD,
        *deepseek_v3.beside_experts(block),
        *experts,
    )


KEYS = table("block_sparse_moe", "", decoder.experts("block_sparse_moe", mixtral.WORDS))
MODULE_KEYS = table("mlp", "forget_gate.", decoder.stacked_experts("mlp"))
# Transformers writes the dense layers' names as those of experts.
OTHER_KEYS = (
    tuple(
        key._replace(tensor=key.tensor.replace(".mlp.", ".block_sparse_moe.")) if key in decoder.FEED_FORWARD else key
        for key in KEYS
    ),
    MODULE_KEYS,
)
# The fields of delta attention that are an entry each, their names among `linear_attn_config`, and their defaults.
SIZES = {
    "delta_key_heads": ("linear_num_heads", "num_heads", 32),
    "delta_key_dim": ("linear_head_dim", "head_dim", 128),
    "delta_conv": ("linear_conv_kernel_dim", "short_conv_kernel_size", 4),
}
# The entries of this family, by the names that DeepSeek-V3 has for them.
NAMES = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
}
DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 1024,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_renormalize": True,
    "routed_scaling_factor": 2.446,
}  # for entries that are left out
# Entries of the files for transformers 4, with which the model does what that of transformers 5 does.
FIXED = {"moe_router_activation_func": "sigmoid", "mla_use_nope": True, "moe_layer_freq": 1}


def floor_of(entry: str, value: Any) -> float | None:
    """The floor of the log decays that an entry gives; raises ConfigError for anything else than numbers below 0."""
    if value is not None and (not isinstance(value, int | float) or not -math.inf < value < 0):
        refuse(entry, value, "numbers below 0")
    return value if value is None else float(value)


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    computed(hf, FIXED)
    layers, given = positive(hf, "num_hidden_layers"), hf.get("linear_attn_config") or {}
    sizes = {name: given.get(short, hf.get(name, default)) for name, short, default in SIZES.values()}
    fields = {field: positive(sizes, entry) for field, (entry, *_) in SIZES.items()}
    if fields["delta_conv"] < 2:
        refuse("linear_conv_kernel_dim", 1, "numbers from 2")
    full = given.get("full_attn_layers")  # which counts from 1
    full = range(5, layers + 1, 4) if full is None else full
    if not isinstance(full, list | range):
        refuse("linear_attn_config.full_attn_layers", full, "a list")
    dense = dense_before_sparse(hf, hf.get("first_k_dense_replace", 1) or 0)
    own = fields | {
        "mixers": mixers_of(hf, MIXERS, lambda layer: "full_attention" if layer + 1 in full else "linear_attention"),
        "delta_value_heads": fields["delta_key_heads"],
        "delta_value_dim": fields["delta_key_dim"],
        "unrotated_layers": tuple(range(layers)),
    }
    renamed = {theirs: hf[name] for theirs, name in NAMES.items()}
    renamed |= {"first_k_dense_replace": dense, "rope_interleave": False}
    return deepseek_v3.read({**hf, **renamed}, ARCHITECTURE, overrides, own)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    left_out = ("rope_interleave", "first_k_dense_replace", "num_nextn_predict_layers")
    entries = {x: value for x, value in deepseek_v3.entries(config, base).items() if x not in left_out}
    own = {NAMES.get(entry, entry): value for entry, value in entries.items()}
    if base is None:
        own |= {entry: getattr(config, field) for field, (entry, *_) in SIZES.items()}
        own["layer_types"] = mixer_types(config, MIXERS)
        own["mlp_layer_types"] = mlp_types(config)
    else:  # in files for transformers 4 it is a number of nothing
        own["head_dim"] = base.get("head_dim", own["head_dim"])
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
