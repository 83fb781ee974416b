"""From opened sources to token rows: `examples` gives a source's rows in the columns that training reads; `tokenized`
makes token rows of them, in memory (and keeps them on disk), or `stream` makes them as they come.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from jaxrl_llm.config.resolve import ConfigError, failing_as, naming
from jaxrl_llm.data import Row, cache
from jaxrl_llm.data.formats.lookup import Example, fitting
from jaxrl_llm.data.image_rows import ImageReader
from jaxrl_llm.data.length_limit import LimitedTokenizer
from jaxrl_llm.data.opening import DataSource, DataSpec
from jaxrl_llm.data.pairs import ANSWERS, split_pair
from jaxrl_llm.data.pipeline import Stream, StreamSource
from jaxrl_llm.data.splits import is_stream, is_table
from jaxrl_llm.data.templates import without_absent_keys
from jaxrl_llm.data.tokenize import PIXELS, TOKENS, RowTokenizer

log = logging.getLogger(__name__)

CHUNK = 256  # examples that a thread tokenises before the next are read
MOST_WORKERS = 16  # threads, unless data.workers says otherwise


class Tokenized(NamedTuple):
    """Token rows of all sources, in order, and their mixture: (rows, weight) of each source, or None."""

    rows: list[Row]
    shares: list[tuple[int, float]] | None
    reports: list[LimitedTokenizer]


def examples(source: DataSource, kind: str) -> Iterator[tuple[str, Example]]:
    """(`DataSource.location`, example) of each example; a pair is two where labelled completions are wanted.

    Raises ConfigError, naming the source and the row, for one that cannot be read.
    """
    rows: Iterator[Any] = iter(source.rows)
    index = 0
    while True:
        try:
            row = next(rows, None)
        except Exception as error:
            location = source.location(index)
            raise ConfigError(f"{location} cannot be read: {type(error).__name__}: {error}") from error
        if row is None:
            return
        location = source.location(index)
        with naming(location):
            made = formatted(source, row, kind)
        yield from ((location, example) for example in made)
        index += 1


def formatted(source: DataSource, row: Mapping[str, Any], kind: str) -> list[Example]:
    """The examples of one row of a source; raises ConfigError when a user's format fails."""
    example = _example(source, row)
    if kind != "labels" or example.get("label") is not None or example.get("chosen") is None:
        return [example]
    prompt, *completions = split_pair(example)
    return [{**example, "prompt": prompt, "completion": c, "label": i == 0} for i, c in enumerate(completions)]


def _example(source: DataSource, row: Mapping[str, Any]) -> Example:
    """The example that the format of a source makes of a row."""
    from_arrow = not isinstance(source.rows, list)
    with failing_as("the format"):  # some render the row's messages, others make messages of its columns
        example = source.form(without_absent_keys(row) if from_arrow else row)
    return without_absent_keys(example) if from_arrow else example


def limited_tokenizer(spec: DataSpec, kind: str, tokenizer: Any, folder: Path | None = None) -> LimitedTokenizer:
    """The tokenisation of examples of a kind under the limits and options of `spec`; images lie in `folder`."""
    tokenize = RowTokenizer(
        kind,
        tokenizer,
        loss_on=spec.loss_on,
        template_kwargs=spec.template_kwargs,
        images=ImageReader(tokenizer, spec.image_key, spec.image_limits, folder),
        step_separator=spec.step_separator,
        keep_prompt=spec.keep_prompt and kind == "completions",
    )
    limit = spec.max_prompt_length if kind == "prompts" else spec.max_length
    return LimitedTokenizer(tokenize, limit, spec.overlong, wrapped=spec.wrapped)


def token_rows(source: DataSource, kind: str, tokenize: LimitedTokenizer, workers: int = 1) -> Iterator[Row | None]:
    """The token row of each example of the source, None where it is dropped; raises ConfigError as `examples`.

    `workers` threads tokenise, which the tokenizers of Hugging Face do at the same time; the order stays.
    """

    def convert(located: tuple[str, Example]) -> tuple[str, Row | None]:
        location, example = located
        try:
            return location, tokenize.token_row(example)
        except ConfigError as error:
            first = location == source.location(0)
            names = fitting(example, kind, tokenizer, tokenize.token_row) if first else []
            hint = f"; formats that read this row (data.format): {', '.join(names)}" if names else ""
            raise ConfigError(f"{location}: {error}{hint}") from error

    pending, tokenizer = examples(source, kind), tokenize.row_tokenizer.tokenizer
    # The first call sets a tokenizer's padding, which must not happen while another thread encodes.
    tokenizer("a")
    with ThreadPoolExecutor(workers, thread_name_prefix="tokenise") as pool:
        while chunk := list(islice(pending, workers * CHUNK)):
            made = map(convert, chunk)
            if workers > 1:  # a task a thread: one a row costs more than to tokenise a short row
                parts = [chunk[start : start + CHUNK] for start in range(0, len(chunk), CHUNK)]
                made = chain.from_iterable(pool.map(lambda part: [convert(located) for located in part], parts))
            for location, row in made:
                with naming(location):
                    limited = tokenize.apply_limit(row)
                yield limited


