"""A run that hangs writes its stacks and ends."""

import pytest

from jaxrl_llm.training.logging.stopwatch import Stopwatch
from jaxrl_llm.training.runtime import watchdog

CODE = """
import pathlib, re, time
from jaxrl_llm.training.runtime import watchdog
from jaxrl_llm.training.logging.stopwatch import Stopwatch

def endless_reward():
    {hang}

watchdog.MARGIN = 0.5
watch = Stopwatch()
with watchdog.Watchdog(0, watch, pathlib.Path(".")), watch("reward"):
    time.sleep(1.4)  # nothing watches
with watchdog.Watchdog(1.2, watch, pathlib.Path(".")):
    for _ in range(3):  # together longer than the limit, each shorter, also where the machine is busy
        with watch("evaluation"):
            time.sleep(0.3)
            with Stopwatch(within=watch)("rollout"):
                time.sleep(0.3)
    print("healthy", flush=True)
    with watch("reward"):
        endless_reward()
print("not reached")
"""


def test_a_hang_ends_with_stacks_and_the_phase(run_python, tmp_path):
    result = run_python("-c", CODE.format(hang="time.sleep(1000)"))
    assert (result.returncode, result.stdout) == (1, "healthy\n")
    for text in (result.stderr, (tmp_path / "stacks.txt").read_text()):
        assert "error: no progress for 1.2 s (watch.hang_seconds): the run hangs in reward" in text
        assert "in endless_reward" in text


@pytest.mark.parametrize(
    ("roles", "index", "name"),
    [([], 0, "stacks.txt"), ([], 3, "stacks_3.txt"), ([None], 1, "stacks_1.txt"), ([1], 0, "stacks_sampler_1.txt")],
)
def test_each_process_has_a_file_of_its_own(monkeypatch, tmp_path, roles, index, name):
    """Those that only sample are each the first of their own program."""
    monkeypatch.setattr(watchdog.processes, "_roles", roles)
    monkeypatch.setattr(watchdog.jax, "process_index", lambda: index)
    assert watchdog.Watchdog(0, Stopwatch(), tmp_path).path == tmp_path / name


@pytest.mark.slow
def test_a_hang_that_holds_the_interpreter_ends_too(run_python):
    hang = "re.match('(a+)+$', 'a' * 60 + 'b')"
    result = run_python("-c", CODE.format(hang=hang))
    assert (result.returncode, result.stdout) == (1, "healthy\n")
    assert "Timeout" in result.stderr and "in endless_reward" in result.stderr


@pytest.mark.slow
def test_a_reward_function_without_end_ends_the_run(run_python, root, tmp_path):
    (tmp_path / "rewards.py").write_text(
        "import os, time\n"
        "def stuck(completions, trainer_state, **kwargs):\n"
        "    if trainer_state.global_step == 3 and not os.path.exists('mended'):\n"
        "        time.sleep(1000)\n"
        "    return [0.0] * len(completions)\n"
    )
    flags = ("total_steps=5", "eval.every=-1", "checkpoint.every=1", "rewards.functions=rewards.py:stuck",
             "output_dir=run")  # fmt: skip
    command = ("-m", "jaxrl_llm.train", f"--config={root / 'configs/grpo.py'}:tiny", *(f"--config.{f}" for f in flags))
    result = run_python(*command, "--config.watch.hang_seconds=20")  # longer than to compile on a busy machine
    assert result.returncode == 1
    assert "hangs in reward" in result.stderr and "in stuck" in (tmp_path / "run/stacks.txt").read_text()
    (tmp_path / "mended").write_text("")
    result = run_python(*command)
    assert result.returncode == 0 and "going on after step 3" in result.stdout, result.stderr
