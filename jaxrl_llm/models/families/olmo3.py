"""OLMo 3 (arXiv 2512.13961): OLMo 2 with a window in three of four layers, whose rotary positions are never scaled."""

from typing import Any

from jaxrl_llm.models.families import decoder, layer_types, olmo2, rotary
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "olmo3"
ARCHITECTURE = "Olmo3"
KEYS = olmo2.KEYS
DEFAULTS = {**olmo2.DEFAULTS, "sliding_window": 4096, "rope_theta": 500_000.0}  # for entries that are left out


def _with_ropes(hf: dict[str, Any]) -> dict[str, Any]:
    """The entries, with rotary parameters of both types of layers; files of transformers 4 scale those without a
    window."""
    base = hf.get("rope_theta") or DEFAULTS["rope_theta"]
    return {**hf, "rope_parameters": rotary.both_sets(hf, base, base)}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = _with_ropes(DEFAULTS | hf)
    own = olmo2.common(hf) | layer_types.read(hf, lambda layer: (layer + 1) % 4 != 0)
    return decoder.to_config(hf, ARCHITECTURE, own, overrides, rope={"by_type": True})


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = {"attention_bias": config.attention_bias, **layer_types.write(config, base)}
    # transformers takes one base for all layers for that of the layers without a window
    return decoder.from_config(config, base, ARCHITECTURE, MODEL_TYPE, own, rope=_with_ropes, write=rotary.write_sets)
