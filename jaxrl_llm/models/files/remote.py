"""Model folders behind a URL that fsspec understands (gs://, s3://, hdfs://): their files, copied to this machine.

A copy is a folder of its own for each state of the one behind the URL, which its listing tells (names, sizes, times,
checksums): what is replaced there is copied anew, and what still reads the earlier copy is not disturbed. A file is in
a copy whole or not at all, so one that was killed goes on where it stopped.
"""

import fcntl
import hashlib
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from tqdm import tqdm

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.secrets import masked

LEFT_OUT = "consolidated*"  # the same weights once more, in Mistral's own form
FILES_AT_ONCE = 8


def is_url(path: str | os.PathLike[str]) -> bool:
    """True for the address of a bucket, `gs://`, `s3://` or another protocol; false for a path on this machine or a hub
    id."""
    return "://" in os.fspath(path)


def fetch(url: str, patterns: Iterable[str], name: str) -> Path:
    """The folder with copies of those files in the folder at `url` whose names match one of the patterns.

    Only what this machine lacks is copied, by one of its processes while the others wait. Raises ConfigError, which
    calls the URL `name`, where it cannot be read, lists no sizes, or changes meanwhile.
    """
    home = _home(url)
    try:
        fs, path = fsspec.url_to_fs(url)
        files = _listing(fs, path)
        taken = (file for file in files if any(fnmatch(file, x) for x in patterns) and not fnmatch(file, LEFT_OUT))
        wanted = {file: files[file]["size"] for file in taken}
        copy = home / hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:16]
        copy.mkdir(parents=True, exist_ok=True)
        if not _missing(copy, wanted):
            return copy
        with (home / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed, or the process ends
            missing = _missing(copy, wanted)

            def fetch_file(file: str) -> int:
                partial = copy / f".{file}.partial"
                fs.get_file(files[file]["name"], os.fspath(partial))
                if (size := partial.stat().st_size) != wanted[file]:
                    raise ConfigError(f"{file} came with {size} of its {wanted[file]} bytes")
                partial.replace(copy / file)
                return size

            total = sum(wanted[file] for file in missing)
            progress = tqdm(None, f"copying {masked(url)}", total, unit="B", unit_scale=True, disable=None, leave=False)
            with progress, ThreadPoolExecutor(FILES_AT_ONCE) as pool:
                for size in pool.map(fetch_file, missing):
                    progress.update(size)
            if missing and _listing(fs, path) != files:
                raise ConfigError("it changed while it was copied; start again when it is complete")
    except Exception as error:  # each store has a family of errors of its own
        raise ConfigError(
            f"{name} {masked(url)!r} cannot be copied to {home}: {reason_of(error)}. Check the URL and that this "
            "machine may read it; $JAXRL_LLM_CACHE names another folder for copies"
        ) from error
    return copy


def reason_of(error: Exception) -> str:
    """The first line of an error, without the secrets of addresses."""
    text = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
    return masked(text.splitlines()[0])


def fetched(url: str) -> Path | None:
    """The newest copy on this machine of the folder at `url`, None without one; the store is not asked."""
    return max(_home(url).glob("*/"), key=lambda copy: copy.stat().st_mtime, default=None)


def _home(url: str) -> Path:
    """The folder of all copies of the folder at `url`, named so that people know it."""
    url = url.rstrip("/")
    words = re.sub(r"[^\w.]+", "-", "-".join(PurePosixPath(masked(url)).parts[-2:])).strip("-.")
    folder = Path(os.environ.get("JAXRL_LLM_CACHE", "~/.cache/jaxrl_llm")).expanduser() / "models"
    return folder / f"{words}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"


def _listing(fs: Any, path: str) -> dict[str, dict[str, Any]]:
    """The files in the folder, each with what the store says of it, besides when it was last read."""
    fs.invalidate_cache()  # fsspec keeps listings
    files = {}
    for entry in fs.ls(path, detail=True):
        # A store without folders may list the folder itself, as one lists a file when asked for that.
        if entry["type"] == "directory" or entry["name"].strip("/") == path.strip("/"):
            continue
        plain = {key: x for key, x in entry.items() if isinstance(x, str | int | float | datetime)}
        read = ("time",) if "mtime" in plain else ()  # of sftp and smb, which call it so
        told = {key: x for key, x in plain.items() if "access" not in key.lower() and key not in read}
        files[PurePosixPath(entry["name"]).name] = told
    if not files:
        raise ConfigError("there is no such folder, or it holds no files")
    if unknown := [file for file, entry in files.items() if not isinstance(entry.get("size"), int)]:
        raise ConfigError(f"the size of {unknown[0]} is not listed, by which a whole copy is told")
    return files


def _missing(copy: Path, wanted: dict[str, int]) -> list[str]:
    """The wanted files that are not in the copy, or not as long: a machine that stops may lose the end of one."""
    return [file for file, size in wanted.items() if not (x := copy / file).is_file() or x.stat().st_size != size]
