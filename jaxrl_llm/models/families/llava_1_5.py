"""LLaVA-1.5 (arXiv 2310.03744; the model_type is `llava`): tiles of CLIP or SigLIP, whose patches become tokens by two
linear maps, and one of several decoders; and Pixtral 12B (arXiv 2410.07073), whose images are of any size."""

import dataclasses
from typing import Any

from jaxrl_llm.models.families import llama, llava, mistral, mistral3, qwen2, siglip
from jaxrl_llm.models.families.decoder import TensorName, layer_norm, linear
from jaxrl_llm.models.families.entries import computed, positive, refuse
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.vision.patch_rows import PatchRowsConfig
from jaxrl_llm.models.vision.siglip import SiglipConfig
from jaxrl_llm.models.vision.tower import VisionConfig

MODEL_TYPE = "llava"
ARCHITECTURE = {"lm": "LlavaForConditionalGeneration", "score": "LlavaForSequenceClassification"}
TEXTS = {module.MODEL_TYPE: module for module in (llama, mistral, qwen2)}
PROJECTOR = "multi_modal_projector."


def _keys(tower: str) -> tuple[TensorName, ...]:
    """The keys of a vision part whose encoder's names begin so."""
    return (
        *siglip.keys(tower),
        TensorName("vision/encoder/class_token", f"{tower}embeddings.class_embedding"),
        *layer_norm("vision/encoder/first_norm", f"{tower}pre_layrnorm"),
        *linear("vision/projector/fc1", f"{PROJECTOR}linear_1"),
        *linear("vision/projector/fc2", f"{PROJECTOR}linear_2"),
        TensorName("vision/newline", "image_newline"),
    )


TEXT_KEYS = qwen2.KEYS  # those of the other decoders are among these
KEYS, MODULE_KEYS, OTHER_KEYS = llava.tables(TEXT_KEYS, _keys)
PIXTRAL = llava.on_the_hub(TEXT_KEYS, mistral3.VISION_KEYS)
PIXTRAL_MODULES = llava.as_modules(TEXT_KEYS, mistral3.VISION_KEYS)
# For entries that are left out, as those of the decoder's sizes are in LLaVA's files.
DEFAULTS = {
    "image_token_index": 32_000,
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}
_SEVEN_BILLION = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
TEXT_DEFAULTS = {
    "llama": _SEVEN_BILLION | {"intermediate_size": 11_008},
    "mistral": _SEVEN_BILLION | {"intermediate_size": 14_336},
    "qwen2": _SEVEN_BILLION | {"vocab_size": 151_936, "intermediate_size": 22_016},
}
# The encoders by the model_type of a vision_config, with what is left out of one, and the strategy by which the
# features of each are its patches.
CLIP = SiglipConfig(
    width=768, heads=12, patch_size=32, norm_eps=1e-5, activation="quick_gelu", class_token=True, clip=True
)
ENCODERS = {"clip_vision_model": (CLIP, "default"), "siglip_vision_model": (siglip.DEFAULT, "full")}
COMPUTED = {"projector_hidden_act": "gelu", "multimodal_projector_bias": True}  # the only values that are
OF_PIXTRAL = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}  # likewise, of that encoder


def keys(config: ModelConfig) -> tuple[TensorName, ...]:
    return PIXTRAL if _is_pixtral(config) else KEYS


def module_keys(config: ModelConfig) -> tuple[TensorName, ...]:
    return PIXTRAL_MODULES if _is_pixtral(config) else MODULE_KEYS


def other_keys(config: ModelConfig) -> tuple[tuple[TensorName, ...], ...]:
    return (PIXTRAL_MODULES,) if _is_pixtral(config) else OTHER_KEYS


