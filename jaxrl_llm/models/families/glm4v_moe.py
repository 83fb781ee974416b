"""GLM-4.5V and GLM-4.6V (arXiv 2507.01006): glm4_moe's decoder with the encoder of glm4v."""

from typing import Any

from jaxrl_llm.models.families import deepseek_v3, glm4_moe, glm4v, llava, qwen_vl
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "glm4v_moe"
ARCHITECTURE = {"lm": "Glm4vMoeForConditionalGeneration", "score": "Glm4vMoeForSequenceClassification"}
KEYS = llava.as_modules(glm4_moe.KEYS, glm4v.TOWER_KEYS)
OTHER_KEYS = (llava.as_modules(glm4_moe.OTHER_KEYS[0], glm4v.TOWER_KEYS),)
FAMILY = glm4v.FAMILY._replace(
    model_type=MODEL_TYPE,
    architecture=ARCHITECTURE,
    text={
        **glm4_moe.DEFAULTS, "vocab_size": 151_424, "hidden_size": 4096, "intermediate_size": 10_944,
        "num_hidden_layers": 46, "num_attention_heads": 96, "attention_bias": True,
    },
    image_token=151_363,
)  # fmt: skip


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    text = qwen_vl.text_of(hf, FAMILY)
    own = {**deepseek_v3.experts(text), "attention_bias": bool(text["attention_bias"])}
    return qwen_vl.config_of(hf, text, FAMILY, glm4v.encoder_of(hf, text, FAMILY), own, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    own = {**deepseek_v3.expert_entries(config, base), "attention_bias": config.attention_bias}
    return qwen_vl.entries_of(config, base, FAMILY, own, glm4v.encoder_entries(config))
