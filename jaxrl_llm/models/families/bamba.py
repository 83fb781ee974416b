"""Bamba (IBM, Princeton, CMU and UIUC, 2024): Mamba-2 in most layers, attention of which half of each head is rotated
in the others."""

from typing import Any

from jaxrl_llm.models.families import decoder, granitemoehybrid, rotary
from jaxrl_llm.models.families.decoder import LAYER, TensorName
from jaxrl_llm.models.families.entries import positive, refuse
from jaxrl_llm.models.mixers.attention import Attention
from jaxrl_llm.models.mixers.mamba2 import Mamba2
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "bamba"
ARCHITECTURE = "Bamba"
KEYS = (
    *(key for key in decoder.ENDS if key.path != "norm/scale"),
    TensorName("norm/scale", "model.final_layernorm.weight"),
    TensorName("layers/input_norm/scale", f"{LAYER}input_layernorm.weight"),
    TensorName("layers/post_attention_norm/scale", f"{LAYER}pre_ff_layernorm.weight"),
    *decoder.ATTENTION,
    *granitemoehybrid.mamba_keys(f"{LAYER}mamba"),
    *decoder.maps("layers/mlp", f"{LAYER}feed_forward", decoder.GATED),
)
DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, **granitemoehybrid.MAMBA_DEFAULTS}  # for entries left out
HALF = 0.5  # of each head is rotated where the rotary parameters do not say it, whatever another entry says


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    """The ModelConfig of a config.json; raises ConfigError for what the network does not compute."""
    hf = with_half(DEFAULTS | hf)
    layers, attending = positive(hf, "num_hidden_layers"), hf.get("attn_layer_indices") or []
    if not isinstance(attending, list) or any(type(x) is not int or not 0 <= x < layers for x in attending):
        refuse("attn_layer_indices", attending, f"a list of integers from 0 to num_hidden_layers - 1 = {layers - 1}")
    width = positive(hf, "mamba_expand") * positive(hf, "hidden_size")
    own = granitemoehybrid.mamba_of(hf, width, "mamba_expand * hidden_size") | {
        **decoder.attention_biases(hf),
        "mlp_bias": bool(hf.get("mlp_bias", False)),
        "mixers": tuple(Attention if layer in attending else Mamba2 for layer in range(layers)),
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, rope={"partial": True})


def with_half(hf: dict[str, Any]) -> dict[str, Any]:
    """The entries, with the part of each head that is rotated."""
    return hf | {"partial_rotary_factor": HALF}


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The config.json of a net, over the entries of `base`."""
    attending = [layer for layer, kind in enumerate(config.layer_configs) if kind.mixer is Attention]
    own: dict[str, Any] = {
        **{entry: getattr(config, field) for field, entry in granitemoehybrid.SIZES.items()},
        "attn_layer_indices": attending or (base or {}).get("attn_layer_indices"),
        "mamba_expand": config.delta_value_heads * config.delta_value_dim // config.width,
        "mamba_conv_bias": config.conv_bias,
        "mamba_proj_bias": config.state_bias,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }
    if base is None:
        own |= {"mamba_d_head": "auto"}
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own, rope=with_half, write=_write_rope)


def _write_rope(config: ModelConfig) -> dict[str, Any]:
    """The rotary entries of a ModelConfig: transformers reads the part that is rotated among the parameters alone."""
    given = rotary.write(config)
    scaling = given["rope_scaling"] or {"rope_type": "default"}
    parameters = {**scaling, "rope_theta": given["rope_theta"], "partial_rotary_factor": config.rotary_fraction}
    return {"rope_parameters": parameters}
