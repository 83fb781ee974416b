"""The rewards of a run: from names and functions to one array of numbers for each batch.

A grader is called with a batch, by keyword: `prompts`, `completions`, `completion_ids`, and every column of the data
set except `prompt`, under its own name; it returns one number for each completion, or None where it does not apply. It
may be `async`, and have a `setup()` and a `close()`. Prompts and completions are text, or lists of messages when the
data is conversational. A function without `**kwargs` gets only the columns that it names. It may also ask for
`trainer_state` (with `global_step` and `max_steps`), `log_metric(name, value)` and `log_extra(column, values)`, as in
TRL, and for `log_total(name, value)`, `row_numbers`, the indices of its rows in the batch, `prompt_numbers`, those of
their prompts (None where the caller does not say them), and `batch_memory`, a dictionary that is the same for all of
its calls with rows of the batch. An async grader with the attribute `by_row = True` is called with one row at a time,
as soon as that row has ended. signatures.py lists the other ways in which a reward may be written.
"""

import concurrent.futures
import contextlib
import functools
import inspect
import math
import pickle
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.config.background import EventLoop, TimeUpError
from jaxrl_llm.config.resolve import ConfigError, naming, resolve, resolve_with_options
from jaxrl_llm.config.user_code import contained, error_text
from jaxrl_llm.config.wording import amount
from jaxrl_llm.rewards.built_in import BUILT_IN
from jaxrl_llm.rewards.call import SERVICES, Call, Outcome, Scores, mean_extras, read_results
from jaxrl_llm.rewards.combined import CombinedGrader, call_if_present
from jaxrl_llm.rewards.concurrency import AsyncCall, run_here
from jaxrl_llm.rewards.signatures import RewardError, accepted, as_grader, is_async, is_rowwise, reward_names, shorten
from jaxrl_llm.rewards.workers.pool import Workers, travels

SETUP_SECONDS = 600.0
SEARCH_SECONDS = 10.0  # to find the rows on which a batch function fails
TABLE = ("step", "prompt", "completion", "advantage")  # columns of every table of completions

Columns = Mapping[str, Sequence[Any]]
RewardFunction = Callable[..., Any]
Spec = str | RewardFunction | Sequence[Any]


class TrainerState(NamedTuple):
    """The progress of the run, for reward functions that ask for `trainer_state`.

    `global_step` counts the steps before that of the batch or, in an evaluation, those that were made; where a model is
    measured outside of training it is `max_steps`, that of the configuration.
    """

    global_step: int = 0
    max_steps: int = 0


NO_STEP = TrainerState()


class Logged(NamedTuple):
    """The logs of a batch, by name: numbers to average, sums, and columns of N values each."""

    metrics: dict[str, list[float]]
    totals: dict[str, float]
    columns: dict[str, list[Any]]


NOTHING_LOGGED = Logged({}, {}, {})


class Graded(NamedTuple):
    """The rewards of a batch, float32 [N, F] with NaN where a function said None, and what the functions logged."""

    rewards: np.ndarray
    logged: Logged


def load_rewards(
    specs: Spec | Sequence[Spec],
    weights: Sequence[float] | None = None,
    timeout: float | None = None,
    finish: Callable[[Any], Any] = lambda reward: reward,
    **options: Any,
) -> "Rewards":
    """The rewards for `specs`: a callable, a name, or a (nested) list of them; `options` are those of `Rewards`.

    `finish` gives what stands for each reward that was made, such as a judge whose model the run loads.

    A name is a built-in function ("exact_match"), "module:function", "module.function" or "path/to/file.py:function"
    (of a file alone, its `compute_score`), or a file of OpenAI's grader, "grader.json". It may set options to literals:
    "soft_overlong(max_length=256, cache=64)". A class is instantiated with the options.

    Raises ConfigError: an unknown name, or options the function does not have; RewardError: weights that do not fit.
    """

    def flatten(nested: Any) -> Iterable[str | RewardFunction]:
        if isinstance(nested, str) or callable(nested) or hasattr(nested, "grade"):
            yield nested
        elif isinstance(nested, Iterable):
            for each in nested:
                yield from flatten(each)
        else:
            raise RewardError(f"a reward is a function or a name, not {nested!r}")

    flat = list(flatten(specs))
    names = [spec if isinstance(spec, str) else None for spec in flat]
    return Rewards([finish(_resolve(spec)) for spec in flat], weights, timeout, specs=names, **options)


def load_grader(spec: str | RewardFunction) -> Any:
    """The grader of one specification, in the form in which it is called."""
    return as_grader(_resolve(spec))


