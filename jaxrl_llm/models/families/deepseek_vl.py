"""DeepSeek-VL (arXiv 2403.05525): SigLIP tiles, whose patches become tokens by two linear maps, and a Llama that reads
them: the 1.3B, as the 7B (`deepseek_vl_hybrid`) has a second encoder."""

from typing import Any

from jaxrl_llm.models.families import llama, llava, siglip
from jaxrl_llm.models.families.decoder import TensorName, maps
from jaxrl_llm.models.families.entries import computed
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.vision.tower import VisionConfig

MODEL_TYPE = "deepseek_vl"
ARCHITECTURE = {"lm": "DeepseekVLForConditionalGeneration", "score": "", "step": ""}  # transformers has no other
TEXTS = {llama.MODEL_TYPE: llama}


def _vision_keys(tower: str) -> tuple[TensorName, ...]:
    """The keys of a vision part whose encoder's names begin so."""
    return (*siglip.keys(tower), *maps("vision/projector", "aligner", {"fc1": "linear1", "fc2": "linear2"}))


KEYS = llava.as_modules(llama.KEYS, _vision_keys("vision_model.vision_model."))
MODULE_KEYS = llava.as_modules(llama.KEYS, _vision_keys("vision_model."))
OTHER_KEYS = (MODULE_KEYS,)
# The head that pools the patches of a tile, which the published files have, and whose output no one reads.
UNREAD = ("model.vision_model.vision_model.head.", "model.vision_model.head.")
DEFAULTS = {"image_token_id": 100_015}  # for entries that are left out


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    family, text = llava.text_of(hf, TEXTS)
    text.setdefault("tie_word_embeddings", True)  # as transformers has it where no file says otherwise
    entries = hf.get("vision_config") or {}
    computed(entries, {"model_type": "siglip_vision_model"}, "vision_config.")
    token = siglip.image_token(hf, "image_token_id", text)
    vision = VisionConfig(siglip.read(entries, siglip.DEFAULT), 1, token, projector="bare_maps")
    return llava.config_of(hf, family, text, ARCHITECTURE, vision, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    vision = siglip.vision_of(config)
    entries = siglip.headless_entries(vision, base) | {"vision_use_head": False}
    own = {"model_type": MODEL_TYPE, "vision_config": entries}
    return llava.entries_of(config, base, TEXTS, ARCHITECTURE, own)
