"""Families whose images are one square tile each: Gemma 3, LLaVA-1.5, PaliGemma and DeepSeek-VL."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data.image_processors.own_shape import is_pixtral, mistral3
from jaxrl_llm.data.image_processors.processor import (
    ImageProcessor,
    check_model,
    read_json,
    tile_of,
    tiles_by,
    token_ids,
)


def gemma3(folder: Path, config: dict[str, Any], tokenizer: Any, settings: Mapping[str, Any]) -> ImageProcessor:
    """Gemma 3's (arXiv 2503.19786): an image is one square tile and a fixed number of tokens; no pan and scan."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    processor: Any = Gemma3ImageProcessorPil.from_pretrained(folder, **settings)
    embeddings = read_json(folder / "processor_config.json").get("image_seq_length", config["mm_tokens_per_image"])
    names = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
    ids = token_ids(tokenizer, names)
    start, token, end = names
    text = f"\n\n{start}{token * embeddings}{end}\n\n"

    size = (processor.size["height"], processor.size["width"])
    tiles = tiles_by(processor, do_pan_and_scan=False)
    return ImageProcessor(start, ids[1], frozenset(ids), lambda height, width: text, tiles, size)


def llava(folder: Path, config: dict[str, Any], tokenizer: Any, settings: Mapping[str, Any]) -> ImageProcessor:
    """LLaVA-1.5's (arXiv 2310.03744): an image is one square tile, of CLIP's or SigLIP's processor or LLaVA's own; that
    of a LLaVA with Pixtral's encoder is Pixtral's.

    Raises ConfigError for another image processor.
    """
    if is_pixtral(config):
        return mistral3(folder, config | {"spatial_merge_size": 1}, tokenizer, settings)
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    kinds = {"CLIP": CLIPImageProcessorPil, "Llava": LlavaImageProcessorPil, "Siglip": SiglipImageProcessorPil}
    entries = read_json(folder / "processor_config.json").get("image_processor") or {}
    name = str((entries | read_json(folder / "preprocessor_config.json")).get("image_processor_type", "CLIP"))
    kind = next((kind for start, kind in kinds.items() if name.startswith(start)), None)
    if kind is None:
        raise ConfigError(f"the image processor in {folder} is a {name}; those of {', '.join(kinds)} are read here")
    return _one_tile(kind.from_pretrained(folder, **settings), tile_of(config, "clip_vision_model"), tokenizer)


def paligemma(folder: Path, config: dict[str, Any], tokenizer: Any, settings: Mapping[str, Any]) -> ImageProcessor:
    """PaliGemma's (arXiv 2407.07726): an image is scaled to one square tile, whatever its shape."""
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    processor = SiglipImageProcessorPil.from_pretrained(folder, **settings)
    return _one_tile(processor, tile_of(config, "siglip_vision_model"), tokenizer, before_text=True)


def deepseek_vl(folder: Path, config: dict[str, Any], tokenizer: Any, settings: Mapping[str, Any]) -> ImageProcessor:
    """DeepSeek-VL's (arXiv 2403.05525): an image is scaled to a longest edge and padded to one square tile."""
    from transformers.models.deepseek_vl.image_processing_pil_deepseek_vl import DeepseekVLImageProcessorPil

    processor: Any = DeepseekVLImageProcessorPil.from_pretrained(folder, **settings)
    tile = tile_of(config, "siglip_vision_model")
    check_model(folder, "size", processor.size["height"], "image_size", tile[0])
    return _one_tile(processor, tile, tokenizer, token="<image_placeholder>")


def _one_tile(
    processor: Any, tile: tuple[int, int], tokenizer: Any, before_text: bool = False, token: str = "<image>"
) -> ImageProcessor:
    """The ImageProcessor of a family whose images are one square tile each, with a `token` for each of its patches."""
    size, side = tile
    text, ids = token * side**2, token_ids(tokenizer, (token,))
    return ImageProcessor(
        token, ids[0], frozenset(ids), lambda height, width: text, tiles_by(processor), (size, size),
        before_text=before_text,
    )  # fmt: skip
