"""Every logging backend with its real package, offline or local, and read back; and what happens when one fails."""

import json
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm.config import ConfigError, default
from jaxrl_llm.training.logging.backends import check_installed, delivery
from jaxrl_llm.training.logging.backends.delivery import Delivery, table_of
from jaxrl_llm.training.logging.backends.mlflow import allowed
from jaxrl_llm.training.logging.backends.tensorboard import markdown
from jaxrl_llm.training.logging.logger import Logger
from jaxrl_llm.training.logging.records import read_metrics
from jaxrl_llm.training.setup.records import logging_spec

ROWS = [
    {"prompt": "1+1=", "completion": "2", "exact_match": 1.0, "advantage": 0.5},
    {"prompt": "1+1=", "completion": "</script>|`3`\n", "exact_match": 0.0, "advantage": -0.5, "extra": None},
]
HELD_OUT = [{"prompt": "2+2=", "completion": "four", "evaluation": "sampled", "exact_match": 0.0}]


def logged(folder: Path, *backends: str, steps=(1, 2), resume_step: int | None = None) -> None:
    """Logs a run to the backends: `reward` is step / 4, completions at step 2, and those of an evaluation at step 1."""
    config = default()
    config.logging.backends = ("jsonl", *backends)
    config.logging.completions_every = 2
    config.logging.project = "a_project"
    config.logging.run_name = "a_run"
    with Logger(logging_spec(config), folder, resume_step) as logger:
        for step in steps:
            if step % 2 == 0:
                logger.completions(step, ROWS)
            elif step == 1:
                logger.completions(step, HELD_OUT, held_out=True)
            logger.log(step, {"reward": step / 4, "time/rollout": 0.5, "eval/pass@1": 0.5, "loss": float("nan")})


# TensorBoard


