"""The image processor of a family, and what those of several families check and read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_llm.config import files
from jaxrl_llm.config.resolve import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class ImageProcessor:
    """The image processor of one family of models; each family has a function that makes it (`FAMILIES`)."""

    placeholder: str  # one for each image, in the text that the chat template writes
    image_id: int  # token of one embedding of an image
    special_ids: frozenset[int]  # tokens that only images bring; none is ever learned
    expand: Callable[[int, int], str]  # height and width of an image -> the text in place of its placeholder
    # An RGB image -> normalised pixels [tiles, H, W, C], fp32; a list [H, W, C] where each tile has its own size.
    tiles: "Callable[[Image], np.ndarray | list[np.ndarray]]"
    tile_size: tuple[int, int] | None = None  # H, W; None: each image is one tile, of its own size
    tile_count: Callable[[int, int], int] = lambda height, width: 1  # height and width of an image -> its tiles
    # Height and width -> how tiles are put together, the six numbers of models/vision/any_resolution.py, or those of
    # models/vision/tiled.py; None: they are not, as they are apart.
    grid: Callable[[int, int], tuple[int, ...]] | None = None
    of_many: "ImageProcessor | None" = None  # that of rows with several images; None: this one
    before_text: bool = False  # images are in front of the token that begins a text, where only chat templates put them
    finish: Callable[[str], str] = lambda text: text  # a text with the tokens of images -> as the model reads it

    def pixels(self, images: "list[Image]") -> np.ndarray | list[Any]:
        """The tiles of the images of a row, in the order of their tokens, [tiles, H, W, C] fp32; 0 tiles of none.

        A list of images [H, W, C] where each has its own size, and one of pairs, the tiles of an image and its `grid`,
        where tiles are put together.
        """
        if self.grid is not None:
            return [(self.tiles(image), self.grid(image.height, image.width)) for image in images]
        if self.tile_size is None:
            return [tile for image in images for tile in self.tiles(image)]
        none = np.zeros((0, *self.tile_size, 3), np.float32)
        return np.concatenate([none, *(self.tiles(image) for image in images)])


def tiles_by(processor: Any, **options: Any) -> "Callable[[Image], np.ndarray]":
    """A function that makes the tiles of an image, normalised pixels [tiles, H, W, C] fp32, by a processor of
    transformers with these options of its call."""
    return lambda image: channels_last(processor(images=[image], return_tensors="np", **options)["pixel_values"])


def channels_last(pixels: Any) -> np.ndarray:
    """Pixels [tiles, C, H, W] as [tiles, H, W, C] fp32."""
    return np.moveaxis(np.asarray(pixels, np.float32), 1, -1)


def tile_of(config: dict[str, Any], kind: str) -> tuple[int, int]:
    """Pixels and patches along a side of a tile of a CLIP or SigLIP, which is of this kind where config.json says
    none."""
    encoder = config["vision_config"]
    size = encoder.get("image_size", 224)
    default = 32 if encoder.get("model_type", kind) == "clip_vision_model" else 16
    return size, size // encoder.get("patch_size", default)


def check_model(folder: Path, own: str, value: Any, entry: str, wanted: Any) -> None:
    """Raises ConfigError where an image processor's entry `own` is another than the model's."""
    if wanted != value:
        raise ConfigError(
            f"the image processor in {folder} has {own} = {value}, and the model {entry} = {wanted}: copy "
            "preprocessor_config.json of the original model"
        )


def check_unscaled(height: int, width: int, side: int) -> None:
    """Raises ConfigError for an image that keeps its size and is not of whole tokens."""
    if height % side or width % side:
        raise ConfigError(
            f"an image of {width} x {height} pixels is not of whole tokens of {side} x {side}, and do_resize=False "
            "leaves its size: let images be scaled, crop it, or drop the row"
        )


def token_ids(tokenizer: Any, names: tuple[str, ...], others: tuple[str, ...] = ()) -> list[int]:
    """Ids of the tokens `names`, and of those of `others` that the tokenizer has; raises ConfigError where it lacks one
    of the former."""
    vocabulary = tokenizer.get_vocab()
    missing = [name for name in names if name not in vocabulary]
    if missing:
        raise ConfigError(
            f"the tokenizer has no token {missing[0]}, which the model reads images by; use the model's own"
        )
    return [vocabulary[name] for name in (*names, *others) if name in vocabulary]


def read_json(file: Path) -> dict[str, Any]:
    """The contents of a JSON file; empty where there is none. Raises ConfigError for one that is no JSON object."""
    try:
        return files.read_json(file) or {}
    except ConfigError as error:
        raise ConfigError(f"{error}; copy that of the original model") from error


def scaled(image: "Image", height: int, width: int, entries: Mapping[str, Any]) -> np.ndarray:
    """Normalised pixels `[height, width, C]` of an image that is scaled to this size."""
    from PIL.Image import Resampling

    return normalized(image.resize((width, height), Resampling(entries["resample"])), entries)


def normalized(image: "Image", entries: Mapping[str, Any]) -> np.ndarray:
    """Normalised pixels `[H,W,C]` of an image."""
    pixels = np.asarray(image, np.float32)
    pixels = pixels * entries["rescale_factor"] if entries["do_rescale"] else pixels
    mean, std = (np.array(entries[name], np.float32) for name in ("image_mean", "image_std"))
    return (pixels - mean) / std if entries["do_normalize"] else pixels
