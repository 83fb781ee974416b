"""What is wrong with a text file of rows, in words: the reader's own errors name neither the line nor the fix."""

import json
from pathlib import Path
from typing import Any

import fsspec


def unreadable(file: str, reader: str) -> str | None:
    """Why a local file cannot be read as rows of text: it is empty, or a line is not UTF-8; None when it can.

    Readers take bytes that are no text, and fail much later. Patterns, files in a bucket and compressed files pass.
    """
    place = Path(file).expanduser()
    if not place.is_file():
        return None
    if place.stat().st_size == 0:
        return "the file is empty; give it at least one row"
    if reader not in ("json", "csv") or place.suffix not in (".json", ".jsonl", ".csv", ".txt"):
        return None
    with place.open("rb") as opened:
        for number, line in enumerate(opened, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return f"line {number} is not UTF-8 (byte {line[error.start]:#04x}); save the file as UTF-8"
    return None


def found_in(file: str, reader: str) -> str | None:
    """What is wrong with a json or csv file (no JSON, a column of two types, no rows), with the line; or None."""
    if any(letter in file for letter in "*?[") or reader not in ("json", "csv"):
        return None
    try:
        with fsspec.open(file, "rb", compression="infer") as opened:
            assert not isinstance(opened, list)
            lines = opened.read().split(b"\n")
    except (OSError, ValueError, ImportError):
        return None  # the reader's own error says more
    return _damaged_json(lines) if reader == "json" else _damaged_csv(lines)


def _damaged_json(lines: list[bytes]) -> str | None:
    try:
        whole = json.loads(b"\n".join(lines))
    except ValueError as error:
        if not isinstance(error, json.JSONDecodeError):
            return None
        if lines[0].lstrip().startswith(b"["):
            return f"line {error.lineno} is not JSON ({error.msg})"
    else:
        if isinstance(whole, list):
            return _mixed([(f"row {index}", row) for index, row in enumerate(whole)])
        return None if isinstance(whole, dict) else "it holds neither objects nor a list of them"
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append((f"line {number}", json.loads(line)))
        except json.JSONDecodeError as error:
            return f"line {number} is not JSON ({error.msg}): {line.decode('utf-8')[:80]!r}; mend or delete the line"
    return _mixed(rows)


def _mixed(rows: list[tuple[str, Any]]) -> str | None:
    """The first row that is no object, or whose column has another type than in the rows before."""
    seen: dict[str, tuple[str, str]] = {}
    for where, row in rows:
        if not isinstance(row, dict):
            return f"{where} is {json.dumps(row)[:80]}, not an object with the columns as keys"
        for name, value in row.items():
            if value is None:
                continue
            shape = _shape(value)
            before, first = seen.setdefault(name, (shape, where))
            if shape != before:
                return (
                    f"column {name!r} is {shape} in {where} but {before} in {first}; a column has one type: write "
                    "all of them alike"
                )
    return None


def _shape(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    kinds = {str: "text", int: "a number", float: "a number", dict: "an object"}
    if isinstance(value, list):
        inner = {_shape(item) for item in value if item is not None}
        return f"a list of {inner.pop()}" if len(inner) == 1 else "a list" if not inner else "a list of many types"
    return kinds.get(type(value), type(value).__name__)


def _damaged_csv(lines: list[bytes]) -> str | None:
    if not any(line.strip() for line in lines[1:]):
        return "the file has a header but no rows"
    return None
