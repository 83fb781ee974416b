"""Tokens and tiles of LLaVA's images against transformers' own processors."""

from typing import Any

import numpy as np
import pytest
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

from jaxrl_llm.config import ConfigError
from jaxrl_llm.data import image_processors
from jaxrl_llm.data.image_rows import ImageReader, ImageText, Tiles
from jaxrl_llm.models.vision.any_resolution import token_counts
from jaxrl_llm.models.vision.row_images import count_tiles, row_images
from jaxrl_llm.models.vision.siglip import SiglipConfig
from jaxrl_llm.models.vision.tower import VisionConfig
from tests.data.test_image_processor import picture, with_tokens, write

PLACES = [[16, 32], [32, 16], [32, 32], [48, 16], [16, 48]]
# Width and height: square, wide, tall, tiny, a longer shape than any of PLACES.
SIZES = [(40, 40), (50, 20), (17, 64), (1, 1), (300, 211), (60, 8), (64, 32), (16, 16), (63, 65)]
VISION = {"image_size": 16, "patch_size": 4}


@pytest.fixture
def tokenizer(tokenizer_folder):
    return with_tokens(tokenizer_folder, ["<image>", "<video>"])


def test_llava_is_one_tile(tmp_path, tokenizer):
    pil = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    own = image_processors.load(write(tmp_path / "m", pil, {"model_type": "llava", "vision_config": VISION}), tokenizer)
    theirs = LlavaProcessor(pil, tokenizer, patch_size=4, vision_feature_select_strategy="default",
                            num_additional_image_tokens=1)  # fmt: skip
    assert own is not None
    for seed, size in enumerate(SIZES):
        image: Any = picture(*size, seed)
        reference = theirs(text="a <image>b", images=[image], return_tensors="np")
        text = "a " + own.expand(image.height, image.width) + "b"
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == reference["input_ids"][0].tolist()
        np.testing.assert_array_equal(own.pixels([image]), np.moveaxis(reference["pixel_values"], 1, -1))
    pil.image_processor_type = "FuyuImageProcessor"
    write(tmp_path / "m", pil, {"model_type": "llava", "vision_config": VISION})
    file = tmp_path / "m" / "preprocessor_config.json"
    file.write_text(file.read_text().replace("CLIPImageProcessor", "FuyuImageProcessor"))
    with pytest.raises(ConfigError, match=r"is a FuyuImageProcessor.*; those of CLIP, Llava, Siglip are read here"):
        image_processors.load(tmp_path / "m", tokenizer)


def made(tmp_path, tokenizer, family):
    """Our processor, and what transformers' own makes of images in a row, of tiles of 16 x 16 pixels: tokens, tiles."""
    config = {"model_type": family, "vision_config": VISION, "image_grid_pinpoints": PLACES}
    sizes: Any = {"image_grid_pinpoints": PLACES, "size": {"height": 16, "width": 16}}
    if family == "llava_onevision":
        config["vision_aspect_ratio"] = "anyres_max_2"
        pil: Any = LlavaOnevisionImageProcessorPil(**sizes)
        theirs: Any = LlavaOnevisionProcessor.__new__(LlavaOnevisionProcessor)  # which needs torchvision for videos
        theirs.image_processor, theirs.num_image_tokens, theirs.vision_aspect_ratio = pil, 16, "anyres_max_2"
        theirs.vision_feature_select_strategy, theirs.image_token = "full", "<image>"
    else:
        pil = LlavaNextImageProcessorPil(**sizes | {"crop_size": {"height": 16, "width": 16}})
        theirs = LlavaNextProcessor(pil, tokenizer, patch_size=4, vision_feature_select_strategy="default",
                                    num_additional_image_tokens=1)  # fmt: skip
    own = image_processors.load(write(tmp_path / "m", pil, config), tokenizer)
    assert own is not None

    def reference(images):
        of_row = pil(images=[images] if family == "llava_onevision" else images, return_tensors="np")
        texts = [theirs.replace_image_token(of_row, number) for number in range(len(images))]
        return texts, [np.moveaxis(tiles, 1, -1) for tiles in of_row["pixel_values"]]

    return own, reference


@pytest.mark.parametrize("family", ["llava_next", "llava_onevision"])
def test_tokens_and_tiles_of_images_that_are_put_together(tmp_path, tokenizer, family):
    own, theirs = made(tmp_path, tokenizer, family)
    for seed, size in enumerate(SIZES):
        image = picture(*size, seed)
        (text,), (expected,) = theirs([image])
        assert own.expand(image.height, image.width) == text
        ((tiles, grid),) = own.pixels([image])
        np.testing.assert_array_equal(tiles, expected)
        assert len(tiles) == own.tile_count(image.height, image.width)
        assert text.count("<image>") == token_counts(np.array(grid), 16)
    with pytest.raises(ConfigError, match="an image of 90 x 1 pixels has no patches left along its shorter side"):
        own.expand(1, 90)


def test_several_images_of_a_row_are_a_tile_each_in_llava_onevision(tmp_path, tokenizer):
    """As its processor has it; those of rows that are put into one stay as each row has them."""
    own, theirs = made(tmp_path, tokenizer, "llava_onevision")
    tokenizer.image_folder = tmp_path / "m"
    reader = ImageReader(tokenizer)
    images = [picture(50, 20), picture(17, 64)]
    _, found = reader.read({"prompt": "<image>a<image>b", "images": images}, ("prompt",))
    assert isinstance(found, ImageText) and len(found.tiles) == 2 and found.tokens == 34
    texts, expected = theirs(images)
    assert found.texts == tuple(texts) == ("<image>" * 17,) * 2
    for (tile, grid), theirs_of in zip(found.tiles, expected, strict=True):
        np.testing.assert_array_equal(tile, theirs_of[:1])
        assert grid == (0, 0, 0, 0, 1, 0)
    _, alone = reader.read({"prompt": "<image>a", "images": images[:1]}, ("prompt",))
    assert alone is not None and alone.tiles.processor is not found.tiles.processor
    parts = (alone.tiles, found.tiles)
    both = Tiles(alone.tiles.images + found.tiles.images, alone.tiles.processor, sum(map(len, parts)), parts)
    assert [grid for _, grid in both] == [grid for part in parts for _, grid in part]

    vision = VisionConfig(SiglipConfig(image_size=16, patch_size=4), 1, own.image_id, newline="interpolated")
    ids = [own.image_id] * (alone.tokens + found.tokens)
    (row,) = [list(both)]
    assert count_tiles([row]) == count_tiles([both]) == [len(both)]
    made_of = [row_images([ids, [5]], [tiles, None], vision) for tiles in (row, both)]
    for x in made_of:
        assert x is not None and x.count.tolist() == [len(both), 0]
        np.testing.assert_array_equal(x.pixels[0, : len(both)], np.concatenate([tiles for tiles, _ in row]))
        np.testing.assert_array_equal(x.grids[0, :3], [grid for _, grid in row])
        assert not x.grids[0, 3:].any() and not x.grids[1].any()
    with pytest.raises(ConfigError, match=r"row 0 of a batch has 3 image tokens .* but its 6 tiles should have 77"):
        row_images([[own.image_id] * 3], [row], vision)
    with pytest.raises(ConfigError, match="row 0 of a batch has pixels alone, but this model puts the tiles"):
        row_images([ids], [np.zeros((3, 16, 16, 3))], vision)
