"""Families whose images keep their shape, scaled to whole tokens: Gemma 4, Pixtral, Qwen-VL, GLM-V and those with
processors of Qwen's, MiniMax-M3's among them, and Kimi K2.5."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data.image_processors.processor import (
    ImageProcessor,
    check_model,
    check_unscaled,
    normalized,
    read_json,
    tiles_by,
    token_ids,
)

if TYPE_CHECKING:
    from PIL.Image import Image

# The tokens that begin an image of Gemma 4, stand for it, and end it, where config.json and tokenizer name none.
GEMMA4_TOKENS = {"boi": 255_999, "image": 258_880, "eoi": 258_882}
# The token of an image, those before and behind it, and one of videos.
QWEN_TOKENS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
GLM_TOKENS = ("<|image|>", "<|begin_of_image|>", "<|end_of_image|>", "<|video|>")
MINIMAX_TOKENS = ("]<]image[>[", "]<]start of image[>[", "]<]end of image[>[", "]<]video[>[")
LFM3_VL_IDS = {"image": 125_030, "video": 125_029, "vision_start": 125_009, "vision_end": 125_010}
KIMI_TOKENS = (
    "<|media_pad|>", "<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|kimi_k25_video_placeholder|>",
)  # fmt: skip
# Of an image processor of Kimi K2.5, where files have no entries, and two of its names in Moonshot's own files.
KIMI: dict[str, Any] = {
    "do_resize": True, "resample": 3, "size": {"max_height": 512, "max_width": 512}, "max_patches": 16_384,
    "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3, "patch_size": 14, "merge_size": 2,
}  # fmt: skip
KIMI_ENTRIES = {"in_patch_limit": "max_patches", "merge_kernel_size": "merge_size"}


def gemma4(folder: Path, config: dict[str, Any], tokenizer: Any, settings: Mapping[str, Any]) -> ImageProcessor:
    """Gemma 4's: an image keeps its shape, scaled to as many pixels as `max_soft_tokens` of its tokens have."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import (
        Gemma4ImageProcessorPil,
        get_aspect_ratio_preserving_size,
    )

    processor: Any = Gemma4ImageProcessorPil.from_pretrained(folder, **settings)
    patch, merge = processor.patch_size, processor.pooling_kernel_size
    for entry, value in {"patch_size": patch, "pooling_kernel_size": merge}.items():
        check_model(folder, entry, value, entry, config["vision_config"].get(entry, value))

    def token_id(name: str, default: int) -> int:
        """That of config.json; where it is null or left out that of the tokenizer, which transformers asks alone."""
        if (given := config.get(f"{name}_token_id")) is not None:
            return given
        own = getattr(tokenizer, f"{name}_token", None)
        return default if own is None else tokenizer.convert_tokens_to_ids(own)

    ids = [token_id(name, default) for name, default in GEMMA4_TOKENS.items()]
    names = tuple(tokenizer.convert_ids_to_tokens(ids))
    if None in names:
        raise ConfigError(f"the tokenizer has no tokens {ids}, which the model reads images by; use the model's own")

    def resized(height: int, width: int) -> tuple[int, int]:
        return get_aspect_ratio_preserving_size(height, width, patch, processor.max_soft_tokens * merge**2, merge)

    def tiles(image: "Image") -> np.ndarray:
        made = processor(images=[image], return_tensors="np")
        wide, high = made["image_position_ids"][0].max(axis=0) + 1
        # Patches row by row, each of rows of pixels with their channels: back to the image.
        pixels = made["pixel_values"][0][: high * wide].reshape(high, wide, patch, patch, -1).transpose(0, 2, 1, 3, 4)
        return np.asarray(pixels, np.float32).reshape(1, high * patch, wide * patch, -1)

    expand = _expand(names, patch * merge, resized if processor.do_resize else None)
    return ImageProcessor(names[1], ids[1], frozenset(ids), expand, tiles)


def _expand(names: tuple[str, str, str], side: int, resized: Callable[[int, int], tuple[int, int]] | None):
    """A function of height and width: the text of an image, with a token for each square of `side` pixels of it.

    `resized` None: it stays as it is. `names` are the tokens before it, of a square, and behind it.
    """
    start, token, end = names

    def expand(height: int, width: int) -> str:
        if resized is None:
            check_unscaled(height, width, side)
        else:
            try:
                height, width = resized(height, width)
            except ValueError as error:
                raise ConfigError(
                    f"an image of {width} x {height} pixels: {error}; crop it, or drop the row"
                ) from error
        return f"{start}{token * (height * width // side**2)}{end}"

    return expand


