"""`Stopwatch`: the seconds that each phase of a step takes, and the sign of life that the watchdog looks for."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Seconds by phase: `with watch("rollout"): ...` adds the time of its block to that phase.

    A phase inside another one is not counted in the outer one, so phases add up to at most the time that passed.
    JAX computes asynchronously: a block must wait for its results (`jax.block_until_ready`) to be charged for them.
    One thread may use it; another may read `phases` and `changed`. The phases of a watch `within` another one are not
    counted there, but are seen as signs of life.
    """

    def __init__(self, within: "Stopwatch | None" = None):
        self.totals: dict[str, float] = defaultdict(float)
        self.phases: list[str] = []  # the phases that are open, the innermost last
        self.changed = time.monotonic()  # when a phase was last entered or left
        self._within = within
        self._since_take: dict[str, float] = defaultdict(float)
        self._inner = 0.0  # seconds of the phases inside the current one

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Times the block, also when it raises."""
        before, self._inner = self._inner, 0.0
        self.phases.append(phase)
        self._sign_of_life()
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self.phases.pop()
            self._sign_of_life()
            self._since_take[phase] += elapsed - self._inner
            self.totals[phase] += elapsed - self._inner
            self._inner = before + elapsed

    def charge(self, phase: str, seconds: float) -> None:
        """Counts `seconds` that have just passed as `phase` and not as the one that is open."""
        self._since_take[phase] += seconds
        self.totals[phase] += seconds
        self._inner += seconds

    def _sign_of_life(self) -> None:
        self.changed = time.monotonic()
        if self._within is not None:
            self._within.changed = self.changed

    def take(self) -> dict[str, float]:
        """The seconds since the last take, as metrics `{"time/<phase>": seconds}`; the next take starts from zero."""
        taken = {f"time/{phase}": seconds for phase, seconds in self._since_take.items()}
        self._since_take.clear()
        return taken
