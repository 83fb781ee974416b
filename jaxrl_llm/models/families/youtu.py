"""Youtu-LLM (arXiv 2512.24618): latent attention as DeepSeek-V3, and dense feed-forwards."""

from typing import Any

from jaxrl_llm.models.families import decoder, deepseek_v3
from jaxrl_llm.models.families.entries import positive
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "youtu"
ARCHITECTURE = "Youtu"
KEYS = (*decoder.ENDS, *decoder.PRE_NORMS, *deepseek_v3.LATENT_KEYS, *decoder.FEED_FORWARD)
DEFAULTS = deepseek_v3.DEFAULTS | {"tie_word_embeddings": True}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf | {"n_routed_experts": None}
    if hf.get("initializer_range") is None:
        hf["initializer_range"] = 2 / (5 * positive(hf, "hidden_size")) ** 0.5
    return deepseek_v3.read(hf, ARCHITECTURE, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, deepseek_v3.entries(config, base))
