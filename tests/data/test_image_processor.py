"""Tokens and pixels of images against transformers' own processors, and without torch."""

import ast
import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models import cohere2_vision, kimi_k25
from transformers.models.aya_vision.processing_aya_vision import AyaVisionProcessor
from transformers.models.cohere2_vision.processing_cohere2_vision import Cohere2VisionProcessor
from transformers.models.deepseek_vl.processing_deepseek_vl import DeepseekVLProcessor
from transformers.models.exaone4_5.processing_exaone4_5 import Exaone4_5_Processor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.idefics2.image_processing_pil_idefics2 import Idefics2ImageProcessorPil
from transformers.models.idefics2.processing_idefics2 import Idefics2Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.kimi_k25.processing_kimi_k25 import Kimi_K25Processor
from transformers.models.lfm3_vl.processing_lfm3_vl import Lfm3VlProcessor
from transformers.models.lighton_ocr.processing_lighton_ocr import LightOnOcrProcessor
from transformers.models.minimax_m3_vl.processing_minimax_m3_vl import MiniMaxM3VLProcessor
from transformers.models.ovis2.processing_ovis2 import Ovis2Processor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.video_llama_3.processing_video_llama_3 import VideoLlama3Processor

from jaxrl_llm.config import ConfigError
from jaxrl_llm.data import image_processors
from jaxrl_llm.models.vision.patch_embedder import PatchEmbedderConfig
from jaxrl_llm.models.vision.patch_rows import PatchRowsConfig, patch_rows
from tests.data import vl_folders
from tests.data.qwen_vl import TOKENS as QWEN

TAGS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
IDEFICS = ["<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>", *TAGS]
GEMMA = ["<start_of_image>", "<image_soft_token>", "<end_of_image>"]
# Width and height: square, wide, tall, tiny, larger than the longest edge, extreme, one that divides without rest.
SIZES = [(40, 40), (50, 20), (17, 64), (1, 1), (300, 211), (200, 3), (64, 32), (16, 16), (63, 65)]


def with_tokens(folder, names) -> Any:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    return tokenizer


def picture(width, height, seed=0):
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(noise)


def write(folder, processor, config, **settings):
    folder.mkdir(exist_ok=True)
    processor.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    if settings:
        (folder / "processor_config.json").write_text(json.dumps(settings))
    return folder


def expanded(own, text, images):
    """The text with each placeholder replaced, as rows are rendered."""
    first, *rest = text.split(own.placeholder)
    texts = (own.expand(image.height, image.width) + part for image, part in zip(images, rest, strict=True))
    return own.finish(first + "".join(texts))


IDEFICS_CONFIG = {
    "model_type": "idefics3",
    "scale_factor": 2,
    "vision_config": {"image_size": 16, "patch_size": 4},
}


@pytest.fixture
def idefics3(tmp_path, tokenizer_folder):
    """(our processor, transformers' own) with tiles of 16 x 16 pixels and 4 tokens."""
    tokenizer = with_tokens(tokenizer_folder, IDEFICS)
    pil = Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 16})
    write(tmp_path / "model", pil, IDEFICS_CONFIG)
    own = image_processors.load(tmp_path / "model", tokenizer)
    assert own is not None
    return own, Idefics3Processor(pil, tokenizer, image_seq_len=4)


@pytest.mark.parametrize("sizes", [*([size] for size in SIZES), [(40, 40), (1, 9), (300, 30)]], ids=str)
def test_idefics3_writes_the_tokens_and_the_tiles_of_its_processor(idefics3, sizes):
    own, theirs = idefics3
    images = [picture(*size, seed) for seed, size in enumerate(sizes)]
    text = "look\n" + "<image>\nand ".join([""] * (len(images) + 1)) + "say"
    reference = theirs(text=text, images=[images], return_tensors="np")
    ids = theirs.tokenizer(expanded(own, text, images), add_special_tokens=False)["input_ids"]
    assert ids == reference["input_ids"][0].tolist()
    pixels = own.pixels(images)
    np.testing.assert_array_equal(pixels, np.moveaxis(reference["pixel_values"][0], 1, -1))
    assert pixels.dtype == np.float32 and ids.count(own.image_id) == 4 * len(pixels)


