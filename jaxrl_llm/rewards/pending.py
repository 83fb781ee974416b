"""A batch that is being scored: what runs beside the caller, and what rows get that fail or are late."""

import functools
import warnings
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.rewards.calls import (
    SEARCH_SECONDS,
    Call,
    Ended,
    RewardError,
    WorkerDiedError,
    failing_rows,
    failure,
    run,
    too_slow,
)
from jaxrl_llm.rewards.process_pool import travels
from jaxrl_llm.rewards.results import Scored, mean_extras, read_results

if TYPE_CHECKING:
    from jaxrl_llm.rewards.grader import Rewards


TABLE = ("step", "prompt", "completion", "advantage")  # columns that every table of completions has


class Logged(NamedTuple):
    """What the functions log of a batch, by name: numbers to average, numbers to add up (done), and N values each."""

    metrics: dict[str, list[float]]
    totals: dict[str, float]
    columns: dict[str, list[Any]]


NOTHING_LOGGED = Logged({}, {}, {})


class Graded(NamedTuple):
    """The rewards of a batch: float32 [N, R], NaN where a function said None; and what the functions log."""

    rewards: np.ndarray
    logged: Logged


class Pending:
    """A batch that is being scored: `give` it every row, then `start()`; `result()` waits for the end.

    Graders that take rows one by one start with each as it is given, the others with `start`. `inputs` are the
    arguments of all calls, by name, which hold no completions yet.
    """

    def __init__(self, rewards: "Rewards", calls: list[Call], inputs: dict[str, list[Any]]):
        self.rewards, self.calls, self.inputs = rewards, calls, inputs
        pool = rewards.workers
        self.beside = {i: rewards.loop.begin(call, rewards.timeout) for i, call in enumerate(calls) if call.is_async}
        self.sent = [i for i, call in enumerate(calls) if pool and not call.is_async and travels(rewards.functions[i])]
        self.workers: Future[list[Ended]] | None = None

    def give(self, row: int, completion: Any, ids: Sequence[int]) -> None:
        """Takes the completion of a row and its token ids."""
        self.inputs["completions"][row], self.inputs["completion_ids"][row] = completion, ids
        for index, begun in self.beside.items():
            if self.calls[index].one_by_one:
                begun.add(row)

    def start(self) -> None:
        """Starts what runs beside the caller, once every row is given; limits of time count from here."""
        for begun in self.beside.values():
            begun.start()
        if self.rewards.workers is not None and self.sent:
            work = [(self.calls[i], self.rewards.specs[i]) for i in self.sent]
            self.workers = self.rewards.workers.start(work, self.rewards.timeout)

    def result(self) -> Graded:
        """The rewards and what was logged with them.

        Raises RewardError: a function raised (the cause is chained, and the first row it fails on alone is named) or
        ran past the time limit, where the settings say to stop; it returned a number of results that is not N, or a
        result that is not a finite number or None.
        """
        ended: dict[int, Ended] = {}
        for index, call in enumerate(self.calls):
            if index not in self.beside and index not in self.sent:
                ended[index] = run(call, self.rewards.timeout)
        ended |= {index: begun.result() for index, begun in self.beside.items()}
        if self.workers is not None:
            ended |= dict(zip(self.sent, self.workers.result(), strict=True))
        rows = self.calls[0].rows
        graded = Graded(np.empty((rows, len(self.calls)), np.float32), Logged({}, {}, {}))
        for index, call in enumerate(self.calls):
            scored = self._settle(call, ended[index])
            graded.rewards[:, index] = scored.numbers
            _collect(graded.logged, call, scored, (*TABLE, *self.rewards.names))
        return graded

    def _settle(self, call: Call, ended: Ended) -> Scored:
        """The numbers of a call, with what the settings say for rows that failed or are late."""
        if ended.error is not None:
            return self._without_failing(call, ended.error)
        if ended.late:
            ended = Ended([None] * call.rows, late_rows=list(range(call.rows)))
        results = ended.results
        for row, error in sorted(ended.row_errors.items()):
            self._failed(call, error, row)
        if ended.late_rows:
            first = ended.late_rows[0] if call.by_row or call.one_by_one else None
            slow = too_slow(call.name, self.rewards.timeout, first, call)
            if self.rewards.on_timeout == "stop":
                raise slow
            warnings.warn(str(slow), stacklevel=2)
            call.log.log_total(f"rewards/{call.name}/timeouts", len(ended.late_rows))
            for row in ended.late_rows:
                results[row] = self.rewards.on_timeout
        return read_results(call.name, results, call.rows)

    def _without_failing(self, call: Call, error: Exception) -> Scored:
        """The numbers of the rows on which a batch function does not raise, None for the others."""
        seconds = min(self.rewards.timeout or SEARCH_SECONDS, SEARCH_SECONDS)
        run_row = functools.partial(self._alone, call, seconds)
        # A function that ends its process would end this one; an error of ours says itself where it happened.
        told = isinstance(error, (WorkerDiedError, ConfigError))
        found = {} if told else failing_rows(call, error, run_row, seconds)
        first = min(found, default=None)
        self._failed(call, error, first, rows=len(found) or call.rows)
        values: list[Any] = [None] * call.rows
        rest = call.without(set(found))
        if found and rest.rows:
            if call.is_async:
                begun = self.rewards.loop.begin(rest, self.rewards.timeout)
                begun.start()
                again = begun.result()
            else:
                again = run(rest, self.rewards.timeout)
            if again.error is None and not again.late:
                scored = read_results(call.name, again.results, rest.rows)
                keep = [row for row in range(call.rows) if row not in found]
                call.log.metrics, call.log.columns = (
                    rest.log.metrics,
                    {name: _spread(column, keep, call.rows) for name, column in rest.log.columns.items()},
                )
                numbers = np.full(call.rows, np.nan, np.float32)
                numbers[keep] = scored.numbers
                return Scored(numbers, {key: _spread(v, keep, call.rows) for key, v in scored.extras.items()})
            call.log.log_total(f"rewards/{call.name}/errors", rest.rows)
        return read_results(call.name, values, call.rows)

    def _alone(self, call: Call, seconds: float, row: int) -> Any:
        return self.rewards.loop.run(call.row(row), seconds) if call.is_async else call.row(row)

    def _failed(self, call: Call, error: Exception, row: int | None, rows: int = 1) -> None:
        """Raises the error of a failed row, or warns of it and counts it."""
        told = failure(call, error, row)
        if self.rewards.on_error == "stop":
            raise told from error
        warnings.warn(str(told), stacklevel=2)
        call.log.log_total(f"rewards/{call.name}/errors", rows)


