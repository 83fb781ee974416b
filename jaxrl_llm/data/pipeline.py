"""Endless, resumable streams of host batches: `Pipeline` over examples in memory, `Stream` over data that is not.

Both take a batch from one global order and give this process its equal share of it, so the order does not depend on the
number of processes. The position is small and JSON-able, and a checkpoint holds it.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxrl_llm.config.resolve import ConfigError

if TYPE_CHECKING:
    import datasets

MEGABATCH = 50  # batches that are sorted by length together: transformers' number


class WithoutArrays:
    """A stream that knows no scores of its prompts, and whose state has no arrays; `ScoredPrompts` has both."""

    arrays: tuple[str, ...] = ()  # the names of the trees that `get_arrays` may have
    newest: np.ndarray | None = None  # scores `[B,n]` by the reference, of the prompts of the newest batch

    def get_arrays(self) -> dict[str, Any]:
        """No arrays: the position is all of the state."""
        return {}


class Pipeline(WithoutArrays):
    """An endless iterator over batches: lists of this process's examples.

    Global batch k holds the examples k*batch_size to (k+1)*batch_size of one stream, in which each epoch is a new
    permutation of the examples (or their own order when `shuffle` is off); a batch may span two epochs (or more, of
    few examples), so no example is ever skipped. With `shares`, (examples, weight) of each source in turn, the
    sources are mixed by weight: each has its own epochs, and its share of the weights of any long stretch of the
    stream. With `lengths`, one of each example, the stream is sorted by them, the longest first, MEGABATCH batches at a
    time, and never across the end of an epoch (of as many draws as there are examples, with `shares`): the last batches
    of each are sorted by themselves. Process p takes the p-th equal share of every batch. The order is computed from
    (seed, position), so a restart costs no replay.

    Raises ConfigError: no examples, a batch that the processes cannot share equally, or a state that
    was saved over other data.
    """

    def __init__(
        self,
        examples: Sequence[Any],
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        process_index: int = 0,
        process_count: int = 1,
        shares: Sequence[tuple[int, float]] | None = None,
        lengths: Sequence[int] | None = None,
    ):
        # grain imports jax, and everything else in this package loads without it.
        import grain

        self._batch_size, self._local = batch_size, local_slice(batch_size, process_index, process_count)
        if not len(examples):
            raise ConfigError("the data has no examples")

        def ordered(numbers: range, source_seed: int) -> Any:
            dataset = grain.MapDataset.source(numbers).seed(source_seed)
            return (dataset.shuffle() if shuffle else dataset).repeat()

        self._examples, self._lengths = examples, lengths
        self._megabatch: tuple[int, list[int]] | None = None  # the newest that was sorted, with its first place
        self._identity: dict[str, Any] = {
            "examples": len(examples),
            "seed": seed,
            "shuffle": shuffle,
            "shares": None if shares is None else [list(share) for share in shares],
            "megabatch": None if lengths is None else MEGABATCH * batch_size,  # examples that are sorted together
        }
        if shares is None:
            self._stream: Any = ordered(range(len(examples)), seed)  # of the examples' numbers
        else:
            ends = np.cumsum([count for count, _ in shares]).tolist()
            # Sources of one length would be shuffled alike by one seed.
            sources = [
                ordered(range(end - count, end), seed + 7919 * index)
                for index, ((count, _), end) in enumerate(zip(shares, ends, strict=True))
            ]
            self._stream = grain.MapDataset.mix(sources, [weight for _, weight in shares])
        self._position = 0

    def __iter__(self) -> "Pipeline":
        return self

    def __next__(self) -> list[Any]:
        start = self._position
        self._position += self._batch_size
        return [self.example(place) for place in range(start + self._local.start, start + self._local.stop)]

    def example(self, place: int) -> Any:
        """The example at a place of the stream; the position stays as it is."""
        if self._lengths is None:
            return self._examples[self._stream[place]]
        size, examples = self._identity["megabatch"], len(self._examples)
        begun = place - place % examples  # the epoch: sorted across its end, its last rows could come in the next
        first = place - (place - begun) % size
        if self._megabatch is None or self._megabatch[0] != first:
            drawn = [self._stream[other] for other in range(first, min(first + size, begun + examples))]
            self._megabatch = first, sorted(drawn, key=self._lengths.__getitem__, reverse=True)
        return self._examples[self._megabatch[1][place - first]]

    @property
    def position(self) -> int:
        """The number of examples that were drawn."""
        return self._position

    @property
    def epochs(self) -> float:
        """The examples that were drawn, as a multiple of all there are."""
        return self._position / self._identity["examples"]

    def get_state(self) -> dict[str, Any]:
        """The position in the stream, as a JSON-able dictionary; the same on every process."""
        return {"position": self._position, **self._identity}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from `state`. Process count and, without `lengths`, batch size may differ from those of before."""
        _check_same_data(state, self._identity)
        self._position = int(state["position"])


