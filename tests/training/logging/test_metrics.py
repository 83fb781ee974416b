"""The record of a run: metrics.jsonl, completions files, the console, and the stopwatch."""

import contextlib
import io
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from jaxrl_llm.config import ConfigError, default
from jaxrl_llm.training.logging.console import Screen, duration, evaluation_line, show
from jaxrl_llm.training.logging.logger import Logger, read_metrics, settings_shown, write_completions
from jaxrl_llm.training.logging.stopwatch import Stopwatch

ROWS = [
    {"prompt": "1+1=", "completion": "2", "exact_match": 1.0, "length": np.float32(0.5), "advantage": 0.7},
    {
        "prompt": "1+1=",
        "completion": "3",
        "exact_match": 0,
        "length": math.nan,
        "advantage": -0.7,
        "tool": "calculator",
    },
]


def quiet_config():
    config = default()
    config.logging.backends = ("jsonl",)
    return config


def terminal(monkeypatch, width=100) -> Console:
    monkeypatch.setenv("TERM", "xterm-256color")
    return Console(file=io.StringIO(), force_terminal=True, width=width)


def pipe() -> Console:
    return Console(file=io.StringIO(), force_terminal=False)


def text_of(console: Console) -> str:
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def steps(folder) -> list[int]:
    return [record["step"] for record in read_metrics(folder / "metrics.jsonl")]


def files(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# metrics.jsonl


def test_each_step_is_one_json_object(tmp_path):
    before = time.time()
    with Logger(quiet_config(), tmp_path / "new" / "run") as logger:
        logger.log(0, {"eval/accuracy": 0.25})
        logger.log(1, {"reward": 0.1, "kl": np.float32(0.5), "num_tokens": np.int64(7), "loss": jnp.bfloat16(1.5)})
        # Lines are there at once, not when the file is closed.
        assert steps(tmp_path / "new" / "run") == [0, 1]
    lines = (tmp_path / "new" / "run" / "metrics.jsonl").read_text().splitlines()
    first, second = map(json.loads, lines)
    assert first.pop("time") == pytest.approx(before, abs=60)
    assert first == {"step": 0, "eval/accuracy": 0.25}
    assert list(second) == ["step", "time", "reward", "kl", "num_tokens", "loss"]
    assert second["reward"] == 0.1 and second["kl"] == 0.5 and second["loss"] == 1.5
    assert second["num_tokens"] == 7 and isinstance(second["num_tokens"], int)


def test_numbers_come_back_to_the_last_digit(tmp_path):
    value = 0.1 + 0.2
    with Logger(quiet_config(), tmp_path) as logger:
        logger.log(1, {"loss": value, "kl": np.float32(0.1)})
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert record["loss"] == value
    assert record["kl"] == float(np.float32(0.1))


def test_numbers_that_are_not_finite_are_null(tmp_path):
    with Logger(quiet_config(), tmp_path) as logger:
        logger.log(1, {"a": math.nan, "b": math.inf, "c": jnp.float32(-jnp.inf), "d": True})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) | {"time": 0} == {
        "step": 1, "time": 0, "a": None, "b": None, "c": None, "d": 1,
    }  # fmt: skip
    assert pd.read_json(tmp_path / "metrics.jsonl", lines=True)["a"].isna().all()


@pytest.mark.parametrize("value", ["high", None, [1.0], np.ones(1), jnp.ones((2, 2)), 1j])
def test_a_metric_that_is_no_number_is_named(tmp_path, value):
    with Logger(quiet_config(), tmp_path) as logger, pytest.raises(ValueError, match="'reward' is"):
        logger.log(1, {"reward": value})
    assert steps(tmp_path) == []


def test_a_step_is_logged_once_and_in_order(tmp_path):
    with Logger(quiet_config(), tmp_path) as logger:
        logger.log(5, {"loss": 1.0})
        for step in (5, 4):
            with pytest.raises(ValueError, match=f"step {step} was logged after step 5"):
                logger.log(step, {"loss": 1.0})
        with pytest.raises(ValueError, match="'time'"):
            logger.log(6, {"time": 1.0})
        logger.log(6, {})
    assert steps(tmp_path) == [5, 6]


