"""One call of a reward function: its arguments, its log, how it ended, and the errors that name function and row."""

import contextlib
import functools
import inspect
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.config.resolve import ConfigError

SEARCH_SECONDS = 10.0


class RewardError(ConfigError):
    """A reward function that failed, hung, or returned something that is not one number for each completion."""


@dataclass
class Log:
    """What a reward function logs while it runs: TRL's `log_metric` and `log_extra`, and counts that are summed."""

    metrics: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    columns: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    totals: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def log_metric(self, name: str, value: float) -> None:
        """Logs a number; those of one name are averaged over the step."""
        self.metrics[name].append(float(value))

    def log_extra(self, column: str, values: list[Any]) -> None:
        """Adds a column, one value for each completion, to the table of completions."""
        self.columns[column].extend(values)

    def log_total(self, name: str, value: float) -> None:
        """Logs a number; those of one name are added up over the step."""
        self.totals[name] += float(value)

    def services(self) -> dict[str, Callable[..., None]]:
        """The functions a reward function may ask for, by name."""
        return {"log_metric": self.log_metric, "log_extra": self.log_extra, "log_total": self.log_total}

    def join(self, logs: "Mapping[int, Log]", rows: int) -> None:
        """Adds what was logged for single rows; a row without a value in a column has None there."""
        for row in sorted(logs):
            for name, values in logs[row].metrics.items():
                self.metrics[name].extend(values)
            for name, value in logs[row].totals.items():
                self.totals[name] += value
        for name in sorted({name for log in logs.values() for name in log.columns}):
            found = [logs[row].columns.get(name) if row in logs else None for row in range(rows)]
            self.columns[name].extend(value for values in found for value in values or [None])


@dataclass(frozen=True)
class Sample:
    """One completion, as graders with a `grade(sample)` method see it.

    `prompt` and `completion` are text or lists of messages; `columns` are the row's other values of the data set.
    """

    prompt: Any
    completion: Any
    completion_ids: list[int]
    columns: dict[str, Any]

    @property
    def metadata(self) -> dict[str, Any]:
        """The row's other columns (a thread's name for them)."""
        return self.columns

    @property
    def text(self) -> str:
        """The completion's text, of the last message when it is a conversation."""
        return text_of(self.completion)

    @property
    def turns(self) -> list[tuple[str, str]]:
        """(role, content) of every message, the completion last."""
        return _turns(self.prompt, "user") + _turns(self.completion, "assistant")

    def last_content(self) -> str:
        """The completion's text, as a thread calls it."""
        return self.text


def _turns(messages: Any, role: str) -> list[tuple[str, str]]:
    if isinstance(messages, str):
        return [(role, messages)]
    return [(message["role"], message["content"]) for message in messages]


def text_of(completion: Any) -> str:
    """A completion's text: itself, or the content of its last message."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


class RowGrader:
    """A grader that scores one completion at a time: `grade(sample) -> number | None | mapping | awaitable`.

    It may be cut into rows: those that fail or are late do not take the others with them.
    """

    def __init__(self, grade: Callable[[Sample], Any], name: str, needs: tuple[str, ...] = ()):
        self.grade = grade
        self.__name__ = name
        self.needs = needs


class Call:
    """One reward function with the arguments it is called with, `rows` values each, and its log."""

    def __init__(
        self, name: str, function: Any, arguments: Mapping[str, list[Any]], services: Mapping[str, Any] | None = None
    ):
        self.name = name
        self.function = function
        self.arguments = dict(arguments)
        self.services = dict(services or {})  # those that are not the log's
        self.rows = len(next(iter(arguments.values()), []))
        self.log = Log()
        self.memory: dict[Any, Any] = {}  # of the function, for this batch
        self.by_row = isinstance(function, RowGrader)
        self.is_async = is_async(function.grade if self.by_row else function)
        self.one_by_one = takes_rows(function)

    def __call__(self) -> Any:
        """The results for the whole batch (a coroutine of them when the function is async).

        The lists are copied, so that a function that changes them does not change what the next one sees.
        """
        arguments = {name: list(values) for name, values in self.arguments.items()}
        return self._call(arguments, self.log, range(self.rows))

    def row(self, row: int, log: Log | None = None) -> Any:
        """The result for one row: of a row grader, or of a batch of that row alone."""
        if self.by_row:
            return self.function.grade(self.sample(row))
        arguments = {name: [values[row]] for name, values in self.arguments.items()}
        return self._call(arguments, log or Log(), range(row, row + 1))

    async def graded(self, row: int, log: Log) -> Any:
        """The result for one row of an async grader that takes them one by one. Raises RewardError: not one result."""
        found = await self.row(row, log)
        if self.by_row:
            return found
        if not isinstance(found, Collection) or isinstance(found, (str, bytes, Mapping)) or len(found) != 1:
            raise RewardError(f"reward {self.name!r} is called with single rows (by_row), and returned "
                              f"{shorten(found)} for one; it returns a list of one number")  # fmt: skip
        return next(iter(found))

    def without(self, rows: set[int]) -> "Call":
        """The same call with only the rows that are not in `rows`."""
        keep = [row for row in range(self.rows) if row not in rows]
        arguments = {name: [values[row] for row in keep] for name, values in self.arguments.items()}
        return Call(self.name, self.function, arguments, self.services)

    def sample(self, row: int) -> Sample:
        """The row as a grader of single samples sees it."""
        values = {name: values[row] for name, values in self.arguments.items()}
        own = (values.pop(name) for name in ("prompts", "completions", "completion_ids"))
        return Sample(*own, columns=values)

    def shown(self, row: int) -> str:
        """The row's arguments, cut short, for an error message."""
        return shorten({name: values[row] for name, values in self.arguments.items() if name != "completion_ids"})

    def _call(self, arguments: dict[str, list[Any]], log: Log, numbers: range) -> Any:
        offered = {**log.services(), **self.services, "row_numbers": numbers, "batch_memory": self.memory}
        names, takes = parameter_names(self.function), parameters_of(self.function)
        # These are not TRL's: only those that name them get them.
        own = ("log_total", "row_numbers", "batch_memory")
        wanted = {n: service for n, service in offered.items() if n in names or (takes is None and n not in own)}
        return self.function(**{**wanted, **arguments})


