"""Idefics3 (arXiv 2408.12637): SigLIP tiles, squares of patches projected linearly, and a Llama that reads them."""

from typing import Any

from jaxrl_llm.models.families import llama, llava, siglip
from jaxrl_llm.models.families.decoder import linear
from jaxrl_llm.models.families.entries import positive, refuse
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.vision.siglip import SiglipConfig
from jaxrl_llm.models.vision.tower import VisionConfig

MODEL_TYPE = "idefics3"
ARCHITECTURE = {"lm": "Idefics3ForConditionalGeneration", "score": "Idefics3ForSequenceClassification"}
VISION_KEYS = (
    *siglip.keys("model.vision_model."),
    *linear("vision/projector/proj", "model.connector.modality_projection.proj"),
)
KEYS = (
    *(key._replace(tensor=key.tensor.replace("model.", "model.text_model.", 1)) for key in llama.KEYS),
    *VISION_KEYS,
)
# For entries that are left out.
DEFAULTS = {"image_token_id": 128257, "scale_factor": 2, "tie_word_embeddings": False}
TEXTS = {llama.MODEL_TYPE: llama}
TEXT_DEFAULTS = {
    llama.MODEL_TYPE: {
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
}  # fmt: skip


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    return config_of(hf, ARCHITECTURE, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return entries_of(config, base, ARCHITECTURE, MODEL_TYPE)


def config_of(hf: dict[str, Any], architecture: dict[str, str], overrides: dict[str, Any]) -> ModelConfig:
    """`to_config` of the families that have this shape."""
    hf = DEFAULTS | hf
    family, text = llava.text_of(hf | {"text_config": hf.get("text_config") or {}}, TEXTS, TEXT_DEFAULTS)
    encoder = siglip.read(hf.get("vision_config") or {}, SiglipConfig())
    factor = positive(hf, "scale_factor")
    if encoder.side % factor:
        refuse("scale_factor", factor, f"divisors of the {encoder.side} patches along a side of a tile")
    vision = VisionConfig(encoder, factor, siglip.image_token(hf, "image_token_id", text))
    return llava.config_of(hf, family, text, architecture, vision, overrides)


def entries_of(
    config: ModelConfig, base: dict[str, Any] | None, architecture: dict[str, str], model_type: str
) -> dict[str, Any]:
    """`from_config` of the families that have this shape."""
    vision = siglip.vision_of(config)
    own = {
        "model_type": model_type,
        "scale_factor": vision.merge,
        "vision_config": ((base or {}).get("vision_config") or {"model_type": f"{model_type}_vision"})
        | siglip.write(vision),
    }
    return llava.entries_of(config, base, TEXTS, architecture, own, TEXT_DEFAULTS)
