"""Gemma 3 with vision (arXiv 2503.19786): SigLIP tiles, and means of squares of patches, projected linearly.

In the decoder, `gemma3_text`, the tokens of an image see each other.
"""

import math
from typing import Any

from jaxrl_llm.models.families import gemma3_text, siglip
from jaxrl_llm.models.families.decoder import TensorName
from jaxrl_llm.models.families.entries import positive, refuse
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.vision.tower import VisionConfig

MODEL_TYPE = "gemma3"
ARCHITECTURE = {"lm": "Gemma3ForConditionalGeneration", "score": "Gemma3ForSequenceClassification"}


def _keys(text: str, head: str, tower: str, projector: str) -> tuple[TensorName, ...]:
    """The keys where the names of the decoder, its head, the encoder and the projector begin so."""
    return (
        *(
            key._replace(tensor=key.tensor.replace("model.", text, 1).replace("lm_head.", head))
            for key in gemma3_text.KEYS
        ),
        *siglip.keys(tower),
        TensorName("vision/projector/norm/scale", f"{projector}mm_soft_emb_norm.weight"),
        TensorName("vision/projector/proj/kernel", f"{projector}mm_input_projection_weight"),
    )


def _as_modules(tower: str) -> tuple[TensorName, ...]:
    return _keys("model.language_model.", "lm_head.", f"model.{tower}", "model.multi_modal_projector.")


def _as_on_the_hub(tower: str) -> tuple[TensorName, ...]:
    return _keys("language_model.model.", "language_model.lm_head.", tower, "multi_modal_projector.")


TOWER = "vision_tower."
KEYS = _as_on_the_hub(f"{TOWER}vision_model.")
MODULE_KEYS = _as_modules(TOWER)
OTHER_KEYS = (_as_on_the_hub(TOWER), MODULE_KEYS, _as_modules(f"{TOWER}vision_model."))
# For entries that are left out.
DEFAULTS = {"image_token_index": 262_144, "mm_tokens_per_image": 256, "tie_word_embeddings": True}
TEXT_SIZES = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
SHARED = ("architectures", "tie_word_embeddings", "quantization_config", "num_labels", "id2label", "label2id")


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    """The ModelConfig of a config.json; raises ConfigError for what the network does not compute."""
    hf = DEFAULTS | hf
    text = hf.get("text_config")
    if not isinstance(text, dict) or text.get("model_type", gemma3_text.MODEL_TYPE) != gemma3_text.MODEL_TYPE:
        refuse("text_config", text, f"the entries of a {gemma3_text.MODEL_TYPE} model")
    text = {**TEXT_SIZES, **text, **{name: hf[name] for name in SHARED if name in hf}}
    entries = hf.get("vision_config") or {}
    if entries.get("vision_use_head", True):
        refuse("vision_config.vision_use_head", True, "false (an encoder without the head that pools its patches)")
    encoder = siglip.read(entries, siglip.DEFAULT)
    side = math.isqrt(positive(hf, "mm_tokens_per_image"))
    if side**2 != hf["mm_tokens_per_image"] or encoder.side % side:
        supported = f"squares of divisors of the {encoder.side} patches along a side of a tile"
        refuse("mm_tokens_per_image", hf["mm_tokens_per_image"], supported)
    token = siglip.image_token(hf, "image_token_index", text)
    vision = VisionConfig(encoder, encoder.side // side, token, projector="average", bidirectional="all")
    return gemma3_text.config_of(text, ARCHITECTURE, {"vision": vision}, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The config.json of a net, over the entries of `base`; raises ConfigError for one without vision."""
    vision = siglip.vision_of(config)
    base = base or {}
    given = base.get("text_config")
    text = gemma3_text.entries_of(config, None if given is None else TEXT_SIZES | given, ARCHITECTURE)
    # Of these the whole model's are read, and its decoder's stay as they are.
    shared = {name: text.pop(name) for name in SHARED if name in text}
    text |= {name: x for name, x in (given or {}).items() if name in SHARED}
    encoder = base.get("vision_config") or {"model_type": "siglip_vision_model", "vision_use_head": False}
    return {
        **base,
        **shared,
        "model_type": MODEL_TYPE,
        "image_token_index": vision.image_token,
        "mm_tokens_per_image": vision.tile_tokens,
        "text_config": text,
        "vision_config": encoder | siglip.write(vision),
    }
