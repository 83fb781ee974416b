"""InternVL 2.5, 3 and 3.5 (arXiv 2504.10479, 2508.18265) in transformers' form: InternViT tiles, whose squares of
patches become tokens behind a norm and two linear maps, and one of several decoders; videos are not read."""

import dataclasses
from typing import Any

from jaxrl_llm.models.families import llama, llava, qwen2, qwen3, qwen3_moe, siglip
from jaxrl_llm.models.families.decoder import TensorName, layer_norm, linear, maps, norms, stacked_experts
from jaxrl_llm.models.families.entries import computed, number, refuse
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.vision.siglip import SiglipConfig
from jaxrl_llm.models.vision.tower import VisionConfig

MODEL_TYPE = "internvl"
ARCHITECTURE = {"lm": "InternVLForConditionalGeneration", "score": "InternVLForSequenceClassification"}
TEXTS = {module.MODEL_TYPE: module for module in (qwen2, qwen3, llama, qwen3_moe)}
TOWER, ENCODER, PROJECTOR = "vision_tower.", "vision/encoder/", "multi_modal_projector"
LAYER = f"{TOWER}encoder.layer.{{layer}}."
VISION_KEYS = (
    TensorName(f"{ENCODER}class_token", f"{TOWER}embeddings.cls_token"),
    *linear(f"{ENCODER}patch", f"{TOWER}embeddings.patch_embeddings.projection"),
    TensorName(f"{ENCODER}position/weight", f"{TOWER}embeddings.position_embeddings"),
    *layer_norm(f"{ENCODER}layers/norm1", f"{LAYER}layernorm_before"),
    *maps(
        f"{ENCODER}layers/attention",
        f"{LAYER}attention",
        {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "projection_layer"},
    ),
    *norms(f"{ENCODER}layers/attention/", f"{LAYER}attention.", {"q_norm": "q_norm", "k_norm": "k_norm"}),
    TensorName(f"{ENCODER}layers/scale1", f"{LAYER}lambda_1"),
    *layer_norm(f"{ENCODER}layers/norm2", f"{LAYER}layernorm_after"),
    *maps(f"{ENCODER}layers/mlp", f"{LAYER}mlp", {"fc1": "fc1", "fc2": "fc2"}),
    TensorName(f"{ENCODER}layers/scale2", f"{LAYER}lambda_2"),
    *layer_norm(f"{ENCODER}norm", f"{TOWER}layernorm"),
    *layer_norm("vision/projector/norm", f"{PROJECTOR}.layer_norm"),
    *maps("vision/projector", PROJECTOR, {"fc1": "linear_1", "fc2": "linear_2"}),
)
_STACKED = (*qwen3.KEYS, *stacked_experts("mlp"))
KEYS = llava.on_the_hub(qwen3_moe.KEYS, VISION_KEYS)  # those of the other decoders are among these
MODULE_KEYS = llava.as_modules(qwen3_moe.KEYS, VISION_KEYS)
OTHER_KEYS = (MODULE_KEYS, llava.on_the_hub(_STACKED, VISION_KEYS), llava.as_modules(_STACKED, VISION_KEYS))
DEFAULTS = {"image_token_id": 151_667, "downsample_ratio": 0.5}  # for entries that are left out
VISION = SiglipConfig(
    width=1024, layers=24, ffn=4096, image_size=448, patch_size=14, activation="gelu", attention_bias=False,
    class_token=True, layer_scale=0.1, last_norm=False,
)  # fmt: skip
NORMS = {"layer_norm": "layer", "rms_norm": "rms"}
# The only values of entries of the whole and of its vision_config that are computed.
COMPUTED = {"vision_feature_layer": -1, "vision_feature_select_strategy": "default", "projector_hidden_act": "gelu"}
ENCODER_COMPUTED = {"use_mask_token": False, "use_absolute_position_embeddings": True}


def to_config(hf: dict[str, Any], **overrides) -> ModelConfig:
    hf = DEFAULTS | hf
    family, text = llava.text_of(hf, TEXTS)
    encoder = _encoder(hf.get("vision_config") or {})
    computed(hf, COMPUTED)
    ratio = number("downsample_ratio", hf["downsample_ratio"], above=0)
    merge = round(1 / ratio)
    if merge * ratio != 1 or encoder.side % merge:
        refuse("downsample_ratio", ratio, f"1 / n, of divisors n of the {encoder.side} patches along a side of a tile")
    vision = VisionConfig(encoder, merge, siglip.image_token(hf, "image_token_id", text), projector="two_maps")
    return llava.config_of(hf, family, text, ARCHITECTURE, vision, overrides)


def _encoder(hf: dict[str, Any]) -> SiglipConfig:
    """The encoder of a `vision_config`; raises ConfigError for another network."""
    computed(hf, ENCODER_COMPUTED, "vision_config.")
    hf = {"norm_type": "layer_norm"} | hf
    for entry in ("image_size", "patch_size"):  # height and width, or a number for both
        if isinstance(hf.get(entry), list | tuple):
            if not hf[entry] or any(side != hf[entry][0] for side in hf[entry]):
                refuse(f"vision_config.{entry}", hf[entry], "squares")
            hf[entry] = hf[entry][0]
    if hf["norm_type"] not in NORMS:
        refuse("vision_config.norm_type", hf["norm_type"], ", ".join(NORMS))
    scale = hf.get("layer_scale_init_value", VISION.layer_scale)
    return dataclasses.replace(
        siglip.read(hf, VISION),
        norm=NORMS[hf["norm_type"]],
        attention_bias=bool(hf.get("attention_bias", False)),
        qk_norm=bool(hf.get("use_qk_norm", False)),
        layer_scale=number("vision_config.layer_scale_init_value", scale, above=0),
        last_norm=not hf.get("use_mean_pooling", True),
    )


def from_config(config: ModelConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    vision = siglip.vision_of(config)
    encoder = vision.encoder
    assert isinstance(encoder, SiglipConfig)
    names = {name: entry for entry, name in NORMS.items()}
    own = {
        "model_type": MODEL_TYPE,
        "downsample_ratio": 1 / vision.merge,
        "vision_config": {
            **((base or {}).get("vision_config") or {"model_type": "internvl_vision"}),
            **siglip.write(vision),
            "image_size": [encoder.image_size] * 2,
            "patch_size": [encoder.patch_size] * 2,
            "norm_type": names[encoder.norm],
            "attention_bias": encoder.attention_bias,
            "use_qk_norm": encoder.qk_norm,
            "layer_scale_init_value": encoder.layer_scale,
            "use_mean_pooling": not encoder.last_norm,
        },
    }
    own |= {"image_seq_length": vision.tile_tokens} if base is None else {}
    return llava.entries_of(config, base, TEXTS, ARCHITECTURE, own)
