"""The console of a run: lines, the progress bar on a terminal, and how values are shown."""

import contextlib
import math
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm.config import default
from jaxrl_llm.training.logging import console as console_module
from jaxrl_llm.training.logging.console import Screen, duration, evaluation_line, show, waiting
from jaxrl_llm.training.logging.logger import Logger
from jaxrl_llm.training.logging.stopwatch import Stopwatch
from jaxrl_llm.training.setup.records import logging_spec, shown_settings
from tests.training.logging.common import ROWS, files, pipe, quiet_spec, steps, terminal, text_of

# console, as lines


def test_lines_of_a_run_without_terminal(tmp_path):
    config, console = default(), pipe()
    config.total_steps = 30
    config.optimizer.learning_rate = 3e-5
    with Logger(logging_spec(config), tmp_path, console=console) as logger:
        logger.start({"devices": "1 cpu"})
        logger.log(0, {"eval/reward": 0.5, "eval/greedy_accuracy": 0.75, "eval/accuracy": 0.25})
        for step in range(1, 31):
            metrics = {
                "reward": step / 100,
                "kl": 1e-5,
                "entropy": 2.0,
                "tokens_per_second": 12345.6,
            }
            logger.log(step, metrics | ({"eval/accuracy": 0.75} if step == 30 else {}))
        logger.note("saved")
        logger.warn("slow")
        logger.finish({"rollout": 60.0})
    text = text_of(console)
    assert not {c for c in text if ord(c) < 32 and c != "\n"}
    lines = text.splitlines()
    assert "step 0  held-out accuracy 0.250 (greedy 0.750)  reward 0.500" in lines
    assert "step 30  held-out accuracy 0.750" in lines
    shown = [
        int(line.split("/")[0].removeprefix("step ")) for line in lines if line.startswith("step ") and "/30" in line
    ]
    assert shown == [1, 2, 5, 10, 20, 30]
    (tenth,) = (line for line in lines if line.startswith("step 10/30"))
    assert "reward 0.100  kl 1e-05  entropy 2.000  tokens/s 12,346  elapsed" in tenth and "ETA" in tenth
    assert "saved" in lines and "warning: slow" in lines
    settings = dict(line.split(maxsplit=1) for line in lines if line.startswith("  ") and len(line.split()) > 1)
    assert settings["devices"] == "1 cpu" and settings["optimizer.learning_rate"] == "3e-05"
    assert settings[str(tmp_path / "metrics.jsonl")] == "one object a step"
    (accuracy,) = (line.split() for line in lines if line.startswith("  accuracy"))
    assert accuracy == ["accuracy", "0.250", "0.750", "+0.500"]
    assert settings["rollout"].startswith("0:01:00")


def test_the_summary_of_a_resumed_run(tmp_path):
    with Logger(quiet_spec(), tmp_path) as logger:
        logger.log(0, {"eval/accuracy": 0.25})
        logger.log(1, {"eval/accuracy": 0.5})
    with Logger(quiet_spec(), tmp_path, resume_step=1) as logger:
        logger.log(2, {"eval/accuracy": 0.75})
    console = pipe()
    with Logger(logging_spec(default()), tmp_path, resume_step=2, console=console) as logger:
        logger.finish({"export": 2.0})
    summary = dict(line.split(maxsplit=1) for line in text_of(console).splitlines() if line.startswith("  "))
    assert summary["accuracy"].split() == ["0.250", "0.750", "+0.500"]
    assert [summary[phase].split()[0] for phase in ("export", "other", "total")] == ["2.0s", "0:00:00", "2.0s"]


def test_the_summary_of_an_empty_run(tmp_path):
    config, console = default(), pipe()
    config.total_steps = 0
    with Logger(logging_spec(config), tmp_path, console=console) as logger:
        logger.start({})
        logger.finish({})
    assert "held-out" not in text_of(console)


def test_offline_runs_show_loss_and_learning_rate(tmp_path):
    config, console = default(), pipe()
    config.algorithm.name = "sft"
    with Logger(logging_spec(config), tmp_path, console=console) as logger:
        logger.start({})
        logger.log(1, {"loss": 2.5, "lr": 1e-5, "reward": 9.0})
    assert "step 1/100  loss 2.500  lr 1e-05  elapsed" in text_of(console)
    assert "rollout" not in text_of(console)


