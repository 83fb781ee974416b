"""Sources of rows: the Hugging Face hub, files here or in a bucket, Python objects, and the built-in tasks."""

import inspect
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import fsspec
import numpy as np

from jaxrl_llm.config.resolve import ConfigError, failing_as, resolve, split_options
from jaxrl_llm.data import Row, tasks
from jaxrl_llm.data.diagnose import content_fault, encoding_fault
from jaxrl_llm.data.formats.native import as_rows
from jaxrl_llm.data.tokenize import TEXTS

if TYPE_CHECKING:
    import datasets  # slow to import: only the functions that make such rows do so
    from typing_extensions import TypeIs


class RowList(list[Row]):
    """Rows that were given as Python objects, all with the same columns and otherwise as they are.

    A table would give nested objects each other's keys, and a column one type.
    """

    @property
    def column_names(self) -> list[str]:
        """The columns of every row."""
        return list(self[0])


Rows: TypeAlias = "datasets.Dataset | datasets.IterableDataset | RowList"
Source: TypeAlias = "str | Path | Sequence[Any] | Rows | datasets.DatasetDict"


class SplitError(ConfigError):
    """A split that a source does not have; the message lists those it has, `splits`."""

    def __init__(self, message: str, splits: Sequence[str]):
        super().__init__(message)
        self.splits = splits


READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv", ".arrow": "arrow"}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
ONLY = "train"  # the split of what has one
SAVED = ("dataset_dict.json", "dataset_info.json")  # files of a folder that save_to_disk wrote
NUMBERS = {int: "int64", float: "float64"}  # of a csv file
DENSE = 2.0**53  # below which a float holds every integer
TIME = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d+)?$"  # what Arrow writes of a time as text


def load(
    path: Source,
    split: str = "train",
    name: str | None = None,
    streaming: bool = False,
    ds_type: str | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Rows:
    """The rows of one split.

    `path` is one of these:

    - `task:<name>`, a built-in task;
    - a .parquet, .jsonl, .json, .csv or .arrow file (maybe compressed: .jsonl.gz), or a pattern such as
      `data/*.parquet`, or a list of files: one split, "train" (or a part of it: "train[:10%]"), in that order;
    - a folder that `save_to_disk` wrote, or a folder of such files (words of their names, or of their folders' names,
      tell the split, as in `datasets`);
    - any of these in a bucket: `gs://`, `s3://`, or another protocol of fsspec;
    - a hub id (`name` chooses its configuration);
    - `path/to/file.py:function_or_class`, called with those of `split`, `name`, `arguments` and the options in brackets
      that it has as arguments (data_files and processor, which verl's have, are None unless given so); it gives rows:
      a list of dictionaries, a sequence with `__len__` and `__getitem__`, or a `datasets.Dataset`;
    - a list of dictionaries, of threads (lists of turns), or of tuples (preferred, dispreferred); or a
      `datasets.Dataset`.

    The result is a `datasets.Dataset`, or a list where the rows come as Python objects. With `streaming` files are read
    as they are needed, and it is a `datasets.IterableDataset`. `ds_type` names the type of the files (json, csv,
    parquet, arrow) where their names do not. Text stays as it was written: a column of a csv file is numbers where each
    of them writes as it was (42 does, 0042 and 0.50 do not), unless rows are made of it (prompt, completion, ...) or it
    is streamed; dates in json are text.

    Raises ConfigError: nothing there, no such split (listing those there are), unreadable (naming the line), without
    rows, or a list to stream of which a column changes its type.
    """
    rows: Rows
    if isinstance(path, list | tuple) and path and all(isinstance(file, str | Path) for file in path):
        files = [str(file) for file in path]
        rows, shown = _load_files(files, split, streaming, ds_type), ", ".join(files)
    elif isinstance(path, str | Path):
        rows, shown = _load_path(str(path), split, name, streaming, ds_type, arguments or {}), str(path)
    elif is_splits(path):
        rows, shown = _pick(path, split, "the data set"), "the data set"
    elif is_table(path) or is_stream(path):
        rows, shown = path, "the data set"
    else:
        rows, shown = _from_list(path), "the list"
    # Values of the format that a data set was given (torch, numpy, pandas, ...) are no texts and messages.
    if is_table(rows) and rows.format["type"] not in (None, "custom"):  # which with_transform gives
        rows = rows.with_format(None, columns=rows.format["columns"])
    elif is_stream(rows) and rows._formatting is not None:
        rows = rows.with_format(None)
    rows = _undecoded(rows)
    if is_stream(rows):
        return rows
    if len(rows) == 0:
        raise ConfigError(f"{shown} has no rows in split {split!r}; choose another split or check how it was made")
    if not streaming:
        return rows
    return (_table(rows) if isinstance(rows, RowList) else rows).to_iterable_dataset()


def numbers_in_split(rows: Rows, split: str) -> range | None:
    """The numbers, in the whole split, of the rows of a part of one (`train[10%:]`); None where that is not known."""
    if not is_table(rows) or "[" not in split or "+" in split or not (infos := rows.info.splits):
        return None
    import datasets

    counts = {str(name): info.num_examples for name, info in infos.items()}
    (part,) = datasets.ReadInstruction.from_spec(split).to_absolute(counts)
    numbers = range(part.from_ or 0, counts[part.splitname] if part.to is None else part.to)
    return numbers if len(numbers) == len(rows) else None


def folder_of(path: Any) -> Path | None:
    """The folder of files here that `path` names, None for other data."""
    first = path[0] if isinstance(path, list | tuple) and path else path
    if (
        not isinstance(first, str | Path)
        or "://" in str(first)
        or str(first).startswith("task:")
        or ".py:" in str(first)
    ):
        return None
    local = Path(str(first).partition("*")[0] if "*" in str(first) else first).expanduser()
    if local.is_dir():
        return local
    return local.parent if local.is_file() or "*" in str(first) else None


def local_files(path: Any) -> dict[str, Path]:
    """The files here that `path` names, by names that are the same on every machine; none for other data."""
    if folder_of(path) is None:
        return {}
    found = {}
    for one in map(str, path if isinstance(path, list | tuple) else [path]):
        folder, local = folder_of(one), Path(one).expanduser()
        if folder is None:
            continue
        if "*" in one:
            files = _matching(local)
        else:
            files = [local] if local.is_file() else folder.rglob("*")
        found |= {f"{os.path.relpath(file, folder)} of {one}": file for file in sorted(files) if file.is_file()}
    return found


def _matching(pattern: Path) -> Iterator[Path]:
    return Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))


