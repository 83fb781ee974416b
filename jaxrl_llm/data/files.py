"""Files of rows, here or in a bucket: parquet, json, csv, arrow and text, one by one or the splits of a folder."""

import glob
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import fsspec

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data import Row
from jaxrl_llm.data.diagnose import READERS, encoding_fault, reader_of
from jaxrl_llm.data.splits import SplitError, is_splits, is_stream, is_table, pick, reading, split_names, with_leaves
from jaxrl_llm.data.tokenize import TEXTS

ONLY = "train"  # the split of what has one
SAVED = ("dataset_dict.json", "dataset_info.json")  # files of a folder that save_to_disk wrote
NUMBERS = {int: "int64", float: "float64"}  # of a csv file
PATTERN = re.compile(r"[*?[]")  # in the name of several files
ROWS = 1000  # whose types are found together
DENSE = 2.0**53  # below which a float holds every integer
TIME = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d+)?$"  # what Arrow writes of a time as text


def read_files(files: list[str], split: str, streaming: bool, ds_type: str | None) -> Any:
    """The rows of files of one type, `ds_type` or what their names say: of their one split, or a part of it.

    Raises ConfigError for files of no known type, of several types, or that are no UTF-8; SplitError for another split.
    """
    reader, shown = ds_type or reader_of(files[0]), ", ".join(files)
    if ds_type is not None and ds_type not in READERS.values():
        raise ConfigError(f"ds_type of {shown!r} is {ds_type!r}; it is {', '.join(dict.fromkeys(READERS.values()))}")
    if reader is None:
        texts = "" if Path(files[0]).is_file() else " (and a text among rows in memory is written {'prompt': text})"
        unpacked = "; unpack it first" if files[0].endswith((".zip", ".tar", ".tar.gz", ".tgz", ".7z")) else ""
        raise ConfigError(
            f"{shown!r:.200} is not a kind of file that can be read; those are {', '.join(READERS)}{texts}{unpacked}"
        )
    if ds_type is None and (other := next((x for x in files if reader_of(x) not in (None, reader)), None)):
        raise ConfigError(
            f"{other} is a {reader_of(other)} file, but {files[0]} a {reader} file; those that are read "
            "together are of one type: make them two of data.sources"
        )
    if split.partition("[")[0] != ONLY:
        raise SplitError(
            f"{shown!r} is one file and has only the split 'train', not {split!r}; set the split to train, or name "
            "another file",
            [ONLY],
        )
    for file in files:
        if not streaming and (fault := encoding_fault(file, reader)) is not None:
            raise ConfigError(f"cannot load {file}: {fault}")

    if reader == "parquet" and not any("://" in file for file in files):
        files = reading(shown, lambda: _with_rows(files))
    # `datasets` takes every name for a pattern, also that of a file whose own name reads like one.
    named = [glob.escape(file) if PATTERN.search(file) and not is_pattern(file) else file for file in files]

    def read() -> Any:
        import datasets

        if reader == "csv":
            return _read_csv(named, split, streaming)
        if reader == "json":
            return _read_json(named, split, streaming)
        return datasets.load_dataset(reader, data_files=named, split=split, streaming=streaming)  # pyright: ignore

    return reading(shown, read, files)


def _with_rows(files: list[str]) -> list[str]:
    """The parquet files without those that have no rows, as programs that write in parts leave them: `datasets` fails
    on one. Raises ConfigError where none has any."""
    import pyarrow.parquet

    found = [str(path) for file in files for path in (sorted(matching(Path(file))) if is_pattern(file) else [file])]
    kept = [file for file in found if pyarrow.parquet.read_metadata(file).num_rows]
    if found and not kept:
        raise ConfigError(f"{', '.join(files)} has no rows; check how it was made")
    return files if len(kept) == len(found) else kept


