"""Step 3.5 Flash and the text part of Step 3.7 (StepFun): attention whose heads are gated, with a window in some
layers, which have another number of heads and rotary positions of their own; experts by a sigmoid with a correction;
and, in some layers, gates that are clipped behind their activation, and ups that are."""

from typing import Any

from jaxrl_llm.models.families import decoder, layer_types, lfm3, rotary
from jaxrl_llm.models.families.decoder import LAYER, TensorName
from jaxrl_llm.models.families.entries import computed, dense_layers, mlp_types, number, positive, refuse
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "step3p5"
ARCHITECTURE = "Step3p5"
COMMON = (*decoder.KEYS, *decoder.QK_NORMS, *decoder.linear("layers/attention/gate", f"{LAYER}self_attn.g_proj"))
KEYS = (
    *COMMON,
    TensorName("layers/mlp/router/kernel", f"{LAYER}moe.gate.weight", transpose=True),
    TensorName("layers/mlp/correction", f"{LAYER}moe.router_bias"),
    *(
        TensorName(f"layers/mlp/experts/{name}/kernel", f"{LAYER}moe.{word}.weight", transpose=True)
        for name, word in decoder.GATED.items()
    ),
    *decoder.maps("layers/mlp/shared", f"{LAYER}share_expert", decoder.GATED),
)
MODULE_KEYS = (
    *COMMON,
    TensorName("layers/mlp/correction", f"{LAYER}mlp.gate.e_score_correction_bias"),
    *decoder.maps("layers/mlp/shared", f"{LAYER}mlp.shared_experts", decoder.GATED),
    *decoder.stacked_experts("mlp"),
)
OTHER_KEYS = (MODULE_KEYS,)
# Other names of entries, which StepFun's own files have.
NAMES = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
}
DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 8,
    "n_routed_experts": 288,
    "moe_intermediate_size": 1280,
    "share_expert_dim": 1280,
    "moe_router_scaling_factor": 1.0,
}  # for entries that are left out
FIELDS = {
    **decoder.ATTENTION_BIAS,
    "mlp_bias": "mlp_bias",
    "experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_ffn": "moe_intermediate_size",
    "shared_expert_ffn": "share_expert_dim",
    "routed_scale": "moe_router_scaling_factor",
}  # that are an entry each
# The only values of entries that are computed.
COMPUTED = {
    "gating": True, "use_head_wise_attn_gate": True, "moe_router_activation": "sigmoid", "norm_expert_weight": True,
    "use_moe_router_bias": True,
}  # fmt: skip
CLIPS = ("swiglu_limits", "swiglu_limits_shared")
HEADS = "num_sliding_attention_heads"


def whole(hf: dict[str, Any]) -> dict[str, Any]:
    """The entries under the names of transformers, with lists of as many items as there are layers, where StepFun's own
    files have some more, of multi-token prediction; and a set of rotary parameters for each type of layer."""
    hf = DEFAULTS | {NAMES.get(entry, entry): value for entry, value in hf.items() if value is not None}
    layers = positive(hf, "num_hidden_layers")
    beyond = layers + (hf.get("num_nextn_predict_layers") or 0)
    for entry in ("layer_types", "mlp_layer_types", *CLIPS, "rope_theta", "partial_rotary_factors"):
        if isinstance(hf.get(entry), list | tuple) and len(hf[entry]) == beyond:
            hf[entry] = list(hf[entry])[:layers]
    others = hf.get("attention_other_setting") or {}
    hf.setdefault(HEADS, others.get("num_attention_heads", hf.get("num_attention_heads")))
    if "mlp_layer_types" not in hf and "moe_layers_enum" in hf:
        given = hf["moe_layers_enum"]
        sparse = [str(layer).strip() for layer in (given.split(",") if isinstance(given, str) else given)]
        if not all(layer.isdecimal() for layer in sparse):
            refuse("moe_layers_enum", given, "the numbers of layers, between commas")
        hf["mlp_layer_types"] = ["sparse" if str(layer) in sparse else "dense" for layer in range(layers)]
    return hf | {"rope_parameters": _ropes(hf), "rope_scaling": None, "rope_theta": None}


