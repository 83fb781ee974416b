"""Token rows of large sources on disk, so that a second run need not tokenise again.

A file is named by a hash of all it depends on: the data, the format and its code, the tokenizer, the settings, and the
code of this package that makes rows. It is written under another name and then moved, so several processes may work
with one folder at the same time; nothing in it is ever executed.
"""

import contextlib
import hashlib
import json
import logging
import os
import pickle
import uuid
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data import Row
from jaxrl_llm.data.length_limit import REST, LimitedTokenizer
from jaxrl_llm.data.splits import is_table
from jaxrl_llm.data.tokenize import COLUMNS, STEP_LABELS, exchange, prompt_columns

log = logging.getLogger(__name__)

LARGE = 10_000  # rows from which "auto" keeps them: fewer are tokenised in seconds
NUMBERS = ("label", "margin")


def file_of(setting: str, rows: Any, format_key: Any, code: bytes | None, tokenize: LimitedTokenizer) -> Path | None:
    """The file for the token rows of `rows`, or None where none is kept.

    `format_key` identifies the format, and `code` is the text of the user's own; without it nothing is kept.
    `setting` is `auto` (large sources only, in $JAXRL_LLM_CACHE or ~/.cache/jaxrl_llm), a folder, or `none`.
    """
    if setting == "none" or code is None or not (is_table(rows) or isinstance(rows, list)):
        return None
    if setting == "auto" and len(rows) < LARGE:
        return None
    t = tokenize.row_tokenizer
    settings = [t.kind, tokenize.limit, tokenize.overlong, t.loss_on, t.template_kwargs, t.keep_prompt]
    settings += [t.step_separator] if t.kind == "steps" else []
    settings += [] if t.images is None else [t.images.key, str(getattr(t.tokenizer, "image_folder", None))]
    settings += [own] if t.images is not None and (own := getattr(t.tokenizer, "image_settings", None)) else []
    backend = getattr(t.tokenizer, "backend_tokenizer", None)
    tokenizer = [
        backend.to_str() if backend is not None else json.dumps(t.tokenizer.get_vocab(), sort_keys=True),
        type(t.tokenizer).__name__,
        str(getattr(t.tokenizer, "chat_template", "")),
        str(t.tokenizer.special_tokens_map),
        sorted(getattr(t.tokenizer, "without_embedding", ())),  # texts with these are refused
    ]
    try:
        data = rows._fingerprint if is_table(rows) else hashlib.sha256(pickle.dumps(rows)).hexdigest()
    except Exception:  # objects of many kinds cannot be pickled
        return None
    identity = [format_key, settings, tokenizer, data, len(rows)]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=repr).encode())
    digest.update(code)
    package = Path(__file__).parent
    for file in sorted([*package.glob("*.py"), *(package / "formats").glob("*.py")]):
        digest.update(file.read_bytes())
    folder = os.environ.get("JAXRL_LLM_CACHE", "~/.cache/jaxrl_llm") if setting == "auto" else setting
    return Path(folder).expanduser() / f"{digest.hexdigest()[:32]}.npz"


def load(file: Path, tokenize: LimitedTokenizer, examples: Iterable[Mapping[str, Any]]) -> list[Row] | None:
    """The rows that `file` holds, or None when there is no such file; `tokenize` gets its counts.

    `examples` are those the rows were made of: rows of prompts keep their columns, those of completions maybe a prompt.
    """
    if not file.is_file():
        return None
    columns = list(_column_types(tokenize.kind))
    names = ["kept", "counts", *columns, *(f"{name}_ends" for name in columns), *NUMBERS]
    try:
        with np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in names}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        log.warning("the cached token rows %s cannot be read (%s): tokenising again", file, error)
        return None
    tokenize.read, tokenize.long, tokenize.unlearnable, tokenize.alike = (int(x) for x in arrays["counts"])
    rows: list[Row] = [{} for _ in arrays["kept"]]
    for name in columns:
        values = np.split(arrays[name], arrays[f"{name}_ends"][:-1])
        for row, value in zip(rows, values, strict=True):
            if len(value) or name not in REST:  # which few rows have
                row[name] = value.tolist()
    for name in NUMBERS:
        for row, value in zip(rows, arrays[name], strict=True):
            if not np.isnan(value):
                row[name] = bool(value) if name == "label" else float(value)
    keep_prompt = tokenize.row_tokenizer.keep_prompt
    if tokenize.kind != "prompts" and not keep_prompt:
        return rows
    by_index = dict(zip(arrays["kept"].tolist(), rows, strict=True))
    if keep_prompt:
        return [
            {**by_index[index], **prompt_columns({**example, **exchange(example)})}
            for index, example in enumerate(examples)
            if index in by_index
        ]
    return [{**example, **by_index[index]} for index, example in enumerate(examples) if index in by_index]


def save(file: Path, tokenize: LimitedTokenizer, kept: Sequence[tuple[int, Row]]) -> None:
    """Write the rows, each with the number of its example; raises ConfigError for a folder that cannot be written."""
    arrays: dict[str, Any] = {
        "kept": np.array([index for index, _ in kept], np.int64),
        "counts": np.array([tokenize.read, tokenize.long, tokenize.unlearnable, tokenize.alike], np.int64),
    }
    # The rows of a column end to end, with the end of each: no padding, and no objects to unpickle.
    for name, dtype in _column_types(tokenize.kind).items():
        of_rows = [np.array(row.get(name, ()), dtype) for _, row in kept]
        arrays[name] = np.concatenate(of_rows or [np.zeros(0, dtype)])
        arrays[f"{name}_ends"] = np.cumsum([len(x) for x in of_rows], dtype=np.int64)
    for name in NUMBERS:
        # Rows of prompts have all columns of the data, whose label may be anything; they are read from the data again.
        numbers = [np.nan if tokenize.kind == "prompts" else float(row.get(name, np.nan)) for _, row in kept]
        arrays[name] = np.array(numbers, np.float64)
    partial = file.with_name(f"{file.stem}.{os.getpid()}.{uuid.uuid4().hex}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as opened:
            np.savez(opened, **arrays)
            opened.flush()
            os.fsync(opened.fileno())  # or a machine that stops now may leave the name with a part of the bytes
        partial.replace(file)
    except OSError as error:
        raise ConfigError(
            f"cannot write token rows to data.cache = {str(file.parent)!r}: {error}; name another folder, or none"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _column_types(kind: str) -> dict[str, Any]:
    """The columns of rows of a kind with an entry for each token, and the types that these are kept in."""
    ids, masks = COLUMNS[kind]
    others = {"steps": {STEP_LABELS: np.float64}, "labels": dict(zip(REST, (np.int32, np.uint8), strict=True))}
    return dict.fromkeys(ids, np.int32) | dict.fromkeys(masks, np.uint8) | others.get(kind, {})
