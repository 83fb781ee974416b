"""Multi-turn rollouts: observation tokens are in no mask, and the policy samples on behind them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.rollout import engine as engine_module
from jaxrl_llm.rollout import multi_turn
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.multi_turn import slots_to_read
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.tools.plan.sampling import ScannedEngine
from tests.models.decoding import logits_of, padded, trainer_logps
from tests.rollout.test_engine import ENGINE, NET, PROMPTS

WIDTH, C = 7, 24


@pytest.fixture(scope="module")
def params():
    return jax.jit(NET.init)(jax.random.key(0))


class Echo:
    """Answers each row with its own last tokens, at most `turns` times, some rows later than others."""

    def __init__(self, turns: int = 2, words: int = 3, slow=()):
        self.turns, self.words, self.slow = turns, words, set(slow)
        self.submitted: dict[int, list[list[int]]] = {}
        self.open: dict[int, list[int] | None] = {}

    def submit(self, row, tokens):
        self.submitted.setdefault(row, []).append(tokens)
        over = len(self.submitted[row]) > self.turns
        self.open[row] = None if over else [1 + token % 2 for token in tokens[-self.words :]]

    def poll(self, wait):
        ready = [row for row in self.open if row not in self.slow] or (list(self.open)[:1] if wait else [])
        return {row: self.open.pop(row) for row in ready}


def sample_rows(params, server, kind=Engine, **changes):
    engine = kind(**vars(ENGINE) | {"max_completion_length": C} | changes)
    tokens, segments = padded([[5] * WIDTH, *PROMPTS], "left")
    rollout = engine.generate(params, tokens[1:], segments[1:], jax.random.key(0), 0, server)
    return jax.tree.map(np.asarray, rollout)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"chunk": 3}, {"chunk": 2, "slots": 5}], ids=str)
def test_observation_tokens_are_not_learned(params, changes):
    server = Echo(slow=(1, 6))
    rollout = sample_rows(params, server, **changes)
    assert len(server.submitted) >= 8 and max(map(len, server.submitted.values())) == 3
    for number, completions in server.submitted.items():
        row, mask = rollout.tokens[number, WIDTH:], rollout.mask[number, WIDTH:]
        length, start = rollout.lengths[number], 0
        for turn, completion in enumerate(
            completions
        ):  # the row holds the turns that were submitted, with the observations between
            assert row[: len(completion)].tolist() == completion
            observation = [1 + token % 2 for token in completion[-3:]]
            assert (mask[start : len(completion)] == 1).all()
            end = len(completion) + len(observation)
            if turn < 2 and end < C:
                assert row[len(completion) : end].tolist() == observation
                assert (mask[len(completion) : end] == 0).all()
                start = end
        assert (mask[length:] == 0).all()
        assert rollout.segments[number, WIDTH:].sum() == length
    inputs = Inputs(jnp.asarray(rollout.tokens), jnp.asarray(rollout.segments), prompt_width=WIDTH)
    logps, _ = trainer_logps(NET, params, inputs)
    np.testing.assert_allclose(rollout.sample_logps, logps * rollout.mask, atol=1e-4)


@pytest.mark.slow
def test_turns_do_not_depend_on_the_schedule(params):
    one = sample_rows(params, Echo(), chunk=24)
    other = sample_rows(params, Echo(slow=range(0, 12, 2)), chunk=2, slots=4)
    for name in ("tokens", "segments", "mask", "lengths", "finished"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Engine, ScannedEngine])
@pytest.mark.parametrize("setting", [{"chunk": 24, "speculative_tokens": 2}, {"chunk": 2, "slots": 5}], ids=str)
def test_many_observation_tokens_are_read_at_once(params, kind, setting, monkeypatch):
    """Four of a row at a time, in rows that have them alone: the rows are those that are given them one by one."""
    one_by_one = sample_rows(params, Echo(words=9, slow=(1, 6)), kind, **setting | {"speculative_tokens": 0})
    real, reads = engine_module.read_observations, []
    monkeypatch.setattr(engine_module, "read_observations", lambda *args: reads.append(args[4].shape[1]) or real(*args))
    monkeypatch.setattr(engine_module, "READ", 4)
    monkeypatch.setattr(engine_module, "MIN_TOKENS", 2)
    monkeypatch.setattr(multi_turn, "MAX_ROWS", 4)
    at_once = sample_rows(params, Echo(words=9, slow=(1, 6)), kind, **setting)
    assert len(set(reads)) > 1
    for name in ("tokens", "segments", "mask", "lengths", "finished"):
        np.testing.assert_array_equal(getattr(at_once, name), getattr(one_by_one, name), err_msg=name)
    np.testing.assert_allclose(at_once.sample_logps, one_by_one.sample_logps, atol=1e-5)
    assert (at_once.lengths - 1).sum() <= at_once.steps.sum()


def test_which_slots_read_next():
    """Those with many given tokens, a few of each shard at a time; a place that none takes is past the end."""
    given = np.array([[0, 9, 3, 64, 8], [7, 7, 7, 7, 8]])
    np.testing.assert_array_equal(slots_to_read(given, 8), [[1, 3, 4, 5], [4, 5, 5, 5]])
    assert slots_to_read(np.full((2, 3), 7), 8) is None
    assert slots_to_read(np.full((1, 99), 70), 8).tolist() == [list(range(8))]


@pytest.mark.slow
def test_an_observation_without_room_ends_its_row(params):
    server = Echo(turns=99, words=9)
    rollout = sample_rows(params, server, chunk=24)
    truncated = ~rollout.finished
    assert truncated.any()
    for number in np.flatnonzero(truncated):
        completion = server.submitted.get(number, [[]])[-1]
        assert rollout.lengths[number] in (len(completion), C)
    assert (rollout.lengths <= C).all()


@pytest.mark.slow
def test_a_silent_server_changes_nothing(params):
    class Silent(Echo):
        def submit(self, row, tokens):
            self.open[row] = None

    silent, plain = sample_rows(params, Silent(), chunk=24), sample_rows(params, None, chunk=24)
    jax.tree.map(np.testing.assert_array_equal, silent._replace(steps=0), plain._replace(steps=0))


@pytest.mark.slow
def test_greedy_turns(params):
    rollout = sample_rows(params, Echo(), sampling=SamplingParams(0.0), chunk=24)
    hidden = logits_of(NET, params, rollout.tokens, rollout.segments).argmax(-1)
    sampled = rollout.mask > 0
    np.testing.assert_array_equal(np.roll(hidden, 1, axis=1)[sampled], rollout.tokens[sampled])
