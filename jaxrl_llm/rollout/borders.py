"""Borders: a caller's decisions between two chunks of decode steps, while rows are sampled."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxrl_llm.models.net import Params
from jaxrl_llm.rollout.scheduler import IDLE, SlotGrid
from jaxrl_llm.rollout.slots import Begun


class Border(NamedTuple):
    """The decision at a border: rows go on by other parameters (as `Engine.generate` takes them), or not at all."""

    params: Params | None = None  # None: those of before
    ends: bool = False


# Gets the tokens `[N]` so far of each row, and `[N]` True where it is known to have ended with an end-of-text token or
# stop string: rows that wait for a slot may have, with their first.
OnBorder = Callable[[np.ndarray, np.ndarray], Border]


class Borders:
    """The lengths and ends of all rows, on the host, for `on_border`; without one rows go on as they are."""

    def __init__(self, on_border: OnBorder | None, rows: int, begun: Begun | None):
        self._on_border = on_border
        # Of rows without a slot: the first token, which comes from the prefill, or what they have begun with.
        self._lengths = np.ones(rows, np.int32) if begun is None else np.maximum(begun.lengths, 1)
        self._finished = np.zeros(rows, bool) if begun is None else begun.finished.copy()

    def look(self, grid: SlotGrid, lengths: np.ndarray, finished: np.ndarray) -> None:
        """Take notice of lengths and ends `[G,R]` of the rows in slots, before any leaves its slot."""
        if self._on_border is None:
            return
        numbers = grid.numbers(len(self._lengths))
        taken = numbers != IDLE
        # A row that has begun is read anew first, and is then shorter than it was.
        self._lengths[numbers[taken]] = np.maximum(self._lengths[numbers[taken]], lengths[taken])
        self._finished[numbers[taken]] |= finished[taken]

    def ask(self) -> Border:
        """The decision for the rows as they are."""
        if self._on_border is None:
            return Border()
        return self._on_border(self._lengths.copy(), self._finished.copy())
