"""Jais 2 (MBZUAI, 2025): Llama's shape with layer norms, biases, and feed-forwards of squared ReLU without gates."""

from typing import Any

from jaxrl_llm.models.families import decoder, llama, nemotron
from jaxrl_llm.models.families.entries import renamed
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "jais2"
ARCHITECTURE = "Jais2"
KEYS = nemotron.KEYS
NAMES = {"layer_norm_eps": "rms_norm_eps"}
DEFAULTS = {
    "hidden_act": "relu2",
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "mlp_bias": True,
}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    """The ModelConfig of a config.json; raises ConfigError for what the network does not compute."""
    hf = DEFAULTS | renamed(hf, NAMES)
    own = {**llama.own_fields(hf), **decoder.LAYER_NORMS, "ffn_gate": False}
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, activations=decoder.PLAIN)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The config.json of a net, over the entries of `base`."""
    own = {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}
    return decoder.from_own_names(config, base, NAMES, DEFAULTS, ARCHITECTURE, MODEL_TYPE, own)
