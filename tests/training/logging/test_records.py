"""The records of a run: metrics.jsonl and completions files, through kills, full disks and resumes."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from jaxrl_llm.config import ConfigError
from jaxrl_llm.training.logging.backends.delivery import table_of
from jaxrl_llm.training.logging.logger import Logger, LoggingSpec
from jaxrl_llm.training.logging.records import read_metrics, write_completions
from tests.training.logging.common import ROWS, files, quiet_spec, steps

# metrics.jsonl


def test_each_step_is_one_json_object(tmp_path):
    before = time.time()
    with Logger(quiet_spec(), tmp_path / "new" / "run") as logger:
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


def test_a_folder_that_is_deleted_is_made_again(tmp_path, capsys):
    with Logger(quiet_spec(), tmp_path / "run") as logger:
        logger.log(1, {"loss": 1.0})
        shutil.rmtree(tmp_path / "run")
        for step in (2, 3):
            logger.log(step, {"loss": 1.0})
            assert steps(tmp_path / "run")[-1] == step
    assert steps(tmp_path / "run") == [2, 3]
    assert capsys.readouterr().err.count("was deleted while the run goes on: it begins anew at step 2") == 1


def test_numbers_come_back_to_the_last_digit(tmp_path):
    value = 0.1 + 0.2
    with Logger(quiet_spec(), tmp_path) as logger:
        logger.log(1, {"loss": value, "kl": np.float32(0.1)})
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert record["loss"] == value
    assert record["kl"] == float(np.float32(0.1))


def test_numbers_that_are_not_finite_are_null(tmp_path):
    with Logger(quiet_spec(), tmp_path) as logger:
        logger.log(1, {"a": math.nan, "b": math.inf, "c": jnp.float32(-jnp.inf), "d": True})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) | {"time": 0} == {
        "step": 1, "time": 0, "a": None, "b": None, "c": None, "d": 1,
    }  # fmt: skip
    assert pd.read_json(tmp_path / "metrics.jsonl", lines=True)["a"].isna().all()


@pytest.mark.parametrize("value", ["high", None, [1.0], np.ones(1), jnp.ones((2, 2)), 1j])
def test_a_metric_that_is_no_number_is_named(tmp_path, value):
    with Logger(quiet_spec(), tmp_path) as logger, pytest.raises(ValueError, match="'reward' is"):
        logger.log(1, {"reward": value})
    assert steps(tmp_path) == []


def test_a_step_is_logged_once_and_in_order(tmp_path):
    with Logger(quiet_spec(), tmp_path) as logger:
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
    with Logger(quiet_spec(), tmp_path) as logger:
        logger.log(1, {"loss": 0.5})
        logger.log(2, {"loss": 12.25})
    data = path.read_bytes()
    start = data.index(b"\n") + 1
    for cut in range(start, len(data) + 1):
        path.write_bytes(data[:cut])
        losses = [record["loss"] for record in read_metrics(path)]
        assert losses == ([0.5, 12.25] if cut >= len(data) - 1 else [0.5]), data[:cut]
        Logger(quiet_spec(), tmp_path, resume_step=2).close()
        assert path.read_bytes() == (data if len(losses) == 2 else data[:start])


@pytest.mark.parametrize("line", [b'{"step": 1', b"[1, 2]", b'{"loss": 1}', b'{"step": "2"}', b"\xff"])
def test_a_broken_line_in_the_middle_is_an_error(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    whole = b'{"step": 1, "time": 1.0}\n' + line + b'\n{"step": 3, "time": 3.0}\n'
    path.write_bytes(whole)
    write_completions(tmp_path / "completions", 4, ROWS)
    with pytest.raises(ConfigError, match=r"line 2 of .*metrics\.jsonl"):
        Logger(quiet_spec(), tmp_path, resume_step=3)
    assert path.read_bytes() == whole
    assert files(tmp_path / "completions") == ["completions_00004.parquet"]


def test_lines_that_stay_are_as_they_were(tmp_path):
    """Also those of another program, which may have written numbers that JSON has not."""
    path = tmp_path / "metrics.jsonl"
    own = b'{"step":1,"loss":NaN, "kl": 1e-07}\n'
    path.write_bytes(own + b'{"step": 2}')
    Logger(quiet_spec(), tmp_path, resume_step=2).close()
    assert path.read_bytes() == own + b'{"step": 2}\n'
    Logger(quiet_spec(), tmp_path, resume_step=1).close()
    assert path.read_bytes() == own


def test_a_killed_process_leaves_no_line_but_the_last_torn(tmp_path, root):
    code = f"""
from jaxrl_llm.training.logging.logger import Logger, LoggingSpec
with Logger(LoggingSpec(backends=("jsonl",)), {str(tmp_path)!r}) as logger:
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
    killed_at = steps(tmp_path)[-1]  # a last line that the kernel had written a part of is left out
    assert steps(tmp_path) == list(range(1, killed_at + 1))
    checkpoint = killed_at - 3
    with Logger(quiet_spec(), tmp_path, resume_step=checkpoint) as logger:
        for step in range(checkpoint + 1, killed_at + 3):
            logger.log(step, {"again": 1})
    assert steps(tmp_path) == list(range(1, killed_at + 3))
    assert sum("again" in record for record in read_metrics(path)) == 5


