"""Sources of rows: the Hugging Face hub, files here or in a bucket, Python objects, and the built-in tasks."""

import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from jaxrl_llm.config.resolve import ConfigError, failing_as, naming, resolve, split_options
from jaxrl_llm.data import Row, tasks
from jaxrl_llm.data.diagnose import reader_of
from jaxrl_llm.data.files import ONLY, holds_rows, is_pattern, matching, read_files, read_folder, read_remote
from jaxrl_llm.data.formats.native import as_rows
from jaxrl_llm.data.splits import SplitError, is_splits, is_stream, is_table, numbers_in_rows, pick, reading, undecoded

if TYPE_CHECKING:
    import datasets  # slow to import: only the functions that make such rows do so


class RowList(list[Row]):
    """Rows that were given as Python objects, all with the same columns and otherwise as they are.

    A table would give nested objects each other's keys, and a column one type.
    """

    @property
    def column_names(self) -> list[str]:
        """The names of the columns, which every row has."""
        return list(self[0])


HUB_SECONDS = 10.0  # in which the hub answers
Rows: TypeAlias = "datasets.Dataset | datasets.IterableDataset | RowList"
Source: TypeAlias = "str | Path | Sequence[Any] | Rows | datasets.DatasetDict"


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

    - `task:<name>`, a built-in task, whose splits may be taken in parts too;
    - a .parquet, .jsonl (.ndjson), .json, .csv, .tsv, .arrow or .txt file (maybe compressed: .jsonl.gz), or a pattern
      such as `data/*.parquet`, or a list of files: one split, "train" (or a part of it: "train[:10%]"), in that order;
      each line of a .txt file is a row with the column `text`;
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
    parquet, arrow, text) where their names do not. Text stays as it was written: a column of a csv file is numbers
    where each of them writes as it was (42 does, 0042 and 0.50 do not), unless rows are made of it (prompt, completion,
    ...) or it is streamed; dates in json are text.

    Raises ConfigError: nothing there, no such split (listing those there are), unreadable (naming the line), without
    rows, or a list to stream of which a column changes its type.
    """
    rows: Rows
    if isinstance(path, list | tuple) and path and all(isinstance(file, str | Path) for file in path):
        files = [file if "://" in file else str(Path(file).expanduser()) for file in map(str, path)]
        rows, shown = read_files(files, split, streaming, ds_type), ", ".join(files)
    elif isinstance(path, str | Path):
        rows, shown = _load_path(str(path), split, name, streaming, ds_type, arguments or {}), str(path)
    elif is_splits(path):
        rows, shown = pick(path, split, "the data set"), "the data set"
    elif is_table(path) or is_stream(path):
        rows, shown = path, "the data set"
    else:
        rows, shown = _from_list(path), "the list"
    # Values of the format that a data set was given (torch, numpy, pandas, ...) are no texts and messages.
    if is_table(rows) and rows.format["type"] not in (None, "custom"):  # which with_transform gives
        rows = rows.with_format(None, columns=rows.format["columns"])
    elif is_stream(rows) and rows._formatting is not None:
        rows = rows.with_format(None)
    rows = undecoded(rows)
    if is_stream(rows):
        return rows
    if len(rows) == 0:
        raise ConfigError(f"{shown} has no rows in split {split!r}; choose another split or check how it was made")
    if not streaming:
        return rows
    return (_table(rows) if isinstance(rows, RowList) else rows).to_iterable_dataset()


def splits_of(path: Any) -> tuple[str, ...] | None:
    """The splits of a source that its name tells: of files (a list, a pattern, a name) one; None for other data."""
    if isinstance(path, list | tuple) or reader_of(str(path)) or str(path).startswith("task:verifiers("):
        return (ONLY,)
    return (ONLY, "test") if str(path).startswith("task:") else None


def _load_path(
    path: str, split: str, name: str | None, streaming: bool, ds_type: str | None, arguments: Mapping[str, Any]
) -> Rows:
    """The rows that a text names: a task, a function, a URL, files or a folder here, or else a data set of the hub."""
    if path.startswith("task:"):
        if name is not None:
            raise ConfigError(f"{path!r} is a built-in task, which has no configuration {name!r}: leave the name out")
        parts, rows = split.split("+"), list[Any]()
        if path.startswith("task:verifiers(") and any(part.partition("[")[0] != "train" for part in parts):
            raise SplitError(
                f"{path} has only the split 'train', not {split!r}; name the tasks to evaluate on with data.eval_path",
                ["train"],
            )
        for part in parts:  # train[:10%], of the rows that the task has by default
            whole = tasks.generate(path.removeprefix("task:"), part.partition("[")[0])
            numbers = numbers_in_rows(whole, part)
            rows += whole if numbers is None else [whole[number] for number in numbers]
        return _from_list(rows)
    if ".py:" in path:
        return _call_function(path, split, name, arguments)
    if "://" in path:
        return read_remote(path, split, name, streaming, ds_type)
    local = Path(path).expanduser()
    if local.is_file() or (is_pattern(path) and any(matching(local))):
        if name is not None:
            raise ConfigError(f"{path!r} is a file, which has no configuration {name!r}: leave the name out")
        files = [str(local)]
        if not local.is_file() and reader_of(path) is None and ds_type is None:  # data/*: what can be read of that
            files = [str(file) for file in sorted(matching(local)) if file.is_file() and holds_rows(str(file))] or files
        return read_files(files, split, streaming, ds_type)
    if local.is_dir():
        return read_folder(str(local), split, name, streaming)
    # What is no name of the hub is not asked of it: its error would hide the misspelling of a path.
    if reader_of(path) or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", path):
        parts = path.split(",")
        several = len(parts) > 1 and all(Path(part.strip()).expanduser().exists() for part in parts)
        way_out = "; several are entries of data.sources" if several else ""
        raise ConfigError(
            f"there is no file or folder {path!r}; check data.path (a relative path starts at {Path.cwd()}){way_out}"
        )
    title = f"{path if name is None else f'{path} ({name})'}, which is no file or folder here, from the hub"
    return reading(title, lambda: _from_hub(path, name, split, streaming))


def _from_hub(path: str, name: str | None, split: str, streaming: bool) -> Rows:
    """The rows of a data set of the hub or, where that does not answer, of the cache of `datasets`.

    The hub is asked once whether it is there: `datasets` would ask for half a minute, and a misspelt path of a file may
    be a name of the hub.
    """
    import datasets.config
    from huggingface_hub import HfApi

    unreached = None
    if not (offline := datasets.config.HF_HUB_OFFLINE):
        try:
            HfApi().dataset_info(path, timeout=HUB_SECONDS)
        except Exception as error:  # of a library for HTTP, which differs by version; others `datasets` explains
            unreached = error if "Connect" in type(error).__name__ else None
    datasets.config.HF_HUB_OFFLINE = offline or unreached is not None
    try:
        return datasets.load_dataset(path, name, split=split, streaming=streaming)
    except ConnectionError:
        if unreached is None:
            raise
        raise ConnectionError("the hub does not answer") from unreached
    finally:
        datasets.config.HF_HUB_OFFLINE = offline


def _call_function(path: str, split: str, name: str | None, arguments: Mapping[str, Any]) -> Rows:
    """The rows that a user's function returns, or an instance of a user's class; it gets the arguments that it
    names."""
    name_of_it, options = split_options(path)
    with naming("data.path"):
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
            return pick(made, split, path)
        if "split" not in parameters and split != ONLY:  # it would give the rows to train on
            raise SplitError(
                f"{name_of_it} has no argument split, and so only the split 'train', not {split!r}: add the argument, "
                "or name other rows to evaluate on with data.eval_path",
                [ONLY],
            )
        if is_table(made) or is_stream(made):
            return made
        if not hasattr(made, "__iter__") and not (hasattr(made, "__len__") and hasattr(made, "__getitem__")):
            raise ConfigError(f"{path} gave {type(made).__name__}; it must give rows: a list, a sequence or a Dataset")
        if hasattr(made, "__len__") and hasattr(made, "__getitem__") and not isinstance(made, list | tuple):
            made = [made[index] for index in range(len(made))]
        rows = list(made)
    return _from_list(rows)


def _from_list(items: Any) -> RowList:
    """The rows of Python objects; raises ConfigError for what is no list, or an empty one."""
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
    for name in columns:
        if not isinstance(name, str):
            raise ConfigError(f"a row has a column named {name!r}, but names of columns are texts: rename it")
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
    """The rows as a table; raises ConfigError where a column has values of several types."""
    import datasets

    try:
        return datasets.Dataset.from_dict({name: [row[name] for row in rows] for name in rows.column_names})
    except Exception as error:
        raise ConfigError(
            f"the list cannot be streamed, because a column changes its type ({error}); set data.streaming to False"
        ) from error
