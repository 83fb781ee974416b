"""Command R7B and Command A (arXiv 2504.00698): attention and feed-forward side by side behind one layer norm, and
windows with rotary positions in three of four layers, neither in the fourth."""

from typing import Any

from jaxrl_llm.models.families import decoder, layer_types
from jaxrl_llm.models.families.entries import number, positive, unset
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "cohere2"
ARCHITECTURE = "Cohere2"
KEYS = (*decoder.ENDS, decoder.PRE_NORMS[0], *decoder.ATTENTION, *decoder.FEED_FORWARD)
DEFAULTS = {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "tie_word_embeddings": True,
}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    unset(hf, "use_qk_norm")
    every = positive(hf, "sliding_window_pattern")
    windows = layer_types.read(hf, lambda layer: (layer + 1) % every != 0)
    own = {
        **windows,
        **decoder.attention_biases(hf),
        "unrotated_layers": layer_types.outside(hf, windows),
        "rope_interleaved": True,
        "norm_eps": number("layer_norm_eps", hf["layer_norm_eps"]),
        "norm_centred": True,
        "parallel_ffn": "shared",
        "logit_divisor": 1 / number("logit_scale", hf["logit_scale"], above=0),
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = {
        **layer_types.write(config, base),
        "attention_bias": config.attention_bias,
        "layer_norm_eps": config.norm_eps,
        "logit_scale": decoder.reciprocal(config.logit_divisor, (DEFAULTS | (base or {}))["logit_scale"]),
    }
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
