"""The sources of a `DataSpec`, opened: their rows, without those that are left out, and the format that reads them."""

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.config.resolve import ConfigError, closest, split_options
from jaxrl_llm.data import Row, sources
from jaxrl_llm.data.diagnose import READERS
from jaxrl_llm.data.files import folder_of
from jaxrl_llm.data.formats.lookup import Example, FactoryOptions, Format, as_prompt, code_of, find
from jaxrl_llm.data.images import ImageLimits
from jaxrl_llm.data.pairs import ANSWERS, has_prompt
from jaxrl_llm.data.splits import (
    SplitError,
    is_splits,
    is_stream,
    numbers_in_rows,
    numbers_in_split,
    shuffle_buffer,
)
from jaxrl_llm.data.templates import SYSTEM_ROLES, is_conversational
from jaxrl_llm.data.tokenize import TOKENS

log = logging.getLogger(__name__)

END_MARKS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "zephyr": "</s>"}  # end of a turn in fixed-text formats
# Columns that a row of a kind may begin with, by precedence.
OPENERS = {
    "prompts": ("prompt",),
    "completions": ("messages", "prompt", "text", TOKENS),
    "pairs": ("prompt", "chosen"),
    "triples": ("prompt", "chosen"),
    "labels": ("prompt", "chosen"),
    "steps": ("prompt",),
}
# The keys of a source dictionary that speak of the source; everything else is an option of its format.
COLUMN_KEYS = ("prompt_key", "completion_key", "label_key")  # in place of those of `data`
SOURCE_KEYS = (
    "path", "name", "split", "eval_split", "format", "type", "weight", "ds_type", "data_files", *COLUMN_KEYS,
)  # fmt: skip


@dataclass(frozen=True)
class DataSpec:
    """The data of a run: its sources, the token rows that are made of them, and the order of batches.

    Fields are the settings `data.*` of the same name, where nothing else is said.
    """

    kind: str  # what the algorithm learns from: prompts, completions, pairs, triples, labels or steps
    path: Any
    name: str | None
    sources: tuple[Any, ...]
    format: Any
    split: str
    eval_path: Any
    eval_split: str | None
    eval_fraction: float  # eval.fraction: share of the training rows to evaluate on, and not to train on
    prompt_key: str
    completion_key: str
    label_key: str
    system_prompt: str | None
    image_key: str
    image_limits: ImageLimits  # data.image_pixels, image_bytes, images_per_row, image_urls
    template_kwargs: Mapping[str, Any]  # data.chat_template_kwargs
    step_separator: str
    keep_prompt: bool  # rows of completions have their prompt, which a teacher with another tokenizer reads
    overlong: str
    wrapped: bool  # rows follow each other when they are packed (data.packing_strategy), and see those before
    loss_on: str
    max_length: int | None  # tokens of a row
    max_prompt_length: int  # rollout.max_prompt_length: tokens of a prompt
    streaming: bool
    shuffle: bool
    shuffle_buffer: int
    seed: int  # of the run
    batch_size: int  # batch.prompts: examples of a batch
    workers: int
    cache: str
    deduplicate: bool
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the run, by axolotl's and verl's names


class DataSource(NamedTuple):
    """The rows of one of the data's sources, opened, and how they are read, named and weighted."""

    name: str  # in errors; empty for data given in Python
    rows: "sources.Rows | list[Row]"
    form: Format
    format_key: Any  # identifies the format, its options, and the kind
    code: bytes | None  # of a format of the user's own; None where it cannot be found
    weight: float | None  # share of the rows; None: all of them once in an epoch
    folder: Path | None = None  # of its files, where relative paths of images start
    prompt_form: Format | None = None  # for rows that serve as prompts, whatever the algorithm learns from
    path: Any = None  # of its rows, as it is set
    numbers: Sequence[int] | None = None  # of the rows in the data, where some are left out

    def location(self, index: int) -> str:
        """The source and the number, in the data, of one of the rows: the words that errors begin with."""
        return f"{self.name} row {index if self.numbers is None else self.numbers[index]}".strip()