@pytest.mark.parametrize("splitting", [True, False])
def test_idefics2_writes_the_tokens_and_the_tiles_of_its_processor(tmp_path, tokenizer_folder, splitting):
    """Images side by side and apart, wide and high ones, with text right behind them."""
    tokenizer = with_tokens(tokenizer_folder, IDEFICS)
    pil = Idefics2ImageProcessorPil(size={"shortest_edge": 6, "longest_edge": 16}, do_image_splitting=splitting)
    config = {
        "model_type": "idefics2", "vision_config": {"image_size": 16}, "perceiver_config": {"resampler_n_latents": 3},
    }  # fmt: skip
    own = image_processors.load(write(tmp_path / "model", pil, config), tokenizer)
    assert own is not None
    theirs = Idefics2Processor(pil, tokenizer, image_seq_len=3)
    images = [picture(*size, seed) for seed, size in enumerate([(40, 30), (9, 12), (300, 30), (5, 90)])]
    text = "look<image><image>and <image>\n<image> say"
    reference = theirs(text=text, images=[images], return_tensors="np")
    ids = theirs.tokenizer(expanded(own, text, images), add_special_tokens=False)["input_ids"]
    assert ids == reference["input_ids"][0].tolist()
    pixels = own.pixels(images)
    assert pixels.shape == (20 if splitting else 4, 16, 16, 3) and ids.count(own.image_id) == 3 * len(pixels)
    high, wide = reference["pixel_values"].shape[-2:]  # of the largest
    shown, other = pixels[:, :high, :wide], np.concatenate([pixels[:, high:].ravel(), pixels[:, :, wide:].ravel()])
    np.testing.assert_array_equal(np.nan_to_num(shown), np.moveaxis(reference["pixel_values"][0], 1, -1))
    np.testing.assert_array_equal(~np.isnan(shown).any(-1), reference["pixel_attention_mask"][0] == 1)
    assert np.isnan(other).all()
    if splitting:
        with pytest.raises(ConfigError, match="an image of 9 x 1 pixels has no quarters: crop it, drop the row"):
            own.expand(1, 9)
    small = config | {"vision_config": {"image_size": 15}}
    with pytest.raises(ConfigError, match="longest_edge = 16, but images of this model are up to image_size = 15"):
        image_processors.load(write(tmp_path / "model", pil, small), tokenizer)


def test_smolvlm_tiles_are_those_of_its_processor(tmp_path, tokenizer_folder):
    pil = SmolVLMImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 16})
    folder = write(tmp_path / "model", pil, {**IDEFICS_CONFIG, "model_type": "smolvlm"}, image_seq_len=5)
    own = image_processors.load(folder, with_tokens(tokenizer_folder, IDEFICS))
    assert own is not None
    for size in SIZES:
        image = picture(*size)
        reference = pil(images=[[image]], return_row_col_info=True, return_tensors="np")
        np.testing.assert_array_equal(own.pixels([image]), np.moveaxis(reference["pixel_values"][0], 1, -1))
        rows, columns = reference["rows"][0][0], reference["cols"][0][0]
        assert own.expand(image.height, image.width).count("<image>") == 5 * (rows * columns + 1)


def test_an_image_that_is_not_split_is_one_tile(tmp_path, tokenizer_folder):
    pil = Idefics3ImageProcessorPil(do_image_splitting=False, max_image_size={"longest_edge": 16})
    own = image_processors.load(write(tmp_path / "model", pil, IDEFICS_CONFIG), with_tokens(tokenizer_folder, IDEFICS))
    assert own is not None
    assert own.pixels([picture(300, 20)]).shape == (1, 16, 16, 3)
    tag = "<fake_token_around_image>"
    assert own.expand(20, 300) == f"{tag}<global-img>{'<image>' * 4}{tag}"


def test_gemma3_writes_the_tokens_and_the_pixels_of_its_processor(tmp_path, tokenizer_folder):
    tokenizer = with_tokens(tokenizer_folder, GEMMA)
    for name, token in zip(("boi", "image", "eoi"), GEMMA, strict=True):
        setattr(tokenizer, f"{name}_token", token)
        setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
    pil = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    config = {"model_type": "gemma3", "mm_tokens_per_image": 4, "vision_config": {}}
    own = image_processors.load(write(tmp_path / "model", pil, config), tokenizer)
    assert own is not None
    theirs = Gemma3Processor(pil, tokenizer, image_seq_length=4)
    images = [picture(40, 40), picture(3, 90)]
    text = "one <start_of_image> two\n<start_of_image>\nend"
    reference = theirs(text=[text], images=[images], return_tensors="np")
    ids = tokenizer(expanded(own, text, images), add_special_tokens=False)["input_ids"]
    assert ids == reference["input_ids"][0].tolist()
    np.testing.assert_array_equal(own.pixels(images), np.moveaxis(reference["pixel_values"], 1, -1))


QWEN_CONFIG = {"model_type": "qwen2_5_vl", "vision_config": {"patch_size": 4, "spatial_merge_size": 2}}
QWEN_PIL = {"patch_size": 4, "size": {"shortest_edge": 512, "longest_edge": 8192}}


