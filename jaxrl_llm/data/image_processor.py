"""Image processors of vision-language models: the text that stands for an image in a prompt, and its pixels.

`load` reads the files of a model's folder. Resizing, tiling and normalising are those of transformers' processors on
Pillow and numpy, which need no torch; the tokens are those that its classes `Idefics3Processor`, `SmolVLMProcessor`,
`AyaVisionProcessor`, `Cohere2VisionProcessor`, `Gemma3Processor`, `Gemma4Processor`, `InternVLProcessor`,
`Lfm2VlProcessor`, `LlavaProcessor`, `LlavaNextProcessor`, `LlavaOnevisionProcessor`, `MllamaProcessor`,
`PaliGemmaProcessor`, `Qwen2VLProcessor`, `Qwen2_5_VLProcessor`, `Qwen3VLProcessor`, `Glm4vProcessor` and
`PixtralProcessor` write.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

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
    tile_count: Callable[[int, int], int]  # height and width of an image -> its tiles
    # An RGB image -> normalised pixels [tiles, H, W, C], fp32; a list [H, W, C] where each tile has its own size.
    tiles: "Callable[[Image], np.ndarray | list[np.ndarray]]"
    tile_size: tuple[int, int] | None  # H, W; None: each image is one tile, of its own size
    # Height and width -> how tiles are put together, the six numbers of models/vision/any_resolution.py, or those of
    # models/vision/tiled.py; None: they are not, as they are apart.
    grid: Callable[[int, int], tuple[int, ...]] | None = None
    of_many: "ImageProcessor | None" = None  # that of rows with several images; None: this one
    before_text: bool = False  # images are in front of the token that begins a text, where only chat templates put them

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


def load(folder: str | Path, tokenizer: Any) -> ImageProcessor | None:
    """The image processor of the model in `folder`, or None for a model that reads text alone.

    `tokenizer.image_settings`, if there, has entries that go over those of preprocessor_config.json (`settings_of`).
    Raises ConfigError: a family with images that is not known here, a missing or unreadable preprocessor_config.json,
    or a tokenizer without the tokens of images.
    """
    folder = Path(folder)
    config = read_json(folder / "config.json")
    model_type = config.get("model_type")
    if model_type in FAMILIES:
        files = ("preprocessor_config.json", "processor_config.json")
        if not any((folder / name).is_file() for name in files):
            if model_type in ("gemma3", "gemma4") and config.get("vision_config") is None:
                return None
            raise ConfigError(f"the model in {folder} reads images, and has no {files[0]}; copy that of the original")
        return FAMILIES[model_type](folder, config, tokenizer, getattr(tokenizer, "image_settings", {}))
    if "vision_config" in config and (folder / "preprocessor_config.json").is_file():
        raise ConfigError(f"images of model_type {model_type!r} are not read here; those of {', '.join(FAMILIES)} are")
    return None


def _idefics3(
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
        return np.moveaxis(np.asarray(pixels, np.float32), 1, -1)

    def tile_count(height: int, width: int) -> int:
        rows, columns = grid(height, width)
        return rows * columns + 1

    tags = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    ids = _token_ids(tokenizer, (fake, token, whole, *tags))
    return ImageProcessor(token, ids[1], frozenset(ids), expand, tile_count, tiles, (edge, edge))


def _gemma3(folder: Path, config: dict[str, Any], tokenizer: Any, settings: Mapping[str, Any]) -> ImageProcessor:
    """Gemma 3's (arXiv 2503.19786): an image is one square tile and a fixed number of tokens; no pan and scan."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    processor: Any = Gemma3ImageProcessorPil.from_pretrained(folder, **settings)
    embeddings = read_json(folder / "processor_config.json").get("image_seq_length", config["mm_tokens_per_image"])
    names = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
    ids = _token_ids(tokenizer, names)
    start, token, end = names
    text = f"\n\n{start}{token * embeddings}{end}\n\n"

    def tiles(image: "Image") -> np.ndarray:
        pixels = processor(images=[image], do_pan_and_scan=False, return_tensors="np")["pixel_values"]
        return np.moveaxis(np.asarray(pixels, np.float32), 1, -1)

    size = (processor.size["height"], processor.size["width"])
    return ImageProcessor(
        start, ids[1], frozenset(ids), lambda height, width: text, lambda height, width: 1, tiles, size
    )


