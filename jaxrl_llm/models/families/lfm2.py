"""LFM2 (arXiv 2511.23404): gated short convolutions in most layers, attention with norms of each head in the others."""

from typing import Any

from jaxrl_llm.models.families import decoder, mixtral
from jaxrl_llm.models.families.decoder import LAYER, TensorName, maps, norms
from jaxrl_llm.models.families.entries import mixer_types, mixers_of, number, positive, refuse
from jaxrl_llm.models.mixers.attention import Attention
from jaxrl_llm.models.mixers.short_conv import ShortConv
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "lfm2"
ARCHITECTURE = "Lfm2"
KEYS = (
    *(key for key in decoder.ENDS if key.path != "norm/scale"),
    TensorName("norm/scale", "model.embedding_norm.weight"),
    *norms("layers/", LAYER, {"input_norm": "operator_norm", "post_attention_norm": "ffn_norm"}),
    *maps("layers/attention", f"{LAYER}self_attn", decoder.QKVO | {"o": "out_proj"}),
    *norms("layers/attention/", f"{LAYER}self_attn.", {"q_norm": "q_layernorm", "k_norm": "k_layernorm"}),
    *maps("layers/conv", f"{LAYER}conv", {"into": "in_proj", "out": "out_proj"}),
    TensorName("layers/conv/filter", f"{LAYER}conv.conv.weight"),
    TensorName("layers/conv/bias", f"{LAYER}conv.conv.bias"),
    *maps("layers/mlp", f"{LAYER}feed_forward", mixtral.WORDS),
)
MIXER_FIELDS = {"norm_eps": "norm_eps", "conv_size": "conv_L_cache", "conv_bias": "conv_bias"}  # an entry each
MIXER_DEFAULTS = {
    "num_key_value_heads": 8,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "conv_bias": False,
    "conv_L_cache": 3,
}
DEFAULTS = MIXER_DEFAULTS | {
    "intermediate_size": 12288,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}  # for entries that are left out
THETA = 1_000_000.0


class OutAttention(Attention):
    """Attention whose output map has the name, for adapters, that the one of convolutions has too."""

    output_name = "out"


MIXERS = {"conv": ShortConv, "full_attention": OutAttention}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    own = mixer_fields(hf) | {"ffn": _channels(hf)}
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, rope={"theta": THETA})


def mixer_fields(hf: dict[str, Any]) -> dict[str, Any]:
    """The ModelConfig fields of all but the feed-forward, of entries with their defaults."""
    fields, attends = decoder.read_fields(hf, MIXER_FIELDS), hf.get("full_attn_idxs")
    if fields["conv_size"] < 2:
        refuse("conv_L_cache", fields["conv_size"], "numbers from 2")
    return {
        "mixers": mixers_of(hf, MIXERS, lambda i: "full_attention" if attends is None or i in attends else "conv"),
        **fields,
        "qk_norm": "head",
        "tie_embeddings": bool(hf.get("tie_embedding", hf["tie_word_embeddings"])),
    }


def _channels(hf: dict[str, Any]) -> int:
    """Channels of the feed-forward, for which config.json has a number that is made smaller first."""
    channels = positive(hf, "block_ff_dim" if hf.get("block_ff_dim") is not None else "intermediate_size")
    if not hf["block_auto_adjust_ff_dim"]:
        return channels
    channels, multiple = int(2 * channels / 3), positive(hf, "block_multiple_of")
    if hf["block_ffn_dim_multiplier"] is not None:
        channels = int(number("block_ffn_dim_multiplier", hf["block_ffn_dim_multiplier"], above=0) * channels)
        channels = multiple * -(-channels // multiple)
    return channels


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = mixer_entries(config, base)
    if base is None:
        own["block_auto_adjust_ff_dim"] = False
    else:  # it is no number of channels before `_channels` has read it
        own["intermediate_size"] = (DEFAULTS | base)["intermediate_size"]
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)


def mixer_entries(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The entries of config.json that `mixer_fields` reads."""
    types = {"layer_types": mixer_types(config, MIXERS)} if base is None else {}
    return decoder.write_fields(config, MIXER_FIELDS) | types
