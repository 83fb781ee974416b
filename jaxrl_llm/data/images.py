"""Images of a row, from bytes, files, data: URLs or PIL images, within bounds that are checked before they are decoded.

`row_images` reads what verl's and TRL's rows hold: the columns `images` or `image`, and content parts of messages. It
gives the images in the order of their placeholders, and the messages with plain parts `{"type": "image"}`.
"""

import base64
import binascii
import hashlib
import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

import httpx
import numpy as np

from jaxrl_llm.config.resolve import ConfigError, naming
from jaxrl_llm.config.wording import amount
from jaxrl_llm.data.templates import is_conversational

if TYPE_CHECKING:
    from PIL.Image import Image

# What Pillow may open. Other formats run programs (EPS), or hold no pictures of data sets.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
DEEP_MODES = ("I", "F")  # first letters of modes of 16 or 32 bits a channel, which Pillow clips to 8
URL_SECONDS = 20.0
THUMBNAIL = 64  # pixels of the longer side of what records show
PLACEHOLDER = "<image>"  # in the text of verl's rows
IMAGE_PART = {"type": "image"}
IMAGE_TYPES = ("image", "image_url")  # of content parts
PAYLOADS = ("bytes", "image", "image_url", "url", "path", "base64")  # keys that may hold an image, as they are tried


@dataclass(frozen=True)
class ImageLimits:
    """Bounds of the images of a row: `data.image_pixels`, `image_bytes`, `images_per_row` and `image_urls`."""

    pixels: int = 2**25  # of one image, height times width
    bytes: int = 2**25  # of one file
    per_row: int = 16
    urls: bool = False  # whether http(s) URLs are fetched


@dataclass(frozen=True)
class HeldImage:
    """An image of a row as it is kept between the times that it is read: a file's bytes or path, or a PIL image."""

    held: "bytes | Path | Image"
    size: tuple[int, int]  # height and width
    limits: ImageLimits

    @classmethod
    def of(cls, value: Any, limits: ImageLimits, folder: Path | None = None) -> "HeldImage":
        """The image of a column or a content part, after it was read once; raises ConfigError as `read_image`."""
        name, held = _held(value, limits, folder)
        image = _decoded(name, held, limits)
        return cls(held, (image.height, image.width), limits)

    def read(self) -> "Image":
        """The image in RGB; raises ConfigError where its file is no longer what it was."""
        name = f"the image {self.held}" if isinstance(self.held, Path) else "an image"
        image = _decoded(name, self.held, self.limits)
        if (image.height, image.width) != self.size:
            raise ConfigError(
                f"{name} had {self.size[1]} x {self.size[0]} pixels when the rows were read, and "
                f"now has {image.width} x {image.height}; leave the files of a run as they are"
            )
        return image

    def digest(self) -> str:
        """A text that is the same for images with the same pixels."""
        return hashlib.blake2b(self.read().tobytes() + repr(self.size).encode(), digest_size=16).hexdigest()


def thumbnail(image: "Image") -> str:
    """The image as a data: URL of a PNG with sides of at most THUMBNAIL pixels and 64 colours, a few kilobytes."""
    small = image.copy()
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    return data_url(small.quantize(64), optimize=True)


def data_url(image: "Image", **options: Any) -> str:
    """The image as the data: URL of a PNG; `options` are those of PIL's `Image.save`."""
    file = io.BytesIO()
    image.save(file, "PNG", **options)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def read_image(value: Any, limits: ImageLimits) -> "Image":
    """The image of a column or a content part in RGB, turned as its EXIF orientation says, on white where it is
    transparent.

    A PIL image, the bytes of a file, a path, a data: URL, an http(s) URL where `limits.urls` allows it, or a dictionary
    that has one of these under bytes, path, image, image_url, url or base64. Height and width are checked before any
    pixel is decoded, so a decompression bomb costs its header.

    Raises ConfigError, which names the image: of another type, over a bound, or of bytes that are broken, truncated, of
    no known format, or of 16 or 32 bits a channel.
    """
    return _decoded(*_held(value, limits, None), limits)


