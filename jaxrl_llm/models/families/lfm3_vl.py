"""LFM3-VL (Liquid AI): an encoder of images of any size, of convolutions and attention, squares of whose patches become
tokens by two linear maps, and an LFM3 that reads them; videos are not read."""

from typing import Any

from jaxrl_llm.models.families import lfm3, llava, mixtral, qwen_vl
from jaxrl_llm.models.families.decoder import TensorName, layer_norm, maps, norms
from jaxrl_llm.models.families.entries import computed, entries_of_sizes, number, positive, refuse
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.vision.patch_rows import PatchRowsConfig

MODEL_TYPE = "lfm3_vl"
ARCHITECTURE = {"lm": "Lfm3VlForConditionalGeneration", "score": "Lfm3VlForSequenceClassification"}
TEXTS = {lfm3.MODEL_TYPE: lfm3}
TOWER, PROJECTOR = "vision_tower.", "multi_modal_projector"
LAYER = f"{TOWER}layers.{{layer}}."


def _vision_keys(patch: str, norm: str) -> tuple[TensorName, ...]:
    """The keys of the vision part, in which the map of patches and the norms of heads have these names."""
    attention, convolution = "vision/encoder/layers", "vision/encoder/conv_layers"
    return (
        TensorName("vision/encoder/patch/kernel", f"{TOWER}{patch}.weight", transpose=True),
        TensorName("vision/encoder/patch_norm/scale", f"{TOWER}embedding_norm.weight"),
        *maps(f"{attention}/attention", f"{LAYER}self_attn", {x: f"{x}_proj" for x in ("q", "k", "v", "out")}),
        *norms(f"{attention}/attention/", f"{LAYER}self_attn.", {"q_norm": f"q_{norm}", "k_norm": f"k_{norm}"}),
        *maps(f"{convolution}/conv", f"{LAYER}conv", {"into": "in_proj", "out": "out_proj"}),
        TensorName(f"{convolution}/conv/filter", f"{LAYER}conv.spatial_conv.weight"),
        *(
            key
            for stack in (attention, convolution)
            for key in (
                *norms(f"{stack}/", LAYER, {"norm1": "operator_norm", "norm2": "ffn_norm"}),
                *maps(f"{stack}/mlp", f"{LAYER}feed_forward", mixtral.WORDS),
            )
        ),
        *layer_norm("vision/encoder/merger/norm", f"{PROJECTOR}.layer_norm"),
        *maps("vision/encoder/merger", PROJECTOR, {"fc1": "linear_1", "fc2": "linear_2"}),
    )


KEYS = llava.as_modules(lfm3.KEYS, _vision_keys("patchifier", "layernorm"))
MODULE_KEYS = llava.as_modules(lfm3.MODULE_KEYS, _vision_keys("patch_embed", "norm"))
OTHER_KEYS = (MODULE_KEYS,)
# For entries that are left out.
DEFAULTS = {
    "image_token_id": 125_030,
    "projector_hidden_size": 4096,
    "projector_bias": True,
    "tie_word_embeddings": True,
}
# Fields of the encoder that are an integer each, their entries, and what these are where they are left out.
SIZES = {
    "width": ("hidden_size", 1024),
    "layers": ("num_hidden_layers", 14),
    "heads": ("num_attention_heads", 16),
    "kv_heads": ("num_key_value_heads", 8),
    "ffn": ("intermediate_size", 2560),
    "patch_size": ("patch_size", 16),
    "frames": ("temporal_patch_size", 2),
    "channels": ("in_channels", 3),
    "merge": ("spatial_merge_size", 2),
    "conv_size": ("conv_kernel_size", 3),
}
KINDS = ("conv", "full_attention")


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    family, text = llava.text_of(hf, TEXTS)
    text |= {"tie_embedding": bool(hf.get("tie_embedding", hf["tie_word_embeddings"]))}
    computed(hf, {"projector_hidden_act": "gelu"})
    return llava.config_of_merger(hf, family, text, ARCHITECTURE, _encoder(hf), overrides)


def _encoder(hf: dict[str, Any]) -> PatchRowsConfig:
    """The encoder of a config.json; raises ConfigError for another network."""
    entries = hf.get("vision_config") or {}
    sizes = qwen_vl.rotary_sizes(entries, SIZES)
    if sizes["heads"] % sizes["kv_heads"]:
        heads = f"divisors of num_attention_heads = {sizes['heads']}"
        refuse("vision_config.num_key_value_heads", sizes["kv_heads"], heads)
    if sizes["conv_size"] % 2 == 0:
        refuse("vision_config.conv_kernel_size", sizes["conv_size"], "odd numbers")
    usual = [KINDS[layer > 1 and layer % 2 == 0] for layer in range(sizes["layers"])]
    kinds = entries.get("layer_types") or usual
    if len(kinds) != sizes["layers"] or not set(kinds) <= set(KINDS):
        refuse("vision_config.layer_types", kinds, f"{sizes['layers']} of {' and '.join(KINDS)}")
    rope = entries.get("rope_parameters") or {}
    return PatchRowsConfig(
        **sizes,
        conv_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == "conv"),
        norm_eps=number("vision_config.norm_eps", entries.get("norm_eps", 1e-5)),
        attention_bias=False,
        attention_adapter="out",
        head_norms="qk",
        bias=False,
        patch_map="channels",
        patch_norm=True,
        rotary_base=number("vision_config.rope_theta", rope.get("rope_theta", 1_000_000.0), above=1),
        merger="two_maps",
        merger_ffn=positive(hf, "projector_hidden_size"),
        merger_bias=bool(hf["projector_bias"]),
        merger_norm="patch",
        init_scale=number("vision_config.initializer_range", entries.get("initializer_range", 0.02)),
    )


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    encoder = qwen_vl.net_encoder(config)
    own = {
        "model_type": MODEL_TYPE,
        "projector_hidden_size": encoder.merger_ffn,
        "projector_bias": encoder.merger_bias,
        "vision_config": {
            **((base or {}).get("vision_config") or {"model_type": f"{MODEL_TYPE}_vision", **qwen_vl.axial(encoder)}),
            **entries_of_sizes(encoder, SIZES),
            "layer_types": [KINDS[layer not in encoder.conv_layers] for layer in range(encoder.layers)],
            "norm_eps": encoder.norm_eps,
        },
    }
    return llava.entries_of(config, base, TEXTS, ARCHITECTURE, own)
