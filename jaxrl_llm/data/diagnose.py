"""Which reader reads a file of rows; and the faults of text files, with their lines, which the readers do not name."""

import json
from pathlib import Path
from typing import Any

import fsspec

READERS = {
    ".parquet": "parquet", ".jsonl": "json", ".json": "json", ".ndjson": "json", ".csv": "csv", ".tsv": "csv",
    ".arrow": "arrow", ".txt": "text",
}  # fmt: skip
POINTER = b"version https://git-lfs.github.com/"  # what a file begins with until it is downloaded
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
TYPE_NAMES = {bool: "true or false", str: "text", int: "a number", float: "a number", dict: "an object"}


def reader_of(path: str) -> str | None:
    """The reader for a file, from its name; None for a name that tells nothing."""
    suffixes = Path(path).suffixes
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return READERS.get(suffixes[-1].lower()) if suffixes else None


def encoding_fault(file: str, reader: str) -> str | None:
    """The fault of a local file without rows of text (it is blank, a line is not UTF-8, or it stands for a file that is
    not downloaded); None when it has no fault.

    Readers take bytes that are no text, and fail much later. Patterns, files in a bucket and compressed files pass.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        return None
    if path.stat().st_size == 0:
        return "the file is empty; give it at least one row"
    with path.open("rb") as opened:
        if opened.read(len(POINTER)) == POINTER:
            return "the file is a pointer of Git LFS in the place of the rows; run git lfs pull in its folder"
    if reader not in ("json", "csv", "text") or path.suffix not in (
        ".json",
        ".jsonl",
        ".ndjson",
        ".csv",
        ".tsv",
        ".txt",
    ):
        return None
    with path.open("rb") as opened:
        blank = True
        for number, line in enumerate(opened, start=1):
            if blank and reader == "text" and line.lstrip().startswith((b'{"', b'[{"')):
                return (
                    f"line {number} is JSON, but every line of a .txt file is a text: name it .jsonl, or say so with "
                    "ds_type (data.sources)"
                )
            blank = blank and not line.strip()
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return f"line {number} is not UTF-8 (byte {line[error.start]:#04x}); save the file as UTF-8"
    return "the file has empty lines alone; give it at least one row" if blank else None


def content_fault(file: str) -> str | None:
    """The fault of a json or csv file that could not be read, with its line; None when nothing is found.

    It is no JSON, a row that is no object, a column of two types, or a csv file without rows.
    """
    reader = reader_of(file)
    if any(letter in file for letter in "*?[") or reader not in ("json", "csv"):
        return None
    try:
        with fsspec.open(file, "rb", compression="infer") as opened:
            assert not isinstance(opened, list)
            lines = opened.read().split(b"\n")
    except (OSError, ValueError, ImportError):
        return None  # the reader's own error says more
    if not any(line.strip() for line in lines):
        return "the file is empty; give it at least one row"
    if reader == "csv":
        return None if any(line.strip() for line in lines[1:]) else "the file has a header but no rows"
    try:
        document = json.loads(b"\n".join(lines))
    except json.JSONDecodeError as error:
        if lines[0].lstrip().startswith(b"["):
            return f"line {error.lineno} is not JSON ({error.msg})"
    except ValueError:
        return None  # not text at all
    else:
        if document in ([], {}):
            return f"the {'list' if document == [] else 'object'} has no rows; give it at least one"
        if isinstance(document, list):
            return _row_fault([(f"row {index}", row) for index, row in enumerate(document)])
        return None if isinstance(document, dict) else "it holds neither objects nor a list of them"
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append((f"line {number}", json.loads(line)))
        except json.JSONDecodeError as error:
            return f"line {number} is not JSON ({error.msg}): {line.decode('utf-8')[:80]!r}; fix or delete the line"
    return _row_fault(rows)


def _row_fault(rows: list[tuple[str, Any]]) -> str | None:
    """The fault of the first row that is no object, or whose column has another type than in the rows before."""
    types: dict[str, tuple[str, str]] = {}
    for line, row in rows:
        if not isinstance(row, dict):
            return f"{line} is {json.dumps(row)[:80]}, not an object with the columns as keys"
        for name, value in row.items():
            if value is None:
                continue
            type_name = _type_name(value)
            first_type, first_line = types.setdefault(name, (type_name, line))
            if type_name != first_type:
                return (
                    f"column {name!r} is {type_name} in {line} but {first_type} in {first_line}; a column has one "
                    "type: write all of them alike"
                )
    return None


def _type_name(value: Any) -> str:
    if isinstance(value, list):
        inner = {_type_name(item) for item in value if item is not None}
        return f"a list of {inner.pop()}" if len(inner) == 1 else "a list" if not inner else "a list of many types"
    return TYPE_NAMES.get(type(value), type(value).__name__)
