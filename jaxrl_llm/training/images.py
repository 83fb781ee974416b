"""The images of rows on their way to a network: `Images`, of the tiles that each row of a batch brings."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.algorithms.batch import Images
from jaxrl_llm.config import ConfigError
from jaxrl_llm.data.tokenize import PIXELS
from jaxrl_llm.distributed.processes import gather
from jaxrl_llm.models.vision.patch_rows import PatchRowsConfig, patch_rows
from jaxrl_llm.models.vision.tower import VisionConfig


def row_images(
    ids: Sequence[Sequence[int]],
    tiles: Sequence[Sequence[np.ndarray] | None],
    vision: VisionConfig | None,
    most: tuple[int, int] = (0, 0),
) -> Images | None:
    """The images of rows with these token ids, on the host; None where no row has any.

    There is room for the tiles of the row with most of them, and for `most` tiles and patches; powers of two, so that
    few programs are compiled. Raises ConfigError for a model that reads text alone, for tiles of another shape, and for
    a row whose image tokens are not those of its tiles, as one that was cut inside an image.
    """
    counts = count_tiles(tiles)
    if vision is None:
        if any(counts):
            raise ConfigError(
                "rows have images, but the model reads text alone: use one with a vision part (docs/vision.md), or "
                "rows without images"
            )
        return None
    encoder = vision.encoder if isinstance(vision.encoder, PatchRowsConfig) else None  # of images of any size
    patches = [patch_rows(() if own is None else own, encoder) for own in tiles] if encoder else []
    for row, (own, count) in enumerate(zip(ids, counts, strict=True)):
        found = sum(token == vision.image_token for token in own)
        wanted = len(patches[row][0]) // vision.merge**2 if encoder else count * vision.tile_tokens
        if found != wanted:
            each = "" if encoder else f", {vision.tile_tokens} each"
            raise ConfigError(
                f"row {row} of a batch has {found} image tokens (id {vision.image_token}), but its {count} tiles stand "
                f"for {wanted}{each}: expand each image of the text to its tokens, and cut no row inside an image"
            )
    if not (tiles_of_row := max(most[0], *counts)):
        return None
    room, count = _power_of_two(tiles_of_row), np.array(counts, np.int32)
    if encoder is not None:
        size = vision.merge**2 * _power_of_two(max(most[1], *(len(own) for own, _ in patches)) // vision.merge**2)
        pixels = np.zeros((len(ids), size, encoder.patch_numbers), np.float32)
        grids = np.zeros((len(ids), room, 2), np.int32)
        for row, (own, grid) in enumerate(patches):
            pixels[row, : len(own)], grids[row, : len(grid)] = own, grid
        return Images(pixels, count, grids=grids)
    pixels = np.zeros((len(ids), room, *vision.tile_shape), np.float32)
    for row, own in enumerate(tiles):
        if counts[row]:
            own = np.asarray(own, np.float32)  # a table of rows in memory keeps them as lists
            if own.shape[1:] != vision.tile_shape:
                raise ConfigError(
                    f"row {row} of a batch has tiles of shape {own.shape[1:]} (height, width, channels), but this "
                    f"model reads {vision.tile_shape}: use the image processor of its folder"
                )
            pixels[row, : counts[row]] = own
    return Images(pixels, count)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def prompt_images(examples: Sequence[dict[str, Any]], vision: VisionConfig | None) -> Images | None:
    """`row_images` of the prompts of this process, with room for the tiles of those of all processes."""
    tiles = [example.get(PIXELS) for example in examples]
    most = (0, 0)
    if vision is not None:
        pixels = [sum(len(tile) * len(tile[0]) for tile in (() if own is None else own)) for own in tiles]
        most = (max(gather(max(count_tiles(tiles)))), max(gather(max(pixels) // vision.encoder.patch_size**2)))
    return row_images([example["prompt_ids"] for example in examples], tiles, vision, most)


def count_tiles(tiles: Sequence[Sequence[np.ndarray] | None]) -> list[int]:
    """The number of tiles of each row."""
    return [0 if own is None else len(own) for own in tiles]