def test_completions_shown_are_spaced(tmp_path):
    config, console = default(), pipe()
    config.logging.completions_every = 10
    rows = [{"prompt": f"prompt {i // 8}", "completion": f"row {i}", "exact_match": i / 64} for i in range(64)]
    with Logger(logging_spec(config), tmp_path, console=console) as logger:
        logger.completions(9, rows)
        assert text_of(console) == ""
        logger.completions(10, rows)
    assert default().logging.completions_every == 50, "few samples by default"
    config.logging.completions_every = 0
    with Logger(logging_spec(config), tmp_path, resume_step=10, console=console) as logger:
        logger.completions(20, rows)
    text = text_of(console)
    assert [line.strip() for line in text.splitlines() if "row" in line] == ["row 0", "row 21", "row 42"]
    assert len({line for line in text.splitlines() if "prompt " in line}) == 3
    assert "exact_match 0.328" in text and "step 20" not in text
    assert len(files(tmp_path / "completions")) == 3


def test_evaluations_have_samples_as_training_has(tmp_path):
    """At the steps that logging.completions_every divides, 0 among them, and after the last one; all are in a file."""
    config, console = default(), pipe()
    config.total_steps, config.logging.completions_every, config.logging.completions_shown = 7, 4, 1
    rows = [{"prompt": "ask", "completion": "held", "evaluation": "greedy", "exact_match": 1.0}]
    with Logger(logging_spec(config), tmp_path, console=console) as logger:
        for step in (0, 2, 4, 6, 7):
            logger.completions(step, rows, held_out=True)
        logger.completions(7, rows)
    titles = [line for line in text_of(console).splitlines() if line.startswith("step ")]
    assert titles == [*(f"step {step}  held-out completion 1 of 1" for step in (0, 4, 7)), "step 7  completion 1 of 1"]
    assert "  evaluation 'greedy'  exact_match 1.000" in text_of(console)
    expected = [f"evaluation_{step:05d}.parquet" for step in (0, 2, 4, 6, 7)]
    assert files(tmp_path / "completions") == ["completions_00007.parquet", *expected]
    Logger(quiet_spec(), tmp_path, resume_step=4).close()
    assert files(tmp_path / "completions") == expected[:3]


def test_a_wait_is_shown_with_its_seconds(monkeypatch):
    """On a terminal in a line that goes, elsewhere in a line at the start, and at the end if it was long."""
    console, now = terminal(monkeypatch), [0.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: now[0])
    with waiting("loading MODEL", console):
        now[0] += 42.0
    text = text_of(console)
    assert "loading MODEL  0:00:42" in text and text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    console = pipe()
    with waiting("loading MODEL", console):
        now[0] += 42.0
    with waiting("reading", console):
        now[0] += 1.0
    with waiting("nothing", console, lines=False):
        now[0] += 42.0
    assert text_of(console).splitlines() == ["loading MODEL ...", "loading MODEL: done in 0:00:42", "reading ..."]


def test_the_status_has_its_seconds_and_goes_with_the_next_step(monkeypatch):
    now, console = [0.0], terminal(monkeypatch)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    screen = Screen(("loss",), 100, console=console)
    screen.watch = Stopwatch()
    screen.begin()
    with screen.watch("evaluation"):
        screen.watch.changed, now[0] = 5.0, 25.0
        screen._live.refresh()
        assert "evaluation  0:00:20" in text_of(console), "before the first step the phase is shown"
    screen.step(1, {"loss": 0.5})
    screen.status("compiling update", 25.0)
    now[0] += 90.0
    screen._live.refresh()
    assert "compiling update  0:01:30" in text_of(console)
    seen = len(text_of(console))
    screen.step(2, {"loss": 0.25})
    screen._live.refresh()
    assert "loss 0.250" in text_of(console)[seen:]
    screen.status("compiling decode", 115.0)
    screen.status("", 115.0)
    seen = len(text_of(console))
    screen._live.refresh()
    screen.close()
    assert "loss 0.250" in text_of(console)[seen:] and "compiling decode" not in text_of(console)[seen:]


