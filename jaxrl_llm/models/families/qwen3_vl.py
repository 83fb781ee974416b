"""Qwen3-VL: images of any size as rows of patches, whose features join a Qwen3 in its first layers too (DeepStack)."""

import dataclasses
import math
from typing import Any

from jaxrl_llm.models.families import decoder, llava, qwen3, qwen_vl
from jaxrl_llm.models.families.decoder import TensorName, layer_norm, linear, maps
from jaxrl_llm.models.families.entries import positive, refuse
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.vision.patch_rows import PatchRowsConfig

MODEL_TYPE = "qwen3_vl"
ARCHITECTURE = {"lm": "Qwen3VLForConditionalGeneration", "score": "Qwen3VLForSequenceClassification"}
TOWER, LAYERS = "visual.", "vision/encoder/layers"
BLOCK = f"{TOWER}blocks.{{layer}}."
FC = {"fc1": "linear_fc1", "fc2": "linear_fc2"}
# The encoder's, which families with other decoders have too.
TOWER_KEYS = (
    *linear("vision/encoder/patch", f"{TOWER}patch_embed.proj"),
    TensorName("vision/encoder/position/weight", f"{TOWER}pos_embed.weight"),
    *layer_norm(f"{LAYERS}/norm1", f"{BLOCK}norm1"),
    *maps(f"{LAYERS}/attention", f"{BLOCK}attn", {"q": "qkv", "k": "qkv", "v": "qkv", "out": "proj"}),
    *layer_norm(f"{LAYERS}/norm2", f"{BLOCK}norm2"),
    *maps(f"{LAYERS}/mlp", f"{BLOCK}mlp", FC),
    *(
        key
        for merger, tensor in (("merger", "merger"), ("deepstack", "deepstack_merger_list.{layer}"))
        for key in (
            *layer_norm(f"vision/encoder/{merger}/norm", f"{TOWER}{tensor}.norm"),
            *maps(f"vision/encoder/{merger}", f"{TOWER}{tensor}", FC),
        )
    ),
)
KEYS = llava.as_modules(qwen3.KEYS, TOWER_KEYS)
ENCODER = PatchRowsConfig(
    width=1152, layers=27, ffn=4304, patch_size=16, norm="layer", gated=False,
    activation="gelu_tanh", patch_bias=True, positions=48, merger_adapters=True,
)  # fmt: skip
FAMILY = qwen_vl.Family(
    MODEL_TYPE,
    ARCHITECTURE,
    text={
        "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": qwen3.HEAD_DIM,
    },
    theta=500_000.0,
    sections=(24, 20, 20),
    interleaved=True,
    encoder=dataclasses.replace(ENCODER, deepstack=(8, 16, 24)),
)  # fmt: skip


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    text = qwen_vl.text_of(hf, FAMILY)
    own = {"qk_norm": "head", **decoder.attention_biases(text)}
    return qwen_vl.config_of(hf, text, FAMILY, encoder_of(hf, text, FAMILY), own, overrides)


def encoder_of(hf: dict[str, Any], text: dict[str, Any], family: qwen_vl.Family) -> PatchRowsConfig:
    """The encoder of a config.json with the decoder's entries `text`; raises ConfigError for another network."""
    entries = hf.get("vision_config") or {}
    encoder = qwen_vl.encoder_of(entries, text, family)
    given = entries.get("deepstack_visual_indexes")
    deepstack = encoder.deepstack if given is None else tuple(given)
    entries = {"num_position_embeddings": encoder.positions**2} | entries
    side = math.isqrt(positive(entries, "num_position_embeddings"))
    if side**2 != entries["num_position_embeddings"]:
        refuse("vision_config.num_position_embeddings", entries["num_position_embeddings"], "squares")
    fits = len(deepstack) <= positive(text, "num_hidden_layers") and set(deepstack) <= set(range(encoder.layers))
    if list(deepstack) != sorted(set(deepstack)) or not fits:
        refuse(
            "vision_config.deepstack_visual_indexes", list(deepstack),
            "ascending layers of the encoder, no more than the decoder has",
        )  # fmt: skip
    return dataclasses.replace(encoder, positions=side, deepstack=deepstack)


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    return qwen_vl.entries_of(config, base, FAMILY, {"attention_bias": config.attention_bias}, encoder_entries(config))


def encoder_entries(config: ModelConfig) -> dict[str, Any]:
    """The entries of a vision_config that `encoder_of` reads beside those of all families; raises ConfigError for a
    net without vision."""
    encoder = qwen_vl.net_encoder(config)
    return {
        "num_position_embeddings": encoder.positions**2,
        "deepstack_visual_indexes": list(encoder.deepstack),
    }
