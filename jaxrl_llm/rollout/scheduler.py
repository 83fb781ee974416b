"""Continuous batching: assigns rows to decode slots, a grid of G prompts by R rows, and again as rows finish.

Host side, numpy only. Rows are sharded over the mesh and never leave their shard, so every number here is local to a
shard, and all shards have a slot grid of the same shape.
"""

from typing import NamedTuple

import numpy as np

IDLE = -1
REFILL = 4  # waiting rows are assigned when one slot in so many is free: assigning copies the caches of all
COPIES = 2  # a slot grid may hold so many copies of the prompts' caches, whatever its size


class SlotGrid(NamedTuple):
    """The prompt of each group of decode slots, and the row in each slot, as numbers within a shard."""

    prompt: np.ndarray  # [shards, G]
    row: np.ndarray  # [shards, G, R], IDLE in a slot without a row

    @property
    def slots(self) -> int:
        """Slots of all shards."""
        return self.row.size

    def numbers(self, rows: int) -> np.ndarray:
        """The number `[shards * G, R]` of the row in each slot among `rows` of all shards; IDLE where there is none."""
        starts = np.arange(len(self.row))[:, None, None] * (rows // len(self.row))
        return np.where(self.row == IDLE, IDLE, self.row + starts).reshape(-1, self.row.shape[-1])

    def slots_in(self, previous: "SlotGrid") -> np.ndarray:
        """The slot `[shards, G*R]` that each row had in the previous grid; 0 for rows that had none."""
        slots = np.zeros((len(self.row), self.row[0].size), np.int32)
        for shard, (before, after) in enumerate(zip(previous.row, self.row, strict=True)):
            slot_of = {number: slot for slot, number in enumerate(before.ravel()) if number != IDLE}
            slots[shard] = [slot_of.get(number, 0) for number in after.ravel()]
        return slots


class Scheduler:
    """Plans slot grids for `prompts` x `group_size` rows in each of `shards`, `slots` of them at a time.

    A grid stays until waiting rows can be assigned, or until the rows that are left fit into the share `shrink` of it
    (or of that again): the larger the share, the fewer slots are idle, and the more shapes are compiled.
    """

    def __init__(self, prompts: int, group_size: int, shards: int, slots: int, shrink: float = 0.5, lengths=(1, 1)):
        """`lengths` are the most tokens of a prompt and of a completion."""
        self.prompts, self.group_size, self.shrink, self.lengths = prompts, group_size, shrink, lengths
        rows = np.tile(np.arange(prompts * group_size), (shards, 1))
        self.waiting = rows[:, slots:]
        self.grid = self._plan(list(rows[:, :slots]), slots)
        self.capacity = self._cache_tokens(self.grid)

    def next(self, live: np.ndarray) -> SlotGrid | None:
        """The grid to go on with, of which rows `live` `[shards, G, R]` go on; None: the present one."""
        slots = live[0].size
        rows = [row[alive] for row, alive in zip(self.grid.row, live, strict=True)]
        free = slots - max(map(len, rows))
        grid = None
        if self.waiting.size:
            if free * REFILL >= slots:
                joined = [np.concatenate(pair) for pair in zip(rows, self.waiting[:, :free], strict=True)]
                grid = self._plan(joined, slots)
                if free < slots and not self._fits(grid):
                    grid = None
            if grid is not None:
                self.waiting = self.waiting[:, free:]
        else:
            needed, smaller = max(slots - free, 1), self._smaller(slots)
            while smaller >= needed:
                planned = self._plan(rows, smaller)
                grid, smaller = planned if self._fits(planned) else grid, self._smaller(smaller)
        if grid is not None:
            self.grid = grid
        return grid

    def pause_at(self, live: np.ndarray) -> int:
        """The live rows of the fullest shard at which `next` may plan a grid, after it planned none for `live`."""
        slots = live[0].size
        planned = slots - -(-slots // REFILL) if self.waiting.size else self._smaller(slots)
        return min(planned, max(map(np.sum, live)) - 1)

    def _smaller(self, slots: int) -> int:
        return int(slots * self.shrink)

    def _fits(self, grid: SlotGrid) -> bool:
        """True where the grid copies the prompts' caches little, or all its caches need no more than at the start."""
        return grid.prompt.shape[1] <= COPIES * self.prompts or self._cache_tokens(grid) <= self.capacity

    def _cache_tokens(self, grid: SlotGrid) -> int:
        """Tokens that a shard's caches have room for."""
        prompt, completion = self.lengths
        return grid.prompt[0].size * prompt + grid.row[0].size * completion

    def _plan(self, rows: list[np.ndarray], slots: int) -> SlotGrid:
        """A grid of `slots` a shard for these rows, with the fewest prompts: R is as large as they allow.

        A prompt with more rows than R is in the grid several times.
        """
        counts = [np.bincount(shard_rows // self.group_size, minlength=self.prompts) for shard_rows in rows]
        r = next(
            r
            for r in range(min(self.group_size, slots), 0, -1)
            if slots % r == 0 and all((-(-count // r)).sum() <= slots // r for count in counts)
        )
        prompt = np.zeros((len(rows), slots // r), np.int32)
        row = np.full((len(rows), slots // r, r), IDLE, np.int32)
        for shard, shard_rows in enumerate(rows):
            g = 0
            for number in np.unique(shard_rows // self.group_size):
                members = np.sort(shard_rows[shard_rows // self.group_size == number])
                for start in range(0, len(members), r):
                    chunk = members[start : start + r]
                    prompt[shard, g], row[shard, g, : len(chunk)] = number, chunk
                    g += 1
        return SlotGrid(prompt, row)
