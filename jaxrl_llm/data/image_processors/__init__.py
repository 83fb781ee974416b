"""Image processors of vision-language models: the text that stands for an image in a prompt, and its pixels.

`load` reads the files of a model's folder. Resizing, tiling and normalising are those of transformers' processors on
Pillow and numpy, which need no torch; the tokens are those that its classes `Idefics2Processor`, `Idefics3Processor`,
`SmolVLMProcessor`, `AyaVisionProcessor`, `Cohere2VisionProcessor`, `Gemma3Processor`, `Gemma4Processor`,
`InternVLProcessor`, `Lfm2VlProcessor`, `LlavaProcessor`, `LlavaNextProcessor`, `LlavaOnevisionProcessor`,
`MllamaProcessor`, `PaliGemmaProcessor`, `Qwen2VLProcessor`, `Qwen2_5_VLProcessor`, `Qwen3VLProcessor`,
`Glm4vProcessor`, `Glm5NextProcessor`, `Exaone4_5_Processor`, `DeepseekVLProcessor`, `MiniMaxM3VLProcessor`,
`VideoLlama3Processor`, `Kimi_K25Processor`, `Lfm3VlProcessor`, `LightOnOcrProcessor`, `Ovis2Processor` and
`PixtralProcessor` write. Families are in files by what becomes of an image: `one_tile`, `own_shape`, `tiled` (in tiles
that are read apart) and `joined` (in tiles that are put together again).
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data.image_processors.joined import llava_next, mllama
from jaxrl_llm.data.image_processors.one_tile import deepseek_vl, gemma3, llava, paligemma
from jaxrl_llm.data.image_processors.own_shape import gemma4, is_pixtral, kimi_k25, kind_of, mistral3, qwen_vl
from jaxrl_llm.data.image_processors.processor import ImageProcessor, read_json
from jaxrl_llm.data.image_processors.tiled import (
    aya_vision,
    cohere2_vision,
    idefics2,
    idefics3,
    internvl,
    lfm2_vl,
    lfm2_vl_entries,
    ovis2,
)

# By the model_type of config.json.
FAMILIES: dict[str, Callable[[Path, dict[str, Any], Any, Mapping[str, Any]], ImageProcessor]] = {
    "idefics2": idefics2,
    "idefics3": idefics3,
    "smolvlm": partial(idefics3, smolvlm=True),
    "gemma3": gemma3,
    "gemma4": gemma4,
    "gemma4_unified": gemma4,
    "lfm2_vl": lfm2_vl,
    "llava": llava,
    "paligemma": paligemma,
    "llava_next": llava_next,
    "llava_onevision": partial(llava_next, onevision=True),
    "qwen2_vl": qwen_vl,
    "qwen2_5_vl": qwen_vl,
    "qwen3_vl": qwen_vl,
    "qwen3_vl_moe": qwen_vl,
    "qwen3_5": qwen_vl,
    "qwen3_5_moe": qwen_vl,
    "qwen4_exp": qwen_vl,
    "glm4v": qwen_vl,
    "glm4v_moe": qwen_vl,
    "glm46v": qwen_vl,
    "glm_ocr": qwen_vl,
    "glm5_next": qwen_vl,
    "exaone4_5": partial(qwen_vl, framed=False),
    "video_llama_3": partial(qwen_vl, framed=False),
    "internvl": internvl,
    "kimi_k25": kimi_k25,
    "lfm3_vl": partial(qwen_vl, framed=False),
    "lighton_ocr": partial(mistral3, ends=False),
    "mistral3": mistral3,
    "mistral_large4": mistral3,
    "mllama": mllama,
    "deepseek_vl": deepseek_vl,
    "minimax_m3_vl": qwen_vl,
    "ovis2": ovis2,
    "aya_vision": aya_vision,
    "cohere2_vision": cohere2_vision,
}
SOFT_TOKENS = (70, 140, 280, 560, 1120)  # of an image of Gemma 4, at most
SPLITTING = {"longest_edge": int, "do_image_splitting": bool}
BOUNDS = {"min_pixels": int, "max_pixels": int}
TILES = {"min_patches": int, "max_patches": int}
# The options of data.image_processor and their types, by the model_type of config.json; other families have none.
OPTIONS: dict[str, dict[str, type]] = {
    "idefics2": {"do_image_splitting": bool},
    "idefics3": SPLITTING,
    "smolvlm": SPLITTING,
    "internvl": TILES,
    "aya_vision": TILES,
    "cohere2_vision": {"max_patches": int},
    "kimi_k25": {"max_patches": int},
    "lighton_ocr": {"longest_edge": int},
    "mistral3": {"longest_edge": int},
    "mistral_large4": {"longest_edge": int},
    "gemma4": {"max_soft_tokens": int},
    "gemma4_unified": {"max_soft_tokens": int},
    "lfm2_vl": {"min_image_tokens": int, "max_image_tokens": int, "max_tiles": int, "do_image_splitting": bool},
    "minimax_m3_vl": BOUNDS,
    "ovis2": {"crop_to_patches": bool, "max_patches": int},
    **{name: BOUNDS for name in FAMILIES if name.startswith(("qwen", "glm", "exaone", "video_llama", "lfm3"))},
    "glm5_next": {"min_image_tokens": int, "max_image_tokens": int},
}


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
            if model_type in ("gemma3", "gemma4", "gemma4_unified", "kimi_k25") and config.get("vision_config") is None:
                return None
            raise ConfigError(
                f"the model in {folder} reads images, and has no {files[0]}, by which those of files are read; copy "
                "that of the original (embedded:shapes, which has none, reads task:shapes alone)"
            )
        return FAMILIES[model_type](folder, config, tokenizer, getattr(tokenizer, "image_settings", {}))
    if "vision_config" in config and (folder / "preprocessor_config.json").is_file():
        raise ConfigError(f"images of model_type {model_type!r} are not read here; those of {', '.join(FAMILIES)} are")
    return None


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
        entries = {**lfm2_vl_entries(Path(folder)), **options}
        _check_bounds("image_tokens", entries["min_image_tokens"], entries["max_image_tokens"])
        if entries["min_tiles"] > entries["max_tiles"]:
            raise ConfigError(
                f"data.image_processor has max_tiles={entries['max_tiles']}, and images that are cut are "
                f"{entries['min_tiles']} tiles at least; do_image_splitting=False leaves them whole"
            )
    if model_type == "glm5_next":
        processor = kind_of(model_type).from_pretrained(folder, **options)
        _check_bounds("image_tokens", processor.min_image_tokens, processor.max_image_tokens)
    if options.get("max_soft_tokens", 70) not in SOFT_TOKENS:
        allowed = ", ".join(map(str, SOFT_TOKENS))
        raise ConfigError(f"data.image_processor has max_soft_tokens={options['max_soft_tokens']}; give {allowed}")
    if known is not BOUNDS:
        size = {"size": {"longest_edge": options["longest_edge"]}} if "longest_edge" in options else {}
        return {name: value for name, value in options.items() if name != "longest_edge"} | size
    size = kind_of(str(model_type)).from_pretrained(folder).size
    least, most = options.get("min_pixels", size["shortest_edge"]), options.get("max_pixels", size["longest_edge"])
    _check_bounds("pixels", least, most)
    found = {"size": {"shortest_edge": least, "longest_edge": most}}
    # Files of Qwen's have the bounds in one of two places, and the older place takes precedence.
    return found if str(model_type).startswith("glm") else found | {"min_pixels": least, "max_pixels": most}


def _check_bounds(what: str, least: int, most: int) -> None:
    if least > most:
        raise ConfigError(f"data.image_processor: min_{what} = {least} is above max_{what} = {most}; set both")
