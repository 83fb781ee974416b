"""OLMo Hybrid: OLMo 2's layers in every fourth place, and gated delta nets with norms of their inputs in the others."""

from typing import Any

from jaxrl_llm.models.families import decoder, olmo2, qwen3_next, rotary
from jaxrl_llm.models.families.decoder import LAYER, TensorName, maps
from jaxrl_llm.models.families.entries import positive
from jaxrl_llm.models.mixers.delta_net import ApartDeltaNet
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "olmo_hybrid"
ARCHITECTURE = "OlmoHybrid"
NET = f"{LAYER}linear_attn"


def _keys(mixer_norm: str, ffn_norm: str, out_norm: str = "post_attention_layernorm") -> tuple[TensorName, ...]:
    """The table of files in which the norms of delta nets' layers have these names, and that of what attention adds."""
    return (
        *(key for key in olmo2.KEYS if key.path != "layers/attention_out_norm/scale"),
        TensorName("layers/attention_out_norm/scale", f"{LAYER}{out_norm}.weight"),
        TensorName("layers/input_norm/scale", f"{LAYER}{mixer_norm}.weight"),
        TensorName("layers/post_attention_norm/scale", f"{LAYER}{ffn_norm}.weight"),
        *conv_keys(NET),
        *maps("layers/delta", NET, {"a": "a_proj", "z": "g_proj"}),
        TensorName("layers/delta/log_decay", f"{NET}.A_log"),
        TensorName("layers/delta/step_bias", f"{NET}.dt_bias"),
    )


def conv_keys(block: str) -> tuple[TensorName, ...]:
    """The keys of a delta net whose queries, keys and values come of maps and convolutions of their own."""
    return (
        *maps("layers/delta", block, {"q": "q_proj", "k": "k_proj", "v": "v_proj", "b": "b_proj", "out": "o_proj"}),
        *(TensorName(f"layers/delta/{name}_conv", f"{block}.{name}_conv1d.weight") for name in "qkv"),
        TensorName("layers/delta/norm_scale", f"{block}.o_norm.weight"),
    )


KEYS = _keys("attention_layer_norm", "feedforward_layer_norm")
MODULE_KEYS = _keys("input_layernorm", "post_attention_layernorm")
# Transformers writes two norms by one name.
OTHER_KEYS = (_keys("attention_layer_norm", "feedforward_layer_norm", "feedforward_layer_norm"), MODULE_KEYS)
DEFAULTS = {"linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    layers, heads = positive(hf, "num_hidden_layers"), positive(hf, "num_attention_heads")
    hf = DEFAULTS | {"full_attention_interval": min(layers, 4)} | hf
    for entry in ("linear_num_key_heads", "linear_num_value_heads"):
        hf[entry] = heads if hf.get(entry) is None else hf[entry]
    if hf.get("linear_key_head_dim") is None:
        hf["linear_key_head_dim"] = 3 * positive(hf, "hidden_size") // (4 * positive(hf, "linear_num_key_heads"))
    if hf.get("linear_value_head_dim") is None:
        hf["linear_value_head_dim"] = 2 * hf["linear_key_head_dim"]
    rotated = rotary.parameters_of(hf).get("rope_theta") or hf.get("rope_theta")
    own = qwen3_next.delta_fields(hf, ApartDeltaNet) | {
        **olmo2.common(hf),
        "norm_offset": 0.0,
        "attention_gate": "",
        "delta_norms": "pre",
        "delta_negative": bool(hf["linear_allow_neg_eigval"]),
        "unrotated_layers": () if rotated else tuple(range(layers)),
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = qwen3_next.delta_entries(config, base) | {"linear_allow_neg_eigval": config.delta_negative}
    hf = decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
    if config.unrotated_layers:  # transformers takes a base of its own where none is null
        hf |= {"rope_theta": None} | ({"rope_parameters": None} if base is None else {})
    return hf
