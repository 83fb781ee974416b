"""Prompts by difficulty: `Curriculum`, a pipeline that passes over prompts that are nearly always or never solved."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_llm.data.pipeline import Pipeline, WithoutArrays, local_slice


@dataclass(frozen=True)
class CurriculumSpec:
    """The settings `data.curriculum_*`: when a prompt is retired as too easy or too hard, and how often it is tried
    again."""

    easy: float | None  # success rate from which on a prompt is retired
    hard: float | None  # and up to which
    revisit: float  # share of the turns of a retired prompt in which it is taken all the same
    visits: int  # before a prompt may be retired
    decay: float  # weight of the rate before in the running rate


class Curriculum(WithoutArrays):
    """An endless, resumable iterator over batches, as `Pipeline`, that learns how often each prompt is solved.

    Prompts come in the order of `Pipeline`. One whose running success rate is at least `easy` or at most `hard` is
    retired: its turn is passed over, except in a share `revisit` of them, drawn from the seed and the turn, in which it
    may come back. Where a whole epoch is passed over, its first prompts are taken. After each batch `observe` gets the
    success of its prompts: rate = decay * rate + (1 - decay) * success. The state is the position and the rates, the
    same on every process.
    """

    def __init__(
        self,
        examples: Sequence[Any],
        batch_size: int,
        spec: CurriculumSpec,
        seed: int = 0,
        shuffle: bool = True,
        process_index: int = 0,
        process_count: int = 1,
        shares: Sequence[tuple[int, float]] | None = None,
    ):
        self._examples, self._batch_size, self._spec, self._seed = examples, batch_size, spec, seed
        self._local = local_slice(batch_size, process_index, process_count)
        self._order = Pipeline(range(len(examples)), 1, seed, shuffle, shares=shares)
        self._rates: dict[int, tuple[float, int]] = {}  # of the prompts seen: running rate, visits
        self._batch: list[int] = []
        self._passed = 0
        self._draws: tuple[int, np.ndarray] = (-1, np.zeros(0))

    def __iter__(self) -> "Curriculum":
        return self

    def __next__(self) -> list[Any]:
        batch: list[int] = []
        passed: list[int] = []  # since one was taken
        while len(batch) < self._batch_size:
            turn = self._order.position
            index = next(self._order)[0]
            if self.pool(index) == "normal" or self._is_revisited(turn):
                batch.append(index)
                passed = []
            else:
                passed.append(index)
                self._passed += 1
            if len(passed) == len(self._examples):
                batch, passed = (batch + passed)[: self._batch_size], []
        self._batch = batch
        return [self._examples[index] for index in batch[self._local]]

    def pool(self, index: int) -> str:
        """The pool of a prompt, by its place in the data: easy, hard or normal."""
        rate, visits = self._rates.get(index, (math.nan, 0))
        spec = self._spec
        if visits < spec.visits:
            return "normal"
        if spec.easy is not None and rate >= spec.easy:
            return "easy"
        return "hard" if spec.hard is not None and rate <= spec.hard else "normal"

    def observe(self, success: Sequence[float]) -> None:
        """Update the rates by the success, 0 to 1, of each prompt of the last batch over all processes; NaN is none."""
        for index, new in zip(self._batch, success, strict=True):
            if not math.isnan(new):
                rate, visits = self._rates.get(index, (new, 0))
                self._rates[index] = (self._spec.decay * rate + (1 - self._spec.decay) * new, visits + 1)

    def metrics(self) -> dict[str, float]:
        """`prompts/...`: shares of all prompts that are retired, mean rate of those seen, turns passed over."""
        pools = [self.pool(index) for index in self._rates]
        count = len(self._examples)
        shares = {f"prompts/{name}": pools.count(name) / count for name in ("easy", "hard")}
        rates = [rate for rate, _ in self._rates.values()]
        passed, self._passed = self._passed, 0
        return shares | {
            "prompts/success_rate": float(np.mean(rates)) if rates else math.nan,
            "prompts/passed_over": float(passed),
        }

    @property
    def epochs(self) -> float:
        """The turns of prompts, passed over or not, as a multiple of all there are."""
        return self._order.epochs

    def get_state(self) -> dict[str, Any]:
        """The position and the rates, as a JSON-able dictionary; the same on every process."""
        return {**self._order.get_state(), "rates": {str(index): list(x) for index, x in self._rates.items()}}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from `state`, which may be that of a `Pipeline` over the same data."""
        self._order.set_state(state)
        self._rates = {int(index): (rate, visits) for index, (rate, visits) in state.get("rates", {}).items()}

    def _is_revisited(self, turn: int) -> bool:
        epoch, place = divmod(turn, len(self._examples))
        if self._draws[0] != epoch:
            self._draws = epoch, np.random.default_rng((self._seed, epoch)).random(len(self._examples))
        return bool(self._draws[1][place] < self._spec.revisit)
