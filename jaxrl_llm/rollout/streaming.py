"""Streaming of finished rows: a callback gets each one while others are still decoded."""

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl_llm.distributed.sharding import local_range, local_rows
from jaxrl_llm.rollout.scheduler import IDLE, SlotGrid

OnFinished = Callable[[int, list[int]], None]  # gets a row of this process, from 0, and its tokens


class FinishedRows:
    """Calls `on_finished` once with every row of this process that ends; without a callback it does nothing.

    rows: of all processes. first_row: this process's first among them.
    """

    def __init__(self, on_finished: OnFinished | None, rows: int, first_row: int):
        self.on_finished, self.rows, self.first_row = on_finished, rows, first_row
        self.collected = np.zeros(rows, bool)

    def collect(self, grid: SlotGrid, tokens: Any, lengths, ended) -> list[tuple[int, list[int]]]:
        """The rows that have ended since the last call, and their tokens, copied from the devices.

        tokens `[G,R,C]`; lengths and ended `[G,R]`.
        """
        if self.on_finished is None:
            return []
        numbers = grid.numbers(self.rows)
        fresh = ended & (numbers != IDLE) & ~self.collected[numbers]
        if not fresh.any():
            return []
        self.collected[numbers[fresh]] = True
        rows, own = local_rows(tokens), local_range(tokens)
        numbers, lengths = numbers[own] - self.first_row, lengths[own]
        return [(int(numbers[g, r]), rows[g, r, : lengths[g, r]].tolist()) for g, r in np.argwhere(fresh[own])]

    def report(self, rows: list[tuple[int, list[int]]]) -> None:
        """Call back with rows that were collected: after the next chunk is dispatched, so that devices do not wait."""
        for row, tokens in rows:
            if self.on_finished is not None:
                self.on_finished(row, tokens)
