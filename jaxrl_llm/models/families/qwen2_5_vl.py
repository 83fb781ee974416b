"""Qwen2.5-VL (arXiv 2502.13923): images of any size as rows of patches, and a Qwen2.5 with positions of three axes."""

import dataclasses
from typing import Any

from jaxrl_llm.models.families import qwen2, qwen_vl
from jaxrl_llm.models.families.decoder import TensorName, layer_norm, linear
from jaxrl_llm.models.families.entries import refuse
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.vision.patch_rows import PatchRowsConfig

MODEL_TYPE = "qwen2_5_vl"
ARCHITECTURE = {"lm": "Qwen2_5_VLForConditionalGeneration", "score": "Qwen2_5_VLForSequenceClassification"}


def _keys(text: str, tower: str) -> tuple[TensorName, ...]:
    """The keys where the names of the decoder and of the encoder begin so, those of qwen2_vl's encoder among them."""
    block = f"{tower}blocks.{{layer}}."
    layers = "vision/encoder/layers"
    return (
        *(key._replace(tensor=key.tensor.replace("model.", text, 1)) for key in qwen2.KEYS),
        TensorName("vision/encoder/patch/kernel", f"{tower}patch_embed.proj.weight", transpose=True),
        *layer_norm(f"{layers}/norm1", f"{block}norm1"),
        *(key for name in "qkv" for key in linear(f"{layers}/attention/{name}", f"{block}attn.qkv")),
        *linear(f"{layers}/attention/out", f"{block}attn.proj"),
        *layer_norm(f"{layers}/norm2", f"{block}norm2"),
        *(key for name in ("gate", "up", "down") for key in linear(f"{layers}/mlp/{name}", f"{block}mlp.{name}_proj")),
        *(key for name in ("fc1", "fc2") for key in linear(f"{layers}/mlp/{name}", f"{block}mlp.{name}")),
        *layer_norm("vision/encoder/merger/norm", f"{tower}merger.ln_q"),
        *linear("vision/encoder/merger/fc1", f"{tower}merger.mlp.0"),
        *linear("vision/encoder/merger/fc2", f"{tower}merger.mlp.2"),
    )


KEYS = _keys("model.", "visual.")
MODULE_KEYS = _keys("model.language_model.", "model.visual.")
OTHER_KEYS = (MODULE_KEYS,)
FAMILY = qwen_vl.Family(
    MODEL_TYPE,
    ARCHITECTURE,
    text={
        "vocab_size": 152_064,
        "hidden_size": 8192,
        "intermediate_size": 29_568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
    },
    theta=1_000_000.0,
    sections=(16, 24, 24),
    interleaved=False,
    encoder=PatchRowsConfig(width=3584),
    sizes=qwen_vl.SIZES | {"window_size": "window_size"},
)


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    """The ModelConfig of a config.json; raises ConfigError for what the network does not compute."""
    text, entries = text_of(hf, FAMILY), hf.get("vision_config") or {}
    encoder = qwen_vl.encoder_of(entries, text, FAMILY)
    if not encoder.window_tokens:
        refuse("vision_config.window_size", encoder.window_size, "windows of a token or more")
    full_layers = tuple(entries.get("fullatt_block_indexes", encoder.full_layers))
    encoder = dataclasses.replace(encoder, full_layers=full_layers)
    return qwen_vl.config_of(hf, text, FAMILY, encoder, {"attention_bias": True}, overrides)


def text_of(hf: dict[str, Any], family: qwen_vl.Family) -> dict[str, Any]:
    """The entries of the decoder; raises ConfigError for one with a window."""
    text = qwen_vl.text_of(hf, family)
    if qwen2.windows(text):
        refuse("use_sliding_window", True, "decoders without a window")
    return text


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The config.json of a net, over the entries of `base`; raises ConfigError for one without vision."""
    entries = {"fullatt_block_indexes": list(qwen_vl.net_encoder(config).full_layers)}
    return qwen_vl.entries_of(config, base, FAMILY, {}, entries)