def splits_of(path: Any) -> tuple[str, ...] | None:
    """The splits of a source that its name tells: of files (a list, a pattern, a name) one; None for other data."""
    if isinstance(path, list | tuple) or _reader(str(path)) or str(path).startswith("task:verifiers("):
        return (ONLY,)
    return (ONLY, "test") if str(path).startswith("task:") else None


def _undecoded(rows: Any) -> Any:
    """The rows with images as the bytes or paths of their files: they are read within bounds, when they are needed."""
    if not (is_table(rows) or is_stream(rows)) or rows.features is None:
        return rows
    import datasets

    def plain(feature: Any) -> Any:
        if isinstance(feature, datasets.Image):
            return datasets.Image(mode=feature.mode, decode=False)
        if isinstance(feature, dict):
            return {name: plain(each) for name, each in feature.items()}
        if isinstance(feature, datasets.List):
            return datasets.List(plain(feature.feature), length=feature.length)
        if isinstance(feature, datasets.LargeList):
            return datasets.LargeList(plain(feature.feature))
        return feature

    for name, feature in rows.features.items():
        if (undecoded := plain(feature)) != feature:
            rows = rows.cast_column(name, undecoded)
    return rows


def is_table(rows: object) -> "TypeIs[datasets.Dataset]":
    """True for a `datasets.Dataset`."""
    return _is(rows, "Dataset")


def is_stream(rows: object) -> "TypeIs[datasets.IterableDataset]":
    """True for a `datasets.IterableDataset`, whose rows are read as they are needed."""
    return _is(rows, "IterableDataset")


def shuffle_buffer(rows: "datasets.IterableDataset") -> int:
    """The rows of the largest buffer that a stream shuffles in (`IterableDataset.shuffle`); 0 without one."""
    largest, parts = 0, [rows._ex_iterable]
    while parts:
        part: Any = parts.pop()
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            largest = max(largest, part.buffer_size)
        parts += [part.ex_iterable] if hasattr(part, "ex_iterable") else getattr(part, "ex_iterables", [])
    return largest


