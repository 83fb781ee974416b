"""Families whose tiles of an image are put together again: LLaVA-1.6, LLaVA-OneVision and Llama 3.2 Vision."""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data.image_processors.processor import ImageProcessor, channels_last, check_model, tile_of, token_ids

if TYPE_CHECKING:
    from PIL.Image import Image


def llava_next(
    folder: Path, config: dict[str, Any], tokenizer: Any, settings: Mapping[str, Any], onevision: bool = False
) -> ImageProcessor:
    """LLaVA-1.6's and LLaVA-OneVision's (arXiv 2408.03326): a square tile of the whole image, then the tiles of the
    size of `image_grid_pinpoints` that keeps most of its pixels. A token ends each row of the tokens of these, which in
    LLaVA-OneVision are as many as those of 9 tiles (`anyres_max_9`) at most; there the images of a row with several are
    one tile each, padded to squares.

    Raises ConfigError for an image too narrow to have patches.
    """
    from transformers.image_processing_utils import select_best_resolution
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

    kind = LlavaOnevisionImageProcessorPil if onevision else LlavaNextImageProcessorPil
    processor: Any = kind.from_pretrained(folder, **settings)
    places = processor.image_grid_pinpoints
    wanted = config.get("image_grid_pinpoints") or places
    check_model(folder, "image_grid_pinpoints", places, "image_grid_pinpoints", wanted)
    size, side = tile_of(config, "siglip_vision_model" if onevision else "clip_vision_model")
    most = int(config.get("vision_aspect_ratio", "anyres_max_9").removeprefix("anyres_max_")) if onevision else None

    def grid(height: int, width: int) -> tuple[int, ...]:
        down, across = (n // size for n in select_best_resolution((height, width), places))
        high, wide = down * side, across * side
        # The arithmetic of transformers' `unpad_image`, its order of rounding included.
        if width / height > wide / high:
            high -= (high - int(round(height * (wide / width), 7))) // 2 * 2
        else:
            wide -= (wide - int(round(width * (high / height), 7))) // 2 * 2
        if not high or not wide:
            raise ConfigError(
                f"an image of {width} x {height} pixels has no patches left along its shorter side; crop it, or drop "
                "the row"
            )
        ratio = 0.0 if most is None else math.sqrt(high * wide / (most * side**2))
        tokens = (int(high // ratio), int(wide // ratio)) if ratio > 1.1 else (high, wide)
        return (down, across, high, wide, *tokens)

    def expand(height: int, width: int) -> str:
        *_, high, wide = grid(height, width)
        return "<image>" * (side**2 + high * (wide + 1))

    def tile_count(height: int, width: int) -> int:
        down, across, *_ = grid(height, width)
        return 1 + down * across

    def tiles(image: "Image", many: bool = False) -> np.ndarray:
        # transformers makes tiles of an image that is alone in its row.
        images = [[image, image]] if many else [[image]] if onevision else [image]
        return channels_last(processor(images=images, return_tensors="np")["pixel_values"][0])

    ids = token_ids(tokenizer, ("<image>",), ("<video>",) if onevision else ())
    special = frozenset(ids)
    shape, whole = (size, size), (0, 0, 0, 0, 1, 0)
    of_many = None
    if onevision:
        text = "<image>" * (side**2 + 1)
        of_many = ImageProcessor(
            "<image>", ids[0], special, lambda height, width: text, partial(tiles, many=True), shape,
            grid=lambda height, width: whole,
        )  # fmt: skip
    return ImageProcessor("<image>", ids[0], special, expand, tiles, shape, tile_count, grid, of_many)


def mllama(folder: Path, config: dict[str, Any], tokenizer: Any, settings: Mapping[str, Any]) -> ImageProcessor:
    """Llama 3.2 Vision's (arXiv 2407.21783): an image keeps its shape within the grid of square tiles that fits it, of
    `max_image_tiles` at most, and is one token."""
    from transformers.models.mllama.image_processing_pil_mllama import (
        MllamaImageProcessorPil,
        get_all_supported_aspect_ratios,
        get_optimal_tiled_canvas,
    )

    processor: Any = MllamaImageProcessorPil.from_pretrained(folder, **settings)
    side, most, encoder = processor.size["height"], processor.max_image_tiles, config["vision_config"]
    check_model(folder, "size", side, "image_size", np.ravel(encoder.get("image_size", 448))[0])
    check_model(folder, "max_image_tiles", most, "max_num_tiles", encoder.get("max_num_tiles", 4))

    def grid(height: int, width: int) -> tuple[int, ...]:
        rows, columns = (int(pixels) // side for pixels in get_optimal_tiled_canvas(height, width, most, side))
        return get_all_supported_aspect_ratios(most).index((rows, columns)) + 1, rows * columns

    def tiles(image: "Image") -> np.ndarray:
        pixels = processor(images=[[image]], return_tensors="np")["pixel_values"][0, 0]
        return channels_last(pixels).reshape(1, most * side, side, -1)

    token = "<|image|>"
    ids = token_ids(tokenizer, (token,))
    return ImageProcessor(
        token, ids[0], frozenset(ids), lambda height, width: token, tiles, (most * side, side), grid=grid,
        before_text=True,
    )  # fmt: skip