def test_the_last_lines_say_what_is_true(tmp_path):
    config, console, folder = default(), pipe(), tmp_path / "my run"
    config.total_steps = 5
    with Logger(logging_spec(config), folder, console=console) as logger:
        logger.log(3, {"reward": 1.0})
        (folder / "hf").mkdir()
        for name in ("config.json", "generation_config.json"):
            (folder / "hf" / name).write_text("{}")
        logger.finish({}, outcome="the newest checkpoint is of step 3")
    assert text_of(console).splitlines()[-3:] == [
        "finished after step 3 of 5: the newest checkpoint is of step 3",
        f"  curves and completions:  python -m jaxrl_llm report '{folder}'",
        f"  completions of a prompt: python -m jaxrl_llm generate --model='{folder}/hf' --prompt=TEXT",
    ]
    (folder / "hf/config.json").write_text('{"num_labels": 1}')  # of a reward model, which writes no text
    assert logger._closing("")[-1] == f"  curves and completions:  python -m jaxrl_llm report '{folder}'"
    config.logging.backends, console = ("console",), pipe()
    with Logger(logging_spec(config), tmp_path / "other", console=console) as logger:
        logger.log(5, {"reward": 1.0})
        logger.finish({})
    assert text_of(console).splitlines()[-1] == "finished after step 5"


def test_long_texts_are_shortened(tmp_path):
    console = pipe()
    row = {"prompt": "START" + "p" * 5000 + "QUESTION", "completion": "ANSWER" + "c" * 5000 + "END"}
    row["images"] = '["data:image/png;base64,AAAA"]'
    Screen((), 1, console=console).completions(1, [row])
    text = text_of(console)
    assert "QUESTION" in text and "START" not in text and "ANSWER" in text and "END" not in text
    assert "data:" not in text
    assert "(4,613 characters before)" in text and "(3,809 more characters)" in text


def test_without_console_only_warnings_are_shown(tmp_path, capsys):
    with Logger(quiet_spec(), tmp_path) as logger:
        logger.start({"devices": "1 cpu"})
        logger.log(1, {"reward": 0.5, "eval/accuracy": 1.0})
        logger.completions(10, ROWS)
        logger.note("a note")
        logger.finish({})
        captured = capsys.readouterr()
        assert captured.out == captured.err == ""
        logger.warn("a warning")
    assert capsys.readouterr().err == "warning: a warning\n"


def test_lines_are_spaced_by_steps_or_by_time(monkeypatch):
    now, console = [0.0], pipe()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    screen = Screen(("loss",), 5000, done=36, console=console)
    screen.begin()
    for step in range(37, 201):
        now[0] += 0.1 if step <= 150 else 4.0
        screen.step(step, {"loss": 1.0})
    lines = text_of(console).splitlines()
    # Every hundredth of the run while steps are fast; at least every ten seconds when they are slow.
    shown = [int(line.split("/")[0].removeprefix("step ")) for line in lines]
    assert shown == [37, 50, 100, 150, *range(153, 199, 3), 200]


def test_time_left_follows_the_last_steps(monkeypatch):
    now, console = [0.0], pipe()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    screen = Screen(("loss",), 100, console=console)
    screen.begin()
    screen.step(0, {"eval/loss": 1.0, "time/evaluation": 3.0})
    now[0] = 300.0  # compilation
    screen.step(1, {"loss": 1.0})
    assert screen.remaining(1) == "-"
    for step in range(2, 31):
        now[0] += 2.0
        screen.step(step, {"loss": 1.0})
        assert screen.remaining(step) == duration(2.0 * (100 - step))
    for step in range(31, 52):
        now[0] += 90.0
        screen.step(step, {"loss": 1.0})
    assert screen.remaining(51) == duration(90.0 * 49) == "1:13:30"
    assert screen.remaining(100) == "0:00:00"


# console, on a terminal

HOSTILE = "[bold]x[/bold] :smile: \x1b[2J\x07 é"


