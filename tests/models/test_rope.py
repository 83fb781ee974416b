"""Rotary frequencies against transformers, and rows longer than the original length."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.families import rotary
from jaxrl_llm.models.rope import Rope, check_length, dynamic_frequencies, frequencies, rotate

ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.3, "factor": 2.0},
    "yarn-without-length": {"rope_type": "yarn", "factor": 4.0},
    "yarn-mscale": {
        "rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707, "beta_fast": 16, "beta_slow": 2,
        "original_max_position_embeddings": 4096,
    },
    "yarn-attention-factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25, "truncate": False},
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_equal_those_of_transformers(name):
    config = LlamaConfig(head_dim=64, max_position_embeddings=32768, rope_parameters=ROPES[name] | {"rope_theta": 5e5})
    rope = rotary.read({"rope_parameters": ROPES[name] | {"rope_theta": 5e5}, "max_position_embeddings": 32768})["rope"]
    expected, scale = ROPE_INIT_FUNCTIONS[rope.kind](config, torch.device("cpu"))
    np.testing.assert_allclose(frequencies(rope, 64), expected.numpy(), rtol=2e-6)
    assert rope.attention_factor == pytest.approx(scale, rel=1e-12)


def test_dynamic_frequencies_follow_the_length_of_a_row():
    parameters = ROPES["dynamic"] | {"rope_theta": 1e4}
    config = LlamaConfig(head_dim=32, max_position_embeddings=16, rope_parameters=parameters)
    rope = Rope(1e4, "dynamic", 2.0, 16)
    for length in (4, 16, 17, 40):
        expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=length)
        np.testing.assert_allclose(dynamic_frequencies(rope, 32, jnp.array(length)), expected.numpy(), rtol=1e-5)
    np.testing.assert_allclose(dynamic_frequencies(rope, 32, jnp.array(5)), frequencies(rope, 32), rtol=1e-6)


def test_rows_that_grow_beyond_the_original_length_are_not_sampled():
    check_length(Rope(1e4, "dynamic", 2.0, 16), 16)
    check_length(Rope(1e4, "yarn", 2.0, 16), 1000)
    with pytest.raises(ConfigError, match="rows of up to 17 cannot be sampled"):
        check_length(Rope(1e4, "dynamic", 2.0, 16), 17)


def test_rotation_by_hand():
    """One pair of dimensions turns by position x frequency; the dimensions beyond the waves stay."""
    x = jnp.array([1.0, 0.0, 5.0, 6.0])[None, None]  # one token, one head
    found = rotate(x, jnp.array([3]), jnp.array([0.5]))[0, 0]
    np.testing.assert_allclose(found, [np.cos(1.5), np.sin(1.5), 5.0, 6.0], rtol=1e-6)
    scaled = rotate(x, jnp.array([3]), jnp.array([0.5]), 2.0)[0, 0]
    np.testing.assert_allclose(scaled, [2 * np.cos(1.5), 2 * np.sin(1.5), 5.0, 6.0], rtol=1e-6)
    still = rotate(x, jnp.array([3]), jnp.array([0.0, 0.0]))[0, 0]
    np.testing.assert_array_equal(still, x[0, 0])


def test_entries_are_written_as_they_are_read():
    for parameters in ROPES.values():
        hf = {"rope_parameters": parameters | {"rope_theta": 5e5}, "max_position_embeddings": 32768}
        fields = rotary.read(hf)
        config = type("Config", (), {"local_rope": None, **fields})
        assert rotary.read({"max_position_embeddings": 32768} | rotary.write(config)) == fields
