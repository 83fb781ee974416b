"""Rows that have ended, told of while others are decoded."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxrl_llm.distributed.sharding import local_rows
from jaxrl_llm.rollout.multi_turn import local_start
from jaxrl_llm.rollout.scheduler import IDLE, Grid

Listener = Callable[[int, list[int]], None]  # is told a row of this process, from 0, and its tokens


class Handout:
    """Tells the listener of every row of this process that ends, once; without a listener it does nothing."""

    def __init__(self, listener: Listener | None, rows: int):
        self.listener, self.rows = listener, rows
        self.first = jax.process_index() * (rows // jax.process_count())  # row of this process
        self.told = np.zeros(rows, bool)

    def take(self, grid: Grid, tokens: Any, lengths, ended) -> list[tuple[int, list[int]]]:
        """The rows that have ended since, and their tokens, copied from the devices.

        tokens `[G,R,C]`; lengths and ended `[G,R]`.
        """
        if self.listener is None:
            return []
        numbers = grid.numbers(self.rows)
        fresh = ended & (numbers != IDLE) & ~self.told[numbers]
        if not fresh.any():
            return []
        self.told[numbers[fresh]] = True
        own, start = local_rows(tokens), local_start(tokens)
        places = [(g, r, start + g) for g, r in np.argwhere(fresh[start : start + len(own)])]
        return [(int(numbers[at, r]) - self.first, own[g, r, : lengths[at, r]].tolist()) for g, r, at in places]

    def give(self, rows: list[tuple[int, list[int]]]) -> None:
        """Tells of rows that were taken."""
        for row, tokens in rows:
            if self.listener is not None:
                self.listener(row, tokens)
