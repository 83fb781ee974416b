"""ERNIE 4.5's mixtures of experts: ERNIE 4.5 with experts behind the first layers, chosen by a softmax with a
correction, beside experts that every token uses."""

from typing import Any

from jaxrl_llm.models.families import decoder, ernie4_5
from jaxrl_llm.models.families.decoder import LAYER, TensorName
from jaxrl_llm.models.families.entries import number, positive, refuse, unset
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "ernie4_5_moe"
ARCHITECTURE = "Ernie4_5_Moe"
_CORRECTION = "moe_statics.e_score_correction_bias"


def _keys(experts: tuple[TensorName, ...], correction: str) -> tuple[TensorName, ...]:
    """The keys with these of the experts, where the correction of the router has that name."""
    return (
        *decoder.KEYS,
        *decoder.maps("layers/mlp/shared", f"{LAYER}mlp.shared_experts", decoder.GATED),
        TensorName("layers/mlp/correction", f"{LAYER}mlp.{correction}", as_row=True),
        *experts,
    )


KEYS = _keys(decoder.experts("mlp"), _CORRECTION)
MODULE_KEYS = _keys(decoder.stacked_experts("mlp"), f"gate.{_CORRECTION}")
OTHER_KEYS = (MODULE_KEYS,)
DEFAULTS = {
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "router_aux_loss_coef": 0.001,
}  # for entries that are left out
FIELDS = {
    "experts": "moe_num_experts",
    "experts_per_token": "moe_k",
    "expert_ffn": "moe_intermediate_size",
    "router_aux_loss_coef": "router_aux_loss_coef",
}  # that are an entry each


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    unset(hf, "use_bias")  # the head would have one too
    layers, first, last = positive(hf, "num_hidden_layers"), hf["moe_layer_start_index"] or 0, hf["moe_layer_end_index"]
    last, every = layers - 1 if last in (-1, None) else last, positive(hf, "moe_layer_interval")
    sparse = {layer for layer in range(layers) if first <= layer <= last and (layer + 1) % every == 0}
    if not sparse:
        refuse("moe_layer_start_index", first, f"numbers that leave experts to some of the {layers} layers")
    fields = decoder.read_fields(hf, FIELDS)
    least = fields["experts_per_token"] / fields["experts"]  # that the shares of the chosen experts add up to
    if number("moe_norm_min", hf.get("moe_norm_min") or 0) > least:
        refuse("moe_norm_min", hf["moe_norm_min"], f"numbers up to moe_k / moe_num_experts = {least:g}")
    shared = int(number("moe_num_shared_experts", hf["moe_num_shared_experts"] or 0))
    own = {
        "rope_interleaved": True,
        "dense_layers": tuple(layer for layer in range(layers) if layer not in sparse),
        **fields,
        "shared_expert_ffn": shared * positive(hf, "moe_intermediate_size"),
        "router_correction": True,
        "normalize_top_k": True,
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, rope={"theta": ernie4_5.THETA})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own: dict[str, Any] = {
        **decoder.write_fields(config, FIELDS),
        "moe_num_shared_experts": config.shared_expert_ffn // max(config.expert_ffn, 1),
    }
    if base is None:
        sparse = [layer for layer in range(config.layers) if layer not in config.dense_layers]
        if not sparse:
            refuse("moe_layer_start_index", None, "nets with experts in a layer")
        every = sparse[1] - sparse[0] if len(sparse) > 1 else 1
        own |= {"moe_layer_start_index": sparse[0], "moe_layer_end_index": sparse[-1], "moe_layer_interval": every}
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
