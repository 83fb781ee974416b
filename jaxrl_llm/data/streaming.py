"""The endless, resumable stream of host batches over data that does not fit in memory.

Rows are read in blocks. A block is tokenised in the background while the one before is used, and shuffled within
itself. The position is the state of every source at the start of the block and how far the block has been used, so a
restart reads one block again and no more.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from typing import Any, NamedTuple

import datasets
import numpy as np

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data.pipeline import check_same_data

Convert = Callable[[Mapping[str, Any]], list[Any]]


class Block(NamedTuple):
    """Rows that were read together, in the order they are used, and where the sources stood before."""

    number: int
    before: dict[str, Any]
    rows: list[Any]


class Stream:
    """An endless iterator over batches: lists of this process's rows.

    Sources are mixed by weight, row by row and without chance; each starts again when it ends. Each block of `buffer`
    rows is a permutation drawn from (seed, number of the block), or in the data's own order when `shuffle` is off.
    Every process reads everything and takes its equal part of each batch, so the order does not depend on
    `process_count`.

    Raises ConfigError: a batch that the processes cannot share equally, a source of which no row is left, or a state
    that was saved over other data.
    """

    def __init__(
        self,
        sources: Sequence[datasets.IterableDataset],
        converts: Sequence[Convert],
        weights: Sequence[float],
        batch_size: int,
        seed: int = 0,
        buffer: int = 4096,
        shuffle: bool = True,
        process_index: int = 0,
        process_count: int = 1,
        names: Sequence[str] | None = None,
    ):
        if batch_size < 1 or batch_size % process_count:
            raise ConfigError(
                f"a batch of {batch_size} prompts cannot be shared by {process_count} processes; "
                f"set batch.prompts to a multiple of {process_count}"
            )
        names = names or [""] * len(sources)
        self._readers = [Reader(*parts) for parts in zip(names, sources, converts, strict=True)]
        self._weights, self._batch_size = list(weights), batch_size
        self._local, self._first = batch_size // process_count, process_index * (batch_size // process_count)
        self._seed, self._buffer, self._shuffle = seed, buffer, shuffle
        self._identity = {"sources": list(names), "weights": self._weights, "seed": seed, "shuffle": shuffle,
                          "buffer": buffer}  # fmt: skip
        self._drawn = [0.0] * len(self._readers)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenise")
        self._block: Block | None = None
        self._coming: Future[Block] | None = None
        self._used = 0
        self._number = 0

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> list[Any]:
        batch: list[Any] = []
        while len(batch) < self._batch_size:
            block = self._current()
            taken = block.rows[self._used : self._used + self._batch_size - len(batch)]
            self._used += len(taken)
            batch += taken
        return batch[self._first : self._first + self._local]

    def get_state(self) -> dict[str, Any]:
        """Where the stream is, as a JSON-able dictionary; the same on every process."""
        block = self._current()
        return {"block": block.number, "used": self._used, "before": block.before, **self._identity}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from `state`. Batch size and process count may differ from those it was saved with."""
        check_same_data(state, self._identity)
        if self._coming is not None:
            self._coming.result()
        self._coming, self._block = None, None
        self._drawn = list(state["before"]["drawn"])
        for reader, saved in zip(self._readers, state["before"]["readers"], strict=True):
            reader.set_state(saved)
        self._number = state["block"]
        self._current()
        self._used = state["used"]

    def _current(self) -> Block:
        """The block that has rows left; the next one is read meanwhile."""
        if self._block is None or self._used >= len(self._block.rows):
            coming = self._coming or self._worker.submit(self._read)
            self._block, self._used = coming.result(), 0
            self._coming = self._worker.submit(self._read)
        return self._block

    def _read(self) -> Block:
        number, self._number = self._number, self._number + 1
        before = {"readers": [reader.get_state() for reader in self._readers], "drawn": list(self._drawn)}
        rows: list[Any] = []
        while len(rows) < self._buffer:
            # The source that is furthest behind its share is next.
            index = int(np.argmin([drawn / weight for drawn, weight in zip(self._drawn, self._weights, strict=True)]))
            self._drawn[index] += 1
            rows += self._readers[index].next()
        if self._shuffle:
            order = np.random.default_rng((self._seed, number)).permutation(len(rows))
            rows = [rows[place] for place in order]
        return Block(number, before, rows)


class Reader:
    """A source read again and again, from where its state says."""

    def __init__(self, name: str, source: datasets.IterableDataset, convert: Convert):
        self._name, self._source, self._convert = name, source, convert
        self._epoch, self._index, self._kept = 0, 0, False
        self._begin({})

    def next(self) -> list[Any]:
        """The rows made of the next row that is not dropped."""
        while True:
            where = f"{self._name} row {self._index}".strip()
            try:
                row = next(self._rows, None)
            except Exception as error:
                raise ConfigError(f"{where} cannot be read: {type(error).__name__}: {error}") from error
            if row is None:
                self._restart()
                continue
            self._index, self._moved = self._index + 1, True
            try:
                made = self._convert(row)
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from error
            if made:
                self._kept = True
                return made

    def get_state(self) -> dict[str, Any]:
        """Where the source is, as a JSON-able dictionary."""
        rows = deepcopy(self._source.state_dict() if self._moved else self._begun)
        return {"epoch": self._epoch, "index": self._index, "kept": self._kept, "rows": rows}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self._epoch, self._index, self._kept = state["epoch"], state["index"], state["kept"]
        self._begin(state["rows"])

    def _restart(self) -> None:
        if not self._kept:
            raise ConfigError(
                f"no row is left to train on, of {self._index} that were read; check the data and the length limit"
            )
        self._epoch, self._index, self._kept = self._epoch + 1, 0, False
        self._begin({})

    def _begin(self, state: dict[str, Any]) -> None:
        """Reads on from a state of the source; an empty one is its start."""
        # Until a row is read, the source itself still tells of the iteration before.
        self._begun, self._moved = state, False
        self._source.load_state_dict(deepcopy(state))
        self._rows = iter(self._source)