def open_sources(
    spec: DataSpec,
    tokenizer: Any,
    dataset: Any = None,
    held_out: bool = False,
    named: Sequence[Mapping[str, Any]] | None = None,
    seen: set[bytes] | None = None,
) -> list[DataSource]:
    """The sources that are trained on or, with `held_out`, evaluated on; `dataset` or `named` take their place.

    To evaluate on the data that is trained on, without saying on which split, sources without a split `test` are left
    out, which may leave none; of other data without a split `test` the only one is taken. With data.deduplicate no row
    is there twice, and none whose digest was `seen` before, which those of these rows join.

    Raises ConfigError for a source, format or option that is wrong.
    """
    if dataset is not None:
        entries: list[dict[str, Any]] = [{"dataset": dataset}]
    elif named is not None:
        entries = [source_options(source) for source in named]
    elif spec.sources and not (held_out and spec.eval_path):
        entries = [source_options(source) for source in spec.sources]
    else:
        path = spec.eval_path or spec.path if held_out else spec.path
        entries = [{"path": path, "name": spec.name if path == spec.path else None}]  # data.name is that of data.path
    opened, unasked = [], held_out and named is None and spec.eval_path is None and spec.eval_split is None
    seen = set() if seen is None else seen
    # A file, say, has one split, whatever it is for; that of the data that is trained on is no evaluation.
    apart = held_out and dataset is None and (named is not None or spec.eval_path is not None)
    for entry in entries:
        any_split = apart and entry.get("path") != spec.path
        try:
            opened.append(_open(entry, spec, held_out, any_split, tokenizer, seen))
        except SplitError:
            if not unasked or entry.get("eval_split"):
                raise
    return opened


def source_options(source: Any) -> dict[str, Any]:
    """One entry of `data.sources` as a dictionary; raises ConfigError when it names no data or a wrong weight.

    A text is a path, `path(split='train', weight=2)` for more. A dictionary may have the keys of axolotl's `datasets`.
    """
    if isinstance(source, str):
        path, options = split_options(source)
        source = {"path": path, **options}
    options = dict(source)
    if not options.get("path") and not options.get("data_files"):
        raise ConfigError(f"data.sources has {source!r}, which names no data; give it a path or data_files")
    weight = options.get("weight")
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool) and 0 < weight < math.inf
    if weight is not None and not is_number:
        raise ConfigError(f"data.sources: the weight of {options.get('path')!r} is {weight!r}; it is a number above 0")
    for key in COLUMN_KEYS:
        if key in options and not (isinstance(options[key], str) and options[key]):
            raise ConfigError(
                f"data.sources: {key} of {options.get('path')!r} is {options[key]!r}; it is the name of a column"
            )
    return options


def evaluated_on(
    settings: Mapping[str, Any], named: Sequence[Mapping[str, Any]] | None = None
) -> tuple[list[str], str]:
    """The paths of the data that is evaluated on, by the settings of a run by full keys, and its splits: of the sources
    `named`, of a set, or without them where no `eval.sets` are.

    A split that is not asked for is left out where neither the data that is trained on nor the name of the source says
    which one was there to take.
    """
    path, eval_path = settings["data.path"], settings.get("data.eval_path")
    entries: list[Mapping[str, Any]] = [{"path": eval_path or path}]
    if named is not None:
        entries = [*named]
    elif settings.get("data.sources") and not eval_path:
        entries = [source_options(source) for source in settings["data.sources"]]
    shared = bool(settings.get("eval.fraction"))
    paths: list[str] = []
    splits: list[str] = []
    for entry in entries:
        files = entry.get("data_files") or entry["path"]
        any_split = (named is not None or eval_path is not None) and entry.get("path") != path
        asked, split = _splits(entry, settings["data.split"], settings["data.eval_split"], True, shared)
        if asked is None and not shared:
            known = sources.splits_of(files) or (() if any_split else (split,))
            if split not in known and not any_split:  # it is left out
                continue
            split = split if split in known else next(iter(known), "")
        paths += [files] if isinstance(files, str) else files
        splits += [split] if split else []
    return paths, ", ".join(dict.fromkeys(splits))


def _splits(
    entry: Mapping[str, Any], split: str, eval_split: str | None, held_out: bool, shared: bool
) -> tuple[str | None, str]:
    """The split of a source to evaluate on that is asked for, None where none is, and the one that is read.

    `split` and `eval_split` are those of all sources; `shared` rows are held out of those that are trained on.
    """
    asked = (entry.get("eval_split") or eval_split) if held_out and not shared else None
    return asked, asked or ("test" if held_out and not shared else entry.get("split") or split)