def test_a_terminal_has_a_bar_below_everything(tmp_path, monkeypatch):
    config, console = default(), terminal(monkeypatch)
    with Logger(logging_spec(config), tmp_path, console=console) as logger:
        logger.start({"devices": "1 cpu"})
        logger.log(0, {"eval/accuracy": 0.25})
        for step in range(1, 12):
            logger.log(step, {"reward": step / 10, "kl": 0.25, "entropy": 1.5, "tokens_per_second": 4321.0})
        logger.completions(50, [{"prompt": "ask", "completion": HOSTILE, "exact_match": 1.0}])
        logger.warn(HOSTILE)
        logger.finish({})
    text = text_of(console)
    assert "\x1b[?25l" in text and text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor comes back"
    assert "step 11/100" in text and "ETA" in text
    assert "reward 1.100  kl 0.250  entropy 1.500  tokens/s 4,321" in text
    assert "held-out accuracy 0.250" in text and "devices" in text
    assert text.count("[bold]x[/bold] :smile: \\x1b[2J\\x07 é") == 2
    assert "\x1b[2J" not in text and "\x07" not in text


def test_an_exception_gives_the_terminal_back(tmp_path, monkeypatch):
    console = terminal(monkeypatch)
    with contextlib.suppress(KeyboardInterrupt), Logger(logging_spec(default()), tmp_path, console=console) as logger:
        logger.start({})
        logger.log(1, {"reward": 1.0})
        raise KeyboardInterrupt
    assert text_of(console).rindex("\x1b[?25h") > text_of(console).rindex("\x1b[?25l")
    assert steps(tmp_path) == [1]


def test_prints_of_others_stay_above_the_bar(tmp_path, monkeypatch, capsys):
    console = terminal(monkeypatch)
    with Logger(logging_spec(default()), tmp_path, console=console) as logger:
        logger.start({})
        print("from a reward function")
    assert "from a reward function" in text_of(console)


@pytest.mark.parametrize("total", [0, 1])
def test_very_short_runs_fit_the_bar(tmp_path, monkeypatch, total):
    config, console = default(), terminal(monkeypatch, width=40)
    config.total_steps = total
    with Logger(logging_spec(config), tmp_path, console=console) as logger:
        logger.start({})
        logger.log(total, {"reward": 1.0})
        logger.finish({})
    assert f"step {total}/{total}" in text_of(console)


@pytest.mark.slow
def test_a_pipe_stays_plain(tmp_path, run_python, monkeypatch):
    code = f"""
from jaxrl_llm.config import default
from jaxrl_llm.training.logging.logger import Logger
from jaxrl_llm.training.setup.records import logging_spec
with Logger(logging_spec(default()), {str(tmp_path)!r}) as logger:
    logger.start({{"devices": "1 cpu"}})
    logger.log(1, {{"reward": 0.5}})
    logger.completions(50, [{{"prompt": "a", "completion": {HOSTILE!r}}}])
    logger.finish({{}})
"""
    for name, value in {
        "FORCE_COLOR": "1",
        "TTY_COMPATIBLE": "1",
        "TERM": "xterm",
        "PYTHONIOENCODING": "ascii",
    }.items():
        monkeypatch.setenv(name, value)
    result = run_python("-c", code)
    assert result.returncode == 0, result.stderr
    assert not {c for c in result.stdout if ord(c) < 32 and c != "\n"}
    assert "[bold]x[/bold] :smile: \\x1b[2J\\x07 \\xe9" in result.stdout


@pytest.mark.slow
def test_only_the_first_process_writes(tmp_path, run_python):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    code = """
import sys
import jax
jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, int(sys.argv[2]))
from jaxrl_llm.config import default
from jaxrl_llm.training.logging.logger import Logger
from jaxrl_llm.training.setup.records import logging_spec
assert jax.process_count() == 2
with Logger(logging_spec(default()), sys.argv[3]) as logger:
    logger.start({"devices": "2 cpu"})
    logger.log(1, {"reward": float(sys.argv[2])})
    logger.completions(1, [{"prompt": "a", "completion": sys.argv[2]}])
    logger.note("a note")
    logger.warn("a warning")
    logger.finish({})
"""
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(run_python, "-c", code, str(port), str(i), str(tmp_path / str(i))) for i in range(2)]
    first, second = (run.result() for run in runs)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert "reward 0.000" in first.stdout and "warning: a warning" in first.stdout
    assert second.stdout == "" and "process 1: warning: a warning" in second.stderr
    assert steps(tmp_path / "0") == [1] and not (tmp_path / "1").exists()


