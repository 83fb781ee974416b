"""The common ground of families with a SigLIP encoder: its table of tensor names, and its entries of config.json."""

import dataclasses
from typing import Any

from jaxrl_llm.models.families.decoder import TensorName, layer_norm, linear, maps
from jaxrl_llm.models.families.entries import number, positive, refuse
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.vision.siglip import SiglipConfig
from jaxrl_llm.models.vision.tower import VisionConfig

# Fields of a SiglipConfig that are an integer each, and their entries.
SIZES = {
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "image_size": "image_size",
    "patch_size": "patch_size",
    "channels": "num_channels",
}
ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "quick_gelu": "quick_gelu", "silu": "silu"}
# For entries that are left out of a `siglip_vision_model`, whatever it is the encoder of.
DEFAULT = SiglipConfig(width=768, heads=12, patch_size=16)


def keys(tower: str) -> tuple[TensorName, ...]:
    """The keys of an encoder whose tensors have names that begin with `tower`."""
    layer = f"{tower}encoder.layers.{{layer}}."
    return (
        *linear("vision/encoder/patch", f"{tower}embeddings.patch_embedding"),
        TensorName("vision/encoder/position/weight", f"{tower}embeddings.position_embedding.weight"),
        *layer_norm("vision/encoder/layers/norm1", f"{layer}layer_norm1"),
        *maps("vision/encoder/layers/attention", f"{layer}self_attn", {x: f"{x}_proj" for x in ("q", "k", "v", "out")}),
        *layer_norm("vision/encoder/layers/norm2", f"{layer}layer_norm2"),
        *maps("vision/encoder/layers/mlp", f"{layer}mlp", {"fc1": "fc1", "fc2": "fc2"}),
        *layer_norm("vision/encoder/norm", f"{tower}post_layernorm"),
    )


def read(hf: dict[str, Any], default: SiglipConfig) -> SiglipConfig:
    """The encoder of a `vision_config`, with `default` for entries that are left out; raises ConfigError for another
    network."""
    hf = {entry: getattr(default, field) for field, entry in SIZES.items()} | hf
    sizes = {field: positive(hf, entry) for field, entry in SIZES.items()}
    if sizes["width"] % sizes["heads"]:
        refuse("vision_config.hidden_size", sizes["width"], f"multiples of num_attention_heads = {sizes['heads']}")
    if sizes["image_size"] < sizes["patch_size"]:
        refuse("vision_config.image_size", sizes["image_size"], f"integers from patch_size = {sizes['patch_size']} on")
    return dataclasses.replace(
        default,
        **sizes,
        norm_eps=number("vision_config.layer_norm_eps", hf.get("layer_norm_eps", default.norm_eps)),
        activation=read_activation(hf, activation_entry(default.activation)),
        init_scale=number("vision_config.initializer_range", hf.get("initializer_range", default.init_scale)),
    )


def read_activation(entries: dict[str, Any], usual: str = "gelu_pytorch_tanh", entry: str = "hidden_act") -> str:
    """The activation of a `vision_config`, the `usual` one where the `entry` is left out; raises ConfigError for one
    that is not computed."""
    if (name := entries.get(entry, usual)) not in ACTIVATIONS:
        refuse(f"vision_config.{entry}", name, ", ".join(ACTIVATIONS))
    return ACTIVATIONS[name]


def activation_entry(activation: str) -> str:
    """The entry of a `vision_config` for an activation; raises ConfigError for one that it has no name for."""
    names = {name: entry for entry, name in ACTIVATIONS.items()}
    if activation not in names:
        refuse("vision_config.hidden_act", activation, ", ".join(ACTIVATIONS))
    return names[activation]


def refuse_head(entries: dict[str, Any]) -> None:
    """Raises ConfigError for a `vision_config` with a head, which it has unless it says otherwise."""
    if entries.get("vision_use_head", True):
        refuse("vision_config.vision_use_head", True, "false (an encoder without the head that pools its patches)")


def headless(hf: dict[str, Any]) -> SiglipConfig:
    """The encoder of a config.json, which has no head; raises ConfigError for another network."""
    entries = hf.get("vision_config") or {}
    refuse_head(entries)
    return read(entries, DEFAULT)


def headless_entries(vision: VisionConfig, base: dict[str, Any] | None) -> dict[str, Any]:
    """The `vision_config` of an encoder that `headless` reads, over that of `base`."""
    given = (base or {}).get("vision_config") or {"model_type": "siglip_vision_model", "vision_use_head": False}
    return given | write(vision)


def vision_of(config: ModelConfig) -> VisionConfig:
    """The vision part of a net; raises ConfigError for one without, and for one with another encoder."""
    if config.vision is None or not isinstance(config.vision.encoder, SiglipConfig):
        refuse("vision_config", None, "models whose vision part has a SigLIP encoder")
    return config.vision


def write(vision: VisionConfig) -> dict[str, Any]:
    """The entries of a `vision_config` that `read` reads."""
    encoder = vision.encoder
    assert isinstance(encoder, SiglipConfig)
    return {
        **{entry: getattr(encoder, field) for field, entry in SIZES.items()},
        "layer_norm_eps": encoder.norm_eps,
        "hidden_act": activation_entry(encoder.activation),
        "initializer_range": encoder.init_scale,
    }


def image_token(hf: dict[str, Any], entry: str, text: dict[str, Any]) -> int:
    """The entry, an id of the vocabulary of `text`; raises ConfigError for anything else."""
    token = hf[entry]
    if not isinstance(token, int) or not 0 <= token < positive(text, "vocab_size"):
        refuse(entry, token, "ids of tokens")
    return token
