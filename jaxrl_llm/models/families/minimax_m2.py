"""MiniMax-M2: experts in every layer, which a sigmoid router chooses, and norms over all queries and all keys."""

from typing import Any

from jaxrl_llm.models.families import decoder, mixtral
from jaxrl_llm.models.families.decoder import LAYER, TensorName
from jaxrl_llm.models.families.entries import positive
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "minimax_m2"
ARCHITECTURE = "MiniMaxM2"


def _keys(block: str, experts: tuple[TensorName, ...]) -> tuple[TensorName, ...]:
    correction = TensorName("layers/mlp/correction", f"{LAYER}{block}.e_score_correction_bias")
    return (*decoder.ENDS, *decoder.PRE_NORMS, *decoder.ATTENTION, *decoder.QK_NORMS, correction, *experts)


KEYS = _keys("block_sparse_moe", decoder.experts("block_sparse_moe", mixtral.WORDS))
OTHER_KEYS = (_keys("mlp", decoder.stacked_experts("mlp")),)
DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "router_aux_loss_coef": 0.001,
}  # for entries that are left out
THETA = 5_000_000.0


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    if hf.get("rotary_dim") is not None:
        hf = {"partial_rotary_factor": positive(hf, "rotary_dim") / positive(hf, "head_dim")} | hf
    own = mixtral.experts(hf) | {"qk_norm": "whole", "router_sigmoid": True, "router_correction": True}
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, rope={"theta": THETA, "partial": True})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, mixtral.expert_entries(config))
