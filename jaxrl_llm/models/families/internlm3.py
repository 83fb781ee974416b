"""InternLM 3: Llama's shape, whose biases are all or none."""

from typing import Any

from jaxrl_llm.models.families import decoder, llama
from jaxrl_llm.models.families.entries import refuse, renamed
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "internlm3"
ARCHITECTURE = "InternLM3"  # and "Llama", whose classes transformers has for it
KEYS = decoder.KEYS
NAMES = {"qkv_bias": "attention_bias", "bias": "mlp_bias"}  # of published files
DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | renamed(hf, NAMES)
    own = decoder.read_fields(hf, llama.FIELDS)
    if own["attention_bias"] != own["mlp_bias"]:
        refuse("bias", own["mlp_bias"], f"qkv_bias = {own['attention_bias']}")
    family = decoder.class_of(hf, ARCHITECTURE, llama.ARCHITECTURE)
    return decoder.to_config(hf, family, own, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = {} if base else decoder.write_fields(config, llama.FIELDS)
    family = decoder.class_of(base, ARCHITECTURE, llama.ARCHITECTURE)
    return decoder.from_config(config, base, family, MODEL_TYPE, own)
