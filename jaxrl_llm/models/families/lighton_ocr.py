"""LightOnOCR (arXiv 2601.14251): Mistral Small 3.1's vision part, without biases, and a Qwen3 that reads it."""

from typing import Any

from jaxrl_llm.models.families import llava, mistral3, qwen3, qwen_vl
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "lighton_ocr"
ARCHITECTURE = {"lm": "LightOnOcrForConditionalGeneration", "score": "LightOnOcrForSequenceClassification"}
TEXTS = {qwen3.MODEL_TYPE: qwen3}
KEYS = llava.as_modules(qwen3.KEYS, mistral3.vision_keys("vision_encoder.", "vision_projection"))
DEFAULTS = {"image_token_id": 151_655, "spatial_merge_size": 2, "tie_word_embeddings": True}  # for those left out
ENCODER = {"patch_size": 14, "hidden_act": "silu"}  # without a vision_config; else what it leaves out is Pixtral's


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    family, text = llava.text_of(hf, TEXTS)
    entries = {
        "spatial_merge_size": hf["spatial_merge_size"],
        "vision_config": hf.get("vision_config") or ENCODER,
    }
    encoder = mistral3.encoder_of(entries)
    return llava.config_of_merger(hf, family, text, ARCHITECTURE, encoder, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    encoder = qwen_vl.net_encoder(config)
    own = {
        "model_type": MODEL_TYPE,
        "spatial_merge_size": encoder.merge,
        "vision_config": mistral3.encoder_entries(encoder, base),
    }
    return llava.entries_of(config, base, TEXTS, ARCHITECTURE, own)
