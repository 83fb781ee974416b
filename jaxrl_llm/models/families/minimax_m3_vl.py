"""MiniMax-M3: an encoder of images of any size with rotary positions of three axes, squares of whose patches become
tokens by two linear maps of each patch and two of the square, and its text part, `minimax_m3_vl_text`; videos are not
read."""

from typing import Any

from jaxrl_llm.models.families import llava, minimax_m3_vl_text, qwen_vl, siglip
from jaxrl_llm.models.families.decoder import TensorName, layer_norm, maps
from jaxrl_llm.models.families.entries import computed, entries_of_sizes, number, positive, refuse, sizes_of
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.vision.patch_rows import PatchRowsConfig

MODEL_TYPE = "minimax_m3_vl"
# transformers has no other.
ARCHITECTURE = {"lm": "MiniMaxM3SparseForConditionalGeneration", "score": "", "step": ""}
TEXTS = {minimax_m3_vl_text.MODEL_TYPE: minimax_m3_vl_text}
PROJECTOR = "multi_modal_projector"
FIRST = {"fc1": "linear_1", "fc2": "linear_2"}


def _vision_keys(tower: str, renamed: dict[str, str], square: str, second: dict[str, str]) -> tuple[TensorName, ...]:
    """The keys of the vision part: names of the encoder begin with `tower`, in which parts of SigLIP's are `renamed`;
    the maps `second` of squares are in `square`."""

    def name(tensor: str) -> str:
        for usual, own in renamed.items():
            tensor = tensor.replace(usual, own)
        return tensor

    return (
        *(key._replace(tensor=name(key.tensor)) for key in siglip.keys(tower) if "/position/" not in key.path),
        *layer_norm("vision/encoder/patch_norm", f"{tower}pre_layrnorm"),
        *maps("vision/encoder/merger", PROJECTOR, FIRST),
        *maps("vision/encoder/merger", square, second),
    )


KEYS = llava.on_the_hub(
    minimax_m3_vl_text.OTHER_KEYS[0],
    _vision_keys("vision_tower.vision_model.", {}, "patch_merge_mlp", {"fc3": "linear_1", "fc4": "linear_2"}),
)
MODULE_KEYS = llava.as_modules(
    minimax_m3_vl_text.KEYS,
    _vision_keys(
        "vision_tower.", {"patch_embedding": "proj", "encoder.": ""}, PROJECTOR,
        {"fc3": "merge_linear_1", "fc4": "merge_linear_2"},
    ),
)  # fmt: skip
OTHER_KEYS = (MODULE_KEYS,)
UNREAD = ("mtp.", "language_model.mtp.", "language_model.model.mtp.")
DEFAULTS = {"image_token_index": 200_025, "projector_hidden_size": 6144}  # for entries that are left out
# Fields of the encoder that are an integer each, their entries, and what these are where they are left out.
SIZES = {
    "width": ("hidden_size", 1280),
    "layers": ("num_hidden_layers", 32),
    "heads": ("num_attention_heads", 16),
    "ffn": ("intermediate_size", 5120),
    "patch_size": ("patch_size", 14),
    "frames": ("temporal_patch_size", 2),
    "channels": ("num_channels", 3),
    "merge": ("spatial_merge_size", 2),
}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    family, text = llava.text_of(hf, TEXTS)
    text |= {"tie_word_embeddings": llava.tied(hf)}
    return llava.config_of_merger(hf, family, text, ARCHITECTURE, _encoder(hf), overrides, "image_token_index")


def _encoder(hf: dict[str, Any]) -> PatchRowsConfig:
    """The encoder of a config.json; raises ConfigError for another network."""
    entries = hf.get("vision_config") or {}
    sizes = sizes_of(entries, SIZES)
    if sizes["width"] % sizes["heads"]:
        refuse("vision_config.hidden_size", sizes["width"], f"multiples of num_attention_heads = {sizes['heads']}")
    merged = {"spatial_merge_size": sizes["merge"], "temporal_patch_size": sizes["frames"]}
    computed(entries.get("img_token_compression_config") or {}, merged, "img_token_compression_config.")
    rope = {"rope_theta": entries.get("rope_theta", 10000.0)} | (entries.get("rope_parameters") or {})
    return PatchRowsConfig(
        **sizes,
        norm="layer",
        norm_eps=number("vision_config.layer_norm_eps", entries.get("layer_norm_eps", 1e-5)),
        gated=False,
        activation=siglip.read_activation(entries, "gelu"),
        attention_adapter="out",
        patch_norm=True,
        rotary_base=number("vision_config.rope_theta", rope["rope_theta"], above=1),
        rotary="time",
        merger="four_maps",
        merger_ffn=positive(hf, "projector_hidden_size"),
        init_scale=number("vision_config.initializer_range", entries.get("initializer_range", 0.02)),
    )


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    encoder = qwen_vl.net_encoder(config)
    own = {
        "model_type": MODEL_TYPE,
        "projector_hidden_size": encoder.merger_ffn,
        "vision_config": {
            **((base or {}).get("vision_config") or {"model_type": f"{MODEL_TYPE}_vision", **qwen_vl.axial(encoder)}),
            **entries_of_sizes(encoder, SIZES),
            "layer_norm_eps": encoder.norm_eps,
            "hidden_act": siglip.activation_entry(encoder.activation),
        },
    }
    return llava.entries_of(config, base, TEXTS, ARCHITECTURE, own, token="image_token_index")
