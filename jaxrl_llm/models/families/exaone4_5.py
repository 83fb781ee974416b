"""EXAONE 4.5 (LG AI Research): Qwen2.5-VL's encoder with grouped queries, and an EXAONE 4.0 with positions of one axis;
videos are not read."""

from typing import Any

from jaxrl_llm.models.families import exaone4, llava, qwen2_5_vl, qwen_vl
from jaxrl_llm.models.families.entries import refuse
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.vision.patch_rows import PatchRowsConfig

MODEL_TYPE = "exaone4_5"
ARCHITECTURE = {"lm": "Exaone4_5_ForConditionalGeneration", "score": "Exaone4_5_ForSequenceClassification"}
TEXTS = {exaone4.MODEL_TYPE: exaone4, "exaone4_5_text": exaone4}  # which the first files name it
KEYS = llava.as_modules(exaone4.KEYS, qwen2_5_vl.TOWER_KEYS)
UNREAD = ("mtp.",)
DEFAULTS = {"image_token_id": 67, "tie_word_embeddings": False}  # for entries that are left out
FAMILY = qwen2_5_vl.FAMILY._replace(
    model_type=MODEL_TYPE,
    encoder=PatchRowsConfig(width=3584, kv_heads=8, window_size=112, full_layers=(7, 15, 23, 31)),
    sizes=qwen2_5_vl.FAMILY.sizes | {"kv_heads": "num_key_value_heads"},
)


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    family, text = llava.text_of(hf, TEXTS)
    encoder = qwen2_5_vl.encoder_of(hf, text, FAMILY)
    if encoder.heads % encoder.kv_heads:
        heads = f"divisors of num_heads = {encoder.heads}"
        refuse("vision_config.num_key_value_heads", encoder.kv_heads, heads)
    return llava.config_of_merger(hf, family, text, ARCHITECTURE, encoder, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    full_layers = list(qwen_vl.net_encoder(config).full_layers)
    own = {
        "model_type": MODEL_TYPE,
        "vision_config": qwen_vl.encoder_entries(config, base, FAMILY) | {"fullatt_block_indexes": full_layers},
    }
    return llava.entries_of(config, base, TEXTS, ARCHITECTURE, own)
