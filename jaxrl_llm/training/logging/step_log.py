"""`StepLog`: turns what a step leaves on the device into a line of the log, and keeps the counts of a run.

The loop may dispatch a step before the one before it is settled, so that the device does not wait for the host.
"""

import math
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.algorithms.losses import NEUTRAL
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.wording import amount
from jaxrl_llm.distributed import processes
from jaxrl_llm.distributed.turns import yielded
from jaxrl_llm.training.logging.health import HealthSpec, HealthWarnings, health_warnings
from jaxrl_llm.training.logging.logger import Logger
from jaxrl_llm.training.logging.stopwatch import Stopwatch

Metrics = dict[str, float]


class Step(NamedTuple):
    """A dispatched step, whose metrics are on the device and may not be computed yet."""

    number: int
    began: float  # time.perf_counter() before its batch was made
    metrics: dict[str, Any]  # of the experience
    updates: list[Any]  # the metrics of each minibatch
    table: list[dict[str, Any]]  # a row per completion
    compiled: float = 0.0  # seconds of compilation in the stopwatch before its batch was made
    flops: Any = None  # the model FLOPs of its updates `[]`; None: not known
    overlaps: bool = False  # the next step may be dispatched before this one is computed


class StepLog:
    """The metrics of a run's steps, each logged once and in order.

    `add` takes a step that has been dispatched, `settle` waits for it and logs it. `learn` is called with the metrics
    of each step whose update was made (`source.learn`). `counts` holds `num_tokens` so far and `skipped`, the steps in
    a row that changed nothing; a checkpoint keeps both. `peak` are the most operations a second of all devices
    together, 0 where they are not known.
    """

    def __init__(
        self,
        health: HealthSpec,
        learn: Callable[[Metrics], None],
        watch: Stopwatch,
        logger: Logger,
        counts: dict[str, int],
        peak: float = 0.0,
    ):
        self.counts = counts
        self.peak = peak
        self.history: list[Metrics] = []
        self._health = health
        self._learn = learn
        self._watch = watch
        self.logger = logger
        self._warnings = HealthWarnings()
        self._pending: Step | None = None
        self._pending_metrics: Metrics | None = None  # once they have been read
        self._overwritten: set[str] = set()  # names that were warned of
        self._finished = 0.0  # time.perf_counter() when the newest step was
        self._compiled = 0.0  # seconds of compilation in the stopwatch then
        self._machine = Machine()

    def add(self, step: Step) -> None:
        """Takes a step, after the one before is settled."""
        self.settle()
        self._pending = step

    def settle(self, evaluate: Callable[[], Metrics] | None = None) -> None:
        """Logs the pending step, if there is one, with the metrics of its evaluation; waits for it as `read` does.

        Where the evaluation raises, the step is still pending.
        """
        if self._pending is None:
            return
        self.log(self._pending.number, self.read(), evaluate)
        self._pending = self._pending_metrics = None

    def read(self) -> Metrics:
        """The metrics of the pending step, once it is computed.

        Raises ConfigError when more steps in a row than optimizer.max_skipped_steps had no finite gradient.
        """
        assert self._pending is not None
        if self._pending_metrics is None:
            self._pending_metrics = self._finish(self._pending)
        return self._pending_metrics

    def _finish(self, step: Step) -> Metrics:
        with self._watch("update"), yielded():
            updates = merge(step.updates)
            metrics = {name: float(value) for name, value in jax.device_get(step.metrics).items()} | updates
        trained = metrics["num_tokens"]
        failed = [of for of in ("", "critic/") if metrics.get(f"{of}nonfinite_gradient") == 1]  # in every update
        skipped, what = self.counts["skipped"] + 1 if failed else 0, ""
        for of in failed[:1]:
            numbers = f"loss {metrics[f'{of}loss']:g}, norm {metrics[f'{of}grad_norm']:g}"
            what = f"{'the critic has a gradient that' if of else 'the gradient'} is not finite ({numbers})"
        if skipped > self._health.max_skipped_steps:
            raise ConfigError(
                f"step {step.number}: {what}, {amount(skipped, 'step')} in a row "
                f"(optimizer.max_skipped_steps = {self._health.max_skipped_steps}); the last checkpoint is intact. "
                "Lower optimizer.learning_rate, or check the data and rewards of that step."
            )
        self.counts = {"num_tokens": self.counts["num_tokens"] + int(trained), "skipped": skipped}
        if skipped:
            self.warn([f"step {step.number}: {what}, and changed nothing"])
        else:
            self._learn(updates)
        # Steps overlap: the time of one starts where the one before it ended.
        now = time.perf_counter()
        seconds, self._finished = now - max(step.began, self._finished), now
        compiled = self._watch.totals["compile"]
        working, self._compiled = seconds - (compiled - max(step.compiled, self._compiled)), compiled
        taken = self._watch.take()
        share = {}
        if step.flops is not None:
            # Where steps overlap, the devices compute the update while the host makes the next batch.
            updating = working if step.overlaps else taken["time/update"]
            share = {"mfu": float(step.flops) / (self.peak * updating)}
        warnings = health_warnings(self._health, metrics)
        self.warn(self._warnings.due(step.number, warnings))
        own = {
            **{f"warning/{name}": 1.0 for name in warnings},
            "num_tokens": self.counts["num_tokens"],
            "step_tokens": trained,
            "step_time": seconds,
            "tokens_per_second": trained / working,
            **share,
            **self._machine.metrics(),
        } | taken
        # The run's own names meet in num_tokens alone: any other is one that a reward function has logged.
        for name in sorted(step.metrics.keys() & (updates | own).keys() - {"num_tokens"} - self._overwritten):
            self._overwritten.add(name)
            self.warn(
                [
                    f"step {step.number}: a reward function logs {name!r}, which is the run's own metric, and it is "
                    "not shown: log it under another name"
                ]
            )
        metrics |= own
        if step.table:
            self.logger.completions(step.number, step.table)
        return metrics

    def log(self, step: int, metrics: Metrics, evaluate: Callable[[], Metrics] | None = None) -> None:
        """Logs the metrics of a step, with those of its evaluation."""
        if evaluate is not None:
            with self._watch("evaluation"):
                metrics = metrics | evaluate()
            for name, seconds in self._watch.take().items():  # both the step and its evaluation may have compiled
                metrics[name] = metrics.get(name, 0.0) + seconds
        self.logger.log(step, metrics)
        self.history.append({"step": step, **metrics})

    @property
    def newest(self) -> Metrics:
        """The metrics of the step that was logged last, or none before the first."""
        return self.history[-1] if self.history else {}

    def warn(self, lines: Iterable[str]) -> None:
        """Shows a warning for each of the lines, which are of the run: of several processes the first alone does."""
        for line in lines if jax.process_index() == 0 else ():
            self.logger.warn(line)


