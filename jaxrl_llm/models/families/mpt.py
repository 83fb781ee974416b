"""MPT (MosaicML, 2023): scores that fall with distance (ALiBi) in place of positions, and no biases at all."""

from typing import Any

from jaxrl_llm.models.families import decoder
from jaxrl_llm.models.families.decoder import TensorName, linear, maps
from jaxrl_llm.models.families.entries import computed, number, positive, renamed, unset
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "mpt"
LAYER = "transformer.blocks.{layer}."
KEYS = (
    TensorName("embed/weight", "transformer.wte.weight"),
    TensorName("norm/scale", "transformer.norm_f.weight"),
    TensorName("head/kernel", "lm_head.weight", transpose=True),
    *linear("score", "score"),
    TensorName("layers/input_norm/scale", f"{LAYER}norm_1.weight"),
    TensorName("layers/post_attention_norm/scale", f"{LAYER}norm_2.weight"),
    *maps("layers/attention", f"{LAYER}attn", {"qkv": "Wqkv", "o": "out_proj"}),
    *maps("layers/mlp", f"{LAYER}ffn", {"up": "up_proj", "down": "down_proj"}),
)
NAMES = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "layer_norm_epsilon": "rms_norm_eps",
    "max_seq_len": "max_position_embeddings",
}
DEFAULTS = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}  # for entries that are left out
# What is computed of entries that MosaicML's own code reads; transformers passes most of them over.
COMPUTED = {"expansion_ratio": 4, "no_bias": True, "norm_type": "low_precision_layernorm"}
ATTENTION = {"attn_type": "multihead_attention", "alibi": True}
BIAS = "alibi_bias_max"  # of which transformers takes 8 for all, where storywriter has 16


def _architecture(hf: dict[str, Any] | None) -> dict[str, str]:
    # The tensors of transformers' class for steps have other names than the table.
    own = decoder.class_of(hf, "Mpt", "MPT")  # of MosaicML's own files
    return {"lm": f"{own}ForCausalLM", "score": "MptForSequenceClassification", "step": ""}


ARCHITECTURE = _architecture(None)


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | renamed(hf, NAMES)
    attention = {BIAS: 8} | (hf.get("attn_config") or {})
    computed(hf, COMPUTED)
    computed(attention, ATTENTION, "attn_config: ")
    unset(hf, "logit_scale")
    unset(attention, "qk_ln", "prefix_lm", "attn_uses_sequence_id")
    clip, scale = attention.get("clip_qkv"), attention.get("softmax_scale")
    own = {
        "norm_centred": True,
        "alibi": float(positive(attention, BIAS)),
        "rotary_fraction": 0.0,
        "joint_qkv": "blocks",
        "qkv_clip": number("clip_qkv", clip, above=0) if clip else None,
        "query_scale": None if scale is None else number("softmax_scale", scale, above=0),
        "ffn_gate": False,
        "lora_names": (("o", "out"),),
    }
    hf |= {"intermediate_size": 4 * positive(hf, "hidden_size")}
    return decoder.to_config(hf, _architecture(hf), own, overrides, activations={"gelu": "gelu"})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    attention = {BIAS: int(config.alibi), "clip_qkv": config.qkv_clip, "softmax_scale": config.query_scale}
    own = {"attn_config": {**((base or {}).get("attn_config") or {}), **attention}}
    without = (*decoder.ROTARY_AND_GROUPED, "intermediate_size", *(("hidden_act",) if base is None else ()))
    return decoder.from_own_names(config, base, NAMES, DEFAULTS, _architecture(base), MODEL_TYPE, own, without)
