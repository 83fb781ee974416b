"""The stopwatch: seconds by phase."""

import contextlib
import time

import pytest

from jaxrl_llm.training.logging.stopwatch import Stopwatch


@pytest.fixture
def now(monkeypatch):
    """The time in seconds, which a test moves on."""
    seconds = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: seconds[0])
    return seconds


def test_stopwatch_adds_up_and_take_resets(now):
    watch = Stopwatch()
    assert watch.take() == {}
    for seconds in (1.0, 2.0):
        with watch("rollout"):
            now[0] += seconds
        now[0] += 100.0
    with watch("update"):
        now[0] += 0.5
    assert watch.take() == {"time/rollout": 3.0, "time/update": 0.5}
    assert watch.take() == {}
    with watch("rollout"):
        now[0] += 4.0
    assert watch.take() == {"time/rollout": 4.0}
    assert watch.totals == {"rollout": 7.0, "update": 0.5}


def test_an_inner_phase_is_not_counted_twice(now):
    watch = Stopwatch()
    with watch("evaluation"):
        now[0] += 1.0
        with watch("rollout"):
            now[0] += 2.0
            with watch("reward"):
                now[0] += 4.0
        with watch("reward"):
            now[0] += 8.0
        now[0] += 16.0
    assert watch.take() == {"time/evaluation": 17.0, "time/rollout": 2.0, "time/reward": 12.0}
    with watch("update"):
        now[0] += 1.0
    assert watch.take() == {"time/update": 1.0}


def test_a_block_that_raises_is_timed(now):
    watch = Stopwatch()
    with contextlib.suppress(RuntimeError), watch("update"), watch("reward"):
        now[0] += 2.0
        raise RuntimeError("broken")
    assert watch.take() == {"time/update": 0.0, "time/reward": 2.0}


def test_stopwatch_measures_seconds():
    watch = Stopwatch()
    with watch("sleep"):
        time.sleep(0.05)
    assert 0.05 <= watch.take()["time/sleep"] < 5.0