def is_splits(rows: object) -> "TypeIs[datasets.DatasetDict | datasets.IterableDatasetDict]":
    """True for the splits of a data set by their names."""
    return _is(rows, "DatasetDict", "IterableDatasetDict")


def _is(value: object, *classes: str) -> bool:
    """True for an instance of one of these classes of `datasets`: nothing is one before that is imported."""
    module = sys.modules.get("datasets")
    return module is not None and isinstance(value, tuple(getattr(module, name) for name in classes))


def _load_path(
    path: str, split: str, name: str | None, streaming: bool, ds_type: str | None, arguments: Mapping[str, Any]
) -> Rows:
    if path.startswith("task:"):
        if path.startswith("task:verifiers(") and split != "train":
            raise SplitError(
                f"{path} has only the split 'train', not {split!r}; name the tasks to evaluate on with data.eval_path",
                ["train"],
            )
        return _from_list(tasks.generate(path.removeprefix("task:"), split))
    if ".py:" in path:
        return _call_function(path, split, name, arguments)
    if "://" in path:
        return _load_remote(path, split, name, streaming, ds_type)
    local = Path(path).expanduser()
    if local.is_file() or ("*" in path and any(_matching(local))):
        if name is not None:
            raise ConfigError(f"{path!r} is a file, which has no configuration {name!r}: leave the name out")
        return _load_files([str(local)], split, streaming, ds_type)
    if local.is_dir():
        return _load_folder(str(local), split, name, streaming)
    import datasets

    # What looks like a path is not asked of the hub, whose error would hide the misspelling.
    if path.startswith(("/", ".", "~")) or _reader(path) or path.count("/") > 1 or "*" in path:
        raise ConfigError(
            f"there is no file or folder {path!r}; check data.path (a relative path starts at {Path.cwd()})"
        )
    title = path if name is None else f"{path} ({name})"
    return _read(f"hub data set {title}", lambda: datasets.load_dataset(path, name, split=split, streaming=streaming))


def _reader(path: str) -> str | None:
    """The reader for a file, from its name; None for a name that tells nothing."""
    suffixes = Path(path).suffixes
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return READERS.get(suffixes[-1]) if suffixes else None


def _load_files(files: list[str], split: str, streaming: bool, ds_type: str | None) -> Rows:
    reader, shown = ds_type or _reader(files[0]), ", ".join(files)
    if reader is None or reader not in READERS.values():
        raise ConfigError(f"{shown!r} is not a kind of file that can be read; those are {', '.join(READERS)}")
    if split.partition("[")[0] != ONLY:
        raise SplitError(
            f"{shown!r} is one file and has only the split 'train', not {split!r}; set the split to train, or name "
            "another file",
            [ONLY],
        )
    for file in files:
        if not streaming and (fault := encoding_fault(file, reader)) is not None:
            raise ConfigError(f"cannot load {file}: {fault}")

    def read() -> Rows:
        import datasets

        if reader == "csv":
            return _read_csv(files, split, streaming)
        if reader == "json":
            return _read_json(files, split, streaming)
        return datasets.load_dataset(reader, data_files=files, split=split, streaming=streaming)  # pyright: ignore

    return _read(shown, read, files)


def _read_csv(files: list[str], split: str, streaming: bool) -> Any:
    """The rows of csv files; pandas alone would make 42 of 0042, and None of the words null, NA and None."""
    import datasets
    import pandas

    first: tuple[str, list[str]] | None = None
    for opened in fsspec.open_files(files, "rb", compression="infer"):
        with opened as file:
            columns = [str(name) for name in pandas.read_csv(file, nrows=0).columns]
        if first is not None and set(columns) != set(first[1]):
            raise ConfigError(
                f"{opened.path} has the columns {', '.join(columns)}, but {first[0]} has {', '.join(first[1])}; files "
                "that are read together have the same"
            )
        first = first or (opened.path, columns)
    assert first is not None
    features = datasets.Features({name: datasets.Value("string") for name in first[1]})
    rows = datasets.load_dataset(
        "csv", data_files=files, split=split, streaming=streaming, features=features, keep_default_na=False,
        na_values=[""],
    )  # fmt: skip
    if not is_table(rows):
        return rows
    for name in first[1]:
        if name in TEXTS:
            continue
        column, kinds = rows.data.column(name), set[str | None]()
        for text in (text for chunk in column.chunks for text in chunk.to_pylist() if text is not None):
            kinds.add(next((dtype for number, dtype in NUMBERS.items() if _writes(number, text)), None))
            if None in kinds:
                break
        if kinds and None not in kinds:
            rows = rows.cast_column(name, datasets.Value("float64" if "float64" in kinds else "int64"))
    return rows


