"""Batches of two kinds in one run: the policy's own samples, or the rows of the data."""

import dataclasses
from typing import Any

import numpy as np

from jaxrl_llm.algorithms.random_streams import MIXTURE
from jaxrl_llm.training.offline import OfflineSource
from jaxrl_llm.training.online import OnlineSource
from jaxrl_llm.training.rollouts.experience import Experience
from jaxrl_llm.training.update import State


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedSource(OnlineSource):
    """Samples of the policy with probability `on_policy`, else given rows (GKD's lambda, arXiv 2306.13649).

    A step's kind is drawn from the seed and its number alone, so that a resumed run draws the same.
    """

    offline: OfflineSource
    on_policy: float
    seed: int

    def next(self, state: State, key) -> Experience:
        """The batch of one step, with the metric `teacher/on_policy`, 1 or 0."""
        samples = np.random.default_rng([self.seed, MIXTURE, int(state.step)]).random() < self.on_policy
        experience = super().next(state, key) if samples else self.offline.next(state, key)
        return experience._replace(metrics=experience.metrics | {"teacher/on_policy": float(samples)})

    def get_state(self) -> dict[str, Any]:
        """The numbers that a resumed run needs besides the training state and `get_arrays`."""
        return super().get_state() | {"offline": self.offline.get_state()}

    def set_state(self, state: dict[str, Any], arrays: dict[str, Any]) -> None:
        """Restore what `get_state` and `get_arrays` returned; a run that took no given rows before starts with them."""
        super().set_state(state, arrays)
        if "offline" in state:
            self.offline.set_state(state["offline"], {})
