"""GLM-4.1V-Thinking and GLM-4.6V-Flash (arXiv 2507.01006): images of any size as rows of patches, and a GLM-4 with
positions of three axes; videos are not read."""

import dataclasses
from typing import Any

from jaxrl_llm.models.families import glm4, llava, qwen_vl
from jaxrl_llm.models.families.decoder import GATED, TensorName, layer_norm, linear, maps
from jaxrl_llm.models.families.entries import number, positive, refuse
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.vision.patch_rows import PatchRowsConfig

MODEL_TYPE = "glm4v"
ARCHITECTURE = {"lm": "Glm4vForConditionalGeneration", "score": "Glm4vForSequenceClassification"}
TOWER, ENCODER = "visual.", "vision/encoder/"
BLOCK, LAYERS = f"{TOWER}blocks.{{layer}}.", f"{ENCODER}layers/"
IMAGE_SIZE = 336  # where the entry is left out
# The encoder's, which families with other decoders have too.
TOWER_KEYS = (
    *linear(f"{ENCODER}patch", f"{TOWER}patch_embed.proj"),
    TensorName(f"{ENCODER}patch_norm/scale", f"{TOWER}post_conv_layernorm.weight"),
    TensorName(f"{ENCODER}position/weight", f"{TOWER}embeddings.position_embedding.weight"),
    TensorName(f"{LAYERS}norm1/scale", f"{BLOCK}norm1.weight"),
    *maps(f"{LAYERS}attention", f"{BLOCK}attn", {"q": "qkv", "k": "qkv", "v": "qkv", "out": "proj"}),
    TensorName(f"{LAYERS}norm2/scale", f"{BLOCK}norm2.weight"),
    *maps(f"{LAYERS}mlp", f"{BLOCK}mlp", GATED),
    TensorName(f"{ENCODER}merger/norm/scale", f"{TOWER}post_layernorm.weight"),
    *linear(f"{ENCODER}merger/downsample", f"{TOWER}downsample"),
    *linear(f"{ENCODER}merger/proj", f"{TOWER}merger.proj"),
    *layer_norm(f"{ENCODER}merger/proj_norm", f"{TOWER}merger.post_projection_norm"),
    *maps(f"{ENCODER}merger/mlp", f"{TOWER}merger", GATED),
)
KEYS = llava.as_modules(glm4.KEYS, TOWER_KEYS)
FAMILY = qwen_vl.Family(
    MODEL_TYPE,
    ARCHITECTURE,
    text={
        "vocab_size": 151_552, "hidden_size": 4096, "intermediate_size": 13_696, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0,
    },
    theta=10_000.0,
    sections=(8, 12, 12),
    interleaved=False,
    encoder=PatchRowsConfig(
        width=1536, layers=24, heads=12, ffn=4096, patch_size=14, norm_eps=1e-5,
        attention_bias=False, bias=False, patch_bias=True, patch_norm=True, places="cubic",
        merger="convolved", merger_ffn=13_696,
    ),
    # The channels of its layers are as many as the decoder's, and those of the merger are the entry of this name.
    sizes=qwen_vl.SIZES | {"ffn": "out_hidden_size", "merger_ffn": "intermediate_size"},
    image_token=151_343,
)  # fmt: skip


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    return read(hf, FAMILY, overrides)


def read(hf: dict[str, Any], family: qwen_vl.Family, overrides: dict[str, Any]) -> ModelConfig:
    """The ModelConfig of a config.json of a `family` of this shape."""
    text = qwen_vl.text_of(hf, family)
    own = {"norms": "both", "rope_interleaved": True, "attention_bias": True}
    return qwen_vl.config_of(hf, text, family, encoder_of(hf, text, family), own, overrides)


def encoder_of(hf: dict[str, Any], text: dict[str, Any], family: qwen_vl.Family) -> PatchRowsConfig:
    """The encoder of a config.json with the decoder's entries `text`; raises ConfigError for another network."""
    entries = hf.get("vision_config") or {}
    encoder = qwen_vl.encoder_of(entries, text, family)
    size = positive({"image_size": IMAGE_SIZE} | entries, "image_size")
    if size < encoder.patch_size:
        refuse("vision_config.image_size", size, f"numbers from patch_size = {encoder.patch_size} on")
    return dataclasses.replace(
        encoder,
        positions=size // encoder.patch_size,
        attention_bias=bool(entries.get("attention_bias", False)),
        norm_eps=number("vision_config.rms_norm_eps", entries.get("rms_norm_eps", encoder.norm_eps)),
    )


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return qwen_vl.entries_of(config, base, FAMILY, {}, encoder_entries(config))


def encoder_entries(config: ModelConfig) -> dict[str, Any]:
    """The entries of a vision_config that `encoder_of` reads beside those of all families; raises ConfigError for a
    net without vision."""
    encoder = qwen_vl.net_encoder(config)
    return {
        "image_size": encoder.positions * encoder.patch_size,
        "attention_bias": encoder.attention_bias,
        "rms_norm_eps": encoder.norm_eps,
    }