def _read_csv(files: list[str], split: str, streaming: bool) -> Any:
    """The rows of csv files, or of tsv files, whose fields are separated by tabs.

    pandas alone would make 42 of 0042, and None of the words null, NA and None.
    """
    import datasets
    import pandas

    first: tuple[str, list[str]] | None = None
    mark, *others = {"\t" if ".tsv" in Path(file).suffixes else "," for file in files}
    if others:
        raise ConfigError(f"{', '.join(files)} are read together, but some are csv and some tsv: make them two sources")
    for opened in fsspec.open_files(files, "rb", compression="infer"):
        with opened as file:
            first_line = pandas.read_csv(file, nrows=1, sep=mark)
        with opened as file:
            header = pandas.read_csv(file, nrows=1, header=None, dtype=str, sep=mark).iloc[0].dropna()
        if len(twice := header[header.duplicated()]):  # pandas would rename the second one
            raise ConfigError(f"{opened.path} has two columns named {twice.iloc[0]!r}: rename one")
        columns = [str(name) for name in first_line.columns]
        if columns[0].startswith('{"'):
            raise ConfigError(f"{opened.path} is named as a csv file, but its lines are JSON: name it .jsonl")
        if len(columns) == 1 and any(other in columns[0] for other in ",;\t|"):
            raise ConfigError(
                f"{opened.path} has the one column {columns[0]!r}: separate the fields of its lines by "
                f"{'tabs' if mark != ',' else 'commas (by tabs in a file named .tsv)'}"
            )
        if len(first_line) and not isinstance(first_line.index, pandas.RangeIndex):
            # pandas takes the first fields for names of the lines, and gives each column the text of the next one.
            raise ConfigError(
                f"the lines of {opened.path} have more fields than its header, {', '.join(columns)}: put texts with "
                "commas in quotes, and name every column"
            )
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
        na_values=[""], sep=mark,
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
    from datasets.exceptions import DatasetGenerationError

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

    def untimed(leaf: Any) -> Any:
        timed = isinstance(leaf, datasets.Value) and leaf.dtype.startswith("timestamp")
        return datasets.Value("string") if timed else leaf

    rows: Any = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
    features = rows.features  # of the first rows; None for a file that is one list, which is read whole in any case
    by_row = features is not None and with_leaves(features, untimed) != features
    if by_row and not streaming:
        features = _features_of_all(files) or features
    elif features is None or not streaming:
        try:
            rows = datasets.load_dataset("json", data_files=files, split=split)
            features = rows.features
            # Times behind other texts are text again, but not as it was written.
            columns = [rows.data.column(name) for name in features]
            by_row = with_leaves(features, untimed) != features or any(any_column(each, has_text) for each in columns)
            if not by_row and any(any_column(column, has_large) for column in columns):
                for _ in _json_rows(files, features, ()):  # which raises
                    pass
        except DatasetGenerationError:
            # It takes the columns of the first rows for those of all, which may be null, or have a fraction, later on.
            if (features := _features_of_all(files)) is None:
                raise
            by_row = True
    if by_row:
        kind: Any = datasets.IterableDataset if streaming else datasets.Dataset
        plain = datasets.Features(with_leaves(features, untimed))
        # `datasets` keeps the rows by these arguments, of which the key tells a file that has changed.
        keys = tuple(file.fs.ukey(file.path) for file in fsspec.open_files(files))
        arguments = {"files": files, "features": plain, "keys": keys}
        rows = kind.from_generator(_json_rows, features=plain, gen_kwargs=arguments)
    is_document = is_table(rows) and len(rows) == 1 and ".json" in Path(files[0]).suffixes  # a .jsonl has a row a line
    if is_document and (fault := _columns_fault(rows[0])):
        raise ConfigError(f"{', '.join(files)} {fault}")
    return pick({"train": rows}, split, ", ".join(files)) if by_row or is_stream(rows) else rows


def _columns_fault(row: Row) -> str | None:
    """The fault of the only row of a json file that is one object with all rows in it, as pandas writes columns."""
    held = list(row.values())
    if all(isinstance(value, dict) and "0" in value for value in held) or (
        all(isinstance(value, list) and all(isinstance(each, str) for each in value) for value in held)
        and row.keys() & set(TEXTS)
    ):
        return (
            "is one object, whose columns hold the values of all rows: write a list of rows, or each on a line of its "
            "own, as pandas does with to_json(orient='records', lines=True)"
        )
    (name, inner), *others = row.items()
    objects = isinstance(inner, list) and inner and all(isinstance(each, dict) for each in inner)
    if objects and not others and not inner[0].keys() & {"role", "from"}:
        return f"is one object, whose key {name!r} has the rows: write that list alone"
    return None


def _features_of_all(files: Sequence[str]) -> Any:
    """The features of all rows of json files, in which numbers may be whole in some and None stands for what lacks;
    None where a column has values of several types."""
    import datasets
    import pyarrow

    rows = (row for _, row in _json_objects(files))
    try:
        kinds = [pyarrow.array(block).type for block in iter(lambda: list(islice(rows, ROWS)), [])]
        schemas = [pyarrow.schema(list(kind)) for kind in kinds if pyarrow.types.is_struct(kind)]
        return datasets.Features.from_arrow_schema(pyarrow.unify_schemas(schemas, promote_options="permissive"))
    except (pyarrow.ArrowException, ValueError, OverflowError, RecursionError):
        return None


