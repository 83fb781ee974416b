"""Timing the intervals of one task, in a process of its own. Needs the standard library alone."""

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

MARK = "RESULT "  # before the JSON line that a task prints
INTERVALS = 5
BUSY = 0.2  # cores that other processes may use in an undisturbed interval


class Meter:
    """Wall-clock seconds of intervals, the first of which warms up (compilation, fresh memory) and is kept apart.

    `peak` tells the most GB that were in use so far: on an accelerator, of its memory; else, of the process.
    """

    def __init__(self, least: int | None = None, peak: Callable[[], float] | None = None):
        self.rows: list[dict[str, float]] = []
        self.least, self.peak = least, peak or peak_gb

    def start(self) -> None:
        """The interval begins."""
        self._began, self._busy, self._own = time.perf_counter(), _busy_seconds(), sum(os.times()[:2])

    def stop(self, **more: float) -> None:
        """The interval ends; `more` are numbers to keep with it."""
        wall = time.perf_counter() - self._began
        others = _busy_seconds() - self._busy - (sum(os.times()[:2]) - self._own)
        self.rows.append({"seconds": wall, "others": max(0.0, others / wall), **more})

    def measure(self, function: Callable[[], Any]) -> Any:
        """Calls the function as often as needed, each call an interval; what the last call gives."""
        found = None
        while not self.enough():
            self.start()
            more = found = function()
            self.stop(**(more if isinstance(more, dict) else {}))
        return found

    def enough(self) -> bool:
        """True when no further interval is needed."""
        return len(self.rows) > (self.least or INTERVALS)

    def summary(self) -> dict[str, Any]:
        """Medians of the intervals, all of them, and the peak of memory in GB."""
        counted = self.rows[1:]
        medians = {name: statistics.median(row[name] for row in counted) for name in counted[0]}
        return {
            **medians,
            "first": self.rows[0]["seconds"],
            "intervals": [round(row["seconds"], 4) for row in counted],
            "disturbed": medians["others"] > BUSY,
            "peak_gb": self.peak(),
        }


def peak_gb() -> float:
    """The largest resident memory of this process so far, in GB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def report(result: dict[str, Any]) -> None:
    """Prints the result of a task for the process that started it."""
    print(MARK + json.dumps(result), flush=True)


def result_of(output: str) -> dict[str, Any] | None:
    """What `report` printed, None when it did not."""
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    return json.loads(lines[-1].removeprefix(MARK)) if lines else None


def _busy_seconds() -> float:
    """CPU seconds that the machine has spent so far; 0 where it does not say."""
    try:
        with open("/proc/stat", encoding="ascii") as file:  # noqa: PTH123 (read often)
            user, nice, system, _, _, irq, soft, steal = map(int, file.readline().split()[1:9])
    except OSError:
        return 0.0
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
