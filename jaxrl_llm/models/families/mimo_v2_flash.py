"""MiMo-V2-Flash (arXiv 2601.02780): values smaller than keys, and layers with a window that have attention sinks and
twice the key/value heads of the others; experts as DeepSeek-V3, none of them for every token."""

from typing import Any

from jaxrl_llm.models.families import decoder, deepseek_v3, layer_types, rotary
from jaxrl_llm.models.families.decoder import LAYER, TensorName
from jaxrl_llm.models.families.entries import dense_layers, mlp_types, number, positive, refuse
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "mimo_v2_flash"
ARCHITECTURE = "MiMoV2Flash"


def _keys(sinks: str, experts: tuple[TensorName, ...]) -> tuple[TensorName, ...]:
    return (
        *decoder.KEYS,
        TensorName("layers/attention/sinks", f"{LAYER}self_attn.{sinks}"),
        TensorName("layers/mlp/correction", f"{LAYER}mlp.gate.e_score_correction_bias"),
        *experts,
    )


KEYS = _keys("attention_sink_bias", decoder.experts("mlp"))
MODULE_KEYS = _keys("sinks", decoder.stacked_experts("mlp"))
OTHER_KEYS = (MODULE_KEYS,)
UNREAD = ("model.mtp.",)
DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-5,
    "sliding_window": 129,
    "attention_value_scale": 0.707,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}  # for entries that are left out
ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 5_000_000.0, "partial_rotary_factor": 0.334},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.334},
}


def with_defaults(hf: dict[str, Any]) -> dict[str, Any]:
    """The entries with those that are left out, and the window under its usual name, which counts the token itself."""
    sets = {name: {"partial_rotary_factor": 0.334} | own for name, own in rotary.sets_of(hf).items()}
    hf = DEFAULTS | hf | {"rope_parameters": sets or ROPES}
    null = {"attention_value_scale": 1.0, "routed_scaling_factor": 1.0}
    hf |= {name: value for name, value in null.items() if hf[name] is None}
    if hf.get("sliding_window_size") is not None:
        hf["sliding_window"] = positive(hf, "sliding_window_size") + 1
    return hf


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = with_defaults(hf)
    windows = layer_types.read(hf, lambda layer: layer > 0 and (layer + 1) % 6 != 0)
    full, local = rotary.fractions_of(hf)
    heads, kv_heads, slides = positive(hf, "num_attention_heads"), positive(hf, "num_key_value_heads"), bool(windows)
    if slides and heads % (2 * kv_heads):
        refuse("num_key_value_heads", kv_heads, f"divisors of half of num_attention_heads = {heads}")
    of_experts = deepseek_v3.experts(hf | {"n_shared_experts": 1, "first_k_dense_replace": 0})
    own = {
        **windows,
        **of_experts,
        "attention_bias": bool(hf.get("attention_bias", False)),
        "kv_heads": kv_heads * (1 + slides),
        "attention_sinks": slides,
        "value_head_dim": positive(hf, "v_head_dim"),
        "value_scale": number("attention_value_scale", hf["attention_value_scale"]),
        "rotary_fraction": local if slides else full,
        "shared_expert_ffn": 0,
        "dense_layers": dense_layers(hf, 1),
    }
    if slides:
        others = {"kv_heads": kv_heads, "attention_sinks": False}
        own["full_fields"] = tuple((others | ({"rotary_fraction": full} if full != local else {})).items())
    rope = {"by_type": True, "partial": True}
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, rope=rope)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    left_out = ("n_shared_experts", "first_k_dense_replace", "num_nextn_predict_layers")
    experts = deepseek_v3.expert_entries(config, base)
    own: dict[str, Any] = {
        **{entry: value for entry, value in experts.items() if entry not in left_out},
        **layer_types.write(config, base),
        "attention_bias": config.attention_bias,
        "num_key_value_heads": dict(config.full_fields).get("kv_heads", config.kv_heads),
        "v_head_dim": config.value_size,
        "attention_value_scale": config.value_scale,
    }
    if base is None:
        own["mlp_layer_types"] = mlp_types(config)
    else:  # which may be null
        own |= {x: base[x] for x in own if x in base and with_defaults(base)[x] == own[x]}
        if base.get("sliding_window_size") is not None and config.sliding_window is not None:
            own["sliding_window_size"] = config.sliding_window - 1
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own, rope=with_defaults, write=rotary.write_sets)