@pytest.mark.parametrize("processor", [QWEN_PIL, QWEN_PIL | {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}])
def test_qwen_vl_writes_the_tokens_and_the_patches_of_its_processor(tmp_path, tokenizer_folder, processor):
    """Bit for bit: images in between, below and above the bounds, and of other shapes than a token's multiples."""
    pil = Qwen2VLImageProcessorPil(**processor)
    tokenizer = with_tokens(tokenizer_folder, QWEN)
    own = image_processors.load(write(tmp_path / "model", pil, QWEN_CONFIG), tokenizer)
    assert own is not None
    images = [picture(*size, seed) for seed, size in enumerate(SIZES)]
    made = pil(images=images, return_tensors="np")
    patches, grids = patch_rows(own.pixels(images), PatchRowsConfig(patch_size=4))
    np.testing.assert_array_equal(patches, made["pixel_values"])
    np.testing.assert_array_equal(np.insert(grids, 0, 1, axis=1), made["image_grid_thw"])
    theirs: Any = SimpleNamespace(image_processor=pil, image_token=own.placeholder[len("<|vision_start|>") :][:13])
    text = "".join(f"and {own.placeholder}" for _ in images)
    written = "".join(
        f"and <|vision_start|>{Qwen2_5_VLProcessor.replace_image_token(theirs, made, number)}<|vision_end|>"
        for number in range(len(images))
    )
    assert expanded(own, text, images) == written
    ids = tokenizer(written, add_special_tokens=False)["input_ids"]
    assert 4 * ids.count(own.image_id) == len(patches)
    assert own.special_ids == set(tokenizer.convert_tokens_to_ids(QWEN[2:]))


