"""The common ground of Qwen's families with vision and GLM's: an encoder of rows of patches, positions of three axes.

Entries about videos are not read.
"""

import dataclasses
import itertools
from typing import Any, NamedTuple

from jaxrl_llm.models.families import decoder, rotary, siglip
from jaxrl_llm.models.families.entries import number, positive, refuse, sizes_of
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.vision.patch_rows import PatchRowsConfig
from jaxrl_llm.models.vision.tower import VisionConfig

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
}
SHARED = ("architectures", "tie_word_embeddings", "quantization_config")


class Family(NamedTuple):
    """The differences between the families."""

    model_type: str
    architecture: dict[str, str]  # by head
    text: dict[str, Any]  # for entries of the decoder that are left out
    theta: float
    sections: tuple[int, ...]  # rotary frequencies of time, height and width
    interleaved: bool  # the frequencies of the axes take turns, and are not in runs
    encoder: PatchRowsConfig  # for entries of the encoder that are left out
    sizes: dict[str, str] = SIZES
    out: str = "out_hidden_size"  # entry of the encoder that has the decoder's width
    image_token: int = 151_655  # where config.json names none


def text_of(hf: dict[str, Any], family: Family) -> dict[str, Any]:
    """The entries of the decoder, those of the whole model that it shares among them."""
    given = _text(hf)
    text = family.text | _default_rope(given) | {name: hf[name] for name in SHARED if name in hf}
    text["tie_word_embeddings"] = bool(hf.get("tie_word_embeddings") or given.get("tie_word_embeddings"))
    return text


def _text(hf: dict[str, Any]) -> dict[str, Any]:
    """The entries of the decoder, which files of transformers 4 may have beside those of the whole."""
    return hf["text_config"] if isinstance(hf.get("text_config"), dict) else hf


def _default_rope(text: dict[str, Any]) -> dict[str, Any]:
    """The entries, in which rotary positions of three axes are named as those of one."""
    found = dict(text)
    for entry in ("rope_parameters", "rope_scaling"):
        if isinstance(found.get(entry), dict):
            types = {name: "default" for name in ("type", "rope_type") if found[entry].get(name) == "mrope"}
            found[entry] = found[entry] | types
    return found


def encoder_of(hf: dict[str, Any], text: dict[str, Any], family: Family) -> PatchRowsConfig:
    """The encoder of a `vision_config`, as far as families agree; raises ConfigError for another network."""
    default = family.encoder
    entries = {entry: getattr(default, field) for field, entry in family.sizes.items()} | hf
    sizes = {field: positive(entries, entry) for field, entry in family.sizes.items()}
    if sizes["width"] % (4 * sizes["heads"]):
        width = f"vision_config.{family.sizes['width']}"
        refuse(width, sizes["width"], f"multiples of 4 times num_heads = {sizes['heads']}")
    if hf.get(family.out, width := positive(text, "hidden_size")) != width:
        refuse(f"vision_config.{family.out}", hf[family.out], f"hidden_size = {width}")
    activation = hf.get("hidden_act")
    known = {entry: name for entry, name in siglip.ACTIVATIONS.items() if (name == "silu") == default.gated}
    if activation is not None and activation not in known:
        refuse("vision_config.hidden_act", activation, ", ".join(known))
    rope = hf.get("rope_parameters") or {}
    if (theta := rope.get("rope_theta", 10000.0)) != 10000.0:
        refuse("vision_config.rope_parameters.rope_theta", theta, "10000.0")
    return dataclasses.replace(
        default,
        **sizes,
        activation=default.activation if activation is None else known[activation],
        init_scale=number("vision_config.initializer_range", hf.get("initializer_range", default.init_scale)),
    )


def config_of(
    hf: dict[str, Any],
    text: dict[str, Any],
    family: Family,
    encoder: PatchRowsConfig,
    own: dict[str, Any],
    overrides: dict[str, Any],
) -> ModelConfig:
    """The ModelConfig of a config.json; `own` are the fields of the family's decoder. Raises ConfigError for what the
    network does not compute."""
    image_token = siglip.image_token({"image_token_id": family.image_token} | hf, "image_token_id", text)
    rope = rotary.parameters_of(text)
    sections = list(rope.get("mrope_section") or family.sections)
    if not all(isinstance(size, int) and size >= 0 for size in sections):
        refuse("mrope_section", sections, "integers from 0")
    if rope.get("mrope_interleaved", family.interleaved) != family.interleaved:
        refuse("mrope_interleaved", rope["mrope_interleaved"], str(family.interleaved))
    own = own | {
        "vision": VisionConfig(encoder, encoder.merge, image_token, projector=""),
        "rope_axes": _axes(sections, family.interleaved),
    }
    partial = "partial_rotary_factor" in family.text
    config = decoder.to_config(
        text, family.architecture, own, overrides, rope={"theta": family.theta, "partial": partial}
    )
    if len(config.rope_axes) != config.rotated_size // 2:
        rotated = f"{config.rotated_size} rotated dimensions of a head"
        refuse("mrope_section", sections, f"numbers that add up to half of the {rotated}")
    if config.rope.kind != "default":
        refuse("rope_type", config.rope.kind, "default and mrope")
    return config


