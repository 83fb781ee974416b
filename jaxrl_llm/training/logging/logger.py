"""`Logger`: one place that a run reports to, which records metrics and completions and shows them on the console."""

import math
import operator
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import jax
from rich.console import Console

from jaxrl_llm.config.files import read_json
from jaxrl_llm.config.wording import amount
from jaxrl_llm.training.logging.backends import Identity
from jaxrl_llm.training.logging.backends.delivery import Delivery, deliveries, table_of
from jaxrl_llm.training.logging.console import Screen
from jaxrl_llm.training.logging.metric_names import MetricNames
from jaxrl_llm.training.logging.origin import STARTS
from jaxrl_llm.training.logging.records import (
    COMPLETIONS,
    METRICS,
    MetricsFile,
    read_metrics,
    remove_completions,
    trim_metrics,
    write_completions,
)
from jaxrl_llm.training.logging.stopwatch import Stopwatch

CONTENTS = {
    "config.json": "the configuration of the run",
    "config_history": "the configurations before it went on with others",
    "given.json": "the arguments of train beside it, in words",
    METRICS: "one object a step",
    STARTS: "when, where and by which command it was started",
    "read_models.json": "checksums of the models of other stages that it began with",
    COMPLETIONS: "prompts, completions, rewards and advantages",
    "reference_scores.jsonl": "the prompts with the scores of the reference's completions",
    "checkpoints": "states the run can go on from",
    "hf": "the trained model",
    "average": "its moving average",
    "report.html": "curves and completions, by the command report",
    "hf_steps": "the models of earlier steps",
    "adapter": "its adapters, as PEFT keeps them",
    "critic": "PPO's critic",
    "tensorboard": "the event files of TensorBoard",
    "wandb": "the local copy of W&B",
    "swanlab": "the local copy of SwanLab",
}


@dataclass(frozen=True)
class LoggingSpec:
    """The backends that a run reports to, and the facts and samples that they show of it."""

    backends: Sequence[str] = ("console", "jsonl")
    total_steps: int = 0
    progress: Sequence[str] = ()  # names of the metrics beside the progress bar
    settings: Mapping[str, str] = field(default_factory=dict)  # the main settings, for the console
    all_settings: Mapping[str, Any] = field(default_factory=dict)  # every setting by full key, for trackers
    names: MetricNames = field(default_factory=MetricNames)
    project: str = "jaxrl_llm"
    run_name: str | None = None  # None: the name of the run's folder
    completions_every: int = 0  # steps between samples of completions; 0 shows none, nor tables of evaluations
    completions_shown: int = 0
    table_rows: int = 0  # completions in the tables of trackers


