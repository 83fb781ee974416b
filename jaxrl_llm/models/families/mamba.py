"""Mamba (arXiv 2312.00752): a layer is Mamba-1 alone."""

from typing import Any

from jaxrl_llm.models.families import decoder
from jaxrl_llm.models.families.decoder import TensorName, linear, norms
from jaxrl_llm.models.families.entries import positive, refuse, renamed
from jaxrl_llm.models.mixers.mamba1 import Mamba1
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "mamba"
ARCHITECTURE = "Mamba"
BLOCK = "backbone.layers.{layer}.mixer"
AROUND = (
    TensorName("embed/weight", "backbone.embeddings.weight"),
    TensorName("norm/scale", "backbone.norm_f.weight"),
    *decoder.ENDS[2:],
    *norms("layers/", "backbone.layers.{layer}.", {"input_norm": "norm"}),
)


def mixer_keys(block: str) -> tuple[TensorName, ...]:
    """The keys of Mamba-1 whose tensors' names begin with `block`."""
    return (
        *linear("layers/mamba/into", f"{block}.in_proj"),
        TensorName("layers/mamba/conv", f"{block}.conv1d.weight"),
        TensorName("layers/mamba/conv_bias", f"{block}.conv1d.bias"),
        *linear("layers/mamba/x", f"{block}.x_proj"),
        TensorName("layers/mamba/dt/kernel", f"{block}.dt_proj.weight", transpose=True),
        TensorName("layers/mamba/step_bias", f"{block}.dt_proj.bias"),
        TensorName("layers/mamba/log_rates", f"{block}.A_log"),
        TensorName("layers/mamba/skip", f"{block}.D"),
        *linear("layers/mamba/out", f"{block}.out_proj"),
    )


KEYS = (*AROUND, *mixer_keys(BLOCK))
NAMES = {"layer_norm_epsilon": "rms_norm_eps"}
FIELDS = {
    "delta_key_dim": "state_size",
    "delta_conv": "conv_kernel",
    "conv_bias": "use_conv_bias",
    "state_bias": "use_bias",
}  # that are an entry each
DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "state_size": 16,
    "expand": 2,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": "auto",
    "initializer_range": 0.1,
    "tie_word_embeddings": True,
}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | renamed(hf, NAMES)
    return read(hf, Mamba1, selective(hf), ARCHITECTURE, overrides)


def selective(hf: dict[str, Any]) -> dict[str, Any]:
    """The ModelConfig fields of Mamba-1; raises ConfigError for a convolution over one token."""
    fields, width = decoder.read_fields(hf, FIELDS), positive(hf, "hidden_size")
    if fields["delta_conv"] < 2:
        refuse("conv_kernel", 1, "numbers from 2")
    by_width = hf.get("intermediate_size") is None
    return fields | {
        "delta_key_heads": 1,
        "delta_value_heads": positive(hf, "expand") * width if by_width else positive(hf, "intermediate_size"),
        "delta_value_dim": 1,
        "step_rank": -(-width // 16) if hf["time_step_rank"] == "auto" else positive(hf, "time_step_rank"),
    }


def read(
    hf: dict[str, Any], mixer: type, fields: dict[str, Any], family: str, overrides: dict[str, Any]
) -> ModelConfig:
    """The ModelConfig of a `family` whose layers are a `mixer` alone, which has these `fields`."""
    layers = positive(hf, "num_hidden_layers")
    # No layer attends: what is counted of heads is as little as there can be.
    hf = hf | {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 1}
    hf["intermediate_size"] = fields["delta_value_heads"] * fields["delta_value_dim"]
    alone = {"mixers": (mixer,) * layers, "bare_layers": tuple(range(layers)), "rotary_fraction": 0.0}
    return decoder.to_config(hf, family, alone | fields, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return write(config, base, NAMES, DEFAULTS, ARCHITECTURE, MODEL_TYPE, entries(config, base, FIELDS))


def entries(config: ModelConfig, base: dict[str, Any] | None, fields: dict[str, str]) -> dict[str, Any]:
    """The entries of `fields`, and without a `base` those that may be left to the width."""
    own = decoder.write_fields(config, fields)
    if base is None:
        states = config.delta_value_heads * config.delta_value_dim
        own |= {"time_step_rank": config.step_rank or "auto", "expand": max(states // config.width, 1)}
    return own


def write(
    config: ModelConfig,
    base: dict[str, Any] | None,
    names: dict[str, str],
    defaults: dict[str, Any],
    family: str,
    model_type: str,
    own: dict[str, Any],
) -> dict[str, Any]:
    """The entries of a `family` that `read` reads, of which it has `own` ones."""
    without = (*decoder.ROTARY_AND_GROUPED, "num_attention_heads")
    without = (*without, "max_position_embeddings") if base is None else without
    return decoder.from_own_names(config, base, names, defaults, family, model_type, own, without)
