"""From what a reward function returned to one number for each completion, and what else it says of them."""

import math
import numbers
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.rewards.calls import RewardError, shorten

SCORES = ("score", "reward", "value")  # the key of a mapping's number: verl's, others', a Harmony Grade's


class Scored(NamedTuple):
    """float32 [N], NaN for None, and the other entries of mappings by name: one value a completion, None if absent."""

    numbers: np.ndarray
    extras: dict[str, list[Any]]


def read_results(name: str, results: Any, rows: int) -> Scored:
    """The numbers of `rows` results, which are numbers, None, mappings with a score, or objects with a `value`.

    Raises RewardError, naming function and row: results that are not one for each row, or not finite numbers.
    """
    if (
        isinstance(results, (str, bytes, Mapping))
        or not hasattr(results, "__len__")
        or getattr(results, "ndim", 1) == 0
    ):
        raise RewardError(f"reward {name!r} returned {shorten(results)}; it returns a list of {rows} numbers")
    if len(results) != rows:
        raise RewardError(
            f"reward {name!r} returned {len(results)} results for {rows} completions; return one for each"
        )
    scores, extras = np.full(rows, np.nan, np.float32), {}
    for row, result in enumerate(results):
        value, others = _take_apart(name, row, result)
        if value is not None:
            scores[row] = _number(name, row, value)
        for key, other in others.items():
            extras.setdefault(key, [None] * rows)[row] = other
    return Scored(scores, extras)


def mean_extras(name: str, extras: dict[str, list[Any]]) -> dict[str, float]:
    """`rewards/<name>/<key>`: the mean of each extra entry that holds numbers, over the rows that have it."""
    means = {}
    for key, values in extras.items():
        given = [value for value in values if value is not None]
        if given and all(isinstance(value, (bool, numbers.Real, np.bool_)) for value in given):
            means[f"rewards/{name}/{key}"] = float(np.mean([float(value) for value in given]))
    return means


def _take_apart(name: str, row: int, result: Any) -> tuple[Any, Mapping[str, Any]]:
    """The number of a result, and its other entries."""
    if isinstance(result, Mapping):
        for key in SCORES:
            if key in result:
                return result[key], {other: value for other, value in result.items() if other != key}
        raise RewardError(
            f"reward {name!r} returned {shorten(dict(result))} for row {row}; a mapping holds the number as 'score'"
        )
    if hasattr(result, "value") and not hasattr(result, "__float__"):
        return result.value, {}
    return result, {}


def _number(name: str, row: int, value: Any) -> float:
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    # The comparison is made after rounding to float32, in which 1e39 is infinite.
    with np.errstate(over="ignore"):
        if np.isfinite(np.float32(number)):
            return number
    raise RewardError(
        f"reward {name!r} returned {shorten(value)} for row {row}; return a finite number, or None where the function "
        "does not apply"
    )
