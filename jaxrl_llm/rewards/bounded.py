"""Calls that may run for ever, such as a regular expression's, in processes that are killed when late.

Neither a thread nor a signal ends code that holds the interpreter's lock.
"""

import atexit
import functools
import os
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.rewards.call import Call
from jaxrl_llm.rewards.process_pool import Workers

LATE = object()  # the result of a row that was not done in time


def run_bounded(name: str, spec: str, arguments: dict[str, list[Any]], seconds: float) -> list[Any]:
    """The results of the function `spec` ("module:function") for the rows of `arguments`, LATE where it takes too long.

    Rows have `seconds` together at first, and each alone when they are late. Raises the error of the first row on
    which the function fails.
    """
    rows, workers = range(len(next(iter(arguments.values())))), _workers()
    results: list[Any] = [LATE] * len(rows)

    def run(parts: Sequence[Sequence[int]]) -> None:
        inputs = [{key: [values[row] for row in part] for key, values in arguments.items()} for part in parts]
        with workers.lock:
            outcomes = workers.run([(Call(name, None, each), spec) for each in inputs], seconds)
        for part, outcome in zip(parts, outcomes, strict=True):
            for error in outcome.errors.values():
                raise error
            for row, result in zip(part, outcome.results.get(0, [LATE] * len(part)), strict=True):
                results[row] = result

    size = max(-(-len(rows) // workers.count), 1)
    run([rows[start : start + size] for start in rows[::size]])
    if size > 1:
        run([(row,) for row in rows if results[row] is LATE])
    return results


@functools.cache
def _workers() -> Workers:
    workers = Workers(min(os.cpu_count() or 1, 4))
    atexit.register(workers.close)
    return workers
