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
FIELDS = {"attention_bias": "attention_bias", "attention_output_bias": "attention_out_bias", "mlp_bias": "mlp_bias"}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    return decoder.to_config(hf, ARCHITECTURE, decoder.read_fields(hf, FIELDS), overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, decoder.write_fields(config, FIELDS))
