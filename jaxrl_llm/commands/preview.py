"""Show the data of a run as the model will see it; only the model's tokenizer is loaded.

    python -m jaxrl_llm preview --config=configs/dpo.py --rows=3

Prints the first examples, with the tokens in the loss in colour (in ⟦brackets⟧ where the output is no terminal), then
the lengths of the rows, and the numbers over the limit and dropped; for the training rows and for the evaluation rows.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence, Sized
from itertools import groupby, islice
from typing import Any

import numpy as np

from jaxrl_llm.config.flags import load_flags
from jaxrl_llm.config.setting import Setting
from jaxrl_llm.config.wording import amount
from jaxrl_llm.data import loading, opening
from jaxrl_llm.data.length_limit import LimitedTokenizer
from jaxrl_llm.data.opening import DataSource, DataSpec
from jaxrl_llm.data.tokenize import COLUMNS, STEP_LABELS
from jaxrl_llm.training.setup.data import tokenizer_of
from jaxrl_llm.training.setup.evaluation import eval_data, eval_measure
from jaxrl_llm.training.setup.specs import data_spec

FLAGS = (
    Setting("rows", 3, "Examples to print.", int, minimum=0),
    Setting("measure", 10_000, "Examples to measure, of each source.", int, minimum=1),
    Setting("held_out", True, "Show the evaluation rows too.", bool),
)
JOINED = 200  # rows that are tokenised a second time, prompt and completion as one text
COLOURS = ("\x1b[2m", "\x1b[1;32m", "\x1b[0m")  # read only, learned, end
MARKS = ("", "⟦", "⟧")  # where there are no colours


def preview(
    config,
    rows: int = 3,
    measure: int = 10_000,
    held_out: bool = True,
    colour: bool = False,
    train_dataset: Any = None,
) -> str:
    """The report on the data of `config`; raises ConfigError for data that training could not read.

    A `train_dataset`, as `jaxrl_llm.train` takes it, stands in place of all of it.
    """
    tokenizer = tokenizer_of(config)
    spec = data_spec(config)
    sources = opening.open_sources(spec, tokenizer, train_dataset)
    lines = report(spec, "trained on", spec.kind, sources, tokenizer, rows, measure, colour)
    if held_out and train_dataset is None and config.eval.every >= 0:
        for one, sources in eval_data(config, tokenizer):
            if not sources:
                lines.append("=== nothing is evaluated on: the data has no split 'test', see data.eval_split")
                continue
            use = f"evaluated on{f' as {one.name}' if one.name else ''}"
            # Rows to evaluate on may lack what is learned: then they serve as prompts.
            samples = spec.kind == "prompts" or eval_measure(config, sources) == "samples"
            kind, sources = ("prompts", loading.as_prompts(sources)) if samples else (spec.kind, sources)
            lines += report(spec, use, kind, sources, tokenizer, min(rows, 1), measure, colour)
    return "\n".join(lines) + "\n"


def report(
    spec: DataSpec,
    use: str,
    kind: str,
    sources: Sequence[DataSource],
    tokenizer: Any,
    rows: int,
    measure: int,
    colour: bool,
) -> list[str]:
    """The lines on some sources: the first examples of each, then its statistics."""
    lines: list[str] = []
    for source in sources:
        tokenize = loading.limited_tokenizer(spec, kind, tokenizer, source.folder)
        stops, tokenize.lengths = tokenize.overlong == "error", []
        if stops:  # a preview counts rows at which training would stop
            tokenize.overlong = "filter"
        made = [row for row in islice(loading.token_rows(source, kind, tokenize), measure) if row is not None]
        name = source.name or "the data"
        for index, row in enumerate(made[:rows]):
            lines.append(f"--- {use}: {name}, example {index}")
            for heading, text in sections(kind, row, tokenizer, colour):
                lines += [f"[{heading}]", text]
        lines.append(f"=== {use}: {name}")
        values = statistics(tokenize, made)
        if tokenize.read == measure and isinstance(source.rows, Sized) and len(source.rows) > measure:
            values["rows"] = f"{len(source.rows)}; of the first {tokenize.read}, {len(made)} are used"
        if tokenize.long:
            fate = "training stops at the first" if stops else tokenize.fate
            values[f"over {tokenize.limit} tokens"] += f": {fate} (data.overlong={spec.overlong})"
        joined = boundary_merges(kind, made[:JOINED], tokenizer)
        values["tokenised as one text"] = f"{joined} of the first {len(made[:JOINED])} rows have other tokens"
        if source.weight is not None:
            values["weight"] = f"{source.weight:g}"
        width = max(map(len, values))
        lines += [f"{heading.ljust(width)}  {value}" for heading, value in values.items()]
    return lines


def marked(tokenizer: Any, ids: Sequence[int], mask: Sequence[float], colour: bool) -> str:
    """The text of a token row, special tokens included, with its learned tokens in green, or in ⟦brackets⟧."""
    text = ""
    for learned, tokens in groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1] > 0):
        span = tokenizer.decode([token for token, _ in tokens], skip_special_tokens=False)
        if colour:
            text += f"{COLOURS[learned]}{span}{COLOURS[2]}"
        else:
            text += f"{MARKS[1]}{span}{MARKS[2]}" if learned else span
    return text


def sections(kind: str, row: Mapping[str, Any], tokenizer: Any, colour: bool) -> Iterator[tuple[str, str]]:
    """(heading, text) of each sequence of a token row; for prompts also of the columns that rewards read."""
    if kind == "prompts":
        ids = row["prompt_ids"]
        yield f"prompt, {amount(len(ids), 'token')}", marked(tokenizer, ids, [0] * len(ids), colour)
        for name, value in row.items():
            if name not in ("prompt", "prompt_ids") and value is not None:
                yield name, value if isinstance(value, str) else repr(value)
        return
    for ids_name, mask_name in zip(*COLUMNS[kind], strict=True):
        ids, mask = row[ids_name], row[mask_name]
        name = {"ids": "row"}.get(ids_name, ids_name.removesuffix("_ids"))
        label = {True: ", desirable", False: ", undesirable"}[row["label"]] if "label" in row else ""
        heading = f"{name}{label}, {amount(len(ids), 'token')}, {int(sum(mask))} learned"
        yield heading, marked(tokenizer, ids, mask, colour)


def statistics(tokenize: LimitedTokenizer, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The lengths of the examples that `tokenize` made `rows` of, how many are over the limit, how many were dropped.

    Lengths are in tokens, of the longest row of a pair, before any is truncated; those far over the limit, which are
    not tokenised, are not among them.
    """
    lengths = np.array(tokenize.lengths or [0])
    p50, p95 = np.percentile(lengths, [50, 95])
    values = {
        "rows": f"{tokenize.read}, of which {len(rows)} are used",
        "tokens": f"mean {lengths.mean():.1f}, p50 {p50:.0f}, p95 {p95:.0f}, max {lengths.max()}",
    }
    if tokenize.limit is not None:
        share = tokenize.long / max(tokenize.read, 1)
        values[f"over {tokenize.limit} tokens"] = f"{tokenize.long} ({share:.1%})"
    if tokenize.kind != "prompts":
        masks = [row[name] for row in rows for name in COLUMNS[tokenize.kind][1]]
        total = sum(map(len, masks))
        values["learned tokens"] = f"{sum(map(sum, masks)) / total:.1%}" if total else "none"
        values["dropped, as nothing is learned"] = str(tokenize.unlearnable)
    if tokenize.kind == "labels" and rows:
        values["desirable"] = f"{sum(row['label'] for row in rows) / len(rows):.1%}"
    if tokenize.kind == "steps" and rows:
        right, steps = (sum(sum(row[name]) for row in rows) for name in (STEP_LABELS, "mask"))
        values["right steps"] = f"{right / steps:.1%}"
    return values


def boundary_merges(kind: str, rows: Sequence[Mapping[str, Any]], tokenizer: Any) -> int:
    """The number of rows of which a sequence has other token ids when its text is tokenised in one piece.

    A token would then reach across the boundary of prompt and answer. Sampling never makes such a token, and training
    does not see one; many of these rows say that prompts had better end otherwise (a space less).
    """

    def merges(ids: Sequence[int]) -> bool:
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"]) != list(ids)

    return sum(any(merges(row[name]) for name in COLUMNS[kind][0]) for row in rows)


def main(argv: list[str]) -> None:
    """The command line: see `--help`."""
    config, options = load_flags(argv, __doc__ or "", FLAGS)
    sys.stdout.write(preview(config, colour=sys.stdout.isatty(), **options))
