"""Aya Vision (arXiv 2505.08751): SigLIP tiles, whose squares of patches become tokens behind a norm and a gated
feed-forward, and a Command R or R7B that reads them."""

import dataclasses
from typing import Any

from jaxrl_llm.models.families import cohere, cohere2, llava, siglip
from jaxrl_llm.models.families.decoder import TensorName, layer_norm, maps
from jaxrl_llm.models.families.entries import computed, number, positive, refuse
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.vision.tower import VisionConfig

MODEL_TYPE = "aya_vision"
ARCHITECTURE = {"lm": "AyaVisionForConditionalGeneration", "score": "", "step": ""}  # transformers has no other
TEXTS = {module.MODEL_TYPE: module for module in (cohere2, cohere)}
PROJECTOR = "multi_modal_projector"


def vision_keys(tower: str) -> tuple[TensorName, ...]:
    """The keys of a vision part whose encoder's names begin so."""
    return (
        *siglip.keys(tower),
        *layer_norm("vision/projector/norm", f"{PROJECTOR}.layernorm"),
        *maps("vision/projector", PROJECTOR, {"fc1": "linear_1", "fc2": "linear_2"}),
    )


KEYS, MODULE_KEYS, OTHER_KEYS = llava.tables(cohere.KEYS, vision_keys)  # those of both decoders
# For entries that are left out.
DEFAULTS = {
    "image_token_index": 255_036, "downsample_factor": 2, "adapter_layer_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip
_SIZES = {
    "vocab_size": 256_000, "hidden_size": 8192, "num_hidden_layers": 40, "intermediate_size": 22_528,
    "num_attention_heads": 64,
}  # fmt: skip
TEXT_DEFAULTS = dict.fromkeys(TEXTS, _SIZES)


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    computed(hf, {"vision_feature_select_strategy": "full", "vision_feature_layer": -1})
    norm = number("adapter_layer_norm_eps", hf["adapter_layer_norm_eps"], above=0)
    return config_of(hf, TEXTS, ARCHITECTURE, "image_token_index", norm, overrides)


def config_of(
    hf: dict[str, Any], families: dict[str, Any], architecture: dict[str, str], token: str, norm: float,
    overrides: dict[str, Any],
) -> ModelConfig:  # fmt: skip
    """`to_config` of the families that have this shape; `token` is the entry of the image token, and `norm` the epsilon
    of the projector's norm: without one (0) features are behind the encoder's own."""
    family, text = llava.text_of(hf, families, TEXT_DEFAULTS)
    computed(hf.get("vision_config") or {}, {"model_type": "siglip_vision_model"}, "vision_config.")
    encoder = siglip.headless(hf)
    encoder = dataclasses.replace(encoder, features_from=encoder.layers if norm else 0)
    factor = positive(hf, "downsample_factor")
    if encoder.side % factor:
        refuse("downsample_factor", factor, f"divisors of the {encoder.side} patches along a side of a tile")
    channels = positive({"alignment_intermediate_size": text["hidden_size"]} | hf, "alignment_intermediate_size")
    if channels % 2:
        refuse("alignment_intermediate_size", channels, "even numbers")
    id_of_token = siglip.image_token(hf, token, text)
    vision = VisionConfig(
        encoder, factor, id_of_token, projector="gated", projector_ffn=channels, projector_norm=norm
    )  # fmt: skip
    return llava.config_of(hf, family, text, architecture, vision, overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    vision = siglip.vision_of(config)
    own = {
        "model_type": MODEL_TYPE,
        "adapter_layer_norm_eps": vision.projector_norm,
        "vision_feature_layer": -1,
    }
    return entries_of(config, base, TEXTS, ARCHITECTURE, own, "image_token_index")


def entries_of(
    config: ModelConfig, base: dict[str, Any] | None, families: dict[str, Any], architecture: dict[str, str],
    own: dict[str, Any], token: str = "image_token_id",
) -> dict[str, Any]:  # fmt: skip
    """`from_config` of the families that have this shape; `own` are their entries besides those of all."""
    vision = siglip.vision_of(config)
    own = {
        "downsample_factor": vision.merge,
        "alignment_intermediate_size": vision.projector_ffn,
        "vision_config": siglip.headless_entries(vision, base),
        **own,
    }
    return llava.entries_of(config, base, families, architecture, own, TEXT_DEFAULTS, token)