def _json_objects(files: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The objects of json files, one a line or in one list, each with the path of its file."""
    for opened in fsspec.open_files(list(files), "rt", encoding="utf-8-sig", compression="infer"):
        with opened as file:
            start = file.readline()
            if start.lstrip().startswith("["):
                rows = json.loads(start + file.read())
            else:
                rows = (json.loads(line) for line in chain([start], file) if line.strip())
            for row in rows:
                yield opened.path, row


def _json_rows(files: Sequence[str], features: Mapping[str, Any], keys: Any) -> Iterator[Row]:
    """The rows of json files, with None for the columns that they lack.

    Raises ConfigError for what a table would lose: a key that the features have not, digits of an integer, or what is
    behind the point, and for a value of another type, which it would make one of its own.
    """
    types: dict[str | None, Any] = {"string": str, "int64": int, "float64": int | float, "bool": bool}

    def check(value: Any, feature: Any, path: str) -> None:
        dtype = getattr(feature, "dtype", None)
        if value is not None and not isinstance(value, types.get(dtype, object)):
            raise ConfigError(
                f"{path} has {json.dumps(value)[:80]} where the rows before it have {dtype}; a column has one type: "
                "write all of them alike, or put such a row first"
            )
        if isinstance(value, int) and dtype == "float64" and not (abs(value) < 2**63 and int(float(value)) == value):
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

    for path, row in _json_objects(files):
        check(row, features, path)
        yield {**dict.fromkeys(features), **row}


def read_folder(folder: str, split: str, name: str | None, streaming: bool) -> Any:
    """The rows of a split of a folder, here or at a URL that fsspec understands.

    Raises ConfigError for a folder without any file that can be read, and for a file that is no UTF-8.
    """
    import datasets
    from datasets.data_files import DataFilesDict, get_data_patterns

    fs, inner = fsspec.url_to_fs(folder)
    files = {str(file).removeprefix(inner).strip("/"): str(file) for file in fs.find(inner)}
    if files.keys() & set(SAVED):
        loaded = reading(folder, lambda: datasets.load_from_disk(folder))
        if not is_splits(loaded):  # one data set: the rows to train on, or of the split that it was saved from
            own = str(loaded.split or "train").partition("[")[0]
            loaded = datasets.DatasetDict({"train": loaded, own: loaded})
        return pick(loaded, split, folder)
    if not any(map(holds_rows, files)):
        kinds = ", ".join(kind for kind in READERS if READERS[kind] != "text")
        texts = f"; {folder.rstrip('/')}/*.txt names its texts" if any(map(reader_of, files)) else ""
        raise ConfigError(f"the folder {folder!r} holds no {kinds} file and no saved data set{texts}")
    remote = "://" in folder
    if remote or (name is None and not _has_card(Path(folder) / "README.md")):
        found = reading(folder, lambda: DataFilesDict.from_patterns(get_data_patterns(folder), base_path=folder))
        readable = {str(part): [file for file in its if holds_rows(file)] for part, its in found.items()}
        if remote or sum(map(len, readable.values())) == sum(map(len, found.values())):  # else images, or the like
            readable = {part: its for part, its in readable.items() if its}
            parts = split_names(split, readable, folder)
            return pick({part: read_files(readable[part], "train", streaming, None) for part in parts}, split, folder)
    if not streaming:
        for file in files.values():
            if (reader := reader_of(file)) and (fault := encoding_fault(file, reader)) is not None:
                raise ConfigError(f"cannot load {file}: {fault}")
    loaded = reading(folder, lambda: datasets.load_dataset(folder, name, streaming=streaming), list(files.values()))
    return pick(loaded, split, folder)


def holds_rows(file: str) -> bool:
    """True for a file of a folder that can be read, unless it is text, as notes and licences beside the rows are."""
    return reader_of(file) not in (None, "text")


def _has_card(file: Path) -> bool:
    """True for a README.md that tells configurations of the data, or the types of its columns."""
    head = file.read_text(encoding="utf-8", errors="replace").split("\n---")[0] if file.is_file() else ""
    return re.search(r"^(?:configs|dataset_info)\s*:", head, re.MULTILINE) is not None


def read_remote(path: str, split: str, name: str | None, streaming: bool, ds_type: str | None) -> Any:
    """The rows of a file, a pattern of files or a folder at a URL that fsspec understands; raises ConfigError where
    there is neither."""
    if "*" in path or ds_type or reader_of(path):
        return read_files([path], split, streaming, ds_type)
    fs, inner = reading(path, lambda: fsspec.url_to_fs(path))
    if not reading(path, lambda: fs.isdir(inner)):
        raise ConfigError(f"there is no folder {path!r}, and it is no {', '.join(READERS)} file; check data.path")
    return read_folder(path, split, name, streaming)


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
    pattern = is_pattern(str(first))
    local = Path(PATTERN.split(str(first))[0] if pattern else first).expanduser()
    if local.is_dir():
        return local
    return local.parent if local.is_file() or pattern else None


def local_files(path: Any) -> dict[str, Path]:
    """The files here that `path` names, by names that are the same on every machine; none for other data."""
    if folder_of(path) is None:
        return {}
    found = {}
    for one in map(str, path if isinstance(path, list | tuple) else [path]):
        folder, local = folder_of(one), Path(one).expanduser()
        if folder is None:
            continue
        if is_pattern(one):
            files = matching(local)
        else:
            files = [local] if local.is_file() else folder.rglob("*")
        found |= {f"{os.path.relpath(file, folder)} of {one}": file for file in sorted(files) if file.is_file()}
    return found


def is_pattern(path: str) -> bool:
    """True for a path with letters that stand for others (*, ? or [...]), which is not itself that of a file here."""
    return PATTERN.search(path) is not None and not Path(path).expanduser().exists()


def matching(pattern: Path) -> Iterator[Path]:
    """The files and folders here that match a pattern, which may start at the root."""
    return Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))
