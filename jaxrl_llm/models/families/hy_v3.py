"""Hunyuan 3 (Tencent): attention as Qwen3, experts by a sigmoid with a correction behind dense layers."""

from typing import Any

from jaxrl_llm.models.families import decoder
from jaxrl_llm.models.families.decoder import LAYER, TensorName
from jaxrl_llm.models.families.entries import dense_layers, experts_of, mlp_types, number, positive, unset
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "hy_v3"
ARCHITECTURE = "HYV3"
ROUTER = "layers/mlp/router/kernel"


def _keys(router: str, correction: str, shared: str, experts: tuple[TensorName, ...]) -> tuple[TensorName, ...]:
    return (
        *decoder.KEYS,
        *decoder.QK_NORMS,
        TensorName(ROUTER, f"{LAYER}mlp.{router}.weight", transpose=True),
        TensorName("layers/mlp/correction", f"{LAYER}mlp.{correction}"),
        *decoder.maps("layers/mlp/shared", f"{LAYER}mlp.{shared}", decoder.GATED),
        *(key for key in experts if key.path != ROUTER),
    )


KEYS = _keys("router.gate", "expert_bias", "shared_mlp", decoder.experts("mlp"))
MODULE_KEYS = _keys("gate", "e_score_correction_bias", "shared_experts", decoder.stacked_experts("mlp"))
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


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    """The ModelConfig of a config.json; raises ConfigError for what the network does not compute."""
    hf = DEFAULTS | hf
    unset(hf, "mlp_bias")
    channels = positive(hf, "moe_intermediate_size")
    own = {
        **decoder.attention_biases(hf),
        **experts_of(hf, "num_experts", "num_experts_per_tok"),
        "qk_norm": "head",
        "expert_ffn": channels,
        "shared_expert_ffn": channels * positive(hf, "num_shared_experts"),
        "dense_layers": dense_layers(hf, 1),
        "router_sigmoid": True,
        "router_correction": True,
        "normalize_top_k": True,
        "routed_scale": number("router_scaling_factor", hf["router_scaling_factor"]),
    }
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, rope={"theta": 11_158_840.0})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The config.json of a net, over the entries of `base`."""
    own = {
        "attention_bias": config.attention_bias,
        "num_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "num_shared_experts": config.shared_expert_ffn // max(config.expert_ffn, 1),
        "moe_intermediate_size": config.expert_ffn,
        "router_scaling_factor": config.routed_scale,
    }
    own |= {"mlp_layer_types": mlp_types(config)} if base is None else {}
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