def test_a_torn_last_line_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Logger(quiet_config(), tmp_path) as logger:
        logger.log(1, {"loss": 0.5})
        logger.log(2, {"loss": 12.25})
    data = path.read_bytes()
    start = data.index(b"\n") + 1
    for cut in range(start, len(data) + 1):
        path.write_bytes(data[:cut])
        losses = [record["loss"] for record in read_metrics(path)]
        assert losses == ([0.5, 12.25] if cut >= len(data) - 1 else [0.5]), data[:cut]
        Logger(quiet_config(), tmp_path, resume_step=2).close()
        assert path.read_bytes() == (data if len(losses) == 2 else data[:start])


@pytest.mark.parametrize("line", [b'{"step": 1', b"[1, 2]", b'{"loss": 1}', b"\xff"])
def test_a_broken_line_in_the_middle_is_an_error(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    whole = b'{"step": 1, "time": 1.0}\n' + line + b'\n{"step": 3, "time": 3.0}\n'
    path.write_bytes(whole)
    write_completions(tmp_path / "completions", 4, ROWS)
    with pytest.raises(ConfigError, match=r"line 2 of .*metrics\.jsonl"):
        Logger(quiet_config(), tmp_path, resume_step=3)
    assert path.read_bytes() == whole
    assert files(tmp_path / "completions") == ["completions_00004.parquet"]


def test_a_killed_process_leaves_whole_lines_and_the_next_one_goes_on(tmp_path, root):
    code = f"""
from jaxrl_llm.config import default
from jaxrl_llm.training.logging.logger import Logger
config = default()
config.logging.backends = ("jsonl",)
with Logger(config, {str(tmp_path)!r}) as logger:
    for step in range(1, 1_000_000):
        logger.log(step, {{f"metric/{{i}}": step * i for i in range(200)}})
"""
    environment = os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment)
    path = tmp_path / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (path.exists() and path.stat().st_size > 100_000):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert path.read_bytes().endswith(b"\n")
    killed_at = steps(tmp_path)[-1]
    assert steps(tmp_path) == list(range(1, killed_at + 1))
    checkpoint = killed_at - 3
    with Logger(quiet_config(), tmp_path, resume_step=checkpoint) as logger:
        for step in range(checkpoint + 1, killed_at + 3):
            logger.log(step, {"again": 1})
    assert steps(tmp_path) == list(range(1, killed_at + 3))
    assert sum("again" in record for record in read_metrics(path)) == 5


def test_a_full_disk_is_told_and_its_lines_come_later(tmp_path, run_python):
    code = f"""
import resource, signal
from jaxrl_llm.config import default
from jaxrl_llm.training.logging.logger import Logger
config = default()
config.logging.backends = ("jsonl",)
logger = Logger(config, {str(tmp_path)!r})
path = logger.folder / "metrics.jsonl"
resource.setrlimit(resource.RLIMIT_FSIZE, (500, -1))
for step in range(1, 20):
    logger.log(step, {{"loss": step / 7}})
data = path.read_bytes()
assert 300 < len(data) < 500 and data.endswith(b"\\n"), data
resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
logger.log(20, {{"loss": 1.0}})
logger.close()
"""
    result = run_python("-c", code)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("warning") == 1  # not one a step
    assert "is not in metrics.jsonl yet" in result.stderr and "bytes could be written" in result.stderr
    assert steps(tmp_path) == list(range(1, 21))


# resume


def run_steps(folder, first, last, resume_step=None):
    with Logger(quiet_config(), folder, resume_step=resume_step) as logger:
        for step in range(first, last + 1):
            logger.completions(step, ROWS)
            logger.log(step, {"reward": step / 3, "time/update": 1.0})


