"""Llama 3.2 Vision as it is published, and which tokens see its images."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, MllamaConfig
from transformers.models.mllama.processing_mllama import get_cross_attention_token_mask

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.families import family_of
from jaxrl_llm.models.files.new_tokens import with_tokens
from jaxrl_llm.models.mixers.cross_attention import CrossAttention
from jaxrl_llm.models.model import load_model
from jaxrl_llm.models.vision.tiled import TiledConfig, seen_features
from tests.data.vl_folders import vl_folder
from tests.models.images import (
    IMAGE_TOKEN,
    image_documents,
    logits_alone,
    make_vision_oracle,
    padded_images,
)  # fmt: skip

# config.json of meta-llama/Llama-3.2-11B-Vision-Instruct, but for entries about generation.
PUBLISHED: dict[str, Any] = {
    "architectures": ["MllamaForConditionalGeneration"], "image_token_index": 128256, "model_type": "mllama",
    "text_config": {
        "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38], "dropout": 0, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072,
        "model_type": "mllama_text_model", "num_attention_heads": 32, "num_hidden_layers": 40,
        "num_key_value_heads": 8, "pad_token_id": 128004, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "tie_word_embeddings": False, "use_cache": True, "vocab_size": 128256,
    },
    "vision_config": {
        "attention_heads": 16, "hidden_act": "gelu", "hidden_size": 1280, "image_size": 560,
        "intermediate_layers_indices": [3, 7, 15, 23, 30], "intermediate_size": 5120, "max_num_tiles": 4,
        "model_type": "mllama_vision_model", "norm_eps": 1e-05, "num_channels": 3, "num_global_layers": 8,
        "num_hidden_layers": 32, "patch_size": 14, "supported_aspect_ratios": [
            [1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1],
        ],
        "vision_output_dim": 7680,
    },
}  # fmt: skip


def test_a_published_config():
    family = family_of(PUBLISHED)
    config = family.to_config(PUBLISHED)
    encoder = config.vision.encoder
    assert (encoder.features, encoder.features_width, encoder.tiles, encoder.ratios) == (1601, 7680, 4, 8)
    assert (config.vocab_size, config.embeddings, config.vision.image_token) == (128256, 128264, 128256)
    reading = [layer for layer, kind in enumerate(config.layer_configs) if kind.mixer is CrossAttention]
    assert reading == PUBLISHED["text_config"]["cross_attention_layers"] and config.rope.kind == "llama3"
    written = family.from_config(config, PUBLISHED)
    for part in ("text_config", "vision_config"):
        assert written[part] == written[part] | PUBLISHED[part]
    assert written == written | {name: x for name, x in PUBLISHED.items() if not name.endswith("_config")}
    assert all(family.to_config(family.from_config(config, base)) == config for base in (PUBLISHED, None))


def test_entries_that_are_left_out_are_those_of_transformers():
    config = family_of(PUBLISHED).to_config({"model_type": "mllama"})
    whole = MllamaConfig()
    text, encoder, own = whole.text_config, whole.vision_config, config.vision.encoder
    assert [config.vocab_size, config.width, config.layers, config.ffn, config.heads, config.kv_heads] == [
        text.vocab_size, text.hidden_size, text.num_hidden_layers, text.intermediate_size, text.num_attention_heads,
        text.num_key_value_heads,
    ]  # fmt: skip
    assert (config.norm_eps, config.rope.theta) == (text.rms_norm_eps, text.rope_parameters["rope_theta"])
    assert [own.width, own.layers, own.global_layers, own.heads, own.ffn, own.image_size, own.patch_size] == [
        encoder.hidden_size, encoder.num_hidden_layers, encoder.num_global_layers, encoder.attention_heads,
        encoder.intermediate_size, encoder.image_size, encoder.patch_size,
    ]  # fmt: skip
    assert (own.norm_eps, own.features_width, own.tiles) == (
        encoder.norm_eps, encoder.vision_output_dim, encoder.max_num_tiles,
    )  # fmt: skip
    assert list(own.read_layers) == encoder.intermediate_layers_indices
    assert config.vision.image_token == whole.image_token_index


@pytest.mark.parametrize(
    ("part", "entry", "value", "message"),
    [
        ("text_config", "model_type", "llama", "text_config.model_type = 'llama'"),
        ("text_config", "tie_word_embeddings", True, "text_config.tie_word_embeddings = True"),
        ("text_config", "cross_attention_layers", [40], r"cross_attention_layers = \[40\] .* of 0 to 39"),
        ("text_config", "hidden_act", "gelu", "hidden_act = 'gelu'"),
        ("vision_config", "hidden_act", "relu", "vision_config.hidden_act = 'relu'"),
        ("vision_config", "image_size", [560, 448], r"vision_config.image_size = \[560, 448\] .* squares"),
        ("vision_config", "attention_heads", 7, "vision_config.hidden_size = 1280 .* num_attention_heads = 7"),
        ("vision_config", "intermediate_layers_indices", [7, 3], r"indices = \[7, 3\] .* of 0 to 31"),
        ("vision_config", "max_num_tiles", 6, "supported_aspect_ratios = "),
        ("vision_config", "vision_output_dim", 1280, "vision_output_dim = 1280 .* 7680"),
        (None, "image_token_index", 128264, "image_token_index = 128264 .* ids of tokens"),
    ],
)
def test_entries_that_mean_another_network_are_refused(part, entry, value, message):
    hf = PUBLISHED | ({entry: value} if part is None else {part: PUBLISHED[part] | {entry: value}})
    with pytest.raises(ConfigError, match=message):
        family_of(hf).to_config(hf)


def test_a_score_head_is_refused():
    with pytest.raises(ConfigError, match="models of this type have no head 'score' here"):
        family_of(PUBLISHED).to_config(PUBLISHED, head="score")


def test_tokens_see_the_images_of_their_document():
    """The last one, and those adjacent to it, as the spans of transformers' processor; in packed rows their own."""
    rng, encoder = np.random.default_rng(0), TiledConfig(image_size=2, patch_size=1, tiles=3)
    for _ in range(5):
        parts = [np.where(rng.random(size) < 0.4, IMAGE_TOKEN, 5) for size in (6, 9)]
        counts = [int((part == IMAGE_TOKEN).sum()) for part in parts]
        tokens, tiles = np.concatenate(parts), rng.integers(1, 4, sum(counts))
        segments = np.repeat([1, 2], [6, 9])
        grids = np.zeros((1, sum(counts) + 2, 2), np.int32)
        grids[0, : len(tiles)] = np.stack([tiles, tiles], axis=-1)
        positions = np.concatenate([np.arange(6), np.arange(9)])
        found = seen_features(tokens[None], segments[None], positions[None], IMAGE_TOKEN, grids, encoder)
        expected = np.zeros((15, grids.shape[1], 3, encoder.features), bool)
        for start, part, first in zip((0, 6), parts, (0, counts[0]), strict=True):
            for number, (begin, end) in enumerate(get_cross_attention_token_mask(part.tolist(), IMAGE_TOKEN)):
                end = len(part) if end == -1 else end
                expected[start + begin : start + end, first + number, : tiles[first + number]] = True
        np.testing.assert_array_equal(np.asarray(found)[0], expected.reshape(15, -1))


