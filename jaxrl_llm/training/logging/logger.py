"""What a run leaves and shows: metrics.jsonl, completions/ and the console, through one `Logger`.

The layout under output_dir:

    metrics.jsonl                          one JSON object a step: {"step": 3, "time": 1767225600.0, "reward": 0.5, ...}
    completions/completions_00010.parquet  one row per completion: step, prompt, completion, each reward, advantage, ...
"""

import json
import math
import operator
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

from jaxrl_llm.config import ConfigDict, ConfigError, default
from jaxrl_llm.config.schema import KEYS, OFFLINE
from jaxrl_llm.training.logging.backends.delivery import Delivery, deliveries, table_of
from jaxrl_llm.training.logging.console import Screen
from jaxrl_llm.training.logging.metric_names import shown_names

METRICS = "metrics.jsonl"
COMPLETIONS = "completions"

# Settings worth a line even when they have their default.
SHOWN_SETTINGS = (
    "model.path",
    "data.path",
    "algorithm.name",
    "total_steps",
    "batch.prompts",
    "rollout.group_size",
    "optimizer.learning_rate",
    "seed",
)
CONTENTS = {
    "config.json": "the configuration of the run",
    "given.json": "what it was given besides, in words",
    METRICS: "one object a step",
    COMPLETIONS: "prompts, completions, rewards and advantages",
    "checkpoints": "states the run can go on from",
    "hf": "the trained model",
    "adapter": "its adapters, as PEFT keeps them",
    "critic": "PPO's critic",
    "tensorboard": "the event files of TensorBoard",
    "wandb": "the local copy of W&B",
    "swanlab": "the local copy of SwanLab",
}


