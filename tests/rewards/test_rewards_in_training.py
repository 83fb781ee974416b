"""Rewards inside a run: what functions log arrives in metrics and tables, and the settings hold."""

import socket
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as parquet
import pytest

import jaxrl_llm
from jaxrl_llm.config import ConfigError, validate
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.rewards.runner import Logged, load_rewards
from jaxrl_llm.rewards.signatures import RewardError
from jaxrl_llm.rollout.slots import Rollout
from jaxrl_llm.training.logging.reward_metrics import add_totals, join, over_processes, table_value
from jaxrl_llm.training.logging.stopwatch import Stopwatch
from jaxrl_llm.training.rollouts.worker import RolloutWorker
from jaxrl_llm.training.setup.sources import build_rewards
from tests.rewards.judge_server import JudgeServer


def tiny(root, tmp_path):
    config = load_config_file(f"{root / 'configs' / 'grpo.py'}:tiny")
    config.output_dir, config.logging.backends, config.eval.every = str(tmp_path / "run"), ("jsonl",), -1
    return config


def graded_rows(score, columns, **options):
    """The rollouts of rows that are sampled already, with these columns."""
    mesh, rows = make_mesh(devices=jax.devices()[:1]), len(columns)
    network = SimpleNamespace(config=SimpleNamespace(vision=None))
    engine, tokenizer = SimpleNamespace(group_size=1, net=network), SimpleNamespace(decode=lambda *_, **__: "said")
    rollout = Rollout(*(jnp.ones((rows, 2)) for _ in range(4)), *(jnp.ones(rows, jnp.int32) for _ in range(3)))
    worker = RolloutWorker(engine, load_rewards(score), tokenizer, mesh, 1, Stopwatch())
    examples = [{"prompt": "p", "prompt_ids": [1], **own} for own in columns]
    return worker({}, examples, jax.random.key(0), sampled=rollout, **options)


@pytest.mark.parametrize("columns", [({"answer": "1"}, {"tests": "x"}), ({}, {"tests": "x", "answer": None})])
def test_rows_with_other_columns_are_graded_together(columns):
    """Rows of streams and of a function's format may have columns that others lack, which are None to rewards."""
    seen = {}

    def score(completions, **columns):
        seen.update(columns)
        return [0.0] * len(completions)

    graded, rows = graded_rows(score, columns), len(columns)
    assert graded.rewards.shape == (rows, 1)
    for name in ("answer", "tests"):
        assert seen[name] == [own.get(name) for own in columns]


@pytest.mark.parametrize("counted", [3, 2, 0])
def test_what_fills_up_a_batch_is_not_graded(counted):
    """Of a process that has nothing else no function is called: many divide by the number of their rows."""
    calls = []

    def score(completions, answer, log_metric, log_extra, **columns):
        calls.append(answer)
        log_metric("mine/answer", sum(answer) / len(answer))
        log_extra("shout", ["!"] * len(answer))
        return answer

    graded = graded_rows(score, [{"answer": 1.0}, {"answer": 3.0}, {"answer": 3.0}], counted=counted)
    assert calls == ([[1.0, 3.0, 3.0][:counted]] if counted else [])
    np.testing.assert_array_equal(graded.rewards[:, 0], [*[1.0, 3.0, 3.0][:counted], *[np.nan] * (3 - counted)])
    assert graded.completions == ["said"] * 3 and graded.rewards.dtype == np.float32
    assert graded.logged.columns == ({"shout": ["!"] * counted + [None] * (3 - counted)} if counted else {})


@pytest.mark.slow
def test_evaluations_and_greedy_baselines_know_the_step(root, tmp_path):
    """As in TRL, whose functions divide by max_steps; also those that are called before the first step."""
    steps = []

    def late(completions, trainer_state, **columns):
        steps.append((trainer_state.global_step, trainer_state.max_steps))
        return [trainer_state.global_step / trainer_state.max_steps + len(x) for x in completions]

    config = load_config_file(f"{root / 'configs' / 'remax.py'}:tiny")
    config.output_dir, config.logging.backends, config.checkpoint.every = str(tmp_path / "run"), ("jsonl",), 0
    config.total_steps, config.optimizer.warmup_steps, config.eval.every = 1, 0, 0
    config.batch.prompts = config.eval.prompts = 2
    config.eval.samples = 1  # the samplers of evaluations are those of training
    jaxrl_llm.train(config, rewards=late)
    before, sampled, greedy, after = steps[:2], *steps[2:4], steps[4:]
    assert before == [(0, 1)] * 2 and sampled == greedy == (0, 1) and after == [(1, 1)] * 2