def _is_pixtral(config: ModelConfig) -> bool:
    return config.vision is not None and isinstance(config.vision.encoder, PatchRowsConfig)


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    if (hf.get("vision_config") or {}).get("model_type") != "pixtral":
        return config_of(hf, ARCHITECTURE, overrides)
    family, text = llava.text_of(hf, TEXTS, TEXT_DEFAULTS)
    computed(hf, COMPUTED | OF_PIXTRAL)
    encoder = mistral3.encoder_of(hf | {"spatial_merge_size": 1, "multimodal_projector_bias": True})
    width = positive(text, "hidden_size")
    encoder = dataclasses.replace(encoder, merger="two_maps", merger_norm="", merger_ffn=width)
    return llava.config_of_merger(hf, family, text, ARCHITECTURE, encoder, overrides, "image_token_index")


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    if config.vision is None or not isinstance(config.vision.encoder, PatchRowsConfig):
        return entries_of(config, base, ARCHITECTURE, {"model_type": MODEL_TYPE})
    own = {
        "model_type": MODEL_TYPE,
        **OF_PIXTRAL,
        "vision_config": mistral3.encoder_entries(config.vision.encoder, base),
    }
    return llava.entries_of(config, base, TEXTS, ARCHITECTURE, own, TEXT_DEFAULTS, "image_token_index")


def config_of(
    hf: dict[str, Any], architecture: dict[str, str], overrides: dict[str, Any], encoder: str = "clip_vision_model",
    newline: str = "",
) -> ModelConfig:  # fmt: skip
    """`to_config` of the families that have this shape; `encoder` is the model_type of a vision_config that has none,
    and `newline` as in a VisionConfig."""
    family, text = llava.text_of(hf, TEXTS, TEXT_DEFAULTS)
    text |= {"tie_word_embeddings": llava.tied(hf)}
    computed(hf, COMPUTED)
    entries = hf.get("vision_config")
    kind = entries.get("model_type", encoder) if isinstance(entries, dict) else None
    if not isinstance(entries, dict) or kind not in ENCODERS:
        refuse("vision_config.model_type", kind, ", ".join((*ENCODERS, *(() if newline else ("pixtral",)))))
    default, strategy = ENCODERS[kind]
    if hf["vision_feature_select_strategy"] != strategy:
        refuse("vision_feature_select_strategy", hf["vision_feature_select_strategy"], f"{strategy!r} of a {kind}")
    if kind == "siglip_vision_model":
        siglip.refuse_head(entries)
    read = siglip.read(entries, default)
    layer = hf["vision_feature_layer"]
    first = -read.layers if isinstance(layer, int) else 0
    if not isinstance(layer, int) or not (first <= layer < 0 or 0 < layer <= read.layers):
        refuse("vision_feature_layer", layer, f"one layer, {first} to -1 or 1 to {read.layers}")
    read = dataclasses.replace(read, features_from=layer if layer > 0 else read.layers + 1 + layer)
    token = siglip.image_token(hf, "image_token_index", text)
    vision = VisionConfig(read, 1, token, projector="bare_maps", newline=newline)
    return llava.config_of(hf, family, text, architecture, vision, overrides)


def entries_of(
    config: ModelConfig, base: dict[str, Any] | None, architecture: dict[str, str], own: dict[str, Any]
) -> dict[str, Any]:
    """`from_config` of the families that have this shape; `own` are their entries besides those of all."""
    vision = siglip.vision_of(config)
    encoder = vision.encoder
    assert isinstance(encoder, SiglipConfig)
    given = base or {}
    kind, strategy = next((kind, way) for kind, (x, way) in ENCODERS.items() if x.clip == encoder.clip)
    entries = given.get("vision_config") or {"model_type": kind} | ({} if encoder.clip else {"vision_use_head": False})
    layer = encoder.features_from
    if given.get("vision_feature_layer", -1) < 0:  # counted from the last, as files have it
        layer -= encoder.layers + 1
    own = {
        "vision_feature_layer": layer,
        "vision_feature_select_strategy": strategy,
        **own,
        "vision_config": entries | siglip.write(vision),
    }
    own |= {"image_seq_length": vision.tile_tokens} if base is None else {}
    return llava.entries_of(config, base, TEXTS, architecture, own, TEXT_DEFAULTS, "image_token_index")
