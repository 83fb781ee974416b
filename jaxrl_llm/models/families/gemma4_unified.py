"""Gemma 4 12B: patches of images of any size that become tokens without an encoder, and a `gemma4_unified_text` that
reads them, as the larger models of gemma4 do.

Sound and videos are not read: the audio part is left where it is, and exports have none.
"""

from typing import Any

from jaxrl_llm.models.families import gemma4, gemma4_unified_text, llava, qwen_vl
from jaxrl_llm.models.families.decoder import TensorName, layer_norm, linear
from jaxrl_llm.models.families.entries import entries_of_sizes, number, refuse, sizes_of
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.vision.patch_embedder import PatchEmbedderConfig

MODEL_TYPE = "gemma4_unified"
ARCHITECTURE = {
    "lm": "Gemma4UnifiedForConditionalGeneration",
    "score": "Gemma4UnifiedForSequenceClassification",
}
TEXTS = {gemma4_unified_text.MODEL_TYPE: gemma4_unified_text}


def _keys(part: str, projection: str) -> tuple[TensorName, ...]:
    """The keys, of which those of patches begin with `part`, and that of the last map with `projection`."""
    vision = (
        *layer_norm("vision/encoder/patch_norm", f"{part}.patch_ln1"),
        *linear("vision/encoder/patch", f"{part}.patch_dense"),
        *layer_norm("vision/encoder/map_norm", f"{part}.patch_ln2"),
        TensorName("vision/encoder/position", f"{part}.pos_embedding"),
        *layer_norm("vision/encoder/position_norm", f"{part}.pos_norm"),
        *linear("vision/encoder/proj", f"{projection}.embedding_projection"),
    )
    return llava.as_modules(gemma4_unified_text.KEYS, vision)


KEYS = _keys("vision_embedder", "embed_vision")
MODULE_KEYS = _keys("embed_vision", "embed_vision.multimodal_embedder")
OTHER_KEYS = (MODULE_KEYS,)
UNREAD = ("model.embed_audio.",)
unused_tensors = gemma4.unused_tensors
# Fields of the vision part that are an integer each, their entries, and what these are where they are left out.
SIZES = {"width": ("mm_embed_dim", 3840), "positions": ("mm_posemb_size", 1120)}
SIDES = {"patch_size": ("patch_size", 16), "pooled": ("pooling_kernel_size", 3)}  # of whose product are its patches


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = gemma4.DEFAULTS | hf
    family, text = llava.text_of(hf, TEXTS)
    text = {"use_bidirectional_attention": "vision"} | text
    entries = hf.get("vision_config")
    if not isinstance(entries, dict):
        refuse("vision_config", entries, "the entries of a part that embeds patches")
    sizes, sides = sizes_of(entries, SIZES), sizes_of(entries, SIDES)
    if (size := entries.get("output_proj_dims", sizes["width"])) != sizes["width"]:
        refuse("vision_config.output_proj_dims", size, f"mm_embed_dim = {sizes['width']}")
    encoder = PatchEmbedderConfig(
        **sizes,
        patch_size=sides["patch_size"] * sides["pooled"],
        norm_eps=number("vision_config.rms_norm_eps", entries.get("rms_norm_eps", 1e-6)),
        init_scale=number("vision_config.initializer_range", entries.get("initializer_range", 0.02)),
    )
    return llava.config_of(hf, family, text, ARCHITECTURE, gemma4.vision_of(hf, text, encoder), overrides)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    encoder = qwen_vl.net_encoder(config)
    given = (base or {}).get("vision_config")
    sides = {"patch_size": encoder.patch_size, "pooling_kernel_size": 1}
    entries = {
        **(given or {"model_type": f"{MODEL_TYPE}_vision", **sides}),
        **entries_of_sizes(encoder, SIZES),
        "output_proj_dims": encoder.width,
        "rms_norm_eps": encoder.norm_eps,
        "initializer_range": encoder.init_scale,
    }
    own = {"model_type": MODEL_TYPE, "vision_config": entries}
    return gemma4.whole_entries(config, base, TEXTS, ARCHITECTURE, own)
