"""Command R and R+ (Cohere, 2024): attention and feed-forward side by side behind one layer norm, and no windows."""

from typing import Any

from jaxrl_llm.models.families import cohere2, decoder
from jaxrl_llm.models.families.entries import number, renamed
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "cohere"
ARCHITECTURE = "Cohere"
KEYS = (*cohere2.KEYS, *decoder.QK_NORMS)
NAMES = {"layer_norm_eps": "rms_norm_eps"}
DEFAULTS = {"rms_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | renamed(hf, NAMES)
    own = {
        **decoder.attention_biases(hf),
        "rope_interleaved": True,
        "norm_centred": True,
        "parallel_ffn": "shared",
        "qk_norm": "heads" if hf.get("use_qk_norm") else "",
        "logit_divisor": 1 / number("logit_scale", hf["logit_scale"], above=0),
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, rope={"theta": 500_000.0})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = {
        "attention_bias": config.attention_bias,
        "use_qk_norm": bool(config.qk_norm),
        "logit_scale": decoder.reciprocal(config.logit_divisor, (DEFAULTS | (base or {}))["logit_scale"]),
    }
    return decoder.from_own_names(config, base, NAMES, DEFAULTS, ARCHITECTURE, MODEL_TYPE, own)
