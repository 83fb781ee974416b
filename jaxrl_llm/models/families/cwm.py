"""Code World Model (arXiv 2510.02387): Llama's shape, with windows in three of four layers."""

import functools
from typing import Any

from jaxrl_llm.models.families import decoder, layer_types, rotary
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "cwm"
ARCHITECTURE = "Cwm"
KEYS = decoder.KEYS
ROPE = {
    "rope_type": "llama3", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
with_rope = functools.partial(rotary.with_default, ROPE, unless=(*rotary.BLOCKS, "rope_theta"))
DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "sliding_window": 8192,
}  # for entries that are left out, as is ROPE


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | with_rope(hf)
    own = {**layer_types.read(hf, lambda layer: layer % 4 != 0), "mlp_bias": bool(hf.get("mlp_bias", False))}
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, rope={"theta": ROPE["rope_theta"]})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = {"mlp_bias": config.mlp_bias, **layer_types.write(config, base)}
    own |= {"bos_token_id": 128_000} if base is None else {}  # it may not be null
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own, rope=with_rope)
