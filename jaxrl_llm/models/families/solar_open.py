"""Solar Open (arXiv 2601.07022): attention as Llama, experts as GLM-4.5 in every layer."""

from typing import Any

from jaxrl_llm.models.families import decoder, deepseek_v3, glm4_moe
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "solar_open"
ARCHITECTURE = "SolarOpen"
KEYS, OTHER_KEYS = glm4_moe.KEYS, glm4_moe.OTHER_KEYS
DEFAULTS = {
    **glm4_moe.DEFAULTS,
    "head_dim": 128,
    "moe_intermediate_size": 1280,
    "first_k_dense_replace": 0,
    "partial_rotary_factor": 1.0,
}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    hf = {"intermediate_size": hf["moe_intermediate_size"], **hf}  # of dense layers, which there are none of
    own = {**deepseek_v3.experts(hf), "attention_bias": bool(hf.get("attention_bias", False))}
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, rope={"theta": 1_000_000.0})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = {**deepseek_v3.expert_entries(config, base), "attention_bias": config.attention_bias}
    hf = decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own)
    given = () if base is None else base
    own_only = {"intermediate_size", "first_k_dense_replace", "num_nextn_predict_layers"} - {*given}
    return {entry: value for entry, value in hf.items() if entry not in own_only}
