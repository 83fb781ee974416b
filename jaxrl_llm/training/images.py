"""The images of rows on their way to a network: `Images`, of the tiles that each row of a batch brings."""

import json
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.algorithms.batch import Images
from jaxrl_llm.config import ConfigError
from jaxrl_llm.data.image_rows import Tiles
from jaxrl_llm.data.images import thumbnail
from jaxrl_llm.data.tokenize import PIXELS
from jaxrl_llm.distributed.processes import gather
from jaxrl_llm.models.vision.row_images import count_tiles, image_tokens, row_images
from jaxrl_llm.models.vision.tower import VisionConfig

IMAGES = "images"  # the column of rewards that holds a prompt's images, and that of records with their thumbnails
SHOWN = 4  # thumbnails of a row, at most


def prompt_images(examples: Sequence[dict[str, Any]], vision: VisionConfig | None) -> Images | None:
    """`row_images` of the prompts of this process, with room for the tiles of those of all processes."""
    tiles = [example.get(PIXELS) for example in examples]
    most = (0, 0)
    ids = [example["prompt_ids"] for example in examples]
    if vision is not None:
        most = (max(gather(max(count_tiles(tiles)))), max(gather(max(image_tokens(ids, vision)))))
    return row_images(ids, tiles, vision, most)


def check_kept(replay: bool, teacher: bool) -> None:
    """Raises ConfigError for settings that are on and would lose the images of rows."""
    for key, on in (("algorithm.replay_groups", replay), ("teacher.path", teacher)):
        if on:
            raise ConfigError(f"{key} is set, but rows have images, which it does not keep: leave it unset")


def shown_images(examples: Sequence[dict[str, Any]], group_size: int) -> tuple[list[Any], list[str | None]] | None:
    """The images of the examples, for `group_size` rows each: lists of PIL images, and their thumbnails as JSON.

    It is None where no example has images that are read from files; those whose data has `pixels` alone have none.
    Raises ConfigError for a file that is no longer what it was.
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
