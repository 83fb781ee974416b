"""Gated delta nets: the chunked rule against its definition, packed rows, decoding, and rows that are sampled."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.attention import Attention
from jaxrl_llm.models.delta_net import AT_ONCE, GatedDeltaNet, chunked_delta_rule
from jaxrl_llm.models.transformer import ModelConfig, Net
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import SamplingParams
from tests.models.decoding import continued_logits, padded, trainer_logps
from tests.rollout.test_multi_turn import Echo

CONFIG = ModelConfig(
    vocab_size=31, width=16, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=24, init_scale=0.4, norm_eps=1e-3,
    mixers=(GatedDeltaNet, Attention), attention_gate=True, delta_key_heads=2, delta_value_heads=4, delta_key_dim=6,
    delta_value_dim=5, delta_conv=4,
)  # fmt: skip
NET = Net(CONFIG)
ENGINE = Engine(NET, SamplingParams(), group_size=3, max_completion_length=10, eos=(3, 11), chunk=4)


@pytest.fixture(scope="module")
def params():
    return jax.jit(NET.init)(jax.random.key(0))


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    return padded([rng.integers(0, 31, length) for length in (6, 9, 2)], "left")


def token_by_token(q, k, v, g, beta, segments):
    """The definition, in float64."""
    state, found = np.zeros((*v[:, 0].shape[:3], q.shape[-1], v.shape[-1])), []
    for t in range(q.shape[1]):
        if t:
            state[segments[:, t] != segments[:, t - 1]] = 0
        state = state * np.exp(g[:, t])[..., None, None]
        missing = (v[:, t] - np.einsum("nhrdv,nhd->nhrv", state, k[:, t])) * beta[:, t][..., None]
        state = state + k[:, t][:, :, None, :, None] * missing[..., None, :]
        found.append(np.einsum("nhrdv,nhd->nhrv", state, q[:, t]))
    return np.stack(found, axis=1), state


@pytest.mark.parametrize("length", [23, 70])
def test_the_chunked_rule_is_its_definition(length):
    """Rows of one chunk and of two, slow and fast decays, documents that end within a chunk and at its edge."""
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(2, length, 2, 6)) for _ in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v, beta = rng.normal(size=(2, length, 2, 2, 5)), rng.random((2, length, 2, 2))
    g = -rng.random((2, length, 2, 2)) * np.array([[0.01, 20.0], [1.0, 5.0]])
    segments = np.ones((2, length), int)
    segments[0, :3], segments[1, : length - 16] = 0, 2
    expected, last = token_by_token(q, k, v, g, beta, segments)
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, k, v, g, beta)]
    found, state = jax.jit(lambda *a: chunked_delta_rule(*a, chunk=16))(*arrays, jnp.asarray(segments))
    np.testing.assert_allclose(found, expected, atol=5e-6)
    np.testing.assert_allclose(state, last, atol=5e-6)


def test_prefill_and_decode_equal_the_full_forward(params, rows):
    """Tokens one by one and three at once, from prompts shorter than the convolution too."""
    tokens, segments = rows
    continuations = np.random.default_rng(2).integers(0, 31, (3, 2, 6))
    full = np.concatenate([np.repeat(tokens, 2, axis=0), continuations.reshape(6, 6)], axis=1)
    full_segments = np.concatenate([np.repeat(segments, 2, axis=0), np.ones((6, 6), int)], axis=1)
    expected = np.asarray(NET.bind(params)(full, full_segments))[:, -6:].reshape(3, 2, 6, -1)
    for at_once in (1, 3):
        found = continued_logits(NET, params, tokens, segments, continuations, at_once)
        np.testing.assert_allclose(found, expected, atol=2e-5)


def test_more_tokens_at_once_than_are_kept_are_refused(params, rows):
    many = np.zeros((3, 1, AT_ONCE + 1), int)
    with pytest.raises(ConfigError, match="decodes up to 64 tokens of a row at once, and not 65"):
        continued_logits(NET, params, *rows, many, AT_ONCE + 1)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"slots": 4, "chunk": 2, "speculative_tokens": 2}, {"slots": 5}], ids=str)
def test_the_engine_samples_it(params, rows, changes):
    """With slots that refill and proposals that fail: the log-probs are those of a forward pass."""
    tokens, segments = rows
    engine = dataclasses.replace(ENGINE, **changes)
    rollout = jax.tree.map(np.asarray, engine.generate(params, tokens, segments, jax.random.key(1)))
    inputs = Inputs(rollout.tokens, rollout.segments, prompt_width=tokens.shape[1])
    logps = np.asarray(trainer_logps(NET, params, inputs)[0]) * rollout.mask
    np.testing.assert_allclose(rollout.sample_logps, logps, atol=1e-4)


@pytest.mark.slow
def test_observations_enter_its_state(params, rows):
    """Rows of several turns, that wait while others decode."""
    tokens, segments = rows
    engine, server = dataclasses.replace(ENGINE, max_completion_length=16, eos=(2, 3, 8, 11, 19)), Echo(slow=(1, 6))
    rollout = jax.tree.map(np.asarray, engine.generate(params, tokens, segments, jax.random.key(1), turn_server=server))
    assert (rollout.lengths > rollout.mask.sum(1)).any()
    inputs = Inputs(rollout.tokens, rollout.segments, prompt_width=tokens.shape[1])
    logps = np.asarray(trainer_logps(NET, params, inputs)[0]) * rollout.mask
    np.testing.assert_allclose(rollout.sample_logps, logps, atol=1e-4)
