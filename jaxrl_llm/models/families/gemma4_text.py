"""Gemma 4, text models: full attention with heads and rotary positions of its own, per-layer embeddings, and last
layers that read the keys and values of earlier ones."""

from typing import Any

from jaxrl_llm.models.families import decoder, gemma, gemma2, layer_types, rotary
from jaxrl_llm.models.families.decoder import LAYER, TensorName, linear
from jaxrl_llm.models.families.entries import number, positive, refuse
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "gemma4_text"
ARCHITECTURE = "Gemma4"
PER_LAYER = (
    *linear("layers/per_layer/gate", f"{LAYER}per_layer_input_gate"),
    *linear("layers/per_layer/down", f"{LAYER}per_layer_projection"),
    TensorName("layers/per_layer/norm/scale", f"{LAYER}post_per_layer_input_norm.weight"),
    TensorName("per_layer/embed/weight", "model.embed_tokens_per_layer.weight"),
    *linear("per_layer/proj", "model.per_layer_model_projection"),
    TensorName("per_layer/norm/scale", "model.per_layer_projection_norm.weight"),
)
KEYS = (
    *gemma2.KEYS,
    *decoder.QK_NORMS,
    *PER_LAYER,
    TensorName("layers/out_scale", f"{LAYER}layer_scalar"),
    # Of layers that have experts beside the dense feed-forward:
    TensorName("layers/mlp/dense_norm/scale", f"{LAYER}pre_feedforward_layernorm.weight"),
    TensorName("layers/mlp/dense_out_norm/scale", f"{LAYER}post_feedforward_layernorm_1.weight"),
    *decoder.maps("layers/mlp/dense", f"{LAYER}mlp", decoder.GATED),
    TensorName("layers/mlp/experts_norm/scale", f"{LAYER}pre_feedforward_layernorm_2.weight"),
    TensorName("layers/mlp/experts_out_norm/scale", f"{LAYER}post_feedforward_layernorm_2.weight"),
    TensorName("layers/mlp/router_scale", f"{LAYER}router.scale"),
    TensorName("layers/mlp/router/kernel", f"{LAYER}router.proj.weight", transpose=True),
    TensorName("layers/mlp/weight_scale", f"{LAYER}router.per_expert_scale"),
    TensorName("layers/mlp/experts/gate/kernel", f"{LAYER}experts.gate_up_proj", transpose=True),
    TensorName("layers/mlp/experts/up/kernel", f"{LAYER}experts.gate_up_proj", transpose=True),
    TensorName("layers/mlp/experts/down/kernel", f"{LAYER}experts.down_proj", transpose=True),
)
EXPERTS = {"experts": "num_experts", "experts_per_token": "top_k_experts", "expert_ffn": "moe_intermediate_size"}
DEFAULTS = {
    **gemma.DEFAULTS,
    "num_key_value_heads": 4,
    "sliding_window": 512,
    "final_logit_softcapping": None,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "global_head_dim": 512,
}
ROPES = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    return read(DEFAULTS | hf, ARCHITECTURE, overrides)