def _open(
    entry: Mapping[str, Any],
    spec: DataSpec,
    held_out: bool,
    any_split: bool,
    tokenizer: Any,
    seen: set[bytes],
) -> DataSource:
    """One source; with `any_split` its only split where none is asked for and it has no `test`."""
    path: Any = entry["dataset"] if "dataset" in entry else entry.get("data_files") or entry["path"]
    name = "" if "dataset" in entry else path if isinstance(path, str) else ", ".join(path)
    form, format_key, code = _format(entry, spec, name, tokenizer)
    rows, split = _rows(entry, path, spec, held_out, any_split, tokenizer)
    if is_stream(rows) and not held_out:
        if not spec.streaming:
            raise ConfigError(f"{name or 'the data'} gives a stream (IterableDataset): set data.streaming to true")
        if (buffer := shuffle_buffer(rows)) > 1:
            raise ConfigError(
                f"{name or 'the data'} is a stream that shuffles in a buffer of {buffer} rows, which no checkpoint "
                "holds, so that a resumed run would lose rows: leave this to data.shuffle_buffer. "
                "shuffle(buffer_size=1) shuffles the files alone"
            )
    numbers: Sequence[int] | None
    if "dataset" in entry and not is_splits(path):
        numbers = numbers_in_rows(rows, split)
        rows = rows if numbers is None else _selected(rows, numbers)
    else:
        numbers = numbers_in_split(rows, split)
    if spec.deduplicate and not is_stream(rows):
        kept = _distinct(rows, seen, name or "the data")
        rows = rows if len(kept) == len(rows) else _selected(rows, kept)
        numbers = kept if numbers is None else [numbers[index] for index in kept]
    if spec.eval_fraction:  # the rows are shared between training and evaluation
        if is_stream(rows):
            raise ConfigError(
                f"eval.fraction is {spec.eval_fraction}, but rows that are streamed are not counted: set it to 0"
            )
        if len(rows) < 2:
            raise ConfigError(f"eval.fraction is {spec.eval_fraction}, but {name or 'the data'} has only one row")
        count = min(max(round(spec.eval_fraction * len(rows)), 1), len(rows) - 1)
        order = np.random.default_rng(spec.seed).permutation(len(rows))
        chosen = sorted(order[:count].tolist() if held_out else order[count:].tolist())
        rows, numbers = _selected(rows, chosen), chosen if numbers is None else [numbers[index] for index in chosen]
    renamed = {column: key for column, key in _column_names(entry, spec).items() if key != column}
    prompt_form = _adapted(as_prompt(form, spec.kind), renamed, spec.system_prompt, "prompts")
    form = _adapted(form, renamed, spec.system_prompt, spec.kind)
    folder = folder_of(path)
    return DataSource(name, rows, form, format_key, code, entry.get("weight"), folder, prompt_form, path, numbers)


def _format(entry: Mapping[str, Any], spec: DataSpec, name: str, tokenizer: Any) -> tuple[Format, Any, bytes | None]:
    """The format of a source, what identifies it, and the code of one of the user's own.

    Raises ConfigError for an unknown format, and for a key of the source that it does not take.
    """
    format_spec = entry.get("format") or entry.get("type") or spec.format
    options = {key: value for key, value in entry.items() if key not in (*SOURCE_KEYS, "dataset")}
    try:
        form = find(format_spec, spec.kind, tokenizer, options, spec.settings)
    except ConfigError as error:
        if options and "has no option" in str(error):
            near = closest(next(iter(options)), SOURCE_KEYS)
            raise ConfigError(
                f"data.sources, {name}: {error}. A source has the keys {', '.join(SOURCE_KEYS)}, of which the closest "
                f"is {near}; others are options of its format"
            ) from error
        raise ConfigError(f"data.format: {error}") from error
    # A fixed-text format whose marks are no tokens of the tokenizer is most likely another model's.
    words = format_spec.partition("(")[0].split(".") if isinstance(format_spec, str) else ()
    for family in END_MARKS.keys() & set(words):
        if len(tokenizer(END_MARKS[family], add_special_tokens=False)["input_ids"]) > 1:
            log.warning(
                "the format %s writes %s, which is no single token of this tokenizer: another family of formats, or "
                "chat_template, may be the model's",
                format_spec,
                END_MARKS[family],
            )
    code = code_of(format_spec, spec.kind)
    written = format_spec if isinstance(format_spec, str | Mapping) else repr(format_spec)
    settings = spec.settings if code else {}
    return form, (written, options, spec.kind, _column_names(entry, spec), spec.system_prompt, settings), code


def _column_names(entry: Mapping[str, Any], spec: DataSpec) -> dict[str, str]:
    """The columns that formats know, by name, with the names that the rows of a source have for them."""
    return {key.removesuffix("_key"): entry.get(key, getattr(spec, key)) for key in COLUMN_KEYS}