def _ropes(hf: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rotary parameters of each type of layer, of which StepFun's own files have those of each layer; those of a
    type that no layer is of are the other's."""
    types = hf.get("layer_types") or [layer_types.FULL] * positive(hf, "num_hidden_layers")
    sets = {name: value for name, value in (hf.get("rope_parameters") or {}).items() if isinstance(value, dict)}
    if not all(isinstance(sets.get(name), dict) for name in types):
        sets = {}
        for name in set(types):
            first = types.index(name)
            theta, fraction = (
                value[first] if isinstance(value := hf.get(entry), list | tuple) else value
                for entry in ("rope_theta", "partial_rotary_factors")
            )
            sets[name] = {"rope_type": "default", "rope_theta": 10000.0 if theta is None else theta}
            sets[name] |= {} if fraction is None else {"partial_rotary_factor": fraction}
        if layer_types.FULL in sets:
            sets[layer_types.FULL] |= hf.get("rope_scaling") or {}
    other = next(iter(sets.values()))
    return {name: sets.get(name, other) for name in rotary.TYPES}


def _clips(hf: dict[str, Any], layers: int) -> tuple[tuple[float, float], ...]:
    """The limits of gates and ups, of experts and of other feed-forwards, in each layer; () where none has any."""
    lists = [hf.get(entry) or [0.0] * layers for entry in CLIPS]
    for entry, given in zip(CLIPS, lists, strict=True):
        if len(given) != layers:
            refuse(entry, given, f"a number or null for each of the {layers} layers")
    experts, others = ([number(entry, x or 0.0) for x in given] for entry, given in zip(CLIPS, lists, strict=True))
    dense = dense_layers(hf, 3)
    clips = tuple((0.0 if layer in dense else experts[layer], others[layer]) for layer in range(layers))
    return clips if any(map(any, clips)) else ()


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = whole(hf)
    layers = positive(hf, "num_hidden_layers")
    computed(hf, COMPUTED)
    windows = layer_types.read(hf, lambda _: False)
    sliding = windows.get("sliding_layers", ())
    full, local = rotary.fractions_of(hf)
    heads, of_sliding = positive(hf, "num_attention_heads"), positive(hf, HEADS)
    for layer, entries in {str(x): entries for x, entries in (hf.get("per_layer_config") or {}).items()}.items():
        known = {"num_attention_heads": of_sliding if layer in map(str, sliding) else heads}
        if not isinstance(entries, dict) or known | entries != known:
            refuse(f"per_layer_config of layer {layer}", entries, f"{HEADS} = {of_sliding} of layers with a window")
    scale = number("query_pre_attn_scalar", hf.get("query_pre_attn_scalar", hf["head_dim"]), above=0)
    own = {
        **windows,
        **decoder.read_fields(hf, FIELDS),
        "heads": of_sliding if sliding else heads,
        "rotary_fraction": local if sliding else full,
        "mixers": (lfm3.GatedAttention,) * layers,
        "attention_gate": "heads",
        "norm_offset": 1.0,
        "qk_norm": "head",
        "query_scale": None if scale == hf["head_dim"] else scale**-0.5,
        "dense_layers": dense_layers(hf, 3),
        "layer_clips": _clips(hf, layers),
        "router_sigmoid": True,
        "router_correction": True,
        "normalize_top_k": True,
    }
    if sliding and len(sliding) < layers:
        others = {"heads": (heads, of_sliding), "rotary_fraction": (full, local)}
        own["full_fields"] = tuple((field, x) for field, (x, of_local) in others.items() if x != of_local)
    kv_heads = positive(hf, "num_key_value_heads")
    for entry, count in (("num_attention_heads", heads), (HEADS, of_sliding)):
        if count % kv_heads:
            refuse(entry, count, f"multiples of num_key_value_heads = {kv_heads}")
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, rope={"by_type": True, "partial": True})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    scalar = config.head_dim if config.query_scale is None else config.query_scale**-2
    own: dict[str, Any] = {
        **layer_types.write(config, base),
        **decoder.write_fields(config, FIELDS),
        "num_attention_heads": dict(config.full_fields).get("heads", config.heads),
        HEADS: config.heads,
        "query_pre_attn_scalar": round(scalar) if round(scalar) ** -0.5 == config.query_scale else scalar,
    }
    if base is None:
        own["pad_token_id"] = 0  # which may not be null
        own.setdefault("sliding_window", 512)  # of which transformers makes a mask, whether a layer reads it or not
        clips = config.layer_clips or ((0.0, 0.0),) * config.layers
        own |= {entry: [clip[number] for clip in clips] for number, entry in enumerate(CLIPS)}
        own["mlp_layer_types"] = mlp_types(config)
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own, rope=whole, write=rotary.write_sets)
