"""`Delivery`: hands what is logged to one backend from a thread of its own, so that no backend can stop training."""

import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.config import ConfigDict
from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.training.logging.backends import PACKAGES, Backend, identity_of, start
from jaxrl_llm.training.logging.console import as_text

KEPT = 10_000  # steps that wait for a backend that does not take them; the oldest are dropped then
PATIENCE = 60.0  # seconds that the end of a run waits for a backend


class Delivery:
    """Sends metrics and tables to `backend`, in order; `warn` is told when it fails, and when it works again.

    A backend that fails is tried again with every step: what it did not take waits for it. Two failures in a row mean
    that the backend is down; one between successes means that it refuses that one piece, which is then dropped.
    metrics.jsonl has everything, whatever a backend does.
    """

    def __init__(self, name: str, backend: Backend, warn: Callable[[str], None], patience: float = PATIENCE):
        self._name, self._backend, self._warn, self._patience = name, backend, warn, patience
        self._fresh: list[Callable[[], None]] = []
        self._waiting: list[Callable[[], None]] = []  # of the thread
        self._changed = threading.Condition()
        self._ended: bool | None = None  # whether the run failed, once it is over
        self._down = False
        self._lost = 0
        self._thread = threading.Thread(target=self._work, name=f"logging to {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the metrics of a step; returns at once."""
        self._add(partial(self._backend.log, step, dict(metrics)))

    def table(self, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
        """Sends a table of completions; returns at once."""
        self._add(partial(self._backend.table, step, columns))

    def close(self, failed: bool) -> None:
        """Waits `patience` seconds at most for what is still to be sent, and tells how much was not."""
        with self._changed:
            self._ended = failed
            self._changed.notify()
        self._thread.join(self._patience)
        left = len(self._fresh) + len(self._waiting) + self._lost
        if self._thread.is_alive():
            self._warn(f"{self._name} does not answer; the run ends without it")
        if left:
            self._warn(f"{self._name} lacks {left} of the pieces that were logged; metrics.jsonl has them all")

    def _add(self, piece: Callable[[], None]) -> None:
        with self._changed:
            self._fresh.append(piece)
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._fresh) or self._ended is not None)
                self._waiting += self._fresh
                self._fresh.clear()
                ended = self._ended
            over = max(0, len(self._waiting) - KEPT)
            self._lost += over
            self._waiting = self._send(self._waiting[over:])
            if ended is not None:
                self._end(ended)
                return

    def _send(self, pieces: list[Callable[[], None]]) -> list[Callable[[], None]]:
        """Sends what it can; returns what is to be tried again."""
        failed: list[Callable[[], None]] = []
        for number, piece in enumerate(pieces):
            try:
                piece()
            except Exception as error:
                failed.append(piece)
                if not self._down:
                    self._down = True
                    self._warn(
                        f"logging.backends: {self._name} failed: {type(error).__name__}: {error}; training goes on, "
                        "and what it did not take is tried again with the next steps"
                    )
                if len(failed) == 2:
                    return [*failed, *pieces[number + 1 :]]
            else:
                if self._down:
                    self._down = False
                    dropped = f"; {len(failed)} piece that it refuses is dropped" if failed else ""
                    self._warn(f"logging.backends: {self._name} works again{dropped}")
                self._lost += len(failed)
                failed = []
        return failed

    def _end(self, failed: bool) -> None:
        try:
            self._backend.close(failed)
        except Exception as error:
            self._warn(f"logging.backends: {self._name} could not be closed: {type(error).__name__}: {error}")


def deliveries(
    config: ConfigDict, folder: Path, resume_step: int | None, warn: Callable[[str], None]
) -> list[Delivery]:
    """A Delivery to each backend of `logging.backends` that is a package of its own.

    One that cannot start is an error, ConfigError, when the run starts; a run that goes on warns of it, and goes on
    without it.
    """
    run, started = identity_of(config, folder, resume_step), []
    for name in dict.fromkeys(config.logging.backends):
        if name not in PACKAGES:
            continue
        try:
            started.append(Delivery(name, start(name, run), warn))
        except Exception as error:
            text = f"logging.backends has {name}, which cannot start: {type(error).__name__}: {error}"
            if resume_step is None:
                for delivery in started:
                    delivery.close(failed=True)
                raise (error if isinstance(error, ConfigError) else ConfigError(text)) from error
            warn(f"{text}; the run goes on without it")
    return started


def table_of(rows: Sequence[Mapping[str, Any]], limit: int) -> dict[str, list[Any]]:
    """The columns of at most `limit` of the rows, evenly spaced; a cell is a number, a text, or None."""
    picked = [rows[i * len(rows) // limit] for i in range(limit)] if limit < len(rows) else list(rows)
    names = dict.fromkeys(name for row in picked for name in row)
    return {name: [_cell(row.get(name)) for row in picked] for name in names}


def _cell(value: Any) -> int | float | str | None:
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, int | float | str):
        return value
    is_conversation = isinstance(value, list | tuple) and all(isinstance(turn, Mapping) for turn in value)
    return as_text(value) if is_conversation else json.dumps(value, ensure_ascii=False, default=repr)
