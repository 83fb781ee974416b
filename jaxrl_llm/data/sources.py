"""Where data comes from: the Hugging Face hub, files here or in a bucket, Python objects, and the built-in tasks."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import fsspec

from jaxrl_llm.config.resolve import ConfigError, resolve
from jaxrl_llm.data import tasks
from jaxrl_llm.data.diagnose import found_in, unreadable
from jaxrl_llm.data.formats.native import as_rows

Rows = datasets.Dataset | datasets.IterableDataset
Source = str | Path | Sequence[Any] | Rows | datasets.DatasetDict

READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv", ".arrow": "arrow"}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
SAVED = ("dataset_dict.json", "dataset_info.json")  # files of a folder that save_to_disk wrote


def load(path: Source, split: str = "train", name: str | None = None, streaming: bool = False,
         ds_type: str | None = None) -> Rows:  # fmt: skip
    """The rows of one split.

    `path` is one of these:

    - `task:<name>`, a built-in task;
    - a .parquet, .jsonl, .json, .csv or .arrow file (maybe compressed: .jsonl.gz), or a pattern such as
      `data/*.parquet`, or a list of files: one split, "train" (or a part of it: "train[:10%]"), in that order;
    - a folder that `save_to_disk` wrote, or a folder of such files (their names tell the split);
    - any of these in a bucket: `gs://`, `s3://`, or another protocol of fsspec;
    - a hub id (`name` chooses its configuration);
    - `path/to/file.py:function_or_class`, called with those of `split` and `name` that it has as arguments; it gives
      rows: a list of dictionaries, a sequence with `__len__` and `__getitem__`, or a `datasets.Dataset`;
    - a list of dictionaries, of threads (lists of turns), or of tuples (preferred, dispreferred); or a
      `datasets.Dataset`.

    With `streaming` files are read as they are needed, and the result is a `datasets.IterableDataset`. `ds_type` names
    the kind of the files (json, csv, parquet, arrow) where their names do not.

    Raises ConfigError: nothing there, no such split (listing those there are), unreadable (naming the line), or without
    rows.
    """
    rows: Rows
    if isinstance(path, (str, Path)) or _is_list_of_paths(path):
        rows, shown = _load_paths(path, split, name, streaming, ds_type), _shown(path)
    elif isinstance(path, datasets.DatasetDict | datasets.IterableDatasetDict):
        rows, shown = _pick(path, split, "the data set"), "the data set"
    elif isinstance(path, datasets.Dataset | datasets.IterableDataset):
        rows, shown = path, "the data set"
    else:
        rows, shown = _from_list(path), "the list"
    if isinstance(rows, datasets.IterableDataset):
        return rows
    if len(rows) == 0:
        raise ConfigError(f"{shown} has no rows in split {split!r}; choose another split or check how it was made")
    return rows.to_iterable_dataset() if streaming else rows


def _is_list_of_paths(path: Any) -> bool:
    return isinstance(path, list | tuple) and len(path) > 0 and all(isinstance(one, str | Path) for one in path)


def _shown(path: Any) -> str:
    return ", ".join(map(str, path)) if isinstance(path, list | tuple) else str(path)


def _load_paths(path: Any, split: str, name: str | None, streaming: bool, ds_type: str | None) -> Rows:
    if isinstance(path, list | tuple):
        return _load_files([str(one) for one in path], split, streaming, ds_type)
    path = str(path)
    if path.startswith("task:"):
        return datasets.Dataset.from_list(tasks.generate(path.removeprefix("task:"), split))
    if ".py:" in path:
        return _called(path, split, name)
    if "://" in path:
        return _load_remote(path, split, name, streaming, ds_type)
    place = Path(path).expanduser()
    if place.is_file() or ("*" in path and _matches(place)):
        return _load_files([str(place)], split, streaming, ds_type)
    if place.is_dir():
        return _load_folder(str(place), split, name, streaming)
    if path.startswith(("/", ".", "~")) or _reader(path) or path.count("/") > 1:
        raise ConfigError(
            f"there is no file or folder {path!r}; check data.path (a relative path starts at {Path.cwd()})"
        )
    return _load_hub(path, split, name, streaming)


def _matches(pattern: Path) -> bool:
    anchor = Path(pattern.anchor) if pattern.is_absolute() else Path()
    return any(anchor.glob(str(pattern.relative_to(anchor))))


def _reader(path: str) -> str | None:
    """The kind of a file, from its name."""
    suffixes = Path(path).suffixes
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return READERS.get(suffixes[-1]) if suffixes else None


def _load_files(files: list[str], split: str, streaming: bool, ds_type: str | None) -> Rows:
    reader, shown = ds_type or _reader(files[0]), ", ".join(files)
    if reader is None or reader not in READERS.values():
        raise ConfigError(f"{shown!r} is not a kind of file that can be read; those are {', '.join(READERS)}")
    if split.partition("[")[0] != "train":
        raise ConfigError(
            f"{shown!r} is one file and has only the split 'train', not {split!r}; "
            "set the split to train, or name another file (data.eval_path for evaluation)"
        )
    for file in files:
        if not streaming and (damage := unreadable(file, reader)) is not None:
            raise ConfigError(f"cannot load {file}: {damage}")

    def read() -> Rows:
        return datasets.load_dataset(reader, data_files=files, split=split, streaming=streaming)  # pyright: ignore

    return _read(shown, read, lambda: _damage(files))


def _damage(files: list[str]) -> str | None:
    """What is wrong with the first damaged one of the files, or None."""
    for file in files:
        kind = _reader(file)
        if kind and (damage := found_in(file, kind)):
            return damage if len(files) == 1 else f"{file}: {damage}"
    return None


def _load_folder(folder: str, split: str, name: str | None, streaming: bool) -> Any:
    fs, inner = fsspec.url_to_fs(folder)
    files = [str(file) for file in fs.find(inner)]
    if any(file.removeprefix(inner).strip("/") in SAVED for file in files):
        loaded = _read(folder, lambda: datasets.load_from_disk(folder))
    elif not any(_reader(file) for file in files):
        raise ConfigError(f"the folder {folder!r} holds no {', '.join(READERS)} file and no saved data set")
    else:
        for file in files:
            if "://" not in folder and (kind := _reader(file)) and (damage := unreadable(file, kind)) is not None:
                raise ConfigError(f"cannot load {file}: {damage}")
        loaded = _read(folder, lambda: datasets.load_dataset(folder, name, streaming=streaming), lambda: _damage(files))
    splits = isinstance(loaded, datasets.DatasetDict | datasets.IterableDatasetDict)
    return _pick(loaded, split, folder) if splits else loaded


def _load_remote(path: str, split: str, name: str | None, streaming: bool, ds_type: str | None) -> Rows:
    """Of a URL that fsspec understands."""
    if "*" in path or ds_type or _reader(path):
        return _load_files([path], split, streaming, ds_type)
    fs, inner = _read(path, lambda: fsspec.url_to_fs(path))
    if not _read(path, lambda: fs.isdir(inner)):
        raise ConfigError(f"there is no folder {path!r}, and it is no {', '.join(READERS)} file; check data.path")
    names = {file.removeprefix(inner).strip("/") for file in map(str, fs.find(inner))}
    if names & set(SAVED):
        return _load_folder(path, split, name, streaming)
    found = sorted(file for file in names if _reader(file))
    wanted = [file for file in found if split in Path(file).name] or (found if split == "train" else [])
    if not wanted:
        raise ConfigError(f"the folder {path!r} has no file for the split {split!r}; it has {', '.join(sorted(names))}")
    return _load_files([f"{path.rstrip('/')}/{file}" for file in wanted], "train", streaming, None)


def _load_hub(path: str, split: str, name: str | None, streaming: bool) -> Any:
    shown = path if name is None else f"{path} ({name})"
    return _read(f"hub data set {shown}", lambda: datasets.load_dataset(path, name, split=split, streaming=streaming))


def _called(path: str, split: str, name: str | None) -> Rows:
    """The rows that a user's function, or the instance of a user's class, gives."""
    maker = resolve(path, {})
    accepted = inspect.signature(maker).parameters
    made = maker(**{key: value for key, value in (("split", split), ("name", name)) if key in accepted})
    if isinstance(made, datasets.DatasetDict | datasets.IterableDatasetDict):
        return _pick(made, split, path)
    if isinstance(made, datasets.Dataset | datasets.IterableDataset):
        return made
    if not hasattr(made, "__iter__") and not (hasattr(made, "__len__") and hasattr(made, "__getitem__")):
        raise ConfigError(f"{path} gave {type(made).__name__}; it must give rows: a list, a sequence or a Dataset")
    if hasattr(made, "__len__") and hasattr(made, "__getitem__") and not isinstance(made, list | tuple):
        made = [made[index] for index in range(len(made))]
    return _from_list(list(made))


def _read(shown: str, reader: Callable[[], Any], damage: Callable[[], str | None] = lambda: None) -> Any:
    """What `reader` returns; the many errors of reading become one that says what was read and why it failed."""
    try:
        return reader()
    except ConfigError:
        raise
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = damage() or " ".join(f"{error} ({cause})".split() if cause is not error else str(error).split())
        raise ConfigError(f"cannot load {shown}: {reason}; check data.path, data.name and the split") from error


def _pick(splits: Mapping[Any, Any], split: str, shown: str) -> Any:
    if split not in splits:
        raise ConfigError(f"{shown} has no split {split!r}; its splits are {', '.join(map(str, splits))}")
    return splits[split]


def _from_list(items: Any) -> datasets.Dataset:
    if isinstance(items, Mapping) or not isinstance(items, Sequence):
        raise ConfigError("data given as a Python object is a list of dictionaries, one for each row, or of threads")
    if not items:
        raise ConfigError("the list has no rows; give at least one dictionary")
    rows = as_rows(items)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    try:
        return datasets.Dataset.from_dict({name: [row.get(name) for row in rows] for name in columns})
    except Exception as error:
        raise ConfigError(f"the list cannot be made a table, because a column changes its type: {error}") from error