def written_of_pixtral(made):
    """The tokens of an image of Mistral's, whose own processor needs torchvision."""
    high, wide = (size // 8 for size in made["image_sizes"][0])
    return f"{(wide * '[IMG]' + '[IMG_BREAK]') * high}".removesuffix("[IMG_BREAK]") + "[IMG_END]"


INTERNVL: Any = SimpleNamespace(
    image_token="<IMG_CONTEXT>", start_image_token="<img>", end_image_token="</img>", image_seq_length=4
)
AYA: Any = SimpleNamespace(
    img_size=16, patch_size=8, start_of_img_token="<|START_OF_IMG|>", end_of_img_token="<|END_OF_IMG|>",
    img_patch_token="<|IMG_PATCH|>", tile_token="TILE", tile_global_token="TILE_GLOBAL",
)  # fmt: skip
OPTIONS = {
    "internvl": {"max_patches": 2}, "mistral3": {"longest_edge": 16}, "glm4v": {"max_pixels": 512},
    "pixtral": {"longest_edge": 16}, "glm_ocr": {"max_pixels": 512}, "exaone4_5": {"max_pixels": 256},
    "aya_vision": {"max_patches": 2}, "video_llama_3": {"max_pixels": 256, "min_pixels": 64},
    "lighton_ocr": {"longest_edge": 16}, "lfm3_vl": {"max_pixels": 256}, "minimax_m3_vl": {"max_pixels": 256},
    "deepseek_vl": {}, "ovis2": {"max_patches": 2}, "glm5_next": {"max_image_tokens": 6},
}  # fmt: skip
# Of families whose images are rows of patches.
ROWS = {
    **dict.fromkeys(
        ("glm4v", "glm_ocr", "glm5_next", "exaone4_5", "lfm3_vl", "minimax_m3_vl"), PatchRowsConfig(patch_size=4)
    ),
    "video_llama_3": PatchRowsConfig(patch_size=8, frames=0, merge=1),
}  # fmt: skip


@pytest.mark.parametrize("given", [False, True], ids=["plain", "options"])
@pytest.mark.parametrize("family", OPTIONS)
def test_tokens_and_pixels_are_those_of_transformers_processor(tmp_path, family, given):
    """Bit for bit, of images of many sizes, and with an option over those of the folder."""
    folder = vl_folders.vl_folder(tmp_path / family, family)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    pil = vl_folders.processor_of(family)
    if given:
        settings = image_processors.settings_of(folder, OPTIONS[family])
        tokenizer.image_settings = settings
        pil = type(pil)(**pil.to_dict() | settings)
    own = image_processors.load(folder, tokenizer)
    assert own is not None
    glm: Any = SimpleNamespace(image_processor=pil, image_token="<|image|>")
    qwen: Any = SimpleNamespace(image_processor=pil, image_token="<|image_pad|>")
    deepseek: Any = SimpleNamespace(image_token="<image_placeholder>", num_image_tokens=4)
    ovis: Any = SimpleNamespace(image_seq_length=4)
    minimax: Any = SimpleNamespace(
        image_processor=pil, IMAGE_TOKEN="]<]image[>[", VISION_START_TOKEN="]<]start of image[>[",
        VISION_END_TOKEN="]<]end of image[>[",
    )  # fmt: skip
    lighton: Any = SimpleNamespace(image_token="<|image_pad|>", effective_patch_size=8)

    def framed(made):
        return f"<|begin_of_image|>{Glm4vProcessor.replace_image_token(glm, made, 0)}<|end_of_image|>"

    write = {
        "internvl": lambda made: InternVLProcessor.replace_image_token(INTERNVL, made, 0),
        **dict.fromkeys(("mistral3", "pixtral"), written_of_pixtral),
        "lighton_ocr": lambda made: LightOnOcrProcessor.replace_image_token(lighton, made, 0),
        "aya_vision": lambda made: AyaVisionProcessor.replace_image_token(AYA, made, 0),
        **dict.fromkeys(("glm4v", "glm_ocr", "glm5_next"), framed),
        "exaone4_5": lambda made: Exaone4_5_Processor.replace_image_token(qwen, made, 0),
        "lfm3_vl": lambda made: Lfm3VlProcessor.replace_image_token(glm, made, 0),
        "deepseek_vl": lambda made: DeepseekVLProcessor.replace_image_token(deepseek, made, 0),
        "ovis2": lambda made: Ovis2Processor.replace_image_token(ovis, made, 0),
        "minimax_m3_vl": lambda made: MiniMaxM3VLProcessor.replace_image_token(minimax, made, 0),
        "video_llama_3": lambda made: VideoLlama3Processor.replace_image_token(qwen, made, 0),
    }[family]
    cut: dict[str, Any] = {"crop_to_patches": True}
    of_pixtral = family in ("mistral3", "pixtral", "lighton_ocr")
    arguments = {"internvl": cut, "aya_vision": cut}.get(family, {"patch_size": 8} if of_pixtral else {})
    sizes = SIZES
    if of_pixtral:
        with pytest.raises(ConfigError, match=r"an image of 200 x 3 pixels, scaled to .* = \d+, has none left"):
            own.expand(3, 200)
        sizes = [size for size in SIZES if size != (200, 3)]
    images = [picture(*size, seed) for seed, size in enumerate(sizes)]
    written = ""
    for image in images:
        made = pil([image], return_tensors="np", **arguments)
        written += f"and {write(made)}"
        pixels = np.asarray(own.pixels([image]))
        if family in ROWS:
            pixels, grids = patch_rows(pixels, ROWS[family])
            np.testing.assert_array_equal(grids, made["image_grid_thw"][:, 1:])
        else:
            pixels = np.moveaxis(pixels, -1, 1)
        np.testing.assert_array_equal(pixels, made["pixel_values"])
        assert own.tile_count(image.height, image.width) == (1 if family in ROWS else len(pixels))
    assert expanded(own, "".join(f"and {own.placeholder}" for _ in images), images) == written
    names = vl_folders.TOKENS[family][
        : {"glm": 4, "exa": 2, "vid": 2, "lig": 2, "lfm": 4, "dee": 1, "min": 4, "ovi": 6}.get(family[:3], 3)
    ]
    assert own.special_ids == set(tokenizer.convert_tokens_to_ids(names))


@pytest.mark.parametrize("given", [{}, {"max_soft_tokens": 70}], ids=str)
@pytest.mark.parametrize("family", ["gemma4", "gemma4_unified"])
def test_gemma4_writes_the_tokens_and_the_pixels_of_its_processor(tmp_path, family, given):
    """Bit for bit; images of all sizes become about as many tokens as they may be."""
    folder = vl_folders.vl_folder(tmp_path / family, family)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.image_settings = image_processors.settings_of(folder, given)
    own = image_processors.load(folder, tokenizer)
    assert own is not None
    pil, config = type(pil := vl_folders.processor_of("gemma4"))(**pil.to_dict() | given), PatchRowsConfig(patch_size=4)
    theirs: Any = SimpleNamespace(boi_token="<|image>", image_token="<|image|>", eoi_token="<image|>")
    for seed, size in enumerate(SIZES):
        made = pil([picture(*size, seed)], return_tensors="np")
        assert own.expand(size[1], size[0]) == Gemma4Processor.replace_image_token(theirs, made, 0)
        (image,) = own.pixels([picture(*size, seed)])
        places = made["image_position_ids"][0]
        whole = made["pixel_values"][0][places[:, 0] >= 0].reshape(-1, 4, 4, 3)
        for patch, (x, y) in zip(whole, places, strict=False):
            np.testing.assert_array_equal(image[4 * y : 4 * y + 4, 4 * x : 4 * x + 4], patch)
        grid = patch_rows([image], dataclasses.replace(config, frames=0))[1][0]
        assert grid.prod() == len(whole) == 4 * int(made["num_soft_tokens_per_image"][0])
        if family == "gemma4_unified":
            merged, places = vl_folders.merged_patches(
                *(torch.tensor(made[name][0][places[:, 0] >= 0]) for name in ("pixel_values", "image_position_ids"))
            )
            own_patches, grids = patch_rows([image], PatchEmbedderConfig(patch_size=8))
            pixels_first = own_patches.reshape(-1, 3, 64).swapaxes(1, 2).reshape(len(merged), -1)
            np.testing.assert_array_equal(pixels_first, merged)
            y, x = np.divmod(np.arange(len(merged)), grids[0, 1])
            np.testing.assert_array_equal(places, np.stack([x, y], axis=-1))
    assert own.special_ids == set(tokenizer.convert_tokens_to_ids(vl_folders.TOKENS["gemma4"][:3]))


def test_gemma4_folders_without_ids_of_an_images_ends(tmp_path):
    """null, as transformers allows, which was a TypeError: the tokenizer names them, or they are Gemma 4's own."""
    folder = vl_folders.vl_folder(tmp_path / "gemma4", "gemma4")
    named = image_processors.load(folder, PreTrainedTokenizerFast.from_pretrained(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"boi_token_id": None, "eoi_token_id": None}))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    with pytest.raises(ConfigError, match=r"the tokenizer has no tokens \[255999, .*258882\], which the model reads"):
        image_processors.load(folder, tokenizer)
    tokenizer.boi_token, tokenizer.eoi_token = "<|image>", "<image|>"
    own = image_processors.load(folder, tokenizer)
    assert own is not None and named is not None and own.special_ids == named.special_ids
    assert own.expand(16, 16) == named.expand(16, 16)


