"""Granite with windows in three of four layers, attention sinks, and a base of rotary positions for each layer."""

import dataclasses
from typing import Any

from jaxrl_llm.models.families import decoder, granite, layer_types, llama, rotary
from jaxrl_llm.models.families.decoder import LAYER, TensorName
from jaxrl_llm.models.families.entries import number, positive, refuse
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "granite_swa"
ARCHITECTURE = "GraniteSWA"
SINKS = TensorName("layers/attention/sinks", f"{LAYER}self_attn.sinks")
KEYS = (*granite.KEYS, SINKS)
BASES = "layer_rope_theta"
DEFAULTS = {
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "sliding_window": 128,
}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    own = {**decoder.read_fields(hf, llama.FIELDS), **granite.multipliers(hf), **attention(hf)}
    return decoder.to_config(hf, ARCHITECTURE, own, overrides)


def attention(hf: dict[str, Any]) -> dict[str, Any]:
    """The ModelConfig fields of windows, sinks and rotary positions, whose bases are 0 in the layers without."""
    found: dict[str, Any] = layer_types.read(hf, lambda layer: layer % 4 != 0) | {"attention_sinks": True}
    layers, slides, bases = positive(hf, "num_hidden_layers"), found.get("sliding_layers", ()), hf.get(BASES)
    if bases is None:
        return found
    if not isinstance(bases, list | tuple) or len(bases) != layers:
        refuse(BASES, bases, f"one number for each of the {layers} layers")
    of_kind = [{number(BASES, x) for i, x in enumerate(bases) if x and (i in slides) == kind} for kind in (False, True)]
    if any(len(own) > 1 for own in of_kind):
        refuse(BASES, bases, "one number above 0 for the layers with a window, and one for the others")
    found["unrotated_layers"] = tuple(layer for layer, base in enumerate(bases) if not base)
    given = [rotary.read(hf)["rope"]._replace(theta=theta) for own in of_kind for theta in own]
    found |= {"rope": given[0]} if given else {}
    return found | ({"local_rope": given[1]} if len(set(given)) > 1 else {})


def entries(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The entries of config.json that `attention` reads."""
    own = layer_types.write(config, base)
    if base is None:
        ropes = [kind.rope for kind in config.layer_configs]
        own[BASES] = [0.0 if rope is None else rope.theta for rope in ropes]
    return own


def one_rope(config: ModelConfig, base: dict[str, Any] | None) -> ModelConfig:
    """The ModelConfig with the rotary positions that files have beside the bases of layers."""
    rope = config.rope if base is None else rotary.read(base)["rope"]
    return dataclasses.replace(config, rope=rope, local_rope=None)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = granite.multiplier_entries(config) | entries(config, base) | decoder.write_fields(config, llama.FIELDS)
    return decoder.from_config(one_rope(config, base), base, ARCHITECTURE, MODEL_TYPE, own)
