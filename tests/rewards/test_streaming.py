"""Graders that take rows one by one start with those that have ended; nothing else about their results changes."""

import asyncio
import contextlib
import dataclasses
import time
import types

import jax
import numpy as np
import pytest

from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.rewards.judge import Judge
from jaxrl_llm.rewards.runner import load_rewards
from jaxrl_llm.rewards.signatures import RewardError
from jaxrl_llm.rewards.streaming import StreamingRewards
from jaxrl_llm.training.setup.given import Given
from jaxrl_llm.training.setup.mesh import build_mesh
from jaxrl_llm.training.setup.run import build
from tests.rewards.judge_server import JudgeServer, asked

PROMPTS, COMPLETIONS, COLUMNS = ["p", "q", "r"], ["a", "bb", "ccc"], {"answer": [1, 2, 3]}


def by_row(function):
    function.by_row = True
    return function


def wait_for(condition):
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


def grade(rewards, order, pauses=0.0):
    """The graded batch whose rows are given in this order."""
    pending = rewards.open(PROMPTS, COLUMNS)
    for row in order:
        pending.give(row, COMPLETIONS[row], [row])
        time.sleep(pauses)
    pending.start()
    graded = pending.result()
    rewards.close()
    return graded


@by_row
async def logs(completions, completion_ids, answer, log_metric, log_extra, log_total, row_numbers):
    assert len(completions) == len(answer) == 1 and completion_ids == [list(row_numbers)]
    await asyncio.sleep(0.01 * (3 - row_numbers[0]))  # the last row ends first
    log_metric("mine/length", len(completions[0]))
    log_extra("shout", [completions[0].upper()])
    log_total("mine/rows", 1)
    return [len(completions[0]) * answer[0]]


class Row:
    name = "row"

    async def grade(self, sample):
        return {"score": len(sample.text), "answer": sample.columns["answer"]}


def test_rows_in_any_order_give_the_same(tmp_path):
    graded = grade(load_rewards([logs, Row()]), [2, 0, 1], pauses=0.02)
    np.testing.assert_array_equal(graded.rewards, [[1, 1], [4, 2], [9, 3]])
    assert graded.logged.columns == {"shout": ["A", "BB", "CCC"], "row/answer": [1, 2, 3]}
    assert graded.logged.metrics == {"mine/length": [1, 2, 3], "rewards/row/answer": [2.0]}
    assert graded.logged.totals == {"mine/rows": 3}
    at_once = load_rewards([logs, Row()]).submit(PROMPTS, COMPLETIONS, [[0], [1], [2]], COLUMNS).result()
    np.testing.assert_array_equal(at_once.rewards, graded.rewards)
    assert at_once.logged == graded.logged


def test_rows_start_at_once_and_batches_at_the_end():
    seen = []

    async def compares(completions, **_):
        seen.append(list(completions))
        return [0.0] * len(completions)

    @by_row
    async def alone(completions, **_):
        seen.append(completions[0])
        return [1.0]

    rewards = load_rewards([compares, alone])
    assert rewards.takes_rows and not load_rewards([compares, len]).takes_rows
    pending = rewards.open(PROMPTS, {})
    pending.give(1, "bb", [1])
    wait_for(lambda: seen == ["bb"])
    pending.give(0, "a", [0])
    pending.give(2, "ccc", [2])
    wait_for(lambda: len(seen) == 3)
    time.sleep(0.05)
    assert COMPLETIONS not in seen
    pending.start()
    assert pending.result().rewards.tolist() == [[0.0, 1.0]] * 3 and seen[3] == COMPLETIONS


def test_rows_behind_those_of_the_batch_are_decoded_alone():
    rewards = load_rewards([Row(), logs])
    streaming = StreamingRewards(rewards.open(PROMPTS[:2], {"answer": [1, 2]}), lambda row, ids: COMPLETIONS[row])
    streaming(2, [2])
    assert streaming.finish([[0], [1], [2]]) == COMPLETIONS
    graded = streaming.pending.result()
    rewards.close()
    assert graded.rewards[:, 1].tolist() == [1.0, 4.0]


