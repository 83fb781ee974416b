"""Gemma 4 with vision: images of any size as rows of patches, whose means over squares become tokens, and a
`gemma4_text` that reads them; in its larger models the tokens of an image see each other in layers with a window.

Sound and videos are not read: the audio part is left where it is, and exports have none.
"""

from types import ModuleType
from typing import Any

from jaxrl_llm.models.families import gemma4_text, llava, qwen_vl, siglip
from jaxrl_llm.models.families.decoder import TensorName
from jaxrl_llm.models.families.entries import entries_of_sizes, number, refuse
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.vision.clipped import BOUNDS
from jaxrl_llm.models.vision.patch_rows import PatchRowsConfig
from jaxrl_llm.models.vision.tower import VisionConfig

MODEL_TYPE = "gemma4"
ARCHITECTURE = {"lm": "Gemma4ForConditionalGeneration", "score": "Gemma4ForSequenceClassification"}
TEXTS = {gemma4_text.MODEL_TYPE: gemma4_text}
ENCODER, TOWER, LAYERS = "vision/encoder/", "vision_tower.", "vision/encoder/layers/"
BLOCK = f"{TOWER}encoder.layers.{{layer}}."
NORMS = {
    "norm1": "input_layernorm",
    "out_norm1": "post_attention_layernorm",
    "norm2": "pre_feedforward_layernorm",
    "out_norm2": "post_feedforward_layernorm",
    "attention/q_norm": "self_attn.q_norm",
    "attention/k_norm": "self_attn.k_norm",
}
MAPS = {
    **{f"attention/{name}": f"self_attn.{name}_proj" for name in "qkv"},
    "attention/out": "self_attn.o_proj",
    **{f"mlp/{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
VISION_KEYS = (
    TensorName(f"{ENCODER}patch/kernel", f"{TOWER}patch_embedder.input_proj.weight", transpose=True),
    TensorName(f"{ENCODER}position/weight", f"{TOWER}patch_embedder.position_embedding_table"),
    *(TensorName(f"{LAYERS}{path}/scale", f"{BLOCK}{word}.weight") for path, word in NORMS.items()),
    *(TensorName(f"{LAYERS}{path}/kernel", f"{BLOCK}{word}.linear.weight", True) for path, word in MAPS.items()),
    *(
        TensorName(f"{LAYERS}{path}/{bound}", f"{BLOCK}{word}.{bound}")
        for path, word in MAPS.items()
        for bound in BOUNDS
    ),
    TensorName(f"{ENCODER}merger/std_bias", f"{TOWER}std_bias"),
    TensorName(f"{ENCODER}merger/std_scale", f"{TOWER}std_scale"),
    TensorName(f"{ENCODER}merger/proj/kernel", "embed_vision.embedding_projection.weight", transpose=True),
)
KEYS = llava.as_modules(gemma4_text.KEYS, VISION_KEYS)
UNREAD = ("model.audio_tower.", "model.embed_audio.")
# Tokens that stand for images, videos and sound, of which the decoder reads the padding token where nothing is placed.
TOKENS = {"image_token_id": 258_880, "video_token_id": 258_884, "audio_token_id": 258_881}
DEFAULTS = TOKENS | {"tie_word_embeddings": True}  # for entries that are left out
# Fields of the encoder that are an integer each, their entries, and what these are where they are left out.
SIZES = {
    "width": ("hidden_size", 768),
    "layers": ("num_hidden_layers", 16),
    "heads": ("num_attention_heads", 12),
    "ffn": ("intermediate_size", 3072),
    "patch_size": ("patch_size", 16),
    "merge": ("pooling_kernel_size", 3),
    "positions": ("position_embedding_size", 10_240),
}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    family, text = llava.text_of(hf, TEXTS)
    vision = vision_of(hf, text, _encoder(hf.get("vision_config")))
    return llava.config_of(hf, family, text, ARCHITECTURE, vision, overrides)


def vision_of(hf: dict[str, Any], text: dict[str, Any], encoder: PatchRowsConfig) -> VisionConfig:
    """The vision part of a config.json with the decoder's entries `text`, with that encoder."""
    return VisionConfig(
        encoder,
        encoder.merge,
        siglip.image_token(hf, "image_token_id", text),
        projector="",
        bidirectional="sliding" if text.get("use_bidirectional_attention") == "vision" else "",
        blank_tokens=tuple(hf[entry] for entry in TOKENS if hf[entry] is not None),
        blank=siglip.image_token({"pad_token_id": 0} | text, "pad_token_id", text),
    )


def _encoder(entries: Any) -> PatchRowsConfig:
    """The encoder of a `vision_config`; raises ConfigError for another network."""
    if not isinstance(entries, dict):
        refuse("vision_config", entries, "the entries of an encoder")
    sizes = qwen_vl.rotary_sizes(entries, SIZES)
    width, heads = sizes["width"], sizes["heads"]
    for entry, value in {"head_dim": width // heads, "num_key_value_heads": heads}.items():
        if entries.get(entry, value) != value:
            refuse(f"vision_config.{entry}", entries[entry], str(value))
    rope = {"rope_type": "axial", "rope_theta": 100.0} | (entries.get("rope_parameters") or {})
    if rope["rope_type"] not in ("axial", "default"):
        refuse("vision_config.rope_type", rope["rope_type"], "axial")
    return PatchRowsConfig(
        **sizes,
        frames=0,
        norms="both",
        norm_eps=number("vision_config.rms_norm_eps", entries.get("rms_norm_eps", 1e-6)),
        activation=siglip.read_activation(entries, entry="hidden_activation"),
        attention_bias=False,
        attention_adapter="o",
        head_norms="qkv",
        bias=False,
        patch_map="pixels",
        from_zero=True,
        rotary_base=number("vision_config.rope_theta", rope["rope_theta"], above=1),
        rotary="halves",
        places="axes",
        clipped=bool(entries.get("use_clipped_linears", False)),
        merger="pooled",
        standardized=bool(entries.get("standardize", False)),
        init_scale=number("vision_config.initializer_range", entries.get("initializer_range", 0.02)),
    )


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    encoder = qwen_vl.net_encoder(config)
    entries = {
        **((base or {}).get("vision_config") or {"model_type": "gemma4_vision", **qwen_vl.axial(encoder)}),
        **entries_of_sizes(encoder, SIZES),
        "num_key_value_heads": encoder.heads,
        "head_dim": encoder.width // encoder.heads,
        "hidden_activation": siglip.activation_entry(encoder.activation),
        "rms_norm_eps": encoder.norm_eps,
        "use_clipped_linears": encoder.clipped,
        "standardize": encoder.standardized,
        "initializer_range": encoder.init_scale,
    }
    own = {"model_type": MODEL_TYPE, "vision_config": entries}
    return whole_entries(config, base, TEXTS, ARCHITECTURE, own)


def whole_entries(
    config: ModelConfig,
    base: dict[str, Any] | None,
    texts: dict[str, ModuleType],
    architecture: dict[str, str],
    own: dict[str, Any],
) -> dict[str, Any]:
    """The config.json of a net of this shape, whose `own` entries are its type and those of images; the others as in
    `llava.entries_of`."""
    vision = config.vision
    assert vision is not None
    own = own | {"audio_config": None}
    if base is None:
        own |= dict(zip(TOKENS, (*vision.blank_tokens, None, None), strict=False))
    hf = llava.entries_of(config, base, texts, architecture, own)
    if base is None:
        both = "vision" if vision.bidirectional else None
        hf["text_config"] |= {"use_bidirectional_attention": both, "pad_token_id": vision.blank}
    return hf


def unused_tensors(config: ModelConfig) -> set[str]:
    """Tensors that checkpoints may have and nothing reads, as those of the decoder alone."""
    return {name.replace("model.", "model.language_model.", 1) for name in gemma4_text.unused_tensors(config)}
