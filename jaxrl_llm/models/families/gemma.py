"""Gemma (arXiv 2403.08295): scaled embeddings, norms that multiply by 1 + scale, a tied head, gelu."""

import math
from typing import Any

from jaxrl_llm.models.families import decoder
from jaxrl_llm.models.families.entries import positive
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "gemma"
ARCHITECTURE = "Gemma"
KEYS = decoder.KEYS
DEFAULTS = {"tie_word_embeddings": True, "head_dim": 256}  # for entries that are left out
ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_tanh"}  # early files say gelu and mean the other


def common(hf: dict[str, Any]) -> dict[str, Any]:
    """The ModelConfig fields that all versions of Gemma share."""
    scale = math.sqrt(positive(hf, "hidden_size"))
    return {"norm_offset": 1.0, "embed_scale": scale, **decoder.attention_biases(hf)}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    return decoder.to_config(hf, ARCHITECTURE, common(hf), overrides, activations=ACTIVATIONS)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = {"attention_bias": config.attention_bias}
    if base is None:
        own |= {"hidden_act": "gelu_pytorch_tanh"}
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