def _resolve(spec: str | RewardFunction) -> RewardFunction:
    """The function of a specification with its options bound, or an instance of its class."""
    if not isinstance(spec, str):
        return resolve(spec, BUILT_IN) if callable(spec) else spec
    if spec.endswith(".json"):
        spec = f"openai_grader(grader={spec!r})"
    with naming("rewards.functions"):
        named = f"{spec}:compute_score" if spec.endswith(".py") else spec
        function, options = resolve_with_options(named, BUILT_IN, ("prompts", "completions", "completion_ids"))
    if not callable(function) and not hasattr(function, "grade"):
        raise RewardError(f"rewards.functions: {spec} is {shorten(function, 60)}, which cannot be called")
    if not isinstance(function, type):
        return functools.partial(function, **options) if options else function
    if function is CombinedGrader:
        options["graders"] = [_resolve(each) for each in options.get("graders", ())]
    try:
        inspect.signature(function).bind(**options)
    except TypeError as error:
        raise RewardError(f"the reward {spec!r}: {error}; write {spec.partition('(')[0]}(name=value, ...)") from None
    except ValueError:  # of a class that is written in C, whose signature cannot be read
        pass
    try:
        with contained():
            made = function(**options)
    except ConfigError:
        raise
    except Exception as error:
        raise RewardError(f"the reward {spec!r} cannot be made: {error_text(error)}") from error
    if not callable(made) and not hasattr(made, "grade"):
        raise RewardError(f"the reward {spec!r} is a class, and what it makes, {shorten(made, 60)}, cannot be called")
    return made


def _check_options(name: str, function: RewardFunction) -> None:
    """Raise RewardError for what a built-in function refuses: it does so without any rows too, and now is early."""
    plain = function.func if isinstance(function, functools.partial) else function
    if not inspect.isfunction(plain) or plain not in BUILT_IN.values() or plain is BUILT_IN["environment"]:
        return
    parameters = inspect.signature(function).parameters
    required = [each for each in parameters.values() if each.default is each.empty]
    if any(each.kind is each.KEYWORD_ONLY for each in required):
        return  # an option is missing, which is told with the columns
    columns = [each.name for each in required if each.kind is each.POSITIONAL_OR_KEYWORD]
    if "column" in parameters:  # an option that names one
        columns.append(parameters["column"].default)
    options = function.keywords if isinstance(function, functools.partial) else {}
    try:
        function(**{column: [] for column in columns if column not in options})
    except RewardError:
        raise
    except Exception as error:
        raise RewardError(f"the options of the reward {name!r}: {error_text(error)}") from error


