"""From the configuration's `data` section to token rows: sources are opened, formatted, tokenised and put in order.

1. `open_parts` opens each source and finds its format;
2. `examples` gives a part's rows in the columns that training reads;
3. `tokenized` makes token rows of them, in memory (and remembers them on disk), or `stream` makes them as they come.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import datasets
from tqdm import tqdm

from jaxrl_llm.config import loss_names
from jaxrl_llm.config.resolve import ConfigError, closest, split_options
from jaxrl_llm.config.schema import LABELLED
from jaxrl_llm.data import cache, sources
from jaxrl_llm.data.formats import Example, Format, code_of, find, fitting
from jaxrl_llm.data.prompt_completion import split_pair
from jaxrl_llm.data.sources import READERS
from jaxrl_llm.data.streaming import Stream
from jaxrl_llm.data.tokenize import Row, Tokenizing

log = logging.getLogger(__name__)

MARKS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "zephyr": "</s>"}  # what ends a turn in the formats
CHUNK, MOST_WORKERS = 256, 16  # examples that a thread tokenises before the next are read; threads without a setting
# What a source dictionary says of the source; everything else is an option of its format.
SOURCE_KEYS = ("path", "name", "split", "eval_split", "format", "type", "weight", "ds_type", "data_files")


class Part(NamedTuple):
    """One opened source."""

    name: str  # what errors call it; empty for data given in Python
    rows: sources.Rows
    form: Format
    spec: Any  # what names the format, its options, and what the algorithm learns from
    code: bytes | None  # of a format of the user's own; None where it cannot be found
    weight: float | None  # share of the rows; None: all of them once in an epoch


class Tokens(NamedTuple):
    """Token rows of all parts, in order, and how they are mixed: (rows, weight) of each part, or None."""

    rows: list[Row]
    shares: list[tuple[int, float]] | None
    reports: list[Tokenizing]


def kind_of(config) -> str:
    """What the algorithm learns from: prompts, completions, pairs or labels; see `jaxrl_llm.data.formats`."""
    name = config.algorithm.name
    if name == "preference":
        return "labels" if loss_names(config)[0] in LABELLED else "pairs"
    return {"sft": "completions", "reward_model": "pairs"}.get(name, "prompts")


def open_parts(config, tokenizer, given: Any = None, held_out: bool = False, prompts: bool = False,
               named: Sequence[Mapping[str, Any]] | None = None) -> list[Part]:  # fmt: skip
    """The sources that are trained on or, with `held_out`, evaluated on; `given` takes their place, or those `named`.

    With `prompts` their examples serve as prompts whatever the algorithm learns from. Raises ConfigError for a source,
    format or option that is wrong.
    """
    data, kind = config.data, kind_of(config)
    purpose = "prompts" if prompts else kind
    if given is not None:
        specs: list[dict[str, Any]] = [{"given": given}]
    elif named is not None:
        specs = [source_options(source) for source in named]
    elif data.sources and not (held_out and data.eval_path):
        specs = [source_options(source) for source in data.sources]
    else:
        specs = [{"path": data.eval_path or data.path if held_out else data.path, "name": data.name}]
    split = data.eval_split if held_out else data.split
    return [_open(spec, data.format, split, held_out, data.streaming, kind, purpose, tokenizer) for spec in specs]


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
    if weight is not None and (isinstance(weight, bool) or not isinstance(weight, int | float) or weight <= 0):
        raise ConfigError(f"data.sources: the weight of {options.get('path')!r} is {weight!r}; it is a number above 0")
    return options


def _open(
    spec: Mapping[str, Any], default: str, split: str, held_out: bool, streaming: bool, kind: str, purpose: str,
    tokenizer: Any,
) -> Part:  # fmt: skip
    """The part of one source."""
    path: Any = spec["given"] if "given" in spec else spec.get("data_files") or spec["path"]
    split = (spec.get("eval_split") or split) if held_out else (spec.get("split") or split)
    format_spec = spec.get("format") or spec.get("type") or default
    options = {key: value for key, value in spec.items() if key not in (*SOURCE_KEYS, "given")}
    name = "" if "given" in spec else path if isinstance(path, str) else ", ".join(path)
    try:
        form = find(format_spec, kind, tokenizer, options, purpose)
    except ConfigError as error:
        if options and "has no option" in str(error):
            near = closest(next(iter(options)), SOURCE_KEYS)
            raise ConfigError(
                f"data.sources, {name}: {error}. A source has the keys {', '.join(SOURCE_KEYS)}, of which the closest "
                f"is {near}; others are options of its format"
            ) from error
        raise ConfigError(f"data.format: {error}") from error
    _warn_of_marks(format_spec, tokenizer)
    # axolotl also writes the kind of the files in the place of the path.
    named_kind = spec.get("path") if spec.get("data_files") and spec.get("path") in READERS.values() else None
    rows = sources.load(path, split, spec.get("name"), streaming, spec.get("ds_type") or named_kind)
    named = (format_spec if isinstance(format_spec, str | Mapping) else repr(format_spec), options, kind)
    return Part(name, rows, form, named, code_of(format_spec, kind), spec.get("weight"))


def _warn_of_marks(format_spec: Any, tokenizer: Any) -> None:
    """Warns when the marks of a format with fixed texts are no tokens of the tokenizer: it is another model's."""
    families = set(format_spec.partition("(")[0].split(".")) & set(MARKS) if isinstance(format_spec, str) else ()
    for family in families:
        mark = MARKS[family]
        if len(tokenizer(mark, add_special_tokens=False)["input_ids"]) > 1:
            log.warning(
                "the format %s writes %s, which is no single token of this tokenizer: another family of formats, or "
                "chat_template, may be the model's",
                format_spec, mark,
            )  # fmt: skip


