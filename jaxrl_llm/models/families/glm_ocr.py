"""GLM-OCR: glm4v with an encoder without learned positions, whose heads have norms, and a decoder without biases."""

import dataclasses
from typing import Any

from jaxrl_llm.models.families import glm4, glm4v, llava, qwen_vl
from jaxrl_llm.models.families.decoder import norms
from jaxrl_llm.models.families.entries import number
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.vision.patch_rows import PatchRowsConfig

MODEL_TYPE = "glm_ocr"
ARCHITECTURE = {"lm": "GlmOcrForConditionalGeneration", "score": "GlmOcrForSequenceClassification"}
TOWER_KEYS = (
    *(key for key in glm4v.TOWER_KEYS if "/patch_norm/" not in key.path and "/position/" not in key.path),
    *norms(f"{glm4v.LAYERS}attention/", f"{glm4v.BLOCK}attn.", {"q_norm": "q_norm", "k_norm": "k_norm"}),
)
KEYS = llava.as_modules(glm4.KEYS, TOWER_KEYS)
UNREAD = ("model.language_model.layers.16.",)  # of multi-token prediction, behind the 16 layers of the published model
FAMILY = qwen_vl.Family(
    MODEL_TYPE,
    ARCHITECTURE,
    text={
        "vocab_size": 59_392, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0,
    },
    theta=10_000.0,
    sections=(8, 12, 12),
    interleaved=False,
    encoder=PatchRowsConfig(
        width=1024, layers=24, heads=16, ffn=4096, patch_size=14, norm_eps=1e-5, head_norms="qk", patch_bias=True,
        merger="convolved",
    ),
    image_token=59_280,
)  # fmt: skip


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    text, entries = qwen_vl.text_of(hf, FAMILY), hf.get("vision_config") or {}
    encoder = qwen_vl.encoder_of(entries, text, FAMILY)
    bias = bool(entries.get("attention_bias", True))
    encoder = dataclasses.replace(
        encoder,
        attention_bias=bias,
        bias=bias,
        norm_eps=number("vision_config.rms_norm_eps", entries.get("rms_norm_eps", encoder.norm_eps)),
        merger_ffn=text["hidden_size"] * encoder.channels,
    )
    return qwen_vl.config_of(hf, text, FAMILY, encoder, {"norms": "both", "rope_interleaved": True}, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    encoder = qwen_vl.net_encoder(config)
    entries = {"attention_bias": encoder.attention_bias, "rms_norm_eps": encoder.norm_eps}
    return qwen_vl.entries_of(config, base, FAMILY, {}, entries)
