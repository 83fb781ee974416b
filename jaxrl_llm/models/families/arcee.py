"""Arcee's AFM: Llama's shape, with feed-forwards of squared ReLU (arXiv 2109.08668) and without gates."""

from typing import Any

from jaxrl_llm.models.families import decoder, llama
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "arcee"
ARCHITECTURE = "Arcee"
KEYS = (*decoder.ENDS, *decoder.PRE_NORMS, *decoder.ATTENTION, *decoder.FEED_FORWARD[2:])
DEFAULTS = {"rms_norm_eps": 1e-5}  # for entries that are left out
ACTIVATIONS = {"relu2": "relu2"}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    own = decoder.read_fields(hf, llama.FIELDS) | {"ffn_gate": False}
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, activations=ACTIVATIONS)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = decoder.write_fields(config, llama.FIELDS) | ({"hidden_act": "relu2"} if base is None else {})
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
