"""DBRX (Databricks, 2024): a mixture of experts in every layer, clipped queries, keys and values, and layer norms
without biases."""

from typing import Any

from jaxrl_llm.models.families import decoder
from jaxrl_llm.models.families.decoder import TensorName, linear, maps
from jaxrl_llm.models.families.entries import computed, number, refuse, renamed
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "dbrx"
ARCHITECTURE = "Dbrx"
LAYER = "transformer.blocks.{layer}."
ATTENTION = f"{LAYER}norm_attn_norm."
EXPERTS = f"{LAYER}ffn.experts.mlp."
KEYS = (
    TensorName("embed/weight", "transformer.wte.weight"),
    TensorName("norm/scale", "transformer.norm_f.weight"),
    TensorName("head/kernel", "lm_head.weight", transpose=True),
    *linear("score", "score"),
    TensorName("layers/input_norm/scale", f"{ATTENTION}norm_1.weight"),
    TensorName("layers/post_attention_norm/scale", f"{ATTENTION}norm_2.weight"),
    *maps("layers/attention", f"{ATTENTION}attn", {"qkv": "Wqkv", "o": "out_proj"}),
    TensorName("layers/mlp/router/kernel", f"{LAYER}ffn.router.layer.weight", transpose=True),
    TensorName("layers/mlp/experts/gate/kernel", f"{EXPERTS}w1", transpose=True, expert_rows=True),
    TensorName("layers/mlp/experts/up/kernel", f"{EXPERTS}v1", transpose=True, expert_rows=True),
    TensorName("layers/mlp/experts/down/kernel", f"{EXPERTS}w2", expert_rows=True),
)
NAMES = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "max_seq_len": "max_position_embeddings",
}
FIELDS = {
    "experts": "moe_num_experts",
    "experts_per_token": "moe_top_k",
    "expert_ffn": "ffn_hidden_size",
    "router_aux_loss_coef": "moe_loss_weight",
}  # of ffn_config, that are an entry each
FFN = {
    "ffn_act_fn": {"name": "silu"},
    "ffn_hidden_size": 3584,
    "moe_num_experts": 4,
    "moe_top_k": 1,
    "moe_loss_weight": 0.01,
    "moe_normalize_expert_weights": 1.0,
}  # for entries of ffn_config that are left out
NORM = "moe_normalize_expert_weights"  # by which the chosen weights are divided: 1 is their sum
EPS = 1e-5


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = _with_theta(renamed(hf, NAMES))
    attention, ffn = hf.get("attn_config") or {}, FFN | (hf.get("ffn_config") or {})
    computed(hf, {"tie_word_embeddings": False})
    if ffn[NORM] not in (None, 1):
        refuse(f"ffn_config: {NORM}", ffn[NORM], "1 and null")
    clip = attention.get("clip_qkv")
    own = {
        "norm_centred": True,
        "norm_eps": EPS,
        "joint_qkv": "blocks",
        "qkv_clip": None if clip is None else number("attn_config: clip_qkv", clip, above=0),
        **decoder.read_fields(ffn, FIELDS),
        "normalize_top_k": ffn[NORM] == 1,
        "lora_names": (("o", "out"),),
    }
    hf |= {
        "num_key_value_heads": attention.get("kv_n_heads", 1),
        "intermediate_size": ffn["ffn_hidden_size"],
        "hidden_act": (ffn["ffn_act_fn"] or {}).get("name", "silu"),
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides)


def _with_theta(hf: dict[str, Any]) -> dict[str, Any]:
    """The entries, with the base of rotary positions that files on the hub have in `attn_config`.

    Transformers passes that one over, and saves 10000 beside it: raises ConfigError where the two differ.
    """
    theta = (hf.get("attn_config") or {}).get("rope_theta")
    other = (hf.get("rope_parameters") or {}).get("rope_theta", hf.get("rope_theta"))
    if None not in (theta, other) and theta != other:
        refuse("attn_config: rope_theta", theta, f"{other}, as rope_theta says, unless that entry is left out")
    return hf if theta is None else hf | {"rope_theta": theta}


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    known = base or {}
    attention = {"clip_qkv": config.qkv_clip, "kv_n_heads": config.kv_heads, "rope_theta": config.rope.theta}
    ffn: dict[str, Any] = {**FFN, **(known.get("ffn_config") or {}), **decoder.write_fields(config, FIELDS)}
    ffn |= {NORM: 1.0 if config.normalize_top_k else None}
    own = {"attn_config": {**(known.get("attn_config") or {}), **attention}, "ffn_config": ffn}
    base = None if base is None else _with_theta(base)
    without = ("head_dim", "rms_norm_eps", "hidden_act", "intermediate_size")
    return decoder.from_own_names(config, base, NAMES, {}, ARCHITECTURE, MODEL_TYPE, own, without)
