"""Families whose images are cut into tiles that are read apart, beside one of the whole: Idefics2 and 3 and SmolVLM,
InternVL, Aya Vision, Command A Vision, LFM2-VL and Ovis2."""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data.image_processors.processor import (
    ImageProcessor,
    channels_last,
    check_model,
    read_json,
    scaled,
    tile_of,
    tiles_by,
    token_ids,
)

if TYPE_CHECKING:
    from PIL.Image import Image

# Of an image processor of LFM2-VL, where files have no entries.
LFM2_VL: dict[str, Any] = {
    "downsample_factor": 2, "do_image_splitting": True, "min_tiles": 2, "max_tiles": 10, "use_thumbnail": True,
    "min_image_tokens": 64, "max_image_tokens": 256, "encoder_patch_size": 16, "tile_size": 512,
    "max_pixels_tolerance": 2.0, "resample": 2, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}  # fmt: skip
# Of an image processor of Command A Vision, where files have no entries.
COHERE2_VISION: dict[str, Any] = {
    "size": {"height": 512, "width": 512}, "patch_size": 16, "crop_to_patches": True, "min_patches": 1,
    "max_patches": 12, "resample": 3, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
}  # fmt: skip


def idefics3(
    folder: Path, config: dict[str, Any], tokenizer: Any, settings: Mapping[str, Any], smolvlm: bool = False
) -> ImageProcessor:
    """Idefics3's (arXiv 2408.12637) and SmolVLM's: an image is scaled to a longest edge, cut into square tiles, and
    followed by a tile of the whole; each tile is `image_seq_len` tokens behind a tag of its row and column."""
    if smolvlm:
        from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil as Processor
        from transformers.models.smolvlm.image_processing_pil_smolvlm import get_resize_output_image_size
    else:
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil as Processor
        from transformers.models.idefics3.image_processing_pil_idefics3 import get_resize_output_image_size
    processor: Any = Processor.from_pretrained(folder, **settings)
    edge, longest = processor.max_image_size["longest_edge"], processor.size["longest_edge"]
    fake, token, whole = "<fake_token_around_image>", "<image>", "<global-img>"
    embeddings = read_json(folder / "processor_config.json").get("image_seq_len")
    if embeddings is None:
        side = config["vision_config"]["image_size"] // config["vision_config"]["patch_size"]
        embeddings = side**2 // config["scale_factor"] ** 2

    def grid(height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles beside the one of the whole image, (0, 0) where that is the only one."""
        if not processor.do_image_splitting:
            return 0, 0
        if processor.do_resize:
            height, width = get_resize_output_image_size(np.broadcast_to(np.uint8(0), (3, height, width)), longest)
        # The arithmetic of `resize_for_vision_encoder`, its order of rounding included.
        ratio = width / height
        if width >= height:
            width = math.ceil(width / edge) * edge
            height = math.ceil(int(width / ratio) / edge) * edge
        else:
            height = math.ceil(height / edge) * edge
            width = math.ceil(int(height * ratio) / edge) * edge
        return (height // edge, width // edge) if max(height, width) > edge else (0, 0)

    def expand(height: int, width: int) -> str:
        rows, columns = grid(height, width)
        tiles = ""
        for row in range(1, rows + 1):
            tiles += "".join(f"{fake}<row_{row}_col_{column}>{token * embeddings}" for column in range(1, columns + 1))
            tiles += "\n"
        return f"{tiles}{chr(10) if rows else ''}{fake}{whole}{token * embeddings}{fake}"

    def tiles(image: "Image") -> np.ndarray:
        pixels = processor(images=[[image]], do_pad=False, return_tensors="np")["pixel_values"][0]
        if len(pixels) != (count := tile_count(image.height, image.width)):
            raise ConfigError(
                f"an image of {image.width} x {image.height} pixels has {len(pixels)} tiles and tokens for "
                f"{count}: this version of transformers cuts images in another way than its text says"
            )
        return channels_last(pixels)

    def tile_count(height: int, width: int) -> int:
        rows, columns = grid(height, width)
        return rows * columns + 1

    tags = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    ids = token_ids(tokenizer, (fake, token, whole), tuple(tags))
    return ImageProcessor(token, ids[1], frozenset(ids), expand, tiles, (edge, edge), tile_count)


def idefics2(folder: Path, config: dict[str, Any], tokenizer: Any, settings: Mapping[str, Any]) -> ImageProcessor:
    """Idefics2's (arXiv 2405.02246): an image keeps its shape, between a shortest and a longest edge, and is as many
    tokens as the perceiver has latents; with `do_image_splitting` its four quarters, each scaled so, are before it.

    It is in the corner of a tile, whose other pixels are NaN. A token is around images and between those that touch.
    """
    from transformers.models.idefics2.image_processing_pil_idefics2 import Idefics2ImageProcessorPil

    processor: Any = Idefics2ImageProcessorPil.from_pretrained(folder, **settings)
    side, longest = config["vision_config"].get("image_size", 224), processor.size["longest_edge"]
    if not processor.do_resize or longest > side:
        raise ConfigError(
            f"the image processor in {folder} has do_resize = {processor.do_resize} and longest_edge = {longest}, but "
            f"images of this model are up to image_size = {side} pixels a side: copy preprocessor_config.json of the "
            "original model"
        )
    fake, token, count = "<fake_token_around_image>", "<image>", 5 if processor.do_image_splitting else 1
    latents = (config.get("perceiver_config") or {}).get("resampler_n_latents", 64)
    text = fake + (token * latents + fake) * count

    def expand(height: int, width: int) -> str:
        if count > 1 and min(height, width) < 2:
            raise ConfigError(
                f"an image of {width} x {height} pixels has no quarters: crop it, drop the row, or set "
                "data.image_processor=do_image_splitting=False"
            )
        return text

    def tiles(image: "Image") -> np.ndarray:
        made = processor(images=[[image]], do_pad=False)["pixel_values"][0]
        canvas = np.full((len(made), side, side, 3), np.nan, np.float32)
        for tile, pixels in zip(canvas, made, strict=True):
            tile[: pixels.shape[1], : pixels.shape[2]] = np.moveaxis(pixels, 0, -1)
        return canvas

    def finish(text: str) -> str:
        return re.sub(rf"{fake}(?=[^\s<])", f"{fake} ", text.replace(fake * 2, fake))

    ids = token_ids(tokenizer, (fake, token))
    return ImageProcessor(
        token, ids[1], frozenset(ids), expand, tiles, (side, side), lambda height, width: count, finish=finish
    )


def internvl(folder: Path, config: dict[str, Any], tokenizer: Any, settings: Mapping[str, Any]) -> ImageProcessor:
    """InternVL's (arXiv 2404.16821): an image is scaled to the grid of square tiles whose shape is nearest to its own,
    of `min_patches` to `max_patches`, cut into these, and followed by a tile of the whole."""
    processor, tile_count, tiles = _cut_to_shape(folder, settings)
    encoder, ratio = config["vision_config"], config.get("downsample_ratio", 0.5)
    # Files have the sides of an image and of a patch as a number, or as height and width.
    sides = (np.ravel(encoder.get(entry, size))[0] for entry, size in (("image_size", 448), ("patch_size", 14)))
    image_size, patch_size = map(int, sides)
    embeddings = round(image_size // patch_size * ratio) ** 2
    token, start, end = "<IMG_CONTEXT>", "<img>", "</img>"
    ids = token_ids(tokenizer, (token, start, end))

    def expand(height: int, width: int) -> str:
        return f"{start}{token * embeddings * tile_count(height, width)}{end}"

    size = (processor.size["height"], processor.size["width"])
    return ImageProcessor(token, ids[0], frozenset(ids), expand, tiles, size, tile_count)


def _cut_to_shape(
    folder: Path, settings: Mapping[str, Any]
) -> "tuple[Any, Callable[[int, int], int], Callable[[Image], np.ndarray]]":
    """The processor that cuts an image to the grid of tiles whose shape is nearest to its own, the number of tiles by
    height and width, and the tiles of an image."""
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    processor: Any = GotOcr2ImageProcessorPil.from_pretrained(folder, **settings)
    cut = {"crop_to_patches": True}  # as transformers' class for the whole has it, whatever the file says

    def tile_count(height: int, width: int) -> int:
        return processor.get_number_of_image_patches(height, width, cut)

    return processor, tile_count, tiles_by(processor, **cut)


def aya_vision(folder: Path, config: dict[str, Any], tokenizer: Any, settings: Mapping[str, Any]) -> ImageProcessor:
    """Aya Vision's (arXiv 2505.08751): an image is cut as one of InternVL, and a tag is before the tokens of a tile."""
    _, tile_count, tiles = _cut_to_shape(folder, settings)
    size, side = tile_of(config, "siglip_vision_model")
    token, start, end = "<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>"
    each = token * (side // config.get("downsample_factor", 2)) ** 2

    def expand(height: int, width: int) -> str:
        tiles = "".join(f"TILE_{number}{each}" for number in range(1, tile_count(height, width)))
        return f"{start}{tiles}TILE_GLOBAL{each}{end}"

    ids = token_ids(tokenizer, (token, start, end))
    return ImageProcessor("<image>", ids[0], frozenset(ids), expand, tiles, (size, size), tile_count)


def cohere2_vision(folder: Path, config: dict[str, Any], tokenizer: Any, settings: Mapping[str, Any]) -> ImageProcessor:
    """Command A Vision's: an image is scaled to the grid of square tiles that enlarges it least, of `max_patches` at
    most, or else shrinks it least, and cut into these, which one of the whole follows; a token ends those of a tile.

    transformers has its processor for torchvision alone; Pillow resizes as that does, but for the last of 8 bits, and
    at the sharpest edges for the last three.
    """
    entries = {**COHERE2_VISION, **read_json(folder / "preprocessor_config.json"), **settings}
    side, most = entries["size"]["height"], entries["max_patches"]
    size, patches = tile_of(config, "siglip_vision_model")
    check_model(folder, "size", side, "image_size", size)
    tokens = patches // config.get("downsample_factor", 2)
    check_model(folder, "patch_size", entries["patch_size"], "tokens along a tile", tokens)
    token, start, end, line = "<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>"
    each = token * entries["patch_size"] ** 2 + line

    def grid(height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles, (1, 1) for an image that is not cut."""
        if not entries["crop_to_patches"]:
            return 1, 1
        shapes = [(wide, high) for wide in range(1, most + 1) for high in range(1, most + 1) if wide * high <= most]
        shapes.sort(key=math.prod)
        scales = (np.array(shapes) * side / np.array([width, height])).min(axis=1)
        best = np.argmin(np.where(scales < 1, 10e9, scales)) if (scales >= 1).any() else np.argmax(scales)
        columns, rows = shapes[int(best)]
        return rows, columns

    def tile_count(height: int, width: int) -> int:
        tiles = math.prod(grid(height, width))
        return tiles + int(tiles > 1)

    def tiles(image: "Image") -> np.ndarray:
        rows, columns = grid(image.height, image.width)
        whole = scaled(image, side, side, entries)[None]
        if rows * columns == 1:
            return whole
        return np.concatenate([_cells(image, rows, columns, side, entries), whole])

    def expand(height: int, width: int) -> str:
        return f"{start}{each * tile_count(height, width)}{end}"

    ids = token_ids(tokenizer, (token, start, end), (line,))
    return ImageProcessor(token, ids[0], frozenset(ids), expand, tiles, (side, side), tile_count)


def ovis2(folder: Path, config: dict[str, Any], tokenizer: Any, settings: Mapping[str, Any]) -> ImageProcessor:
    """Ovis2's (arXiv 2405.20797): a tile of the whole, before the fewest tiles of a grid, up to `max_patches`, whose
    pixels nine tenths of the image keep; tokens stand before the image, behind the whole, columns and rows, and at its
    end."""
    from transformers.models.ovis2.image_processing_pil_ovis2 import (
        Ovis2ImageProcessorPil,
        get_min_tile_covering_grid,
        get_optimal_tiled_canvas,
    )

    processor: Any = Ovis2ImageProcessorPil.from_pretrained(folder, **settings)
    encoder, side, most = config["vision_config"], processor.size["height"], processor.max_patches
    check_model(folder, "size", side, "image_size", encoder.get("image_size", 224))
    names = ("<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
    token, start, behind_whole, behind_column, behind_row, end = names
    each = token * (side // encoder.get("patch_size", 14) // encoder.get("hidden_stride", 1)) ** 2

    def grid(height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles, (1, 1) for an image that is not cut."""
        if not processor.crop_to_patches or most == 1:
            return 1, 1
        if processor.use_covering_area_grid:
            columns, rows = get_min_tile_covering_grid((height, width), target_patch_size=side, max_image_tiles=most)
        else:
            columns, rows = get_optimal_tiled_canvas((height, width), (side, side), processor.min_patches, most)
        return rows, columns

    def tile_count(height: int, width: int) -> int:
        tiles = math.prod(grid(height, width))
        return tiles + int(tiles > 1)

    def expand(height: int, width: int) -> str:
        rows, columns = grid(height, width)
        cells = behind_row.join([behind_column.join([each] * columns)] * rows) if rows * columns > 1 else ""
        return f"{start}{each}{behind_whole}{cells}{end}"

    ids = token_ids(tokenizer, names)
    tiles = tiles_by(processor)
    return ImageProcessor("<image>", ids[0], frozenset(ids), expand, tiles, tile_count=tile_count)


def lfm2_vl(folder: Path, config: dict[str, Any], tokenizer: Any, settings: Mapping[str, Any]) -> ImageProcessor:
    """LFM2-VL's (arXiv 2511.23404): an image keeps its shape, scaled to `min_image_tokens` to `max_image_tokens` of its
    tokens. One that is much larger is scaled to the grid of square tiles whose shape is nearest to its own instead, of
    `min_tiles` to `max_tiles`, and cut into these, which one of the whole follows.

    transformers has its processor for torchvision alone; Pillow resizes as that does, but for the last of 8 bits.
    """
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

    entries = {**lfm2_vl_entries(folder), **settings}
    patch, merge, side = entries["encoder_patch_size"], entries["downsample_factor"], entries["tile_size"]
    check_model(folder, "encoder_patch_size", patch, "patch_size", config["vision_config"].get("patch_size", patch))
    check_model(folder, "downsample_factor", merge, "downsample_factor", config.get("downsample_factor", merge))
    unit, least, most = patch * merge, entries["min_image_tokens"], entries["max_image_tokens"]
    thumbnail = entries["use_thumbnail"]

    def grid(height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles, (1, 1) for an image that is not cut."""
        area = math.prod(max(patch, round(side / unit) * unit) for side in (height, width))
        if not entries["do_image_splitting"] or area <= most * unit**2 * entries["max_pixels_tolerance"]:
            return 1, 1
        bounds = entries["min_tiles"], entries["max_tiles"]
        columns, rows = get_optimal_tiled_canvas((height, width), (side, side), *bounds)
        return rows, columns

    def resized(height: int, width: int) -> tuple[int, int]:
        """Height and width of the whole image."""
        sides, pixels = (height, width), [max(unit, round(side / unit) * unit) for side in (height, width)]
        if math.prod(pixels) > most * unit**2:
            shrink = math.sqrt(height * width / (most * unit**2))
            pixels = [max(unit, math.floor(side / shrink / unit) * unit) for side in sides]
        elif math.prod(pixels) < least * unit**2:
            grow = math.sqrt(least * unit**2 / (height * width))
            pixels = [math.ceil(side * grow / unit) * unit for side in sides]
        return pixels[0], pixels[1]

    token, start, end, small = "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"

    def expand(height: int, width: int) -> str:
        rows, columns = grid(height, width)
        whole = token * (math.prod(resized(height, width)) // unit**2)
        if rows * columns == 1:
            return f"{start}{whole}{end}"
        each = token * math.ceil(side // patch / merge) ** 2
        tags = (f"<|img_row_{row}_col_{column}|>" for row in range(1, rows + 1) for column in range(1, columns + 1))
        return f"{start}{''.join(tag + each for tag in tags)}{small + whole if thumbnail else ''}{end}"

    def tile_count(height: int, width: int) -> int:
        tiles = math.prod(grid(height, width))
        return tiles + int(tiles > 1 and thumbnail)

    def tiles(image: "Image") -> list[np.ndarray]:
        rows, columns = grid(image.height, image.width)
        whole = [scaled(image, *resized(image.height, image.width), entries)]
        if rows * columns == 1:
            return whole
        return [*_cells(image, rows, columns, side, entries), *(whole if thumbnail else [])]

    tags = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11)]
    ids = token_ids(tokenizer, (start, token, end), (small, *tags))
    return ImageProcessor(token, ids[1], frozenset(ids), expand, tiles, tile_count=tile_count)


def lfm2_vl_entries(folder: Path) -> dict[str, Any]:
    """The entries of an image processor of LFM2-VL, which files have apart or among those of the whole."""
    whole = read_json(folder / "processor_config.json").get("image_processor") or {}
    return LFM2_VL | read_json(folder / "preprocessor_config.json") | whole


def _cells(image: "Image", rows: int, columns: int, side: int, entries: Mapping[str, Any]) -> np.ndarray:
    """Normalised pixels `[rows x columns, side, side, C]` of an image that is scaled to a grid of tiles and cut."""
    pixels = scaled(image, rows * side, columns * side, entries)
    return pixels.reshape(rows, side, columns, side, -1).swapaxes(1, 2).reshape(rows * columns, side, side, -1)