def _spread(values: list[Any], rows: list[int], total: int) -> list[Any]:
    """`values` at `rows` of a list of `total`, None elsewhere."""
    spread: list[Any] = [None] * total
    for row, value in zip(rows, values, strict=True):
        spread[row] = value
    return spread


def _collect(logged: Logged, call: Call, scored: Scored, taken: tuple[str, ...]) -> None:
    """Adds what a call logged, and the extra entries of its results, to `logged`, whose table has columns `taken`."""
    for name, value in mean_extras(call.name, scored.extras).items():
        logged.metrics.setdefault(name, []).append(value)
    for name, values in call.log.metrics.items():
        logged.metrics.setdefault(name, []).extend(values)
    for name, value in call.log.totals.items():
        logged.totals[name] = logged.totals.get(name, 0.0) + value
    logged.columns.update({f"{call.name}/{key}": values for key, values in scored.extras.items()})
    for column, values in call.log.columns.items():
        if len(values) != call.rows:
            raise RewardError(
                f"reward {call.name!r} gave log_extra {len(values)} values of {column!r} for {call.rows} completions; "
                "give one for each"
            )
        if column in logged.columns or column in taken:
            raise RewardError(f"reward {call.name!r} gave log_extra the column {column!r}, which is taken; rename it")
        logged.columns[column] = list(values)
