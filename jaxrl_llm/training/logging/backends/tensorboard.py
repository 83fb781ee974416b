"""TensorBoard: event files in output_dir/tensorboard. It has no tables, so completions are a text in Markdown."""

import importlib
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.training.logging.backends import Identity

FOLDER = "tensorboard"


class TensorBoard:
    """Writes event files through tensorboardX; what a run logged after the step it goes on from is marked as purged."""

    def __init__(self, run: Identity):
        folder = run.folder / FOLDER
        if run.resume_step is None:
            shutil.rmtree(folder, ignore_errors=True)
        purge = None if run.resume_step is None else run.resume_step + 1
        # Without a suffix, files that are begun in one second have one name, and the second replaces the first.
        suffix = f".{time.time_ns()}"
        self._writer = importlib.import_module("tensorboardX").SummaryWriter(
            str(folder), purge_step=purge, flush_secs=10, filename_suffix=suffix
        )
        if run.resume_step is None:
            self._writer.add_text("config", "```json\n" + json.dumps(run.settings, indent=2, default=str) + "\n```", 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes a scalar for each metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def table(self, name: str, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
        """Writes the table as Markdown."""
        self._writer.add_text(name, markdown(columns), step)

    def close(self, failed: bool) -> None:
        """Writes what is buffered."""
        self._writer.close()


def markdown(columns: Mapping[str, Sequence[Any]]) -> str:
    """The Markdown of a table: texts stand as code, a line each, so that nothing in them is read as markup."""
    rows = [list(columns), ["---"] * len(columns), *zip(*columns.values(), strict=True)]
    return "\n".join("| " + " | ".join(_cell(value, head=i < 2) for value in row) + " |" for i, row in enumerate(rows))


def _cell(value: Any, head: bool) -> str:
    if head or not isinstance(value, str):
        return "" if value is None else str(value)
    text = json.dumps(value, ensure_ascii=False)[1:-1].replace("`", "'").replace("|", "¦")
    return f"`{text}`" if text else ""
