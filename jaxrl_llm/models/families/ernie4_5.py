"""ERNIE 4.5's dense models: Llama's shape, with neighbouring dimensions of a head rotated together."""

from typing import Any

from jaxrl_llm.models.families import decoder
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "ernie4_5"
ARCHITECTURE = "Ernie4_5"
KEYS = decoder.KEYS
DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}  # for entries that are left out
THETA = 500_000.0


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    biases = dict.fromkeys(decoder.BIASES, bool(hf.get("use_bias", False)))
    return decoder.to_config(hf, ARCHITECTURE, {"rope_interleaved": True, **biases}, overrides, rope={"theta": THETA})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, {"use_bias": config.attention_bias})