class Logger:
    """A context manager that records one run: `config.logging.backends` says where, and only process 0 writes.

    Call `log` once a step, in order, and before the checkpoint of that step is saved: with `resume_step` = s (the step
    of the checkpoint that is gone on from) metrics.jsonl keeps its lines up to step s and completions/ its files up to
    step s, so an interrupted run has neither gaps nor doubles. With `resume_step` None both start anew.

    `console` replaces standard output. Raises ConfigError when metrics.jsonl cannot be read (see `read_metrics`).
    """

    def __init__(
        self,
        config: ConfigDict,
        output_dir: str | Path,
        resume_step: int | None = None,
        console: Console | None = None,
    ):
        self.config = config
        self.folder = Path(output_dir)
        self._main = jax.process_index() == 0
        self._resume_step = resume_step
        self._last_step: int | None = None
        self._evaluations: list[tuple[int, dict[str, float | None]]] = []  # the first and the last
        self._seconds: dict[str, float] = defaultdict(float)
        self._began = time.perf_counter()
        self._file = None
        self._unwritten: list[bytes] = []  # lines of metrics.jsonl that the disk had no room for
        self._screen = None
        self._elsewhere: list[Delivery] = []
        self._names = shown_names(config)
        if not self._main:
            return
        backends = config.logging.backends
        if "console" in backends:
            self._screen = Screen(_metrics_shown(config), config.total_steps, resume_step or 0, console)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._go_on(resume_step)
        if "jsonl" in backends:
            # Unbuffered and in append mode: a line is one write, so a killed process leaves it whole or not at all.
            self._file = (self.folder / METRICS).open("ab", buffering=0)
        self._elsewhere = deliveries(config, self.folder, resume_step, self.warn)

    def _go_on(self, resume_step: int | None) -> None:
        """Removes what lies after `resume_step` (everything when None) and remembers what stays."""
        path = self.folder / METRICS
        if resume_step is None:
            path.unlink(missing_ok=True)
        elif path.exists():
            trim_metrics(path, resume_step)
            for record in read_metrics(path):
                self._remember({self._names.own(name): value for name, value in record.items()})
            if self._last_step is None or self._last_step < resume_step:
                held = "no step" if self._last_step is None else f"step {self._last_step}"
                self.warn(f"{path} ends at {held}, but the run goes on after step {resume_step}: lines are missing")
            self._last_step = resume_step
        remove_completions(self.folder / COMPLETIONS, resume_step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object = None, *exception: object) -> None:
        self.close(failed=kind is not None)

    def close(self, failed: bool = False) -> None:
        """Ends the progress bar, closes metrics.jsonl and tells every other backend how the run ended."""
        if self._screen:
            self._screen.close()
        if self._file and not self._file.closed:
            if self._last_step is not None:
                self._write(self._last_step)
            if self._unwritten:
                self.warn(f"{METRICS} lacks its last {len(self._unwritten)} lines, which could not be written")
            with self._file:
                os.fsync(self._file.fileno())
        while self._elsewhere:
            self._elsewhere.pop().close(failed)

    def start(self, settings: Mapping[str, object]) -> None:
        """Shows `settings` (facts of the run: devices, parameters, ...) and the main configuration; starts the bar."""
        if self._screen:
            self._screen.table("settings", {**settings, **settings_shown(self.config)}, str(self.folder))
            if self._resume_step is not None:
                self._screen.note(f"going on after step {self._resume_step}")
            self._screen.begin()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes and shows the metrics of one step; those of an evaluation at this step are named `eval/...`.

        In metrics.jsonl they have the names that `logging.names` says. Values are numbers or arrays of one element
        without axes; nan and infinities are null in metrics.jsonl, which has no other JSON for them. Names
        `time/<phase>` are seconds.

        A line that cannot be written (the disk is full) is warned of, and written with the next that can.

        Raises ValueError for a step that is not after the last one, a value that is no number, or a metric named
        "step" or "time".
        """
        if not self._main:
            return
        step = operator.index(step)
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(
                f"step {step} was logged after step {self._last_step}: log each step once, in order, "
                "with the metrics of its evaluation"
            )
        if taken := {"step", "time"} & metrics.keys():
            raise ValueError(f"a metric is named {taken.pop()!r}, which every line of {METRICS} has already: rename it")
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        head = {"step": step, "time": round(time.time(), 3)}
        found = {name: _finite(x) for name, x in numbers.items()}
        shown = {self._names.shown(name): x for name, x in found.items()}
        if self._file:
            self._unwritten.append(_line(head | shown))
            self._write(step)
        for delivery in self._elsewhere:
            delivery.log(step, {name: x for name, x in shown.items() if x is not None})
        self._remember(head | found)
        for name, value in numbers.items():
            if name.startswith("time/") and math.isfinite(value):
                self._seconds[name.removeprefix("time/")] += value
        if self._screen:
            self._screen.step(step, numbers)

    def _write(self, step: int) -> None:
        """Appends the lines that wait."""
        assert self._file is not None
        try:
            while self._unwritten:
                _append(self._file, self._unwritten[0])
                self._unwritten.pop(0)
        except OSError as error:
            if len(self._unwritten) == 1:
                self.warn(f"step {step} is not in {METRICS} yet: {error}; it is tried again with the next step")

    def _remember(self, record: Mapping[str, Any]) -> None:
        self._last_step = record["step"]
        evaluation = {name[5:]: value for name, value in record.items() if name.startswith("eval/")}
        if evaluation:
            self._evaluations[1:] = [(record["step"], evaluation)]

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes one file of completions (see `write_completions`) and, when one is due, shows a sample of them.

        `logging.completions_shown` rows, evenly spaced so that they have different prompts, are shown at the steps
        that `logging.completions_every` divides; a table of `logging.table_rows` goes to the other backends then.
        """
        if not self._main:
            return
        try:
            write_completions(self.folder / COMPLETIONS, step, rows)
        except OSError as error:
            self.warn(f"the completions of step {step} are left out: {error}")
        every, shown = self.config.logging.completions_every, min(self.config.logging.completions_shown, len(rows))
        due = every and step % every == 0
        for delivery in self._elsewhere if due else ():
            delivery.table(step, table_of(rows, self.config.logging.table_rows))
        if self._screen and due:
            self._screen.completions(step, [rows[i * len(rows) // shown] for i in range(shown)])

    def note(self, message: str) -> None:
        """Shows a line above the progress bar."""
        if self._screen:
            self._screen.note(message)

    def warn(self, message: str) -> None:
        """Shows a warning above the progress bar; without a console, and on other processes, on standard error."""
        if self._screen:
            self._screen.warn(message)
        else:
            print(f"process {jax.process_index()}: warning: {message}", file=sys.stderr, flush=True)

    def finish(
        self, summary: Mapping[str, object] | None = None, seconds: Mapping[str, float] | None = None
    ) -> dict[str, Any]:
        """The summary of the run, which is also shown: evaluation before and after, time by phase, files.

        `summary` adds lines. `seconds` by phase is the sum of the logged `time/<phase>` unless given
        (`Stopwatch.totals`); "other" is the rest since the Logger was made: loading, compilation, checkpoints.
        Times are of this process, evaluations of the whole run.

        Returns {"before": {name: value}, "after": {name: value}, "seconds": {phase: seconds},
        "files": {path: contents}}; "before" and "after" are the first and the last evaluation, empty without one.
        """
        if not self._main:
            return {}
        phases = dict(self._seconds if seconds is None else seconds)
        phases["other"] = max(0.0, time.perf_counter() - self._began - sum(phases.values()))
        paths = sorted(path for path in self.folder.iterdir() if not path.name.startswith("."))
        files = {str(path): CONTENTS.get(path.name, "") for path in paths}
        if self._screen:
            self._screen.close()
            self._screen.evaluations(self._evaluations)
            self._screen.phases(phases)
            self._screen.table("files", files)
            if summary:
                self._screen.table("summary", summary)
        first, last = (self._evaluations[0][1], self._evaluations[-1][1]) if self._evaluations else ({}, {})
        return {"before": dict(first), "after": dict(last), "seconds": phases, "files": files}


def read_metrics(path: str | Path) -> Iterator[dict[str, Any]]:
    """The objects of a metrics.jsonl, one a step; numbers that were not finite are None.

    A last line that is torn (the machine stopped while it was written) is left out.
    Raises ConfigError for any other line that is not a JSON object with a step.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
            except ValueError as error:
                if not file.read(1):
                    return
                raise ConfigError(f"line {number} of {path} is not JSON ({error}): repair or remove it") from error
            if not isinstance(record, dict) or "step" not in record:
                raise ConfigError(f"line {number} of {path} is not an object with a step: repair or remove it")
            yield record


def trim_metrics(path: Path, last_step: int) -> None:
    """Removes the lines of metrics.jsonl after `last_step`, and a torn last line; the file is replaced in one go."""
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        for record in read_metrics(path):
            if record["step"] <= last_step:
                file.write(_line(record))
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def write_completions(folder: Path, step: int, rows: Sequence[Mapping[str, Any]]) -> Path:
    """The path of `completions_<step>.parquet`, written in one go: it is whole or not there.

    Each row is one completion: `prompt` and `completion` (texts; conversations are written as JSON), then a number for
    each reward function under its name, `advantage`, and whatever else is worth keeping. Columns are step, prompt,
    completion, and the others in the order they first appear; a row without one holds null there.

    Raises ValueError for a row without prompt or completion, one with a `step`, or a column of mixed types.
    """
    names: dict[str, None] = dict.fromkeys(("prompt", "completion"))
    for row in rows:
        if "prompt" not in row or "completion" not in row or "step" in row:
            raise ValueError(f"a row of completions needs prompt and completion, and no step, but has {list(row)}")
        names.update(dict.fromkeys(row))
    columns = {"step": pa.array([step] * len(rows), pa.int64())}
    for name in names:
        try:
            columns[name] = pa.array([_cell(name, row.get(name)) for row in rows])
        except pa.ArrowException as error:
            raise ValueError(f"the column {name!r} of completions does not hold one type of values: {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"completions_{step:05d}.parquet"
    part = path.with_name(f".{path.name}.part")
    try:
        pq.write_table(pa.table(columns), part)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    return path


def _cell(name: str, value: Any) -> Any:
    if name in ("prompt", "completion") and not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return value.item() if isinstance(value, np.generic) else value


def remove_completions(folder: Path, last_step: int | None) -> None:
    """Removes the completions files of the steps after `last_step` (all when None), and unfinished ones."""
    for path in folder.glob("*completions_*.parquet*"):
        match = re.fullmatch(r"(\.?)completions_(\d+)\.parquet(\.part)?", path.name)
        if match and (match[1] or match[3] or last_step is None or int(match[2]) > last_step):
            path.unlink()


def settings_shown(config: ConfigDict) -> dict[str, str]:
    """The configuration worth showing, `{key: text}`: the main keys, and those that differ from their default."""
    standard, shown = default(), {}
    for key in KEYS:
        section, _, leaf = key.name.rpartition(".")
        value, usual = ((tree[section] if section else tree)[leaf] for tree in (config, standard))
        applies = section != "rollout" or config.algorithm.name not in OFFLINE
        if value != usual or (key.name in SHOWN_SETTINGS and applies):
            shown[key.name] = key.show(value)
    return shown


def _metrics_shown(config: ConfigDict) -> tuple[str, ...]:
    """The metrics beside the progress bar, as far as a step has them."""
    if config.algorithm.name in OFFLINE:
        return ("loss", "rewards/accuracies", "accuracy", "grad_norm", "lr", "tokens_per_second")
    return ("reward", "kl", "entropy", "completions/mean_length", "tokens_per_second")


def _number(name: str, value: Any) -> int | float:
    item = value.item() if getattr(value, "shape", None) == () else value
    if not isinstance(item, int | float):
        raise ValueError(f"the metric {name!r} is {value!r}, not one number: reduce it before it is logged")
    return int(item) if isinstance(item, bool) else item


def _finite(value: int | float) -> int | float | None:
    return value if math.isfinite(value) else None


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def _append(file: Any, line: bytes) -> None:
    """Writes the line, or raises OSError and leaves none of it."""
    size = os.fstat(file.fileno()).st_size
    written = file.write(line)
    if written != len(line):
        file.truncate(size)
        raise OSError(f"{file.name}: only {written} of {len(line)} bytes could be written; is the disk full?")
