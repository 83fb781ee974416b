"""IQuest-Coder: Llama's shape."""

from typing import Any

from jaxrl_llm.models.families import decoder, llama
from jaxrl_llm.models.families.entries import unset
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "iquestcoder"
ARCHITECTURE = "IQuestCoder"  # and "Llama", whose classes transformers has for it
KEYS = decoder.KEYS
DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    unset(hf, "clip_qkv", "use_sliding_window")
    family = decoder.class_of(hf, ARCHITECTURE, llama.ARCHITECTURE)
    return decoder.to_config(hf, family, decoder.read_fields(hf, llama.FIELDS), overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    family = decoder.class_of(base, ARCHITECTURE, llama.ARCHITECTURE)
    return decoder.from_config(config, base, family, MODEL_TYPE, decoder.write_fields(config, llama.FIELDS))
