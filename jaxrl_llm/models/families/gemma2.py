"""Gemma 2 (arXiv 2408.00118): norms before and after each part, soft-capped logits, a window in every other layer."""

from typing import Any

from jaxrl_llm.models.families import decoder, gemma, layer_types
from jaxrl_llm.models.families.decoder import LAYER, TensorName
from jaxrl_llm.models.families.entries import number
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "gemma2"
ARCHITECTURE = "Gemma2"
NORMS = (
    TensorName("layers/input_norm/scale", f"{LAYER}input_layernorm.weight"),
    TensorName("layers/attention_out_norm/scale", f"{LAYER}post_attention_layernorm.weight"),
    TensorName("layers/post_attention_norm/scale", f"{LAYER}pre_feedforward_layernorm.weight"),
    TensorName("layers/mlp_out_norm/scale", f"{LAYER}post_feedforward_layernorm.weight"),
)
KEYS = (*decoder.ENDS, *NORMS, *decoder.ATTENTION, *decoder.FEED_FORWARD)
DEFAULTS = {
    **gemma.DEFAULTS,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh"}


def common(hf: dict[str, Any]) -> dict[str, Any]:
    """The ModelConfig fields that Gemma 2 and 3 share."""
    caps = {"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"}
    return {
        **gemma.common(hf),
        **{name: None if hf[cap] is None else number(cap, hf[cap], above=0) for name, cap in caps.items()},
        "norms": "both",
        "query_scale": number("query_pre_attn_scalar", hf["query_pre_attn_scalar"], above=0) ** -0.5,
    }


def own_entries(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The entries of config.json that `common` reads, and those of windows."""
    entries = {
        **layer_types.write(config, base),
        "attention_bias": config.attention_bias,
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
    }
    if base is not None:
        return entries
    scalar = config.head_dim if config.query_scale is None else round(config.query_scale**-2)
    return entries | {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": scalar}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    own = common(hf) | layer_types.read(hf, lambda layer: layer % 2 == 0)
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, activations=ACTIVATIONS)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own_entries(config, base))
