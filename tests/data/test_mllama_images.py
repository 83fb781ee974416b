"""Tokens and tiles of Llama 3.2 Vision's images against transformers' own processor."""

from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast
from transformers.models.mllama.processing_mllama import MllamaProcessor

from jaxrl_llm.config import ConfigError
from jaxrl_llm.data import image_processors
from jaxrl_llm.data.image_rows import ImageReader
from jaxrl_llm.models.families import mllama
from jaxrl_llm.models.model import describe
from jaxrl_llm.models.vision.row_images import row_images
from jaxrl_llm.models.vision.tiled import seen_features
from tests.data.test_image_processor import picture
from tests.data.vl_folders import processor_of, vl_folder

# Width and height: square, wide, tall, tiny, far longer than any grid.
SIZES = [(40, 40), (50, 20), (17, 64), (1, 1), (300, 211), (60, 8), (64, 32), (16, 16), (63, 65), (200, 3)]


@pytest.fixture
def folder(tmp_path):
    return vl_folder(tmp_path / "mllama", "mllama")


def test_tokens_tiles_and_what_is_seen_are_those_of_transformers_processor(folder):
    """Images alone in a row, two with text between them, and adjacent ones."""
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    theirs, own = MllamaProcessor(processor_of("mllama"), tokenizer), image_processors.load(folder, tokenizer)
    vision = describe(folder).net.config.vision
    assert own is not None and vision is not None and own.image_id == vision.image_token
    images = [picture(*size, seed) for seed, size in enumerate(SIZES)]
    rows = [("<|begin_of_text|>a <|image|>b", [image]) for image in images]
    rows += [
        ("<|begin_of_text|><|image|>a<|image|>bc", images[1:3]),
        ("<|begin_of_text|><|image|><|image|>c", images[3:5]),
    ]
    for text, pictures in rows:
        reference = theirs(text=text, images=[pictures], return_tensors="np", add_special_tokens=False)
        ids = tokenizer(text.replace("<|image|>", own.expand(1, 1)), add_special_tokens=False)["input_ids"]
        assert ids == reference["input_ids"][0].tolist()
        made = row_images([ids], [own.pixels(pictures)], vision)
        assert made is not None and made.count.tolist() == [len(pictures)]
        tiles = made.pixels[0, : len(pictures)].reshape(len(pictures), 4, 16, 16, 3)
        np.testing.assert_array_equal(np.moveaxis(tiles, -1, 2), reference["pixel_values"][0])
        np.testing.assert_array_equal(made.grids[0, : len(pictures), 0], reference["aspect_ratio_ids"][0])
        np.testing.assert_array_equal(made.grids[0, : len(pictures), 1], reference["aspect_ratio_mask"][0].sum(-1))
        tokens, positions = np.array([ids]), np.arange(len(ids))[None]
        encoder: Any = vision.encoder
        seen = np.asarray(seen_features(tokens, np.ones_like(tokens), positions, own.image_id, made.grids, encoder))
        seen = seen.reshape(len(ids), -1, 4, encoder.features)[:, : len(pictures)]
        np.testing.assert_array_equal(
            seen, np.broadcast_to(reference["cross_attention_mask"][0][..., None], seen.shape)
        )


def test_shapes_of_grids_are_counted_as_by_the_image_processor():
    from transformers.models.mllama.image_processing_pil_mllama import get_all_supported_aspect_ratios

    for tiles in (1, 4, 6):
        assert [tuple(shape) for shape in mllama.shapes(tiles)] == get_all_supported_aspect_ratios(tiles)
    assert mllama.shapes(4) == mllama.RATIOS


def test_rows_whose_images_would_be_lost_or_misread_are_refused(folder):
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.image_folder = folder
    with pytest.raises(ConfigError, match="plain text, but this model reads images in front of the token that begins"):
        ImageReader(tokenizer).read({"prompt": "<image>what?", "images": [picture(8, 8)]}, ("prompt",))
    vision, token = describe(folder).net.config.vision, tokenizer.convert_tokens_to_ids("<|image|>")
    own = image_processors.load(folder, tokenizer)
    assert own is not None
    with pytest.raises(ConfigError, match=r"row 0 of a batch has 2 image tokens .* 1 tile should have 1, 1 each"):
        row_images([[token, 5, token]], [own.pixels([picture(8, 8)])], vision)
    with pytest.raises(ConfigError, match="row 0 of a batch has pixels alone"):
        row_images([[token]], [np.zeros((1, 64, 16, 3), np.float32)], vision)
    (folder / "preprocessor_config.json").write_text((folder / "preprocessor_config.json").read_text().replace(
        '"max_image_tiles": 4', '"max_image_tiles": 6'))  # fmt: skip
    with pytest.raises(ConfigError, match=r"has max_image_tiles = 6, and the model max_num_tiles = 4"):
        image_processors.load(folder, tokenizer)
