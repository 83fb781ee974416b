"""Gemma 3 with vision (arXiv 2503.19786): SigLIP tiles, and means of squares of patches, projected linearly.

In the decoder, `gemma3_text`, the tokens of an image see each other.
"""

import math
from typing import Any

from jaxrl_llm.models.families import gemma3_text, llava, siglip
from jaxrl_llm.models.families.decoder import TensorName
from jaxrl_llm.models.families.entries import positive, refuse
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.vision.tower import VisionConfig

MODEL_TYPE = "gemma3"
ARCHITECTURE = {"lm": "Gemma3ForConditionalGeneration", "score": "Gemma3ForSequenceClassification"}


TEXTS = {gemma3_text.MODEL_TYPE: gemma3_text}


def _vision_keys(tower: str) -> tuple[TensorName, ...]:
    """The keys of a vision part whose encoder's names begin so."""
    return (
        *siglip.keys(tower),
        TensorName("vision/projector/norm/scale", "multi_modal_projector.mm_soft_emb_norm.weight"),
        TensorName("vision/projector/proj/kernel", "multi_modal_projector.mm_input_projection_weight"),
    )


KEYS, MODULE_KEYS, OTHER_KEYS = llava.tables(gemma3_text.KEYS, _vision_keys)
# For entries that are left out.
DEFAULTS = {"image_token_index": 262_144, "mm_tokens_per_image": 256, "tie_word_embeddings": True}
TEXT_DEFAULTS = {
    gemma3_text.MODEL_TYPE: {
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8,
    },
}  # fmt: skip


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    family, text = llava.text_of(hf, TEXTS, TEXT_DEFAULTS)
    encoder = siglip.headless(hf)
    side = math.isqrt(positive(hf, "mm_tokens_per_image"))
    if side**2 != hf["mm_tokens_per_image"] or encoder.side % side:
        supported = f"squares of divisors of the {encoder.side} patches along a side of a tile"
        refuse("mm_tokens_per_image", hf["mm_tokens_per_image"], supported)
    token = siglip.image_token(hf, "image_token_index", text)
    vision = VisionConfig(encoder, encoder.side // side, token, projector="average", bidirectional="all")
    return llava.config_of(hf, family, text, ARCHITECTURE, vision, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    vision = siglip.vision_of(config)
    own = {
        "model_type": MODEL_TYPE,
        "mm_tokens_per_image": vision.tile_tokens,
        "vision_config": siglip.headless_entries(vision, base),
    }
    return llava.entries_of(config, base, TEXTS, ARCHITECTURE, own, TEXT_DEFAULTS, "image_token_index")
