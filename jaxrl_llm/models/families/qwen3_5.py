"""Qwen3.5 (Qwen3.5-27B): the decoder of qwen3_5_text with Qwen3-VL's encoder, whose features join it in front alone."""

from typing import Any

from jaxrl_llm.models.families import llava, qwen3_5_text, qwen3_next, qwen3_vl, qwen_vl
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "qwen3_5"
ARCHITECTURE = {"lm": "Qwen3_5ForConditionalGeneration", "score": "Qwen3_5ForSequenceClassification"}
KEYS = llava.as_modules(qwen3_5_text.KEYS, qwen3_vl.TOWER_KEYS)
FAMILY = qwen_vl.Family(
    MODEL_TYPE,
    ARCHITECTURE,
    text={
        **qwen3_5_text.DEFAULTS, "vocab_size": 248_320, "hidden_size": 4096, "intermediate_size": 12_288,
        "num_hidden_layers": 32, "num_attention_heads": 16,
    },
    theta=10_000.0,
    sections=(11, 11, 10),
    interleaved=True,
    encoder=qwen3_vl.ENCODER,
    image_token=248_056,
)  # fmt: skip


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    text = qwen_vl.text_of(hf, FAMILY)
    encoder = qwen3_vl.encoder_of(hf, text, FAMILY)
    return qwen_vl.config_of(hf, text, FAMILY, encoder, qwen3_5_text.fields(text), overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    entries = qwen3_next.delta_entries(config, base)
    return qwen_vl.entries_of(config, base, FAMILY, entries, qwen3_vl.encoder_entries(config))
