"""The completions of runs as compact columns: evenly spaced steps, texts once each and shortened in the middle."""

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.tools.report.runs import ReportedRun
from jaxrl_llm.training.logging.console import as_text, is_pictures
from jaxrl_llm.training.logging.records import COMPLETIONS

CHUNK = 10_000  # completions decoded at a time by the page


def chunks_of(runs: Sequence[ReportedRun], rows: int, characters: int) -> Iterator[dict[str, Any]]:
    """Pieces of the table of completions: {"rows", "run", "texts", "columns": {name: values}}, of about CHUNK rows.

    `run` is a run's number, columns of texts hold indices into `texts`, those of numbers have six digits. At most
    `rows` completions in all (a step whole or not at all), and `characters` of each text. Those of evaluations, known
    by their column evaluation, are a quarter of them at most. Raises ConfigError for a file that cannot be read.
    """
    piece = _Piece(characters)
    share = rows // len(runs)
    for number, run in enumerate(runs):
        held_out = picked_files(run.folder / COMPLETIONS, share // 4, "evaluation")
        left = share - sum(map(count_rows, held_out))
        for path in (*picked_files(run.folder / COMPLETIONS, left), *held_out):
            try:
                table = pq.read_table(path).to_pydict()
            except (OSError, ValueError) as error:
                raise ConfigError(f"{path} cannot be read: {error}; remove it") from error
            piece.add(number, table)
            if piece.rows >= CHUNK:
                yield piece.content()
                piece = _Piece(characters)
    if piece.rows:
        yield piece.content()


def picked_files(folder: Path, rows: int, kind: str = "completions") -> list[Path]:
    """Files of completions (or, as `kind` says, of an evaluation's) with at most `rows` rows together, evenly spaced.

    The last is among them where it fits.
    """
    paths = sorted(folder.glob(f"{kind}_*.parquet"), key=lambda path: int(path.stem.rpartition("_")[2]))
    counts = {path: count_rows(path) for path in paths}
    every = max(1, math.ceil(sum(counts.values()) / max(1, rows)))
    while paths and sum(counts[path] for path in paths[::-1][::every]) > rows and every < len(paths):
        every += 1
    return paths[::-1][::every][::-1]


def count_rows(path: Path) -> int:
    """The rows of a file of completions; raises ConfigError when it cannot be read."""
    try:
        return pq.read_metadata(path).num_rows
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; remove it") from error


class _Piece:
    """Columns that grow, and the texts they point to."""

    def __init__(self, characters: int):
        self.rows = 0
        self._characters = characters
        self._texts: dict[str, int] = {}
        self._runs: list[int] = []
        self._columns: dict[str, list[Any]] = {}
        self._kinds: dict[str, str] = {}

    def add(self, run: int, table: dict[str, list[Any]]) -> None:
        count = len(table["step"])
        for name in (*self._columns, *(name for name in table if name not in self._columns)):
            column = self._columns.setdefault(name, [None] * self.rows)
            cells = table.get(name, [None] * count)
            is_text = any(isinstance(cell, str | list | dict) for cell in cells)
            if is_text and self._kinds.get(name) == "number":  # in other steps, or in another run
                column[:] = [None if cell is None else self._text(name, cell) for cell in column]
            if is_text or any(cell is not None for cell in cells):
                self._kinds[name] = "text" if is_text else self._kinds.get(name, "number")
            cell_of = partial(self._text, name) if self._kinds.get(name) == "text" else _short
            column.extend(None if cell is None else cell_of(cell) for cell in cells)
        self._runs += [run] * count
        self.rows += count

    def _text(self, name: str, cell: Any) -> int:
        if is_pictures(cell):
            return self._texts.setdefault(cell, len(self._texts))
        text = cell if isinstance(cell, str) else json.dumps(cell, ensure_ascii=False, default=str)
        if name in ("prompt", "completion") and text.startswith('[{"role"'):
            with contextlib.suppress(ValueError, KeyError, TypeError):  # it only begins like a conversation
                text = as_text(json.loads(text))
        if (left_out := len(text) - self._characters) > 0:
            head = self._characters // 2
            tail = text[head + left_out :]
            text = f"{text[:head]}\n… {left_out:,} characters left out …\n{tail}"
        return self._texts.setdefault(text, len(self._texts))

    def content(self) -> dict[str, Any]:
        columns, kinds = self._columns, {name: self._kinds.get(name, "number") for name in self._columns}
        return {"rows": self.rows, "run": self._runs, "texts": list(self._texts), "kinds": kinds, "columns": columns}


def _short(value: Any) -> float | None:
    if not math.isfinite(value):
        return None
    return float(f"{value:.6g}") if isinstance(value, float) else int(value)
