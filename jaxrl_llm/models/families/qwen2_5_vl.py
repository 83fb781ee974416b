"""Qwen2.5-VL (arXiv 2502.13923): images of any size as rows of patches, and a Qwen2.5 with positions of three axes.

Of videos nothing is read.
"""

import itertools
from typing import Any

from jaxrl_llm.models.families import decoder, qwen2, siglip
from jaxrl_llm.models.families.decoder import TensorName, linear
from jaxrl_llm.models.families.entries import number, positive, refuse
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.models.vision.patch_rows import PatchRowsConfig
from jaxrl_llm.models.vision.tower import VisionConfig

MODEL_TYPE = "qwen2_5_vl"
ARCHITECTURE = {"lm": "Qwen2_5_VLForConditionalGeneration", "score": "Qwen2_5_VLForSequenceClassification"}
TEXT_TYPE = "qwen2_5_vl_text"


def _keys(text: str, tower: str) -> tuple[TensorName, ...]:
    """The keys where the names of the decoder and of the encoder begin so."""
    block = f"{tower}blocks.{{layer}}."
    layers = "vision/encoder/layers"
    return (
        *(key._replace(tensor=key.tensor.replace("model.", text, 1)) for key in qwen2.KEYS),
        TensorName("vision/encoder/patch/kernel", f"{tower}patch_embed.proj.weight", transpose=True),
        TensorName(f"{layers}/norm1/scale", f"{block}norm1.weight"),
        *(key for name in "qkv" for key in linear(f"{layers}/attention/{name}", f"{block}attn.qkv")),
        *linear(f"{layers}/attention/out", f"{block}attn.proj"),
        TensorName(f"{layers}/norm2/scale", f"{block}norm2.weight"),
        *(key for name in ("gate", "up", "down") for key in linear(f"{layers}/mlp/{name}", f"{block}mlp.{name}_proj")),
        TensorName("vision/encoder/norm/scale", f"{tower}merger.ln_q.weight"),
        *linear("vision/encoder/fc1", f"{tower}merger.mlp.0"),
        *linear("vision/encoder/fc2", f"{tower}merger.mlp.2"),
    )


KEYS = _keys("model.", "visual.")
MODULE_KEYS = _keys("model.language_model.", "model.visual.")
OTHER_KEYS = (MODULE_KEYS,)
# What entries mean that are left out.
DEFAULTS = {"image_token_id": 151_655, "tie_word_embeddings": False}
TEXT_DEFAULTS = {
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
}
THETA = 1_000_000.0
SECTIONS = (16, 24, 24)
# Fields of a PatchRowsConfig that are an integer each, and their entries.
SIZES = {
    "width": "hidden_size",
    "layers": "depth",
    "heads": "num_heads",
    "ffn": "intermediate_size",
    "patch_size": "patch_size",
    "frames": "temporal_patch_size",
    "channels": "in_channels",
    "merge": "spatial_merge_size",
    "window_size": "window_size",
}
# What they mean that are left out, where that is not a field's default.
VISION_DEFAULTS = {"hidden_size": 3584}
SHARED = ("architectures", "tie_word_embeddings", "quantization_config")


def _text(hf: dict[str, Any]) -> dict[str, Any]:
    """The entries of the decoder, which files of transformers 4 have beside those of the whole."""
    return hf["text_config"] if isinstance(hf.get("text_config"), dict) else hf


