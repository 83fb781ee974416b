"""The text part of Gemma 4 12B: Gemma 4 without per-layer embeddings and experts."""

from typing import Any

from jaxrl_llm.models.families import gemma2, gemma4_text
from jaxrl_llm.models.families.decoder import LAYER, QK_NORMS, TensorName
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "gemma4_unified_text"
ARCHITECTURE = "Gemma4Unified"
KEYS = (*gemma2.KEYS, *QK_NORMS, TensorName("layers/out_scale", f"{LAYER}layer_scalar"))
DEFAULTS = gemma4_text.DEFAULTS | {"sliding_window": 1024}  # for entries that are left out
WITHOUT = {"hidden_size_per_layer_input": 0, "enable_moe_block": False}  # as transformers, whatever a file says
unused_tensors = gemma4_text.unused_tensors


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    return gemma4_text.read(DEFAULTS | hf | WITHOUT, ARCHITECTURE, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    hf = gemma4_text.write(config, base, ARCHITECTURE, MODEL_TYPE)
    others = {*WITHOUT, *gemma4_text.EXPERTS.values(), "vocab_size_per_layer_input"} - {*(base or ())}
    return {entry: value for entry, value in hf.items() if entry not in others}
