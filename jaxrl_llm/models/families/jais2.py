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
    hf = DEFAULTS | renamed(hf, NAMES)
    own = {**decoder.read_fields(hf, llama.FIELDS), **decoder.LAYER_NORMS, "ffn_gate": False}
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, activations=decoder.PLAIN)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = decoder.write_fields(config, llama.FIELDS)
    return decoder.from_own_names(config, base, NAMES, DEFAULTS, ARCHITECTURE, MODEL_TYPE, own)