def _default_rope(text: dict[str, Any]) -> dict[str, Any]:
    """The entries, in which rotary positions of three axes are named as those of one."""
    found = dict(text)
    for entry in ("rope_parameters", "rope_scaling"):
        if isinstance(found.get(entry), dict):
            types = {name: "default" for name in ("type", "rope_type") if found[entry].get(name) == "mrope"}
            found[entry] = found[entry] | types
    return found


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    """The ModelConfig of a config.json; raises ConfigError for what the network does not compute."""
    hf = DEFAULTS | hf
    given = _text(hf)
    text = TEXT_DEFAULTS | _default_rope(given) | {name: hf[name] for name in SHARED if name in hf}
    text["tie_word_embeddings"] = bool(hf["tie_word_embeddings"] or given.get("tie_word_embeddings"))
    encoder = _encoder(hf.get("vision_config") or {}, text)
    vision = VisionConfig(encoder, encoder.merge, siglip.image_token(hf, "image_token_id", text), projector="")
    if qwen2.windows(text):
        refuse("use_sliding_window", True, "decoders without a window")
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    sections = tuple(rope.get("mrope_section") or SECTIONS)
    axes = tuple(axis % 3 for axis, size in enumerate(sections) for _ in range(size))
    own = {"attention_bias": True, "vision": vision, "rope_axes": axes}
    config = decoder.to_config(text, ARCHITECTURE, own, overrides, rope={"theta": THETA})
    if len(axes) != config.head_dim // 2:
        refuse("mrope_section", list(sections), f"numbers that add up to half of the {config.head_dim} of a head")
    if config.rope.kind != "default":
        refuse("rope_type", config.rope.kind, "default and mrope")
    return config


def _encoder(hf: dict[str, Any], text: dict[str, Any]) -> PatchRowsConfig:
    default = PatchRowsConfig()
    hf = {entry: getattr(default, field) for field, entry in SIZES.items()} | VISION_DEFAULTS | hf
    sizes = {field: positive(hf, entry) for field, entry in SIZES.items()}
    if hf["hidden_size"] % (4 * hf["num_heads"]):
        refuse("vision_config.hidden_size", hf["hidden_size"], f"multiples of 4 times num_heads = {hf['num_heads']}")
    if hf["window_size"] < hf["patch_size"] * hf["spatial_merge_size"]:
        refuse("vision_config.window_size", hf["window_size"], "windows of a token or more")
    if hf.get("out_hidden_size", text["hidden_size"]) != text["hidden_size"]:
        refuse("vision_config.out_hidden_size", hf["out_hidden_size"], f"hidden_size = {text['hidden_size']}")
    if hf.get("hidden_act", "silu") != "silu":
        refuse("vision_config.hidden_act", hf["hidden_act"], "silu")
    return PatchRowsConfig(
        **sizes,
        full_layers=tuple(hf.get("fullatt_block_indexes", default.full_layers)),
        init_scale=number("vision_config.initializer_range", hf.get("initializer_range", default.init_scale)),
    )


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The config.json of a net, over the entries of `base`; raises ConfigError for one without vision."""
    vision = config.vision
    if vision is None or not isinstance(vision.encoder, PatchRowsConfig):
        refuse("vision_config", None, "models with a vision part that reads images of any size")
    base = base or {"text_config": {"rope_theta": config.rope.theta}}
    given = _text(base)
    flat = given is base
    text = decoder.from_config(
        config, TEXT_DEFAULTS | given, ARCHITECTURE, MODEL_TYPE if flat else TEXT_TYPE, {},
        rope=TEXT_DEFAULTS | _default_rope(given),
    )  # fmt: skip
    if not any("mrope_section" in (text.get(entry) or {}) for entry in ("rope_parameters", "rope_scaling")):
        # The sizes of the runs of frequencies of one axis.
        sizes = [len(list(run)) for _, run in itertools.groupby(config.rope_axes)]
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope.theta, "mrope_section": sizes}
    shared = {name: text[name] for name in ("architectures", "tie_word_embeddings")}
    entries = {
        **{entry: getattr(vision.encoder, field) for field, entry in SIZES.items()},
        "out_hidden_size": config.width,
        "fullatt_block_indexes": list(vision.encoder.full_layers),
        "hidden_act": "silu",
        "initializer_range": vision.encoder.init_scale,
    }
    whole = {
        **shared,
        "model_type": MODEL_TYPE,
        "image_token_id": vision.image_token,
        "vision_config": (base.get("vision_config") or {"model_type": "qwen2_5_vl_vision"}) | entries,
    }
    if flat:
        return {**text, **whole}
    text = {name: x for name, x in text.items() if name != "architectures"}
    return {**base, **whole, "text_config": text}
