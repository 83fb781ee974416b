"""Qwen3, dense (arXiv 2505.09388): RMS norms on the queries and keys of each head."""

from typing import Any

from jaxrl_llm.models.families import decoder, qwen2
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "qwen3"
ARCHITECTURE = "Qwen3"
KEYS = (*decoder.KEYS, *decoder.QK_NORMS)
HEAD_DIM = 128  # where the entry is left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    own = {"qk_norm": "head", **decoder.attention_biases(hf), **qwen2.windows(hf)}
    head_dim = HEAD_DIM if hf.get("head_dim") is None else hf["head_dim"]
    return decoder.to_config({**hf, "head_dim": head_dim}, ARCHITECTURE, own, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = {"attention_bias": config.attention_bias, **qwen2.window_entries(config, base)}
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
