"""One call of a reward with a batch: its arguments, what it logs, and its results as one number for each completion."""

import inspect
import math
import numbers
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.config.copying import copied
from jaxrl_llm.config.user_code import contained, contained_await, error_text
from jaxrl_llm.config.wording import amount
from jaxrl_llm.rewards.signatures import (
    RewardError,
    RowGrader,
    Sample,
    is_async,
    is_rowwise,
    parameter_names,
    shorten,
    takes_any,
)

SERVICES = ("log_metric", "log_extra", "log_total", "trainer_state", "row_numbers", "prompt_numbers", "batch_memory")
# TRL has no such arguments: a function gets them when it names them, not through its **kwargs.
BY_NAME_ONLY = ("log_total", "row_numbers", "prompt_numbers", "batch_memory")
SCORES = ("score", "reward", "value")  # keys of a mapping's number: verl's, other libraries', a Harmony Grade's


@dataclass
class Log:
    """The log of a reward function: TRL's `log_metric` and `log_extra`, and counts that are summed."""

    metrics: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    columns: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    totals: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def log_metric(self, name: str, value: float) -> None:
        """Log a number; those of one name are averaged over the step."""
        self.metrics[_named("log_metric", name)].append(float(value))

    def log_extra(self, column: str, values: list[Any]) -> None:
        """Add a column, one value for each completion, to the table of completions."""
        if isinstance(values, str | bytes | Mapping | Set):
            raise TypeError(f"log_extra takes a list with a value for each completion, not {shorten(values, 60)}")
        self.columns[_named("log_extra", column)].extend(values)

    def log_total(self, name: str, value: float) -> None:
        """Log a number; those of one name are added up over the step."""
        self.totals[_named("log_total", name)] += float(value)

    def extend(self, other: "Log", columns: bool = True) -> None:
        """Append what `other` holds, with or without its columns."""
        for name, values in list(other.metrics.items()):  # lists: a thread that was left behind may still add to them
            self.metrics[name].extend(values)
        for name, value in list(other.totals.items()):
            self.totals[name] += value
        for name, values in other.columns.items() if columns else ():
            self.columns[name].extend(values)

    def without_columns(self) -> "Log":
        """A copy of its metrics and totals, to which a thread that was left behind adds nothing."""
        log = Log()
        log.extend(self, columns=False)
        return log

    def extend_rows(self, logs: "Mapping[int, Log]", rows: int) -> None:
        """Append the logs of single rows, in the order of rows; a row without a value in a column has None there."""
        for row in sorted(logs):
            self.extend(logs[row], columns=False)
        for name in sorted({name for log in logs.values() for name in log.columns}):
            for row in range(rows):
                values = logs[row].columns.get(name) if row in logs else None
                self.columns[name].extend(values or [None])


@dataclass
class Call:
    """One reward function with its arguments, a list of N values each, and its log.

    The function gets copies of the arguments (see `copied`): what it changes in them, no other function sees.
    A function that calls `sys.exit` or the like has raised LeftError.
    `services` are arguments other than columns and log; `row_numbers` are the rows' indices in the batch,
    `prompt_numbers` those of their prompts (None: not known), and `memory` is the function's own dictionary for this
    batch. Rows of a `rowwise` call are computed one by one.
    """

    name: str
    function: Any
    arguments: Mapping[str, list[Any]]
    services: Mapping[str, Any] = field(default_factory=dict)
    row_numbers: Sequence[int] | None = None
    memory: dict[Any, Any] = field(default_factory=dict)
    log: Log = field(default_factory=Log)
    prompt_numbers: Sequence[int] | None = None

    def __post_init__(self):
        self.rows = len(next(iter(self.arguments.values()), []))
        self.row_numbers = range(self.rows) if self.row_numbers is None else self.row_numbers
        self.is_async = is_async(self.function)
        self.rowwise = is_rowwise(self.function)
        self.keys = range(self.rows if self.rowwise else 1)  # of the call's outcome: rows, or 0 for the whole batch

    def __call__(self) -> Any:
        """The results of all rows of a batch function; a coroutine of them when it is async."""
        offered = {
            "log_metric": self.log.log_metric,
            "log_extra": self.log.log_extra,
            "log_total": self.log.log_total,
            **self.services,
            "row_numbers": self.row_numbers,
            "prompt_numbers": self.prompt_numbers,
            "batch_memory": self.memory,
        }
        names, any_name = parameter_names(self.function), takes_any(self.function)
        taken = {
            name: service
            for name, service in offered.items()
            if name in names or (any_name and name not in BY_NAME_ONLY)
        }
        with contained():
            results = self.function(**taken, **{name: copied(values) for name, values in self.arguments.items()})
        return contained_await(results) if self.is_async else results

    def subset(self, rows: Sequence[int]) -> "Call":
        """The same call with some of its rows, and a log of its own."""
        assert self.row_numbers is not None
        arguments = {name: [values[row] for row in rows] for name, values in self.arguments.items()}
        numbers = [self.row_numbers[row] for row in rows]
        prompts = None if self.prompt_numbers is None else [self.prompt_numbers[row] for row in rows]
        return Call(self.name, self.function, arguments, self.services, numbers, self.memory, prompt_numbers=prompts)

    def run(self, key: int) -> Any:
        """The result of a RowGrader for one row, or the results of a batch function; a coroutine when it is async."""
        if not isinstance(self.function, RowGrader):
            return self()
        values = {name: copied(values[key]) for name, values in self.arguments.items()}
        prompt, completion, ids = (values.pop(name) for name in ("prompts", "completions", "completion_ids"))
        with contained():
            result = self.function.grade(Sample(prompt, completion, ids, values))
        return contained_await(result) if self.is_async else result

    async def run_async(self, key: int, log: Log) -> Any:
        """The result of row `key`, or of the batch, of an async function; also of rowwise functions that are no
        RowGrader, which log to `log`.

        Raises RewardError: a function that is declared `by_row` returned something else than one result.
        """
        if not self.rowwise or isinstance(self.function, RowGrader):
            return await self.run(key)
        call = self.subset([key])
        call.log = log
        results = await call()
        if not _is_list(results) or len(results) != 1:
            raise RewardError(
                f"reward {self.name!r} is called with single rows (by_row), and returned {shorten(results)} for one; "
                "it returns a list of one number"
            )
        return next(iter(results))

    def describe(self, row: int) -> str:
        """The row's arguments, shortened for an error message."""
        return shorten({name: values[row] for name, values in self.arguments.items() if name != "completion_ids"})