def test_a_resumed_run_has_neither_gaps_nor_doubles(tmp_path):
    run_steps(tmp_path, 0, 7)
    before = [line for line in (tmp_path / "metrics.jsonl").read_bytes().splitlines() if json.loads(line)["step"] <= 4]
    (tmp_path / "completions" / ".completions_00008.parquet.part").write_bytes(b"unfinished")
    run_steps(tmp_path, 5, 9, resume_step=4)
    assert steps(tmp_path) == list(range(10))
    assert (tmp_path / "metrics.jsonl").read_bytes().splitlines()[:5] == before
    expected = [f"completions_{step:05d}.parquet" for step in range(10)]
    assert files(tmp_path / "completions") == expected


def test_completions_after_the_resumed_step_are_removed(tmp_path):
    run_steps(tmp_path, 0, 12)
    Logger(quiet_config(), tmp_path, resume_step=9).close()
    names = files(tmp_path / "completions")
    assert names == [f"completions_{step:05d}.parquet" for step in range(10)]


def test_a_new_run_in_an_old_folder_starts_anew_and_touches_nothing_else(tmp_path):
    run_steps(tmp_path, 0, 3)
    (tmp_path / "completions" / "notes.parquet").write_bytes(b"mine")
    (tmp_path / "config.json").write_text("{}")
    run_steps(tmp_path, 1, 1)
    assert steps(tmp_path) == [1]
    assert files(tmp_path / "completions") == ["completions_00001.parquet", "notes.parquet"]
    assert (tmp_path / "config.json").read_text() == "{}"


def test_missing_lines_are_reported_on_resume(tmp_path, capsys):
    run_steps(tmp_path, 0, 3)
    with Logger(quiet_config(), tmp_path, resume_step=6) as logger:
        assert "ends at step 3, but the run goes on after step 6" in capsys.readouterr().err
        with pytest.raises(ValueError, match="step 6 was logged after step 6"):
            logger.log(6, {"loss": 1.0})
    Logger(quiet_config(), tmp_path, resume_step=3).close()
    assert capsys.readouterr().err == ""


def test_resuming_from_another_folder_starts_a_file(tmp_path, capsys):
    run_steps(tmp_path / "new", 11, 12, resume_step=10)
    assert steps(tmp_path / "new") == [11, 12]
    assert capsys.readouterr().err == ""


# completions files


def test_completions_are_a_parquet_table(tmp_path):
    with Logger(quiet_config(), tmp_path) as logger:
        logger.completions(12, ROWS)
        logger.completions(12, ROWS)
    assert files(tmp_path / "completions") == ["completions_00012.parquet"]
    table = pq.read_table(tmp_path / "completions" / "completions_00012.parquet")
    names = ["step", "prompt", "completion", "exact_match", "length", "advantage", "tool"]
    assert table.column_names == names
    rows = table.to_pylist()
    assert [row["step"] for row in rows] == [12, 12]
    assert [row["prompt"] for row in rows] == ["1+1=", "1+1="]
    assert [row["completion"] for row in rows] == ["2", "3"]
    assert [row["exact_match"] for row in rows] == [1.0, 0.0]
    assert rows[0]["length"] == 0.5 and math.isnan(rows[1]["length"])
    assert [row["tool"] for row in rows] == [None, "calculator"]


