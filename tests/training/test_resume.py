"""A run that is killed with SIGKILL and started again equals the undisturbed one, bit for bit."""

import json
import re

import pytest

from tests.system.faults.equality import assert_same_run, metrics

REWARDS = """
import os, pathlib, signal

def sorted_prefix(completions, answer, **kwargs):
    count_call()
    return [sum(a == b for a, b in zip(c, w)) / len(w) for c, w in zip(completions, answer)]

def right_start(completions, answer, **kwargs):
    count_call()
    return [float(c[:2] == w[:2]) for c, w in zip(completions, answer)]

def count_call():
    calls = pathlib.Path("calls")
    count = int(calls.read_text()) + 1 if calls.exists() else 1
    calls.write_text(str(count))
    if count < int(os.environ.get("KILL_AT", 1000)):
        return
    checkpoints = pathlib.Path("killed/checkpoints").glob("*")
    saved = [int(path.name) for path in checkpoints if path.name.isdigit()]  # once a save in the background is complete
    logged = pathlib.Path("killed/metrics.jsonl").read_text().splitlines()
    if saved and len(logged) >= max(saved) + int(os.environ.get("MORE_STEPS", 0)):
        os.kill(os.getpid(), signal.SIGKILL)
"""

COMMON = (
    "total_steps=14", "eval.every=-1", "algorithm.beta=0.05", "checkpoint.every=4", "batch.minibatches=2",
    "batch.shuffle=true", "optimizer.learning_rate=1e-3",
)  # fmt: skip
PLAIN = ("rewards.functions=rewards.py:sorted_prefix", "algorithm.num_iterations=2")
# What else a run may carry from step to step: each of these moves before the kill and matters after it.
MEMORY = (
    "rewards.functions=rewards.py:right_start",
    "algorithm.kl_controller=adaptive", "algorithm.kl_horizon=20", "algorithm.ref_sync_steps=3",
    "algorithm.entropy_controller=adaptive", "algorithm.entropy_target=5", "algorithm.dynamic_sampling=true",
    "algorithm.max_sampling_rounds=2", "algorithm.replay_groups=3", "algorithm.loss=clip_cov(lower=0.01, fraction=0.1)",
)  # fmt: skip
SAMPLING = (
    *PLAIN, "rollout.repetition_penalty=1.2", "rollout.presence_penalty=0.2", "rollout.stop=77",
    "rollout.structured_regex=[0-9]{2,7}", "rollout.speculative_tokens=1",
)  # fmt: skip
# Up to three batches are made ahead, so that a kill finds some in the queue and one that is half made.
AHEAD = (
    "rewards.functions=rewards.py:right_start", "rollout.staleness=2", "algorithm.importance_correction=token_truncate",
    "algorithm.dynamic_sampling=true", "algorithm.max_sampling_rounds=2", "algorithm.replay_groups=3",
)  # fmt: skip

# More prompts are in flight than a step takes, so that a kill finds rows that are half sampled, by several policies.
PARTIAL = (
    "rewards.functions=rewards.py:right_start", "rollout.partial_prompts=5", "rollout.partial_tokens=3",
    "algorithm.importance_correction=token_truncate", "algorithm.dynamic_sampling=true",
    "algorithm.max_sampling_rounds=2", "algorithm.replay_groups=3",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "kill_at"),
    [
        pytest.param(AHEAD, 15, id="ahead"),
        pytest.param(AHEAD, 25, id="ahead, near the end"),
        pytest.param(PARTIAL, 18, id="partial"),
        pytest.param((*PARTIAL, "rollout.staleness=1"), 21, id="partial, ahead"),
        pytest.param(SAMPLING, 11, id="sampling"),
        pytest.param(PLAIN, 11, id="plain"),
        pytest.param(MEMORY, 21, id="memory"),
    ],
)
def test_killed_and_resumed_equals_undisturbed(run_python, root, tmp_path, monkeypatch, arguments, kill_at):
    (tmp_path / "rewards.py").write_text(REWARDS)

    def start(name):
        flags = [f"--config.{argument}" for argument in (*COMMON, *arguments, f"output_dir={name}")]
        return run_python("-m", "jaxrl_llm.train", f"--config={root / 'configs/grpo.py'}:tiny", *flags)

    whole = start("whole")
    assert whole.returncode == 0, whole.stderr
    (tmp_path / "calls").unlink()
    monkeypatch.setenv("KILL_AT", str(kill_at))
    killed = start("killed")
    assert killed.returncode == -9
    assert not (tmp_path / "killed/hf").exists()
    monkeypatch.delenv("KILL_AT")
    resumed = start("killed")
    assert resumed.returncode == 0, resumed.stderr
    assert re.search(
        "going on after step (4|8|12)", resumed.stdout
    )  # the one before, where the last save was not complete

    expected = metrics(tmp_path / "whole/metrics.jsonl")
    assert [line["step"] for line in expected] == list(range(1, 15))
    if arguments is MEMORY:  # all of it was in use when the kill came
        before = expected[:8]
        for name in ("kl_coef", "entropy_coef", "rollout/resampled_groups", "rollout/replayed_groups"):
            assert len({line[name] for line in before}) > 1, name
    assert_same_run(tmp_path / "whole", tmp_path / "killed")

    again = start("killed")
    assert again.returncode == 0, again.stderr
    assert metrics(tmp_path / "killed/metrics.jsonl") == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "kill_at"),
    [
        # Token by token a batch takes longer than an update, also where other work delays the one or the other.
        pytest.param((*AHEAD, "rollout.update_in_flight=true", "rollout.chunk=1"), 20, id="in flight"),
        pytest.param(
            (*PARTIAL, "rollout.staleness=1", "rollout.update_in_flight=true", "rollout.max_wait=0.05",
             "rollout.chunk=2"), 22, id="partial, in flight, with a longest wait",
        ),
    ],
)  # fmt: skip
def test_a_killed_run_follows_its_record_and_equals_a_run_that_does(
    run_python, root, tmp_path, monkeypatch, arguments, kill_at
):
    """What was logged before the kill is so again, and an undisturbed run that follows the record has the same bits."""
    (tmp_path / "rewards.py").write_text(REWARDS)

    def start(name, *more):
        given = (*COMMON, *arguments, f"output_dir={name}", *more)
        flags = [f"--config.{argument}" for argument in given]
        return run_python("-m", "jaxrl_llm.train", f"--config={root / 'configs/grpo.py'}:tiny", *flags)

    monkeypatch.setenv("KILL_AT", str(kill_at))
    monkeypatch.setenv("MORE_STEPS", "1")  # than the last checkpoint has: some are lost
    assert start("killed").returncode == -9
    before, record = metrics(tmp_path / "killed/metrics.jsonl"), tmp_path / "killed/arrivals.jsonl"
    lines = record.read_text()
    monkeypatch.delenv("KILL_AT")
    resumed = start("killed")
    assert resumed.returncode == 0, resumed.stderr
    assert int(re.search(r"going on after step (\d+)", resumed.stdout)[1]) < len(before)
    assert metrics(tmp_path / "killed/metrics.jsonl")[: len(before)] == before
    assert record.read_text().startswith(lines)
    arrived = [json.loads(line) for line in record.read_text().splitlines()]
    assert [line["step"] for line in arrived] == list(range(1, 15))
    assert any(len(line["policies"]) > 1 for line in arrived)  # while rows were sampled
    whole = start("whole", "rollout.arrivals=killed/arrivals.jsonl")
    assert whole.returncode == 0, whole.stderr
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