class StreamSource(NamedTuple):
    """One of the sources that a `Stream` mixes."""

    name: str  # in errors
    rows: "datasets.IterableDataset"
    convert: Callable[[Mapping[str, Any]], list[Any]]  # a row to token rows: none where it is dropped, two of a pair
    weight: float | None  # share of the rows of the stream; None for all: they follow each other


class Block(NamedTuple):
    """Rows that were read together, in the order they are used, packed or not; and the state of the sources before."""

    number: int
    before: dict[str, Any]
    rows: list[Any]


class Stream(WithoutArrays):
    """An endless iterator over batches, lists of this process's rows, of data that does not fit in memory.

    Sources are mixed by weight, token row by token row and without chance, and each starts again when it ends; without
    weights they follow each other, and all start again when the last one ends. Rows are read in blocks of `buffer`, and
    of fewer where an epoch of all sources ends, so that none of its rows comes after one of the next. A block is a
    permutation drawn from (seed, number of the block), or in the data's own order when `shuffle` is off. With `pack`
    its rows are packed in this order, to at most `packed_width` tokens, and what that makes of them is shuffled again.
    It is tokenised in the background while the one before is used. The position is the state of every source at the
    start of the block and the rows of it that have been used, so a restart reads one block again and no more. Every
    process reads everything and takes its equal share of each batch.

    Raises ConfigError: a batch that the processes cannot share equally, a source of which no row is left, or a state
    that was saved over other data.
    """

    def __init__(
        self,
        sources: Sequence[StreamSource],
        batch_size: int,
        seed: int = 0,
        buffer: int = 4096,
        shuffle: bool = True,
        process_index: int = 0,
        process_count: int = 1,
        pack: Callable[[list[Any]], list[Any]] | None = None,
        packed_width: int | None = None,
    ):
        self._batch_size, self._local = batch_size, local_slice(batch_size, process_index, process_count)
        self._readers = [_Reader(source) for source in sources]
        self._weights = [source.weight for source in sources]
        self._seed, self._buffer, self._shuffle, self._pack = seed, buffer, shuffle, pack
        self._identity = {
            "sources": [source.name for source in sources],
            "weights": self._weights,
            "seed": seed,
            "shuffle": shuffle,
            "buffer": buffer,
            "packed_width": packed_width,
        }
        self._drawn = [0.0] * len(self._readers)  # token rows read of each source
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenise")
        self._block: Block | None = None
        self._next_block: Future[Block] | None = None
        self._used = 0
        self._number = 0

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> list[Any]:
        batch: list[Any] = []
        while len(batch) < self._batch_size:
            block = self._current()
            rows = block.rows[self._used : self._used + self._batch_size - len(batch)]
            self._used += len(rows)
            batch += rows
        return batch[self._local]

    @property
    def epochs(self) -> None:
        """None: the number of rows is not known before all are read."""

    def get_state(self) -> dict[str, Any]:
        """The position in the stream, as a JSON-able dictionary; the same on every process."""
        # A block that is used up is a position too: to wait for the next one would make its faults the checkpoint's.
        block = self._block or self._current()
        return {"block": block.number, "used": self._used, "before": block.before, **self._identity}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from `state`. Batch size and process count may differ from those it was saved with."""
        _check_same_data(state, self._identity)
        if self._next_block is not None:
            self._next_block.result()  # the worker moves the readers until it is done
        self._next_block, self._block = None, None
        self._drawn = list(state["before"]["drawn"])
        for reader, saved in zip(self._readers, state["before"]["readers"], strict=True):
            reader.set_state(saved)
        self._number = state["block"]
        self._current()
        self._used = state["used"]

    def _current(self) -> Block:
        """The block that has rows left; the next one is read meanwhile."""
        if self._block is None or self._used >= len(self._block.rows):
            future = self._next_block or self._worker.submit(self._read_block)
            self._block, self._used = future.result(), 0
            self._next_block = self._worker.submit(self._read_block)
        return self._block

    def _read_block(self) -> Block:
        number, self._number = self._number, self._number + 1
        before = {"readers": [reader.get_state() for reader in self._readers], "drawn": list(self._drawn)}
        rows: list[Any] = []
        while len(rows) < self._buffer:
            # The source that is furthest behind its share is next; without weights, the first that is an epoch behind.
            behind = [
                reader.epoch if weight is None else drawn / weight
                for reader, drawn, weight in zip(self._readers, self._drawn, self._weights, strict=True)
            ]
            index = int(np.argmin(behind))
            read = self._readers[index].next()
            self._drawn[index] += len(read)
            rows += read
            if rows and not read and len({reader.epoch for reader in self._readers}) == 1:
                break
        random = np.random.default_rng((self._seed, number))

        def shuffled(rows: list[Any]) -> list[Any]:
            return [rows[index] for index in random.permutation(len(rows))] if self._shuffle else rows

        rows = shuffled(rows)
        # Packing leaves long rows to the end of a block.
        return Block(number, before, rows if self._pack is None else shuffled(self._pack(rows)))


class _Reader:
    """Reads a source again and again, from the position that its state holds."""

    def __init__(self, source: StreamSource):
        self._name, self._source, self._convert = source.name, source.rows, source.convert
        self.epoch, self._index, self._kept = 0, 0, False
        self._begin({})

    def next(self) -> list[Any]:
        """The token rows of the next row that is not dropped; none at the end of an epoch."""
        while True:
            location = f"{self._name} row {self._index}".strip()
            try:
                row = next(self._rows, None)
            except Exception as error:
                raise ConfigError(f"{location} cannot be read: {type(error).__name__}: {error}") from error
            if row is None:
                if not self._kept:
                    raise ConfigError(
                        f"no row is left to train on, of {self._index} that were read; check the data and the length "
                        "limit"
                    )
                self.epoch, self._index, self._kept = self.epoch + 1, 0, False
                self._begin({})
                return []
            self._index, self._moved = self._index + 1, True
            try:
                token_rows = self._convert(row)
            except ConfigError as error:
                raise ConfigError(f"{location}: {error}") from error
            if token_rows:
                self._kept = True
                return token_rows

    def get_state(self) -> dict[str, Any]:
        """The position in the source, as a JSON-able dictionary."""
        rows = deepcopy(self._source.state_dict() if self._moved else self._begun)
        return {"epoch": self.epoch, "index": self._index, "kept": self._kept, "rows": rows}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self.epoch, self._index, self._kept = state["epoch"], state["index"], state["kept"]
        self._begin(state["rows"])

    def _begin(self, state: dict[str, Any]) -> None:
        """Read on from a state of the source; an empty one is its start."""
        # Until a row is read, the source's own state is still that of the iteration before.
        self._begun, self._moved = state, False
        self._source.load_state_dict(deepcopy(state))
        self._rows = iter(self._source)


def local_slice(batch_size: int, process_index: int, process_count: int) -> slice:
    """The rows of a global batch that are this process's share; raises ConfigError where processes cannot share them
    evenly."""
    if batch_size < 1 or batch_size % process_count:
        raise ConfigError(
            f"a batch of {batch_size} prompts cannot be shared by {process_count} processes (or groups of those that "
            f"hold the same rows); set batch.prompts to a multiple of {process_count}"
        )
    if not 0 <= process_index < process_count:
        raise ConfigError(f"process {process_index} is not one of {process_count}; count them from 0")
    size = batch_size // process_count
    return slice(process_index * size, (process_index + 1) * size)


def _check_same_data(state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raises ConfigError unless a saved position was saved over the data and the order of this run."""
    for key, value in identity.items():
        if state.get(key) != value:
            raise ConfigError(
                f"the saved data position belongs to {key}={state.get(key)!r} but this run has {key}={value!r}; "
                "resume with the same data, seed, data.shuffle, data.packing (for streamed rows the same "
                "data.max_length too) and data.group_by_length (the same batch.prompts too), or start a new output_dir "
                "(with model.path=RUN/hf from the model that this one has trained)"
            )
