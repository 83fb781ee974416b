"""GLM-5.3-Flash: GLM-OCR's encoder of images of any size, with clipped gates, and its text part, `glm5_next_text`,
whose tokens have no positions; videos are not read."""

import dataclasses
from typing import Any

from jaxrl_llm.models.families import glm5_next_text, glm_ocr, llava, qwen_vl
from jaxrl_llm.models.families.entries import number
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "glm5_next"
# transformers has no other.
ARCHITECTURE = {"lm": "Glm5NextForConditionalGeneration", "score": "", "step": ""}
TEXTS = {glm5_next_text.MODEL_TYPE: glm5_next_text}
KEYS = llava.as_modules(glm5_next_text.KEYS, glm_ocr.TOWER_KEYS)
MODULE_KEYS = llava.as_modules(glm5_next_text.MODULE_KEYS, glm_ocr.TOWER_KEYS)
OTHER_KEYS = (MODULE_KEYS,)
UNREAD = ("model.language_model.layers.45.",)  # of multi-token prediction, behind the published model's 45 layers
DEFAULTS = {"image_token_id": 154_854, "tie_word_embeddings": False}  # for entries that are left out
FAMILY = glm_ocr.FAMILY._replace(
    model_type=MODEL_TYPE,
    encoder=dataclasses.replace(glm_ocr.FAMILY.encoder, merger_ffn=10_240, swiglu_limit=10.0),
    sizes=qwen_vl.SIZES | {"merger_ffn": "projection_intermediate_size"},
)


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    family, text = llava.text_of(hf, TEXTS)
    entries = hf.get("vision_config") or {}
    encoder, bias = qwen_vl.encoder_of(entries, text, FAMILY), bool(entries.get("attention_bias", True))
    encoder = dataclasses.replace(
        encoder,
        attention_bias=bias,
        bias=bias,
        norm_eps=number("vision_config.rms_norm_eps", entries.get("rms_norm_eps", encoder.norm_eps)),
        swiglu_limit=number("vision_config.swiglu_limit", entries.get("swiglu_limit", encoder.swiglu_limit), above=0),
    )
    return llava.config_of_merger(hf, family, text, ARCHITECTURE, encoder, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    encoder = qwen_vl.net_encoder(config)
    entries = {
        "attention_bias": encoder.attention_bias,
        "rms_norm_eps": encoder.norm_eps,
        "swiglu_limit": encoder.swiglu_limit,
    }
    own = {"model_type": MODEL_TYPE, "vision_config": qwen_vl.encoder_entries(config, base, FAMILY) | entries}
    return llava.entries_of(config, base, TEXTS, ARCHITECTURE, own)
