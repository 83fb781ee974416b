"""A profile of some training steps: JAX's trace, and a plain table of the seconds that each phase took."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import jax

from jaxrl_llm.config import ConfigError
from jaxrl_llm.training.logging.stopwatch import Stopwatch

FOLDER = "profile"
TABLE = "phases.txt"


class Profiler:
    """A context manager that profiles the steps of `logging.profile_steps`, on process 0.

    Call `begin` and `end` around each step. After the last one `folder/profile` has the trace, which XProf
    (TensorBoard's profile plugin) opens, and phases.txt, which is also given to `show`. Raises ConfigError for steps
    that it cannot read.
    """

    def __init__(self, config, folder: str | Path, watch: Stopwatch, show: Callable[[str], None]):
        steps = profiled_steps(config.logging.profile_steps)
        self.steps = steps if jax.process_index() == 0 else None
        self.folder, self._watch, self._show = Path(folder) / FOLDER, watch, show
        self._from: int | None = None  # the step that the trace began with

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._from is not None:
            jax.profiler.stop_trace()
            self._from = None

    def begin(self, step: int) -> None:
        """Before a step; a run that goes on within the profiled steps traces the rest of them."""
        if self.steps is None or self._from is not None or not self.steps[0] <= step <= self.steps[1]:
            return
        self._from, self._seconds = step, dict(self._watch.totals)
        jax.profiler.start_trace(self.folder)
        self._began = time.perf_counter()

    def end(self, step: int, result: Any = None) -> None:
        """After a step that gives `result`, which is waited for when the step is the last one profiled."""
        if self._from is None or self.steps is None or step < self.steps[1]:
            return
        jax.block_until_ready(result)
        whole = time.perf_counter() - self._began
        jax.profiler.stop_trace()
        phases = {name: x - self._seconds.get(name, 0.0) for name, x in self._watch.totals.items()}
        text = phase_table(phases, whole, self._from, step)
        (self.folder / TABLE).write_text(text, encoding="utf-8")
        self._from = None
        self._show(f"{text}the trace is in {self.folder}")


def profiled_steps(text: str | None) -> tuple[int, int] | None:
    """The first and the last step of `3-5` or `4`, None for None; raises ConfigError for anything else."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise ConfigError(f"logging.profile_steps is {text!r}, but it takes steps from 1 on, as 4 or 3-5")
    return first, last


def phase_table(phases: dict[str, float], whole: float, first: int, last: int) -> str:
    """Lines of the seconds of each phase, longest first, their means and shares; "other" is the rest of `whole`."""
    steps = last - first + 1
    shown = {name: seconds for name, seconds in phases.items() if seconds > 0}
    shown["other"] = max(0.0, whole - sum(shown.values()))
    lines = [f"{'phase':<14}{'seconds':>10}{'a step':>10}{'share':>8}"]
    for name, seconds in [*sorted(shown.items(), key=lambda item: -item[1]), ("all", whole)]:
        lines.append(f"{name:<14}{seconds:>10.3f}{seconds / steps:>10.3f}{seconds / whole:>8.1%}")
    return f"steps {first} to {last}\n" + "\n".join(lines) + "\n"
