"""What all processes of a run read from files of their own, compared before anything is computed from it.

Each reads the data and the model by itself. Where a machine has another copy of them the run would go on with rows and
weights that belong to no data and no model, or wait for ever for a step that only some processes make.
"""

import hashlib
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm.data import Row
from jaxrl_llm.data.files import local_files
from jaxrl_llm.data.opening import DataSource, digest_of
from jaxrl_llm.data.tokenize import COLUMNS, STEP_LABELS
from jaxrl_llm.distributed.processes import check_agreed
from jaxrl_llm.models.files import hf
from jaxrl_llm.models.model import base_and_adapter
from jaxrl_llm.training.checkpoint.data_files import checksum

LOOKED_AT = 4096  # rows whose tokens are compared, evenly spaced; of the others their lengths
LABELS = {"labels": "label", "pairs": "margin", "triples": "margin", "steps": STEP_LABELS}  # of rows, by their kind
FIRST = 16  # rows of a stream that are compared


def check_same_rows(what: str, kind: str, rows: Sequence[Row]) -> None:
    """Raises AgreedError, in all processes, unless they have the same token rows of a kind, with the same labels;
    `what` names these."""
    if jax.process_count() == 1:
        return
    names, masks = COLUMNS[kind]
    learned = [*masks, LABELS.get(kind)]
    lengths = np.array([[len(row[name]) for name in names] for row in rows], np.int32)
    digest = hashlib.sha256(lengths.tobytes())
    for row in rows[:: -(-len(rows) // LOOKED_AT) or 1]:
        digest.update(b"".join(np.array(row[name], np.int32).tobytes() for name in names))
        digest.update(b"".join(np.array(row[name], np.float64).tobytes() for name in learned if name in row))
    check_agreed(
        {f"the number of {what}": len(rows), f"the checksum of {what}": _short(digest)},
        "Give all processes the same data, and a format that makes a row's text of that row alone",
    )


def check_same_streams(streams: Sequence[DataSource]) -> None:
    """Raises AgreedError, in all processes, unless the rows that they stream begin alike and are of the same files."""
    if jax.process_count() == 1:
        return
    facts: dict[str, str] = {}
    for stream in streams:
        rows: Iterable[Any] = stream.rows
        first = b"".join(map(digest_of, islice(rows, FIRST)))
        what = f"the checksum of the first {FIRST} rows of {stream.name or 'the data'}"
        facts[what] = facts.get(what, "") + _short(hashlib.sha256(first))  # of several splits of one data set
        facts |= {name: checksum(file) for name, file in local_files(stream.path).items()}
    check_agreed(facts, "Give all processes the same data, in the same order")


def check_same_model(path: str, revision: str | None, allow_pickle: bool, adapter: str | None = None) -> None:
    """Raises AgreedError, in all processes, unless they have the same files of a model and of its adapter."""
    if jax.process_count() == 1:
        return
    path, adapter, revision = base_and_adapter(path, adapter, revision)
    folders = {path: hf.locate(path, allow_pickle, revision=revision)}
    folders |= {} if adapter is None else {adapter: Path(adapter)}  # of one behind a URL nothing is compared
    kinds = ("*.json", "*.safetensors", "pytorch_model*.bin")
    facts = {
        f"{file.name} of {name}": checksum(file)
        for name, folder in folders.items()
        for kind in kinds
        for file in sorted(folder.glob(kind))
    }
    check_agreed(facts, "Give all processes the same model: a copy of one folder, or one revision of a hub id")


def _short(digest: "hashlib._Hash") -> str:
    return digest.hexdigest()[:16]
