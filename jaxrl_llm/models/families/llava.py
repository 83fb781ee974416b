"""The common ground of families that are an encoder, a projector and a decoder which is a family of its own.

Their tensors have LLaVA's names, on the hub and in the classes of transformers.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from jaxrl_llm.models.families import decoder, siglip
from jaxrl_llm.models.families.decoder import TensorName
from jaxrl_llm.models.families.entries import refuse
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.vision.patch_rows import PatchRowsConfig
from jaxrl_llm.models.vision.tower import VisionConfig

# The families of which transformers ties the head to the embedding unless config.json says otherwise, or the files
# hold another one, whatever is said of the decoder.
TIED_BY_FILES = ("internvl", "mistral3", "kimi_k25", "deepseek_vl", "ovis2")
# Entries of the whole that are its decoder's.
SHARED = ("tie_word_embeddings", "quantization_config", "num_labels", "id2label", "label2id")


def on_the_hub(text: Iterable[TensorName], vision: Iterable[TensorName]) -> tuple[TensorName, ...]:
    """The keys of a decoder and of a vision part as files of the hub have them."""
    starts = ("language_model.model.", "language_model.lm_head.")
    return (*_renamed(text, *starts), *vision)


def as_modules(text: Iterable[TensorName], vision: Iterable[TensorName]) -> tuple[TensorName, ...]:
    """The keys of a decoder and of a vision part as the classes of transformers 5 have them."""
    inside = (key._replace(tensor=f"model.{key.tensor}") for key in vision)
    return (*_renamed(text, "model.language_model.", "lm_head."), *inside)


def tables(
    text: Iterable[TensorName], vision: Callable[[str], Iterable[TensorName]]
) -> tuple[tuple[TensorName, ...], tuple[TensorName, ...], tuple[tuple[TensorName, ...], ...]]:
    """KEYS, MODULE_KEYS and OTHER_KEYS of a family with the `vision` keys of an encoder whose names begin so; those of
    transformers 5 lack a part."""
    text, whole, short = tuple(text), *(tuple(vision(f"vision_tower.{part}")) for part in ("vision_model.", ""))
    modules = as_modules(text, short)
    return on_the_hub(text, whole), modules, (on_the_hub(text, short), modules, as_modules(text, whole))


def _renamed(text: Iterable[TensorName], model: str, head: str) -> Iterable[TensorName]:
    """The keys of a decoder, whose names begin with `model` and, of the head, with `head`."""
    for key in text:
        yield key._replace(tensor=key.tensor.replace("model.", model, 1).replace("lm_head.", head, 1))


def text_of(
    hf: dict[str, Any], families: Mapping[str, ModuleType], sizes: Mapping[str, dict[str, Any]] | None = None
) -> tuple[ModuleType, dict[str, Any]]:
    """The family of the decoder, one of those by model_type, and its entries, of which files may leave the family's
    `sizes` out; raises ConfigError for another one."""
    text, shared = hf.get("text_config"), {name: hf[name] for name in SHARED if hf.get(name) is not None}
    family = families.get(text.get("model_type", next(iter(families)))) if isinstance(text, dict) else None
    if not isinstance(text, dict) or family is None:
        given = {"model_type": text["model_type"]} if isinstance(text, dict) else text
        refuse("text_config", given, f"the entries of a {' or '.join(families)} model")
    return family, (sizes or {}).get(family.MODEL_TYPE, {}) | text | shared | {"architectures": None}


def tied(hf: dict[str, Any]) -> bool:
    """Whether either the whole or its decoder has the embedding as its head, as transformers reads some families."""
    return any((part or {}).get("tie_word_embeddings") for part in (hf, hf["text_config"]))


def config_of(
    hf: dict[str, Any],
    family: ModuleType,
    text: dict[str, Any],
    architecture: dict[str, str],
    vision: VisionConfig,
    overrides: dict[str, Any],
) -> ModelConfig:
    """The ModelConfig of a config.json whose decoder is a `family` with the entries `text`; raises ConfigError for what
    the network does not compute."""
    head = decoder.head_of(hf, architecture, overrides.get("head"))
    return family.to_config(text, **overrides | {"vision": vision, "head": head})


def config_of_merger(
    hf: dict[str, Any],
    family: ModuleType,
    text: dict[str, Any],
    architecture: dict[str, str],
    encoder: PatchRowsConfig,
    overrides: dict[str, Any],
    token: str = "image_token_id",
) -> ModelConfig:
    """`config_of` a model whose encoder makes the features of tokens itself; `token` is the entry of an image's."""
    vision = VisionConfig(encoder, encoder.merge, siglip.image_token(hf, token, text), projector="")
    return config_of(hf, family, text, architecture, vision, overrides)


def entries_of(
    config: ModelConfig,
    base: dict[str, Any] | None,
    families: Mapping[str, ModuleType],
    architecture: dict[str, str],
    own: dict[str, Any],
    sizes: Mapping[str, dict[str, Any]] | None = None,
    token: str = "image_token_id",
) -> dict[str, Any]:
    """The config.json of a net with vision, over the entries of `base`; `own` are those beside the decoder's and the
    `token` of images, `sizes` as in `text_of`. Raises ConfigError for a net whose decoder is of none of the families.
    """
    assert config.vision is not None
    base = base or {}
    given = base.get("text_config")
    plain = dataclasses.replace(config, vision=None)
    family = decoder.describing(families.values(), plain) if given is None else text_of(base, families)[0]
    if family is None:
        refuse("text_config", None, f"decoders that are a {' or '.join(families)} model")
    given = None if given is None else (sizes or {}).get(family.MODEL_TYPE, {}) | given
    text = family.from_config(config, given)
    # Of these the whole model's are read, and its decoder's stay as they are.
    shared = {name: text.pop(name) for name in SHARED if name in text}
    del text["architectures"]
    text |= {name: x for name, x in (given or {}).items() if name in (*SHARED, "architectures")}
    name = decoder.architectures(architecture)[config.head]
    return {**base, **shared, "architectures": [name], "text_config": text, token: config.vision.image_token, **own}
