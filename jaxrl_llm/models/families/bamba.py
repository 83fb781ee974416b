"""Bamba (IBM, Princeton, CMU and UIUC, 2024): Mamba-2 in most layers, attention of which half of each head is rotated
in the others."""

from typing import Any

from jaxrl_llm.models.families import decoder, granitemoehybrid, llama, rotary
from jaxrl_llm.models.families.decoder import LAYER, TensorName, norms
from jaxrl_llm.models.families.entries import positive, refuse
from jaxrl_llm.models.mixers.attention import Attention
from jaxrl_llm.models.mixers.mamba2 import Mamba2
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "bamba"
ARCHITECTURE = "Bamba"
ENDS_AND_NORMS = (
    *(key for key in decoder.ENDS if key.path != "norm/scale"),
    TensorName("norm/scale", "model.final_layernorm.weight"),
    *norms("layers/", LAYER, {"input_norm": "input_layernorm", "post_attention_norm": "pre_ff_layernorm"}),
)
KEYS = (
    *ENDS_AND_NORMS,
    *decoder.ATTENTION,
    *granitemoehybrid.mamba_keys(f"{LAYER}mamba"),
    *decoder.maps("layers/mlp", f"{LAYER}feed_forward", decoder.GATED),
)
DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, **granitemoehybrid.MAMBA_DEFAULTS}  # for entries left out
FIELDS = granitemoehybrid.MAMBA_FIELDS | llama.FIELDS  # that are an entry each
HALF = 0.5  # of each head is rotated where the rotary parameters do not say it, whatever another entry says


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = with_half(DEFAULTS | hf)
    layers, attending = positive(hf, "num_hidden_layers"), hf.get("attn_layer_indices") or []
    if not isinstance(attending, list) or any(type(x) is not int or not 0 <= x < layers for x in attending):
        refuse("attn_layer_indices", attending, f"a list of integers from 0 to num_hidden_layers - 1 = {layers - 1}")
    width = positive(hf, "mamba_expand") * positive(hf, "hidden_size")
    own = granitemoehybrid.mamba_of(hf, width, "mamba_expand * hidden_size") | {
        **decoder.read_fields(hf, llama.FIELDS),
        "mixers": tuple(Attention if layer in attending else Mamba2 for layer in range(layers)),
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, rope={"partial": True})


def with_half(hf: dict[str, Any]) -> dict[str, Any]:
    """The entries, with the part of each head that is rotated."""
    return hf | {"partial_rotary_factor": HALF}


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    attending = [layer for layer, kind in enumerate(config.layer_configs) if kind.mixer is Attention]
    own: dict[str, Any] = {
        **decoder.write_fields(config, FIELDS),
        "attn_layer_indices": attending or (base or {}).get("attn_layer_indices"),
        "mamba_expand": config.delta_value_heads * config.delta_value_dim // config.width,
    }
    if base is None:
        own |= {"mamba_d_head": "auto"}
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own, rope=with_half, write=_write_rope)


def _write_rope(config: ModelConfig) -> dict[str, Any]:
    """The rotary entries of a ModelConfig: transformers reads the part that is rotated among the parameters alone."""
    if config.local_rope is not None:
        refuse("rope_parameters", "a set for each type of layer", "one set of parameters for all layers")
    given = rotary.write(config)
    if config.local_rope is not None:  # of a net that is none of this family
        return given
    scaling = given["rope_scaling"] or {"rope_type": "default"}
    parameters = {**scaling, "rope_theta": given["rope_theta"], "partial_rotary_factor": config.rotary_fraction}
    return {"rope_parameters": parameters}
