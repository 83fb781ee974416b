"""A profile of some training steps: JAX's trace, and a plain table of the seconds that each phase took."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import jax

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.wording import amount
from jaxrl_llm.training.logging.stopwatch import Stopwatch

FOLDER = "profile"
TABLE = "phases.txt"


class Profiler:
    """A context manager that profiles the first and the last of `steps` and those between, or nothing if it is None.

    Call `begin` and `end` around each step. After the last one `folder/profile` has the trace, which XProf
    (TensorBoard's profile plugin) opens, and phases.txt, which is also given to `show`.
    """

    def __init__(
        self, steps: tuple[int, int] | None, folder: str | Path, watch: Stopwatch, show: Callable[[str], None]
    ):
        self.steps = steps
        self.folder, self._watch, self._show = Path(folder) / FOLDER, watch, show
        self._first: int | None = None  # the first step of the trace, while it is recorded

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._first is not None:
            jax.profiler.stop_trace()
            self._first = None

    def begin(self, step: int) -> None:
        """Starts the trace before its first step; a run that is resumed among the profiled steps traces the rest."""
        if self.steps is None or self._first is not None or not self.steps[0] <= step <= self.steps[1]:
            return
        self._first, self._seconds = step, dict(self._watch.totals)
        jax.profiler.start_trace(self.folder)
        self._began = time.perf_counter()

    def end(self, step: int, result: Any = None) -> None:
        """Ends the trace after its last step, once `result`, the arrays of that step, is computed."""
        if self._first is None or self.steps is None or step < self.steps[1]:
            return
        jax.block_until_ready(result)
        seconds = time.perf_counter() - self._began
        jax.profiler.stop_trace()
        phases = {name: x - self._seconds.get(name, 0.0) for name, x in self._watch.totals.items()}
        text = phase_table(phases, seconds, self._first, step)
        (self.folder / TABLE).write_text(text, encoding="utf-8")
        self._first = None
        self._show(f"{text}the trace is in {self.folder}")


def steps_here(text: str | None, process: int) -> tuple[int, int] | None:
    """The steps of `profiled_steps` that this process profiles, or None where it is not that `process`.

    Raises ConfigError for steps that cannot be read, and for a process that the run does not have.
    """
    steps, count = profiled_steps(text), jax.process_count()
    if steps is not None and process >= count:
        raise ConfigError(
            f"logging.profile_process is {process}, but the run has {amount(count, 'process', 'processes')}, numbered "
            "from 0"
        )
    return steps if process == jax.process_index() else None


def profiled_steps(text: str | None) -> tuple[int, int] | None:
    """The first and the last step of a text such as `3-5` or `4`, or None for None; raises ConfigError for others."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise ConfigError(f"logging.profile_steps is {text!r}, but it takes steps from 1 on, as 4 or 3-5")
    return first, last


def phase_table(phases: dict[str, float], total: float, first: int, last: int) -> str:
    """Lines of the seconds of each phase, longest first, their means and shares; "other" is the rest of `total`."""
    steps = last - first + 1
    shown = {name: seconds for name, seconds in phases.items() if seconds > 0}
    shown["other"] = max(0.0, total - sum(shown.values()))
    lines = [f"{'phase':<14}{'seconds':>10}{'a step':>10}{'share':>8}"]
    for name, seconds in [*sorted(shown.items(), key=lambda item: -item[1]), ("all", total)]:
        lines.append(f"{name:<14}{seconds:>10.3f}{seconds / steps:>10.3f}{seconds / total:>8.1%}")
    return f"steps {first} to {last}\n" + "\n".join(lines) + "\n"
