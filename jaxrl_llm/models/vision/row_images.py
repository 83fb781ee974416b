"""The images of rows on the host, as the network of a model reads them: `Images`, of the tiles that each row brings."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from jaxrl_llm.algorithms.batch import Images
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.wording import amount
from jaxrl_llm.models.vision.any_resolution import token_counts
from jaxrl_llm.models.vision.patch_rows import PatchRowsConfig, patch_rows
from jaxrl_llm.models.vision.tower import VisionConfig

MOST_WORKERS = 16  # threads that read and resize images


def row_images(
    ids: Sequence[Sequence[int]],
    tiles: Sequence[Any],
    vision: VisionConfig | None,
    most: tuple[int, int] = (0, 0),
) -> Images | None:
    """The images of rows with these token ids, on the host; None where no row has any.

    `tiles` has those `[H,W,C]` of each row, or None; they are read in threads. Where the model puts tiles together it
    has the images of each row, pairs of the tiles `[tiles,H,W,C]` and the six numbers of any_resolution.py. There is
    room for the tiles of the row with most of them, and for `most` tiles and image tokens; powers of two, so that few
    programs are compiled. Raises ConfigError for a model that reads text alone, for tiles of another shape, and for a
    row whose image tokens are not those of its tiles, as one that was cut inside an image.
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
    tokens = image_tokens(ids, vision)

    def check(row: int, wanted: int) -> None:
        if tokens[row] != wanted:
            each = "" if encoder or vision.newline else f", {vision.tile_tokens} each"
            raise ConfigError(
                f"row {row} of a batch has {amount(tokens[row], 'image token')} (id {vision.image_token}), but its "
                f"{amount(counts[row], 'tile')} should have {wanted}{each}: expand each image of the text to its "
                "tokens, and cut no row inside an image"
            )

    for row, own in enumerate(counts):
        if not own:
            check(row, 0)
        elif encoder is None and not vision.newline:  # the tokens of others are known when they have been read
            check(row, own * vision.tile_tokens)
    if not (tiles_of_row := max(most[0], *counts)):
        return None
    images = room_for(vision, len(ids), tiles_of_row, max(most[1], *tokens))
    pixels, grids = images.pixels, images.grids

    def fill(rows: list[int]) -> None:
        own = tiles[rows[0]]
        if encoder is not None:
            read, grid = patch_rows(own, encoder)
            wanted = len(read) // vision.merge**2
        else:
            read, grid = _read_tiles(own, rows[0], vision)
            wanted = int(token_counts(grid, vision.tile_tokens).sum()) if vision.newline else None
        for row in rows:
            if wanted is not None:
                check(row, wanted)
            pixels[row, : len(read)] = read
            if grids is not None and grid is not None:
                grids[row, : len(grid)] = grid

    rows_of: dict[int, list[int]] = {}  # both rows of a pair have the same images, which are read once
    for row, own in enumerate(tiles):
        if counts[row]:
            rows_of.setdefault(id(own), []).append(row)
    workers = min(max(len(rows_of), 1), os.cpu_count() or 1, MOST_WORKERS)
    with ThreadPoolExecutor(workers, thread_name_prefix="images") as pool:
        for _ in pool.map(fill, rows_of.values()):
            pass
    return dataclasses.replace(images, count=np.array(counts, np.int32))


def _read_tiles(own: Any, row: int, vision: VisionConfig) -> tuple[np.ndarray, np.ndarray | None]:
    """The tiles `[tiles,H,W,C]` of a row's images, and the numbers `[images,n]` of these where a model reads them."""
    grid = None
    if vision.numbers:
        images = list(own)
        if not all(isinstance(image, tuple) for image in images):
            raise ConfigError(
                f"row {row} of a batch has pixels alone, but this model puts the tiles of an image together by the "
                "size of the image: give images (docs/vision.md), not pixels"
            )
        own, grid = np.concatenate([tiles for tiles, _ in images]), np.array([numbers for _, numbers in images])
    # A table of rows in memory keeps them as lists; others are files, which are read here.
    own = np.asarray(own, np.float32)
    if own.shape[1:] != vision.tile_shape:
        raise ConfigError(
            f"row {row} of a batch has tiles of shape {own.shape[1:]} (height, width, channels), but this model reads "
            f"{vision.tile_shape}: use the image processor of its folder"
        )
    return own, grid


def room_for(vision: VisionConfig, rows: int, tiles: int, tokens: int, make: Callable[..., Any] = np.zeros) -> Images:
    """Images with room for so many tiles and image tokens in each row, of arrays that `make(shape, dtype)` makes."""
    room, count = _power_of_two(tiles), make((rows,), np.int32)
    if isinstance(encoder := vision.encoder, PatchRowsConfig):
        size = vision.merge**2 * _power_of_two(tokens)
        pixels, numbers = make((rows, size, encoder.patch_numbers), np.float32), 2
    else:
        pixels, numbers = make((rows, room, *vision.tile_shape), np.float32), vision.numbers
    return Images(pixels, count, grids=make((rows, room, numbers), np.int32) if numbers else None)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def image_tokens(ids: Sequence[Sequence[int]], vision: VisionConfig) -> list[int]:
    """The number of image tokens, in whose places features of images go, among the token ids of each row."""
    return [sum(token == vision.image_token for token in own) for own in ids]


def count_tiles(tiles: Sequence[Any]) -> list[int]:
    """The number of tiles of each row's images; None is a row without any."""

    def of_row(own) -> int:
        if isinstance(own, list):  # in which an image may be a pair of its tiles and numbers
            return sum(len(image[0]) if isinstance(image, tuple) else 1 for image in own)
        return 0 if own is None else len(own)

    return [of_row(own) for own in tiles]
