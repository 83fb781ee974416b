"""Copying an exported folder to a URL that fsspec understands (gs://, s3://, hdfs://).

A store renames no folder, so a model arrives there file by file: config.json, without which nothing loads it, comes
last, and the one before goes first.
"""

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
import jax

from jaxrl_llm.config import ConfigDict, ConfigError
from jaxrl_llm.config.resuming import way_on
from jaxrl_llm.config.secrets import masked
from jaxrl_llm.distributed.processes import all_or_none
from jaxrl_llm.models.files.hf import EXPORTED
from jaxrl_llm.models.files.remote import FILES_AT_ONCE, reason_of
from jaxrl_llm.tools.cards.hub import WEIGHTS, matches

CONFIG = "config.json"
PROBE = ".jaxrl_llm"  # a file that is written and removed, to see whether that may be done
COPYING = ".jaxrl_llm_copying"  # a file that is there while a model is copied, and where that broke off


def check_copy(config: ConfigDict) -> None:
    """Writes to `export.copy_to`, where that is set, and removes it; all processes raise what the first finds.

    Raises ConfigError where that fails, and for a folder with a model, unless `export.overwrite`.
    """
    url = config.export.copy_to
    if url is None:
        return
    with all_or_none():
        if jax.process_index() == 0:
            with _explaining(url):
                fs, path = _opened(url)
                _files_there(fs, path, config.export.overwrite)
                fs.pipe_file(f"{path}/{PROBE}", b"")
                fs.rm_file(f"{path}/{PROBE}")


def copy_run(config: ConfigDict) -> None:
    """Copies the folder hf of the run to `export.copy_to`, where that is set; raises ConfigError when it fails."""
    folder, url = Path(config.output_dir) / "hf", config.export.copy_to
    if url is None:
        return
    with all_or_none():
        if jax.process_index() == 0:
            try:
                copy(folder, url, config.export.overwrite)
            except ConfigError as error:
                pushed = config.export.push_to_hub is not None and not config.export.overwrite
                way = " with export.overwrite, as it was pushed to the hub" if pushed else ""
                raise ConfigError(
                    f"{error}. The run is complete, and its model is in {folder}: {way_on()}{way}, which trains "
                    "nothing and copies again, or use the store's own tool (gcloud storage cp, aws s3 cp, "
                    "hdfs dfs -put)"
                ) from error
            print(f"copied to {masked(url)}")


def copy(folder: Path, url: str, overwrite: bool = False) -> None:
    """Copies the files of `folder` to the folder at `url`; with `overwrite` the model that is there is replaced.

    Other files there stay. Raises ConfigError for a folder that holds a model already, and when the store refuses.
    """
    with _explaining(url):
        fs, path = _opened(url)
        files = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}
        there = _files_there(fs, path, overwrite)
        fs.pipe_file(f"{path}/{COPYING}", b"")
        old = [name for name in there if name not in files and matches(name, (*EXPORTED, *WEIGHTS))]
        for name in (*([CONFIG] if CONFIG in there else []), *old):
            fs.rm_file(f"{path}/{name}")
        for parent in {PurePosixPath(path, name).parent for name in files if "/" in name}:
            fs.makedirs(str(parent), exist_ok=True)

        def put(name: str) -> None:
            fs.put_file(os.fspath(files[name]), f"{path}/{name}")

        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            list(pool.map(put, files.keys() - {CONFIG}))
        put(CONFIG)
        fs.rm_file(f"{path}/{COPYING}")


def _opened(url: str) -> tuple[Any, str]:
    """The store of a URL, and the folder in it."""
    fs, path = fsspec.url_to_fs(url.rstrip("/"))
    if hasattr(fs, "auto_mkdir"):
        fs.auto_mkdir = True  # of file://, where folders have to be made
    return fs, path


def _files_there(fs: Any, path: str, overwrite: bool) -> list[str]:
    """The names of the files in the folder; raises ConfigError for a model's that may not be replaced."""
    fs.invalidate_cache()  # fsspec keeps listings
    names = []
    with contextlib.suppress(FileNotFoundError):
        names = [
            PurePosixPath(entry["name"]).name for entry in fs.ls(path, detail=True) if entry["type"] != "directory"
        ]
    held = [name for name in names if matches(name, (CONFIG, *WEIGHTS))]
    if held and COPYING not in names and not overwrite:
        raise ConfigError(
            f"it holds a model already ({held[0]}): name another folder, or replace it with export.overwrite"
        )
    return names


@contextlib.contextmanager
def _explaining(url: str) -> Iterator[None]:
    """Turns errors of the store and of the way there into a ConfigError."""
    try:
        yield
    except Exception as error:  # each store has a family of errors of its own
        raise ConfigError(f"export.copy_to = {masked(url)!r} cannot be written: {reason_of(error)}") from error
