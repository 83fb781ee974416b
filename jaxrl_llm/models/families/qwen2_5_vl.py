"""Qwen2.5-VL (arXiv 2502.13923): images of any size as rows of patches, and a Qwen2.5 with positions of three axes."""

import dataclasses
from typing import Any

from jaxrl_llm.models.families import llava, qwen2, qwen_vl
from jaxrl_llm.models.families.decoder import GATED, TensorName, layer_norm, maps
from jaxrl_llm.models.families.entries import refuse
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.vision.patch_rows import PatchRowsConfig

MODEL_TYPE = "qwen2_5_vl"
ARCHITECTURE = {"lm": "Qwen2_5_VLForConditionalGeneration", "score": "Qwen2_5_VLForSequenceClassification"}


LAYERS, BLOCK, MERGER = "vision/encoder/layers", "visual.blocks.{layer}.", "visual.merger"
# The encoder's, those of qwen2_vl's among them.
TOWER_KEYS = (
    TensorName("vision/encoder/patch/kernel", "visual.patch_embed.proj.weight", transpose=True),
    *layer_norm(f"{LAYERS}/norm1", f"{BLOCK}norm1"),
    *maps(f"{LAYERS}/attention", f"{BLOCK}attn", {"q": "qkv", "k": "qkv", "v": "qkv", "out": "proj"}),
    *layer_norm(f"{LAYERS}/norm2", f"{BLOCK}norm2"),
    *maps(f"{LAYERS}/mlp", f"{BLOCK}mlp", GATED | {"fc1": "fc1", "fc2": "fc2"}),
    *layer_norm("vision/encoder/merger/norm", f"{MERGER}.ln_q"),
    *maps("vision/encoder/merger", MERGER, {"fc1": "mlp.0", "fc2": "mlp.2"}),
)
KEYS = (*qwen2.KEYS, *TOWER_KEYS)
MODULE_KEYS = llava.as_modules(qwen2.KEYS, TOWER_KEYS)
OTHER_KEYS = (MODULE_KEYS,)
FAMILY = qwen_vl.Family(
    MODEL_TYPE,
    ARCHITECTURE,
    text={
        "vocab_size": 152_064, "hidden_size": 8192, "intermediate_size": 29_568, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    },
    theta=1_000_000.0,
    sections=(16, 24, 24),
    interleaved=False,
    encoder=PatchRowsConfig(width=3584, window_size=112, full_layers=(7, 15, 23, 31)),
    sizes=qwen_vl.SIZES | {"window_size": "window_size"},
)  # fmt: skip


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    text = text_of(hf, FAMILY)
    return qwen_vl.config_of(hf, text, FAMILY, encoder_of(hf, text, FAMILY), {"attention_bias": True}, overrides)


def encoder_of(hf: dict[str, Any], text: dict[str, Any], family: qwen_vl.Family) -> PatchRowsConfig:
    """The encoder of a config.json with the decoder's entries `text`; raises ConfigError for another network."""
    entries = hf.get("vision_config") or {}
    encoder = qwen_vl.encoder_of(entries, text, family)
    if not encoder.window_tokens:
        refuse("vision_config.window_size", encoder.window_size, "windows of a token or more")
    full_layers = entries.get("fullatt_block_indexes")
    return encoder if full_layers is None else dataclasses.replace(encoder, full_layers=tuple(full_layers))


def text_of(hf: dict[str, Any], family: qwen_vl.Family) -> dict[str, Any]:
    """The entries of the decoder; raises ConfigError for one with a window."""
    text = qwen_vl.text_of(hf, family)
    if qwen2.windows(text):
        refuse("use_sliding_window", True, "decoders without a window")
    return text


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    entries = {"fullatt_block_indexes": list(qwen_vl.net_encoder(config).full_layers)}
    return qwen_vl.entries_of(config, base, FAMILY, {}, entries)
