"""Prompts with the scores of a reference's completions: `ScoredPrompts`, a pipeline of those that it has solved."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.data import Row
from jaxrl_llm.data.pipeline import Pipeline, local_slice

SCORES = "reference_scores"  # the column of rows that bring them along


class ScoredPrompts:
    """An endless, resumable iterator over batches, as `Pipeline`, of prompts whose scores by the reference are known.

    They are those of the column `reference_scores`, where the rows have it, or what `give` is told before the first
    batch. With `drop_unsolved` prompts without a score other than 0 are left out; the order is that of a Pipeline over
    the others. After each batch `newest [B,n]` are the scores of its prompts, those of this process. The state is the
    position, and all scores as an array: a run that goes on samples none anew.

    Raises ConfigError for a column of something else than numbers.
    """

    arrays: tuple[str, ...] = (SCORES,)

    def __init__(
        self,
        examples: Sequence[Row],
        batch_size: int,
        drop_unsolved: bool,
        seed: int = 0,
        shuffle: bool = True,
        process_index: int = 0,
        process_count: int = 1,
        shares: Sequence[tuple[int, float]] | None = None,
    ):
        local_slice(batch_size, process_index, process_count)  # refuses what the processes cannot share
        self.examples, self._drop_unsolved, self._shares = examples, drop_unsolved, shares
        self._batch_size, self._order_settings = batch_size, (seed, shuffle, process_index, process_count)
        self._scores = np.zeros((0, 0), np.float32)
        self._order: Pipeline | None = None
        self.newest: np.ndarray | None = None
        if any(SCORES in row for row in examples):
            self.give(column_scores(examples))

    def __iter__(self) -> "ScoredPrompts":
        return self

    def __next__(self) -> list[Row]:
        numbers = next(self._known)
        self.newest = self._scores[numbers]
        return [self.examples[number] for number in numbers]

    @property
    def known(self) -> bool:
        """True once there are scores."""
        return self._order is not None

    @property
    def left_out(self) -> int:
        """The number of prompts that are left out."""
        return len(self.examples) - self._known.get_state()["examples"]

    @property
    def epochs(self) -> float:
        """The prompts that were drawn, as a multiple of those that are not left out."""
        return self._known.epochs

    def give(self, scores: np.ndarray) -> None:
        """Take up the scores `[len(examples),n]` of each prompt, NaN for none, and begin the stream.

        Raises ConfigError where all prompts are left out, and where no prompt has a score.
        """
        self._scores = np.asarray(scores, np.float32)
        if np.isnan(self._scores).all():
            raise ConfigError(
                f"none of {len(self._scores)} prompts has a score of the reference: check what rewards.functions give "
                f"for its completions or, where rows have it, the column {SCORES}"
            )
        kept = np.ones(len(scores), bool)
        if self._drop_unsolved:
            kept = (np.nan_to_num(self._scores) != 0).any(axis=1)
        if not kept.any():
            raise ConfigError(
                f"no completion of the reference for any of {len(kept)} prompts has a score other than 0, and "
                "algorithm.drop_unsolved leaves these out: give easier prompts, or raise algorithm.reference_samples"
            )
        shares = None
        if self._shares is not None:
            ends = np.cumsum([count for count, _ in self._shares])
            counts = [int(kept[end - count : end].sum()) for end, (count, _) in zip(ends, self._shares, strict=True)]
            shares = [(count, weight) for count, (_, weight) in zip(counts, self._shares, strict=True) if count]
        self._order = Pipeline(np.flatnonzero(kept).tolist(), self._batch_size, *self._order_settings, shares)

    def get_state(self) -> dict[str, Any]:
        """The position, as a JSON-able dictionary; the same on every process."""
        return self._known.get_state()

    def get_arrays(self) -> dict[str, Any]:
        """The scores as the tree of arrays that a checkpoint holds, by name; the same on every process."""
        return {SCORES: {"scores": self._scores}} if self.known else {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the position and the scores in `state`; raises ConfigError for those of other prompts, and for
        none."""
        scores = state.get("scores")
        if scores is None or len(scores) != len(self.examples):
            had = "no scores of the reference" if scores is None else f"those of {len(scores)} prompts"
            raise ConfigError(
                f"the checkpoint has {had}, and this run reads them of {len(self.examples)}: go on with the data and "
                "the algorithm.advantage that it had, or start a new output_dir"
            )
        self.give(np.asarray(scores, np.float32))
        self._known.set_state(dict(state))

    @property
    def _known(self) -> Pipeline:
        assert self._order is not None, "scores are given before the first batch"
        return self._order


def column_scores(examples: Sequence[Row]) -> np.ndarray:
    """The column `reference_scores` of rows as `[len(examples),n]` float32, NaN behind the scores of those with fewer.

    A number stands for one score, None in a list for a completion without one. Raises ConfigError for a row without the
    column, or with something else.
    """
    rows = []
    for place, row in enumerate(examples):
        given = row.get(SCORES)
        scores = list(given) if isinstance(given, list | tuple | np.ndarray) else [] if given is None else [given]
        try:
            rows.append([np.nan if score is None else float(score) for score in scores])
        except (TypeError, ValueError):
            rows.append([])
        if not rows[-1]:
            raise ConfigError(
                f"row {place} has {SCORES} = {given!r:.80}: it takes the scores of the reference's completions of its "
                "prompt, a list of numbers, or one number, its optimal value"
            )
    width = max(map(len, rows))
    return np.array([scores + [np.nan] * (width - len(scores)) for scores in rows], np.float32)