class Rewards:
    """`rewards(prompts, completions, completion_ids, columns)` -> float32 [N, F], NaN where a function said None.

    `names` are the functions' names made unique, in order; `weights` is float32 [F], ones unless given.

    Async functions of a batch run at the same time. With `workers`, the others run in that many processes; without, one
    after the other in the caller's thread, or with `timeout` in a process, for nothing else ends code that holds
    Python's lock. There, built-in functions and those that have no name or cannot travel run in a thread. `timeout` is
    the seconds each function has for a batch; `on_timeout` is what late rows get: "stop" (an error), None or a number;
    `on_error` is what rows get on which a function raises: "stop" (an error) or None.

    Raises RewardError: no function where one is `required`, weights that are not one finite number for each function,
    or a wrong setting.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        weights: Sequence[float] | None = None,
        timeout: float | None = None,
        on_timeout: str | float | None = "stop",
        on_error: str | None = "stop",
        workers: int = 0,
        specs: Sequence[str | None] | None = None,
        required: bool = True,
    ):
        self.functions = tuple(functions)
        self.graders = [as_grader(function) for function in functions]
        self.specs = [None] * len(self.functions) if specs is None else list(specs)
        self.names = reward_names(self.functions)
        if required and not self.names:
            raise RewardError("there is no reward function; name one in rewards.functions, such as exact_match")
        try:
            weights = list(map(float, () if weights is None else weights)) or [1.0] * len(self.names)
        except (TypeError, ValueError):
            raise RewardError(f"rewards.weights is {weights!r}; it is one number for each function") from None
        if len(weights) != len(self.names):
            raise RewardError(
                f"rewards.weights has {amount(len(weights), 'number')} for {amount(len(self.names), 'function')} "
                f"({', '.join(self.names)}); give one for each, or none for all ones"
            )
        if not all(math.isfinite(weight) for weight in weights):
            raise RewardError(f"rewards.weights is {tuple(weights)}; every weight is a finite number")
        self.weights = np.asarray(weights, np.float32)
        if timeout is not None and not timeout > 0:
            raise RewardError(f"rewards.timeout is {timeout}; it is a number of seconds above 0, or none")
        if on_error not in ("stop", "none", None):
            raise RewardError(f"rewards.on_error is {on_error!r}; it is stop or none")
        for name, function in zip(self.names, self.functions, strict=True):
            _check_options(name, function)
        self.timeout, self.on_error = timeout, "stop" if on_error == "stop" else None
        self.on_timeout = None if on_timeout == "none" else on_timeout
        if self.on_timeout not in ("stop", None):
            with contextlib.suppress(TypeError, ValueError):
                self.on_timeout = float(self.on_timeout)
            if not isinstance(self.on_timeout, float) or not math.isfinite(self.on_timeout):
                raise RewardError(
                    f"rewards.on_timeout is {on_timeout!r}; it is stop, none, or the number that late rows get"
                )
        self.loop = EventLoop("async rewards")
        # With a time limit alone those that a name finds: a user's own, which may hang, and none of ours.
        self.in_workers = [
            travels(function)
            and not is_async(grader)
            and (bool(workers) or (timeout is not None and spec is not None and spec.partition("(")[0] not in BUILT_IN))
            for function, grader, spec in zip(self.functions, self.graders, self.specs, strict=True)
        ]
        self.must_travel = bool(workers)
        self.workers = Workers(workers or 1) if any(self.in_workers) else None
        self.set_up = 0  # functions, of which `setup` was called

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Any], columns: Columns
    ) -> np.ndarray:
        """float32 [N, F]; the same as `submit(...).result().rewards`."""
        return self.submit(prompts, completions, completion_ids, columns).result().rewards

    def submit(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Columns,
        state: TrainerState = NO_STEP,
        prompt_numbers: Sequence[int] | None = None,
    ) -> "Pending":
        """Start async functions and worker processes; `.result()` runs the other functions and waits for all.

        `columns` holds a list of N values for each column of the data set; `prompt` is left out. Adjacent rows with the
        same number in `prompt_numbers` are of one prompt; None: those with equal prompts.

        Raises RewardError: a function needs an argument the data does not have, or the inputs differ in length.
        """
        for name, values in (("completions", completions), ("completion_ids", completion_ids)):
            _check_length(name, values, prompts)
        pending = self.open(prompts, columns, state, prompt_numbers)
        for row, (completion, ids) in enumerate(zip(completions, completion_ids, strict=True)):
            pending.give(row, completion, ids)
        pending.start()
        return pending

    def open(
        self,
        prompts: Sequence[Any],
        columns: Columns,
        state: TrainerState = NO_STEP,
        prompt_numbers: Sequence[int] | None = None,
    ) -> "Pending":
        """A batch whose completions are given one by one, then `start()`; otherwise like `submit`.

        Raises RewardError for data with a column whose name rewards use themselves.
        """
        rows = len(prompts)
        inputs = {"prompts": list(prompts), "completions": [None] * rows, "completion_ids": [None] * rows}
        for name in columns:
            if name in inputs or name in SERVICES:
                raise RewardError(f"the data has a column named {name!r}, which rewards use themselves; rename it")
        inputs |= {name: list(values) for name, values in columns.items() if name != "prompt"}
        for name, values in inputs.items():
            _check_length(name, values, prompts)
        if prompt_numbers is not None:
            _check_length("prompt_numbers", prompt_numbers, prompts)
        self.setup()
        services = {"trainer_state": state}
        calls = [
            Call(name, grader, accepted(name, grader, inputs, SERVICES), services, prompt_numbers=prompt_numbers)
            for name, grader in zip(self.names, self.graders, strict=True)
            if rows  # no function is called without any
        ]
        return Pending(self, calls, inputs)

    def check_columns(self, columns: Iterable[str]) -> None:
        """Raises RewardError for a function that needs an argument which data with these columns does not have."""
        inputs: dict[str, list[Any]] = {"prompts": [], "completions": [], "completion_ids": []}
        inputs |= {name: [] for name in columns if name != "prompt"}
        for name, grader in zip(self.names, self.graders, strict=True):
            accepted(name, grader, inputs, SERVICES)

    @property
    def takes_rows(self) -> bool:
        """True when there is an async grader of single rows, which can start before the last row has ended."""
        return any(is_async(grader) and is_rowwise(grader) for grader in self.graders)

    def setup(self) -> None:
        """Call `setup()` of every function that has one, once; `submit` does it too."""
        while self.set_up < len(self.functions):
            self._call(self.set_up, "setup")
            self.set_up += 1

    def close(self) -> None:
        """Call `close()` of every function that has one and was set up, and end worker processes and the event loop.

        All of it is done, also where one raises: the error of the last that does.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self.loop.close)
            if self.workers is not None:
                stack.callback(self.workers.close)
            for index in reversed(range(self.set_up)):
                stack.callback(self._call, index, "close")
            self.set_up = 0

    def _call(self, index: int, method: str) -> None:
        name = self.names[index]
        try:
            self.loop.run(call_if_present(self.functions[index], method), SETUP_SECONDS)
        except TimeUpError:
            raise RewardError(f"{method}() of reward {name!r} took more than {SETUP_SECONDS:g} seconds") from None
        except Exception as error:
            raise RewardError(f"{method}() of reward {name!r} raised {error_text(error)}") from error


