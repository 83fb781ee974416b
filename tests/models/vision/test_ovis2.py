"""Ovis2's images of several tiles, and the tokens that begin, part and end them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.model import load_model
from tests.models.images import (
    IMAGE_TOKEN,
    MARKS,
    TILE,
    TILE_TOKENS,
    Document,
    image_documents,
    logits_alone,
    make_vision_oracle,
    padded_images,
)

START, WHOLE, COLUMN, ROW, END = MARKS
ATOMS = [IMAGE_TOKEN] * TILE_TOKENS


@pytest.fixture(scope="module")
def oracle():
    return make_vision_oracle("ovis2")


@pytest.fixture(scope="module")
def model(oracle, tmp_path_factory):
    path = tmp_path_factory.mktemp("ovis2")
    oracle.save_pretrained(path)
    return load_model(path)


@pytest.mark.slow
def test_an_image_of_a_grid_of_tiles(oracle, model):
    """Its marks are visual words, as in transformers, in rows beside one without images."""
    tiles = np.random.default_rng(0).normal(size=(5, *TILE)).astype(np.float32)
    image = [START, *ATOMS, WHOLE, *ATOMS, COLUMN, *ATOMS, ROW, *ATOMS, COLUMN, *ATOMS, END]
    first = Document(np.array([1, 2, *image, 3, 4]), list(tiles), image_documents((1,), "ovis2")[0].rows)
    documents = [first, *image_documents((1, 0), "ovis2")]
    tokens, segments, images = padded_images(documents)
    logits = np.asarray(model(tokens, segments, images=images))
    for row, document in enumerate(documents):
        np.testing.assert_allclose(logits[row][segments[row] > 0], logits_alone(oracle, document), atol=2e-5)


# Tokens of a row with one tile, and the numbers of their features, of which the tile has 9 and the marks the next 5.
MARKED = [
    ([1, START, *ATOMS, WHOLE, END, 5], [-1, 9, *range(9), 10, 13, -1]),
    ([START, *ATOMS, END, 5, 6], [9, *range(9), 13, -1, -1]),
    # Those that a completion has behind an image, or in front of image tokens without a tile.
    ([START, *ATOMS, WHOLE, END, END, WHOLE, START, IMAGE_TOKEN], [9, *range(9), 10, 13, -1, -1, -1, -1]),
    ([START, *ATOMS, END, WHOLE], [9, *range(9), 13, -1]),
]


@pytest.mark.parametrize(("row", "expected"), MARKED)
def test_marks_are_features_where_they_belong_to_an_image(model, row, expected):
    tile = Document(np.array(row), [np.zeros(TILE, np.float32)], image_documents((1,), "ovis2")[0].rows)
    tokens, segments, images = padded_images([tile])
    vision = model.net.bind(model.params).vision
    size = images.pixels.shape[1] // 4
    images = jax.tree.map(jnp.asarray, images)
    found = vision.place(jnp.asarray(tokens), segments, np.arange(len(row))[None], size + len(MARKS), images).index
    expected = [x if x < TILE_TOKENS else x - TILE_TOKENS + size for x in expected]
    np.testing.assert_array_equal(found[0], expected)