def test_conversations_are_kept_as_json(tmp_path):
    chat = [{"role": "user", "content": "où?"}, {"role": "assistant", "content": [{"type": "text", "text": "là"}]}]
    path = write_completions(
        tmp_path, 1, [{"prompt": chat, "completion": "ici"}, {"prompt": "plain", "completion": ""}]
    )
    first, second = pq.read_table(path)["prompt"].to_pylist()
    assert json.loads(first) == chat and second == "plain"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a"}, "needs prompt and completion"),
        ({"prompt": "a", "completion": "b", "step": 3}, "no step"),
        ({"prompt": "a", "completion": "b", "exact_match": "yes"}, "column 'exact_match'"),
    ],
)
def test_completions_that_do_not_fit_are_named_and_leave_no_file(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        write_completions(tmp_path, 1, [*ROWS, row])
    assert files(tmp_path) == []


# console, as lines


def test_lines_of_a_run_without_terminal(tmp_path):
    config, console = default(), pipe()
    config.total_steps = 30
    config.optimizer.learning_rate = 3e-5
    with Logger(config, tmp_path, console=console) as logger:
        logger.start({"devices": "1 cpu"})
        logger.log(0, {"eval/reward": 0.5, "eval/greedy_accuracy": 0.75, "eval/accuracy": 0.25})
        for step in range(1, 31):
            metrics = {
                "reward": step / 100,
                "kl": 1e-5,
                "entropy": 2.0,
                "tokens_per_second": 12345.6,
                "time/rollout": 2.0,
            }
            logger.log(step, metrics | ({"eval/accuracy": 0.75} if step == 30 else {}))
        logger.note("saved")
        logger.warn("slow")
        result = logger.finish({"model": "run/hf"})
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
    assert settings["model"] == "run/hf"
    (accuracy,) = (line.split() for line in lines if line.startswith("  accuracy"))
    assert accuracy == ["accuracy", "0.250", "0.750", "+0.500"]
    assert settings["rollout"].startswith("0:01:00")
    assert result["before"]["accuracy"] == 0.25 and result["after"] == {"accuracy": 0.75}
    assert result["seconds"]["rollout"] == 60.0
    assert result["files"] == {str(tmp_path / "metrics.jsonl"): "one object a step"}


def test_summary_of_a_resumed_run_keeps_the_first_evaluation(tmp_path):
    with Logger(quiet_config(), tmp_path) as logger:
        logger.log(0, {"eval/accuracy": 0.25})
        logger.log(1, {"eval/accuracy": 0.5, "time/update": 100.0})
    with Logger(quiet_config(), tmp_path, resume_step=1) as logger:
        logger.log(2, {"time/update": 0.0, "eval/accuracy": 0.75})
        result = logger.finish()
    assert (result["before"], result["after"]) == ({"accuracy": 0.25}, {"accuracy": 0.75})
    assert result["seconds"]["update"] == 0.0, "times are of this process"
    with Logger(quiet_config(), tmp_path, resume_step=2) as logger:
        result = logger.finish(seconds={"export": 2.0})
    assert (result["before"], result["after"]) == ({"accuracy": 0.25}, {"accuracy": 0.75})
    assert result["seconds"] == {"export": 2.0, "other": 0.0}


def test_a_run_without_evaluation_or_steps_has_a_summary(tmp_path):
    config, console = default(), pipe()
    config.total_steps = 0
    with Logger(config, tmp_path, console=console) as logger:
        logger.start({})
        result = logger.finish()
    assert (result["before"], result["after"]) == ({}, {})
    assert "held-out" not in text_of(console)


def test_offline_runs_show_loss_and_learning_rate(tmp_path):
    config, console = default(), pipe()
    config.algorithm.name = "sft"
    with Logger(config, tmp_path, console=console) as logger:
        logger.start({})
        logger.log(1, {"loss": 2.5, "lr": 1e-5, "reward": 9.0})
    assert "step 1/100  loss 2.500  lr 1e-05  elapsed" in text_of(console)
    assert "rollout" not in text_of(console)


def test_completions_are_shown_when_due_and_from_different_prompts(tmp_path):
    config, console = default(), pipe()
    rows = [{"prompt": f"prompt {i // 8}", "completion": f"row {i}", "exact_match": i / 64} for i in range(64)]
    with Logger(config, tmp_path, console=console) as logger:
        logger.completions(9, rows)
        assert text_of(console) == ""
        logger.completions(10, rows)
        config.logging.completions_every = 0
        logger.completions(20, rows)
    text = text_of(console)
    assert [line.strip() for line in text.splitlines() if "row" in line] == ["row 0", "row 21", "row 42"]
    assert len({line for line in text.splitlines() if "prompt " in line}) == 3
    assert "exact_match 0.328" in text and "step 20" not in text
    assert len(files(tmp_path / "completions")) == 3


def test_long_texts_are_shortened_where_they_matter_least(tmp_path):
    console = pipe()
    row = {"prompt": "START" + "p" * 5000 + "QUESTION", "completion": "ANSWER" + "c" * 5000 + "END"}
    Screen((), 1, console=console).completions(1, [row])
    text = text_of(console)
    assert "QUESTION" in text and "START" not in text and "ANSWER" in text and "END" not in text
    assert "(4,613 characters before)" in text and "(3,809 more characters)" in text


def test_without_console_only_warnings_are_shown(tmp_path, capsys):
    with Logger(quiet_config(), tmp_path) as logger:
        logger.start({"devices": "1 cpu"})
        logger.log(1, {"reward": 0.5, "eval/accuracy": 1.0})
        logger.completions(10, ROWS)
        logger.note("a note")
        logger.finish()
        captured = capsys.readouterr()
        assert captured.out == captured.err == ""
        logger.warn("a warning")
    assert capsys.readouterr().err == "process 0: warning: a warning\n"


def test_without_jsonl_no_file_of_an_earlier_run_stays(tmp_path, capsys):
    run_steps(tmp_path, 1, 3)
    config = default()
    config.logging.backends = ("console",)
    with Logger(config, tmp_path) as logger:
        logger.log(1, {"reward": 0.5})
    assert not (tmp_path / "metrics.jsonl").exists()
    assert "step 1/100  reward 0.500" in capsys.readouterr().out


def test_lines_are_spaced_by_steps_or_by_time():
    now, console = [0.0], pipe()
    screen = Screen(("loss",), 5000, done=36, console=console, clock=lambda: now[0])
    screen.begin()
    for step in range(37, 201):
        now[0] += 0.1 if step <= 150 else 4.0
        screen.step(step, {"loss": 1.0})
    lines = text_of(console).splitlines()
    # Every hundredth of the run while steps are fast; at least every ten seconds when they are slow.
    shown = [int(line.split("/")[0].removeprefix("step ")) for line in lines]
    assert shown == [37, 50, 100, 150, *range(153, 199, 3), 200]


def test_time_left_is_at_the_speed_of_the_last_steps():
    now, console = [0.0], pipe()
    screen = Screen(("loss",), 100, console=console, clock=lambda: now[0])
    screen.begin()
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


def test_a_terminal_gets_a_bar_with_everything_above_it(tmp_path, monkeypatch):
    config, console = default(), terminal(monkeypatch)
    with Logger(config, tmp_path, console=console) as logger:
        logger.start({"devices": "1 cpu"})
        logger.log(0, {"eval/accuracy": 0.25})
        for step in range(1, 12):
            logger.log(step, {"reward": step / 10, "kl": 0.25, "entropy": 1.5, "tokens_per_second": 4321.0})
        logger.completions(10, [{"prompt": "ask", "completion": HOSTILE, "exact_match": 1.0}])
        logger.warn(HOSTILE)
        result = logger.finish()
    text = text_of(console)
    assert "\x1b[?25l" in text and text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor comes back"
    assert "step 11/100" in text and "ETA" in text
    assert "reward 1.100  kl 0.250  entropy 1.500  tokens/s 4,321" in text
    assert "held-out accuracy 0.250" in text and "devices" in text
    assert text.count("[bold]x[/bold] :smile: \\x1b[2J\\x07 é") == 2
    assert "\x1b[2J" not in text and "\x07" not in text
    assert result["before"] == result["after"] == {"accuracy": 0.25}


def test_an_exception_gives_the_terminal_back(tmp_path, monkeypatch):
    console = terminal(monkeypatch)
    with contextlib.suppress(KeyboardInterrupt), Logger(default(), tmp_path, console=console) as logger:
        logger.start({})
        logger.log(1, {"reward": 1.0})
        raise KeyboardInterrupt
    assert text_of(console).rindex("\x1b[?25h") > text_of(console).rindex("\x1b[?25l")
    assert steps(tmp_path) == [1]


def test_prints_of_others_stay_above_the_bar(tmp_path, monkeypatch, capsys):
    console = terminal(monkeypatch)
    with Logger(default(), tmp_path, console=console) as logger:
        logger.start({})
        print("from a reward function")
    assert "from a reward function" in text_of(console)


@pytest.mark.parametrize("total", [0, 1])
def test_very_short_runs_fit_the_bar(tmp_path, monkeypatch, total):
    config, console = default(), terminal(monkeypatch, width=40)
    config.total_steps = total
    with Logger(config, tmp_path, console=console) as logger:
        logger.start({})
        logger.log(total, {"reward": 1.0})
        logger.finish()
    assert f"step {total}/{total}" in text_of(console)


def test_a_pipe_stays_plain_whatever_the_environment_says(tmp_path, run_python, monkeypatch):
    code = f"""
from jaxrl_llm.config import default
from jaxrl_llm.training.logging.logger import Logger
with Logger(default(), {str(tmp_path)!r}) as logger:
    logger.start({{"devices": "1 cpu"}})
    logger.log(1, {{"reward": 0.5}})
    logger.completions(10, [{{"prompt": "a", "completion": {HOSTILE!r}}}])
    logger.finish()
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
assert jax.process_count() == 2
with Logger(default(), sys.argv[3]) as logger:
    logger.start({"devices": "2 cpu"})
    logger.log(1, {"reward": float(sys.argv[2])})
    logger.completions(1, [{"prompt": "a", "completion": sys.argv[2]}])
    logger.note("a note")
    logger.warn("a warning")
    result = logger.finish()
    assert bool(result) == (sys.argv[2] == "0")
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
    with Logger(default(), tmp_path, console=terminal(monkeypatch)) as logger:
        logger.start({})
        best = math.inf
        for block in range(5):
            start = time.perf_counter()
            for step in range(100):
                logger.log(1 + 100 * block + step, metrics)
            best = min(best, (time.perf_counter() - start) / 100)
    assert best < 1e-3


# small parts


def test_settings_are_the_main_ones_and_those_changed():
    config = default()
    usual = settings_shown(config)
    assert usual["model.path"] == config.model.path and usual["rollout.group_size"] == "8"
    assert "rollout.top_k" not in usual and "logging.backends" not in usual
    config.rollout.top_k = 50
    config.rewards.timeout = 2.5
    config.logging.backends = ("jsonl",)
    assert settings_shown(config).items() - usual.items() == {
        ("rollout.top_k", "50"), ("rewards.timeout", "2.5"), ("logging.backends", "jsonl"),
    }  # fmt: skip
    config = default()
    config.algorithm.name = "sft"
    assert "rollout.group_size" not in settings_shown(config)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5124, "0.512"),
        (0.0, "0.000"),
        (-0.25, "-0.250"),
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


# Stopwatch


def test_stopwatch_adds_up_and_take_resets():
    now = [0.0]
    watch = Stopwatch(lambda: now[0])
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


def test_an_inner_phase_is_not_counted_twice():
    now = [0.0]
    watch = Stopwatch(lambda: now[0])
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


def test_a_block_that_raises_is_timed():
    now = [0.0]
    watch = Stopwatch(lambda: now[0])
    with contextlib.suppress(RuntimeError), watch("update"), watch("reward"):
        now[0] += 2.0
        raise RuntimeError("broken")
    assert watch.take() == {"time/update": 0.0, "time/reward": 2.0}


def test_stopwatch_measures_seconds():
    watch = Stopwatch()
    with watch("sleep"):
        time.sleep(0.05)
    assert 0.05 <= watch.take()["time/sleep"] < 5.0