def takes_rows(function: Any) -> bool:
    """True when a grader is given rows one by one: it is async, and a row grader or declared `by_row = True`."""
    if isinstance(function, RowGrader):
        return is_async(function.grade)
    declared = function.func if isinstance(function, functools.partial) else function
    return is_async(function) and getattr(declared, "by_row", False) is True


def is_async(function: Any) -> bool:
    """True when calling `function` gives a coroutine."""
    if isinstance(function, functools.partial):
        return is_async(function.func)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 (an instance with an async __call__)
    )


def parameters_of(function: Any) -> Mapping[str, inspect.Parameter] | None:
    """The parameters of a signature that lists them all; None when it takes any keyword, or cannot be read."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    return None if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else parameters


def parameter_names(function: Any) -> tuple[str, ...]:
    """The names of a function's parameters; none when they cannot be read."""
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


@dataclass
class Ended:
    """How a call ended: the results of the batch (of each row, for a row grader), or an error, or the time limit."""

    results: Any = None
    error: Exception | None = None
    late: bool = False
    row_errors: dict[int, Exception] = field(default_factory=dict)
    late_rows: list[int] = field(default_factory=list)


class TimeUpError(Exception):
    """The time limit passed."""


class WorkerDiedError(Exception):
    """The worker process of a call ended in the middle of it."""


def within(seconds: float | None, function: Callable[[], Any]) -> Any:
    """What `function` returns or raises, in a thread that is left behind when it takes more than `seconds`.

    The thread is a daemon: one that never ends does not keep the process alive. Raises TimeUpError.
    """
    outcome: dict[str, Any] = {}

    def work() -> None:
        try:
            outcome["result"] = function()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=work, daemon=True, name="reward")
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeUpError
    if "error" in outcome:
        raise outcome["error"]
    return outcome["result"]


def run(call: Call, timeout: float | None) -> Ended:
    """How a synchronous call ended, in the caller's thread without a time limit, else in one of its own."""
    if call.by_row:
        return _run_rows(call, timeout)
    try:
        return Ended(call() if timeout is None else within(timeout, call))
    except TimeUpError:
        return Ended(late=True)
    except Exception as error:
        return Ended(error=error)


def _run_rows(call: Call, timeout: float | None) -> Ended:
    results: dict[int, Any] = {}
    errors: dict[int, Exception] = {}

    def work() -> None:
        for row in range(call.rows):
            try:
                results[row] = call.row(row)
            except Exception as error:
                errors[row] = error

    with contextlib.suppress(TimeUpError):
        work() if timeout is None else within(timeout, work)
    return rows_ended(call.rows, dict(results), dict(errors))


def rows_ended(rows: int, results: dict[int, Any], errors: dict[int, Exception]) -> Ended:
    """How a row grader ended that has `results` and `errors` of some rows; the others are late."""
    late = [row for row in range(rows) if row not in results and row not in errors]
    return Ended([results.get(row) for row in range(rows)], row_errors=errors, late_rows=late)


def failing_rows(call: Call, error: Exception, run_row: Callable[[int], Any], seconds: float) -> dict[int, Exception]:
    """The rows on which a batch function raises the same kind of error when it is called with each alone.

    Those found in `seconds`; the search stops at a row that takes longer.
    """
    found, deadline = {}, time.monotonic() + seconds
    for row in range(call.rows):
        try:
            within(max(deadline - time.monotonic(), 0.0), functools.partial(run_row, row))
        except TimeUpError:
            break
        except Exception as alone:
            if type(alone) is type(error):
                found[row] = alone
    return found


def too_slow(name: str, timeout: float | None, row: int | None = None, call: Call | None = None) -> RewardError:
    """The error for a function, or a row of it, that was not done in time."""
    where = f" (row {row} was not done: {call.shown(row)})" if call is not None and row is not None else ""
    return RewardError(
        f"reward {name!r} took more than rewards.timeout={timeout} seconds for a batch{where}; find what it waits for, "
        "raise the limit, or say with rewards.on_timeout what such rows get"
    )


def failure(call: Call, error: Exception, row: int | None) -> RewardError:
    """The error for a function that raised, on `row` alone if that is known."""
    where = f"called with rows 0 to {call.rows - 1}" if row is None else f"on row {row} ({call.shown(row)})"
    return RewardError(f"reward {call.name!r} raised {type(error).__name__}: {error}, {where}")


def shorten(value: Any, limit: int = 300) -> str:
    """`repr(value)`, cut to `limit` characters for an error message."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
