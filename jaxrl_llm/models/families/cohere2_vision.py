"""Command A Vision (Cohere, 2025): SigLIP tiles, whose squares of patches become tokens by a gated feed-forward, and a
Command A that reads them."""

from typing import Any

from jaxrl_llm.models.families import aya_vision, cohere2, llava
from jaxrl_llm.models.model_config import ModelConfig

MODEL_TYPE = "cohere2_vision"
ARCHITECTURE = {"lm": "Cohere2VisionForConditionalGeneration", "score": "", "step": ""}  # transformers has no other
TEXTS = {cohere2.MODEL_TYPE: cohere2}
KEYS, MODULE_KEYS = (
    llava.as_modules(cohere2.KEYS, aya_vision.vision_keys(f"vision_tower.{part}")) for part in ("vision_model.", "")
)
OTHER_KEYS = (MODULE_KEYS,)
# For entries that are left out.
DEFAULTS = {
    "image_token_id": 255_036, "downsample_factor": 2, "alignment_intermediate_size": 36_864,
    "tie_word_embeddings": True,
}  # fmt: skip


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    return aya_vision.config_of(DEFAULTS | hf, TEXTS, ARCHITECTURE, "image_token_id", 0.0, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return aya_vision.entries_of(config, base, TEXTS, ARCHITECTURE, {"model_type": MODEL_TYPE})