def test_a_missing_column_is_told_before_anything_is_sampled(root, tmp_path, monkeypatch):
    def needs(completions, answered, **_):
        return [0.0] * len(completions)

    config = tiny(root, tmp_path)
    config.eval.every = 1
    monkeypatch.setattr(RolloutWorker, "__call__", None)
    with pytest.raises(RewardError, match=r"reward 'needs' needs 'answered'.*; the closest is answer"):
        jaxrl_llm.train(config, rewards=needs)


@pytest.mark.slow
def test_a_run_with_a_judge_and_functions_that_log(root, tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    calls, steps = [], []

    class Harmony:
        name = "harmony"

        def setup(self):
            calls.append("setup")

        def close(self):
            calls.append("close")

        def grade(self, sample):
            return {"score": float(sample.text == sample.columns["answer"]), "length": len(sample.text)}

    def logs(completions, trainer_state, log_metric, log_extra, **columns):
        steps.append((trainer_state.global_step, trainer_state.max_steps))
        log_metric("mine/rows", len(completions))
        log_extra("shout", [completion.upper() for completion in completions])
        return [0.0] * len(completions)

    config = tiny(root, tmp_path)
    with JudgeServer(lambda body: "5") as server:
        judge = f"judge(url='{server.url}', model='m')"
        result = jaxrl_llm.train(config, rewards=[Harmony(), judge, logs])
    rows = config.batch.prompts * config.rollout.group_size
    assert calls == ["setup", "close"] and steps == [(0, 2), (1, 2)]
    last = result.metrics[-1]
    assert last["rewards/judge/mean"] == 0.5 and last["mine/rows"] == rows
    answered = last["judge/requests"] - last["judge/retries"]
    assert 1 <= answered <= rows and last["judge/prompt_tokens"] == 100 * answered
    table = parquet.read_table(tmp_path / "run" / "completions" / "completions_00002.parquet").to_pylist()
    assert [row["shout"] for row in table] == [row["completion"].upper() for row in table]
    assert last["rewards/harmony/length"] == pytest.approx(np.mean([row["harmony/length"] for row in table]), rel=1e-5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"on_timeout": "none"}, "nothing is late: set rewards.timeout"),
        ({"on_timeout": "later", "timeout": 1.0}, "rewards.on_timeout is 'later', but it takes stop, none or a number"),
        ({"on_timeout": "inf", "timeout": 1.0}, "rewards.on_timeout is 'inf'"),
        ({"on_error": "skip"}, "rewards.on_error is 'skip'"),
        ({"workers": -1}, "rewards.workers is -1"),
    ],
)
def test_contradictions_are_named(root, tmp_path, values, message):
    config = tiny(root, tmp_path)
    config.rewards.update(values)
    with pytest.raises(ConfigError, match=message):
        validate(config)


def test_the_settings_reach_the_rewards(root, tmp_path):
    config = tiny(root, tmp_path)
    config.rewards.update({"timeout": 5.0, "on_timeout": "-1", "on_error": "none", "workers": 3, "weights": (2.0,)})
    validate(config)
    rewards = build_rewards(config)
    assert (rewards.timeout, rewards.on_timeout, rewards.on_error, rewards.workers.count) == (5.0, -1.0, None, 3)
    assert rewards.names == ("exact_match",) and rewards.weights.tolist() == [2.0]