def examples(part: Part, kind: str) -> Iterator[Example]:
    """The examples of the part's rows; raises ConfigError, naming the source and the row, for one it cannot read."""
    return (example for _, example in _numbered(part, kind))


def _numbered(part: Part, kind: str) -> Iterator[tuple[str, Example]]:
    """(source and row, example) of each example; a pair is two where labelled completions are wanted."""
    rows, index = iter(part.rows), 0
    while True:
        where = f"{part.name} row {index}".strip()
        try:
            row = next(rows, None)
        except Exception as error:
            raise ConfigError(f"{where} cannot be read: {type(error).__name__}: {error}") from error
        if row is None:
            return
        with _at(where):
            made = formatted(part.form, row, kind)
        yield from ((where, example) for example in made)
        index += 1


def token_rows(part: Part, kind: str, how: Tokenizing, workers: int = 1) -> Iterator[Row | None]:
    """The token row of each example of the part, None where it is dropped; raises ConfigError as `examples`.

    `workers` threads tokenise, which the tokenizers of Hugging Face do at the same time; the order stays.
    """

    def parts(numbered: tuple[str, Example]) -> tuple[str, Row]:
        where, example = numbered
        try:
            return where, how.parts(example)
        except ConfigError as error:
            fits = fitting(example, kind, how.tokenizer) if where.endswith("row 0") else []
            hint = f"; formats that read this row (data.format): {', '.join(fits)}" if fits else ""
            raise ConfigError(f"{where}: {error}{hint}") from error

    numbered = _numbered(part, kind)
    how.tokenizer("a")  # the first call sets a tokenizer's padding, which must not happen while another thread encodes
    with ThreadPoolExecutor(workers, thread_name_prefix="tokenise") as pool:
        while chunk := list(islice(numbered, workers * CHUNK)):
            for where, row in pool.map(parts, chunk) if workers > 1 else map(parts, chunk):
                with _at(where):
                    fitted = how.fit(row)
                yield fitted


@contextmanager
def _at(where: str) -> Iterator[None]:
    """Errors inside begin with where they happened."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def formatted(form: Format, row: Mapping[str, Any], kind: str) -> list[Example]:
    """The examples of one row; raises ConfigError when a user's format fails."""
    try:
        example = form(row)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"the format failed: {type(error).__name__}: {error}") from error
    if kind != "labels" or example.get("label") is not None or example.get("chosen") is None:
        return [example]
    prompt, *completions = split_pair(example)
    return [{**example, "prompt": prompt, "completion": c, "label": i == 0} for i, c in enumerate(completions)]


def tokenizing(config, kind: str, tokenizer) -> Tokenizing:
    """How the configuration tokenises examples of a kind."""
    data = config.data
    return Tokenizing(
        kind,
        tokenizer,
        limit=config.rollout.max_prompt_length if kind == "prompts" else data.max_length,
        overlong=data.overlong,
        loss_on=data.loss_on,
        prompt_key=data.prompt_key,
        template_kwargs=split_options(f"_({data.chat_template_kwargs})")[1],
    )