def test_a_step_costs_less_than_a_millisecond(tmp_path, monkeypatch):
    metrics = {f"metric/{i}": 1.0 / (i + 1) for i in range(40)} | {"reward": 0.5, "kl": 0.1, "entropy": 1.0}
    with Logger(logging_spec(default()), tmp_path, console=terminal(monkeypatch)) as logger:
        logger.start({})
        best = math.inf
        for block in range(5):
            start = time.perf_counter()
            for step in range(100):
                logger.log(1 + 100 * block + step, metrics)
            best = min(best, (time.perf_counter() - start) / 100)
    assert best < 1e-3


# small parts


def test_settings_shown():
    config = default()
    usual = shown_settings(config)
    assert usual["model.path"] == config.model.path and usual["rollout.group_size"] == "8"
    assert "rollout.top_k" not in usual and "logging.backends" not in usual
    config.rollout.top_k = 50
    config.rewards.timeout = 2.5
    config.logging.backends = ("jsonl",)
    assert shown_settings(config).items() - usual.items() == {
        ("rollout.top_k", "50"), ("rewards.timeout", "2.5"), ("logging.backends", "jsonl"),
    }  # fmt: skip
    config = default()
    config.algorithm.name = "sft"
    assert "rollout.group_size" not in shown_settings(config)
    config.data.sources = ("a.jsonl",)  # in the place of data.path
    assert "data.path" not in shown_settings(config)
    shown = logging_spec(config, {"train_dataset": "64 rows in memory", "rewards": "mine"}).settings
    assert (shown["data.path"], shown["rewards.functions"]) == ("64 rows in memory", "mine")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5124, "0.512"),
        (0.0, "0.000"),
        (-0.25, "-0.250"),
        (116.981, "117.0"),
        (1.25e-6, "1.25e-06"),
        (12345.6, "12,346"),
        (12345, "12,345"),
        (1e12, "1e+12"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (None, "-"),
        (np.float32(0.5), "0.500"),
        (True, "True"),
        ("a\nb", "'a\\nb'"),
    ],
)
def test_values_are_shown_short(value, text):
    assert show(value) == text


def test_evaluation_line_joins_greedy_metrics():
    assert evaluation_line({"greedy_accuracy": 0.81}) == "greedy_accuracy 0.810"
    evaluation = {"reward": 0.7, "accuracy": 0.62, "greedy_accuracy": 0.81}
    assert evaluation_line(evaluation) == "accuracy 0.620 (greedy 0.810)  reward 0.700"


def test_durations_are_readable():
    assert [duration(x) for x in (0, 1.54, 83.2, 3 * 86400 + 61)] == ["0:00:00", "1.5s", "0:01:23", "3 days, 0:01:01"]


STREAMS = """
import sys
from jaxrl_llm.training.logging.console import outlive_streams
outlive_streams()
for number in range(3):
    print("line", number, flush=True)
    print("words", file=sys.stderr)
print("at the end")
"""


def test_a_stream_that_cannot_be_written_is_told_once_on_the_other():
    """/dev/full is a disk without room: a run whose log is on one would end at its next line."""

    def ended(*flags, **streams):
        given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
        return subprocess.run([sys.executable, *flags, "-c", STREAMS], text=True, check=True, **given)

    told = "warning: standard {} cannot be written (No space left on device): the run goes on, and lines are missing "
    told += "there"
    with Path("/dev/full").open("w") as full:
        assert ended(stdout=full).stderr.splitlines() == [told.format("output"), *3 * ["words"]]
        out = ended("-u", stderr=full).stdout.splitlines()
        assert out == ["line 0", told.format("error"), "line 1", "line 2", "at the end"]
        ended(stdout=full, stderr=full)
