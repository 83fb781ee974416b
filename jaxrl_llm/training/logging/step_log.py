"""`StepLog`: from what a step leaves on the device to a line of the log, and the counts that go on with a run."""

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.config import ConfigError
from jaxrl_llm.training.logging.health import HealthWarnings, warnings_of
from jaxrl_llm.training.logging.logger import Logger
from jaxrl_llm.training.logging.stopwatch import Stopwatch
from jaxrl_llm.training.objectives.policy_gradient import merged_by
from jaxrl_llm.training.online import Row

Metrics = dict[str, float]


class Step(NamedTuple):
    """A step that was computed, or still is: its metrics are on the device."""

    number: int
    began: float  # of time.perf_counter
    metrics: dict[str, Any]  # of the experience
    updates: list[Any]  # of each minibatch
    table: list[Row]


class StepLog:
    """The metrics of a run's steps, each logged once and in order.

    `add` takes a step that has been dispatched, `settle` waits for it and logs it. The loop may dispatch a step before
    it settles the one before, so that the device does not wait for the host.
    """

    def __init__(self, config, source: Any, watch: Stopwatch, logger: Logger, counts: dict[str, int]):
        self.counts = counts  # num_tokens so far, and skipped: steps in a row that changed nothing
        self.history: list[Metrics] = []
        self._config = config
        self._source = source
        self._watch = watch
        self._logger = logger
        self._health = HealthWarnings()
        self._waiting: Step | None = None
        self._read: Metrics | None = None  # of the step that waits, once it is done
        self._settled = 0.0

    def add(self, step: Step) -> None:
        """Takes a step; the one before is settled."""
        self.settle()
        self._waiting = step

    def settle(self, evaluate: Callable[[], Metrics] | None = None) -> None:
        """Logs the step that waits, if one does, with the metrics of its evaluation; waits for it as `read` does."""
        if self._waiting is None:
            return
        step, metrics = self._waiting, self.read()
        self._waiting = self._read = None
        self.log(step.number, metrics, evaluate)

    def read(self) -> Metrics:
        """The metrics of the step that waits, once it is done.

        Raises ConfigError when more steps in a row than optimizer.max_skipped_steps had no finite gradient.
        """
        assert self._waiting is not None
        if self._read is None:
            self._read = self._finish(self._waiting)
        return self._read

    def _finish(self, step: Step) -> Metrics:
        with self._watch("update"):
            updates = merge(step.updates)
            metrics = {n: float(x) for n, x in jax.device_get(step.metrics).items()} | updates
        trained = metrics["num_tokens"]
        self.counts = {
            "num_tokens": self.counts["num_tokens"] + int(trained),
            "skipped": _skipped(self._config, metrics, step.number, self.counts["skipped"]),
        }
        if self.counts["skipped"]:
            loss = f"(loss {metrics['loss']:g})"
            self._logger.warn(f"step {step.number} changed nothing: its gradient is not finite {loss}")
        else:
            self._source.learn(updates)
        now = time.perf_counter()
        seconds, self._settled = now - max(step.began, self._settled), now
        found = warnings_of(self._config, metrics)
        self.warn(self._health.due(step.number, found))
        metrics |= {
            **{f"warning/{name}": 1.0 for name in found},
            "num_tokens": self.counts["num_tokens"],
            "step_time": seconds,
            "tokens_per_second": trained / seconds,
        } | self._watch.take()
        if step.table:
            self._logger.completions(step.number, step.table)
        return metrics

    def log(self, step: int, metrics: Metrics, evaluate: Callable[[], Metrics] | None = None) -> None:
        """Logs the metrics of a step, with those of its evaluation."""
        if evaluate is not None:
            with self._watch("evaluation"):
                metrics = metrics | evaluate()
            metrics |= self._watch.take()
        self._logger.log(step, metrics)
        self.history.append({"step": step, **metrics})

    @property
    def newest(self) -> Metrics:
        """The metrics of the step that was logged last, none before the first."""
        return self.history[-1] if self.history else {}

    def warn(self, lines: Iterable[str]) -> None:
        """Shows warnings."""
        for line in lines:
            self._logger.warn(line)


def merge(updates: list[Any]) -> Metrics:
    """The metrics of several updates as those of one step: means, and for minima and maxima the extreme."""
    values = [{name: float(value) for name, value in metrics.items()} for metrics in jax.device_get(updates)]
    by = {"max": max, "min": min, "sum": np.mean}
    return {name: float(by[merged_by(name)]([metrics[name] for metrics in values])) for name in values[0]}


def _skipped(config, metrics: Metrics, step: int, skipped: int) -> int:
    """Steps in a row, this one included, that changed nothing; raises ConfigError when they are too many."""
    skipped = skipped + 1 if metrics["nonfinite_gradient"] == 1 else 0
    if skipped > config.optimizer.max_skipped_steps:
        raise ConfigError(
            f"step {step}: the gradient is not finite (loss {metrics['loss']:g}, norm {metrics['grad_norm']:g}), "
            f"{skipped} step{'s' if skipped > 1 else ''} in a row (optimizer.max_skipped_steps = "
            f"{config.optimizer.max_skipped_steps}); the last checkpoint is intact. Lower optimizer.learning_rate, or "
            "check the data and rewards of that step."
        )
    return skipped
