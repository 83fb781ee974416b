"""Qwen 1.5 and 2 mixtures of experts (arXiv 2407.10671): Qwen2 with experts, one of them for every token."""

from typing import Any

from jaxrl_llm.models.families import decoder, layer_types, qwen2, qwen3_moe
from jaxrl_llm.models.families.decoder import LAYER, TensorName
from jaxrl_llm.models.families.entries import positive
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "qwen2_moe"
ARCHITECTURE = "Qwen2Moe"
SHARED = (
    *decoder.maps("layers/mlp/shared", f"{LAYER}mlp.shared_expert", decoder.GATED),
    TensorName("layers/mlp/shared_gate/kernel", f"{LAYER}mlp.shared_expert_gate.weight", True),
)
KEYS, OTHER_KEYS = decoder.expert_tables((*decoder.KEYS, *SHARED))
DEFAULTS = {
    "num_key_value_heads": 16,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.001,
    "max_window_layers": 28,
    "qkv_bias": True,
}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    window = qwen2.window(hf)
    own = {
        "attention_bias": bool(hf["qkv_bias"]),
        **layer_types.read(
            {**hf, "sliding_window": window},
            lambda layer: window is not None and layer % 2 == 0 and layer < hf["max_window_layers"],
        ),
        **experts(hf),
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides)


def experts(hf: dict[str, Any]) -> dict[str, Any]:
    """The ModelConfig fields of the experts, one of them for every token."""
    shared = {"shared_expert_ffn": positive(hf, "shared_expert_intermediate_size"), "shared_expert_gate": True}
    return shared | qwen3_moe.experts(hf)


def expert_entries(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The entries of config.json that `experts` reads."""
    shared = {"shared_expert_intermediate_size": config.shared_expert_ffn}
    return shared | qwen3_moe.expert_entries(config, base)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = {"qkv_bias": config.attention_bias, **layer_types.write(config, base), **expert_entries(config, base)}
    own |= {"use_sliding_window": bool(config.sliding_layers)} if base is None else {}
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