def test_a_full_disk_delays_lines(tmp_path, run_python):
    code = f"""
import resource, signal
from jaxrl_llm.training.logging.logger import Logger, LoggingSpec
logger = Logger(LoggingSpec(backends=("jsonl",)), {str(tmp_path)!r})
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
    with Logger(quiet_spec(), folder, resume_step=resume_step) as logger:
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


def test_the_step_that_a_run_goes_on_from_is_logged_again(tmp_path, capsys):
    """As that whose evaluation the next start makes: its completions stay, and its line is replaced."""
    run_steps(tmp_path, 1, 3)
    with Logger(quiet_spec(), tmp_path, resume_step=2, again=True) as logger:
        assert [record["step"] for record in logger.earlier()] == [1]
        logger.log(2, {"reward": 5.0})
    assert steps(tmp_path) == [1, 2] and [*read_metrics(tmp_path / "metrics.jsonl")][1]["reward"] == 5.0
    assert files(tmp_path / "completions") == ["completions_00001.parquet", "completions_00002.parquet"]
    Logger(quiet_spec(), tmp_path, resume_step=1, again=True).close()
    assert steps(tmp_path) == [] and capsys.readouterr().err == ""


def test_later_completions_are_removed_on_resume(tmp_path):
    run_steps(tmp_path, 0, 12)
    Logger(quiet_spec(), tmp_path, resume_step=9).close()
    names = files(tmp_path / "completions")
    assert names == [f"completions_{step:05d}.parquet" for step in range(10)]


def test_a_new_run_in_an_old_folder(tmp_path):
    run_steps(tmp_path, 0, 3)
    (tmp_path / "completions" / "notes.parquet").write_bytes(b"mine")
    (tmp_path / "config.json").write_text("{}")
    run_steps(tmp_path, 1, 1)
    assert steps(tmp_path) == [1]
    assert files(tmp_path / "completions") == ["completions_00001.parquet", "notes.parquet"]
    assert (tmp_path / "config.json").read_text() == "{}"


def test_missing_lines_are_reported_on_resume(tmp_path, capsys):
    run_steps(tmp_path, 0, 3)
    with Logger(quiet_spec(), tmp_path, resume_step=6) as logger:
        assert "ends at step 3, but the run goes on after step 6" in capsys.readouterr().err
        with pytest.raises(ValueError, match="step 6 was logged after step 6"):
            logger.log(6, {"loss": 1.0})
    Logger(quiet_spec(), tmp_path, resume_step=3).close()
    assert capsys.readouterr().err == ""


def test_a_file_that_is_gone_is_reported_on_resume(tmp_path, capsys):
    run_steps(tmp_path, 0, 10)
    (tmp_path / "metrics.jsonl").unlink()
    run_steps(tmp_path, 11, 12, resume_step=10)
    assert "metrics.jsonl ends at no step, but the run goes on after step 10" in capsys.readouterr().err
    assert steps(tmp_path) == [11, 12]


def test_without_jsonl_the_old_file_is_removed(tmp_path, capsys):
    run_steps(tmp_path, 1, 3)
    with Logger(LoggingSpec(("console",), total_steps=100, progress=("reward",)), tmp_path) as logger:
        logger.log(1, {"reward": 0.5})
    assert not (tmp_path / "metrics.jsonl").exists()
    assert "step 1/100  reward 0.500" in capsys.readouterr().out


# completions files


def test_completions_are_a_parquet_table(tmp_path):
    with Logger(quiet_spec(), tmp_path) as logger:
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
    ],
)
def test_invalid_completions_leave_no_file(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        write_completions(tmp_path, 1, [*ROWS, row])
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("cells", "kept"),
    [
        ([True, 0.25, None, 2], [1.0, 0.25, None, 2.0]),
        ([7, "[INVALID]", None, [1]], ["7", "[INVALID]", None, "[1]"]),
        ([2**70, 1, 0.5], [float(2**70), 1.0, 0.5]),
        ([2**70, None, 1], [str(2**70), None, "1"]),
        ([10**400, 0.5], [str(10**400), "0.5"]),
        (["a\ud800", "b"], ["a\ufffd", "b"]),
    ],
)
def test_what_scorers_say_in_several_types_is_kept(tmp_path, cells, kept):
    """verl's scorers give extra values row by row, here True and there 0.0: a run must not end because of its table."""
    rows = [{"prompt": "a", "completion": "b", "extra": cell} for cell in cells]
    assert pq.read_table(write_completions(tmp_path, 1, rows))["extra"].to_pylist() == kept
    assert table_of(rows, 99)["extra"] == kept