def tokenized(config, parts: Sequence[Part], kind: str, tokenizer) -> Tokens:
    """The token rows of all parts; raises ConfigError for rows that cannot be read, or when a part has none left.

    Large sources are tokenised once and kept in `data.cache`.
    """
    found, reports = [], []
    for part in parts:
        how = tokenizing(config, kind, tokenizer)
        generated = not part.name or part.name.startswith("task:")
        setting = "none" if generated and config.data.cache == "auto" else config.data.cache
        place = cache.place(setting, part.rows, part.spec, part.code, how)
        rows = None if place is None else cache.load(place, how, examples(part, kind))
        if rows is None:
            total = len(part.rows) if isinstance(part.rows, datasets.Dataset) else None
            workers = config.data.workers or min(os.cpu_count() or 1, MOST_WORKERS)
            made = token_rows(part, kind, how, workers if total is None or total > CHUNK or config.data.workers else 1)
            made = tqdm(made, f"tokenising {part.name}", total, delay=3, disable=None, leave=False)
            kept = [(index, row) for index, row in enumerate(made) if row is not None]
            rows = [row for _, row in kept]
            if place is not None:
                cache.save(place, how, kept)
        how.report(len(rows))
        found.append(rows)
        reports.append(how)
    return Tokens([row for rows in found for row in rows], shares(parts, [len(rows) for rows in found]), reports)


def shares(parts: Sequence[Part], counts: Sequence[int]) -> list[tuple[int, float]] | None:
    """(rows, weight) of each part, 1 where none is given; None when no part has a weight."""
    if all(part.weight is None for part in parts):
        return None
    return [(count, float(part.weight or 1.0)) for part, count in zip(parts, counts, strict=True)]


def stream(
    config,
    parts: Sequence[Part],
    kind: str,
    tokenizer,
    wrap: Callable[[Row], Any] = lambda row: row,
    process_index: int = 0,
    process_count: int = 1,
) -> Stream:
    """The pipeline that reads the parts as it goes; `wrap` makes of each token row what a batch holds."""

    def convert(part: Part) -> Callable[[Mapping[str, Any]], list[Any]]:
        how = tokenizing(config, kind, tokenizer)
        how.measure = False

        def make(row: Mapping[str, Any]) -> list[Any]:
            rows = (how(example) for example in formatted(part.form, row, kind))
            return [wrap(row) for row in rows if row is not None]

        return make

    c = config.data
    return Stream(
        [part.rows for part in parts if isinstance(part.rows, datasets.IterableDataset)],
        [convert(part) for part in parts],
        [part.weight or 1.0 for part in parts],
        config.batch.prompts,
        config.seed,
        c.shuffle_buffer,
        c.shuffle,
        process_index,
        process_count,
        [part.name for part in parts],
    )


def first_rows(parts: Sequence[Part], count: int) -> list[Part]:
    """The parts cut to `count` rows in all, taken from each alike."""
    cut, left = [], count
    for index, part in enumerate(parts):
        size = len(part.rows) if isinstance(part.rows, datasets.Dataset) else left
        take = min(size, -(-left // (len(parts) - index)))
        left -= take
        if isinstance(part.rows, datasets.Dataset):
            cut.append(part._replace(rows=part.rows.select(range(take))))
        else:
            cut.append(part._replace(rows=part.rows.take(take)))
    return [part for part in cut if not isinstance(part.rows, datasets.Dataset) or len(part.rows)]


def columns(part: Part) -> dict[str, Any]:
    """The columns of the part's first example, with their values; raises ConfigError when it cannot be read."""
    row = next(iter(part.rows), None)
    if row is None:
        raise ConfigError(f"{part.name or 'the data'} has no rows")
    with _at(f"{part.name} row 0".strip()):
        return part.form(row)


def is_learnable(config, parts: Sequence[Part]) -> bool:
    """True when the first example has what the algorithm learns from, which prompts alone do not."""
    kind, found = kind_of(config), {name for name, value in columns(parts[0]).items() if value is not None}
    if kind == "completions":
        return bool({"messages", "text"} & found) or {"prompt", "completion"} <= found
    return {"chosen", "rejected"} <= found or (kind == "labels" and {"prompt", "completion", "label"} <= found)
