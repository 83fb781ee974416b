"""Borders: rows go on by other parameters, each token drawn by those of its time, or end where they are."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxrl_llm.rollout.borders import Border
from jaxrl_llm.rollout.sampling import SamplingParams, sample
from jaxrl_llm.rollout.slots import Begun, row_keys
from tests.models.decoding import decode, padded, prefill, row_caches
from tests.rollout.test_engine import ENGINE, NET, PROMPTS

C = 16
LONG = dataclasses.replace(ENGINE, max_completion_length=C, chunk=4)
ENGINES = {
    "plain": LONG,
    "few slots, speculative tokens": dataclasses.replace(LONG, slots=5, chunk=3, speculative_tokens=2),
}
TOKENS, SEGMENTS = padded(PROMPTS, "left")
WIDTH, K = TOKENS.shape[1], ENGINE.group_size
ROWS = len(PROMPTS) * K
KEY = jax.random.key(5)


@functools.cache
def policies():
    """Three, made when a test asks for them: every process of the default run imports this file."""
    return [jax.jit(NET.init)(jax.random.key(number)) for number in range(3)]


def sampled(engine, on_border, **others):
    return jax.tree.map(
        np.asarray, engine.generate(policies()[0], TOKENS, SEGMENTS, KEY, on_border=on_border, **others)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "few slots, speculative tokens"])
def test_each_token_is_drawn_by_the_policy_of_its_time_behind_the_caches_that_are_there(name):
    """A token enters its cache by the policy that draws the next one, and keys and values of before stay."""
    engine, swaps, asked = ENGINES[name], [], []

    def on_border(lengths, finished):
        asked.append(lengths)
        if len(asked) not in (2, 4):
            return Border()
        swaps.append(lengths)
        return Border(policies()[len(swaps)])

    rollout = sampled(engine, on_border)
    versions = sum((np.arange(C) >= start[:, None]).astype(int) for start in swaps)
    assert max(len(set(versions[row, :length])) for row, length in enumerate(rollout.lengths)) == 3
    assert (asked[-1] <= rollout.lengths).all()
    keys, differs = row_keys(KEY, 0, ROWS), 0.0
    for row in range(ROWS):
        prompt, segments = (x[row // K][None] for x in (TOKENS, SEGMENTS))
        logits, cache = prefill(NET, policies()[0], prompt, segments)
        logits, caches = logits[:, -1], row_caches(NET, cache, 1, C)
        for place in range(rollout.lengths[row]):
            if place:
                newest = rollout.tokens[row, WIDTH + place - 1].reshape(1, 1, 1)
                every = [decode(NET, policy, newest, segments, cache, caches, place - 1) for policy in policies()]
                logits, caches = every[versions[row, place]]
                logits = logits.reshape(1, -1)
                differs = max(differs, float(abs(jax.nn.log_softmax(every[0][0]) - jax.nn.log_softmax(logits)).max()))
            uniform = jax.random.uniform(jax.random.fold_in(keys[row], place))
            token, logp = sample(logits, uniform[None], SamplingParams())
            assert int(token[0]) == rollout.tokens[row, WIDTH + place]
            np.testing.assert_allclose(rollout.sample_logps[row, WIDTH + place], logp[0], atol=1e-5)
    assert differs > 1  # the policies are not alike


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_rows_that_end_at_a_border_keep_what_they_have(name):
    """Also those without a slot, whether they have begun or not; what they go on to is that of rows without a pause."""
    whole, told, begun, ended = sampled(LONG, None), [], None, 0

    def on_border(lengths, finished):
        told.append((lengths, finished))
        return Border(ends=len(told) == 2)

    while begun is None or not (begun.finished | (begun.lengths == C)).all():
        told.clear()
        got = sampled(ENGINES[name], on_border, begun=begun)
        if len(told) == 2:
            ended += 1
            np.testing.assert_array_equal(got.lengths, told[-1][0])
            assert got.finished[told[-1][1]].all()  # of a row without a slot it is not known yet
        assert begun is None or (got.lengths >= begun.lengths).all()
        here = np.arange(C) < got.lengths[:, None]
        np.testing.assert_array_equal(got.mask[:, WIDTH:], here)
        np.testing.assert_array_equal(got.tokens[:, WIDTH:], np.where(here, whole.tokens[:, WIDTH:], 0))
        expected = np.where(here, whole.sample_logps[:, WIDTH:], 0)
        np.testing.assert_allclose(got.sample_logps[:, WIDTH:], expected, atol=1e-4)
        begun = Begun(
            np.asarray(jax.random.key_data(row_keys(KEY, 0, ROWS))),
            got.tokens[:, WIDTH:], got.sample_logps[:, WIDTH:], got.lengths, got.finished,
        )  # fmt: skip
    assert ended >= 2
    np.testing.assert_array_equal(begun.lengths, whole.lengths)
