"""A preempted run finishes its step, saves, and ends with code 143; resumed, it equals an uninterrupted one."""

import contextlib
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from safetensors.numpy import load_file

import jaxrl_llm
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.rewards.functions import exact_match
from jaxrl_llm.training.runtime.preemption import Notices, Preempted
from tests.system.faults.equality import assert_same_run, assert_same_tree, metrics


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2"])
def test_a_signal_is_noted(name):
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with Notices() as notices:
        assert not notices.reached(1)
        os.kill(os.getpid(), number)
        assert notices.reached(2) and notices.reached(3)
    assert signal.getsignal(number) == before


@pytest.mark.filterwarnings("ignore:.*fork")  # of JAX and Python: it is what users do all the same
def test_a_forked_process_ends_by_the_signal():
    """As those of a reward function's multiprocessing.Pool, which it ends with SIGTERM and waits for."""
    with Notices() as notices, Notices():
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(10)
            os._exit(7)  # the signal was noted
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)
        assert not notices.reached(1)  # it is the inner one's
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_another_thread_leaves_the_handlers_alone():
    before = signal.getsignal(signal.SIGTERM)
    found = []

    def watch():
        with Notices() as notices:
            found.append((signal.getsignal(signal.SIGTERM) == before, notices.reached(1)))

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert found == [(True, False)]


def test_where_there_is_no_step_to_finish_a_signal_ends_at_once():
    with Notices() as notices:
        with pytest.raises(Preempted) as raised, notices.ending("before the first step"):
            os.kill(os.getpid(), signal.SIGTERM)
        assert raised.value.code == 143 and raised.value.step is None
        assert raised.value.__notes__ == [
            "stopped by a signal before the first step: start the same command again to go on"
        ]
        os.kill(os.getpid(), signal.SIGTERM)  # which is noted again
        assert notices.reached(1)


@pytest.mark.slow
def test_a_preempted_run_saves_and_goes_on(tiny_run, root, tmp_path):
    config = load_config_file(f"{root}/configs/grpo.py:tiny")
    config.output_dir, config.logging.backends = str(tmp_path / "run"), ("jsonl",)
    config.checkpoint.every = 0
    config.watch.entropy = 100.0
    begun = []

    def preempting(completions, **kwargs):
        if begun == [0]:  # the first step, behind the evaluation before it
            os.kill(os.getpid(), signal.SIGTERM)
        return exact_match(completions=completions, **kwargs)

    preempting.__name__ = "exact_match"
    begins = SimpleNamespace(on_step_begin=lambda moment: begun.append(moment.step))
    with pytest.raises(Preempted) as raised:
        jaxrl_llm.train(config, rewards=preempting, callbacks=begins)
    assert raised.value.code == 143 and raised.value.step == 1
    assert isinstance(raised.value, SystemExit)
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["1"]  # though none was due
    assert not (tmp_path / "run/hf").exists()

    jaxrl_llm.train(config)
    lines = metrics(tmp_path / "run/metrics.jsonl")
    assert [line.pop("warning/entropy_collapse", None) for line in lines] == [None, 1.0, 1.0]
    assert lines == metrics(tiny_run.output_dir / "metrics.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before it", "in it", "in the last"])
def test_who_is_preempted_saves_before_an_evaluation_and_the_next_start_makes_it(root, tmp_path, when):
    def config_of(name):
        config = load_config_file(f"{root}/configs/grpo.py:tiny")
        config.output_dir, config.logging.backends = str(tmp_path / name), ("jsonl",)
        config.total_steps, config.eval.every, config.checkpoint.every = 3, 2, 0
        config.checkpoint.contents = ("state", "hf")
        config.callbacks = ("early_stopping(metric='eval/reward', patience=3)",)
        return config

    def preempt():
        if not (tmp_path / "preempted").exists():
            (tmp_path / "preempted").touch()
            os.kill(os.getpid(), signal.SIGTERM)

    step = 3 if when == "in the last" else 2

    def exact(completions, trainer_state, **kwargs):
        if len(completions) != 16 and trainer_state.global_step == step and when != "before it":
            preempt()  # of the evaluation
        return exact_match(completions=completions, **kwargs)

    exact.__name__ = "exact_match"
    preempting = SimpleNamespace(on_step=lambda moment: preempt() if moment.step == 2 and when == "before it" else None)
    with pytest.raises(Preempted) as raised:
        jaxrl_llm.train(config_of("run"), rewards=exact, callbacks=preempting)
    assert raised.value.step == step and (tmp_path / "preempted").exists()
    assert f"the newest checkpoint is of step {step}" in raised.value.__notes__[-1]
    last = metrics(tmp_path / "run/metrics.jsonl")[-1]
    assert last["step"] == step and "eval/reward" not in last and "reward" in last
    assert not (tmp_path / "run/hf").exists() and not (tmp_path / "run/hf_steps").exists()

    ended = jaxrl_llm.train(config_of("run"))
    whole = jaxrl_llm.train(config_of("whole"))
    if step == 2:
        assert_same_run(tmp_path / "whole", tmp_path / "run")
    else:  # whose last checkpoint is the one that was made before the evaluation
        assert metrics(tmp_path / "whole/metrics.jsonl") == metrics(tmp_path / "run/metrics.jsonl")
        assert_same_tree(*(load_file(tmp_path / name / "hf/model.safetensors") for name in ("whole", "run")))
    assert (tmp_path / "run/hf_steps/00002").exists() == (step == 2)
    assert [line["step"] for line in ended.metrics] == [line["step"] for line in whole.metrics] == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_signal_in_an_evaluation_ends_behind_it(root, tmp_path):
    """And not behind the next step, which may take as long again."""
    config = load_config_file(f"{root}/configs/sft.py:tiny")
    config.output_dir, config.logging.backends = str(tmp_path / "run"), ("jsonl",)
    config.total_steps, config.eval.every, config.checkpoint.every = 3, 1, 0

    def preempting(moment):
        if moment.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Preempted) as raised:
        jaxrl_llm.train(config, callbacks=SimpleNamespace(on_evaluate=preempting))
    assert raised.value.step == 1
    assert [line["step"] for line in metrics(tmp_path / "run/metrics.jsonl") if "eval/loss" in line][-1] == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_with_143_and_resumes(run_python, root, tmp_path, number):
    (tmp_path / "rewards.py").write_text(
        "import os\n"
        "def exact(completions, answer, trainer_state, **kwargs):\n"
        "    if trainer_state.global_step == 4 and not os.path.exists('notified'):\n"
        "        open('notified', 'w').close()\n"
        f"        os.kill(os.getpid(), {int(number)})\n"
        "    return [float(c == a) for c, a in zip(completions, answer)]\n"
    )

    def start(name):
        flags = ("total_steps=9", "eval.every=-1", "checkpoint.every=3", "rewards.functions=rewards.py:exact")
        flags = [f"--config.{flag}" for flag in (*flags, f"output_dir={name}")]
        return run_python("-m", "jaxrl_llm.train", f"--config={root / 'configs/grpo.py'}:tiny", *flags)

    left = start("left")
    assert left.returncode == 143, left.stderr
    assert max(int(path.name) for path in (tmp_path / "left/checkpoints").iterdir()) == 5
    assert left.stderr.splitlines()[-1] == (
        "stopped by a signal after step 5 of 9: start the same command again to go on; the newest checkpoint is of "
        f"step 5, in {tmp_path / 'left/checkpoints'}"
    )
    again = start("left")
    assert again.returncode == 0 and "going on after step 5" in again.stdout, again.stderr
    assert start("whole").returncode == 0
    assert_same_run(tmp_path / "whole", tmp_path / "left")
