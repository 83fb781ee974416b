"""MiniCPM3 (arXiv 2404.06395): latent attention as DeepSeek-V2, dense feed-forwards, and multipliers in the manner of
muP."""

import math
from typing import Any

from jaxrl_llm.models.families import decoder, deepseek_v3, youtu
from jaxrl_llm.models.families.entries import number, positive
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "minicpm3"
ARCHITECTURE = "MiniCPM3"
KEYS = youtu.KEYS
DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.1,
    "tie_word_embeddings": True,
    "kv_lora_rank": 256,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": None,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
}  # for entries that are left out


def with_defaults(hf: dict[str, Any]) -> dict[str, Any]:
    """The entries with those that are left out, or null for no multiplier and for values of the usual size."""
    hf = DEFAULTS | hf | {"n_routed_experts": None, "rope_interleave": False}
    width, heads = positive(hf, "hidden_size"), positive(hf, "num_attention_heads")
    usual = {
        "v_head_dim": width // heads,
        "scale_depth": math.sqrt(positive(hf, "num_hidden_layers")),
        "dim_model_base": width,
    }
    return hf | {entry: value for entry, value in usual.items() if hf[entry] is None}


def multipliers(hf: dict[str, Any]) -> dict[str, float]:
    """The ModelConfig fields of the multipliers."""
    return {
        "embed_scale": number("scale_emb", hf["scale_emb"], above=0),
        "residual_scale": number("scale_depth", hf["scale_depth"], above=0) / math.sqrt(hf["num_hidden_layers"]),
        "logit_divisor": hf["hidden_size"] / number("dim_model_base", hf["dim_model_base"], above=0),
    }


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = with_defaults(hf)
    fields = multipliers(hf) | {"mlp_bias": bool(hf.get("mlp_bias", False))}
    return deepseek_v3.read(hf, ARCHITECTURE, overrides, fields)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = deepseek_v3.entries(config, base) | {"mlp_bias": config.mlp_bias}
    del own["rope_interleave"]
    given = {} if base is None else multipliers(with_defaults(base))
    if any(getattr(config, field) != given.get(field) for field in ("embed_scale", "residual_scale", "logit_divisor")):
        base_width = config.width / config.logit_divisor
        own["dim_model_base"] = int(base_width) if base_width.is_integer() else base_width  # transformers takes no 20.0
        own["scale_emb"] = config.embed_scale
        own["scale_depth"] = config.residual_scale * math.sqrt(config.layers)
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
