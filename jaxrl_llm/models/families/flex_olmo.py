"""FlexOlmo (arXiv 2507.07024): OLMo 2 with the experts of OLMoE."""

from typing import Any

from jaxrl_llm.models.families import decoder, olmo2, olmoe, qwen3_moe
from jaxrl_llm.models.families.entries import positive
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "flex_olmo"
ARCHITECTURE = "FlexOlmo"
KEYS, OTHER_KEYS = decoder.expert_tables(olmo2.KEYS)
DEFAULTS = {"num_experts_per_tok": 5, "norm_topk_prob": False, "router_aux_loss_coef": 0.01}  # for entries left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    experts = qwen3_moe.experts({**hf, "moe_intermediate_size": positive(hf, "intermediate_size")})
    return decoder.to_config(hf, ARCHITECTURE, olmo2.common(hf) | experts, overrides, rope={"theta": 500_000.0})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, olmoe.own_entries(config, base))
