"""Multi-turn rollouts, the engine's side: rows that end a turn wait for observation tokens, from whichever process."""

from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_llm.distributed.sharding import local_range, local_rows
from jaxrl_llm.rollout.scheduler import IDLE, SlotGrid

MIN_TOKENS = 8  # observation tokens that are read at once; for fewer the program is not worth compiling
MAX_ROWS = 8  # rows of a shard that read at once: the arrays beside the caches stay small


class TurnServer(Protocol):
    """Answers the turns of this process's rows, which count from 0 here: `environments.batch.EpisodeBatch`."""

    def submit(self, row: int, tokens: list[int]) -> None:
        """Take the completion so far of a row that has ended a turn, without waiting."""
        ...

    def poll(self, wait: bool) -> dict[int, list[int] | None]:
        """The observation tokens of each row that is answered by now, None for a row that is over.

        With `wait`, at least one. Called also when no row of this process waits: then there are none.
        """
        ...


class SilentTurnServer:
    """The turn server of a process whose rows another one answers, which holds them too: it has no answers."""

    def submit(self, row: int, tokens: list[int]) -> None:
        """Take the completion so far of a row, and do nothing."""

    def poll(self, wait: bool) -> dict[int, list[int] | None]:
        """No answers, without waiting: those of the other process are added up with these."""
        return {}


class TurnTracker:
    """The state of each row between its turns: submitted and waiting, decoding, or over. The same on every process.

    rows: of all processes. first_row: this process's first among them. max_length: tokens of a completion.
    """

    def __init__(self, server: TurnServer, rows: int, first_row: int, max_length: int):
        self.server, self.rows, self.first_row, self.max_length = server, rows, first_row, max_length
        self.waiting = np.zeros(rows, bool)
        self.over = np.zeros(rows, bool)

    def waiting_slots(self, grid: SlotGrid) -> np.ndarray:
        """True for the slots whose rows wait for an observation, in the shape of `grid.row`."""
        numbers = grid.numbers(self.rows)
        return (self.waiting[numbers] & (numbers != IDLE)).reshape(grid.row.shape)

    def exchange(
        self, grid: SlotGrid, tokens: Any, lengths, finished, wait: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Submit the rows that have ended a turn; returns the observations that have come, None without any.

        They are tokens `[G,R,W]`, how many each row has `[G,R]`, and `[G,R]` True for rows that end, as theirs leave no
        room to sample another. tokens `[G,R,C]` on the devices; lengths and finished `[G,R]`. With `wait`, waits for
        one row to be answered.
        """
        numbers, own = grid.numbers(self.rows), local_range(tokens)
        own_rows, own_lengths = numbers[own] - self.first_row, lengths[own]
        ended = finished & (numbers != IDLE) & ~self.waiting[numbers] & ~self.over[numbers]
        if ended.any():
            rows = local_rows(tokens)
            for g, r in np.argwhere(ended[own]):
                self.server.submit(int(own_rows[g, r]), rows[g, r, : own_lengths[g, r]].tolist())
            self.waiting[numbers[ended]] = True
        if not self.waiting.any():
            return None
        answers = self.server.poll(wait)
        # A process knows the answers of its own rows only, but all must run the same program on the same arrays: they
        # agree on the width, a power of two so that few programs are compiled, and each gives its slots alone.
        longest = max((len(answer or ()) for answer in answers.values()), default=0)
        agreed = _of_processes(np.array([longest, own.start]), tokens)
        width = 1 << max(int(agreed[:, 0].max()) - 1, 0).bit_length()
        given = np.zeros((*own_rows.shape, width + 3), np.int32)  # tokens; how many, whether answered, whether over
        for g, r in np.argwhere(np.isin(own_rows, list(answers))):
            answer = answers[int(own_rows[g, r])]
            given[g, r, : len(answer or ())] = answer or ()
            given[g, r, width:] = len(answer or ()), 1, answer is None
        found = np.zeros((*numbers.shape, width + 3), np.int32)
        for start, part in zip(agreed[:, 1], _of_processes(given, tokens), strict=True):
            found[start : start + len(part)] += part  # where several have the same slots, one alone gives answers
        observed, (counts, answered, over) = found[..., :width], np.moveaxis(found[..., width:], -1, 0)
        truncated = (counts > 0) & (lengths + counts >= self.max_length)
        counts = np.where(truncated, 0, counts)
        self.waiting[numbers[answered > 0]] = False
        self.over[numbers[(over > 0) | truncated]] = True
        return (observed, counts, truncated) if counts.any() or truncated.any() else None


def slots_to_read(counts: np.ndarray, least: int) -> np.ndarray | None:
    """The slots `[shards, m]` that read next, by their `counts` `[shards, slots]` of observation tokens; None for none.

    A slot with fewer than `least` decodes them instead. m is a power of two; entries without a slot are past the end.
    """
    slots = [np.flatnonzero(shard >= least)[:MAX_ROWS] for shard in counts]
    most = max(map(len, slots))
    if not most:
        return None
    index = np.full((len(counts), 1 << (most - 1).bit_length()), counts.shape[1], np.int32)
    for row, chosen in zip(index, slots, strict=True):
        row[: len(chosen)] = chosen
    return index


def _of_processes(x: np.ndarray, tokens: Any) -> np.ndarray:
    """The arrays of all processes that have a part of the `tokens`, `[processes,...]`."""
    alone = not isinstance(tokens, jax.Array) or tokens.is_fully_addressable
    return x[None] if alone else np.asarray(multihost_utils.process_allgather(x))
