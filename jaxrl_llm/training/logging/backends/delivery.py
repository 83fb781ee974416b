"""`Delivery`: sends metrics to one backend from a thread of its own, so that no backend can stop training."""

import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.training.logging.backends import PACKAGES, Backend, Identity, start
from jaxrl_llm.training.logging.console import as_text
from jaxrl_llm.training.logging.records import of_one_type

MAX_PENDING = 10_000  # calls that wait for a backend that is down; the oldest are dropped then
PATIENCE = 60.0  # seconds that the end of a run waits for a backend


class Delivery:
    """Sends metrics and tables to `backend`, in order; calls `warn` when it fails, and when it works again.

    A backend that fails is tried again with every step: the calls that failed stay pending. Two failures in a row mean
    that the backend is down; one between successes means that it refuses that one call, which is then dropped.
    metrics.jsonl has everything, whatever a backend does.
    """

    def __init__(self, name: str, backend: Backend, warn: Callable[[str], None]):
        self._name, self._backend, self._warn = name, backend, warn
        self._queue: list[Callable[[], None]] = []  # from the trainer's thread to this one's
        self._pending: list[Callable[[], None]] = []  # of this one's alone
        self._changed = threading.Condition()
        self._failed: bool | None = None  # None until the run is over
        self._down = False
        self._lost = 0
        self._thread = threading.Thread(target=self._work, name=f"logging to {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics of a step; returns at once."""
        self._add(partial(self._backend.log, step, dict(metrics)))

    def table(self, name: str, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
        """Sends a table of completions; returns at once."""
        self._add(partial(self._backend.table, name, step, columns))

    def close(self, failed: bool) -> None:
        """Waits PATIENCE seconds at most for the pending calls, and warns of those that were not sent."""
        with self._changed:
            self._failed = failed
            self._changed.notify()
        self._thread.join(PATIENCE)
        left = len(self._queue) + len(self._pending) + self._lost
        if self._thread.is_alive():
            self._warn(f"{self._name} does not answer; the run ends without it")
        if left:
            self._warn(f"{self._name} lacks {left} of the pieces that were logged; metrics.jsonl has them all")

    def _add(self, call: Callable[[], None]) -> None:
        with self._changed:
            self._queue.append(call)
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue) or self._failed is not None)
                self._pending += self._queue
                self._queue.clear()
                run_failed = self._failed
            excess = max(0, len(self._pending) - MAX_PENDING)
            self._lost += excess
            self._pending = self._send(self._pending[excess:])
            if run_failed is not None:
                try:
                    self._backend.close(run_failed)
                except Exception as error:
                    self._warn(f"logging.backends: {self._name} could not be closed: {type(error).__name__}: {error}")
                return

    def _send(self, calls: list[Callable[[], None]]) -> list[Callable[[], None]]:
        """Makes the calls in order until two in a row fail; returns those to try again."""
        failed: list[Callable[[], None]] = []
        for number, call in enumerate(calls):
            try:
                call()
            except Exception as error:
                failed.append(call)
                if not self._down:
                    self._down = True
                    self._warn(
                        f"logging.backends: {self._name} failed: {type(error).__name__}: {error}; training goes on, "
                        "and what it did not take is tried again with the next steps"
                    )
                if len(failed) == 2:
                    return [*failed, *calls[number + 1 :]]
            else:
                if self._down:
                    self._down = False
                    dropped = f"; {len(failed)} piece that it refuses is dropped" if failed else ""
                    self._warn(f"logging.backends: {self._name} works again{dropped}")
                self._lost += len(failed)
                failed = []
        return failed


def deliveries(backends: Sequence[str], run: Identity, warn: Callable[[str], None]) -> list[Delivery]:
    """A Delivery to each of `backends` that is a package of its own.

    One that cannot start is an error, ConfigError, when the run starts; a resumed run warns of it, and goes on without.
    """
    started: list[Delivery] = []
    for name in dict.fromkeys(backends):
        if name not in PACKAGES:
            continue
        try:
            started.append(Delivery(name, start(name, run), warn))
        except Exception as error:
            text = f"logging.backends has {name}, which cannot start: {type(error).__name__}: {error}"
            if run.resume_step is None:
                for delivery in started:
                    delivery.close(failed=True)
                raise (error if isinstance(error, ConfigError) else ConfigError(text)) from error
            warn(f"{text}; the run goes on without it")
    return started


def table_of(rows: Sequence[Mapping[str, Any]], limit: int) -> dict[str, list[Any]]:
    """The columns of at most `limit` of the rows, evenly spaced; a cell is a number, a text, or None."""
    picked = [rows[i * len(rows) // limit] for i in range(limit)] if limit < len(rows) else list(rows)
    names = dict.fromkeys(name for row in picked for name in row)
    return {name: of_one_type([_cell(row.get(name)) for row in picked]) for name in names}


def _cell(value: Any) -> int | float | str | None:
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, int | float | str):
        return value
    is_conversation = isinstance(value, list | tuple) and all(isinstance(turn, Mapping) for turn in value)
    return as_text(value) if is_conversation else json.dumps(value, ensure_ascii=False, default=repr)
