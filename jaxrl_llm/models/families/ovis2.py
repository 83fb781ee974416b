"""Ovis2 (arXiv 2405.20797): tiles of a ViT, squares of whose patches are distributions over visual words, and a Qwen2.5
that reads means of the words' embeddings; words of their own begin, part and end an image. Videos are not read."""

from typing import Any

from jaxrl_llm.models.families import llava, qwen2, qwen_vl, siglip
from jaxrl_llm.models.families.decoder import TensorName, layer_norm, linear, maps
from jaxrl_llm.models.families.entries import computed, entries_of_sizes, number, positive, refuse, sizes_of
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.vision.patch_rows import PatchRowsConfig
from jaxrl_llm.models.vision.tower import VisionConfig

MODEL_TYPE = "ovis2"
ARCHITECTURE = {"lm": "Ovis2ForConditionalGeneration", "score": "", "step": ""}  # transformers has no other
TEXTS = {qwen2.MODEL_TYPE: qwen2}
TOWER = "vision_tower.transformer."
LAYER = f"{TOWER}encoder.layers.{{layer}}."
KEYS = llava.as_modules(
    qwen2.KEYS,
    (
        *linear("vision/encoder/patch", f"{TOWER}embeddings.patch_embedding"),
        TensorName("vision/encoder/patch_norm/scale", f"{TOWER}embeddings.rms_norm.weight"),
        TensorName("vision/encoder/position/weight", f"{TOWER}embeddings.position_embedding.weight"),
        TensorName("vision/encoder/layers/norm1/scale", f"{LAYER}rms_norm1.weight"),
        *maps("vision/encoder/layers/attention", f"{LAYER}attention", {x: f"{x}_proj" for x in ("q", "k", "v", "out")}),
        TensorName("vision/encoder/layers/norm2/scale", f"{LAYER}rms_norm2.weight"),
        *maps("vision/encoder/layers/mlp", f"{LAYER}ffn", {x: f"{x}_proj" for x in ("gate", "up", "down")}),
        TensorName("vision/encoder/norm/scale", f"{TOWER}rms_norm.weight"),
        *linear("vision/encoder/merger/proj", "vision_tower.head_linear"),
        *layer_norm("vision/encoder/merger/norm", "vision_tower.head_norm"),
        TensorName("vision/encoder/merger/words", "visual_embeddings_table.weight"),
    ),
)
MARKS = 5  # words that begin an image, stand behind the tile of the whole, its columns and its rows, and end it
# For entries that are left out.
DEFAULTS = {"image_token_id": 151_665, "visual_indicator_token_ids": list(range(151_666, 151_666 + MARKS))}
# Fields of the encoder that are an integer each, their entries, and what these are where they are left out.
SIZES = {
    "width": ("hidden_size", 1024),
    "layers": ("num_hidden_layers", 24),
    "heads": ("num_attention_heads", 8),
    "ffn": ("intermediate_size", 2816),
    "patch_size": ("patch_size", 14),
    "channels": ("num_channels", 3),
    "window_size": ("image_size", 224),
    "merge": ("hidden_stride", 1),
    "merger_ffn": ("vocab_size", 16_384),
}
# The only values that are computed.
COMPUTED = {
    "qkv_bias": False, "mlp_bias": False, "tokenize_function": "softmax", "num_visual_indicator_tokens": MARKS,
}  # fmt: skip


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    family, text = llava.text_of(hf, TEXTS)
    text.setdefault("tie_word_embeddings", True)  # as transformers has it where no file says otherwise
    usual = {"hidden_size": 1536, "vocab_size": 151_643}
    computed(usual | hf, {entry: positive(text, entry) for entry in usual})
    marks = hf["visual_indicator_token_ids"]
    if not isinstance(marks, list | tuple) or len(marks) != MARKS:
        refuse("visual_indicator_token_ids", marks, f"{MARKS} ids of tokens")
    names = [f"visual_indicator_token_ids[{number}]" for number in range(MARKS)]
    ids = dict(zip(names, marks, strict=True))
    encoder = _encoder(hf)
    vision = VisionConfig(
        encoder, encoder.merge, siglip.image_token(hf, "image_token_id", text), projector="",
        marks=tuple(siglip.image_token(ids, name, text) for name in names),
    )  # fmt: skip
    return llava.config_of(hf, family, text, ARCHITECTURE, vision, overrides)


def _encoder(hf: dict[str, Any]) -> PatchRowsConfig:
    """The encoder of a config.json; raises ConfigError for another network."""
    entries = hf.get("vision_config") or {}
    computed(entries, COMPUTED, "vision_config.")
    sizes = sizes_of(entries, SIZES)
    size, side = sizes["window_size"], sizes["patch_size"] * sizes["merge"]
    if sizes["width"] % sizes["heads"]:
        refuse("vision_config.hidden_size", sizes["width"], f"multiples of num_attention_heads = {sizes['heads']}")
    if size % side:
        refuse("vision_config.image_size", size, f"multiples of the {side} pixels of a token")
    if sizes["merger_ffn"] <= MARKS:
        refuse("vision_config.vocab_size", sizes["merger_ffn"], f"numbers above {MARKS}")
    return PatchRowsConfig(
        **sizes,  # a tile is a window
        frames=0,
        norm_eps=number("vision_config.rms_norm_eps", entries.get("rms_norm_eps", 1e-5)),
        last_norm=True,
        activation=siglip.read_activation(entries, "silu"),
        attention_bias=False,
        attention_adapter="out",
        bias=False,
        patch_bias=True,
        patch_norm=True,
        rotary_base=0.0,
        positions=size // sizes["patch_size"],
        merger="words",
        init_scale=number("vision_config.initializer_range", entries.get("initializer_range", 0.02)),
    )


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    encoder = qwen_vl.net_encoder(config)
    assert config.vision is not None
    own = {
        "model_type": MODEL_TYPE,
        "visual_indicator_token_ids": list(config.vision.marks),
        "hidden_size": config.width,
        "vocab_size": config.vocab_size,
        "vision_config": {
            **((base or {}).get("vision_config") or {"model_type": f"{MODEL_TYPE}_vision"}),
            **entries_of_sizes(encoder, SIZES),
            "rms_norm_eps": encoder.norm_eps,
            "hidden_act": siglip.activation_entry(encoder.activation),
            "initializer_range": encoder.init_scale,
        },
    }
    return llava.entries_of(config, base, TEXTS, ARCHITECTURE, own)
