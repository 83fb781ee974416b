"""Hashes of a checkpoint's files: written before a save becomes final, compared before it is restored.

`hashes.json` in the folder of a step names every file of its parts with its size and SHA-256:

    {"state/d/cf5ae9": {"bytes": 318, "sha256": "9f86d0..."}, ...}

A bit that flips in Orbax's array data is not noticed by Orbax itself: the restored numbers are merely wrong.

Of several processes each hashes the arrays that it has written (`write_own_hashes`), and the first one the rest: one
that read back what all have written would take longer than a save may.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HASHES = "hashes.json"
OF_PROCESS = ".hashes_{}.json"  # in the folder of a part, until the checkpoint becomes final
THREADS = 8


def write_hashes(folder: Path) -> None:
    """Writes `hashes.json` of the files in the folders of `folder`; the files beside those are Orbax's own metadata."""
    known: dict[str, dict[str, int | str]] = {}
    for file in folder.glob(f"*/{OF_PROCESS.format('*')}"):
        with contextlib.suppress(ValueError):  # a file system that shows it, and not yet what is in it
            known |= {f"{file.parent.name}/{name}": x for name, x in json.loads(file.read_text("utf-8")).items()}
        file.unlink()
    found = {path.relative_to(folder).as_posix(): path for path in folder.glob("*/**/*") if path.is_file()}
    known = {name: x for name, x in known.items() if name in found and found[name].stat().st_size == x["bytes"]}
    hashes = known | _hashes(folder, found.keys() - known.keys())
    (folder / HASHES).write_text(json.dumps(dict(sorted(hashes.items())), indent=0), encoding="utf-8")


def write_own_hashes(part: Path, process: int) -> None:
    """Writes the hashes of the arrays that a process has written to the folder of a part, for `write_hashes`."""
    own = part / f"ocdbt.process_{process}"  # as Orbax names it
    names = [path.relative_to(part).as_posix() for path in own.glob("**/*") if path.is_file()]
    (part / OF_PROCESS.format(process)).write_text(json.dumps(_hashes(part, names)), encoding="utf-8")


def damage(folder: Path, process: int = 0, processes: int = 1) -> str | None:
    """The first fault of the checkpoint in `folder`, or None when every file is as it was saved.

    Every `processes`-th file is read, from number `process` on: processes share the work.
    """
    try:
        expected = json.loads((folder / HASHES).read_text(encoding="utf-8"))
        if not expected or not isinstance(expected, dict) or not all(isinstance(x, dict) for x in expected.values()):
            raise ValueError("it names no files with their hashes")
        names = sorted(expected)[process::processes]
        actual = _hashes(folder, [name for name in names if (folder / name).is_file()])
    except (OSError, ValueError) as error:
        return f"{folder / HASHES} cannot be read ({error})"
    for name in names:
        if name not in actual:
            return f"{folder / name} is missing"
        if actual[name]["bytes"] != (saved := expected[name].get("bytes")):
            return f"{folder / name} has {actual[name]['bytes']} bytes, but {saved} were saved"
        if actual[name] != expected[name]:
            return f"the content of {folder / name} has changed since it was saved"
    return None


def _hashes(folder: Path, names: Iterable[str]) -> dict[str, dict[str, int | str]]:
    def file_hash(name: str) -> dict[str, int | str]:
        with (folder / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return {"bytes": file.tell(), "sha256": digest}

    names = list(names)
    with ThreadPoolExecutor(THREADS) as threads:  # hashing releases the interpreter's lock
        return dict(zip(names, threads.map(file_hash, names), strict=True))
