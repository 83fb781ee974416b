"""Where data comes from: the Hugging Face hub, folders and files on disk, Python lists, and the built-in tasks."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets

from jaxrl_llm.data import tasks
from jaxrl_llm.names import ConfigError

Source = str | Path | Sequence[Mapping[str, Any]] | datasets.Dataset | datasets.DatasetDict

READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}


def load(path: Source, split: str = "train", name: str | None = None) -> datasets.Dataset:
    """The rows of one split.

    `path` is `task:<name>` (a built-in task), a .parquet, .jsonl, .json or .csv file (one split, "train"), a folder
    that `save_to_disk` wrote, a folder of such files (their names tell the split), a hub id (`name` chooses its
    configuration), a list of dictionaries, or a `datasets.Dataset`.

    Raises ConfigError: nothing there, no such split (listing those there are), unreadable, or without rows.
    """
    rows: datasets.Dataset
    if isinstance(path, (str, Path)):
        rows, shown = _load_path(str(path), split, name), str(path)
    elif isinstance(path, datasets.DatasetDict):
        rows, shown = _pick(path, split, "the data set"), "the data set"
    elif isinstance(path, datasets.Dataset):
        rows, shown = path, "the data set"
    else:
        rows, shown = _from_list(path), "the list"
    if len(rows) == 0:
        raise ConfigError(f"{shown} has no rows in split {split!r}; choose another split or check how it was made")
    return rows


def _load_path(path: str, split: str, name: str | None) -> datasets.Dataset:
    if path.startswith("task:"):
        return datasets.Dataset.from_list(tasks.generate(path.removeprefix("task:"), split))
    place = Path(path).expanduser()
    if place.is_file():
        return _load_file(place, split)
    if place.is_dir():
        return _load_folder(place, split, name)
    if path.startswith(("/", ".", "~")) or place.suffix in READERS or path.count("/") > 1:
        raise ConfigError(
            f"there is no file or folder {path!r}; check data.path (a relative path starts at {Path.cwd()})"
        )
    return _load_hub(path, split, name)


def _load_file(file: Path, split: str) -> datasets.Dataset:
    if file.suffix not in READERS:
        raise ConfigError(f"{str(file)!r} is not a kind of file that can be read; those are {', '.join(READERS)}")
    if split != "train":
        raise ConfigError(
            f"{str(file)!r} is one file and has only the split 'train', not {split!r}; "
            "set the split to train, or name another file (data.eval_path for evaluation)"
        )
    return _read(str(file), lambda: datasets.load_dataset(READERS[file.suffix], data_files=str(file), split="train"))


def _load_folder(folder: Path, split: str, name: str | None) -> datasets.Dataset:
    if (folder / "dataset_dict.json").exists() or (folder / "dataset_info.json").exists():
        loaded = _read(str(folder), lambda: datasets.load_from_disk(str(folder)))
    else:
        if not any(file.suffix in READERS for file in folder.rglob("*")):
            raise ConfigError(f"the folder {str(folder)!r} holds no {', '.join(READERS)} file and no saved data set")
        loaded = _read(str(folder), lambda: datasets.load_dataset(str(folder), name))
    return _pick(loaded, split, str(folder)) if isinstance(loaded, datasets.DatasetDict) else loaded


def _load_hub(path: str, split: str, name: str | None) -> datasets.Dataset:
    shown = path if name is None else f"{path} ({name})"
    return _read(f"hub data set {shown}", lambda: datasets.load_dataset(path, name, split=split))


def _read(shown: str, reader: Any) -> Any:
    """What `reader` returns; the many errors of reading become one that says what was read and why it failed."""
    try:
        return reader()
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"cannot load {shown}: {reason}; check data.path, data.name and the split") from error


def _pick(splits: datasets.DatasetDict, split: str, shown: str) -> datasets.Dataset:
    if split not in splits:
        raise ConfigError(f"{shown} has no split {split!r}; its splits are {', '.join(map(str, splits))}")
    return splits[split]


def _from_list(rows: Sequence[Mapping[str, Any]]) -> datasets.Dataset:
    if isinstance(rows, Mapping) or not all(isinstance(row, Mapping) for row in rows):
        raise ConfigError("data given as a Python object is a list of dictionaries, one for each row")
    if not rows:
        raise ConfigError("the list has no rows; give at least one dictionary")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    try:
        return datasets.Dataset.from_dict({name: [row.get(name) for row in rows] for name in columns})
    except Exception as error:
        raise ConfigError(f"the list cannot be made a table, because a column changes its type: {error}") from error
