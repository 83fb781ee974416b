"""Kimi K2.5 (arXiv 2602.02276) and K2.6: MoonViT (arXiv 2504.07491), an encoder of images of any size, squares of whose
patches become tokens by two linear maps, and a DeepSeek-V3 that reads them; videos are not read."""

import functools
from typing import Any

from jaxrl_llm.models.families import deepseek_v3, llava, qwen_vl, siglip
from jaxrl_llm.models.families.decoder import TensorName, layer_norm, linear, maps
from jaxrl_llm.models.families.entries import computed, entries_of_sizes, number, positive, refuse
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.vision.patch_rows import PatchRowsConfig

MODEL_TYPE = "kimi_k25"
ARCHITECTURE = {"lm": "Kimi_K25ForConditionalGeneration", "score": "Kimi_K25ForSequenceClassification"}
TEXTS = {deepseek_v3.MODEL_TYPE: deepseek_v3, "kimi_k2": deepseek_v3}  # which Moonshot's own files name it
LAYERS = "vision/encoder/layers"


def _vision_keys(tower: str, layer: str, norms: tuple[str, str], ffn: tuple[str, str], words: dict[str, str]):
    """The keys of the encoder and the projector. Queries and keys are those of Moonshot's files: pairs of dimensions
    that turn together are neighbours, which transformers moves a half of a head apart."""
    return (
        *linear("vision/encoder/patch", f"{tower}patch_embed.proj"),
        TensorName("vision/encoder/position/weight", f"{tower}patch_embed.pos_emb.{words['position']}"),
        *layer_norm(f"{LAYERS}/norm1", f"{layer}{norms[0]}"),
        *maps(f"{LAYERS}/attention", layer[:-1], {**dict.fromkeys("qkv", "wqkv"), "out": words["out"]}),
        *layer_norm(f"{LAYERS}/norm2", f"{layer}{norms[1]}"),
        *maps(f"{LAYERS}/mlp", f"{layer}mlp", dict(zip(("fc1", "fc2"), ffn, strict=True))),
        *layer_norm("vision/encoder/norm", f"{words['norm']}final_layernorm"),
        *layer_norm("vision/encoder/merger/norm", "mm_projector.pre_norm"),
        *maps("vision/encoder/merger", "mm_projector", {name: words[name] for name in ("fc1", "fc2")}),
    )


TOWER = "vision_tower."
_ON_THE_HUB = _vision_keys(
    TOWER, f"{TOWER}encoder.blocks.{{layer}}.", ("norm0", "norm1"), ("fc0", "fc1"),
    {"position": "weight", "out": "wo", "norm": f"{TOWER}encoder.", "fc1": "proj.0", "fc2": "proj.2"},
)  # fmt: skip
_AS_MODULES = _vision_keys(
    TOWER, f"{TOWER}layers.{{layer}}.", ("norm1", "norm2"), ("fc1", "fc2"),
    {"position": "position_embeddings", "out": "attn.proj", "norm": TOWER, "fc1": "in_proj", "fc2": "out_proj"},
)  # fmt: skip
KEYS = llava.on_the_hub(deepseek_v3.KEYS, _ON_THE_HUB)
MODULE_KEYS = llava.as_modules(deepseek_v3.KEYS, _AS_MODULES)
# What `save_pretrained` of transformers makes of these: names of the encoder in the decoder, and the reverse.
_SAVED = {
    "language_model.model.layers.": "language_model.model.blocks.",
    f"{TOWER}patch_embed.proj": f"{TOWER}encoder.patch_embed.proj",
    "mm_projector.pre_norm": "model.mm_projector.pre_norm",
}
OTHER_KEYS = (
    tuple(
        key._replace(tensor=functools.reduce(lambda name, pair: name.replace(*pair), _SAVED.items(), key.tensor))
        for key in KEYS
    ),
)
DEFAULTS = {"image_token_id": 163_605, "projection_layer_norm_eps": 1e-5}  # for entries that are left out
# Names of entries in Moonshot's own files, of the whole and of the encoder.
OWN_ENTRIES = {"media_placeholder_token_id": "image_token_id"}
OWN_VISION_ENTRIES = {
    "vt_hidden_size": "hidden_size",
    "vt_num_hidden_layers": "num_hidden_layers",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_intermediate_size": "intermediate_size",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
}
# Fields of the encoder that are an integer each, their entries, and what these are where they are left out.
SIZES = {
    "width": ("hidden_size", 1152),
    "layers": ("num_hidden_layers", 27),
    "heads": ("num_attention_heads", 16),
    "ffn": ("intermediate_size", 4304),
    "patch_size": ("patch_size", 14),
    "positions": ("pos_emb_height", 64),
}


def _named(hf: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The entries, with those of Moonshot's own under the names that transformers has."""
    return {name: hf[own] for own, name in names.items() if own in hf} | hf


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | _named(hf, OWN_ENTRIES)
    family, text = llava.text_of(hf, TEXTS)
    text.setdefault("tie_word_embeddings", True)  # as transformers has it where no file says otherwise
    return llava.config_of_merger(hf, family, text, ARCHITECTURE, _encoder(hf), overrides)


def _encoder(hf: dict[str, Any]) -> PatchRowsConfig:
    """The encoder of a config.json; raises ConfigError for another network."""
    entries = _named(hf.get("vision_config") or {}, OWN_VISION_ENTRIES)
    sizes = qwen_vl.rotary_sizes(entries, SIZES)
    width = entries.get("pos_emb_width", 64)
    if width != sizes["positions"]:
        refuse("vision_config.pos_emb_width", width, f"pos_emb_height = {sizes['positions']}")
    computed({"projection_hidden_size": 1152} | hf, {"projection_hidden_size": sizes["width"]})
    computed(hf, {"projection_layer_norm_eps": 1e-5})
    merge = entries.get("merge_kernel_size", (2, 2))
    if not isinstance(merge, list | tuple) or len(merge) != 2 or merge[0] != merge[1]:
        refuse("vision_config.merge_kernel_size", merge, "two equal numbers")
    rope = entries.get("rope_parameters") or {}
    return PatchRowsConfig(
        **sizes,
        frames=0,
        merge=positive({"merge_kernel_size": merge[0]}, "merge_kernel_size"),
        norm="layer",
        norm_eps=1e-5,
        last_norm=True,
        gated=False,
        activation=siglip.read_activation(entries),
        patch_bias=True,
        rotary_base=number("vision_config.rope_theta", rope.get("rope_theta", 10000.0), above=1),
        rotary="pairs",
        position_square=True,
        places="cubic",
        init_scale=number("vision_config.initializer_range", entries.get("initializer_range", 0.02)),
    )


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    encoder = qwen_vl.net_encoder(config)
    own = {
        "model_type": MODEL_TYPE,
        "projection_hidden_size": encoder.width,
        "vision_config": {
            **((base or {}).get("vision_config") or {"model_type": f"{MODEL_TYPE}_vision", **qwen_vl.axial(encoder)}),
            **entries_of_sizes(encoder, SIZES),
            "pos_emb_width": encoder.positions,
            "merge_kernel_size": [encoder.merge] * 2,
            "hidden_act": siglip.activation_entry(encoder.activation),
        },
    }
    return llava.entries_of(config, base, TEXTS, ARCHITECTURE, own)
