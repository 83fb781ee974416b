"""Qwen3, dense (arXiv 2505.09388): RMS norms on the queries and keys of each head."""

from typing import Any

from jaxrl_llm.models.families import decoder
from jaxrl_llm.models.families.decoder import Key
from jaxrl_llm.models.transformer import ModelConfig

MODEL_TYPE = "qwen3"
ARCHITECTURE = "Qwen3"
KEYS = (
    *decoder.KEYS,
    Key("layers/attention/q_norm/scale", "model.layers.{layer}.self_attn.q_norm.weight"),
    Key("layers/attention/k_norm/scale", "model.layers.{layer}.self_attn.k_norm.weight"),
)


def fits(config: ModelConfig) -> bool:
    """True when the family has every part of the net: query and key norms, attention biases on all maps or none."""
    return config.qk_norm and not config.mlp_bias and config.attention_bias == config.attention_output_bias


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    """The ModelConfig of a config.json; raises ConfigError for what the network does not compute."""
    bias = bool(hf.get("attention_bias", False))
    own = {"qk_norm": True, "attention_bias": bias, "attention_output_bias": bias}
    head_dim = (
        128 if hf.get("head_dim") is None else hf["head_dim"]
    )  # what the family means where the entry is left out
    return decoder.to_config({**hf, "head_dim": head_dim}, ARCHITECTURE, own, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The config.json of a net, over the entries of `base`."""
    own = {"attention_bias": config.attention_bias}
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