def _writes(number: Callable[[str], int | float], text: str) -> bool:
    """True where the text is what Python writes of a number of that kind, of 64 bits."""
    try:
        value = number(text)
    except ValueError:
        return False
    fits = -(2**63) <= value < 2**63 if isinstance(value, int) else math.isfinite(value)
    return fits and str(value) == text


def _read_json(files: list[str], split: str, streaming: bool) -> Any:
    """The rows of json files; Arrow alone would make times of texts that are dates, where all of a column are.

    Raises ConfigError for an integer that it would make another number of, unless rows are streamed.
    """
    import datasets
    import pyarrow
    import pyarrow.compute

    compute: Any = pyarrow.compute

    def has_text(column: Any) -> bool:
        """True where a column of texts has one that may have been a time."""
        is_text = pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)
        return is_text and bool(compute.any(compute.match_substring_regex(column, TIME)).as_py())

    def has_large(column: Any) -> bool:
        """True where a column of floats has one that may have been another integer."""
        is_float = pyarrow.types.is_float64(column.type)
        return is_float and bool(compute.any(compute.greater_equal(compute.abs(column), DENSE)).as_py())

    def any_column(column: Any, holds: Callable[[Any], bool]) -> bool:
        """True where something holds of a column, or of one in its lists and structures."""
        if pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type):
            return any_column(compute.list_flatten(column), holds)
        if pyarrow.types.is_struct(column.type):
            fields = range(column.type.num_fields)
            return any(any_column(compute.struct_field(column, number), holds) for number in fields)
        return holds(column)

    def untimed(feature: Any) -> Any:
        if isinstance(feature, dict):
            return {name: untimed(each) for name, each in feature.items()}
        if isinstance(feature, datasets.List):
            return datasets.List(untimed(feature.feature), length=feature.length)
        timed = isinstance(feature, datasets.Value) and feature.dtype.startswith("timestamp")
        return datasets.Value("string") if timed else feature

    rows: Any = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
    features = rows.features  # of the first rows; None for a file that is one list, which is read whole in any case
    timed = features is not None and untimed(features) != features
    if features is None or not (timed or streaming):
        rows = datasets.load_dataset("json", data_files=files, split=split)
        features = rows.features
        # Times behind other texts are text again, but not as it was written.
        columns = [rows.data.column(name) for name in features]
        timed = untimed(features) != features or any(any_column(column, has_text) for column in columns)
        if not timed and any(any_column(column, has_large) for column in columns):
            for _ in _json_rows(files, features, ()):  # which raises
                pass
    if timed:
        kind, plain = datasets.IterableDataset if streaming else datasets.Dataset, datasets.Features(untimed(features))
        # `datasets` keeps the rows by these arguments, of which the key tells a file that has changed.
        keys = tuple(file.fs.ukey(file.path) for file in fsspec.open_files(files))
        arguments = {"files": files, "features": plain, "keys": keys}
        rows = kind.from_generator(_json_rows, features=plain, gen_kwargs=arguments)
    return _pick({"train": rows}, split, ", ".join(files)) if timed or is_stream(rows) else rows


def _json_rows(files: Sequence[str], features: Mapping[str, Any], keys: Any) -> Iterator[Row]:
    """The objects of json files, one a line or in one list, with None for the columns that they lack.

    Raises ConfigError for what a table would lose: a key that the features have not, or digits of an integer.
    """

    def check(value: Any, feature: Any, path: str) -> None:
        is_float = getattr(feature, "dtype", None) == "float64"
        if isinstance(value, int) and is_float and not (abs(value) < 2**63 and int(float(value)) == value):
            raise ConfigError(
                f"{path} has the integer {str(value)[:40]}, which would lose digits as a float: it has more than 64 "
                "bits, or its column has fractions. Write it as text, in quotes"
            )
        if isinstance(feature, Mapping) and isinstance(value, Mapping):
            for key, held in value.items():
                if key not in feature:
                    raise ConfigError(f"{path} has the key {key!r}, which no row before it has: put such a row first")
                check(held, feature[key], path)
        elif isinstance(value, list) and (inner := getattr(feature, "feature", None)) is not None:
            for held in value:
                check(held, inner, path)

    for opened in fsspec.open_files(list(files), "rt", encoding="utf-8-sig", compression="infer"):
        with opened as file:
            start = file.readline()
            if start.lstrip().startswith("["):
                rows = json.loads(start + file.read())
            else:
                rows = (json.loads(line) for line in chain([start], file) if line.strip())
            for row in rows:
                check(row, features, opened.path)
                yield {**dict.fromkeys(features), **row}


