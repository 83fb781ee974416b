"""Rows that go on behind what they have sampled before: tokens and log-probs of rows without a pause."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.rollout.slots import Begun, row_keys
from tests.models.decoding import padded
from tests.rollout.test_constraints import NET, PLAIN, PROMPTS, constrained

LONG = dataclasses.replace(PLAIN, max_completion_length=24)
ENGINES = {
    "plain": LONG,
    "few slots": dataclasses.replace(LONG, slots=5, chunk=3),
    "stop strings": dataclasses.replace(constrained(("abca", "c1"), eos=()), max_completion_length=24),
    "pattern": dataclasses.replace(constrained(regex="(ab|c1)*"), max_completion_length=24, eos=()),
    "penalties": dataclasses.replace(
        LONG, sampling=SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, min_tokens=6), speculative_tokens=2
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_rows_go_on_as_if_they_had_not_been_interrupted(name):
    engine, params, key = ENGINES[name], jax.jit(NET.init)(jax.random.key(0)), jax.random.key(5)
    tokens, segments = padded(PROMPTS, "left")
    width, count = tokens.shape[1], len(PROMPTS) * engine.group_size
    expected = jax.tree.map(np.asarray, engine.generate(params, tokens, segments, key))
    assert len(set(expected.lengths.tolist())) > 1 or not expected.finished.any()
    # Of the first row nothing, of others all: whatever each had when it was interrupted.
    lengths = np.minimum(np.random.default_rng(1).integers(0, 24, count), expected.lengths).astype(np.int32)
    lengths[0], lengths[1] = 0, expected.lengths[1]
    had = np.arange(24) < lengths[:, None]
    marked = expected.sample_logps[:, width:] - 100  # of another policy: they stay as they are
    begun = Begun(
        np.asarray(jax.random.key_data(row_keys(key, 0, count))),
        np.where(had, expected.tokens[:, width:], 0),
        np.where(had, marked, 0).astype(np.float32),
        lengths,
        expected.finished & (lengths == expected.lengths),
    )
    limits = np.minimum(lengths + 7, 24)
    limits[0] = 1  # it ends with its first token, while others are read
    told = {}
    got = engine.generate(
        params, tokens, segments, key, begun=begun, limits=limits, on_finished=lambda row, own: told.update({row: own})
    )
    got = jax.tree.map(np.asarray, got)
    reached = np.minimum(expected.lengths, limits)
    np.testing.assert_array_equal(got.lengths, reached)
    np.testing.assert_array_equal(got.finished, expected.finished & (expected.lengths <= limits))
    assert told.keys() >= set(np.flatnonzero(lengths < expected.lengths))  # others have ended before
    assert all(own == got.tokens[row, width : width + reached[row]].tolist() for row, own in told.items())
    here = np.arange(24) < reached[:, None]
    np.testing.assert_array_equal(got.tokens[:, width:], np.where(here, expected.tokens[:, width:], 0))
    np.testing.assert_array_equal(got.mask[:, width:], here)
    expected_logps = np.where(had, marked, np.where(here, expected.sample_logps[:, width:], 0))
    np.testing.assert_allclose(got.sample_logps[:, width:], expected_logps, atol=1e-4)
    np.testing.assert_array_equal(got.sample_logps[:, width:][had], marked[had])