class Pending:
    """A batch that is being graded: `give` it every row, then `start()`; `result()` waits for the rewards.

    Async graders of single rows start with each row as it is given, the others with `start`. `inputs` are the
    arguments of all calls, by name, whose completions are still missing.
    """

    def __init__(self, rewards: Rewards, calls: list[Call], inputs: dict[str, list[Any]]):
        self.rewards, self.calls, self.inputs = rewards, calls, inputs
        self.asynchronous = {i: AsyncCall(rewards.loop, c, rewards.timeout) for i, c in enumerate(calls) if c.is_async}
        self.sent = [i for i in range(len(calls)) if rewards.in_workers[i]]
        self.from_workers: concurrent.futures.Future[list[Outcome]] | None = None

    def give(self, row: int, completion: Any, ids: Sequence[int]) -> None:
        """Take the completion of a row, and its token ids; async functions of single rows start on it."""
        self.inputs["completions"][row], self.inputs["completion_ids"][row] = completion, ids
        for call in self.asynchronous.values():
            call.give(row)

    def start(self) -> None:
        """Start async functions and workers, once every row is given; time limits count from here."""
        for call in self.asynchronous.values():
            call.start()
        if not self.rewards.must_travel:
            self.sent = [i for i in self.sent if _travels(self.calls[i].arguments)]
        if self.rewards.workers is not None and self.sent:
            work = [(self.calls[i], self.rewards.specs[i]) for i in self.sent]
            self.from_workers = self.rewards.workers.start(work, self.rewards.timeout)

    def result(self) -> Graded:
        """The rewards and what was logged with them.

        Raises RewardError: a function raised (the cause is chained, and the first row it fails on alone is named) or
        ran past the time limit, where the settings say to stop; it returned a number of results that is not N, or a
        result that is not a finite number or None.
        """
        outcomes: dict[int, Outcome] = {}
        for index, call in enumerate(self.calls):
            if index not in self.asynchronous and index not in self.sent:
                outcomes[index] = run_here(call, self.rewards.timeout)
        outcomes |= {index: call.outcome() for index, call in self.asynchronous.items()}
        if self.from_workers is not None:
            outcomes |= dict(zip(self.sent, self.from_workers.result(), strict=True))
        rewards = np.empty((len(self.inputs["prompts"]), len(self.rewards.names)), np.float32)
        logged = Logged({}, {}, {})
        for index, call in enumerate(self.calls):
            scores = self._scores(index, outcomes[index])
            rewards[:, index] = scores.numbers
            _collect(logged, call, scores, (*TABLE, *self.rewards.names))
        return Graded(rewards, logged)

    def _scores(self, index: int, outcome: Outcome) -> Scores:
        """The scores of a call, with what the settings say for rows that failed or are late."""
        settings, call = self.rewards, self.calls[index]
        every_row = range(call.rows)
        if call.rowwise:
            for row, error in sorted(outcome.errors.items()):
                self._fail(call, error, row)
            results = [outcome.results.get(row) for row in every_row]
            late = outcome.missing(every_row)
        elif outcome.errors:
            return self._scores_without_failing(index, outcome.errors[0])
        else:
            results = outcome.results.get(0, [None] * call.rows)
            late = [] if outcome.results else list(every_row)
        if late:
            which = f" (row {late[0]} was not done: {call.describe(late[0])})" if call.rowwise else ""
            message = (
                f"reward {call.name!r} took more than rewards.timeout={settings.timeout} seconds for a batch{which}; "
                "find what it waits for, raise the limit, or say with rewards.on_timeout what such rows get"
            )
            if settings.on_timeout == "stop":
                raise RewardError(message)
            warnings.warn(message, stacklevel=2)
            if not call.rowwise:
                call.log = call.log.without_columns()  # it broke off: they lack rows
            call.log.log_total(f"rewards/{call.name}/timeouts", len(late))
            for row in late:
                results[row] = settings.on_timeout
        return read_results(call.name, results, call.rows)

    def _scores_without_failing(self, index: int, error: Exception) -> Scores:
        """The scores of the rows on which a batch function does not raise, NaN for the others.

        The rows on which it fails are those on which it raises the same kind of error when it is called with each
        alone; the search ends at a row that takes too long.
        """
        settings, call = self.rewards, self.calls[index]
        seconds = min(settings.timeout or SEARCH_SECONDS, SEARCH_SECONDS)
        failing: set[int] = set()
        if not isinstance(error, ConfigError):  # which names its row already
            deadline = time.monotonic() + seconds
            for row in range(call.rows):
                alone = self._again(index, call.subset([row]), max(deadline - time.monotonic(), 0.0))
                if alone.missing([0]):
                    break
                if type(alone.errors.get(0)) is type(error):
                    failing.add(row)
        self._fail(call, error, min(failing, default=None), len(failing) or call.rows)
        kept = [row for row in range(call.rows) if row not in failing]

        def spread(columns: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
            by_row = {name: dict(zip(kept, values, strict=True)) for name, values in columns.items()}
            return {name: [values.get(row) for row in range(call.rows)] for name, values in by_row.items()}

        if failing and kept:
            rest = call.subset(kept)
            outcome = self._again(index, rest, settings.timeout)
            if outcome.results:
                scores = read_results(call.name, outcome.results[0], rest.rows)
                numbers = np.full(call.rows, np.nan, np.float32)
                numbers[kept] = scores.numbers
                for column, values in rest.log.columns.items():
                    _check_extra(rest, column, values)
                # The log is that of the call which gave the scores: one that broke off has logged the same rows before.
                rest.log.log_total(f"rewards/{call.name}/errors", len(failing))
                call.log = replace(rest.log, columns=spread(rest.log.columns))
                return Scores(numbers, spread(scores.extras))
            call.log.log_total(f"rewards/{call.name}/errors", rest.rows)
        call.log = call.log.without_columns()  # it broke off: they lack rows
        return read_results(call.name, [None] * call.rows, call.rows)

    def _again(self, index: int, part: Call, seconds: float | None) -> Outcome:
        """The outcome of some rows of a call, where the call ran: a function in a worker may end its process."""
        if part.is_async:
            running = AsyncCall(self.rewards.loop, part, seconds)
            running.start()
            return running.outcome()
        if self.rewards.workers is None or index not in self.sent:
            return run_here(part, seconds)
        return self.rewards.workers.start([(part, self.rewards.specs[index])], seconds).result()[0]

    def _fail(self, call: Call, error: Exception, row: int | None, count: int = 1) -> None:
        """Raise the error of a failed row (None: of the batch), or warn of it and count `count` rows."""
        where = f"called with rows 0 to {call.rows - 1}" if row is None else f"on row {row} ({call.describe(row)})"
        message = f"reward {call.name!r} raised {error_text(error)}, {where}"
        if self.rewards.on_error == "stop":
            raise RewardError(message) from error
        warnings.warn(message, stacklevel=2)
        call.log.log_total(f"rewards/{call.name}/errors", count)


def _collect(logged: Logged, call: Call, scores: Scores, taken: tuple[str, ...]) -> None:
    """Add what a call logged, and the extra entries of its results, to `logged`; column names `taken` are refused."""
    for name, value in mean_extras(call.name, scores.extras).items():
        logged.metrics.setdefault(name, []).append(value)
    for name, values in call.log.metrics.items():
        logged.metrics.setdefault(name, []).extend(values)
    for name, value in call.log.totals.items():
        logged.totals[name] = logged.totals.get(name, 0.0) + value
    logged.columns.update({f"{call.name}/{key}": values for key, values in scores.extras.items()})
    for column, values in call.log.columns.items():
        _check_extra(call, column, values)
        if column in logged.columns or column in taken:
            raise RewardError(f"reward {call.name!r} gave log_extra the column {column!r}, which is taken; rename it")
        logged.columns[column] = list(values)


def _check_extra(call: Call, column: str, values: Sequence[Any]) -> None:
    if len(values) != call.rows:
        raise RewardError(
            f"reward {call.name!r} gave log_extra {amount(len(values), 'value')} of {column!r} for "
            f"{amount(call.rows, 'completion')}; give one for each"
        )


def _travels(arguments: Mapping[str, Any]) -> bool:
    try:
        pickle.dumps(arguments)
    except Exception:
        return False
    return True


def _check_length(name: str, values: Sequence[Any], prompts: Sequence[Any]) -> None:
    if len(values) != len(prompts):
        given, wanted = amount(len(values), "value"), amount(len(prompts), "prompt")
        raise RewardError(f"{name} has {given} for {wanted}; give one for each")