def _gemma4(folder: Path, config: dict[str, Any], tokenizer: Any, settings: Mapping[str, Any]) -> ImageProcessor:
    """Gemma 4's: an image keeps its shape, scaled to as many pixels as `max_soft_tokens` of its tokens have."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import (
        Gemma4ImageProcessorPil,
        get_aspect_ratio_preserving_size,
    )

    processor: Any = Gemma4ImageProcessorPil.from_pretrained(folder, **settings)
    patch, merge = processor.patch_size, processor.pooling_kernel_size
    for entry, value in {"patch_size": patch, "pooling_kernel_size": merge}.items():
        _check_model(folder, entry, value, entry, config["vision_config"].get(entry, value))

    def token_id(name: str, default: int) -> int:
        """That of config.json; where it is null or left out that of the tokenizer, which transformers asks alone."""
        if (given := config.get(f"{name}_token_id")) is not None:
            return given
        own = getattr(tokenizer, f"{name}_token", None)
        return default if own is None else tokenizer.convert_tokens_to_ids(own)

    ids = [token_id(name, default) for name, default in GEMMA4_TOKENS.items()]
    start, token, end = names = tuple(tokenizer.convert_ids_to_tokens(ids))
    if None in names:
        raise ConfigError(f"the tokenizer has no tokens {ids}, which the model reads images by; use the model's own")

    def expand(height: int, width: int) -> str:
        try:
            if processor.do_resize:
                most = processor.max_soft_tokens * merge**2
                height, width = get_aspect_ratio_preserving_size(height, width, patch, most, merge)
        except ValueError as error:
            raise ConfigError(f"an image of {width} x {height} pixels: {error}; crop it, or drop the row") from error
        if not processor.do_resize:
            _check_unscaled(height, width, patch * merge)
        return f"{start}{token * (height * width // (patch * merge) ** 2)}{end}"

    def tiles(image: "Image") -> np.ndarray:
        made = processor(images=[image], return_tensors="np")
        wide, high = made["image_position_ids"][0].max(axis=0) + 1
        return _of_patches(made["pixel_values"][0][: high * wide], high, wide, patch)

    return ImageProcessor(token, ids[1], frozenset(ids), expand, lambda height, width: 1, tiles, None)


def _of_patches(patches: np.ndarray, high: int, wide: int, side: int) -> np.ndarray:
    """The image `[1, H, W, C]` of patches, row by row, each of rows of pixels with their channels."""
    pixels = patches.reshape(high, wide, side, side, -1).transpose(0, 2, 1, 3, 4)
    return np.asarray(pixels, np.float32).reshape(1, high * side, wide * side, -1)


def _lfm2_vl(folder: Path, config: dict[str, Any], tokenizer: Any, settings: Mapping[str, Any]) -> ImageProcessor:
    """LFM2-VL's (arXiv 2511.23404): an image keeps its shape, scaled to `min_image_tokens` to `max_image_tokens` of its
    tokens. One that is much larger is scaled to the grid of square tiles whose shape is nearest to its own instead, of
    `min_tiles` to `max_tiles`, and cut into these, which one of the whole follows.

    transformers has its processor for torchvision alone; Pillow resizes as that does, but for the last of 8 bits.
    """
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

    entries = {**_lfm2_vl_entries(folder), **settings}
    patch, merge, side = entries["encoder_patch_size"], entries["downsample_factor"], entries["tile_size"]
    _check_model(folder, "encoder_patch_size", patch, "patch_size", config["vision_config"].get("patch_size", patch))
    _check_model(folder, "downsample_factor", merge, "downsample_factor", config.get("downsample_factor", merge))
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
        whole = [_scaled(image, *resized(image.height, image.width), entries)]
        if rows * columns == 1:
            return whole
        return [*_cells(image, rows, columns, side, entries), *(whole if thumbnail else [])]

    tags = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11)]
    ids = _token_ids(tokenizer, (start, token, end, small, *tags))
    return ImageProcessor(token, ids[1], frozenset(ids), expand, tile_count, tiles, None)


def _scaled(image: "Image", height: int, width: int, entries: Mapping[str, Any]) -> np.ndarray:
    """Normalised pixels `[height, width, C]` of an image that is scaled to this size."""
    from PIL.Image import Resampling

    pixels = np.asarray(image.resize((width, height), Resampling(entries["resample"])), np.float32)
    pixels = pixels * entries["rescale_factor"] if entries["do_rescale"] else pixels
    mean, std = (np.array(entries[name], np.float32) for name in ("image_mean", "image_std"))
    return (pixels - mean) / std if entries["do_normalize"] else pixels


def _cells(image: "Image", rows: int, columns: int, side: int, entries: Mapping[str, Any]) -> np.ndarray:
    """Normalised pixels `[rows x columns, side, side, C]` of an image that is scaled to a grid of tiles and cut."""
    pixels = _scaled(image, rows * side, columns * side, entries)
    return pixels.reshape(rows, side, columns, side, -1).swapaxes(1, 2).reshape(rows * columns, side, side, -1)


def _lfm2_vl_entries(folder: Path) -> dict[str, Any]:
    """The entries of an image processor of LFM2-VL, which files have apart or among those of the whole."""
    whole = read_json(folder / "processor_config.json").get("image_processor") or {}
    return LFM2_VL | read_json(folder / "preprocessor_config.json") | whole


def _check_model(folder: Path, own: str, value: Any, entry: str, wanted: Any) -> None:
    """Raises ConfigError where an image processor's entry `own` is another than the model's."""
    if wanted != value:
        raise ConfigError(
            f"the image processor in {folder} has {own} = {value}, and the model {entry} = {wanted}: copy "
            "preprocessor_config.json of the original model"
        )


def _internvl(folder: Path, config: dict[str, Any], tokenizer: Any, settings: Mapping[str, Any]) -> ImageProcessor:
    """InternVL's (arXiv 2404.16821): an image is scaled to the grid of square tiles whose shape is nearest to its own,
    of `min_patches` to `max_patches`, cut into these, and followed by a tile of the whole."""
    processor, tile_count, tiles = _cut_to_shape(folder, settings)
    encoder, ratio = config["vision_config"], config.get("downsample_ratio", 0.5)
    # Files have the sides of an image and of a patch as a number, or as height and width.
    sides = (np.ravel(encoder.get(entry, size))[0] for entry, size in (("image_size", 448), ("patch_size", 14)))
    image_size, patch_size = map(int, sides)
    embeddings = round(image_size // patch_size * ratio) ** 2
    token, start, end = "<IMG_CONTEXT>", "<img>", "</img>"
    ids = _token_ids(tokenizer, (token, start, end))

    def expand(height: int, width: int) -> str:
        return f"{start}{token * embeddings * tile_count(height, width)}{end}"

    size = (processor.size["height"], processor.size["width"])
    return ImageProcessor(token, ids[0], frozenset(ids), expand, tile_count, tiles, size)


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

    def tiles(image: "Image") -> np.ndarray:
        pixels = processor(images=[image], return_tensors="np", **cut)["pixel_values"]
        return np.moveaxis(np.asarray(pixels, np.float32), 1, -1)

    return processor, tile_count, tiles


def is_pixtral(config: Mapping[str, Any]) -> bool:
    """True for the config.json of a LLaVA with Pixtral's encoder, which is Pixtral 12B."""
    return config.get("model_type") == "llava" and (config.get("vision_config") or {}).get("model_type") == "pixtral"


