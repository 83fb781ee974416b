"""Checksums of the files of a run's data, by which a run that goes on tells that one was edited in place.

A file with as many rows as before has the same positions, and the run goes on with other rows than it began with.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.data.sources import READERS, local_files

WHOLE = 1 << 24  # bytes of a file that is read whole
BLOCK = 1 << 16  # bytes of a part of a larger one
BLOCKS = 64  # parts that are read of it, evenly spaced from its beginning to its end
FILES = 64  # of a source that are read; of others the size alone is compared


def checksums(paths: Iterable[Any]) -> dict[str, str]:
    """The size and checksum of each file here that the paths of sources name, by a name that tells its path.

    A file has another one when its content changes, and not when it is touched or copied.
    """
    found: dict[str, str] = {}
    for path in paths:
        files = {name: file for name, file in local_files(path).items() if READERS.keys() & {*file.suffixes}}
        found |= {name: _checksum(file, number < FILES) for number, (name, file) in enumerate(files.items())}
    return found


def edited(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """A line on the files whose checksums differ from those `before`, none where there are none."""
    names = [name for name in now if before.get(name, now[name]) != now[name]]
    if not names:
        return []
    more = f" and {len(names) - 1} other files" if len(names) > 1 else ""
    return [
        f"{names[0]}{more}: edited since the checkpoint was written; the run goes on with the rows that are there now"
    ]


def _checksum(file: Path, is_read: bool) -> str:
    size, digest = file.stat().st_size, hashlib.sha256()
    with file.open("rb") as opened:
        if is_read and size <= WHOLE:
            digest.update(opened.read())
        for number in range(BLOCKS) if is_read and size > WHOLE else ():
            opened.seek(number * (size - BLOCK) // (BLOCKS - 1))
            digest.update(opened.read(BLOCK))
    return f"{size} bytes, {digest.hexdigest()[:16]}"
