"""Falcon 7B to 180B (arXiv 2311.16867): attention and feed-forward side by side behind one layer norm or one each, and
queries, keys and values of each key/value head in one range of a tensor."""

from typing import Any

from jaxrl_llm.models.families import decoder
from jaxrl_llm.models.families.decoder import TensorName, layer_norm, linear, maps
from jaxrl_llm.models.families.entries import renamed, unset
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "falcon"
# The tensors of transformers' class for steps have other names than the table.
ARCHITECTURE = {"lm": "FalconForCausalLM", "score": "FalconForSequenceClassification", "step": ""}
LAYER = "transformer.h.{layer}."


def _keys(input_norm: str, ffn_norm: str) -> tuple[TensorName, ...]:
    """The table of files with these names of a layer's norms."""
    return (
        TensorName("embed/weight", "transformer.word_embeddings.weight"),
        *layer_norm("norm", "transformer.ln_f"),
        TensorName("head/kernel", "lm_head.weight", transpose=True),
        *linear("score", "score"),
        *layer_norm("layers/input_norm", f"{LAYER}{input_norm}"),
        *layer_norm("layers/post_attention_norm", f"{LAYER}{ffn_norm}"),
        *maps("layers/attention", f"{LAYER}self_attention", {"qkv": "query_key_value", "o": "dense"}),
        *maps("layers/mlp", f"{LAYER}mlp", {"up": "dense_h_to_4h", "down": "dense_4h_to_h"}),
    )


KEYS = _keys("input_layernorm", "post_attention_layernorm")
TWO_NORMS = _keys("ln_attn", "ln_mlp")
NAMES = {"ffn_hidden_size": "intermediate_size", "layer_norm_epsilon": "rms_norm_eps", "activation": "hidden_act"}
DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "hidden_act": "gelu",
    "multi_query": True,
    "parallel_attn": True,
    "bias": False,
    "tie_word_embeddings": True,
}  # for entries that are left out


def keys(config: ModelConfig) -> tuple[TensorName, ...]:
    return TWO_NORMS if config.parallel_ffn == "own" else KEYS


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = decoder.with_ffn(DEFAULTS | renamed(hf, NAMES))
    unset(hf, "alibi")
    new, kv_heads = bool(hf.get("new_decoder_architecture")), hf.get("num_kv_heads")
    own_norm = new and hf.get("num_ln_in_parallel_attn") in (None, 2)
    own = {
        **decoder.LAYER_NORMS,
        **dict.fromkeys(decoder.BIASES, bool(hf["bias"])),
        "joint_qkv": "heads",
        "parallel_ffn": "own" if own_norm else "shared" if new or hf["parallel_attn"] else "",
        "ffn_gate": False,
    }
    kv_heads = kv_heads if new else 1 if hf["multi_query"] else None
    hf = {**hf, "num_key_value_heads": kv_heads, "head_dim": None}
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, activations=decoder.PLAIN)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own: dict[str, Any] = {"bias": config.mlp_bias}
    if base is None:
        one, own_norm = config.kv_heads == 1, config.parallel_ffn == "own"
        new = own_norm or config.kv_heads not in (1, config.heads)
        own |= {
            "new_decoder_architecture": new,
            "num_ln_in_parallel_attn": (2 if own_norm else 1) if new else None,
            "num_kv_heads": config.kv_heads,
            "multi_query": one,
            "parallel_attn": bool(config.parallel_ffn),
        }
    own |= decoder.unsaid_ffn(config, base, "ffn_hidden_size")
    without = ("num_key_value_heads", "head_dim")
    return decoder.from_own_names(config, base, NAMES, DEFAULTS, ARCHITECTURE, MODEL_TYPE, own, without)