@pytest.mark.slow
def test_text_before_an_image_does_not_see_it(tmp_path):
    """In transformers it sees all features of all images, equally; where a text begins with its image both agree."""
    documents = image_documents((1, 0), "mllama")
    tokens, segments, images = padded_images(documents, "right")
    make_vision_oracle("mllama").save_pretrained(tmp_path)
    model = load_model(tmp_path)
    logits = np.asarray(model(tokens, segments, images=images))
    other = np.asarray(model(tokens, segments, images=dataclasses.replace(images, pixels=-images.pixels)))
    place = int(np.argmax(documents[0].tokens == IMAGE_TOKEN))
    np.testing.assert_array_equal(logits[0, :place], other[0, :place])
    assert np.abs(logits[0, place:] - other[0, place:]).max(axis=-1).min() > 1e-4
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="eager").eval()
    whole = documents[0]._replace(tokens=documents[0].tokens[place:])
    tokens, segments, images = padded_images([whole])
    expected = logits_alone(plain, whole)
    np.testing.assert_allclose(np.asarray(model(tokens, segments, images=images))[0], expected, atol=2e-5)
    difference = logits_alone(plain, documents[0]) - logits[0, : len(documents[0].tokens)]
    assert np.abs(difference[:place]).max() > 1e-3


@pytest.mark.slow
def test_without_images_the_layers_that_read_them_are_skipped(tmp_path):
    """As in transformers; nothing of them is computed."""
    oracle = make_vision_oracle("mllama")
    oracle.save_pretrained(tmp_path)
    model, (document,) = load_model(tmp_path), image_documents((0,), "mllama")
    tokens = document.tokens[None]
    np.testing.assert_allclose(np.asarray(model(tokens))[0], logits_alone(oracle, document), atol=2e-5)
    grads = jax.grad(lambda params: model.net.bind(params)(tokens).sum())(model.params)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(grads["cross_layers"]))
    assert any(torch.tensor(np.asarray(x)).any() for x in jax.tree.leaves(grads["layers"]))


@pytest.mark.slow
def test_new_tokens_are_refused(tmp_path):
    """They would have the ids of tokens that are read and never sampled."""
    model = load_model(vl_folder(tmp_path / "mllama", "mllama"), init_key=jax.random.key(0))
    with pytest.raises(ConfigError, match="ids behind its vocabulary are of tokens that are never sampled"):
        with_tokens(model, ["<new>"])
