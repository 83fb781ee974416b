"""Data sets of Hugging Face: which kind one is, its splits, and one message for the many errors of reading one."""

import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data.diagnose import content_fault

if TYPE_CHECKING:
    import datasets  # slow to import: only the functions that make such rows do so
    from typing_extensions import TypeIs

# `datasets` logs the errors that it raises; what `reading` makes of them is told once.
for _reader in ("json.json", "csv.csv"):
    logging.getLogger(f"datasets.packaged_modules.{_reader}").addFilter(lambda record: record.levelno < logging.ERROR)


class SplitError(ConfigError):
    """A split that a source does not have; the message lists those it has, `splits`."""

    def __init__(self, message: str, splits: Sequence[str]):
        super().__init__(message)
        self.splits = splits


def is_table(rows: object) -> "TypeIs[datasets.Dataset]":
    """True for a `datasets.Dataset`, rows in a table, without importing `datasets`."""
    return _is(rows, "Dataset")


def is_stream(rows: object) -> "TypeIs[datasets.IterableDataset]":
    """True for a `datasets.IterableDataset`, whose rows are read as they are needed."""
    return _is(rows, "IterableDataset")


def is_splits(rows: object) -> "TypeIs[datasets.DatasetDict | datasets.IterableDatasetDict]":
    """True for the splits of a data set by their names."""
    return _is(rows, "DatasetDict", "IterableDatasetDict")


def _is(value: object, *classes: str) -> bool:
    """True for an instance of one of these classes of `datasets`: nothing is one before that is imported."""
    module = sys.modules.get("datasets")
    return module is not None and isinstance(value, tuple(getattr(module, name) for name in classes))


def numbers_in_split(rows: object, split: str) -> range | None:
    """The numbers, in the whole split, of the rows of a part of one (`train[10%:]`); None where that is not known."""
    if not is_table(rows) or "[" not in split or "+" in split:
        return None
    counts = {str(name): info.num_examples for name, info in (rows.info.splits or {}).items()}
    if split.partition("[")[0] not in counts:
        return None
    ((_, numbers),) = _parts(split, counts, "the data set")
    return numbers if len(numbers) == len(rows) else None


def numbers_in_rows(rows: Any, split: str) -> list[int] | None:
    """The numbers of the rows that are parts of a split (`train[:10%]+train[90%:]`), of rows given in Python, which are
    one split of any name; None for all of them.

    Raises ConfigError: several splits, a part without rows, or one of rows that are streamed.
    """
    if "[" not in split and "+" not in split:
        return None
    names = list(dict.fromkeys(part.partition("[")[0] for part in split.split("+")))
    if len(names) > 1:
        raise SplitError(f"the split is {split!r}, but rows given in Python are one: give a DatasetDict", names[:1])
    if is_stream(rows):
        raise _streamed(split, "the data set")
    numbers = [number for _, part in _parts(split, {names[0]: len(rows)}, "the data") for number in part]
    if not numbers:
        raise ConfigError(f"the data has {len(rows)} rows, and none in the split {split!r}; choose a larger part")
    return numbers


def pick(splits: Mapping[Any, Any], split: str, shown: str) -> Any:
    """The rows of a split, or of parts of splits (train[:10%], train+test), by their names."""
    if split in splits:
        return splits[split]
    names = split_names(split, splits, shown)
    if any(is_stream(splits[name]) for name in names):
        raise _streamed(split, shown)
    import datasets

    parts = _parts(split, {name: len(splits[name]) for name in names}, shown)
    return reading(
        shown, lambda: datasets.concatenate_datasets([splits[name].select(numbers) for name, numbers in parts])
    )


def _parts(split: str, counts: Mapping[str, int], shown: str) -> list[tuple[str, range]]:
    """(name, numbers of rows) of each part that `split` names, of splits with so many rows."""
    import datasets

    parts = reading(shown, lambda: datasets.ReadInstruction.from_spec(split).to_absolute(counts))
    return [
        (part.splitname, range(part.from_ or 0, counts[part.splitname] if part.to is None else part.to))
        for part in parts
    ]


def _streamed(split: str, shown: str) -> ConfigError:
    return ConfigError(
        f"the split {split!r} is a part of {shown}, whose rows are streamed and not counted; set data.streaming to "
        "False, or name a whole split"
    )


def split_names(split: str, splits: Mapping[Any, Any], shown: str) -> list[str]:
    """The splits that `split` is made of; raises SplitError for one that there is not."""
    names = [part.partition("[")[0] for part in split.split("+")]
    if unknown := [name for name in names if name not in splits]:
        known = [str(name) for name in splits]
        raise SplitError(f"{shown} has no split {unknown[0]!r}; its splits are {', '.join(known)}", known)
    return names


def shuffle_buffer(rows: "datasets.IterableDataset") -> int:
    """The rows of the largest buffer that a stream shuffles in (`IterableDataset.shuffle`); 0 without one."""
    largest, parts = 0, [rows._ex_iterable]
    while parts:
        part: Any = parts.pop()
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            largest = max(largest, part.buffer_size)
        parts += [part.ex_iterable] if hasattr(part, "ex_iterable") else getattr(part, "ex_iterables", [])
    return largest


def undecoded(rows: Any) -> Any:
    """The rows with images as the bytes or paths of their files: they are read within bounds, when they are needed."""
    if not (is_table(rows) or is_stream(rows)) or rows.features is None:
        return rows
    import datasets

    def plain(leaf: Any) -> Any:
        return datasets.Image(mode=leaf.mode, decode=False) if isinstance(leaf, datasets.Image) else leaf

    for name, feature in rows.features.items():
        if (read := with_leaves(feature, plain)) != feature:
            rows = rows.cast_column(name, read)
    return rows


def with_leaves(feature: Any, changed: Callable[[Any], Any]) -> Any:
    """A feature of `datasets` with `changed` leaves, those within its lists and dictionaries."""
    import datasets

    if isinstance(feature, dict):
        return {name: with_leaves(each, changed) for name, each in feature.items()}
    if isinstance(feature, datasets.List):
        return datasets.List(with_leaves(feature.feature, changed), length=feature.length)
    if isinstance(feature, datasets.LargeList):
        return datasets.LargeList(with_leaves(feature.feature, changed))
    return changed(feature)


def reading(shown: str, reader: Callable[[], Any], files: Sequence[str] = ()) -> Any:
    """The result of `reader`; the many errors of reading become one that says what was read and why it failed.

    A fault that is found in one of the files says more than the reader's own error. Bars of `datasets` are for
    terminals: in a file or a notebook each is a line of control characters.
    """
    import datasets.config

    asked = datasets.config.HF_DATASETS_DISABLE_PROGRESS_BARS is not None  # by its variable, which it holds to
    hides = datasets.is_progress_bar_enabled() and not asked and not sys.stderr.isatty()
    if hides:
        datasets.disable_progress_bars()
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
            if fault := content_fault(file):
                reason = fault if len(files) == 1 else f"{file}: {fault}"
                break
        message = f"cannot load {shown}: {reason}; check data.path, data.name and the split"
        if isinstance(error, ValueError) and str(error).startswith(("Unknown split", "Bad split")):
            raise SplitError(message, re.findall(r"'([^']+)'", str(error))) from error
        raise ConfigError(message) from error
    finally:
        if hides:
            datasets.enable_progress_bars()