class Machine:
    """Memory and processors of a process, as metrics `machine/...`; memory is in GiB (2^30 bytes).

    They are, of accelerators, the memory in use and its peak since the start, of the fullest device, where the backend
    counts them (CPUs do not); the peak of the process's resident memory; and the processor cores that the process kept
    busy, on average since the last call. Of several processes each number is the largest, in the step before; besides
    these there are the slowest process, for which the others waited, and how much more than it one of them did
    (`processes.of_each`).
    """

    def __init__(self) -> None:
        self._since = time.perf_counter(), _cpu_seconds()

    def metrics(self) -> Metrics:
        """The metrics by name, those of the processors since the last call."""
        (then, used), self._since = self._since, (time.perf_counter(), _cpu_seconds())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)  # bytes
        metrics = {
            "machine/host_memory_peak_gib": peak / 2**30,
            "machine/cpu_cores": (self._since[1] - used) / (self._since[0] - then),
        }
        devices = [stats for device in jax.local_devices() if (stats := device.memory_stats())]
        for name, key in (("memory", "bytes_in_use"), ("memory_peak", "peak_bytes_in_use")):
            if found := [stats[key] for stats in devices if key in stats]:
                metrics[f"machine/device_{name}_gib"] = max(found) / 2**30
        if jax.process_count() == 1:
            return metrics
        of_each = processes.of_each(metrics)
        waited = [each["waited"] for each in of_each]
        largest = {name: max(each[name] for each in of_each) for name in metrics}
        slowest = {"slowest_process": float(np.argmin(waited)), "waited_seconds": max(waited) - min(waited)}
        return largest | {f"machine/{name}": x for name, x in slowest.items()}


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def merge(updates: list[Mapping[str, Any]]) -> Metrics:
    """The metrics of several updates as those of one step: means, and of minima and maxima the extreme.

    Each is that of the updates that have it: a critic may make updates of its own, and a minibatch whose rows are all
    masked has neither a mean nor an extreme over tokens. An update that failed has the numbers with which it failed.
    """
    reduce, merged = {"max": max, "min": min, "sum": np.mean}, {}
    values = [{name: (x.reduce, float(x.value)) for name, x in each.items()} for each in jax.device_get(updates)]
    for each in values:
        failed = any(value for name, (_, value) in each.items() if name.endswith("nonfinite_gradient"))
        for name, (way, value) in each.items():
            way, known = merged.setdefault(name, (way, []))
            if failed or not (math.isnan(value) or (way != "sum" and value == NEUTRAL[way])):
                known.append(value)
    return {name: float(reduce[way](known)) if known else math.nan for name, (way, known) in merged.items()}
