"""Laguna (Poolside): attention whose heads are gated by softplus, with a window in some layers, which have another
number of heads and rotary positions of their own; experts by a sigmoid with a correction behind dense layers."""

import functools
from typing import Any

from jaxrl_llm.models.families import decoder, deepseek_v3, layer_types, lfm3, rotary
from jaxrl_llm.models.families.decoder import LAYER, TensorName, linear
from jaxrl_llm.models.families.entries import dense_layers, mlp_types, number, positive, refuse, unset
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "laguna"
ARCHITECTURE = "Laguna"


def _keys(correction: str, shared: str, experts: tuple[TensorName, ...]) -> tuple[TensorName, ...]:
    return (
        *decoder.KEYS,
        *decoder.QK_NORMS,
        *linear("layers/attention/gate", f"{LAYER}self_attn.g_proj"),
        *deepseek_v3.beside_experts("mlp", f"{correction}.e_score_correction_bias", shared),
        *experts,
    )


KEYS = _keys("experts", "shared_expert", decoder.experts("mlp"))
MODULE_KEYS = _keys("gate", "shared_experts", decoder.stacked_experts("mlp"))
OTHER_KEYS = (MODULE_KEYS,)
DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "sliding_window": 512,
    "gating": True,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "moe_routed_scaling_factor": 1.0,
    "moe_router_logit_softcapping": 0.0,
    "router_aux_loss_coef": 0.001,
}  # for entries that are left out
FIELDS = {
    **decoder.EXPERTS,
    **decoder.ATTENTION_BIAS,
    "shared_expert_ffn": "shared_expert_intermediate_size",
    "routed_scale": "moe_routed_scaling_factor",
    "router_aux_loss_coef": "router_aux_loss_coef",
}  # that are an entry each
ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 500_000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
with_ropes = functools.partial(rotary.with_default_sets, ROPES)
GATES = {True: "heads", "per-head": "heads", "per-element": "numbers"}
HEADS = "num_attention_heads_per_layer"


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf, layers = with_ropes(DEFAULTS | hf), positive(hf, "num_hidden_layers")
    unset(hf, "moe_apply_router_weight_on_input")
    if not isinstance(hf["gating"], bool | str) or hf["gating"] not in GATES:
        refuse("gating", hf["gating"], ", ".join(map(str, GATES)))
    windows = layer_types.read(hf, lambda _: False)
    full, local = heads_of(hf, windows.get("sliding_layers", ()))
    kinds = {"heads": (full, local), "rotary_fraction": rotary.fractions_of(hf)}
    cap = number("moe_router_logit_softcapping", hf["moe_router_logit_softcapping"])
    own = {
        **windows,
        **{field: of_full if local is None else of_local for field, (of_full, of_local) in kinds.items()},
        **decoder.read_fields(hf, FIELDS),
        "mixers": (lfm3.GatedAttention,) * layers,
        "qk_norm": "head",
        "attention_gate": GATES[hf["gating"]],
        "attention_gate_softplus": True,
        "dense_layers": dense_layers(hf, 1),
        "router_sigmoid": True,
        "router_correction": True,
        "router_softcap": cap or None,
        "normalize_top_k": True,
    }
    if full is not None and local is not None:
        others = {field: of_full for field, (of_full, of_local) in kinds.items() if of_full != of_local}
        own["full_fields"] = tuple(others.items())
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, rope={"by_type": True, "partial": True})


def heads_of(hf: dict[str, Any], sliding: tuple[int, ...]) -> tuple[int | None, int | None]:
    """The numbers of heads of the layers without a window and of the `sliding` ones, None where there are none of them;
    raises ConfigError for others."""
    layers, kv_heads = positive(hf, "num_hidden_layers"), positive(hf, "num_key_value_heads")
    each = hf.get(HEADS) or [positive(hf, "num_attention_heads")] * layers
    valid = isinstance(each, list | tuple) and len(each) == layers
    if not valid or not all(isinstance(heads, int) and heads > 0 and heads % kv_heads == 0 for heads in each):
        refuse(HEADS, each, f"a multiple of num_key_value_heads = {kv_heads} for each of the {layers} layers")
    full, local = ({x for i, x in enumerate(each) if (i in sliding) == slides} for slides in (False, True))
    if max(len(full), len(local)) > 1:
        refuse(HEADS, each, "one number for the layers with a window, and one for the others")
    return next(iter(full), None), next(iter(local), None)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own: dict[str, Any] = {
        **layer_types.write(config, base),
        "num_attention_heads": config.heads if base is None else base["num_attention_heads"],
        **decoder.write_fields(config, FIELDS),
        "moe_router_logit_softcapping": config.router_softcap or 0.0,
    }
    if base is None:
        own |= {
            HEADS: [config.of(kind).heads for kind in config.layer_configs],
            "gating": "per-head" if config.attention_gate == "heads" else "per-element",
            "mlp_layer_types": mlp_types(config),
        }
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own, rope=with_ropes, write=rotary.write_sets)
