"""Qwen3 mixtures of experts (arXiv 2505.09388): Qwen3 with experts in all layers, or in some."""

from typing import Any

from jaxrl_llm.models.families import decoder, layer_types, qwen2
from jaxrl_llm.models.families.entries import positive, refuse
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "qwen3_moe"
ARCHITECTURE = "Qwen3Moe"
KEYS, OTHER_KEYS = decoder.expert_tables((*decoder.KEYS, *decoder.QK_NORMS))
DEFAULTS = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.001,
}  # for entries that are left out
FIELDS = {
    "experts_per_token": "num_experts_per_tok",
    "expert_ffn": "moe_intermediate_size",
    "normalize_top_k": "norm_topk_prob",
    "router_aux_loss_coef": "router_aux_loss_coef",
}  # that are an entry each, beside their number, which has two names


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    own = {
        "qk_norm": "head",
        **decoder.attention_biases(hf),
        **layer_types.read_uniform({**hf, "sliding_window": qwen2.window(hf)}),
        **experts(hf),
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides)


def experts(hf: dict[str, Any]) -> dict[str, Any]:
    """The ModelConfig fields of the experts."""
    layers, step = positive(hf, "num_hidden_layers"), hf.get("decoder_sparse_step") or 1
    dense = tuple(n for n in range(layers) if n in (hf.get("mlp_only_layers") or ()) or (n + 1) % step)
    # Files of transformers 5 have Mixtral's name for the number of experts.
    hf = {"num_experts": hf["num_local_experts"]} | hf if "num_local_experts" in hf else hf
    if len(dense) == layers:
        refuse("mlp_only_layers", hf.get("mlp_only_layers"), "lists that leave some layers their experts")
    return decoder.read_fields(hf, FIELDS | {"experts": "num_experts"}) | {"dense_layers": dense}


def expert_entries(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The entries of config.json that `experts` reads."""
    entries = decoder.write_fields(config, FIELDS)
    if base is None:
        dense = list(config.dense_layers)
        entries |= {"num_experts": config.experts, "decoder_sparse_step": 1, "mlp_only_layers": dense}
    return entries


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = {"attention_bias": config.attention_bias, **expert_entries(config, base)}
    if base is None:
        own |= {"use_sliding_window": bool(config.sliding_layers), "sliding_window": config.sliding_window}
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