def is_pixtral(config: Mapping[str, Any]) -> bool:
    """True for the config.json of a LLaVA with Pixtral's encoder, which is Pixtral 12B."""
    return config.get("model_type") == "llava" and (config.get("vision_config") or {}).get("model_type") == "pixtral"


def mistral3(
    folder: Path, config: dict[str, Any], tokenizer: Any, settings: Mapping[str, Any], ends: bool = True
) -> ImageProcessor:
    """Pixtral's (arXiv 2410.07073), which Mistral Small 3.1 has too: an image keeps its shape, scaled to a longest edge
    if its own is longer, and to multiples of a token's side; a token ends each row of its tokens, in LightOnOCR (not
    `ends`) none.

    Raises ConfigError for an image too narrow to have patches.
    """
    from transformers.image_utils import ChannelDimension
    from transformers.models.pixtral.image_processing_pil_pixtral import (
        PixtralImageProcessorPil,
        get_resize_output_image_size,
    )

    processor: Any = PixtralImageProcessorPil.from_pretrained(folder, **settings)
    side = config["vision_config"].get("patch_size", 16 if ends else 14) * config.get("spatial_merge_size", 2)
    token, next_row, end = ("[IMG]", "[IMG_BREAK]", "[IMG_END]") if ends else (QWEN_TOKENS[0], "", "")
    ids = token_ids(tokenizer, (token, next_row, end) if ends else (token,), () if ends else QWEN_TOKENS[1:])
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
            check_unscaled(height, width, side)
        return next_row.join([token * (width // side)] * (height // side)) + end

    tiles = tiles_by(processor, patch_size={"height": side, "width": side}, do_pad=False)
    return ImageProcessor(token, ids[0], frozenset(ids), expand, tiles)


def kind_of(model_type: str) -> Any:
    """The class of transformers that makes the patches of a family of Qwen's kind."""
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
    from transformers.models.glm5_next.image_processing_pil_glm5_next import Glm5NextImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.video_llama_3.image_processing_pil_video_llama_3 import VideoLlama3ImageProcessorPil

    class MiniMaxM3VLImageProcessorPil(Qwen2VLImageProcessorPil):
        """That of transformers, which has it for torchvision alone; of the published file no code reads the size."""

        def __init__(self, size=None, **kwargs):
            size = {"shortest_edge": 4 * 28 * 28, "longest_edge": 451_584} if size in (None, [672, 672]) else size
            super().__init__(size=size, **kwargs)

    if model_type == "glm5_next":
        return Glm5NextImageProcessorPil
    if model_type.startswith("glm"):
        return Glm4vImageProcessorPil
    if model_type.startswith("minimax"):
        return MiniMaxM3VLImageProcessorPil
    return VideoLlama3ImageProcessorPil if model_type == "video_llama_3" else Qwen2VLImageProcessorPil


def qwen_vl(
    folder: Path, config: dict[str, Any], tokenizer: Any, settings: Mapping[str, Any], framed: bool = True
) -> ImageProcessor:
    """Qwen2-VL's (arXiv 2409.12191), Qwen2.5-VL's, Qwen3-VL's and Qwen3.5's, GLM-V's (arXiv 2507.01006), EXAONE 4.5's,
    LFM3-VL's, MiniMax-M3's and VideoLLaMA 3's (arXiv 2501.13106): an image keeps its shape, scaled to multiples of a
    token's side and, where `size` of preprocessor_config.json asks for it, to fewer or more pixels. Those of GLM-5.3
    are padded to such multiples, and scaled to numbers of tokens that it says.

    Where images are not `framed`, what chat templates write around their tokens, if anything, is text to this.
    """
    from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize as resized_frames
    from transformers.models.glm5_next.image_processing_pil_glm5_next import smart_resize as padded_frames
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    glm, minimax = (config["model_type"].startswith(name) for name in ("glm", "minimax"))
    processor: Any = kind_of(config["model_type"]).from_pretrained(folder, **settings)
    patch, merge, frames = processor.patch_size, processor.merge_size, processor.temporal_patch_size
    encoder = config["vision_config"]
    if config["model_type"] == "video_llama_3":  # whose tokens are patches, of images
        encoder = {**encoder, "spatial_merge_size": 1, "temporal_patch_size": 1}
    entries = {"patch_size": patch, "spatial_merge_size": merge, "temporal_patch_size": frames}
    for entry, value in entries.items():
        check_model(folder, entry.removeprefix("spatial_"), value, entry, encoder.get(entry, value))
    token, start, end, video = GLM_TOKENS if glm else MINIMAX_TOKENS if minimax else QWEN_TOKENS
    others = [video]
    if config["model_type"] == "lfm3_vl":  # which has ids in config.json alone
        own = [config.get(f"{name}_token_id", usual) for name, usual in LFM3_VL_IDS.items()]
        token, *others = tokenizer.convert_ids_to_tokens(own)
        token = token or f"with the id {own[0]}"
    if not framed:
        start = end = ""
    ids = token_ids(tokenizer, tuple(filter(None, (token, start, end))), tuple(others))

    def resized(height: int, width: int) -> tuple[int, int]:
        if config["model_type"] == "glm5_next":
            most = processor.min_image_tokens, processor.max_image_tokens
            return padded_frames(frames, height, width, frames, patch * merge, *most)
        if glm:  # whose bounds are those of all frames
            return resized_frames(frames, height, width, frames, patch * merge, *bounds)
        return smart_resize(height, width, patch * merge, *bounds)

    def tiles(image: "Image") -> np.ndarray:
        made = processor(images=[image], return_tensors="np")
        _, high, wide = made["image_grid_thw"][0]
        # Patches in the order of tokens, those of one adjacent: back to the image, whose frames are the same.
        pixels = made["pixel_values"].reshape(high // merge, wide // merge, merge, merge, -1, frames, patch, patch)
        pixels = pixels[:, :, :, :, :, 0].transpose(0, 2, 5, 1, 3, 6, 4)
        return np.asarray(pixels, np.float32).reshape(1, high * patch, wide * patch, -1)

    bounds = processor.size.get("shortest_edge"), processor.size["longest_edge"]
    expand = _expand((start, token, end), patch * merge, resized if processor.do_resize else None)
    written = token if minimax else f"{start}{token}{end}"  # by chat templates
    return ImageProcessor(written, ids[0], frozenset(ids), expand, tiles)


def kimi_k25(folder: Path, config: dict[str, Any], tokenizer: Any, settings: Mapping[str, Any]) -> ImageProcessor:
    """Kimi K2.5's (arXiv 2602.02276): an image keeps its shape and, unless it has more than `max_patches` patches or
    more than `size` along a side, its size; it is padded with black at its right and below, to multiples of a token's
    side.

    transformers has its processor for torchvision alone; Pillow resizes as that does, but for the last of 8 bits.
    """
    given = read_json(folder / "preprocessor_config.json")
    given |= read_json(folder / "processor_config.json").get("image_processor") or {}
    own: dict[str, Any] = given.get("media_proc_cfg") or {}  # where Moonshot's own files have them
    if (most := own.get("patch_limit_on_one_side")) is not None:
        own = own | {"size": {"max_height": most, "max_width": most}}
    entries: dict[str, Any] = {
        **KIMI,
        **{KIMI_ENTRIES.get(name, name): x for name, x in own.items()},
        **given,
        **settings,
    }
    patch, merge, most = (entries[name] for name in ("patch_size", "merge_size", "max_patches"))
    encoder, side, longest = config["vision_config"], patch * merge, entries["size"]["max_height"] * patch
    check_model(folder, "patch_size", patch, "patch_size", encoder.get("patch_size", patch))
    check_model(folder, "merge_size", merge, "merge_kernel_size", encoder.get("merge_kernel_size", [merge])[0])

    def resized(height: int, width: int) -> tuple[int, int]:
        patches = max(1, height // patch) * max(1, width // patch)
        scale = min(1.0, math.sqrt(most / patches), longest / height, longest / width)
        return min(max(1, int(height * scale)), longest), min(max(1, int(width * scale)), longest)

    def padded(height: int, width: int) -> tuple[int, int]:
        height, width = resized(height, width)
        return -(-height // side) * side, -(-width // side) * side

    def tiles(image: "Image") -> np.ndarray:
        from PIL import Image as Pictures

        if not entries["do_resize"]:
            return normalized(image, entries)[None]
        height, width = resized(image.height, image.width)
        rows, columns = padded(image.height, image.width)
        whole = Pictures.new("RGB", (columns, rows))
        whole.paste(image.resize((width, height), Pictures.Resampling(entries["resample"])))
        return normalized(whole, entries)[None]

    token, *others = KIMI_TOKENS
    ids = token_ids(tokenizer, (token,), tuple(others))
    expand = _expand(("", token, ""), side, padded if entries["do_resize"] else None)
    return ImageProcessor(token, ids[0], frozenset(ids), expand, tiles)
