"""What reward functions log beside their numbers: joined over rounds of sampling, and averaged over all processes."""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxrl_llm.distributed.processes import gather
from jaxrl_llm.rewards.runner import Logged
from jaxrl_llm.rewards.signatures import RewardError


def join(held: Logged, fresh: Logged, index: np.ndarray, rows: int) -> Logged:
    """What was logged with the rows that `index` picks from those of `held`, `rows` of them, and then of `fresh`.

    Numbers count whether their rows are picked or not.
    """
    columns = {
        name: [[*held.columns.get(name, [None] * rows), *fresh.columns.get(name, [None] * rows)][i] for i in index]
        for name in {**held.columns, **fresh.columns}
    }
    metrics = {
        name: held.metrics.get(name, []) + fresh.metrics.get(name, []) for name in {**held.metrics, **fresh.metrics}
    }
    totals = {
        name: held.totals.get(name, 0.0) + fresh.totals.get(name, 0.0) for name in {**held.totals, **fresh.totals}
    }
    return Logged(metrics, totals, columns)


def add_totals(held: Logged, more: Logged) -> Logged:
    """`held` with the totals of `more` added to its own: what was spent in all. Means and columns stay its own."""
    totals = {name: held.totals.get(name, 0.0) + more.totals.get(name, 0.0) for name in {**held.totals, **more.totals}}
    return held._replace(totals=totals)


def over_processes(logged: Logged, taken: Iterable[str] = ()) -> dict[str, Any]:
    """The means and totals of a step over all processes, which may have logged under different names.

    Raises RewardError for a name that is among `taken`, those of the run's own metrics.
    """
    own = {"means": {n: [sum(v), len(v)] for n, v in logged.metrics.items() if v}, "totals": logged.totals}
    means: dict[str, list[float]] = {}
    totals: dict[str, float] = {}
    for part in gather(own):
        for name, (value, count) in part["means"].items():
            old = means.get(name, [0.0, 0])
            means[name] = [old[0] + value, old[1] + count]
        for name, value in part["totals"].items():
            totals[name] = totals.get(name, 0.0) + value
    found = {name: value / count for name, (value, count) in means.items()} | totals
    if clash := sorted(found.keys() & set(taken)):
        raise RewardError(f"a reward function logs the metric {clash[0]!r}, which is the run's own; rename it")
    return {name: np.float32(value) for name, value in found.items()}


def table_value(value: Any) -> Any:
    """A value as a table of completions holds it: a number, a text, or the JSON of something else."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return value.item() if isinstance(value, np.generic) else json.dumps(value, default=repr)
