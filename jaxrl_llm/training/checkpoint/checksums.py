"""Hashes of a checkpoint's files: written before a save becomes final, compared before it is restored.

`hashes.json` in the folder of a step names every file of its parts with its size and SHA-256:

    {"state/d/cf5ae9": {"bytes": 318, "sha256": "9f86d0..."}, ...}

A bit that flips in Orbax's array data is not noticed by Orbax itself: the restored numbers are merely wrong.
"""

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HASHES = "hashes.json"
THREADS = 8


def write_hashes(folder: Path) -> None:
    """Writes `hashes.json` of the files in the folders of `folder`; what lies beside them is Orbax's own note."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.glob("*/**/*") if path.is_file())
    (folder / HASHES).write_text(json.dumps(_hashes(folder, names), indent=0), encoding="utf-8")


def damage(folder: Path, part: int = 0, parts: int = 1) -> str | None:
    """What is wrong with the checkpoint in `folder`, None when every file is as it was saved.

    Of the files, every `parts`-th is read, from number `part` on: processes share the work.
    """
    try:
        expected = json.loads((folder / HASHES).read_text(encoding="utf-8"))
        names = sorted(expected)[part::parts]
        found = _hashes(folder, [name for name in names if (folder / name).is_file()])
    except (OSError, ValueError) as error:
        return f"{folder / HASHES} cannot be read ({error})"
    for name in names:
        if name not in found:
            return f"{folder / name} is missing"
        if found[name]["bytes"] != expected[name]["bytes"]:
            return f"{folder / name} has {found[name]['bytes']} bytes, but {expected[name]['bytes']} were saved"
        if found[name] != expected[name]:
            return f"the content of {folder / name} has changed since it was saved"
    return None


def _hashes(folder: Path, names: Iterable[str]) -> dict[str, dict[str, int | str]]:
    names = list(names)
    with ThreadPoolExecutor(THREADS) as threads:  # the hash releases the interpreter's lock
        return dict(zip(names, threads.map(lambda name: _hash(folder / name), names), strict=True))


def _hash(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}
