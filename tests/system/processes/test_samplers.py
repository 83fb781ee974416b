"""Runs of which some processes only sample: the bits of one process, whoever is killed and when."""

import signal
import time

import pytest

from tests.system.faults.equality import assert_same_run
from tests.system.processes.conftest import finish, start

LIMITS = ("processes.heartbeat_seconds=60",)


def command(root, folder, *flags, steps=6):
    named = ("eval.every=-1", "checkpoint.every=2", f"total_steps={steps}", f"output_dir={folder}", *flags)
    words = [f"--config.{flag}" for flag in named]
    return ("-m", "jaxrl_llm.train", f"--config={root / 'configs/async_grpo.py'}:tiny", *words)


def wait_for_lines(path, count, processes):
    while not (path.exists() and path.read_bytes().count(b"\n") >= count):
        assert all(process.poll() is None for process in processes), [p.communicate() for p in processes]
        time.sleep(0.01)


@pytest.fixture
def alone(root, tmp_path, run_python, monkeypatch):
    """The folder of the same run in one process, of so many devices of which one samples."""

    def run(devices):
        # Sums of XLA's CPU depend on the number of its threads, which run_python sets: the others get as many.
        monkeypatch.setenv("NPROC", str(2 * devices))
        done = run_python(*command(root, tmp_path / "whole", "rollout.devices=1"), devices=devices)
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
def test_kills_over_both_roles(root, tmp_path, alone):
    """A sampler is killed and started again; then the learner is, and goes on with the samplers that are there."""
    whole, run = alone(devices=2), tmp_path / "run"
    words = command(root, "run", "rollout.processes=2", *LIMITS)
    processes = start(3, tmp_path, words)
    wait_for_lines(run / "metrics.jsonl", 1, processes)
    processes[2].send_signal(signal.SIGKILL)
    processes[2].communicate()
    places = [
        {"JAXRL_COORDINATOR": "localhost:1", "JAXRL_PROCESS_COUNT": "3", "JAXRL_PROCESS_INDEX": str(i)} for i in (2, 0)
    ]
    (processes[2],) = start(1, tmp_path, words, places[:1])
    wait_for_lines(run / "metrics.jsonl", 4, processes)
    processes[0].send_signal(signal.SIGKILL)
    processes[0].communicate()
    (processes[0],) = start(1, tmp_path, words, places[1:])
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