def _decoded(name: str, held: "bytes | Path | Image", limits: ImageLimits) -> "Image":
    from PIL import Image, ImageOps

    if isinstance(held, Image.Image):
        image, turned = held, False
    else:
        data = held if isinstance(held, bytes) else _file_bytes(name, held, limits)
        try:
            image, turned = Image.open(io.BytesIO(data), formats=FORMATS), True
        except Image.DecompressionBombError as error:
            raise ConfigError(f"{name}: {error}; remove the row, or shrink the image") from error
        except Exception as error:  # decoders raise errors of many types for broken headers
            raise ConfigError(
                f"{name} of {len(data)} bytes is no image that can be read ({error}); give {', '.join(FORMATS)}"
            ) from error
    if image.width * image.height > limits.pixels or not image.width * image.height:
        raise ConfigError(
            f"{name} has {image.width} x {image.height} pixels, and data.image_pixels={limits.pixels} bounds their "
            "product; shrink the image, or raise that"
        )
    if image.mode[0] in DEEP_MODES:
        raise ConfigError(f"{name} is of mode {image.mode}, of more than 8 bits a channel; convert it to RGB")
    try:
        # In place of the file's own data, so that a broken one fails here and not in training.
        image = ImageOps.exif_transpose(image) if turned else image
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            white = Image.new("RGBA", image.size, "white")  # or black writing is black on what is mostly black
            image = Image.alpha_composite(white, image.convert("RGBA"))
        return image.convert("RGB")
    except Exception as error:  # decoders raise errors of many types for broken data
        raise ConfigError(f"{name} is truncated or broken ({error}); replace the file, or remove the row") from error


def _held(value: Any, limits: ImageLimits, folder: Path | None) -> "tuple[str, bytes | Path | Image]":
    """(its name in errors, the image as a row keeps it until it is read again); raises ConfigError as `read_image`."""
    from PIL import Image

    if isinstance(value, Image.Image):
        return f"a PIL image of {value.width} x {value.height} pixels", value
    if isinstance(value, Mapping):
        given = next((value[key] for key in PAYLOADS if value.get(key)), 0)
        if not given:
            raise ConfigError(f"an image is a dictionary of {', '.join(value) or 'nothing'}; give its bytes or path")
        if value.get("base64") is given and isinstance(given, str):
            given = f"data:;base64,{given}"
        return _held(given, limits, folder)
    if isinstance(value, bytes | bytearray | memoryview):
        return "an image", _bounded("an image", bytes(value), limits)
    if isinstance(value, str) and value[:5].lower() == "data:":
        name, (head, comma, body) = f"the image {value[:40]}...", value[5:].partition(",")
        if not comma:
            raise ConfigError(f"{name} is a data: URL without a comma; write data:image/png;base64,...")
        try:
            encoded = unquote_to_bytes(body)
            # Programs such as base64 write it in lines.
            data = base64.b64decode(b"".join(encoded.split()), validate=True) if head.endswith(";base64") else encoded
        except binascii.Error as error:
            raise ConfigError(f"{name} is no base64 ({error}); write data:image/png;base64,...") from error
        return name, _bounded(name, data, limits)
    if isinstance(value, str) and value[:8].lower().startswith(("http://", "https://")):
        return f"the image {value:.200}", _fetch(value, limits)
    if isinstance(value, str | Path):
        try:
            path = Path(str(value).removeprefix("file://")).expanduser()
            places = (path,) if folder is None else (folder / path, path)
            found = next((place.absolute() for place in places if place.is_file()), None)
        except (OSError, RuntimeError):  # a name that is too long, or the home of a user who is not here
            found = None
        if found is None:
            where = "" if folder is None else f"at {folder}, where the data is, or else "
            raise ConfigError(
                f"the image {str(value)[:200]!r} is no file here; paths start {where}at the working directory, and "
                "base64 with data:image/png;base64,"
            )
        return f"the image {found}", found
    raise ConfigError(
        f"an image is {type(value).__name__}; give bytes, a path, a data: URL, a PIL image (Image.fromarray "
        "makes one of an array), or a dictionary with bytes or path"
    )


def _file_bytes(name: str, path: Path, limits: ImageLimits) -> bytes:
    try:
        with path.open("rb") as opened:
            return _bounded(name, opened.read(limits.bytes + 1), limits)
    except OSError as error:
        raise ConfigError(f"{name} cannot be read ({error.strerror}); restore the file, or remove the row") from error


def _bounded(name: str, data: bytes, limits: ImageLimits) -> bytes:
    if len(data) > limits.bytes:
        raise ConfigError(
            f"{name} has more than data.image_bytes={limits.bytes} bytes; compress the image, or raise that"
        )
    return data


def _fetch(url: str, limits: ImageLimits) -> bytes:
    """The bytes behind an http(s) URL, in URL_SECONDS; raises ConfigError, also where URLs are not allowed."""
    if not limits.urls:
        raise ConfigError(
            f"the image {url:.200} is a URL, and data.image_urls=False; download the images, or set that to True"
        )
    end, data = time.monotonic() + URL_SECONDS, bytearray()
    try:
        with httpx.stream("GET", url, follow_redirects=True, timeout=URL_SECONDS) as reply:
            reply.raise_for_status()
            for chunk in reply.iter_bytes(2**16):
                data += chunk
                if len(data) > limits.bytes:
                    break
                if time.monotonic() > end:
                    raise ConfigError(f"the image {url:.200} took more than {URL_SECONDS:g} seconds; download it")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(f"the image {url:.200} cannot be fetched: {type(error).__name__}: {error}") from error
    return _bounded(f"the image {url:.200}", bytes(data), limits)


