"""The files that a run records itself in: written so that a kill tears nothing, trimmed on resume, read back.

The layout under output_dir:

    metrics.jsonl                          one JSON object a step: {"step": 3, "time": 1767225600.0, "reward": 0.5, ...}
    completions/completions_00010.parquet  one row per completion: step, prompt, completion, each reward, advantage, ...
    completions/evaluation_00025.parquet   the same of an evaluation, and evaluation (sampled or greedy), no advantage
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.files import replaced
from jaxrl_llm.environments.protocol import encodable

METRICS = "metrics.jsonl"
COMPLETIONS = "completions"


class MetricsFile:
    """metrics.jsonl, open for appending; a line that the disk has no room for waits in `pending` for the next."""

    def __init__(self, path: Path):
        # Unbuffered and in append mode: a line is one write, so a killed process leaves it complete or not at all.
        self._file = path.open("ab", buffering=0)
        self.pending: list[bytes] = []

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._file.closed

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a line; `flush` writes it."""
        self.pending.append(_line(record))

    def flush(self) -> bool:
        """Writes the pending lines, oldest first; True where the file had been deleted, and begins anew with them.

        Raises OSError at the first that cannot be written, and leaves none of it.
        """
        path = Path(self._file.name)
        deleted = not path.exists()
        if deleted:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._file:
                self._file = path.open("ab", buffering=0)
        while self.pending:
            line = self.pending[0]
            size = os.fstat(self._file.fileno()).st_size
            written = self._file.write(line)
            if written != len(line):
                self._file.truncate(size)
                raise OSError(
                    f"{self._file.name}: only {written} of {len(line)} bytes could be written; is the disk full?"
                )
            self.pending.pop(0)
        return deleted

    def close(self) -> None:
        """Closes the file once its lines are on the disk."""
        with self._file:
            os.fsync(self._file.fileno())


def read_metrics(path: str | Path) -> Iterator[dict[str, Any]]:
    """The objects of a metrics.jsonl, one a step; numbers that were not finite are None.

    A last line that is torn (the process or its machine stopped while it was written) is left out.
    Raises ConfigError for any other line that is not a JSON object with a step.
    """
    return (record for record, _ in _records(Path(path)))


def _records(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """The objects of a metrics.jsonl, as `read_metrics` gives them, with their lines."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
            except ValueError as error:
                if not file.read(1):
                    return
                raise ConfigError(f"line {number} of {path} is not JSON ({error}): repair or remove it") from error
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                raise ConfigError(f"line {number} of {path} is not an object with a step: repair or remove it")
            yield record, line.rstrip(b"\r\n") + b"\n"


def trim_metrics(path: Path, last_step: int) -> None:
    """Removes the lines of metrics.jsonl after `last_step`, and a torn last line; the file is replaced atomically."""
    with replaced(path) as unfinished, unfinished.open("wb") as file:
        for record, line in _records(path):
            if record["step"] <= last_step:
                file.write(line)
        file.flush()
        os.fsync(file.fileno())


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def write_completions(folder: Path, step: int, rows: Sequence[Mapping[str, Any]], held_out: bool = False) -> Path:
    """Writes `completions_<step>.parquet` atomically: it is complete or not there. Returns its path.

    Completions of an evaluation (`held_out`) are in `evaluation_<step>.parquet`.

    Each row is one completion: `prompt` and `completion` (texts; conversations are written as JSON), then a number for
    each reward function under its name, `advantage`, and any other columns. Columns are step, prompt, completion, and
    the others in the order they first appear; a row without one holds null there.

    Raises ValueError for a row without prompt or completion, or one with a `step`.
    """
    names: dict[str, None] = dict.fromkeys(("prompt", "completion"))
    for row in rows:
        if "prompt" not in row or "completion" not in row or "step" in row:
            raise ValueError(f"a row of completions needs prompt and completion, and no step, but has {list(row)}")
        names.update(dict.fromkeys(row))
    columns = {"step": pa.array([step] * len(rows), pa.int64())}
    for name in names:
        columns[name] = pa.array(of_one_type([_parquet_cell(name, row.get(name)) for row in rows]))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{'evaluation' if held_out else 'completions'}_{step:05d}.parquet"
    with replaced(path) as unfinished:
        pq.write_table(pa.table(columns), unfinished)
    return path


def _parquet_cell(name: str, value: Any) -> Any:
    if name in ("prompt", "completion") and not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return value.item() if isinstance(value, np.generic) else value


def of_one_type(cells: list[Any]) -> list[Any]:
    """Cells of one type, as tables take them: for one row a scorer may say True, for the next 0.5, or a text.

    Numbers and booleans side by side become floats; cells of other types, and what no table holds, become texts.
    """
    known = [cell for cell in cells if cell is not None]
    try:
        if len({type(cell) for cell in known}) > 1 and all(isinstance(cell, bool | int | float) for cell in known):
            return [None if cell is None else float(cell) for cell in cells]
        pa.array(cells)
    except (pa.ArrowException, ValueError, OverflowError):  # the last two for halves of characters and large integers
        return [None if cell is None else encodable(cell if isinstance(cell, str) else repr(cell)) for cell in cells]
    return cells


def remove_completions(folder: Path, last_step: int | None) -> None:
    """Removes the completions files of the steps after `last_step` (all when None), and unfinished ones."""
    for path in folder.glob("*.parquet*"):
        match = re.fullmatch(r"(\.?)(?:completions|evaluation)_(\d+)\.parquet(\.part)?", path.name)
        if match and (match[1] or match[3] or last_step is None or int(match[2]) > last_step):
            path.unlink()