def _rows(
    entry: Mapping[str, Any], path: Any, spec: DataSpec, held_out: bool, any_split: bool, tokenizer: Any
) -> tuple["sources.Rows | list[Row]", str]:
    """All rows of a source's split, and the split that was asked for."""
    asked, split = _splits(entry, spec.split, spec.eval_split, held_out, spec.eval_fraction > 0)
    # axolotl also writes the type of the files in the place of the path.
    path_type = entry.get("path") if entry.get("data_files") and entry.get("path") in READERS.values() else None
    arguments = {"tokenizer": tokenizer, "config": FactoryOptions(spec.settings)}

    def load(split: str) -> sources.Rows:
        file_type = entry.get("ds_type") or path_type
        return sources.load(path, split, entry.get("name"), spec.streaming, file_type, arguments)

    try:
        return load(split), split
    except SplitError as error:
        if asked or not any_split or len(error.splits) != 1:
            raise
        return load(error.splits[0]), split


def _selected(rows: Any, chosen: Sequence[int]) -> Any:
    return [rows[index] for index in chosen] if isinstance(rows, list) else rows.select(chosen)


def _distinct(rows: Any, seen: set[bytes], name: str) -> list[int]:
    """The numbers of the rows whose digests (SHA-256) are not `seen`, which they join: of equal rows the first.

    Raises ConfigError where none is left.
    """
    kept = []
    for index, row in enumerate(rows):
        digest = digest_of(row)
        if digest not in seen:
            seen.add(digest)
            kept.append(index)
    if not kept and len(rows):
        raise ConfigError(
            f"data.deduplicate is true, and {name} has no row that is not in the data before it, which is trained on "
            "where this is evaluated on: leave the source out, or set it to false"
        )
    if len(kept) < len(rows):
        log.warning("%s: left out %d of %d rows: an earlier one is equal", name, len(rows) - len(kept), len(rows))
    return kept


def digest_of(row: Row) -> bytes:
    """SHA-256 of a row, the same for equal rows: arrays by their numbers, images by their pixels."""

    def written(value: Any) -> Any:
        if hasattr(value, "tolist"):
            return value.tolist()
        return [value.mode, value.size, value.tobytes().hex()] if hasattr(value, "mode") else repr(value)

    def keyed(value: Any) -> Any:  # dictionaries by texts, which are in order whatever their keys are
        if isinstance(value, Mapping):
            return {f"{type(key).__name__} {key!r}": keyed(x) for key, x in value.items()}
        return [keyed(x) for x in value] if isinstance(value, list | tuple) else value

    try:
        text = json.dumps(row, sort_keys=True, default=written)
    except TypeError:  # keys of several types, or of those that JSON does not have
        text = json.dumps(keyed(row), sort_keys=True, default=written)
    return hashlib.sha256(text.encode()).digest()


def _adapted(form: Format, names: Mapping[str, str], system_prompt: str | None, kind: str) -> Format:
    """The format, with the row's columns `names` under the names that formats know, and a system message put first.

    It comes before what data of that kind begins with, whatever else a row holds.
    """

    def adapted(row: Mapping[str, Any]) -> Example:
        made = form({**row, **{column: row[key] for column, key in names.items() if key in row}})
        made |= {column: made[key] for column, key in names.items() if key in made and key not in row}
        for column, key in names.items():
            if key not in row and key not in made:
                raise ConfigError(
                    f"the row has no column {key!r}, which {column}_key (of data or of this source) names; it has "
                    f"{', '.join(row)}"
                )
        if system_prompt is None:
            return made
        openers = [name for name in OPENERS[kind] if made.get(name) is not None][:1]
        if "chosen" in OPENERS[kind] and all(made.get(name) is not None for name in ("chosen", "rejected")):
            # Without a prompt that is read, the answers of a pair are whole conversations, which may begin with it.
            answers = [name for name in ANSWERS.get(kind, ANSWERS["pairs"]) if made.get(name) is not None]
            begun = ["prompt"] if is_conversational(made.get("prompt")) else []
            openers = ["prompt"] if has_prompt(made) else [*answers, *begun]
        for name in openers:
            if not is_conversational(made[name]):
                raise ConfigError(
                    f"data.system_prompt is for conversations, but the row begins with {made[name]!r:.80} (its "
                    f"{name}), which is none: give messages, or leave it out"
                )
            if made[name][0]["role"] not in SYSTEM_ROLES:
                made[name] = [{"role": "system", "content": system_prompt}, *made[name]]
        return made

    return adapted if names or system_prompt is not None else form
