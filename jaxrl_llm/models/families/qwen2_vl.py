"""Qwen2-VL (arXiv 2409.12191): qwen2_5_vl with an encoder of layer norms, without windows and gates."""

import dataclasses
from typing import Any

from jaxrl_llm.models.families import qwen2_5_vl, qwen_vl
from jaxrl_llm.models.families.entries import positive
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.vision.patch_rows import PatchRowsConfig

MODEL_TYPE = "qwen2_vl"
ARCHITECTURE = {"lm": "Qwen2VLForConditionalGeneration", "score": "Qwen2VLForSequenceClassification"}
KEYS, MODULE_KEYS, OTHER_KEYS = qwen2_5_vl.KEYS, qwen2_5_vl.MODULE_KEYS, qwen2_5_vl.OTHER_KEYS
FAMILY = qwen2_5_vl.FAMILY._replace(
    model_type=MODEL_TYPE,
    architecture=ARCHITECTURE,
    encoder=PatchRowsConfig(ffn=5120, norm="layer", gated=False, activation="quick_gelu"),
    sizes={field: entry for field, entry in qwen_vl.SIZES.items() if field != "ffn"} | {"width": "embed_dim"},
    out="hidden_size",
)


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    text, entries = qwen2_5_vl.text_of(hf, FAMILY), {"mlp_ratio": 4} | (hf.get("vision_config") or {})
    encoder = qwen_vl.encoder_of(entries, text, FAMILY)
    encoder = dataclasses.replace(encoder, ffn=encoder.width * positive(entries, "mlp_ratio"))
    return qwen_vl.config_of(hf, text, FAMILY, encoder, {"attention_bias": True}, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    encoder = qwen_vl.net_encoder(config)
    return qwen_vl.entries_of(config, base, FAMILY, {}, {"mlp_ratio": encoder.ffn // encoder.width})
