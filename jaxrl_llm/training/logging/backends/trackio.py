"""Trackio: a database in TRACKIO_DIR (else in the cache of Hugging Face), for `trackio show`."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.training.logging.backends import Identity


class Trackio:
    """Logs to one Trackio run, which a resumed run continues."""

    def __init__(self, run: Identity):
        self._trackio = importlib.import_module("trackio")
        self._run = self._trackio.init(
            project=run.project,
            name=run.name,
            config=dict(run.settings),
            resume="never" if run.resume_step is None else "allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics."""
        self._run.log(dict(metrics), step=step)

    def table(self, name: str, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
        """Logs a `trackio.Table` under the name."""
        rows = [list(row) for row in zip(*columns.values(), strict=True)]
        self._run.log({name: self._trackio.Table(columns=list(columns), data=rows)}, step=step)

    def close(self, failed: bool) -> None:
        """Waits until everything is in the database."""
        self._run.finish()
