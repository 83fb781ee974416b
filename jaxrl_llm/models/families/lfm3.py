"""LFM3 (Liquid AI): short convolutions, attention with a window and full attention, whose heads are gated.

Norms are before and behind each part. Full attention rotates a part of each head, by another base.
"""

from typing import Any

from jaxrl_llm.models.families import decoder, layer_types, lfm2
from jaxrl_llm.models.families.decoder import LAYER, linear, norms
from jaxrl_llm.models.families.entries import mixers_of, positive, refuse
from jaxrl_llm.models.mixers.attention import Attention
from jaxrl_llm.models.mixers.short_conv import ShortConv
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "lfm3"
ARCHITECTURE = "Lfm3"
COMMON = (
    *(key for key in lfm2.KEYS if not key.path.startswith("layers/attention/")),
    *norms("layers/", LAYER, {"attention_out_norm": "post_operator_norm", "mlp_out_norm": "post_ffn_norm"}),
    *decoder.ATTENTION,
    *decoder.QK_NORMS,
)
KEYS = (*COMMON, *linear("layers/attention/gate", f"{LAYER}self_attn.gate_proj"))
MODULE_KEYS = (*COMMON, *linear("layers/attention/gate", f"{LAYER}self_attn.g_proj"))
DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 128,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "conv_bias": False,
    "conv_L_cache": 7,
    "sliding_window": 256,
    "use_sandwich_norm": True,
    "use_attention_gate": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
    },
}  # for entries that are left out
FIELDS = lfm2.MIXER_FIELDS | decoder.ATTENTION_BIAS  # that are an entry each


class GatedAttention(Attention):
    """Attention whose gate has another name, for adapters, than that of the feed-forward."""

    gate_name = "z"


MIXERS = {"conv": ShortConv, layer_types.SLIDING: GatedAttention, layer_types.FULL: GatedAttention}


def usual_type(layer: int) -> str:
    """The type of a layer, of files without `layer_types`."""
    if layer % 4 == 2:
        return layer_types.FULL
    return layer_types.SLIDING if layer % 4 == 0 and layer else "conv"


def with_defaults(hf: dict[str, Any]) -> dict[str, Any]:
    """The entries with those that are left out, rotary parameters that are null among them."""
    return DEFAULTS | {name: value for name, value in hf.items() if (name, value) != ("rope_parameters", None)}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf, layers = with_defaults(hf), positive(hf, "num_hidden_layers")
    types = hf.get("layer_types") or [usual_type(layer) for layer in range(layers)]
    slides = tuple(layer for layer, kind in enumerate(types) if kind == layer_types.SLIDING)
    fields = decoder.read_fields(hf, FIELDS)
    if fields["conv_size"] < 2:
        refuse("conv_L_cache", fields["conv_size"], "numbers from 2")
    own = {
        "mixers": mixers_of(hf | {"layer_types": types}, MIXERS, usual_type),
        **({"sliding_window": positive(hf, "sliding_window"), "sliding_layers": slides} if slides else {}),
        "norms": "both" if hf["use_sandwich_norm"] else "pre",
        **fields,
        "qk_norm": "head",
        "attention_gate": "heads" if hf["use_attention_gate"] else "",
        "tie_embeddings": bool(hf.get("tie_embedding", hf["tie_word_embeddings"])),
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, rope={"by_type": True})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own: dict[str, Any] = {
        **decoder.write_fields(config, FIELDS),
        "use_sandwich_norm": config.norms == "both",
        "use_attention_gate": bool(config.attention_gate),
        **({"sliding_window": config.sliding_window} if config.sliding_layers else {}),
    }
    if base is None:
        own["layer_types"] = [
            "conv" if kind.mixer is ShortConv else layer_types.SLIDING if kind.window else layer_types.FULL
            for kind in config.layer_configs
        ]
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own, with_defaults)
