"""Checksums of a run's data, by which a run that goes on tells that a file, or what a hub id names, was edited.

With as many rows as before they have the same positions, and the run goes on with other rows than it began with.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from jaxrl_llm.config.secrets import masked
from jaxrl_llm.config.wording import amount
from jaxrl_llm.data.diagnose import reader_of
from jaxrl_llm.data.files import folder_of, holds_rows, local_files
from jaxrl_llm.data.opening import DataSource
from jaxrl_llm.data.splits import is_table

WHOLE = 1 << 24  # bytes of a file that is read whole
BLOCK = 1 << 16  # bytes of a part of a larger one
BLOCKS = 64  # parts that are read of it, evenly spaced from its beginning to its end
FILES = 64  # of a source that are read; of others the size alone is compared


def checksums(sources: Iterable[DataSource]) -> dict[str, str]:
    """A checksum of the data of each source, by a name that tells its path: it is another one once the data was edited.

    Of each file here it is the size and checksum, which change with its content, and not when it is touched or copied;
    of rows of the hub, or of URLs, the fingerprint that `datasets` makes of their revision, or of what the server says
    of their files. Rows that are streamed from there, or come from Python, have none.
    """
    found: dict[str, str] = {}
    for source in sources:
        if folder_of(source.path) is not None:
            reads = holds_rows if Path(str(source.path)).expanduser().is_dir() else reader_of
            files = {name: x for name, x in local_files(source.path).items() if reads(str(x))}
            found |= {name: checksum(file, number < FILES) for number, (name, file) in enumerate(files.items())}
        elif source.name and ".py:" not in source.name and is_table(source.rows):
            split = source.rows.split  # None of rows that are parts of several
            name = f"{split} of {masked(source.name)}" if split else masked(source.name)
            found[name] = f"{found.get(name, '')}{source.rows._fingerprint}"  # of several configurations of one id
    return found


def edited(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """A line on the files whose checksums differ from those `before`, or no line where none does."""
    names = [name for name in now if before.get(name, now[name]) != now[name]]
    if not names:
        return []
    more = f" and {amount(len(names) - 1, 'other file')}" if len(names) > 1 else ""
    file, _, source = names[0].partition(" of ")
    named = source if Path(source).name == file else names[0]  # a file alone, or one of a folder
    return [f"{named}{more}: edited since the checkpoint was written; the run goes on with the rows that are there now"]


def checksum(file: Path, is_read: bool = True) -> str:
    """The size of a file and, where it `is_read`, a checksum of its content: of a large one, of parts of it."""
    size, digest = file.stat().st_size, hashlib.sha256()
    with file.open("rb") as opened:
        if is_read and size <= WHOLE:
            digest.update(opened.read())
        for number in range(BLOCKS) if is_read and size > WHOLE else ():
            opened.seek(number * (size - BLOCK) // (BLOCKS - 1))
            digest.update(opened.read(BLOCK))
    return f"{size} bytes, {digest.hexdigest()[:16]}"
