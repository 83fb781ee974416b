"""LFM2-VL (arXiv 2511.23404): SigLIP 2's encoder (arXiv 2502.14786) of images of any size, whose large ones are cut
into tiles, squares of whose patches become tokens by two linear maps, and an LFM2 that reads them."""

import math
from typing import Any

from jaxrl_llm.models.families import lfm2, lfm2_moe, llava, qwen_vl, siglip
from jaxrl_llm.models.families.decoder import TensorName, layer_norm, maps
from jaxrl_llm.models.families.entries import computed, entries_of_sizes, number, positive, refuse, sizes_of
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.vision.patch_rows import PatchRowsConfig

MODEL_TYPE = "lfm2_vl"
ARCHITECTURE = {"lm": "Lfm2VlForConditionalGeneration", "score": "Lfm2VlForSequenceClassification"}
TEXTS = {module.MODEL_TYPE: module for module in (lfm2, lfm2_moe)}
PROJECTOR = "multi_modal_projector"


def _keys(text: tuple[TensorName, ...], tower: str) -> tuple[TensorName, ...]:
    """The keys of a decoder, and of an encoder whose names begin so."""
    vision = (
        *siglip.keys(tower),
        *layer_norm("vision/encoder/merger/norm", f"{PROJECTOR}.layer_norm"),
        *maps("vision/encoder/merger", PROJECTOR, {"fc1": "linear_1", "fc2": "linear_2"}),
    )
    return llava.as_modules(text, vision)


TOWER = "vision_tower."
_STACKED = lfm2_moe.OTHER_KEYS[0]
KEYS = _keys(lfm2_moe.KEYS, f"{TOWER}vision_model.")  # those of the other decoder are among these
MODULE_KEYS = _keys(lfm2_moe.KEYS, TOWER)
OTHER_KEYS = (MODULE_KEYS, _keys(_STACKED, f"{TOWER}vision_model."), _keys(_STACKED, TOWER))
# For entries that are left out.
DEFAULTS = {
    "image_token_id": 396,
    "downsample_factor": 2,
    "projector_hidden_size": 2560,
    "projector_bias": True,
    "projector_use_layernorm": True,
    "tie_word_embeddings": True,
}
# Fields of the encoder that are an integer each, their entries, and what these are where they are left out.
SIZES = {
    "width": ("hidden_size", 768),
    "layers": ("num_hidden_layers", 12),
    "heads": ("num_attention_heads", 12),
    "ffn": ("intermediate_size", 3072),
    "patch_size": ("patch_size", 16),
    "channels": ("num_channels", 3),
}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    family, text = llava.text_of(hf, TEXTS)
    text |= {"tie_embedding": bool(hf.get("tie_embedding", hf["tie_word_embeddings"]))}
    computed(hf, {"projector_hidden_act": "gelu"})
    return llava.config_of_merger(hf, family, text, ARCHITECTURE, _encoder(hf), overrides)


def _encoder(hf: dict[str, Any]) -> PatchRowsConfig:
    """The encoder of a config.json; raises ConfigError for another network."""
    entries = hf.get("vision_config") or {}
    siglip.refuse_head(entries)
    sizes = sizes_of(entries, SIZES)
    if sizes["width"] % sizes["heads"]:
        refuse("vision_config.hidden_size", sizes["width"], f"multiples of num_attention_heads = {sizes['heads']}")
    side = math.isqrt(count := positive({"num_patches": 256} | entries, "num_patches"))
    if side**2 != count:
        refuse("vision_config.num_patches", count, "squares")
    return PatchRowsConfig(
        **sizes,
        frames=0,
        merge=positive(hf, "downsample_factor"),
        norm="layer",
        norm_eps=number("vision_config.layer_norm_eps", entries.get("layer_norm_eps", 1e-6)),
        last_norm=True,
        gated=False,
        activation=siglip.read_activation(entries),
        attention_adapter="out",
        patch_bias=True,
        patch_map="pixels",
        rotary_base=0.0,
        positions=side,
        places="antialiased",
        merger="two_maps",
        merger_ffn=positive(hf, "projector_hidden_size"),
        merger_bias=bool(hf["projector_bias"]),
        merger_norm="square" if hf["projector_use_layernorm"] else "",
    )


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    encoder = qwen_vl.net_encoder(config)
    own = {
        "model_type": MODEL_TYPE,
        "downsample_factor": encoder.merge,
        "projector_hidden_size": encoder.merger_ffn,
        "projector_bias": encoder.merger_bias,
        "projector_use_layernorm": bool(encoder.merger_norm),
        "vision_config": {
            **((base or {}).get("vision_config") or {"model_type": "siglip2_vision_model", "vision_use_head": False}),
            **entries_of_sizes(encoder, SIZES),
            "num_patches": encoder.positions**2,
            "layer_norm_eps": encoder.norm_eps,
            "hidden_act": siglip.activation_entry(encoder.activation),
        },
    }
    return llava.entries_of(config, base, TEXTS, ARCHITECTURE, own)
