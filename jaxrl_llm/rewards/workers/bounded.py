"""Calls that may run for ever, such as a regular expression's, in processes that are killed when late.

Neither a thread nor a signal ends code that holds the interpreter's lock. The processes read what a model wrote, so
they give up what they have no use for (`process.put_walls_up`).
"""

import atexit
import functools
import math
import os
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm.config.background import TimeUpError
from jaxrl_llm.rewards.call import Call
from jaxrl_llm.rewards.concurrency import DEADLINE
from jaxrl_llm.rewards.workers.pool import WorkerDiedError, Workers

LATE = object()  # the result of a row that was not done in time, or with the memory that there is
MOST_ROWS = 64  # of one task, which is begun again row by row when one of them is late


def scores_in_time(
    name: str, spec: str, arguments: dict[str, list[Any]], seconds: float, late: Callable[[int, str], str]
) -> list[Any]:
    """The results of `run_bounded`; where a row is late 0.0, with the warning `late(row, "takes more than ...")`."""
    results = run_bounded(name, spec, arguments, seconds)
    took = f"takes more than {seconds:g} seconds, or too much memory"
    for row, result in enumerate(results):
        if result is LATE:
            warnings.warn(f"{name}: {late(row, took)}: it scores 0", stacklevel=3)
    return [0.0 if result is LATE else result for result in results]


def run_bounded(name: str, spec: str, arguments: dict[str, list[Any]], seconds: float) -> list[Any]:
    """The results of the function `spec` ("module:function") for the rows of `arguments`, LATE where it takes too long.

    At most MOST_ROWS rows have `seconds` together at first, and each alone when they are late; a row that runs out of
    memory or ends its process is late too. Raises the error of the first row on which the function fails otherwise, and
    TimeUpError at the deadline of the reward that asks.
    """
    rows = range(len(next(iter(arguments.values()))))
    if not rows:
        return []
    workers, results, deadline = _workers(), [LATE] * len(rows), DEADLINE.get()

    def run(parts: Sequence[Sequence[int]]) -> None:
        inputs = [{key: [values[row] for row in part] for key, values in arguments.items()} for part in parts]
        left = deadline - time.monotonic()
        if not workers.lock.acquire(timeout=-1 if math.isinf(left) else max(left, 0.0)):
            raise TimeUpError
        try:
            outcomes = workers.run([(Call(name, None, each), spec) for each in inputs], seconds, deadline)
        finally:
            workers.lock.release()
        if time.monotonic() >= deadline:
            raise TimeUpError
        for part, outcome in zip(parts, outcomes, strict=True):
            for error in outcome.errors.values():
                if not isinstance(error, (WorkerDiedError, MemoryError)):
                    raise error
            for row, result in zip(part, outcome.results.get(0, [LATE] * len(part)), strict=True):
                results[row] = result

    size = max(min(-(-len(rows) // workers.count), MOST_ROWS), 1)
    run([rows[start : start + size] for start in rows[::size]])
    if size > 1:
        run([(row,) for row in rows if results[row] is LATE])
    return results


@functools.cache
def _workers() -> Workers:
    workers = Workers(min(os.cpu_count() or 1, 4), walled=True)
    atexit.register(workers.close)
    return workers