def row_images(
    example: Mapping[str, Any],
    columns: Sequence[str],
    key: str | None,
    limits: ImageLimits,
    folder: Path | None = None,
) -> tuple[dict[str, Any], list["HeldImage"]]:
    """(the example with its placeholders as parts, its images in their order); relative paths start at `folder`.

    `columns` are those that the row is made of, in the order of its tokens. The column of images is `key`, or else
    `images` or `image`: one, or a list. Placeholders are content parts of type image or image_url, and `<image>` in the
    text of rows that have such a column. A part that holds its image keeps its place; the others take those of the
    column in turn. Messages without any placeholder get the images of the column before the text of the first message
    of the user, as TRL puts them; a prompt that is text needs `<image>`.

    Raises ConfigError: more images than `limits.per_row`, a number of placeholders that is not that of the images, or
    an image that cannot be read (`read_image`).
    """
    column = key or next((name for name in ("images", "image") if example.get(name) is not None), None)
    if key is not None and key not in example:
        raise ConfigError(f"the row has no column {key!r}, which data.image_key names; it has {', '.join(example)}")
    given = None if column is None else example[column]
    if isinstance(given, np.ndarray | tuple):
        given = list(given)
    listed: list[Any] = [] if given is None else given if isinstance(given, list) else [given]

    ordered: list[Any] = []  # images by placeholder, None where the column has it
    made = dict(example)
    names = [name for name in columns if is_conversational(example.get(name))]
    for name in names:
        made[name] = [_with_parts(message, bool(listed), ordered) for message in example[name]]
    marks = sum(example[name].count(PLACEHOLDER) for name in columns if isinstance(example.get(name), str) and listed)
    if listed and not ordered and not marks and names:
        made[names[0]] = _images_first(made[names[0]], len(listed))
        ordered = [None] * len(listed)
    ordered += [None] * marks
    free = ordered.count(None)
    if free != len(listed):
        raise ConfigError(
            f"the row has {amount(free, 'placeholder')} of images (parts of type image, or {PLACEHOLDER} in the text) "
            f"and {amount(len(listed), 'image')} in {'no column' if column is None else f'column {column!r}'}; make "
            "them as many, or name another column with data.image_key"
        )
    if len(ordered) > limits.per_row:
        raise ConfigError(
            f"the row has {amount(len(ordered), 'image')}, more than data.images_per_row={limits.per_row}; raise that, "
            "or drop the row"
        )
    taken = iter(listed)
    values = [next(taken) if value is None else value for value in ordered]
    images = []
    for index, value in enumerate(values):
        with naming(f"image {index}"):
            images.append(HeldImage.of(value, limits, folder))
    return made, images


def has_image_parts(messages: Sequence[Mapping[str, Any]]) -> bool:
    """True for messages in whose contents a part is an image."""
    contents = [message.get("content") for message in messages]
    lists = [content for content in contents if isinstance(content, Sequence) and not isinstance(content, str)]
    return any(isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES for content in lists for part in content)


def _with_parts(message: Mapping[str, Any], marked: bool, ordered: list[Any]) -> dict[str, Any]:
    """The message with its content in parts where it has images, which are added to `ordered`.

    Raises ConfigError for a part that is neither text nor an image.
    """
    content = message.get("content")
    if isinstance(content, str) and marked and PLACEHOLDER in content:
        parts: list[Any] = []
        for index, text in enumerate(content.split(PLACEHOLDER)):
            if index:
                ordered.append(None)
                parts.append(dict(IMAGE_PART))
            if text:
                parts.append({"type": "text", "text": text})
        return {**message, "content": parts}
    if not isinstance(content, Sequence) or isinstance(content, str):
        return dict(message)
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in IMAGE_TYPES:
            # Arrow storage gives every part the keys of all others, set to None.
            held = {name: part[name] for name in PAYLOADS if part.get(name) is not None}
            ordered.append(held or None)
            parts.append(dict(IMAGE_PART))
        elif kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        else:
            raise ConfigError(f"a content part is {part!r:.100}; it is of type text, image or image_url")
    return {**message, "content": parts}


def _images_first(messages: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """The messages with `count` images before the content of the first one of the user."""
    made = [dict(message) for message in messages]
    first = next((message for message in made if message["role"] == "user"), None)
    if first is None:
        raise ConfigError("the row has images, and no message of the user to put them in; write <image> in a message")
    content = first["content"]
    rest = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])
    first["content"] = [*(dict(IMAGE_PART) for _ in range(count)), *rest]
    return made
