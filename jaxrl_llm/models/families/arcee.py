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
    """The ModelConfig of a config.json; raises ConfigError for what the network does not compute."""
    hf = DEFAULTS | hf
    own = llama.own_fields(hf) | {"ffn_gate": False}
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, activations=ACTIVATIONS)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The config.json of a net, over the entries of `base`."""
    own: dict[str, Any] = {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}
    if base is None:
        own |= {"hidden_act": "relu2"}
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