def _load_folder(folder: str, split: str, name: str | None, streaming: bool) -> Any:
    """The rows of a split of a folder, here or at a URL that fsspec understands."""
    import datasets
    from datasets.data_files import DataFilesDict, get_data_patterns

    fs, inner = fsspec.url_to_fs(folder)
    files = {str(file).removeprefix(inner).strip("/"): str(file) for file in fs.find(inner)}
    if files.keys() & set(SAVED):
        loaded = _read(folder, lambda: datasets.load_from_disk(folder))
        if not is_splits(loaded):  # one data set: the rows to train on, or of the split that it was saved from
            own = str(loaded.split or "train").partition("[")[0]
            loaded = datasets.DatasetDict({"train": loaded, own: loaded})
        return _pick(loaded, split, folder)
    if not any(map(_reader, files)):
        raise ConfigError(f"the folder {folder!r} holds no {', '.join(READERS)} file and no saved data set")
    remote = "://" in folder
    if remote or (name is None and "README.md" not in files):  # which may tell configurations
        found = _read(folder, lambda: DataFilesDict.from_patterns(get_data_patterns(folder), base_path=folder))
        readable = {str(part): [file for file in its if _reader(file)] for part, its in found.items()}
        if remote or sum(map(len, readable.values())) == sum(map(len, found.values())):  # else images, or the like
            readable = {part: its for part, its in readable.items() if its}
            parts = _split_names(split, readable, folder)
            return _pick({part: _load_files(readable[part], "train", streaming, None) for part in parts}, split, folder)
    if not streaming:
        for file in files.values():
            if (reader := _reader(file)) and (fault := encoding_fault(file, reader)) is not None:
                raise ConfigError(f"cannot load {file}: {fault}")
    loaded = _read(folder, lambda: datasets.load_dataset(folder, name, streaming=streaming), list(files.values()))
    return _pick(loaded, split, folder)


def _load_remote(path: str, split: str, name: str | None, streaming: bool, ds_type: str | None) -> Rows:
    """The rows at a URL that fsspec understands."""
    if "*" in path or ds_type or _reader(path):
        return _load_files([path], split, streaming, ds_type)
    fs, inner = _read(path, lambda: fsspec.url_to_fs(path))
    if not _read(path, lambda: fs.isdir(inner)):
        raise ConfigError(f"there is no folder {path!r}, and it is no {', '.join(READERS)} file; check data.path")
    return _load_folder(path, split, name, streaming)


def _call_function(path: str, split: str, name: str | None, arguments: Mapping[str, Any]) -> Rows:
    """The rows that a user's function returns, or an instance of a user's class; it gets the arguments that it
    names."""
    name_of_it, options = split_options(path)
    function = resolve(name_of_it, {})
    if not callable(function):
        raise ConfigError(
            f"data.path: {name_of_it} is {type(function).__name__}, but it takes a function or a class that gives rows"
        )
    parameters = inspect.signature(function).parameters
    filled = {**arguments, "split": split, "name": name, "data_files": None, "processor": None, **options}
    lacking = [
        key
        for key, parameter in parameters.items()
        if key not in filled and parameter.default is parameter.empty and "VAR" not in parameter.kind.name
    ]
    if lacking or (unknown := [key for key in options if key not in parameters]):
        asks = f"asks for {', '.join(lacking)}" if lacking else f"has no argument {unknown[0]!r}"
        raise ConfigError(
            f"data.path: {name_of_it} {asks}; it gets those of {', '.join(sorted(filled))} that it names, and others "
            f"in brackets, {name_of_it}(data_files='rows.parquet')"
        )
    with failing_as(f"data.path: {name_of_it}"):
        made: Any = function(**{key: value for key, value in filled.items() if key in parameters})
        if is_splits(made):
            return _pick(made, split, path)
        if is_table(made) or is_stream(made):
            return made
        if not hasattr(made, "__iter__") and not (hasattr(made, "__len__") and hasattr(made, "__getitem__")):
            raise ConfigError(f"{path} gave {type(made).__name__}; it must give rows: a list, a sequence or a Dataset")
        if hasattr(made, "__len__") and hasattr(made, "__getitem__") and not isinstance(made, list | tuple):
            made = [made[index] for index in range(len(made))]
        rows = list(made)
    if rows and isinstance(rows[0], Mapping) and "input_ids" in rows[0] and not set(TEXTS) & set(rows[0]):
        raise ConfigError(
            f"{path} gives token ids (input_ids), but rows are tokenised here: let it give texts, under "
            f"{', '.join(TEXTS)}"
        )
    return _from_list(rows)


