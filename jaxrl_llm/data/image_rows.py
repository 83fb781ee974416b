"""Rows with images: their text with the tokens of the images, and their tiles, which are made when a batch needs them.

`ImageReader` says how the images of a data source are read. A row keeps files and paths, not pixels: the tiles of one
image may be fifty megabytes.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.config.wording import amount
from jaxrl_llm.data import image_processors
from jaxrl_llm.data.image_processors import ImageProcessor
from jaxrl_llm.data.images import PLACEHOLDER, HeldImage, ImageLimits, has_image_parts, row_images
from jaxrl_llm.data.templates import chat_ids, is_conversational

if TYPE_CHECKING:
    from PIL.Image import Image

UNREAD = ("videos", "audios")  # columns of verl's and LLaMA-Factory's rows
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm")


@dataclass(frozen=True)
class Tiles:
    """The tiles `[H, W, C]` of a row's images, which are read and processed each time that they are asked for."""

    images: tuple[HeldImage, ...]
    processor: ImageProcessor
    count: int
    parts: "tuple[Tiles, ...]" = ()  # whose tiles these are, where the processors of some images differ

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        if self.parts:
            return itertools.chain.from_iterable(self.parts)
        return iter(self.processor.pixels(self.read()))

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays; at most, where each image is one tile of its own size, which may be made smaller."""
        size = self.processor.tile_size
        return 12 * (sum(map(math.prod, (image.size for image in self.images))) if size is None else
                     self.count * math.prod(size))  # fmt: skip

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # it is always new
        tiles = list(self) if self.parts else self.processor.pixels(self.read())
        return np.asarray(tiles, dtype or np.float32)

    def read(self) -> "list[Image]":
        """The images in RGB, in the order of their tokens; raises ConfigError where a file is no longer what it was."""
        return [image.read() for image in self.images]


@dataclass(frozen=True)
class ImageText:
    """The images of a row in its text: `expand` puts their tokens in the place of the template's placeholders."""

    tiles: Tiles
    texts: tuple[str, ...]  # of each image
    tokens: int  # image tokens of all

    @classmethod
    def of(cls, tiles: Tiles, tokenizer: Any) -> "ImageText":
        """The ImageText of all images of `tiles`: the text that each becomes in a prompt, and how many image tokens
        they are."""
        texts = tuple(tiles.processor.expand(*image.size) for image in tiles.images)
        tokens = sum(chat_ids(tokenizer, text).count(tiles.processor.image_id) for text in texts)
        return cls(tiles, texts, tokens)

    def behind(self, count: int) -> "ImageText":
        """The ImageText of a text that has the images after the first `count`."""
        return replace(self, texts=self.texts[count:])

    def expand(self, text: str) -> str:
        """The text with the tokens of its first images; raises ConfigError where it has more placeholders than those.

        The beginning of a conversation may have fewer.
        """
        first, *rest = text.split(self.tiles.processor.placeholder)
        if len(rest) > len(self.texts):
            raise ConfigError(
                f"the chat template wrote {self.tiles.processor.placeholder} {amount(len(rest), 'time')} for a row of "
                f"{amount(len(self.texts), 'image')}; remove that word from the text, and images from answers"
            )
        whole = first + "".join(image + part for image, part in zip(self.texts, rest, strict=False))
        return self.tiles.processor.finish(whole)

    def check(self, ids: Sequence[int]) -> None:
        """Raises ConfigError unless the ids have all tokens of the images, and no others."""
        if (found := list(ids).count(self.tiles.processor.image_id)) != self.tokens:
            raise ConfigError(
                f"the row has {amount(found, 'image token')}, and {self.tokens} are those of its "
                f"{amount(len(self.texts), 'image')}: the chat template leaves images out, or an answer has "
                "some; give the template of the model's own tokenizer"
            )


