"""Hunyuan 3 (Tencent): attention as Qwen3, experts by a sigmoid with a correction behind dense layers."""

from typing import Any

from jaxrl_llm.models.families import decoder, deepseek_v3
from jaxrl_llm.models.families.decoder import TensorName
from jaxrl_llm.models.families.entries import dense_layers, mlp_types, positive, unset
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "hy_v3"
ARCHITECTURE = "HYV3"


def _keys(correction: str, shared: str, experts: tuple[TensorName, ...]) -> tuple[TensorName, ...]:
    return (
        *decoder.KEYS,
        *decoder.QK_NORMS,
        *deepseek_v3.beside_experts("mlp", correction, shared),
        *experts,
    )


KEYS = _keys("expert_bias", "shared_mlp", decoder.experts("mlp", router="router.gate"))
MODULE_KEYS = _keys("e_score_correction_bias", "shared_experts", decoder.stacked_experts("mlp"))
OTHER_KEYS = (MODULE_KEYS,)
UNREAD = ("model.layers.80.",)  # of multi-token prediction, behind the 80 layers of the published model
DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.006,
    "num_experts": 192,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1536,
    "router_scaling_factor": 2.826,
}  # for entries that are left out
FIELDS = decoder.EXPERTS | decoder.ATTENTION_BIAS | {"routed_scale": "router_scaling_factor"}  # an entry each


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    unset(hf, "mlp_bias")
    own = {
        **decoder.read_fields(hf, FIELDS),
        "qk_norm": "head",
        "shared_expert_ffn": positive(hf, "moe_intermediate_size") * positive(hf, "num_shared_experts"),
        "dense_layers": dense_layers(hf, 1),
        "router_sigmoid": True,
        "router_correction": True,
        "normalize_top_k": True,
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, rope={"theta": 11_158_840.0})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = {
        **decoder.write_fields(config, FIELDS),
        "num_shared_experts": config.shared_expert_ffn // max(config.expert_ffn, 1),
    }
    own |= {"mlp_layer_types": mlp_types(config)} if base is None else {}
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