def test_logs_of_two_rounds_are_joined():
    held = Logged({"a": [1.0]}, {"n": 1.0}, {"x": [1, 2]})
    fresh = Logged({"a": [4.0, 4.0], "b": [2.0]}, {"n": 2.0}, {"x": [3, 4], "y": ["p", "q"]})
    joined = join(held, fresh, np.array([0, 3]), rows=2)
    assert joined.columns == {"x": [1, 4], "y": [None, "q"]}
    assert over_processes(joined) == {"a": np.float32(3.0), "b": np.float32(2.0), "n": np.float32(3.0)}


def test_totals_are_added_and_the_rest_stays():
    held = Logged({"a": [1.0]}, {"cost": 2.0}, {"text": ["x"]})
    more = Logged({"a": [5.0], "b": [1.0]}, {"cost": 3.0, "calls": 1.0}, {"text": ["y"]})
    assert add_totals(held, more) == Logged({"a": [1.0]}, {"cost": 5.0, "calls": 1.0}, {"text": ["x"]})


@pytest.mark.slow
def test_totals_include_greedy_baselines_and_evaluations(root, tmp_path):
    def paid(completions, log_total, **columns):
        log_total("paid/calls", len(completions))
        return np.arange(len(completions), dtype=float)

    config = load_config_file(f"{root / 'configs' / 'remax.py'}:tiny")
    config.output_dir, config.logging.backends, config.total_steps = str(tmp_path / "run"), ("jsonl",), 1
    config.optimizer.warmup_steps, config.eval.every = 0, 1
    first, last = jaxrl_llm.train(config, rewards=paid).metrics
    rows = config.batch.prompts * config.rollout.group_size
    assert last["paid/calls"] == rows + config.batch.prompts
    graded = config.eval.prompts * (config.eval.samples + 1)
    assert first["eval/paid/calls"] == last["eval/paid/calls"] == graded


def test_names_of_the_run_are_refused_in_logs():
    with pytest.raises(RewardError, match="logs the metric 'reward', which is the run's own; rename it"):
        over_processes(Logged({"reward": [1.0]}, {}, {}), {"reward": 0.0})


@pytest.mark.slow
def test_names_of_the_run_in_a_run(root, tmp_path, capsys):
    """Those of the rollouts are refused before the update, and those of the update told."""
    logged = ["epoch"]

    def named(completions, log_metric, **columns):
        log_metric(logged[0], 7.0)
        return np.arange(len(completions), dtype=float)

    config = tiny(root, tmp_path)
    config.total_steps = 1
    for name in ("epoch", "completions/mean_length", "step"):
        logged[0] = name
        with pytest.raises(RewardError, match=f"logs the metric '{name}', which is the run's own; rename it"):
            jaxrl_llm.train(config, rewards=named)
    for name, shown in (("entropy", False), ("mine", True)):
        logged[0], config.output_dir = name, str(tmp_path / name)
        (metrics,) = jaxrl_llm.train(config, rewards=named).metrics
        assert (metrics[name] == 7.0) == shown
        told = f"a reward function logs {name!r}, which is the run's own metric" in "".join(capsys.readouterr())
        assert told != shown


def test_table_values():
    plain = [None, True, 2, 0.5, "x", 1.5]
    assert list(map(table_value, [*plain[:-1], np.float32(1.5)])) == plain
    assert table_value({"a": [1]}) == '{"a": [1]}' and "object" in table_value(object())


@pytest.mark.slow
def test_logs_are_joined_over_processes(run_python):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    code = """
import sys
import jax
process = int(sys.argv[2])
jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, process)
from jaxrl_llm.rewards.runner import Logged
from jaxrl_llm.training.logging.reward_metrics import over_processes
own = Logged({"both": [1.0, 1.0] if process else [4.0], f"only/{process}": [2.0]}, {"total": 1.5}, {})
print({name: float(value) for name, value in sorted(over_processes(own).items())})
"""
    with ThreadPoolExecutor() as pool:
        outputs = [run.result() for run in [pool.submit(run_python, "-c", code, str(port), str(i)) for i in range(2)]]
    assert all(output.returncode == 0 for output in outputs), outputs[0].stderr + outputs[1].stderr
    expected = "{'both': 2.0, 'only/0': 2.0, 'only/1': 2.0, 'total': 3.0}\n"
    assert all(output.stdout.endswith(expected) for output in outputs), outputs[0].stdout