def read(hf: dict[str, Any], family: str, overrides: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a `family` with the shape of Gemma 4, of entries with their defaults."""
    hf = _with_ropes(hf)
    if hf.get("use_bidirectional_attention") == "vision":  # of images, which are not read
        hf["use_bidirectional_attention"] = None
    every, last = 6, positive(hf, "num_hidden_layers") - 1
    types = [*hf["layer_types"][:-1], layer_types.FULL] if hf.get("layer_types") else None
    windows = layer_types.read({**hf, "layer_types": types}, lambda layer: (layer + 1) % every != 0 and layer != last)
    own = {**common(hf, windows), **_full_heads(hf, windows.get("sliding_layers", ())), "layer_scale": True}
    if hf.get("enable_moe_block"):
        own |= decoder.read_fields(hf, EXPERTS) | {"experts_beside": True, "normalize_top_k": True}
        own["router_aux_loss_coef"] = number("router_aux_loss_coef", hf.get("router_aux_loss_coef", 0.0))
    if hf["hidden_size_per_layer_input"]:
        own["per_layer_width"] = positive(hf, "hidden_size_per_layer_input")
        own["per_layer_vocab"] = positive(hf, "vocab_size_per_layer_input")
        if own["per_layer_vocab"] < positive(hf, "vocab_size"):
            least = f"numbers from vocab_size = {hf['vocab_size']}"
            refuse("vocab_size_per_layer_input", own["per_layer_vocab"], least)
    rope = {"by_type": True}
    return decoder.to_config(hf, family, own, overrides, activations=gemma2.ACTIVATIONS, rope=rope)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return write(config, base, ARCHITECTURE, MODEL_TYPE)


def write(config: ModelConfig, base: dict[str, Any] | None, family: str, model_type: str) -> dict[str, Any]:
    """The config.json of a net of that `family` and type, over the entries of `base`."""
    full = dict(config.full_fields)
    own: dict[str, Any] = {
        **layer_types.write(config, base),
        "attention_bias": config.attention_bias,
        "final_logit_softcapping": config.logit_softcap,
    }
    if config.router_aux_loss_coef:
        own["router_aux_loss_coef"] = config.router_aux_loss_coef
    if base is None:
        own |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "global_head_dim": full.get("head_dim", config.head_dim),
            "num_global_key_value_heads": full.get("kv_heads"),
            "attention_k_eq_v": full.get("keys_as_values", False),
            "enable_moe_block": config.experts_beside,
            **{entry: getattr(config, field) or None for field, entry in EXPERTS.items()},
            "num_kv_shared_layers": config.shared_layers,
            "use_double_wide_mlp": bool(config.shared_ffn),
            "hidden_size_per_layer_input": config.per_layer_width,
            "vocab_size_per_layer_input": config.per_layer_vocab or config.vocab_size,
        }
    return decoder.from_config(config, base, family, model_type, own, rope=_with_ropes)


def unused_tensors(config: ModelConfig) -> set[str]:
    """Tensors that checkpoints may have and nothing reads: keys and values of the layers that share those of others."""
    layers = range(config.layers - config.shared_layers, config.layers)
    parts = ("k_proj", "v_proj", "k_norm", "v_norm")
    return {f"{LAYER.format(layer=layer)}self_attn.{part}.weight" for layer in layers for part in parts}


def _with_ropes(hf: dict[str, Any]) -> dict[str, Any]:
    """The entries, with rotary parameters of both types of layers."""
    given = rotary.sets_of(hf)
    for entry in ("rope_scaling",) if given else ("rope_scaling", "rope_theta"):
        if hf.get(entry):
            refuse(entry, hf[entry], f"rope_parameters with a set for each of {', '.join(ROPES)}")
    return {**hf, "rope_parameters": ROPES | given}


def _full_heads(hf: dict[str, Any], sliding: tuple[int, ...]) -> dict[str, Any]:
    """The fields of the heads of full attention, of which files of transformers 5.24 have an entry for each layer."""
    same = bool(hf.get("attention_k_eq_v"))
    each = hf.get("per_layer_config")
    full = {"head_dim": hf["global_head_dim"]}
    if same and hf.get("num_global_key_value_heads") is not None:
        full["num_key_value_heads"] = hf["num_global_key_value_heads"]
    if each is not None:
        layers = [layer for layer in range(hf["num_hidden_layers"]) if layer not in sliding]
        if not all(str(layer).isdigit() and isinstance(entries, dict) for layer, entries in each.items()):
            refuse("per_layer_config", each, "numbers of layers, each with entries")
        numbered = {int(layer): entries for layer, entries in each.items()}  # "04", or 4
        full = numbered.get(layers[0], {})
        if numbered != dict.fromkeys(layers if each else [], full):
            refuse("per_layer_config", each, "the same entries for all layers of full attention, and no others")
        if other := sorted(set(full) - {"head_dim", "num_key_value_heads"}):
            refuse("per_layer_config", other, "head_dim and num_key_value_heads")
    fields: dict[str, Any] = {"keys_as_values": True} if same else {}
    for field, entry in {"head_dim": "head_dim", "kv_heads": "num_key_value_heads"}.items():
        if entry in full and full[entry] != hf[entry]:
            fields[field] = positive(full, entry)
    heads = positive(hf, "num_attention_heads")
    if heads % fields.get("kv_heads", 1):
        refuse("num_global_key_value_heads", fields["kv_heads"], f"divisors of num_attention_heads = {heads}")
    return {"full_fields": tuple(fields.items())}


def common(hf: dict[str, Any], windows: dict[str, Any]) -> dict[str, Any]:
    """The fields that Gemma 3n has too, of a config.json and the fields of its windows."""
    cap = hf["final_logit_softcapping"]
    return {
        **gemma.common(hf),
        **windows,
        **_shared(hf, windows.get("sliding_layers", ())),
        "norm_offset": 0.0,
        "norms": "both",
        "query_scale": 1.0,
        "logit_softcap": None if cap is None else number("final_logit_softcapping", cap, above=0),
        "qk_norm": "head",
        "value_norm": True,
    }


def _shared(hf: dict[str, Any], sliding: tuple[int, ...]) -> dict[str, Any]:
    """The fields of the last layers, which read the keys and values of earlier ones."""
    if not hf.get("num_kv_shared_layers"):
        return {}
    shared, layers = positive(hf, "num_kv_shared_layers"), hf["num_hidden_layers"]
    kinds = [layer in sliding for layer in range(layers)]
    if set(kinds[: max(layers - shared, 0)]) != set(kinds):
        refuse("num_kv_shared_layers", shared, "numbers that leave a layer of each type before the shared ones")
    wide = 2 * positive(hf, "intermediate_size") if hf.get("use_double_wide_mlp") else 0
    return {"shared_layers": shared, "shared_ffn": wide}