def _named(service: str, name: str) -> str:
    """The name that a user's function gave to a service. Raises TypeError for one that is no text."""
    if not isinstance(name, str):
        raise TypeError(f"{service} takes a name that is a text, not {shorten(name, 60)}")
    return name


@dataclass
class Outcome:
    """Results and errors of a call by key (see `Call.keys`); a key that is in neither was late."""

    results: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)

    def missing(self, keys: Sequence[int]) -> list[int]:
        """The keys, of these, that have neither a result nor an error."""
        return [key for key in keys if key not in self.results and key not in self.errors]

    def copy(self) -> "Outcome":
        """The present state; threads that were left behind may go on writing to the original."""
        return Outcome(dict(self.results), dict(self.errors))


class Scores(NamedTuple):
    """float32 [N], NaN for None, and the other entries of mappings by name: one value a completion, None if absent."""

    numbers: np.ndarray
    extras: dict[str, list[Any]]


def read_results(name: str, results: Any, rows: int) -> Scores:
    """The scores of `rows` results, which are numbers, None, mappings with a score, or objects with a `value`.

    NaN counts as None, with a warning. Raises RewardError, naming function and row: results that are not one for each
    row, or no numbers, or infinite.
    """
    if not _is_list(results):
        said = f"reward {name!r} returned {shorten(results)}; it returns a list of {rows} numbers"
        if inspect.isawaitable(results):
            said += ": define it, and what wraps it, by async def"
        raise RewardError(f"{said}: a set has no order" if isinstance(results, Set) else said)
    try:
        with contained():
            results = list(results)  # arrays of JAX show only here what went wrong when they were computed
    except Exception as error:
        raise RewardError(
            f"reward {name!r} returned a {type(results).__name__}, which raised {error_text(error)}"
        ) from error
    if len(results) != rows:
        raise RewardError(
            f"reward {name!r} returned {amount(len(results), 'result')} for {amount(rows, 'completion')}: "
            "return one for each"
        )
    scores, extras, unknown = np.full(rows, np.nan, np.float32), {}, []
    for row, result in enumerate(results):
        value = result
        if isinstance(result, Mapping):
            key = next((key for key in SCORES if key in result), None)
            if key is None:
                raise RewardError(
                    f"reward {name!r} returned {shorten(dict(result))} for row {row}; a mapping holds the number as "
                    "'score'"
                )
            value = result[key]
            for other in result:
                if other != key:
                    extras.setdefault(other, [None] * rows)[row] = result[other]
        elif hasattr(result, "value") and not hasattr(result, "__float__"):
            value = result.value
        if value is not None:
            scores[row] = _number(name, row, value)
            if np.isnan(scores[row]):
                unknown.append(row)
    if unknown:
        more = f" and {len(unknown) - 1} more" if unknown[1:] else ""
        warnings.warn(
            f"reward {name!r} returned NaN for row {unknown[0]}{more}: it counts as None, no reward; return None where "
            "the function does not apply",
            stacklevel=2,
        )
    return Scores(scores, extras)


def _is_list(results: Any) -> bool:
    """True for values in an order; False for a number, a text, a mapping, or a set, whose order is chance."""
    is_scalar = not hasattr(results, "__len__") or getattr(results, "ndim", 1) == 0
    return not is_scalar and not isinstance(results, (str, bytes, bytearray, Mapping, Set))


def mean_extras(name: str, extras: Mapping[str, list[Any]]) -> dict[str, float]:
    """`rewards/<name>/<key>`: the mean of each extra entry that holds numbers, over the rows that have it."""
    means = {}
    for key, values in extras.items():
        present = [value for value in values if value is not None]
        if present and all(isinstance(value, (bool, numbers.Real, np.bool_)) for value in present):
            means[f"rewards/{name}/{key}"] = float(np.mean([float(value) for value in present]))
    return means


def _number(name: str, row: int, value: Any) -> float:
    """A result as a finite number or NaN."""
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        with contained():
            number = float(value)
    except Exception:  # also of a user's own __float__
        number = math.inf
    # Compared after rounding to float32, in which 1e39 is infinite.
    with np.errstate(over="ignore"):
        if not np.isinf(np.float32(number)):
            return number
    raise RewardError(
        f"reward {name!r} returned {shorten(value)} for row {row}; return a finite number, or None where the function "
        "does not apply"
    )
