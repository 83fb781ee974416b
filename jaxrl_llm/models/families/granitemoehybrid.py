"""Granite 4: Mamba-2 in most layers or in none, attention in the others; experts beside a shared one, or that alone."""

import math
from collections.abc import Iterable
from typing import Any

from jaxrl_llm.models.families import decoder, granite, mixtral
from jaxrl_llm.models.families.decoder import LAYER, TensorName, linear, maps
from jaxrl_llm.models.families.entries import mixer_types, mixers_of, number, positive, refuse
from jaxrl_llm.models.mixers.attention import Attention
from jaxrl_llm.models.mixers.mamba2 import Mamba2
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "granitemoehybrid"
ARCHITECTURE = "GraniteMoeHybrid"
EXPERTS = f"{LAYER}block_sparse_moe."


def shared_keys(path: str) -> tuple[TensorName, ...]:
    """The keys of what every token uses, gate and up in one tensor."""
    return maps(path, f"{LAYER}shared_mlp", {"gate": "input_linear", "up": "input_linear", "down": "output_linear"})


def mamba_keys(block: str, path: str = "layers/mamba") -> tuple[TensorName, ...]:
    """The keys of Mamba-2 at `path`, whose tensors' names begin with `block`."""
    return (
        *linear(f"{path}/into", f"{block}.in_proj"),
        TensorName(f"{path}/conv", f"{block}.conv1d.weight"),
        TensorName(f"{path}/conv_bias", f"{block}.conv1d.bias"),
        TensorName(f"{path}/log_decay", f"{block}.A_log"),
        TensorName(f"{path}/step_bias", f"{block}.dt_bias"),
        TensorName(f"{path}/skip", f"{block}.D"),
        TensorName(f"{path}/norm_scale", f"{block}.norm.weight"),
        *linear(f"{path}/out", f"{block}.out_proj"),
    )


EXPERT_KEYS = (
    TensorName("layers/mlp/router/kernel", f"{EXPERTS}router.layer.weight", transpose=True),
    TensorName("layers/mlp/experts/gate/kernel", f"{EXPERTS}input_linear.weight", transpose=True),
    TensorName("layers/mlp/experts/up/kernel", f"{EXPERTS}input_linear.weight", transpose=True),
    TensorName("layers/mlp/experts/down/kernel", f"{EXPERTS}output_linear.weight", transpose=True),
)
KEYS = (
    *decoder.ENDS,
    *decoder.PRE_NORMS,
    *decoder.ATTENTION,
    *mamba_keys(f"{LAYER}mamba"),
    *shared_keys("layers/mlp"),
    *shared_keys("layers/mlp/shared"),
    *EXPERT_KEYS,
)
# What transformers' class calls parts of the block.
MODULES = {
    "input_linear.weight": "experts.gate_up_proj", "output_linear.weight": "experts.down_proj",
    "router.layer.weight": "router.weight",
}  # fmt: skip


def as_modules(keys: Iterable[TensorName]) -> tuple[TensorName, ...]:
    """The keys under the names of transformers' class."""
    return tuple(
        key._replace(tensor=f"{EXPERTS}{MODULES[key.tensor.removeprefix(EXPERTS)]}")
        if key.tensor.startswith(EXPERTS) else key
        for key in keys
    )  # fmt: skip


MODULE_KEYS = as_modules(KEYS)
MIXERS = {"mamba": Mamba2, "linear_attention": Mamba2, "attention": Attention, "full_attention": Attention}
# The fields of Mamba-2 that are an entry each.
MAMBA_FIELDS = {
    "delta_key_heads": "mamba_n_groups",
    "delta_value_heads": "mamba_n_heads",
    "delta_key_dim": "mamba_d_state",
    "delta_conv": "mamba_d_conv",
    "conv_bias": "mamba_conv_bias",
    "state_bias": "mamba_proj_bias",
}
MAMBA_DEFAULTS = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
DEFAULTS = {
    "shared_intermediate_size": 1024,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.001,
    **MAMBA_DEFAULTS,
}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    layers, shared = positive(hf, "num_hidden_layers"), positive(hf, "shared_intermediate_size")
    types = hf.get("layer_types") or hf.get("layers_block_type")
    mixers = mixers_of({**hf, "layer_types": types}, MIXERS, lambda _: "mamba")
    own: dict[str, Any] = {
        **granite.multipliers(hf),
        **decoder.attention_biases(hf),
        "mixers": mixers,
        "unrotated_layers": () if hf.get("position_embedding_type") == "rope" else tuple(range(layers)),
    }
    if Mamba2 in mixers:
        own |= mamba_of(hf, positive(hf, "mamba_expand") * positive(hf, "hidden_size"), "mamba_expand * hidden_size")
    if hf["num_local_experts"]:
        own |= mixtral.experts(hf) | {"shared_expert_ffn": shared}
    else:
        own["ffn"] = shared
    return decoder.to_config(hf, ARCHITECTURE, own, overrides)


def mamba_of(hf: dict[str, Any], width: int, named: str) -> dict[str, Any]:
    """The ModelConfig fields of Mamba-2 with heads of `width` numbers together, `named` so; raises ConfigError as
    `mamba`."""
    fields = mamba(hf, MAMBA_FIELDS)
    heads = fields["delta_value_heads"]
    if width % heads or hf["mamba_d_head"] not in ("auto", width // heads):
        refuse("mamba_d_head", hf["mamba_d_head"], f"{named} / mamba_n_heads = {width / heads:g}")
    return fields | {"delta_value_dim": width // heads}


def mamba(hf: dict[str, Any], entries: dict[str, str]) -> dict[str, Any]:
    """The ModelConfig fields of Mamba-2 that are an entry each, and its `time_step_limit`.

    Raises ConfigError for heads that do not divide into groups, and a convolution over one token.
    """
    fields = decoder.read_fields(hf, entries)
    heads, groups = fields["delta_value_heads"], fields["delta_key_heads"]
    if fields["delta_conv"] < 2:
        refuse(entries["delta_conv"], 1, "numbers from 2")
    if heads % groups:
        refuse(entries["delta_value_heads"], heads, f"multiples of {entries['delta_key_heads']} = {groups}")
    # Transformers writes what is no number of JSON as an object.
    limits = [x.get("__float__") if isinstance(x, dict) else x for x in hf.get("time_step_limit") or (0.0, math.inf)]
    if len(limits) != 2:
        refuse("time_step_limit", limits, "two numbers")
    low, high = (math.inf if x in ("Infinity", math.inf) else number("time_step_limit", x) for x in limits)
    return fields | {"time_step_limit": (low, high)}


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own: dict[str, Any] = {**granite.multiplier_entries(config), "attention_bias": config.attention_bias}
    if config.experts:
        own |= mixtral.expert_entries(config)
        own |= {"intermediate_size": config.expert_ffn, "shared_intermediate_size": config.shared_expert_ffn}
    else:
        own |= {"num_local_experts": 0, "shared_intermediate_size": config.ffn}
    if base is None:
        has_states = config.delta_value_heads > 0
        own |= decoder.write_fields(config, MAMBA_FIELDS) if has_states else {"mamba_n_heads": 1}
        own |= {
            "mamba_expand": max(config.delta_value_heads * config.delta_value_dim // config.width, 1),
            "position_embedding_type": None if config.unrotated_layers else "rope",
            "layer_types": mixer_types(config, {"linear_attention": Mamba2, "full_attention": Attention}),
        }
    elif "intermediate_size" in base and not config.experts:
        own["intermediate_size"] = base["intermediate_size"]
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
