"""Metrics that reward functions log besides their rewards: joined over rounds of sampling, averaged over processes."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxrl_llm.distributed.processes import gather
from jaxrl_llm.rewards.runner import Logged
from jaxrl_llm.rewards.signatures import RewardError


def join(earlier: Logged, later: Logged, index: np.ndarray, rows: int) -> Logged:
    """The log of the rows that `index` picks from the `rows` of `earlier` followed by those of `later`.

    Columns are picked as the rows are; metrics and totals count whether their rows are picked or not.
    """
    columns = {}
    for name in {**earlier.columns, **later.columns}:
        both = [*earlier.columns.get(name, [None] * rows), *later.columns.get(name, [None] * rows)]
        columns[name] = [both[i] for i in index]
    metrics = {
        name: earlier.metrics.get(name, []) + later.metrics.get(name, [])
        for name in {**earlier.metrics, **later.metrics}
    }
    return Logged(metrics, _summed(earlier.totals, later.totals), columns)


def add_logs(logged: Logged, other: Logged) -> Logged:
    """The metrics and totals of both, without columns."""
    return join(logged._replace(columns={}), other._replace(columns={}), np.zeros(0, int), 0)


def add_totals(logged: Logged, other: Logged) -> Logged:
    """`logged` with the totals of `other` added (what was spent in all); means and columns stay its own."""
    return logged._replace(totals=_summed(logged.totals, other.totals))


def _summed(totals: Mapping[str, float], others: Mapping[str, float]) -> dict[str, float]:
    return {name: totals.get(name, 0.0) + others.get(name, 0.0) for name in {**totals, **others}}


def over_processes(logged: Logged, taken: Iterable[str] = ()) -> dict[str, Any]:
    """The means and totals of a step over all processes, which may have logged under different names.

    Raises RewardError for a name that is among `taken`, those of the run's own metrics.
    """
    sums = {name: [sum(values), len(values)] for name, values in logged.metrics.items() if values}
    means: dict[str, list[float]] = {}
    totals: dict[str, float] = {}
    for process in gather({"sums": sums, "totals": logged.totals}):
        for name, (value, count) in process["sums"].items():
            total, number = means.get(name, [0.0, 0])
            means[name] = [total + value, number + count]
        totals = _summed(totals, process["totals"])
    metrics = {name: value / count for name, (value, count) in means.items()} | totals
    if clash := sorted(metrics.keys() & set(taken)):
        raise RewardError(f"a reward function logs the metric {clash[0]!r}, which is the run's own; rename it")
    return {name: np.float32(value) for name, value in metrics.items()}


def table_value(value: Any) -> Any:
    """The cell of a value in a table of completions: a number, a text, or the JSON of something else."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return value.item() if isinstance(value, np.generic) else json.dumps(value, default=repr)
