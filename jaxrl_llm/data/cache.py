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
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data.tokenize import COLUMNS, Row, Tokenizing

log = logging.getLogger(__name__)

LARGE = 10_000  # rows from which "auto" keeps them: fewer are tokenised in seconds
NUMBERS = ("label", "margin")


def place(setting: str, rows: Any, spec: Any, code: bytes | None, how: Tokenizing) -> Path | None:
    """The file for the token rows of `rows`, or None where none is kept.

    `spec` is what makes examples of them, and `code` the text of the user's own function; without it nothing is kept.
    `setting` is `auto` (large sources only, in $JAXRL_LLM_CACHE or ~/.cache/jaxrl_llm), a folder, or `none`.
    """
    if setting == "none" or code is None or not isinstance(rows, datasets.Dataset):
        return None
    if setting == "auto" and len(rows) < LARGE:
        return None
    folder = os.environ.get("JAXRL_LLM_CACHE", "~/.cache/jaxrl_llm") if setting == "auto" else setting
    return Path(folder).expanduser() / f"{_digest(rows, spec, code, how)}.npz"


def load(file: Path, how: Tokenizing, examples: Iterable[Mapping[str, Any]]) -> list[Row] | None:
    """The rows that `file` holds, or None when there is no such file; `how` gets its counts.

    `examples` are those the rows were made of: rows of prompts keep their columns.
    """
    if not file.is_file():
        return None
    try:
        with np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (OSError, ValueError, EOFError) as error:
        log.warning("the cached token rows %s cannot be read (%s): tokenising again", file, error)
        return None
    how.read, how.long, how.unlearnable = (int(x) for x in arrays["counts"])
    how.lengths = arrays["lengths"].tolist()
    ids, masks = COLUMNS[how.kind]
    columns = {name: np.split(arrays[name], arrays[f"{name}_ends"][:-1]) for name in (*ids, *masks)}
    rows: list[Row] = [{} for _ in arrays["kept"]]
    for name, values in columns.items():
        for row, value in zip(rows, values, strict=True):
            row[name] = value.tolist()
    for name in NUMBERS:
        for row, value in zip(rows, arrays[name], strict=True):
            if not np.isnan(value):
                row[name] = bool(value) if name == "label" else float(value)
    if how.kind != "prompts":
        return rows
    wanted = dict(zip(arrays["kept"].tolist(), rows, strict=True))
    return [
        {**example, "prompt": example[how.prompt_key], **wanted[index]}
        for index, example in enumerate(examples)
        if index in wanted
    ]


def save(file: Path, how: Tokenizing, kept: Sequence[tuple[int, Row]]) -> None:
    """Writes the rows, each with the number of its example; raises ConfigError for a folder that cannot be written."""
    ids, masks = COLUMNS[how.kind]
    arrays: dict[str, Any] = {
        "kept": np.array([index for index, _ in kept], np.int64),
        "counts": np.array([how.read, how.long, how.unlearnable], np.int64),
        "lengths": np.array(how.lengths, np.int64),
    }
    for name in (*ids, *masks):
        dtype = np.int32 if name in ids else np.uint8
        arrays[name] = np.concatenate([np.array(row[name], dtype) for _, row in kept] or [np.zeros(0, dtype)])
        arrays[f"{name}_ends"] = np.cumsum([len(row[name]) for _, row in kept], dtype=np.int64)
    stored = how.kind != "prompts"
    for name in NUMBERS:
        arrays[name] = np.array([float(row.get(name, np.nan)) if stored else np.nan for _, row in kept], np.float64)
    partial = file.with_name(f"{file.stem}.{os.getpid()}.{uuid.uuid4().hex}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as opened:
            np.savez(opened, **arrays)
        partial.replace(file)
    except OSError as error:
        raise ConfigError(
            f"cannot write token rows to data.cache = {str(file.parent)!r}: {error}; name another folder, or none"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _digest(rows: datasets.Dataset, spec: Any, code: bytes, how: Tokenizing) -> str:
    settings = [how.kind, how.limit, how.overlong, how.loss_on, how.prompt_key, how.template_kwargs]
    shown = json.dumps([spec, settings, rows._fingerprint, len(rows)], sort_keys=True, default=repr)
    digest = hashlib.sha256(shown.encode())
    digest.update(code)
    digest.update(_tokenizer(how.tokenizer))
    here = Path(__file__).parent
    for file in sorted([*here.glob("*.py"), *(here / "formats").glob("*.py")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:32]


def _tokenizer(tokenizer: Any) -> bytes:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    more = [type(tokenizer).__name__, str(getattr(tokenizer, "chat_template", "")), str(tokenizer.special_tokens_map)]
    return hashlib.sha256("\n".join([vocabulary, *more]).encode()).digest()