# Width and height of an image, and its rows and columns of tiles, and height and width of the whole, in tokens of 8
# pixels, two of which are a tile's side, worked out by hand.
LAYOUTS = [
    ((16, 24), (1, 1), (3, 2)),  # 6 tokens, as many as there may be
    ((8, 8), (1, 1), (2, 2)),  # scaled up: 2 tokens at least, in squares
    ((24, 24), (1, 1), (2, 2)),  # 9 tokens, up to one and a half times too many: scaled down
    ((64, 32), (1, 2), (1, 3)),
    ((32, 66), (2, 1), (3, 1)),
    ((64, 64), (2, 2), (2, 2)),
    ((100, 24), (1, 4), (1, 5)),
    ((12, 72), (4, 1), (6, 1)),
]


@pytest.mark.parametrize(("size", "grid", "whole"), LAYOUTS, ids=str)
def test_lfm2_vl_cuts_large_images_into_tiles(tmp_path, size, grid, whole):
    """The tokens of an image, and tiles as torchvision makes them, whose resizing of 8 bits torch has too."""
    folder = vl_folders.vl_folder(tmp_path / "lfm2_vl", "lfm2_vl")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    own = image_processors.load(folder, tokenizer)
    assert own is not None
    image, (rows, columns) = picture(*size), grid

    def resized(height, width):
        pixels = torch.tensor(np.asarray(image)).permute(2, 0, 1)[None]
        scaled = torch.nn.functional.interpolate(pixels, (height, width), mode="bilinear", antialias=True)
        return scaled[0].permute(1, 2, 0).numpy() / 127.5 - 1

    tiles = [resized(8 * whole[0], 8 * whole[1])]
    text = "<image>" * (whole[0] * whole[1])
    if rows * columns > 1:
        cells = resized(16 * rows, 16 * columns).reshape(rows, 16, columns, 16, 3).swapaxes(1, 2).reshape(-1, 16, 16, 3)
        tiles = [*cells, *tiles]
        places = [(row, column) for row in range(1, rows + 1) for column in range(1, columns + 1)]
        tags = "".join(f"<|img_row_{row}_col_{column}|>{4 * '<image>'}" for row, column in places)
        text = f"{tags}<|img_thumbnail|>{text}"
    assert own.expand(size[1], size[0]) == f"<|image_start|>{text}<|image_end|>"
    found = own.pixels([image])
    assert len(found) == len(tiles) == own.tile_count(size[1], size[0])
    for tile, expected in zip(found, tiles, strict=True):
        np.testing.assert_allclose(tile, expected, atol=1.01 / 127.5)
    assert own.special_ids == set(tokenizer.convert_tokens_to_ids(vl_folders.TOKENS["lfm2_vl"][:-2]))
    tokenizer.image_settings = image_processors.settings_of(folder, {"do_image_splitting": False})
    alone = image_processors.load(folder, tokenizer)
    assert alone is not None and alone.tile_count(size[1], size[0]) == 1