def _aya_vision(folder: Path, config: dict[str, Any], tokenizer: Any, settings: Mapping[str, Any]) -> ImageProcessor:
    """Aya Vision's (arXiv 2505.08751): an image is cut as one of InternVL, and a tag is before the tokens of a tile."""
    _, tile_count, tiles = _cut_to_shape(folder, settings)
    size, side = _tile_of(config, "siglip_vision_model")
    token, start, end = "<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>"
    each = token * (side // config.get("downsample_factor", 2)) ** 2

    def expand(height: int, width: int) -> str:
        tiles = "".join(f"TILE_{number}{each}" for number in range(1, tile_count(height, width)))
        return f"{start}{tiles}TILE_GLOBAL{each}{end}"

    ids = _token_ids(tokenizer, (token, start, end))
    return ImageProcessor("<image>", ids[0], frozenset(ids), expand, tile_count, tiles, (size, size))


def _cohere2_vision(
    folder: Path, config: dict[str, Any], tokenizer: Any, settings: Mapping[str, Any]
) -> ImageProcessor:
    """Command A Vision's: an image is scaled to the grid of square tiles that enlarges it least, of `max_patches` at
    most, or else shrinks it least, and cut into these, which one of the whole follows; a token ends those of a tile.

    transformers has its processor for torchvision alone; Pillow resizes as that does, but for the last of 8 bits, and
    at the sharpest edges for the last three.
    """
    entries = {**COHERE2_VISION, **read_json(folder / "preprocessor_config.json"), **settings}
    side, most = entries["size"]["height"], entries["max_patches"]
    size, patches = _tile_of(config, "siglip_vision_model")
    _check_model(folder, "size", side, "image_size", size)
    tokens = patches // config.get("downsample_factor", 2)
    _check_model(folder, "patch_size", entries["patch_size"], "tokens along a tile", tokens)
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
        whole = _scaled(image, side, side, entries)[None]
        if rows * columns == 1:
            return whole
        return np.concatenate([_cells(image, rows, columns, side, entries), whole])

    def expand(height: int, width: int) -> str:
        return f"{start}{each * tile_count(height, width)}{end}"

    ids = _token_ids(tokenizer, (token, start, end, line))
    return ImageProcessor(token, ids[0], frozenset(ids), expand, tile_count, tiles, (side, side))


def _llava(folder: Path, config: dict[str, Any], tokenizer: Any, settings: Mapping[str, Any]) -> ImageProcessor:
    """LLaVA-1.5's (arXiv 2310.03744): an image is one square tile, of CLIP's or SigLIP's processor or LLaVA's own; that
    of a LLaVA with Pixtral's encoder is Pixtral's."""
    if is_pixtral(config):
        return _mistral3(folder, config | {"spatial_merge_size": 1}, tokenizer, settings)
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    kinds = {"CLIP": CLIPImageProcessorPil, "Llava": LlavaImageProcessorPil, "Siglip": SiglipImageProcessorPil}
    entries = read_json(folder / "processor_config.json").get("image_processor") or {}
    name = str((entries | read_json(folder / "preprocessor_config.json")).get("image_processor_type", "CLIP"))
    kind = next((kind for start, kind in kinds.items() if name.startswith(start)), None)
    if kind is None:
        raise ConfigError(f"the image processor in {folder} is a {name}; those of {', '.join(kinds)} are read here")
    return _one_tile(kind.from_pretrained(folder, **settings), _tile_of(config, "clip_vision_model"), tokenizer)


def _llava_next(
    folder: Path, config: dict[str, Any], tokenizer: Any, settings: Mapping[str, Any], onevision: bool = False
) -> ImageProcessor:
    """LLaVA-1.6's and LLaVA-OneVision's (arXiv 2408.03326): a square tile of the whole image, then the tiles of the
    size of `image_grid_pinpoints` that keeps most of its pixels. A token ends each row of the tokens of these, which
    in LLaVA-OneVision are as many as those of 9 tiles (`anyres_max_9`) at most; there the images of a row with several
    are one tile each, padded to squares."""
    from transformers.image_processing_utils import select_best_resolution
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

    kind = LlavaOnevisionImageProcessorPil if onevision else LlavaNextImageProcessorPil
    processor: Any = kind.from_pretrained(folder, **settings)
    places = processor.image_grid_pinpoints
    wanted = config.get("image_grid_pinpoints") or places
    _check_model(folder, "image_grid_pinpoints", places, "image_grid_pinpoints", wanted)
    size, side = _tile_of(config, "siglip_vision_model" if onevision else "clip_vision_model")
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
        pixels = processor(images=images, return_tensors="np")["pixel_values"][0]
        return np.moveaxis(np.asarray(pixels, np.float32), 1, -1)

    ids = _token_ids(tokenizer, ("<image>",))
    special = frozenset([*ids, *_token_ids(tokenizer, ("<video>",))]) if onevision else frozenset(ids)
    shape, whole = (size, size), (0, 0, 0, 0, 1, 0)
    of_many = None
    if onevision:
        text = "<image>" * (side**2 + 1)
        of_many = ImageProcessor(
            "<image>", ids[0], special, lambda height, width: text, lambda height, width: 1, partial(tiles, many=True),
            shape, lambda height, width: whole,
        )  # fmt: skip
    return ImageProcessor("<image>", ids[0], special, expand, tile_count, tiles, shape, grid, of_many)


def _paligemma(folder: Path, config: dict[str, Any], tokenizer: Any, settings: Mapping[str, Any]) -> ImageProcessor:
    """PaliGemma's (arXiv 2407.07726): an image is scaled to one square tile, whatever its shape."""
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    processor = SiglipImageProcessorPil.from_pretrained(folder, **settings)
    return _one_tile(processor, _tile_of(config, "siglip_vision_model"), tokenizer, before_text=True)


def _one_tile(processor: Any, tile: tuple[int, int], tokenizer: Any, before_text: bool = False) -> ImageProcessor:
    """The ImageProcessor of a family whose images are one square tile each, with a token for each of its patches."""
    size, side = tile
    text = "<image>" * side**2

    def tiles(image: "Image") -> np.ndarray:
        pixels = processor(images=[image], return_tensors="np")["pixel_values"]
        return np.moveaxis(np.asarray(pixels, np.float32), 1, -1)

    ids = _token_ids(tokenizer, ("<image>",))
    return ImageProcessor(
        "<image>", ids[0], frozenset(ids), lambda height, width: text, lambda height, width: 1, tiles, (size, size),
        before_text=before_text,
    )  # fmt: skip


def _tile_of(config: dict[str, Any], kind: str) -> tuple[int, int]:
    """Pixels and patches along a side of a tile of a CLIP or SigLIP, which is of this kind where config.json says
    none."""
    encoder = config["vision_config"]
    size = encoder.get("image_size", 224)
    default = 32 if encoder.get("model_type", kind) == "clip_vision_model" else 16
    return size, size // encoder.get("patch_size", default)


def _mllama(folder: Path, config: dict[str, Any], tokenizer: Any, settings: Mapping[str, Any]) -> ImageProcessor:
    """Llama 3.2 Vision's (arXiv 2407.21783): an image keeps its shape within the grid of square tiles that fits it, of
    `max_image_tiles` at most, and is one token."""
    from transformers.models.mllama.image_processing_pil_mllama import (
        MllamaImageProcessorPil,
        get_all_supported_aspect_ratios,
        get_optimal_tiled_canvas,
    )

    processor: Any = MllamaImageProcessorPil.from_pretrained(folder, **settings)
    side, most, encoder = processor.size["height"], processor.max_image_tiles, config["vision_config"]
    _check_model(folder, "size", side, "image_size", np.ravel(encoder.get("image_size", 448))[0])
    _check_model(folder, "max_image_tiles", most, "max_num_tiles", encoder.get("max_num_tiles", 4))

    def grid(height: int, width: int) -> tuple[int, ...]:
        rows, columns = (int(pixels) // side for pixels in get_optimal_tiled_canvas(height, width, most, side))
        return get_all_supported_aspect_ratios(most).index((rows, columns)) + 1, rows * columns

    def tiles(image: "Image") -> np.ndarray:
        pixels = processor(images=[[image]], return_tensors="np")["pixel_values"][0, 0]
        return np.moveaxis(np.asarray(pixels, np.float32), 1, -1).reshape(1, most * side, side, -1)

    token = "<|image|>"
    ids = _token_ids(tokenizer, (token,))
    return ImageProcessor(
        token, ids[0], frozenset(ids), lambda height, width: token, lambda height, width: 1, tiles,
        (most * side, side), grid, before_text=True,
    )  # fmt: skip


def _mistral3(folder: Path, config: dict[str, Any], tokenizer: Any, settings: Mapping[str, Any]) -> ImageProcessor:
    """Pixtral's (arXiv 2410.07073), which Mistral Small 3.1 has too: an image keeps its shape, scaled to a longest edge
    if its own is longer, and to multiples of a token's side; a token ends each row of its tokens."""
    from transformers.image_utils import ChannelDimension
    from transformers.models.pixtral.image_processing_pil_pixtral import (
        PixtralImageProcessorPil,
        get_resize_output_image_size,
    )

    processor: Any = PixtralImageProcessorPil.from_pretrained(folder, **settings)
    side = config["vision_config"].get("patch_size", 16) * config.get("spatial_merge_size", 2)
    token, next_row, end = "[IMG]", "[IMG_BREAK]", "[IMG_END]"
    ids = _token_ids(tokenizer, (token, next_row, end))
    edge = processor.size["longest_edge"]

    def expand(height: int, width: int) -> str:
        if processor.do_resize:
            pixels = np.broadcast_to(np.uint8(0), (3, height, width))
            size = get_resize_output_image_size(pixels, (edge, edge), (side, side), ChannelDimension.FIRST)
            if 0 in size:
                raise ConfigError(
                    f"an image of {width} x {height} pixels, scaled to longest_edge = {edge}, has none left along its "
                    "shorter side; crop it, or drop the row"
                )
            height, width = size
        else:
            _check_unscaled(height, width, side)
        return next_row.join([token * (width // side)] * (height // side)) + end

    def tiles(image: "Image") -> np.ndarray:
        sides = {"height": side, "width": side}
        pixels = processor(images=[image], patch_size=sides, do_pad=False, return_tensors="np")["pixel_values"]
        return np.moveaxis(np.asarray(pixels, np.float32), 1, -1)

    return ImageProcessor(token, ids[0], frozenset(ids), expand, lambda height, width: 1, tiles, None)


def _qwen_vl(
    folder: Path, config: dict[str, Any], tokenizer: Any, settings: Mapping[str, Any], glm: bool = False
) -> ImageProcessor:
    """Qwen2-VL's (arXiv 2409.12191), Qwen2.5-VL's, Qwen3-VL's and Qwen3.5's, and GLM-V's (arXiv 2507.01006): an image
    keeps its shape, scaled to multiples of a token's side and, where `size` of preprocessor_config.json asks for it, to
    fewer or more pixels."""
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
    from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize as resized_frames
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

    kind = Glm4vImageProcessorPil if glm else Qwen2VLImageProcessorPil
    processor: Any = kind.from_pretrained(folder, **settings)
    patch, merge, frames = processor.patch_size, processor.merge_size, processor.temporal_patch_size
    entries = {"patch_size": patch, "spatial_merge_size": merge, "temporal_patch_size": frames}
    for entry, value in entries.items():
        own, wanted = entry.removeprefix("spatial_"), config["vision_config"].get(entry, value)
        _check_model(folder, own, value, entry, wanted)
    token, start, end = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
    if glm:
        token, start, end = "<|image|>", "<|begin_of_image|>", "<|end_of_image|>"
    ids = _token_ids(tokenizer, (token, start, end, "<|video|>" if glm else "<|video_pad|>"))

    def expand(height: int, width: int) -> str:
        try:
            if processor.do_resize and glm:  # whose bounds are those of all frames
                height, width = resized_frames(frames, height, width, frames, patch * merge, *bounds)
            elif processor.do_resize:
                height, width = smart_resize(height, width, patch * merge, *bounds)
        except ValueError as error:
            raise ConfigError(f"an image of {width} x {height} pixels: {error}; crop it, or drop the row") from error
        if not processor.do_resize:
            _check_unscaled(height, width, patch * merge)
        return f"{start}{token * (height * width // (patch * merge) ** 2)}{end}"

    def tiles(image: "Image") -> np.ndarray:
        made = processor(images=[image], return_tensors="np")
        _, high, wide = made["image_grid_thw"][0]
        # Patches in the order of tokens, those of one adjacent: back to the image, whose frames are the same.
        pixels = made["pixel_values"].reshape(high // merge, wide // merge, merge, merge, -1, frames, patch, patch)
        pixels = pixels[:, :, :, :, :, 0].transpose(0, 2, 5, 1, 3, 6, 4)
        return np.asarray(pixels, np.float32).reshape(1, high * patch, wide * patch, -1)

    bounds = processor.size["shortest_edge"], processor.size["longest_edge"]
    return ImageProcessor(f"{start}{token}{end}", ids[0], frozenset(ids), expand, lambda height, width: 1, tiles, None)


# By the model_type of config.json.
FAMILIES: dict[str, Callable[[Path, dict[str, Any], Any, Mapping[str, Any]], ImageProcessor]] = {
    "idefics3": _idefics3,
    "smolvlm": partial(_idefics3, smolvlm=True),
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "lfm2_vl": _lfm2_vl,
    "llava": _llava,
    "paligemma": _paligemma,
    "llava_next": _llava_next,
    "llava_onevision": partial(_llava_next, onevision=True),
    "qwen2_vl": _qwen_vl,
    "qwen2_5_vl": _qwen_vl,
    "qwen3_vl": _qwen_vl,
    "qwen3_vl_moe": _qwen_vl,
    "qwen3_5": _qwen_vl,
    "qwen3_5_moe": _qwen_vl,
    "glm4v": partial(_qwen_vl, glm=True),
    "glm4v_moe": partial(_qwen_vl, glm=True),
    "internvl": _internvl,
    "mistral3": _mistral3,
    "mllama": _mllama,
    "aya_vision": _aya_vision,
    "cohere2_vision": _cohere2_vision,
}

# The tokens that begin an image of Gemma 4, stand for it, and end it, where config.json and tokenizer name none.
GEMMA4_TOKENS = {"boi": 255_999, "image": 258_880, "eoi": 258_882}
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
SOFT_TOKENS = (70, 140, 280, 560, 1120)  # of an image of Gemma 4, at most
SPLITTING = {"longest_edge": int, "do_image_splitting": bool}
BOUNDS = {"min_pixels": int, "max_pixels": int}
TILES = {"min_patches": int, "max_patches": int}
# The options of data.image_processor and their types, by the model_type of config.json; other families have none.
OPTIONS: dict[str, dict[str, type]] = {
    "idefics3": SPLITTING,
    "smolvlm": SPLITTING,
    "internvl": TILES,
    "aya_vision": TILES,
    "cohere2_vision": {"max_patches": int},
    "mistral3": {"longest_edge": int},
    "gemma4": {"max_soft_tokens": int},
    "lfm2_vl": {"min_image_tokens": int, "max_image_tokens": int, "max_tiles": int, "do_image_splitting": bool},
    **{name: BOUNDS for name in FAMILIES if name.startswith(("qwen", "glm"))},
}


def settings_of(folder: str | Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """The entries over preprocessor_config.json of the model in `folder` that options of data.image_processor mean.

    Raises ConfigError: an option that the model's family does not have, or a value that it does not take.
    """
    config = read_json(Path(folder) / "config.json")
    model_type = "mistral3" if is_pixtral(config) else config.get("model_type")
    known = OPTIONS.get(str(model_type), {})
    for name, value in options.items():
        if name not in known:
            raise ConfigError(
                f"data.image_processor has an option {name}, but those of a {model_type} are "
                f"{', '.join(known) or 'none'}: remove it"
            )
        if type(value) is not known[name] or (known[name] is int and value < 1):
            allowed = "an integer from 1" if known[name] is int else "True or False"
            raise ConfigError(f"data.image_processor has {name}={value!r}; give {allowed}")
    if model_type in ("internvl", "aya_vision"):
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

        processor: Any = GotOcr2ImageProcessorPil.from_pretrained(folder, **options)
        _check_bounds("patches", processor.min_patches, processor.max_patches)
    if model_type == "lfm2_vl":
        entries = {**_lfm2_vl_entries(Path(folder)), **options}
        _check_bounds("image_tokens", entries["min_image_tokens"], entries["max_image_tokens"])
        if entries["min_tiles"] > entries["max_tiles"]:
            raise ConfigError(
                f"data.image_processor has max_tiles={entries['max_tiles']}, and images that are cut are "
                f"{entries['min_tiles']} tiles at least; do_image_splitting=False leaves them whole"
            )
    if options.get("max_soft_tokens", 70) not in SOFT_TOKENS:
        allowed = ", ".join(map(str, SOFT_TOKENS))
        raise ConfigError(f"data.image_processor has max_soft_tokens={options['max_soft_tokens']}; give {allowed}")
    if known is not BOUNDS:
        size = {"size": {"longest_edge": options["longest_edge"]}} if "longest_edge" in options else {}
        return {name: value for name, value in options.items() if name != "longest_edge"} | size
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    glm = str(model_type).startswith("glm")
    size = (Glm4vImageProcessorPil if glm else Qwen2VLImageProcessorPil).from_pretrained(folder).size
    least, most = options.get("min_pixels", size["shortest_edge"]), options.get("max_pixels", size["longest_edge"])
    _check_bounds("pixels", least, most)
    found = {"size": {"shortest_edge": least, "longest_edge": most}}
    # Files of Qwen's have the bounds in one of two places, and the older place takes precedence.
    return found if glm else found | {"min_pixels": least, "max_pixels": most}


def _check_bounds(what: str, least: int, most: int) -> None:
    if least > most:
        raise ConfigError(f"data.image_processor: min_{what} = {least} is above max_{what} = {most}; set both")


def _check_unscaled(height: int, width: int, side: int) -> None:
    """Raises ConfigError for an image that keeps its size and is not of whole tokens."""
    if height % side or width % side:
        raise ConfigError(
            f"an image of {width} x {height} pixels is not of whole tokens of {side} x {side}, and do_resize=False "
            "leaves its size: let images be scaled, crop it, or drop the row"
        )


def _token_ids(tokenizer: Any, names: tuple[str, ...]) -> list[int]:
    """Ids of the tokens that the tokenizer has; raises ConfigError when one of the first three is missing."""
    vocabulary = tokenizer.get_vocab()
    missing = [name for name in names[:3] if name not in vocabulary]
    if missing:
        raise ConfigError(
            f"the tokenizer has no token {missing[0]}, which the model reads images by; use the model's own"
        )
    return [vocabulary[name] for name in names if name in vocabulary]


def read_json(file: Path) -> dict[str, Any]:
    """The contents of a JSON file; empty where there is none. Raises ConfigError for one that is no JSON object."""
    try:
        made = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{file} is no JSON ({error}); copy that of the original model") from error
    if not isinstance(made, dict):
        raise ConfigError(f"{file} is no JSON object; copy that of the original model")
    return made