@dataclass(frozen=True)
class ImageReader:
    """A reader of the images of a source's rows, for the model whose tokenizer it has.

    `tokenizer.image_folder` is the folder of a model that reads images; `models.hf.remember_images` sets it.
    """

    tokenizer: Any
    key: str = "auto"  # data.image_key: a column; auto: images or image; none: rows have no images
    limits: ImageLimits = field(default_factory=ImageLimits)
    folder: Path | None = None  # that relative paths start at

    @functools.cached_property
    def processor(self) -> ImageProcessor | None:
        """The model's image processor, None where it reads text alone; raises ConfigError as `load` does."""
        folder = getattr(self.tokenizer, "image_folder", None)
        return None if folder is None else image_processors.load(folder, self.tokenizer)

    @functools.cached_property
    def image_id(self) -> int | None:
        """The image token of the model, None for one that reads text alone."""
        folder = getattr(self.tokenizer, "image_folder", None)
        config = {} if folder is None else image_processors.read_json(folder / "config.json")
        token = config.get("image_token_id", config.get("image_token_index"))
        if token is None and folder is not None:  # transformers leaves out what is the default of the family
            with contextlib.suppress(ConfigError):  # of what rows with images lack
                token = None if self.processor is None else self.processor.image_id
        return token

    def check_none(self, ids: Sequence[int]) -> None:
        """Raises ConfigError for image tokens in the ids of a row without images."""
        if self.image_id is not None and self.image_id in ids:
            raise ConfigError(
                f"the row has no images, and its text has {self.tokenizer.convert_ids_to_tokens(self.image_id)}, which "
                "stands for one: give its images (of a row in the column that data.image_key names), or remove it from "
                "the text"
            )

    def read(self, example: Mapping[str, Any], columns: Sequence[str]) -> tuple[Mapping[str, Any], ImageText | None]:
        """(the example whose text is rendered, its images or None without any).

        `columns` are those that the row is made of, in the order of its tokens.
        Raises ConfigError as `row_images`, for images where the model reads text alone, and for videos and sound.
        """
        if self.key == "none":
            return example, None
        for name in UNREAD:
            if isinstance(given := example.get(name), Sequence) and not isinstance(given, str) and len(given):
                raise ConfigError(
                    f"the row has {name} in the column of that name, which no model reads here: leave such rows out, "
                    "or the column where it is no part of the prompt"
                )
        key = None if self.key == "auto" else self.key
        if getattr(self.tokenizer, "image_folder", None) is None:
            self._refuse(example, columns, key)
            return example, None
        made, images = row_images(example, columns, key, self.limits, self.folder)
        if not images:
            return made, None
        processor = self.processor
        if processor is None:
            raise ConfigError(
                f"the row has images, and the files of the model in {self.tokenizer.image_folder} say nothing of them; "
                "copy preprocessor_config.json of the original model"
            )
        processor = processor if len(images) == 1 else processor.of_many or processor
        count = sum(processor.tile_count(*image.size) for image in images)
        found, used = ImageText.of(Tiles(tuple(images), processor, count), self.tokenizer), 0
        for name in columns:
            if isinstance(text := made.get(name), str) and processor.before_text:
                raise ConfigError(
                    f"the row has images and the column {name} as plain text, but this model reads images in front of "
                    "the token that begins a text: give messages, [{'role': 'user', 'content': ...}]"
                )
            if isinstance(text := made.get(name), str):
                first, *rest = text.split(PLACEHOLDER)
                made[name] = first + "".join(found.texts[used + index] + part for index, part in enumerate(rest))
                used += len(rest)
        return made, found

    def _refuse(self, example: Mapping[str, Any], columns: Sequence[str], key: str | None) -> None:
        names = [key] if key is not None else [name for name in ("images", "image") if _is_image(example.get(name))]
        held = [example[name] for name in columns if is_conversational(example.get(name))]
        if names or any(map(has_image_parts, held)):
            has = f"has images in column {names[0]!r}" if names else "has images in its messages"
            raise ConfigError(
                f"the row {has}, but the model reads text alone: use one that reads images (docs/vision.md), or set "
                "data.image_key=none where they are no part of the prompt"
            )


def _is_image(value: Any) -> bool:
    """True for what can only be an image or a list of them, which text such as a container's name is not."""
    if isinstance(value, list | tuple | np.ndarray):
        return len(value) > 0 and _is_image(value[0])
    if isinstance(value, str | Path):
        return str(value)[:11].lower() == "data:image/" or str(value).lower().endswith(SUFFIXES)
    if isinstance(value, Mapping):
        return any(value.get(name) for name in ("bytes", "path"))
    return isinstance(value, bytes | bytearray) or type(value).__module__.startswith("PIL.")