def test_the_time_limit_counts_from_the_last_row():
    @by_row
    async def slow(completions, **_):
        await asyncio.sleep(0.2 if completions[0] != "bb" else 30)
        return [1.0]

    rewards = load_rewards(slow, timeout=0.4, on_timeout=-1.0)
    with pytest.warns(UserWarning, match=r"took more than rewards.timeout=0.4 .*row 1 was not done: .*'bb'"):
        graded = grade(rewards, [0, 1, 2], pauses=0.15)
    assert graded.rewards[:, 0].tolist() == [1.0, -1.0, 1.0]
    assert graded.logged.totals == {"rewards/slow/timeouts": 1}


def test_failing_rows_are_named():
    @by_row
    async def divide(completions, answer, log_extra):
        log_extra("seen", [completions[0]])
        return [1 / (answer[0] - 2)]

    with pytest.raises(RewardError, match=r"reward 'divide' raised ZeroDivisionError: .*, on row 1 \(.*'bb'"):
        grade(load_rewards(divide), [1, 0, 2])
    with pytest.warns(UserWarning, match="on row 1"):
        graded = grade(load_rewards(divide, on_error="none"), [1, 0, 2])
    np.testing.assert_array_equal(graded.rewards[:, 0], np.float32([-1, np.nan, 1]))
    assert graded.logged.columns == {"seen": COMPLETIONS}

    @by_row
    async def two(completions, **_):
        return [1.0, 2.0]

    with pytest.raises(RewardError, match=r"reward 'two' is called with single rows \(by_row\), and returned \[1.0, 2"):
        grade(load_rewards(two), [0, 1, 2])


def test_equal_completions_of_a_batch_are_judged_once(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with JudgeServer(lambda body: "4") as server:
        rewards = load_rewards(Judge(server.url, "m", "<{{ completion }}>"))
        for requests in (2, 4):  # the next batch asks again
            pending = rewards.open(["q"] * 3, {})
            pending.give(0, "a", [0])
            wait_for(lambda requests=requests: len(server.bodies) == requests - 1 and not server.under_way)
            time.sleep(0.05)
            pending.give(1, "a", [0])
            pending.give(2, "b", [1])
            pending.start()
            graded = pending.result()
            assert graded.rewards.tolist() == [[np.float32(0.4)]] * 3
            assert graded.logged.totals["judge/requests"] == 2 and len(server.bodies) == requests
        rewards.close()


class Watch:
    """Notes when each phase ends."""

    def __init__(self):
        self.ends = {}

    @contextlib.contextmanager
    def __call__(self, name):
        yield
        self.ends[name] = time.monotonic()


class BatchJudge(Judge):
    """A judge that gets the whole batch at the end."""

    by_row = False


@pytest.mark.slow
def test_a_judge_reads_rows_while_others_are_sampled(root, tmp_path, monkeypatch):
    """The same rewards, logs and texts as when it gets the whole batch, but for some the requests come earlier."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    config = load_config_file(f"{root / 'configs' / 'grpo.py'}:tiny")
    config.output_dir, config.rollout.chunk = str(tmp_path / "run"), 1
    runs = []
    with JudgeServer(lambda body: str(len(asked(body)) % 10)) as server, jax.set_mesh(build_mesh(config)):
        for streaming in (True, False):
            make = Judge if streaming else BatchJudge
            judge = make(server.url, "m", "{{ prompt }} <{{ completion }}>", on_failure="none")
            parts = build(config, build_mesh(config), Given(rewards=[judge]))
            watch, asked_before = Watch(), len(server.times)
            producer = parts.source.producer
            sampler = dataclasses.replace(producer.worker, stopwatch=watch)
            sampled = sampler(parts.state.params, next(producer.pipeline), jax.random.key(0))
            parts.rewards.close()
            soon = sum(moment < watch.ends["rollout"] for moment in server.times[asked_before:])
            runs.append(types.SimpleNamespace(sampled=sampled, soon=soon, all=len(server.times) - asked_before))
    first, second = runs
    assert 0 < first.soon <= first.all and second.soon == 0
    assert first.sampled.completions == second.sampled.completions
    np.testing.assert_array_equal(first.sampled.rewards, second.sampled.rewards)
    assert len(set(first.sampled.rewards[:, 0])) > 1
    assert first.sampled.logged == second.sampled.logged