def events(folder: Path) -> list:
    """All events of the TensorBoard files of a run, in order: each is length, checksum, event, checksum."""
    pytest.importorskip("tensorboardX", reason="pip install tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted((folder / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            found.append(Event.FromString(data[12 : 12 + size]))
            data = data[16 + size :]
    return found


def scalars(found: list, name: str) -> dict[int, float]:
    return {event.step: value.simple_value for event in found for value in event.summary.value if value.tag == name}


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX", reason="pip install tensorboardX")
    logged(tmp_path, "tensorboard")
    found = events(tmp_path)
    assert scalars(found, "reward") == {1: 0.25, 2: 0.5}
    assert scalars(found, "time/rollout") == {1: 0.5, 2: 0.5}
    assert scalars(found, "loss") == {}
    texts = {
        value.tag.removesuffix("/text_summary"): value.tensor.string_val[0].decode()
        for event in found
        for value in event.summary.value
        if value.tensor.string_val
    }
    assert '"seed": 0' in texts["config"]
    assert "| `1+1=` | `2` | 1.0 | 0.5 |" in texts["completions"]
    assert "| `2+2=` | `four` | `sampled` | 0.0 |" in texts["eval/completions"]

    # A run that goes on tells TensorBoard to drop what came after its checkpoint.
    logged(tmp_path, "tensorboard", steps=(2, 3), resume_step=1)
    found = events(tmp_path)
    assert scalars(found, "reward") == {1: 0.25, 2: 0.5, 3: 0.75}
    assert [event.step for event in found if event.session_log.status] == [2]
    # One that starts anew leaves nothing of the old.
    logged(tmp_path, "tensorboard", steps=(1,))
    assert scalars(events(tmp_path), "reward") == {1: 0.25}


def test_texts_in_markdown_are_shown_as_they_are():
    table = markdown({"completion": ["a|b", "`x`\n# y", "", None], "reward": [1.0, 0.0, None, 2]})
    assert table.split("\n") == [
        "| completion | reward |",
        "| --- | --- |",
        "| `a¦b` | 1.0 |",
        "| `'x'\\n# y` | 0.0 |",
        "|  |  |",
        "|  | 2 |",
    ]


# Weights & Biases


def wandb_records(folder: Path) -> list:
    """All records of the offline W&B runs: pieces in blocks of 32 KiB (the log format of LevelDB) after 7 bytes."""
    pytest.importorskip("wandb", reason="pip install wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    records = []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data, at, record = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if (left := 32768 - at % 32768) < 7:
                at += left
                continue
            size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
            record += data[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):  # the whole record, or its last piece
                records.append(Record.FromString(record))
                record = b""
    return records


def test_wandb(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logged(tmp_path, "wandb")
    records = wandb_records(tmp_path)
    history = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    assert [(row["step"], row["reward"]) for row in history if "reward" in row] == [(1, 0.25), (2, 0.5)]
    assert not any("loss" in row for row in history)
    (run,) = (record.run for record in records if record.HasField("run"))
    assert (run.project, run.display_name) == ("a_project", "a_run")
    settings = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert settings["optimizer.learning_rate"] == default().optimizer.learning_rate
    (held_out,) = tmp_path.glob("wandb/offline-run-*/files/media/table/eval/completions*.json")
    assert json.loads(held_out.read_text())["data"] == [["2+2=", "four", "sampled", 0.0]]
    (path,) = tmp_path.glob("wandb/offline-run-*/files/media/table/completions*.json")
    table = json.loads(path.read_text())
    assert table["columns"] == ["prompt", "completion", "exact_match", "advantage", "extra"]
    assert table["data"][1] == ["1+1=", "</script>|`3`\n", 0.0, -0.5, None]
    exits = [record.exit.exit_code for record in records if record.HasField("exit")]
    assert exits == [0]


def test_wandb_goes_on_with_the_same_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logged(tmp_path, "wandb", steps=(1,))
    logged(tmp_path, "wandb", steps=(2,), resume_step=1)
    ids = {record.run.run_id for record in wandb_records(tmp_path) if record.HasField("run")}
    assert len(ids) == 1


# MLflow, SwanLab, Trackio


@pytest.mark.parametrize(
    ("name", "there"),
    [("reward", "reward"), ("eval/pass@4", "eval/pass_at_4"), ("val-core//a/b.jsonl/x", "val-core/a/b.jsonl/x"),
     ("/a#b", "a_b")],
)  # fmt: skip
def test_names_that_mlflow_refuses_are_changed(name, there):
    assert allowed(name) == there


def test_mlflow(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="pip install mlflow-skinny")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(None)
    logged(tmp_path / "run", "mlflow")
    logged(tmp_path / "run", "mlflow", steps=(3,), resume_step=2)
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("a_project")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("a_run", "FINISHED")
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "reward")] == [
        (1, 0.25), (2, 0.5), (3, 0.75),
    ]  # fmt: skip
    assert run.data.params["seed"] == "0"
    assert run.data.metrics["eval/pass_at_1"] == 0.5
    held_out, path = (next((tmp_path / "store").rglob(f"step_0000{step}.json")) for step in (1, 2))
    assert json.loads(path.read_text())["data"][1][1] == ROWS[1]["completion"]
    assert held_out.parent.parts[-2:] == ("eval", "completions")
    assert json.loads(held_out.read_text())["data"] == [["2+2=", "four", "sampled", 0.0]]


def test_swanlab(tmp_path, monkeypatch):
    pytest.importorskip("swanlab", reason="pip install swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    logged(tmp_path, "swanlab")
    text = b"".join(path.read_bytes() for path in (tmp_path / "swanlab").rglob("*") if path.is_file())
    logged(tmp_path, "swanlab", steps=(3,), resume_step=2)
    for piece in (b"reward", b"time/rollout", b"a_project", b"a_run", b"completions", b"eval/completions"):
        assert piece in text, piece


def test_trackio(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    trackio = pytest.importorskip("trackio", reason="pip install trackio")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "store")
    logged(tmp_path / "run", "trackio")
    (run,) = trackio.Api().runs("a_project")
    assert run.name == "a_run"
    lines = trackio.SQLiteStorage.get_logs("a_project", "a_run")
    assert [(line["step"], line["reward"]) for line in lines if "reward" in line] == [(1, 0.25), (2, 0.5)]
    (table,) = (line["completions"] for line in lines if "completions" in line)
    assert table["_type"] == "trackio.table"
    assert [line["eval/completions"]["_type"] for line in lines if "eval/completions" in line] == ["trackio.table"]
    logged(tmp_path / "run", "trackio", steps=(3,), resume_step=2)
    lines = trackio.SQLiteStorage.get_logs("a_project", "a_run")
    assert [line["reward"] for line in lines if "reward" in line] == [0.25, 0.5, 0.75]


# Any backend


@pytest.mark.parametrize("every", [0, 4])
def test_tables_of_every_evaluation(every, tmp_path, monkeypatch):
    """Of training at the steps of logging.completions_every alone; with 0 none."""
    backend, config = Flaky(), default()
    monkeypatch.setattr(delivery, "start", lambda name, run: backend)
    monkeypatch.setattr(delivery, "PACKAGES", {"wandb": ("wandb", "wandb")})
    config.logging.backends, config.logging.completions_every, config.logging.table_rows = ("wandb",), every, 1
    with Logger(logging_spec(config), tmp_path) as logger:
        for step in (1, 3, 4):
            logger.completions(step, ROWS)
            logger.completions(step, [*HELD_OUT, *ROWS], held_out=True)
    tables = [(step, name, columns["prompt"]) for step, found in backend.got for name, columns in found.items()]
    held_out = [(step, "eval/completions", ["2+2="]) for step in (1, 3, 4)]
    assert tables == ([*held_out[:2], (4, "completions", ["1+1="]), held_out[2]] if every else [])


class Flaky:
    """A backend that raises at the calls whose numbers are in `fails`, counted from 0."""

    def __init__(self, fails=(), refuses=()):
        self.fails, self.refuses, self.calls, self.got, self.closed = set(fails), set(refuses), 0, [], None

    def log(self, step, metrics):
        call, self.calls = self.calls, self.calls + 1
        if call in self.fails or step in self.refuses:
            raise OSError("the server is down")
        self.got.append((step, dict(metrics)))

    def table(self, name, step, columns):
        self.got.append((step, {name: columns}))

    def close(self, failed):
        self.closed = failed


def settled(sender: Delivery, backend: Flaky, calls: int) -> None:
    deadline = time.monotonic() + 10
    while backend.calls < calls and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)


def test_failed_calls_are_sent_later():
    backend, warnings = Flaky(fails=range(1, 4)), []
    sender = Delivery("wandb", backend, warnings.append)
    for step in range(1, 6):
        calls = backend.calls
        sender.log(step, {"reward": float(step)})
        settled(sender, backend, calls + 1)
    sender.close(failed=False)
    assert [step for step, _ in backend.got] == [1, 2, 3, 4, 5]
    assert backend.closed is False
    assert len(warnings) == 2, warnings
    assert "wandb failed: OSError: the server is down; training goes on" in warnings[0]
    assert "works again" in warnings[1]


def test_one_piece_that_is_refused_is_dropped():
    backend, warnings = Flaky(refuses=[2]), []
    sender = Delivery("wandb", backend, warnings.append)
    for step in range(1, 5):
        sender.log(step, {})
    sender.close(failed=True)
    assert [step for step, _ in backend.got] == [1, 3, 4]
    assert backend.closed is True
    assert any("1 piece that it refuses is dropped" in line for line in warnings)
    assert "wandb lacks 1 of the pieces" in warnings[-1]


def test_a_backend_down_to_the_end_is_reported():
    backend, warnings = Flaky(fails=range(100)), []
    sender = Delivery("wandb", backend, warnings.append)
    for step in range(1, 5):
        sender.log(step, {})
    sender.close(failed=False)
    assert len(warnings) == 2
    assert "wandb lacks 4 of the pieces" in warnings[-1]


def test_a_hanging_backend_stops_nothing(monkeypatch):
    release = threading.Event()

    class Hanging(Flaky):
        def log(self, step, metrics):
            release.wait(30)

    monkeypatch.setattr(delivery, "PATIENCE", 0.05)
    warnings, start = [], time.monotonic()
    sender = Delivery("mlflow", Hanging(), warnings.append)
    for step in range(1000):
        sender.log(step, {"reward": 0.5})
    sender.close(failed=False)
    assert time.monotonic() - start < 5
    assert "mlflow does not answer" in warnings[0]
    release.set()


def test_a_failing_backend_leaves_other_records(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(delivery, "start", lambda name, run: Flaky(fails=range(100)))
    monkeypatch.setattr(delivery, "PACKAGES", {"wandb": ("wandb", "wandb")})
    logged(tmp_path, "wandb")
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    assert (tmp_path / "completions" / "completions_00002.parquet").exists()
    assert "wandb failed: OSError: the server is down; training goes on" in capsys.readouterr().err


def test_a_backend_that_cannot_start(tmp_path, monkeypatch, capsys):
    def start(name, run):
        raise OSError("no key")

    logged(tmp_path, steps=(1,))
    monkeypatch.setattr(delivery, "start", start)
    logged(tmp_path, "wandb", steps=(2,), resume_step=1)
    assert "the run goes on without it" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="wandb, which cannot start: OSError: no key"):
        logged(tmp_path, "wandb")


@pytest.mark.parametrize(
    ("name", "pip"),
    [("tensorboard", "tensorboardX"), ("wandb", "wandb"), ("mlflow", "mlflow-skinny"), ("swanlab", "swanlab"),
     ("trackio", "trackio")],
)  # fmt: skip
def test_a_missing_package_is_named(monkeypatch, name, pip):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=f"logging.backends has {name}, .*: pip install {pip}$"):
        check_installed(("console", name))
    check_installed(("console", "jsonl"))


def test_rows_and_cells_of_a_table():
    rows = [{"prompt": [{"role": "user", "content": f"p{i}"}], "completion": "c", "r": i / 2} for i in range(10)]
    rows[5]["r"] = float("nan")
    assert table_of(rows, 2) == {"prompt": ["user: p0", "user: p5"], "completion": ["c", "c"], "r": [0.0, None]}
    assert table_of(rows, 64)["r"][9] == 4.5
    assert table_of([{"prompt": "p", "completion": "c", "x": [1, 2], "y": np.float32(0.5)}], 1)["x"] == ["[1, 2]"]