def _axes(sections: list[int], interleaved: bool) -> tuple[int, ...]:
    """The axis of each rotary frequency: 0 time, 1 height, 2 width."""
    if not interleaved:
        return tuple(axis % 3 for axis, size in enumerate(sections) for _ in range(size))
    axes = [0] * sum(sections)
    for axis, size in enumerate(sections[1:], 1):
        axes[axis : 3 * size : 3] = [axis] * len(axes[axis : 3 * size : 3])
    return tuple(axes)


def entries_of(
    config: ModelConfig,
    base: dict[str, Any] | None,
    family: Family,
    own: dict[str, Any],
    vision_entries: dict[str, Any],
) -> dict[str, Any]:
    """The config.json of a net, over the entries of `base`; `own` are the family's of the decoder."""
    assert config.vision is not None
    base = base or {"text_config": {"rope_theta": config.rope.theta}}
    given = _text(base)
    flat = given is base
    text = decoder.from_config(
        config, family.text | given, family.architecture, family.model_type + ("" if flat else "_text"), own,
        rope=_default_rope,
    )  # fmt: skip
    if not any("mrope_section" in (text.get(entry) or {}) for entry in ("rope_parameters", "rope_scaling")):
        runs = [len(list(run)) for _, run in itertools.groupby(config.rope_axes)]
        text["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": config.rope.theta,
            "mrope_section": [config.rope_axes.count(axis) for axis in range(3)] if family.interleaved else runs,
            **({"mrope_interleaved": True} if family.interleaved else {}),
            **({"partial_rotary_factor": config.rotary_fraction} if config.rotary_fraction != 1.0 else {}),
        }
    whole = {
        **{name: text[name] for name in ("architectures", "tie_word_embeddings")},
        "model_type": family.model_type,
        "image_token_id": config.vision.image_token,
        "vision_config": encoder_entries(config, base, family) | vision_entries,
    }
    if flat:
        return {**text, **whole}
    text = {name: x for name, x in text.items() if name != "architectures"}
    return {**base, **whole, "text_config": text}


def encoder_entries(config: ModelConfig, base: dict[str, Any] | None, family: Family) -> dict[str, Any]:
    """The entries of a vision_config that `encoder_of` reads, over those of `base`; raises ConfigError for a net
    without vision."""
    encoder = net_encoder(config)
    return {
        **((base or {}).get("vision_config") or {"model_type": f"{family.model_type}_vision"}),
        **{entry: getattr(encoder, field) for field, entry in family.sizes.items()},
        family.out: config.width,
        "hidden_act": siglip.activation_entry(encoder.activation),
        "initializer_range": encoder.init_scale,
    }


def rotary_sizes(entries: dict[str, Any], sizes: dict[str, tuple[str, int]]) -> dict[str, Any]:
    """The `sizes_of` an encoder whose heads have rotary positions of two axes; raises ConfigError for others."""
    found = sizes_of(entries, sizes)
    if found["width"] % (4 * found["heads"]):
        refuse("vision_config.hidden_size", found["width"], f"multiples of 4 times {found['heads']} heads")
    return found


def axial(encoder: PatchRowsConfig) -> dict[str, Any]:
    """The entries of a new `vision_config` for the rotary positions and the scale of parameters at the start."""
    rope = {"rope_type": "axial", "rope_theta": encoder.rotary_base}
    return {"rope_parameters": rope, "initializer_range": encoder.init_scale}


def net_encoder(config: ModelConfig) -> PatchRowsConfig:
    """The encoder of a net; raises ConfigError for one without, and for another encoder."""
    if config.vision is None or not isinstance(config.vision.encoder, PatchRowsConfig):
        refuse("vision_config", None, "models with a vision part that reads images of any size")
    return config.vision.encoder