def test_command_a_vision_cuts_images_as_transformers(tmp_path):
    """In the grids of the functions of its file, which needs torchvision as a whole; with the resizing of that, which
    torch has too, but for few numbers."""
    source = ast.parse((Path(cohere2_vision.__path__[0]) / "image_processing_cohere2_vision.py").read_text())
    source.body = [part for part in source.body if isinstance(part, ast.FunctionDef)]
    for function in source.body:
        function.decorator_list = []
    names: dict[str, Any] = {"np": np}
    exec(compile(source, "image_processing_cohere2_vision.py", "exec"), names)
    folder = vl_folders.vl_folder(tmp_path / "cohere2_vision", "cohere2_vision")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    own = image_processors.load(folder, tokenizer)
    assert own is not None
    writer: Any = SimpleNamespace(patch_size=2, image_token="<|IMG_PATCH|>", img_line_break_token="<|IMG_LINE_BREAK|>",
                                  boi_token="<|START_OF_IMG|>", eoi_token="<|END_OF_IMG|>")  # fmt: skip
    mean, std = (
        np.array(image_processors.tiled.COHERE2_VISION[name], np.float32) for name in ("image_mean", "image_std")
    )
    for seed, size in enumerate(SIZES):
        image = picture(*size, seed)
        columns, rows = names["get_optimal_tiled_canvas"]((image.height, image.width), (16, 16), 1, 4)

        def resized(height, width, image=image):
            pixels = torch.tensor(np.asarray(image)).permute(2, 0, 1)[None]
            scaled = torch.nn.functional.interpolate(pixels, (height, width), mode="bicubic", antialias=True)
            return (scaled[0].permute(1, 2, 0).numpy() / np.float32(255) - mean) / std

        cells = resized(16 * rows, 16 * columns).reshape(rows, 16, columns, 16, 3).swapaxes(1, 2).reshape(-1, 16, 16, 3)
        tiles = cells if rows * columns == 1 else np.concatenate([cells, resized(16, 16)[None]])
        found = own.pixels([image])
        levels = np.abs(found - tiles) * std * 255  # cubics overshoot, which Pillow cuts off between its two passes
        assert levels.max() < 6 and (levels > 1.01).mean() < 0.01
        assert len(tiles) == own.tile_count(image.height, image.width)
        text = Cohere2VisionProcessor.replace_image_token(writer, {"num_patches": [len(tiles)]}, 0)
        assert own.expand(image.height, image.width) == text
    assert own.special_ids == set(tokenizer.convert_tokens_to_ids(vl_folders.TOKENS["cohere2_vision"][:-1]))
    entries = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(entries | {"patch_size": 4}))
    with pytest.raises(ConfigError, match=r"has patch_size = 4, and the model tokens along a tile = 2"):
        image_processors.load(folder, tokenizer)


