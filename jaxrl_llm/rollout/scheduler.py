"""Which rows decode side by side: a grid of G prompts by R rows, planned anew as rows end and others wait for a place.

Host side, numpy only. Rows are cut over the shards of the mesh and never leave theirs, so every number here is local to
a shard, and all shards have a grid of the same shape.
"""

from typing import NamedTuple

import numpy as np

IDLE = -1
REFILL = 4  # waiting rows are seated when one slot in so many is free: seating copies the caches of all
REPEATS = 2  # a grid may hold so many copies of the prompts' caches whatever its size


class Grid(NamedTuple):
    """Which row sits where."""

    prompt: np.ndarray  # [shards, G]
    row: np.ndarray  # [shards, G, R], IDLE where no row sits

    @property
    def slots(self) -> int:
        """Slots of all shards."""
        return self.row.size

    def numbers(self, rows: int) -> np.ndarray:
        """The number `[shards * G, R]` of the row in each slot among `rows` of all shards; IDLE where there is none."""
        starts = np.arange(len(self.row))[:, None, None] * (rows // len(self.row))
        return np.where(self.row == IDLE, IDLE, self.row + starts).reshape(-1, self.row.shape[-1])


class Schedule:
    """Plans grids for `prompts` x `group_size` rows in each of `shards`, `slots` of them at a time.

    A grid stays until waiting rows can be seated, or until the rows that are left fit into the share `shrink` of it (or
    of that again): the larger the share, the fewer slots are idle, and the more shapes are compiled.
    """

    def __init__(
        self, prompts: int, group_size: int, shards: int, slots: int, shrink: float = 0.5, lengths=(1, 1)
    ):  # fmt: skip
        """`lengths` are the most tokens of a prompt and of a completion."""
        self.prompts, self.group_size, self.shrink, self.lengths = prompts, group_size, shrink, lengths
        rows = np.tile(np.arange(prompts * group_size), (shards, 1))
        self.waiting = rows[:, slots:]
        self.grid = self._plan(list(rows[:, :slots]), slots)
        self.room = self._tokens(self.grid)

    def next(self, live: np.ndarray) -> Grid | None:
        """The grid to go on with, given which rows of this one are live `[shards, G, R]`; None: this one."""
        slots = live[0].size
        rows = [row[alive] for row, alive in zip(self.grid.row, live, strict=True)]
        free = slots - max(map(len, rows))
        grid = None
        if self.waiting.size:
            if free * REFILL >= slots:
                joined = [np.concatenate(pair) for pair in zip(rows, self.waiting[:, :free], strict=True)]
                grid = self._plan(joined, slots)
                if free < slots and not self._is_lean(grid):
                    grid = None
            if grid is not None:
                self.waiting = self.waiting[:, free:]
        else:
            needed, smaller = max(slots - free, 1), self._smaller(slots)
            while smaller >= needed:
                planned = self._plan(rows, smaller)
                grid, smaller = planned if self._is_lean(planned) else grid, self._smaller(smaller)
        if grid is not None:
            self.grid = grid
        return grid

    def few(self, live: np.ndarray) -> int:
        """The live rows of the fullest shard at which `next` may say something, after it said None for `live`."""
        slots = live[0].size
        planned = slots - -(-slots // REFILL) if self.waiting.size else self._smaller(slots)
        return min(planned, max(map(np.sum, live)) - 1)

    def _smaller(self, slots: int) -> int:
        return int(slots * self.shrink)

    def _is_lean(self, grid: Grid) -> bool:
        """True when the grid repeats the prompts' caches little, or needs no more memory than the first with that."""
        return grid.prompt.shape[1] <= REPEATS * self.prompts or self._tokens(grid) <= self.room

    def _tokens(self, grid: Grid) -> int:
        """Tokens that a shard's caches have room for."""
        prompt, completion = self.lengths
        return grid.prompt[0].size * prompt + grid.row[0].size * completion

    def _plan(self, rows: list[np.ndarray], slots: int) -> Grid:
        """A grid of `slots` a shard for these rows, with the fewest prompts.

        A prompt with more rows than R has several places in the grid.
        """
        counts = [np.bincount(own // self.group_size, minlength=self.prompts) for own in rows]
        r = next(
            r
            for r in range(min(self.group_size, slots), 0, -1)
            if slots % r == 0 and all((-(-count // r)).sum() <= slots // r for count in counts)
        )
        prompt = np.zeros((len(rows), slots // r), np.int32)
        row = np.full((len(rows), slots // r, r), IDLE, np.int32)
        for shard, own in enumerate(rows):
            place = 0
            for number in np.unique(own // self.group_size):
                members = np.sort(own[own // self.group_size == number])
                for start in range(0, len(members), r):
                    part = members[start : start + r]
                    prompt[shard, place], row[shard, place, : len(part)] = number, part
                    place += 1
        return Grid(prompt, row)