def _read(shown: str, reader: Callable[[], Any], files: Sequence[str] = ()) -> Any:
    """The result of `reader`; the many errors of reading become one that says what was read and why it failed.

    A fault that is found in one of the files says more than the reader's own error.
    """
    try:
        return reader()
    except ConfigError:
        raise
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = " ".join(f"{error} ({cause})".split() if cause is not error else str(error).split())
        for file in files:
            if (file_type := _reader(file)) and (fault := content_fault(file, file_type)):
                reason = fault if len(files) == 1 else f"{file}: {fault}"
                break
        message = f"cannot load {shown}: {reason}; check data.path, data.name and the split"
        if isinstance(error, ValueError) and str(error).startswith(("Unknown split", "Bad split")):
            raise SplitError(message, re.findall(r"'([^']+)'", str(error))) from error
        raise ConfigError(message) from error


def _pick(splits: Mapping[Any, Any], split: str, shown: str) -> Any:
    """The rows of a split, or of parts of splits (train[:10%], train+test), by their names."""
    if split in splits:
        return splits[split]
    names = _split_names(split, splits, shown)
    if any(is_stream(splits[name]) for name in names):
        raise ConfigError(
            f"the split {split!r} is a part of {shown}, whose rows are streamed and not counted; set data.streaming to "
            "False, or name a whole split"
        )
    import datasets

    counts = {name: len(splits[name]) for name in names}
    parts = _read(shown, lambda: datasets.ReadInstruction.from_spec(split).to_absolute(counts))
    chosen = [
        splits[part.splitname].select(range(part.from_ or 0, counts[part.splitname] if part.to is None else part.to))
        for part in parts
    ]
    return _read(shown, lambda: datasets.concatenate_datasets(chosen))


def _split_names(split: str, splits: Mapping[Any, Any], shown: str) -> list[str]:
    """The splits that `split` is made of; raises SplitError for one that there is not."""
    names = [part.partition("[")[0] for part in split.split("+")]
    if unknown := [name for name in names if name not in splits]:
        known = [str(name) for name in splits]
        raise SplitError(f"{shown} has no split {unknown[0]!r}; its splits are {', '.join(known)}", known)
    return names


def _from_list(items: Any) -> RowList:
    if isinstance(items, Mapping) or not isinstance(items, Sequence):
        raise ConfigError(
            "data given as a Python object is a list of dictionaries, one for each row, or of threads, and not a "
            f"{type(items).__name__}; a generator becomes one with list(rows), a dictionary of columns a data set with "
            "datasets.Dataset.from_dict(columns), a pandas.DataFrame with datasets.Dataset.from_pandas(frame)"
        )
    if not items:
        raise ConfigError("the list has no rows; give at least one dictionary")
    rows = as_rows(items)
    columns = dict.fromkeys(name for row in rows for name in row)
    return RowList(_plain({**columns, **row}) for row in rows)


def _plain(value: Any) -> Any:
    """The value with lists for other sequences, and Python's numbers for numpy's: what formats and rewards look for."""
    if isinstance(value, Mapping):
        return {name: _plain(held) for name, held in value.items()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.ndim == 1:  # one of more dimensions may be an image
        return _plain(value.tolist())
    return [_plain(held) for held in value] if isinstance(value, list | tuple) else value


def _table(rows: RowList) -> "datasets.Dataset":
    import datasets

    try:
        return datasets.Dataset.from_dict({name: [row[name] for row in rows] for name in rows.column_names})
    except Exception as error:
        raise ConfigError(
            f"the list cannot be streamed, because a column changes its type ({error}); set data.streaming to False"
        ) from error
