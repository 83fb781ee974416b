"""Rows that were asked for, what they get, and which of them are computed together."""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from jaxrl_llm.models.logprobs import Likeliest
from jaxrl_llm.rollout.grammar import GrammarRow
from jaxrl_llm.serving.grid import RowRequest

GROUP = 4  # the fewest rows of a prompt for which programs of a grid of groups are compiled
PREFILL_ROWS = 8  # prompts that are prefilled in one program


class Tokens(NamedTuple):
    """Tokens of a row since the last time. `finish_reason` is "stop" with one of its ids, "length", or None."""

    ids: list[int]
    logps: list[float]
    top_ids: list[list[int]]  # the likeliest at each place; empty where they were not asked for
    top_logps: list[list[float]]
    finish_reason: str | None


@dataclasses.dataclass(eq=False)
class Handle:
    """A row that was asked for: `deliver` gets its tokens, or the error that ended it, in the queue's thread."""

    request: RowRequest
    deliver: Callable[[Tokens | BaseException], None]
    asked: float = dataclasses.field(default_factory=time.monotonic)
    slot: int | None = None
    cancelled: bool = False
    cached: int = 0  # tokens of its prompt that were computed before, for another one
    scores: Likeliest | None = None  # of the prompt's tokens, where they were asked for, before the first token comes
    in_grammar: GrammarRow | None = None  # how far it is in its grammar
    ids: list[int] = dataclasses.field(default_factory=list)  # its tokens so far
    version: int = 0  # of the weights that its prompt was computed with
    newest: int = 0  # and of those of its last token


def distinct_prompts(handles: Sequence[Handle]) -> list[Sequence[int]]:
    """The prompts of the rows, each once: that of the rows of one request is the same object."""
    return list({id(handle.request.prompt): handle.request.prompt for handle in handles}.values())


def rows_of_each(handles: Sequence[Handle], size: int) -> int:
    """Rows of each prompt, where all that wait are groups of as many and `size` slots have room for them; else 1."""
    prompts = [id(handle.request.prompt) for handle in handles]
    group = next((number for number, prompt in enumerate(prompts) if prompt != prompts[0]), len(prompts))
    whole = group >= GROUP and len(prompts) <= size and not size % group and not len(prompts) % group
    whole = whole and all(len(distinct_prompts(rows)) == 1 for rows in pieces(handles, group))
    return group if whole and all(handle.request.grammar is None for handle in handles) else 1


def pieces(handles: Sequence[Handle], size: int) -> list[list[Handle]]:
    """The rows, `size` at a time."""
    return [list(handles[start : start + size]) for start in range(0, len(handles), size)]


def batches(handles: Sequence[Handle], begun: Collection[int], group: int) -> Iterator[list[Handle]]:
    """The rows that are prefilled together: those of one prompt, and the others of one bucket, `group` rows of each.

    `begun` are the ids of prompts of which a part is kept, or that have images: each is by itself.

    In powers of two: few programs are compiled, and no row is computed for nothing.
    """
    rows_of, by_kind = Counter(id(handle.request.prompt) for handle in handles), {}
    for rows in pieces(handles, group):
        request = rows[0].request
        prompt = id(request.prompt)
        by_prompt = rows_of[prompt] > group or prompt in begun
        kind, most = request.width, PREFILL_ROWS
        if by_prompt:
            kind, most = prompt, 1 if group > 1 else PREFILL_ROWS
        by_kind.setdefault((by_prompt, kind, most), []).append(rows)
    for (*_, most), batch in by_kind.items():
        while batch:
            count = min(most, 1 << (len(batch).bit_length() - 1))
            yield [handle for rows in batch[:count] for handle in rows]
            batch = batch[count:]
