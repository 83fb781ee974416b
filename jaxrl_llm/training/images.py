"""The images of rows on their way to a network: `Images`, of the tiles that each row of a batch brings."""

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxrl_llm.algorithms.batch import Images
from jaxrl_llm.config import ConfigError
from jaxrl_llm.data.image_rows import Tiles
from jaxrl_llm.data.images import thumbnail
from jaxrl_llm.data.tokenize import PIXELS
from jaxrl_llm.distributed.processes import gather
from jaxrl_llm.models.vision.tower import VisionConfig

IMAGES = "images"  # the column of rewards that holds a prompt's images, and that of records with their thumbnails
SHOWN = 4  # thumbnails of a row, at most
MOST_WORKERS = 16  # threads that read and resize images


def row_images(
    ids: Sequence[Sequence[int]], tiles: Sequence[np.ndarray | None], vision: VisionConfig | None, most: int = 0
) -> Images | None:
    """The images of rows with these token ids, on the host; None where no row has any.

    There is room for the tiles of the row with most of them, and for `most`; powers of two, so that few programs are
    compiled. Raises ConfigError for a model that reads text alone, for tiles of another shape, and for a row whose
    image tokens are not those of its tiles, as one that was cut inside an image.
    """
    counts = count_tiles(tiles)
    if vision is None:
        if any(counts):
            raise ConfigError(
                "rows have images, but the model reads text alone: use one with a vision part (docs/vision.md), or "
                "rows without images"
            )
        return None
    for row, (own, count) in enumerate(zip(ids, counts, strict=True)):
        found, wanted = sum(token == vision.image_token for token in own), count * vision.tile_tokens
        if found != wanted:
            raise ConfigError(
                f"row {row} of a batch has {found} image tokens (id {vision.image_token}), but its {count} tiles stand "
                f"for {wanted}, {vision.tile_tokens} each: expand each image of the text to its tokens, and cut no row "
                "inside an image"
            )
    if not (most := max(most, *counts)):
        return None
    pixels = np.zeros((len(ids), 1 << (most - 1).bit_length(), *vision.tile_shape), np.float32)

    def fill(rows: list[int]) -> None:
        # A table of rows in memory keeps them as lists; others are files, which are read here.
        own, row = np.asarray(tiles[rows[0]], np.float32), rows[0]
        if own.shape[1:] != vision.tile_shape:
            raise ConfigError(
                f"row {row} of a batch has tiles of shape {own.shape[1:]} (height, width, channels), but this "
                f"model reads {vision.tile_shape}: use the image processor of its folder"
            )
        for row in rows:
            pixels[row, : counts[row]] = own

    rows_of: dict[int, list[int]] = {}  # both rows of a pair have the same images, which are read once
    for row, own in enumerate(tiles):
        if counts[row]:
            rows_of.setdefault(id(own), []).append(row)
    with ThreadPoolExecutor(min(len(rows_of), os.cpu_count() or 1, MOST_WORKERS), thread_name_prefix="images") as pool:
        for _ in pool.map(fill, rows_of.values()):
            pass
    return Images(pixels, np.array(counts, np.int32))


def prompt_images(examples: Sequence[dict[str, Any]], vision: VisionConfig | None) -> Images | None:
    """`row_images` of the prompts of this process, with room for the tiles of those of all processes."""
    tiles = [example.get(PIXELS) for example in examples]
    most = 0 if vision is None else max(gather(max(count_tiles(tiles))))
    return row_images([example["prompt_ids"] for example in examples], tiles, vision, most)


def shown_images(examples: Sequence[dict[str, Any]], group_size: int) -> tuple[list[Any], list[str | None]] | None:
    """The images of the examples, for `group_size` rows each: lists of PIL images, and their thumbnails as JSON.

    None where no example has images that are read from files; those whose data has `pixels` alone have none. Raises
    ConfigError for a file that is no longer what it was.
    """
    if not any(isinstance(example.get(PIXELS), Tiles) for example in examples):
        return None
    images: list[Any] = []
    thumbnails: list[str | None] = []
    for example in examples:
        tiles = example.get(PIXELS)
        read = tiles.read() if isinstance(tiles, Tiles) else []
        images += [read] * group_size
        thumbnails += [json.dumps([thumbnail(image) for image in read[:SHOWN]]) if read else None] * group_size
    return images, thumbnails


def count_tiles(tiles: Sequence[np.ndarray | None]) -> list[int]:
    """The number of tiles of each row."""
    return [0 if own is None else len(own) for own in tiles]
