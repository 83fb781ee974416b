"""Qwen3.5's mixtures of experts (Qwen3.5-35B-A3B): the decoder of qwen3_5_moe_text with the encoder of qwen3_5."""

from typing import Any

from jaxrl_llm.models.families import llava, qwen3_5, qwen3_5_moe_text, qwen3_vl, qwen_vl
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "qwen3_5_moe"
ARCHITECTURE = {"lm": "Qwen3_5MoeForConditionalGeneration", "score": "Qwen3_5MoeForSequenceClassification"}
KEYS = llava.as_modules(qwen3_5_moe_text.KEYS, qwen3_vl.TOWER_KEYS)
OTHER_KEYS = (llava.as_modules(qwen3_5_moe_text.OTHER_KEYS[0], qwen3_vl.TOWER_KEYS),)
FAMILY = qwen3_5.FAMILY._replace(
    model_type=MODEL_TYPE,
    architecture=ARCHITECTURE,
    text={
        **qwen3_5_moe_text.DEFAULTS, "vocab_size": 248_320, "hidden_size": 2048, "num_hidden_layers": 40,
        "num_attention_heads": 16,
    },
)  # fmt: skip


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    text = qwen3_5_moe_text.with_defaults(qwen_vl.text_of(hf, FAMILY))
    encoder = qwen3_vl.encoder_of(hf, text, FAMILY)
    return qwen_vl.config_of(hf, text, FAMILY, encoder, qwen3_5_moe_text.fields(text), overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    entries = qwen3_5_moe_text.entries(config, base)
    return qwen_vl.entries_of(config, base, FAMILY, entries, qwen3_vl.encoder_entries(config))