class Logger:
    """A context manager that records one run in `output_dir` and the backends of `spec`; only process 0 writes.

    Call `log` once a step, in order, and before the checkpoint of that step is saved: with `resume_step` = s (the step
    of the checkpoint that is gone on from) metrics.jsonl keeps its lines up to step s and completions/ its files up to
    step s, so an interrupted run has neither gaps nor doubles. With `resume_step` None both start anew. With `again`
    step s itself is logged once more, in place of its line.

    `console` replaces standard output. Raises ConfigError when metrics.jsonl cannot be read (see `read_metrics`).
    """

    def __init__(
        self,
        spec: LoggingSpec,
        output_dir: str | Path,
        resume_step: int | None = None,
        again: bool = False,
        console: Console | None = None,
    ):
        self.spec = spec
        self.folder = Path(output_dir)
        self._main = jax.process_index() == 0
        self._resume_step = resume_step
        self._kept = None if resume_step is None else resume_step - again  # the last step whose line stays
        self._last_step: int | None = None
        self._evaluations: list[tuple[int, dict[str, float | None]]] = []  # the first and the last
        self._began = time.perf_counter()
        self._file: MetricsFile | None = None
        self._screen: Screen | None = None
        self._deliveries: list[Delivery] = []
        if not self._main:
            return
        if "console" in spec.backends:
            self._screen = Screen(spec.progress, spec.total_steps, self._kept or 0, console)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._resume()
        if "jsonl" in spec.backends:
            self._file = MetricsFile(self.folder / METRICS)
        name = spec.run_name or self.folder.resolve().name
        run = Identity(spec.project, name, spec.all_settings, self.folder, self._kept)
        self._deliveries = deliveries(spec.backends, run, self.warn)

    def _resume(self) -> None:
        """Removes the records of later steps, or all, and remembers the evaluations of those that stay."""
        path, kept = self.folder / METRICS, self._kept
        if kept is None:
            path.unlink(missing_ok=True)
        elif path.exists() or "jsonl" in self.spec.backends:
            path.touch()
            trim_metrics(path, kept)
            for record in read_metrics(path):
                self._remember({self.spec.names.internal(name): value for name, value in record.items()})
            if (self._last_step or 0) < kept:
                reached = "no step" if self._last_step is None else f"step {self._last_step}"
                self.warn(f"{path} ends at {reached}, but the run goes on after step {kept}: lines are missing")
            self._last_step = kept
        remove_completions(self.folder / COMPLETIONS, self._resume_step)

    def earlier(self) -> list[dict[str, float]]:
        """The metrics of the steps that earlier starts have logged, by the run's own names, which process 0 reads."""
        path, names = self.folder / METRICS, self.spec.names
        if not self._main or self._kept is None or not path.is_file():
            return []
        return [
            {
                names.internal(name): math.nan if value is None else value
                for name, value in record.items()
                if name != "time" and not names.is_more(name)
            }
            for record in read_metrics(path)
            if record["step"] <= self._kept
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object = None, *exception: object) -> None:
        self.close(failed=kind is not None)

    def close(self, failed: bool = False) -> None:
        """Ends the progress bar, closes metrics.jsonl and ends the run in every other backend, as `failed` or not."""
        if self._screen:
            self._screen.close()
        if self._file and not self._file.closed:
            if self._last_step is not None:
                self._flush(self._last_step)
            if self._file.pending:
                lost = amount(len(self._file.pending), "line")
                self.warn(f"{METRICS} lacks its last {lost}, which could not be written")
            self._file.close()
        while self._deliveries:
            self._deliveries.pop().close(failed)

    def start(self, facts: Mapping[str, object], watch: Stopwatch | None = None) -> None:
        """Shows `facts` (devices, parameters, ...) and the main settings of the run, and starts the progress bar.

        Until the first step the open phase of `watch` is shown below it.
        """
        if self._screen:
            self._screen.watch = watch
            self._screen.table("settings", {**facts, **self.spec.settings}, str(self.folder))
            if self._resume_step is not None:
                self._screen.note(f"going on after step {self._resume_step}")
            if not self._screen.fancy and self._file:
                self._screen.note(f"steps are shown now and then; {self.folder / METRICS} has all of them")
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
        stamp = {"step": step, "time": round(time.time(), 3)}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        shown = {self.spec.names.shown(name): value for name, value in finite.items()}
        shown = self.spec.names.more(step, finite) | shown
        if self._file:
            self._file.append(stamp | shown)
            self._flush(step)
        for delivery in self._deliveries:
            delivery.log(step, {name: value for name, value in shown.items() if value is not None})
        self._remember(stamp | finite)
        if self._screen:
            self._screen.step(step, numbers)

    def _flush(self, step: int) -> None:
        assert self._file is not None
        try:
            if self._file.flush():
                self.warn(f"{self.folder / METRICS} was deleted while the run goes on: it begins anew at step {step}")
        except OSError as error:
            if len(self._file.pending) == 1:  # the first of them: later ones fail for the same reason
                self.warn(f"step {step} is not in {METRICS} yet: {error}; it is tried again with the next step")

    def _remember(self, record: Mapping[str, Any]) -> None:
        self._last_step = record["step"]
        evaluation = {name[5:]: value for name, value in record.items() if name.startswith("eval/")}
        if evaluation:
            self._evaluations[1:] = [(record["step"], evaluation)]

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]], held_out: bool = False) -> None:
        """Writes one file of completions (see `write_completions`) and, when one is due, shows a sample of them.

        `completions_shown` rows, evenly spaced so that they have different prompts, are shown at the steps that
        `completions_every` divides and after the last one; a table of `table_rows` goes to the other backends then, and
        of an evaluation (`held_out`) each time unless `completions_every` is 0.
        """
        if not self._main:
            return
        try:
            write_completions(self.folder / COMPLETIONS, step, rows, held_out)
        except OSError as error:
            self.warn(f"the completions of step {step} are left out: {error}")
        every, shown = self.spec.completions_every, min(self.spec.completions_shown, len(rows))
        due = every and (step % every == 0 or step == self.spec.total_steps)
        for delivery in self._deliveries if due or (every and held_out) else ():
            name = "eval/completions" if held_out else "completions"
            delivery.table(name, step, table_of(rows, self.spec.table_rows))
        if self._screen and due:
            self._screen.completions(step, [rows[i * len(rows) // shown] for i in range(shown)], held_out)

    def status(self, text: str, began: float) -> None:
        """Shows a text and the seconds since `began` (time.monotonic()) below the bar; an empty one ends it."""
        if self._screen:
            self._screen.status(text, began)

    def note(self, message: str) -> None:
        """Shows a line above the progress bar."""
        if self._screen:
            self._screen.note(message)

    def warn(self, message: str) -> None:
        """Shows a warning above the progress bar; without a console, and on other processes, on standard error."""
        if self._screen:
            self._screen.warn(message)
        else:
            which = f"process {jax.process_index()}: " if jax.process_count() > 1 else ""
            print(f"{which}warning: {message}", file=sys.stderr, flush=True)

    def finish(self, seconds: Mapping[str, float], outcome: str = "") -> None:
        """Shows the summary of the run: evaluation before and after, time by phase, files.

        Last come the steps that were made, `outcome` (where model and checkpoints are) and the commands that go on from
        here. `seconds` are by phase, of this process (`Stopwatch.totals`); "other" is the rest since the Logger was
        made. Evaluations are of the complete run.
        """
        if self._screen is None:
            return
        phases = dict(seconds)
        phases["other"] = max(0.0, time.perf_counter() - self._began - sum(phases.values()))
        paths = sorted(path for path in self.folder.iterdir() if not path.name.startswith("."))
        files = {str(path): CONTENTS.get(path.name, "") for path in paths}
        self._screen.close()
        self._screen.evaluations(self._evaluations)
        self._screen.phases(phases)
        self._screen.table("files", files)
        for line in self._closing(outcome):
            self._screen.note(line)

    def _closing(self, outcome: str) -> list[str]:
        """The last lines of a run: what was done and where it is, and the commands that show it."""
        done, total = self._last_step or 0, self.spec.total_steps
        lines = [f"finished after step {done}{f' of {total}' if done < total else ''}{outcome and f': {outcome}'}"]
        folder = shlex.quote(str(self.folder))
        if self._file:
            lines.append(f"  curves and completions:  python -m jaxrl_llm report {folder}")
        hf = self.folder / "hf"
        entries = read_json(hf / "config.json")
        if entries is not None and "num_labels" not in entries and (hf / "generation_config.json").is_file():
            model = shlex.quote(str(hf))
            lines.append(f"  completions of a prompt: python -m jaxrl_llm generate --model={model} --prompt=TEXT")
        return lines


def _number(name: str, value: Any) -> int | float:
    item = value.item() if getattr(value, "shape", None) == () else value
    if not isinstance(item, int | float):
        raise ValueError(f"the metric {name!r} is {value!r}, not one number: reduce it before it is logged")
    return int(item) if isinstance(item, bool) else item
