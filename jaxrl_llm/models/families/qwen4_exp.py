"""Qwen4-Exp: the decoder of qwen4_exp_text with the encoder of qwen3_5."""

from typing import Any

import numpy as np

from jaxrl_llm.models.families import llava, qwen3_5, qwen3_vl, qwen4_exp_text, qwen_vl
from jaxrl_llm.models.families.decoder import TensorName
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "qwen4_exp"
ARCHITECTURE = {"lm": "Qwen4ExpForConditionalGeneration", "score": "Qwen4ExpForSequenceClassification"}
KEYS = llava.as_modules(qwen4_exp_text.KEYS, qwen3_vl.TOWER_KEYS)
OTHER_KEYS = (llava.as_modules(qwen4_exp_text.OTHER_KEYS[0], qwen3_vl.TOWER_KEYS),)
MODULE_KEYS = KEYS
FAMILY = qwen3_5.FAMILY._replace(
    model_type=MODEL_TYPE,
    architecture=ARCHITECTURE,
    text={
        **qwen4_exp_text.DEFAULTS, "vocab_size": 248_320, "hidden_size": 2048, "num_hidden_layers": 40,
        "num_attention_heads": 16,
    },
)  # fmt: skip


def keys(config: ModelConfig) -> tuple[TensorName, ...]:
    """The table of the files that transformers writes."""
    return llava.as_modules(qwen4_exp_text.keys(config), qwen3_vl.TOWER_KEYS)


def other_keys(config: ModelConfig) -> tuple[tuple[TensorName, ...], ...]:
    """The other tables, as those of the text part alone."""
    return tuple(llava.as_modules(table, qwen3_vl.TOWER_KEYS) for table in qwen4_exp_text.other_keys(config))


def constants(config: ModelConfig) -> dict[str, np.ndarray]:
    """The numbers of the hashes of n-grams, which files hold too."""
    found = qwen4_exp_text.constants(config)
    return {name.replace("model.", "model.language_model.", 1): x for name, x in found.items()}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    text = qwen4_exp_text.with_defaults(qwen_vl.text_of(hf, FAMILY))
    encoder, own = qwen3_vl.encoder_of(hf, text, FAMILY), qwen4_exp_text.fields(text)
    return qwen4_exp_text.checked(qwen_vl.config_of(hf, text, FAMILY, encoder, own, overrides))


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    given = None if base is None else base.get("text_config", base)
    entries = qwen4_exp_text.entries(config, given)
    return qwen_vl.entries_of(config, base, FAMILY, entries, qwen3_vl.encoder_entries(config))