def tokenized(spec: DataSpec, opened: Sequence[DataSource], kind: str, tokenizer: Any) -> Tokenized:
    """The token rows of all sources; raises ConfigError for rows that cannot be read, or when a source has none left.

    Prompts have the columns of all of them, None where their own source lacks one. Large sources are tokenised once and
    kept in `spec.cache`.
    """
    rows: list[Row] = []
    counts, reports = [], []
    for source in opened:
        tokenize = limited_tokenizer(spec, kind, tokenizer, source.folder)
        generated = not source.name or source.name.startswith("task:")
        # What a format of the user's own imports, or reads, may change while its file does not.
        folder = "none" if (generated or source.code) and spec.cache == "auto" else spec.cache
        file = cache.file_of(folder, source.rows, source.format_key, source.code, tokenize)
        made = None
        if file is not None:
            made = cache.load(file, tokenize, (example for _, example in examples(source, kind)))
        if made is None:
            total = None if is_stream(source.rows) else len(source.rows)
            small = total is not None and total <= CHUNK and not spec.workers
            workers = 1 if small else spec.workers or min(os.cpu_count() or 1, MOST_WORKERS)
            progress = tqdm(
                token_rows(source, kind, tokenize, workers),
                f"tokenising {source.name}",
                total,
                delay=3,
                disable=None,
                leave=False,
            )
            kept = [(index, row) for index, row in enumerate(progress) if row is not None]
            made = [row for _, row in kept]
            if file is not None and not any(PIXELS in row for row in made):  # the file would hold no images
                try:
                    cache.save(file, tokenize, kept)
                except ConfigError as error:
                    if spec.cache != "auto":  # which nobody asked for
                        raise
                    log.warning("%s", error)
        made = tokenize.split(made)
        with naming(source.name or "the data"):
            tokenize.report(len(made))
        rows += made
        counts.append(len(made))
        reports.append(tokenize)
    # Rewards are given the columns of a batch, which are the same whichever sources its rows come from.
    columns = dict.fromkeys(name for row in rows for name in row if name != PIXELS) if kind == "prompts" else {}
    rows = [row if columns.keys() <= row.keys() else {**columns, **row} for row in rows]
    if all(source.weight is None for source in opened):
        return Tokenized(rows, None, reports)
    shares = [(count, float(source.weight or 1.0)) for source, count in zip(opened, counts, strict=True)]
    return Tokenized(rows, shares, reports)


def stream(
    spec: DataSpec,
    opened: Sequence[DataSource],
    kind: str,
    tokenizer: Any,
    wrap: Callable[[Row], Any] = lambda row: row,
    process_index: int = 0,
    process_count: int = 1,
    pack: Callable[[list[Any]], list[Any]] | None = None,
) -> Stream:
    """The pipeline that reads the sources as it goes; `wrap` makes of each token row what a batch holds.

    `pack` makes of those of a block rows of at most `max_length` tokens, which batches then hold.

    As in memory, sources without any weight follow each other, and prompts have the columns of the first rows of all.
    What is dropped and truncated is logged each time that twice as many rows have been read.
    """
    names = (name for source in opened for name in columns(source) if name != PIXELS)
    shared = dict.fromkeys(names) if kind == "prompts" else {}

    def converter(source: DataSource) -> Callable[[Mapping[str, Any]], list[Any]]:
        tokenize = limited_tokenizer(spec, kind, tokenizer, source.folder)
        due = spec.shuffle_buffer

        def convert(row: Mapping[str, Any]) -> list[Any]:
            nonlocal due
            made = (tokenize(example) for example in formatted(source, row, kind))
            rows = tokenize.split(row for row in made if row is not None)
            if tokenize.read >= due:
                tokenize.report(tokenize.read)
                due = 2 * tokenize.read
            return [wrap({**shared, **row}) for row in rows]

        return convert

    follow = len(opened) > 1 and all(source.weight is None for source in opened)
    streamed = [
        StreamSource(source.name, source.rows, converter(source), None if follow else source.weight or 1.0)
        for source in opened
        if is_stream(source.rows)
    ]
    return Stream(
        streamed, spec.batch_size, spec.seed, spec.shuffle_buffer, spec.shuffle, process_index, process_count, pack,
        None if pack is None else spec.max_length,
    )  # fmt: skip


def first_rows(opened: Sequence[DataSource], count: int) -> list[DataSource]:
    """The sources with their first rows only: `count` in all, from each alike."""
    limited, left = [], count
    for index, source in enumerate(opened):
        rows = source.rows
        take = min(left if is_stream(rows) else len(rows), -(-left // (len(opened) - index)))
        left -= take
        if is_stream(rows):
            limited.append(source._replace(rows=rows.take(take)))
        elif take:
            limited.append(source._replace(rows=rows.select(range(take)) if is_table(rows) else rows[:take]))
    return limited


def as_prompts(opened: Sequence[DataSource]) -> list[DataSource]:
    """The sources with the form in which their rows serve as prompts, whatever the algorithm learns from them."""
    return [source._replace(form=source.prompt_form or source.form) for source in opened]


def columns(source: DataSource) -> dict[str, Any]:
    """The columns of the source's first example, with their values; raises ConfigError when it cannot be read."""
    row: Any = next(iter(source.rows), None)
    if row is None:
        raise ConfigError(f"{source.name or 'the data'} has no rows")
    with naming(source.location(0)):
        return _example(source, row)


def is_learnable(kind: str, opened: Sequence[DataSource]) -> bool:
    """True when the first example has what an algorithm learns from, which prompts alone do not."""
    present = {name for name, value in columns(opened[0]).items() if value is not None}
    if kind == "completions":
        return bool({"messages", "text", TOKENS} & present) or {"prompt", "completion"} <= present
    if kind == "labels" and {"prompt", "completion", "label"} <= present:
        return True
    if kind == "steps":
        return {"prompt", "completions", "labels"} <= present
    return present.issuperset(ANSWERS.get(kind, ANSWERS["pairs"]))
