"""Batches that are made ahead in several processes, each of which samples and grades its own rows."""

import shutil

import pytest

from tests.system.faults.equality import assert_same_run
from tests.system.processes.test_runs import all_ended_well, command, same_runs

AHEAD = (
    "--config.rollout.staleness=2", "--config.algorithm.importance_correction=token_truncate",
    "--config.total_steps=4",
)  # fmt: skip

# Scores that are all alike in one process, or raise there, from the second batch on.
REWARDS = """
import jax

calls = []

def failing(completions, **columns):
    calls.append(1)
    if jax.process_index() == 1 and len(calls) == 3:
        raise ValueError("no key for the judge")
    return [float(len(text)) for text in completions]

def logging(completions, log_metric, log_total, **columns):
    log_metric("mine/length", sum(map(len, completions)) / len(completions))
    log_total("mine/paid", len(completions))
    return [float(sum(map(ord, text)) % 5) for text in completions]
"""


@pytest.fixture
def run(root, tmp_path, together):
    """`run(processes, devices of each, name, configuration, *flags)` trains in the folder of that name."""
    (tmp_path / "mine.py").write_text(REWARDS)

    def train(processes, devices, name, configuration, *flags):
        words = command(root, configuration, tmp_path / name, *AHEAD, *flags)
        return tmp_path / name, together(processes, *words, devices=devices)

    return train


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "devices", "flags"),
    [
        ("grpo", 2, ("--config.mesh.fsdp=4", "--config.mesh.data=1", "--config.average.every=1")),
        ("environment", 1, ("--config.eval.every=-1",)),
        ("vision_grpo", 1, ("--config.eval.every=-1",)),
        ("grpo_lora", 2, ("--config.eval.every=-1", "--config.mesh.fsdp=4", "--config.mesh.data=1")),
        ("agent", 1, ("--config.eval.every=-1",)),
    ],
)
def test_two_processes_are_one(run, name, devices, flags):
    """With one device each and with several, whose sampling and updates take turns."""
    one, ended = run(1, 2 * devices, "one", name, *flags)
    all_ended_well(ended)
    two, ended = run(2, devices, "two", name, *flags)
    all_ended_well(ended)
    rounding = 3e-4 if name == "agent" else 3e-5
    same_runs(one, two, evaluations="--config.eval.every=-1" not in flags, weights_differ=rounding)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_a_run_goes_on(run, tmp_path, name):
    """In as many processes, bit for bit, with what reward functions of each logged of the batches that wait; or in
    another number of them. With dynamic sampling the prompts that are drawn depend on that number."""
    flags = ("--config.eval.every=-1", "--config.checkpoint.keep=4")
    flags += (f"--config.rewards.functions={tmp_path}/mine.py:logging",)
    whole, ended = run(2, 1, "whole", name, *flags)
    all_ended_well(ended)
    for processes in (2, 1) if name == "grpo" else (2,):
        part = whole.with_name(f"part_{processes}")
        shutil.copytree(whole, part)
        for folder in ("checkpoints/3", "checkpoints/4", "hf"):
            shutil.rmtree(part / folder)
        all_ended_well(run(processes, 1, part.name, name, *flags)[1])
        if processes == 2:
            assert_same_run(whole, part)
        else:
            same_runs(whole, part)


@pytest.mark.slow
def test_a_reward_that_fails_in_one_process_ends_all(run, tmp_path):
    _, ended = run(2, 1, "run", "grpo", f"--config.rewards.functions={tmp_path}/mine.py:failing")
    assert [process.code for process in ended] == [2, 2], ended
    assert all("process 1 (" in process.err and "no key for the judge" in process.err for process in ended), ended


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--config.mesh.tensor=2", "but mesh.context x mesh.tensor spans several of them"),
        ("--config.environment.rollout_func=mine.py:score", "but environment.rollout_func is set"),
        ("--config.rollout.update_in_flight=true", "but rollout.update_in_flight is true"),
        ("--config.rollout.mesh=fsdp=2", "axes beside data go over several processes"),
        ("--config.rollout.mesh=tensor=2", "axes beside data go over several processes"),
    ],
)
def test_what_is_refused(run, flag, words):
    _, ended = run(2, 1, "run", "grpo", flag, "--config.mesh.data=-1")
    assert [process.code for process in ended] == [2, 2], ended
    assert all(words in process.err for process in ended), ended
