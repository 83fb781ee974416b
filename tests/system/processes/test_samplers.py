"""Runs of which some processes only sample: the bits of one process, whoever is killed and when."""

import random
import signal
import time

import pytest

from tests.system.faults.equality import assert_same_run
from tests.system.processes.conftest import finish, start, wait_for_lines

LIMITS = ("processes.heartbeat_seconds=60",)


def command(root, folder, *flags, steps=6, name="async_grpo"):
    named = ("eval.every=-1", "checkpoint.every=2", f"total_steps={steps}", f"output_dir={folder}", *flags)
    words = [f"--config.{flag}" for flag in named]
    return ("-m", "jaxrl_llm.train", f"--config={root / 'configs'}/{name}.py:tiny", *words)


@pytest.fixture
def alone(root, tmp_path, run_python, monkeypatch):
    """The folder of the same run in one process, of so many devices of which one samples."""

    def run(devices, *flags, **options):
        # Sums of XLA's CPU depend on the number of its threads, which run_python sets: the others get as many.
        monkeypatch.setenv("NPROC", str(2 * devices))
        done = run_python(*command(root, tmp_path / "whole", "rollout.devices=1", *flags, **options), devices=devices)
        assert done.returncode == 0, done.stderr
        return tmp_path / "whole"

    return run


@pytest.mark.slow
def test_two_train_and_two_sample(root, tmp_path, alone):
    """As one process of three devices, of which one samples."""
    whole = alone(devices=3)
    ended = finish(start(4, tmp_path, command(root, "run", "rollout.processes=2", *LIMITS)), 300)
    assert [process.code for process in ended] == [0] * 4, [process.err[-2000:] for process in ended]
    assert_same_run(whole, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo_lora", "vision_grpo", "gigpo", "remax", "distill"])
def test_what_a_sampler_makes_besides_texts(root, tmp_path, alone, name):
    """Adapters, images, turns of episodes, greedy completions, and rows that a teacher reads."""
    flags = "rollout.staleness=1", "algorithm.importance_correction=token_truncate"
    whole = alone(2, *flags, steps=3, name=name)
    words = command(root, "run", "rollout.processes=1", *flags, *LIMITS, steps=3, name=name)
    ended = finish(start(2, tmp_path, words), 300)
    assert [process.code for process in ended] == [0] * 2, [process.err[-2000:] for process in ended]
    assert_same_run(whole, tmp_path / "run")


@pytest.mark.slow
def test_two_that_train_hold_the_same_rows(root, tmp_path, alone):
    mesh = "mesh.data=1", "mesh.tensor=2"
    whole = alone(3, *mesh)
    ended = finish(start(3, tmp_path, command(root, "run", "rollout.processes=1", *mesh, *LIMITS)), 300)
    assert [process.code for process in ended] == [0] * 3, [process.err[-2000:] for process in ended]
    assert_same_run(whole, tmp_path / "run")


@pytest.mark.slow
def test_twenty_kills_over_both_roles(root, tmp_path, alone):
    """Learner and samplers are killed in turn, ten times each, and started again beside those that are there."""
    whole, run = alone(devices=2, steps=80), tmp_path / "run"
    words = command(root, "run", "rollout.processes=2", *LIMITS, steps=80)
    processes, pause = start(3, tmp_path, words), random.Random(0)
    for kill in range(20):
        wait_for_lines(run / "metrics.jsonl", 3 * kill + 2, processes)
        time.sleep(pause.random())
        index = (1, 0, 2, 0)[kill % 4]
        processes[index].send_signal(signal.SIGKILL)
        processes[index].communicate()
        place = {"JAXRL_COORDINATOR": "localhost:1", "JAXRL_PROCESS_COUNT": "3", "JAXRL_PROCESS_INDEX": str(index)}
        (processes[index],) = start(1, tmp_path, words, [place])
    ended = finish(processes, 300)
    assert [process.code for process in ended] == [0] * 3, [process.err[-2000:] for process in ended]
    assert_same_run(whole, run)


@pytest.mark.slow
def test_an_error_of_a_sampler_ends_all(root, tmp_path):
    (tmp_path / "mine.py").write_text("def score(completions, **kwargs):\n    raise ValueError('no judge')\n")
    ended = finish(
        start(2, tmp_path, command(root, "run", "rollout.processes=1", "rewards.functions=mine.py:score")), 200
    )
    assert [process.code for process in ended] == [2, 2], [process.err[-2000:] for process in ended]
    assert "sampler 0 of 1, which was to make the batch of step 1" in ended[0].err and "no judge" in ended[0].err
    assert "no judge" in ended[1].err


@pytest.mark.slow
def test_a_sampler_that_hangs_is_waited_for_and_then_named(root, tmp_path):
    """Stopped for a while it goes on as if nothing had been; for longer than the limit, the learners end."""
    words = command(root, "run", "rollout.processes=1", "processes.heartbeat_seconds=15", steps=1000)
    processes = start(2, tmp_path, words)
    wait_for_lines(tmp_path / "run/metrics.jsonl", 1, processes)
    processes[1].send_signal(signal.SIGSTOP)
    time.sleep(4)
    assert processes[0].poll() is None
    processes[1].send_signal(signal.SIGCONT)
    lines = (tmp_path / "run/metrics.jsonl").read_bytes().count(b"\n")
    wait_for_lines(tmp_path / "run/metrics.jsonl", lines + 3, processes)
    processes[1].send_signal(signal.SIGSTOP)
    processes[0].wait(120)
    processes[1].send_signal(signal.SIGCONT)
    ended = finish(processes, 100)
    assert [process.code for process in ended] == [1, 1], [process.err[-2000:] for process in ended]
    assert "sampler 0 of 1, which was to make the batch of step" in ended[0].err
    assert "shows no sign of life" in ended[0].err and "the learners have ended: sampler 0 of 1" in ended[1].err


@pytest.mark.slow
def test_a_sampler_whose_reward_never_returns_ends_itself(root, tmp_path):
    """It gives signs of life, as a thread of its own does; its watchdog sees that nothing is made."""
    (tmp_path / "mine.py").write_text("import time\n\ndef score(completions, **kwargs):\n    time.sleep(1000)\n")
    words = command(
        root, "run", "rollout.processes=1", "rewards.functions=mine.py:score", "watch.hang_seconds=20",
        "processes.heartbeat_seconds=15",
    )  # fmt: skip
    ended = finish(start(2, tmp_path, words), 200)
    assert all(process.code for process in ended), [process.err[-2000:] for process in ended]
    assert "no progress for" in ended[1].err and "the run hangs in reward" in ended[1].err