@pytest.mark.parametrize("own", [False, True])
def test_kimi_pads_images_to_whole_tokens(tmp_path, own):
    """In the sizes of the functions of transformers' file, which needs torchvision as a whole; scaled as that does, but
    for few numbers. Moonshot's `own` files have other names of entries."""
    source = ast.parse((Path(kimi_k25.__path__[0]) / "image_processing_kimi_k25.py").read_text())
    source.body = [part for part in source.body if getattr(part, "name", "") == "navit_resize"]
    names: dict[str, Any] = {"math": math}
    exec(compile(source, "image_processing_kimi_k25.py", "exec"), names)
    folder = vl_folders.vl_folder(tmp_path / "kimi_k25", "kimi_k25")
    if own:
        entries = {"in_patch_limit": 24, "patch_limit_on_one_side": 8, "patch_size": 4, "merge_kernel_size": 2}
        (folder / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": entries}))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    processor = image_processors.load(folder, tokenizer)
    assert processor is not None
    scaled_down = 0
    for seed, size in enumerate([*SIZES, (17, 18), (8, 16)]):
        image = picture(*size, seed)
        (high, wide), padded = names["navit_resize"](image.height, image.width, 4, 2, 24, 8)
        pixels = torch.tensor(np.asarray(image)).permute(2, 0, 1)[None]
        if (high, wide) != (image.height, image.width):
            pixels = torch.nn.functional.interpolate(pixels, (high, wide), mode="bicubic", antialias=True)
            scaled_down += 1
        expected = np.full((*padded, 3), -1.0)
        expected[:high, :wide] = pixels[0].permute(1, 2, 0).numpy() / 127.5 - 1
        (found,) = processor.pixels([image])
        levels = np.abs(found - expected) * 127.5  # cubics overshoot, which Pillow cuts off between its two passes
        assert levels.max() < 6 and (levels > 1.01).mean() < 0.01
        made = {"image_grid_thw": torch.tensor([[1, padded[0] // 4, padded[1] // 4]])}
        writer: Any = SimpleNamespace(image_processor=SimpleNamespace(merge_size=2), image_token="<|media_pad|>")
        text = Kimi_K25Processor.replace_image_token(writer, made, 0)
        assert processor.expand(image.height, image.width) == text
    assert 0 < scaled_down < len(SIZES) + 2
    assert processor.special_ids == set(tokenizer.convert_tokens_to_ids(vl_folders.TOKENS["kimi_k25"][:4]))
    tokenizer.image_settings = image_processors.settings_of(folder, {"max_patches": 4})
    smaller = image_processors.load(folder, tokenizer)
    assert smaller is not None and smaller.expand(16, 16) == "<|media_pad|>"


def test_the_size_in_published_files_of_minimax_m3_is_not_read(tmp_path):
    """As in transformers: it is a pair, of no bounds; images are of 4 to 576 tokens of 28 x 28 pixels."""
    folder = vl_folders.vl_folder(tmp_path / "minimax_m3_vl", "minimax_m3_vl")
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["patch_size"] = 14
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": [672, 672]}))
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    plain = image_processors.load(folder, tokenizer)
    tokenizer.image_settings = image_processors.settings_of(folder, {"max_pixels": 28 * 28 * 16})
    fewer = image_processors.load(folder, tokenizer)
    assert plain is not None and fewer is not None
    counts = [(own.expand(3, 9).count("]<]image[>["), own.expand(672, 672).count("]<]image[>["))
              for own in (plain, fewer)]  # fmt: skip
    assert counts == [(8, 576), (8, 16)]
    assert plain.pixels([picture(30, 30)])[0].shape == (56, 56, 3)


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("options", [{"max_pixels": 1024}, {"min_pixels": 2048}, {"min_pixels": 64, "max_pixels": 256}])
def test_options_over_those_of_a_qwen_vl(tmp_path, tokenizer_folder, options, older):
    """Tokens and patches are those of transformers' processor with them, whichever names the file has bounds by."""
    tokenizer = with_tokens(tokenizer_folder, QWEN)
    folder = write(tmp_path / "model", Qwen2VLImageProcessorPil(**QWEN_PIL), QWEN_CONFIG)
    if older:
        entries = json.loads((folder / "preprocessor_config.json").read_text())
        bounds = entries.pop("size")
        entries |= {"min_pixels": bounds["shortest_edge"], "max_pixels": bounds["longest_edge"]}
        (folder / "preprocessor_config.json").write_text(json.dumps(entries))
    tokenizer.image_settings = image_processors.settings_of(folder, options)
    own = image_processors.load(folder, tokenizer)
    assert own is not None
    images = [picture(*size, seed) for seed, size in enumerate(SIZES)]
    size = {"shortest_edge": options.get("min_pixels", 512), "longest_edge": options.get("max_pixels", 8192)}
    made = Qwen2VLImageProcessorPil(**QWEN_PIL | {"size": size})(images=images, return_tensors="np")
    plain = Qwen2VLImageProcessorPil(**QWEN_PIL)(images=images, return_tensors="np")
    assert len(made["pixel_values"]) != len(plain["pixel_values"])
    patches, grids = patch_rows(own.pixels(images), PatchRowsConfig(patch_size=4))
    np.testing.assert_array_equal(patches, made["pixel_values"])
    tokens = [own.expand(image.height, image.width).count("<|image_pad|>") for image in images]
    assert tokens == (grids.prod(axis=1) // 4).tolist()


@pytest.mark.parametrize("options", [{"longest_edge": 32}, {"do_image_splitting": False}])
def test_options_over_those_of_an_idefics3(idefics3, tmp_path, options):
    own, theirs = idefics3
    tokenizer = theirs.tokenizer
    tokenizer.image_settings = image_processors.settings_of(tmp_path / "model", options)
    changed = image_processors.load(tmp_path / "model", tokenizer)
    assert changed is not None
    size = {"size": {"longest_edge": options["longest_edge"]}} if "longest_edge" in options else {}
    given = {name: x for name, x in options.items() if name != "longest_edge"} | size
    pil = Idefics3ImageProcessorPil(**{"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 16}} | given)
    for image in (picture(300, 211), picture(40, 40)):
        reference = pil(images=[[image]], return_tensors="np")["pixel_values"][0]
        np.testing.assert_array_equal(changed.pixels([image]), np.moveaxis(reference, 1, -1))
        assert (
            len(reference) == changed.tile_count(image.height, image.width) < own.tile_count(image.height, image.width)
        )
        assert changed.expand(image.height, image.width).count("<image>") == 4 * len(reference)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (QWEN_CONFIG, {"longest_edge": 3}, "option longest_edge, but those of a qwen2_5_vl are min_pixels, max_pixels"),
        (QWEN_CONFIG, {"max_pixels": 0}, "max_pixels=0; give an integer from 1"),
        (QWEN_CONFIG, {"max_pixels": True}, "max_pixels=True; give an integer from 1"),
        (QWEN_CONFIG, {"max_pixels": 511}, "min_pixels = 512 is above max_pixels = 511"),
        (IDEFICS_CONFIG, {"max_pixels": 9}, "those of a idefics3 are longest_edge, do_image_splitting"),
        (IDEFICS_CONFIG, {"do_image_splitting": 1}, "do_image_splitting=1; give True or False"),
        ({"model_type": "gemma3"}, {"max_pixels": 9}, "option max_pixels, but those of a gemma3 are none"),
        ({"model_type": "internvl"}, {"max_pixels": 9}, "those of a internvl are min_patches, max_patches"),
        ({"model_type": "internvl"}, {"min_patches": 13}, "min_patches = 13 is above max_patches = 12; set both"),
        ({"model_type": "mistral3"}, {"longest_edge": 0}, "longest_edge=0; give an integer from 1"),
        ({"model_type": "gemma4"}, {"max_soft_tokens": 71}, "max_soft_tokens=71; give 70, 140, 280, 560, 1120"),
        ({"model_type": "lfm2_vl"}, {"max_image_tokens": 63}, "min_image_tokens = 64 is above max_image_tokens = 63"),
        ({"model_type": "glm5_next"}, {"max_image_tokens": 9}, "min_image_tokens = 16 is above max_image_tokens = 9"),
        ({"model_type": "lfm2_vl"}, {"max_tiles": 1}, "cut are 2 tiles at least; do_image_splitting=False"),
    ],
)
def test_options_that_a_family_does_not_have_are_refused(tmp_path, config, options, message):
    folder = write(tmp_path / "model", Qwen2VLImageProcessorPil(**QWEN_PIL), config)
    with pytest.raises(ConfigError, match=message):
        image_processors.settings_of(folder, options)


def test_qwen_vl_refuses_what_its_processor_refuses(tmp_path, tokenizer_folder):
    tokenizer = with_tokens(tokenizer_folder, QWEN)
    folder = write(tmp_path / "model", Qwen2VLImageProcessorPil(**QWEN_PIL), QWEN_CONFIG)
    own = image_processors.load(folder, tokenizer)
    assert own is not None and own.pixels([]) == []
    with pytest.raises(ConfigError, match="an image of 402 x 2 pixels: absolute aspect ratio must be smaller than 200"):
        own.expand(2, 402)
    write(folder, Qwen2VLImageProcessorPil(**QWEN_PIL, do_resize=False), QWEN_CONFIG)
    unscaled = image_processors.load(folder, tokenizer)
    assert unscaled is not None and unscaled.expand(16, 24).count("<|image_pad|>") == 6
    assert unscaled.pixels([picture(24, 16)])[0].shape == (16, 24, 3)
    with pytest.raises(ConfigError, match=r"^an image of 24 x 3 pixels is not of whole tokens of 8 x 8, and do_resize"):
        unscaled.expand(3, 24)
    write(folder, Qwen2VLImageProcessorPil(patch_size=16), QWEN_CONFIG)
    with pytest.raises(ConfigError, match="has patch_size = 16, and the model patch_size = 4"):
        image_processors.load(folder, tokenizer)


def test_a_row_without_images_has_no_tiles(idefics3):
    assert idefics3[0].pixels([]).shape == (0, 16, 16, 3)


def test_models_of_text_have_no_processor(tmp_path, tokenizer):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert image_processors.load(tmp_path, tokenizer) is None


def test_missing_files_and_tokens_are_named(tmp_path, tokenizer):
    (tmp_path / "config.json").write_text(json.dumps(IDEFICS_CONFIG))
    with pytest.raises(ConfigError, match=r"has no preprocessor_config\.json"):
        image_processors.load(tmp_path, tokenizer)
    Idefics3ImageProcessorPil().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="the tokenizer has no token <fake_token_around_image>"):
        image_processors.load(tmp_path, tokenizer)


@pytest.mark.slow
def test_images_are_processed_without_torch(tmp_path, tokenizer_folder):
    pil = Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 16})
    write(tmp_path / "model", pil, IDEFICS_CONFIG)
    with_tokens(tokenizer_folder, IDEFICS).save_pretrained(tmp_path / "model")
    code = f"""
import sys
sys.modules["torch"] = sys.modules["torchvision"] = None
from PIL import Image
from transformers import AutoTokenizer
from jaxrl_llm.data import image_processors
own = image_processors.load({str(tmp_path / "model")!r}, AutoTokenizer.from_pretrained({str(tmp_path / "model")!r}))
print(own.pixels([Image.new("RGB", (50, 20))]).shape)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False)
    assert done.stdout.strip() == "(9, 16, 16, 3)", done.stderr


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_file_is_to_be_copied_from_the_original(tmp_path, text):
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json .*JSON.*; copy that of the original model"):
        image_processors.read_json(tmp_path / "preprocessor_config.json")
