"""Token rows as text for people: learned tokens are marked, and the lengths summed up."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from jaxrl_llm.data.tokenize import COLUMNS, RowTokenizer

COLOURS = ("\x1b[2m", "\x1b[1;32m", "\x1b[0m")  # read only, learned, end
MARKS = ("", "⟦", "⟧")  # where there are no colours


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
        yield f"prompt, {len(ids)} tokens", marked(tokenizer, ids, [0] * len(ids), colour)
        for name, value in row.items():
            if name not in ("prompt", "prompt_ids") and value is not None:
                yield name, value if isinstance(value, str) else repr(value)
        return
    for ids_name, mask_name in zip(*COLUMNS[kind], strict=True):
        ids, mask = row[ids_name], row[mask_name]
        name = {"ids": "row"}.get(ids_name, ids_name.removesuffix("_ids"))
        label = {True: ", desirable", False: ", undesirable"}[row["label"]] if "label" in row else ""
        heading = f"{name}{label}, {len(ids)} tokens, {int(sum(mask))} learned"
        yield heading, marked(tokenizer, ids, mask, colour)


def statistics(tokenize: RowTokenizer, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The lengths of the examples that `tokenize` made `rows` of, how many are over the limit, how many were dropped.

    Lengths are in tokens, of the longer row of a pair, before any is truncated.
    """
    lengths = np.array(tokenize.lengths or [0])
    p50, p95 = np.percentile(lengths, [50, 95])
    values = {
        "rows": f"{tokenize.read}, of which {len(rows)} are used",
        "tokens": f"mean {lengths.mean():.1f}, p50 {p50:.0f}, p95 {p95:.0f}, max {lengths.max()}",
    }
    if tokenize.limit is not None:
        over = int((lengths > tokenize.limit).sum())
        values[f"over {tokenize.limit} tokens"] = f"{over} ({over / len(lengths):.1%})"
    if tokenize.kind != "prompts":
        masks = [row[name] for row in rows for name in COLUMNS[tokenize.kind][1]]
        total = sum(map(len, masks))
        values["learned tokens"] = f"{sum(map(sum, masks)) / total:.1%}" if total else "none"
        values["dropped, as nothing is learned"] = str(tokenize.unlearnable)
    if tokenize.kind == "labels" and rows:
        values["desirable"] = f"{sum(row['label'] for row in rows) / len(rows):.1%}"
    return values


def boundary_merges(kind: str, rows: Sequence[Mapping[str, Any]], tokenizer: Any) -> int:
    """The number of rows that have other token ids when their text is tokenised in one piece.

    A token would then reach across the boundary of prompt and answer. Sampling never makes such a token, and training
    does not see one; many of these rows say that prompts had better end otherwise (a space less).
    """
    different = 0
    for row in rows:
        for name in COLUMNS[kind][0]:
            text = tokenizer.decode(row[name], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            different += list(tokenizer(text, add_special_tokens=False)["input_ids"]) != list(row[name])
    return different
