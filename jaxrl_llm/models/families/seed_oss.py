"""Seed-OSS: Llama's shape, with biases of queries, keys and values."""

from typing import Any

from jaxrl_llm.models.families import decoder
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "seed_oss"
ARCHITECTURE = "SeedOss"
KEYS = decoder.KEYS
# For entries that are left out.
DEFAULTS = {
    "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "attention_out_bias": False, "mlp_bias": False,
}  # fmt: skip
BIASES = {
    "attention_bias": "attention_bias", "attention_output_bias": "attention_out_bias", "mlp_bias": "mlp_bias"
}  # fmt: skip


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    """The ModelConfig of a config.json; raises ConfigError for what the network does not compute."""
    hf = DEFAULTS | hf
    own = {field: bool(hf[entry]) for field, entry in BIASES.items()}
    return decoder.to_config(hf, ARCHITECTURE, own, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The config.json of a net, over the entries of `base`."""
    own = {entry: getattr(config, field) for field, entry in BIASES.items()}
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
