"""The endless, resumable stream of host batches."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.config.resolve import ConfigError


class Pipeline:
    """An endless iterator over batches: lists of this process's examples.

    Global batch k holds the examples k*batch_size to (k+1)*batch_size of one stream, in which each epoch is a new
    permutation of the examples (or their own order when `shuffle` is off); a batch may span two epochs, so no example
    is ever skipped. With `shares`, (examples, weight) of each source in turn, the sources are mixed by weight: each has
    its own epochs, and its share of the weights of any long stretch of the stream. Process p takes the p-th equal part
    of every batch, so the global order does not depend on `process_count`. The order is computed from (seed, position),
    so a restart costs no replay.

    Raises ConfigError: fewer examples than a batch, a batch that the processes cannot share equally, or a state that
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
    ):
        # grain imports jax, and everything else in this package loads without it.
        import grain

        if batch_size < 1 or batch_size % process_count:
            raise ConfigError(
                f"a batch of {batch_size} prompts cannot be shared by {process_count} processes; "
                f"set batch.prompts to a multiple of {process_count}"
            )
        if not 0 <= process_index < process_count:
            raise ConfigError(f"process {process_index} is not one of {process_count}; count them from 0")
        if len(examples) < batch_size:
            raise ConfigError(
                f"the data has {len(examples)} examples, fewer than a batch of {batch_size}; "
                "lower batch.prompts or give more data"
            )
        self._stream: Any = (
            _ordered(grain, examples, seed, shuffle)
            if shares is None
            else _mixed(grain, examples, seed, shuffle, shares)
        )
        self._batch_size = batch_size
        self._local_size = batch_size // process_count
        self._offset = process_index * self._local_size
        self._identity: dict[str, Any] = {"examples": len(examples), "seed": seed, "shuffle": shuffle}
        if shares is not None:
            self._identity["shares"] = [list(share) for share in shares]
        self._position = 0

    def __iter__(self) -> "Pipeline":
        return self

    def __next__(self) -> list[Any]:
        start = self._position + self._offset
        self._position += self._batch_size
        return [self._stream[index] for index in range(start, start + self._local_size)]

    @property
    def epoch(self) -> int:
        """How many times all examples have been seen."""
        return self._position // self._identity["examples"]

    def get_state(self) -> dict[str, Any]:
        """Where the stream is, as a JSON-able dictionary; the same on every process."""
        return {"position": self._position, **self._identity}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from `state`. Batch size and process count may differ from those it was saved with."""
        check_same_data(state, self._identity)
        self._position = int(state["position"])


def check_same_data(state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raises ConfigError unless a saved position was saved over the data and the order of this run."""
    for key, value in identity.items():
        if state.get(key) != value:
            raise ConfigError(
                f"the saved data position belongs to {key}={state.get(key)!r} but this run has {key}={value!r}; "
                "resume with the same data, seed and shuffling, or start a new output_dir"
            )


def _ordered(grain: Any, examples: Sequence[Any], seed: int, shuffle: bool) -> Any:
    order = grain.MapDataset.source(examples).seed(seed)
    return (order.shuffle() if shuffle else order).repeat()


def _mixed(grain: Any, examples: Sequence[Any], seed: int, shuffle: bool, shares: Sequence[tuple[int, float]]) -> Any:
    parts, start = [], 0
    for index, (count, _) in enumerate(shares):
        # Sources of one length would be shuffled alike by one seed.
        parts.append(_ordered(grain, examples[start : start + count], seed + 7919 * index, shuffle))
        start += count
    return grain.MapDataset.mix(parts, [weight for _, weight in shares])
