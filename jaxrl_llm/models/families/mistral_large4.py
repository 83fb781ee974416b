"""Mistral Large 4: Pixtral's encoder (arXiv 2410.07073), as Mistral 3 has it, and a decoder of its own."""

import dataclasses
from typing import Any

from jaxrl_llm.models.families import llava, mistral3, mistral_large4_text, qwen_vl
from jaxrl_llm.models.families.decoder import TensorName, maps
from jaxrl_llm.models.families.entries import computed
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "mistral_large4"
# transformers has no other.
ARCHITECTURE = {"lm": "MistralLarge4ForConditionalGeneration", "score": "", "step": ""}
TEXTS = {mistral_large4_text.MODEL_TYPE: mistral_large4_text}
WORDS = mistral_large4_text.WORDS
KEYS = (
    *mistral_large4_text.OWN_KEYS,
    *mistral3.encoder_keys("vision_encoder.", {x: f"w{x}" for x in "qkvo"}, WORDS),
    TensorName("vision/encoder/merger/norm/scale", "pre_mm_projector_norm.weight"),
    *maps("vision/encoder/merger", "patch_merger", {"proj": "merging_layer"}),
    *maps("vision/encoder/merger", "vision_language_adapter", {"fc1": "w_in", "fc2": "w_out"}),
)
# Queries and keys of the encoder are those of the files, whose dimensions that turn together are neighbours; the class
# of transformers moves them a half of a head apart, so that files with its names are no other table to read.
MODULE_KEYS = llava.as_modules(mistral_large4_text.KEYS, mistral3.VISION_KEYS)
UNREAD = ("mtp_dspark.",)  # of multi-token prediction
# The encoder of files without a vision_config.
ENCODER = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "patch_size": 14,
    "image_size": 1540,
    "hidden_act": "silu",
}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = mistral3.DEFAULTS | hf | {"vision_config": hf.get("vision_config") or ENCODER}
    family, text = llava.text_of(hf, TEXTS)
    computed(hf, mistral3.COMPUTED)
    # Adapters of its attention would be of numbers in another order than those of PEFT, which knows the class's.
    encoder = dataclasses.replace(mistral3.encoder_of(hf), rotary_neighbours=True, attention_adapter="")
    return llava.config_of_merger(hf, family, text, ARCHITECTURE, encoder, overrides, "image_token_index")


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    encoder = qwen_vl.net_encoder(config)
    own = {
        "model_type": MODEL_TYPE,
        "spatial_merge_size": encoder.merge,
        "multimodal_projector_bias": encoder.merger_bias,
        "vision_config": mistral3.encoder_entries(encoder, base),
    }
    return llava.entries_of(config, base, TEXTS, ARCHITECTURE, own, token="image_token_index")
