"""Rows that are conversations: who answers them, and how answers reach rows, whichever process these belong to."""

from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_llm.distributed.sharding import local_rows
from jaxrl_llm.rollout.scheduler import IDLE, Grid

MANY = 8  # given tokens that are read at once; for fewer the program is not worth compiling
ROWS = 8  # rows of a shard that read at once: what they need beside the caches stays small


class Partner(Protocol):
    """Who answers the rows of this process: environments, tools."""

    def hear(self, row: int, tokens: list[int]) -> None:
        """Takes the completion so far of a row that ended, without waiting. Rows count from 0 in this process."""
        ...

    def replies(self, wait: bool) -> dict[int, list[int] | None]:
        """The tokens that follow in each row with an answer now, None where the row is over; with `wait` at least one.

        Called also when no row of this process waits: then there are none.
        """
        ...


class Answers(NamedTuple):
    """What is put into the rows of a grid `[G,R]`."""

    tokens: np.ndarray  # [G,R,W]
    counts: np.ndarray  # [G,R] of them
    cut: np.ndarray  # [G,R] rows whose answer leaves no room for another token


class Conversations:
    """Asks the partner about each row that ends, and collects what it says. Every process holds the same state."""

    def __init__(self, partner: Partner, rows: int, shards: int, longest: int):
        self.partner, self.longest = partner, longest
        self.rows = rows
        self.first = jax.process_index() * (rows // jax.process_count())  # row of this process
        self.asked = np.zeros(rows, bool)  # rows that wait for an answer
        self.over = np.zeros(rows, bool)

    def waiting(self, grid: Grid) -> np.ndarray:
        """Which rows wait for an answer, in the shape of the grid."""
        numbers = grid.numbers(self.rows)
        return (self.asked[numbers] & (numbers != IDLE)).reshape(grid.row.shape)

    def __call__(self, grid: Grid, tokens: Any, lengths, finished, wait: bool) -> Answers | None:
        """The answers that have come; None without any. With `wait`, waits for one.

        tokens `[G,R,C]` on the devices; lengths and finished `[G,R]`.
        """
        numbers = grid.numbers(self.rows)
        fresh = finished & (numbers != IDLE) & ~self.asked[numbers] & ~self.over[numbers]
        if fresh.any():
            own, start = local_rows(tokens), first_place(tokens)
            for g, r in np.argwhere(fresh[start : start + len(own)]):
                said = own[g, r, : lengths[start + g, r]].tolist()
                self.partner.hear(int(numbers[start + g, r]) - self.first, said)
            self.asked[numbers[fresh]] = True
        if not self.asked.any():
            return None
        return self._answers(numbers, lengths, self.partner.replies(wait))

    def _answers(self, numbers, lengths, replies: dict[int, list[int] | None]) -> Answers | None:
        said = {row + self.first: tokens for row, tokens in replies.items()}
        longest = _over_processes(np.asarray(max((len(tokens or ()) for tokens in said.values()), default=0)), max)
        width = 1 << max(int(longest) - 1, 0).bit_length()
        given = np.zeros((*numbers.shape, width), np.int32)
        counts, answered, over = (np.zeros(numbers.shape, np.int32) for _ in range(3))
        for g, r in np.argwhere(np.isin(numbers, list(said))):
            tokens = said[numbers[g, r]]
            answered[g, r], over[g, r] = 1, tokens is None
            if tokens is not None:
                given[g, r, : len(tokens)], counts[g, r] = tokens, len(tokens)
        given, counts, answered, over = (_over_processes(x, sum) for x in (given, counts, answered, over))
        cut = (counts > 0) & (lengths + counts >= self.longest)
        counts = np.where(cut, 0, counts)
        self.asked[numbers[answered > 0]] = False
        self.over[numbers[(over > 0) | cut]] = True
        return Answers(given, counts, cut) if counts.any() or cut.any() else None


def slots_to_read(given: np.ndarray) -> np.ndarray | None:
    """The slots `[shards, m]` that read next, of those with `given` `[shards, slots]` tokens; None if none has many.

    m is a power of two, and a place that none takes is past the end.
    """
    many = [np.flatnonzero(tokens >= MANY)[:ROWS] for tokens in given]
    most = max(map(len, many))
    if not most:
        return None
    chosen = np.full((len(given), 1 << (most - 1).bit_length()), given.shape[1], np.int32)
    for row, found in zip(chosen, many, strict=True):
        row[: len(found)] = found
    return chosen


def first_place(tokens: Any) -> int:
    """Where this process's part of a global array begins."""
    if tokens.is_fully_addressable:
        return 0
    return min(shard.index[0].start or 0 for shard in tokens.addressable_shards)


def _over_processes(x: np.ndarray, merge) -> np.ndarray:
    return x if jax.process_count() == 1 else merge(np.asarray(multihost_utils.process_allgather(x)))
