"""Mistral Small 3.1 and later, Devstral Small 2 and Ministral 3: Pixtral's encoder (arXiv 2410.07073) of images of any
size, squares of whose patches become tokens, and a Mistral, Ministral 3 or Mistral 4 that reads them."""

from typing import Any

from jaxrl_llm.models.families import decoder, llava, ministral3, mistral, mistral4, qwen_vl, siglip
from jaxrl_llm.models.families.decoder import TensorName, maps
from jaxrl_llm.models.families.entries import computed, entries_of_sizes, number, positive, refuse
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.vision.patch_rows import PatchRowsConfig

MODEL_TYPE = "mistral3"
ARCHITECTURE = {"lm": "Mistral3ForConditionalGeneration", "score": "Mistral3ForSequenceClassification"}
TEXTS = {module.MODEL_TYPE: module for module in (mistral, ministral3, mistral4)}
TEXT_KEYS = tuple(dict.fromkeys((*decoder.KEYS, *mistral4.KEYS)))
LAYERS = "vision/encoder/layers"


def vision_keys(tower: str, projector: str) -> tuple[TensorName, ...]:
    """The keys of a vision part whose encoder's and projector's names begin so."""
    maps_of_square = {"proj": "patch_merger.merging_layer", "fc1": "linear_1", "fc2": "linear_2"}
    return (
        *encoder_keys(tower, {x: f"{x}_proj" for x in "qkvo"}, decoder.GATED),
        TensorName("vision/encoder/merger/norm/scale", f"{projector}.norm.weight"),
        *maps("vision/encoder/merger", projector, maps_of_square),
    )


def encoder_keys(tower: str, attention: dict[str, str], gated: dict[str, str]) -> tuple[TensorName, ...]:
    """The keys of an encoder whose names begin so, with these names of the maps in its layers."""
    layer = f"{tower}transformer.layers.{{layer}}."
    return (
        TensorName("vision/encoder/patch/kernel", f"{tower}patch_conv.weight", transpose=True),
        TensorName("vision/encoder/patch_norm/scale", f"{tower}ln_pre.weight"),
        TensorName(f"{LAYERS}/norm1/scale", f"{layer}attention_norm.weight"),
        *maps(f"{LAYERS}/attention", f"{layer}attention", {"out" if x == "o" else x: attention[x] for x in "qkvo"}),
        TensorName(f"{LAYERS}/norm2/scale", f"{layer}ffn_norm.weight"),
        *maps(f"{LAYERS}/mlp", f"{layer}feed_forward", gated),
    )


VISION_KEYS = vision_keys("vision_tower.", "multi_modal_projector")
KEYS = llava.on_the_hub(TEXT_KEYS, VISION_KEYS)
MODULE_KEYS = llava.as_modules(TEXT_KEYS, VISION_KEYS)
OTHER_KEYS = (MODULE_KEYS,)
DEFAULTS = {"image_token_index": 10, "spatial_merge_size": 2}  # for entries that are left out
# The only values of entries that are computed.
COMPUTED = {"vision_feature_layer": -1, "projector_hidden_act": "gelu"}
# Fields of the encoder that are an integer each, their entries, and what these are where they are left out.
SIZES = {
    "width": ("hidden_size", 1024),
    "layers": ("num_hidden_layers", 24),
    "heads": ("num_attention_heads", 16),
    "ffn": ("intermediate_size", 4096),
    "patch_size": ("patch_size", 16),
    "channels": ("num_channels", 3),
}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    family, text = llava.text_of(hf, TEXTS)
    computed(hf, COMPUTED)
    encoder = encoder_of(hf)
    return llava.config_of_merger(hf, family, text, ARCHITECTURE, encoder, overrides, "image_token_index")


def encoder_of(hf: dict[str, Any]) -> PatchRowsConfig:
    """Pixtral's encoder of a config.json, with Mistral 3's merger; raises ConfigError for another network."""
    entries = hf.get("vision_config") or {}
    sizes = qwen_vl.rotary_sizes(entries, SIZES)
    rope = {"rope_theta": entries.get("rope_theta", 10000.0)} | (entries.get("rope_parameters") or {})
    if rope["rope_theta"] != 10000.0:
        refuse("vision_config.rope_theta", rope["rope_theta"], "10000.0")
    return PatchRowsConfig(
        **sizes,
        frames=0,
        merge=positive(hf, "spatial_merge_size"),
        norm_eps=1e-5,
        activation=siglip.read_activation(entries, "gelu"),
        attention_bias=False,
        attention_adapter="o",
        bias=False,
        patch_norm=True,
        rotary="alternating",
        merger="reduced",
        merger_bias=bool(hf.get("multimodal_projector_bias", False)),
        init_scale=number("vision_config.initializer_range", entries.get("initializer_range", 0.02)),
    )


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    encoder = qwen_vl.net_encoder(config)
    own = {
        "model_type": MODEL_TYPE,
        "spatial_merge_size": encoder.merge,
        "multimodal_projector_bias": encoder.merger_bias,
        "vision_config": encoder_entries(encoder, base),
    }
    return llava.entries_of(config, base, TEXTS, ARCHITECTURE, own, token="image_token_index")


def encoder_entries(encoder: PatchRowsConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The `vision_config` of such an encoder, over that of `base`."""
    return {
        **((base or {}).get("vision_config") or {"model_type": "pixtral"}),
        **entries_of_sizes(encoder, SIZES),
        "hidden_act": siglip.activation_entry(encoder.activation),
        "initializer_range": encoder.init_scale,
    }
