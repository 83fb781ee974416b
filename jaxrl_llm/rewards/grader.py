r"""The rewards of a run: from what the configuration or the user names to one array of numbers for each batch.

A grader is called with a batch, by keyword: `prompts`, `completions`, `completion_ids`, and every column of the data
set except `prompt`, under its own name; it returns one number for each completion, or None where it does not apply. It
may be `async`, and have a `setup()` and a `close()`. Prompts and completions are text, or lists of messages when the
data is conversational. A function without `**kwargs` gets only what it names. Besides, it may ask for `trainer_state`
(with `global_step` and `max_steps`), `log_metric(name, value)` and `log_extra(column, values)`, as in TRL, and
`log_total(name, value)`, `row_numbers`, the places of its rows in the batch, and `batch_memory`, a dictionary that is
the same for all of its calls with rows of the batch. An async grader with the attribute
`by_row = True` is called with one row at a time, as soon as that has ended. adapters.py lists the other ways a reward
may be written.
"""

import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxrl_llm.config.resolve import resolve, resolve_with_options
from jaxrl_llm.rewards.built_in import BUILT_IN
from jaxrl_llm.rewards.calls import Call, RewardError, TimeUpError, takes_rows
from jaxrl_llm.rewards.combined import CombinedGrader, call_if_there
from jaxrl_llm.rewards.loop import Loop
from jaxrl_llm.rewards.pending import NOTHING_LOGGED as NOTHING_LOGGED
from jaxrl_llm.rewards.pending import Graded as Graded
from jaxrl_llm.rewards.pending import Logged as Logged
from jaxrl_llm.rewards.pending import Pending
from jaxrl_llm.rewards.process_pool import Workers
from jaxrl_llm.rewards.signatures import accepted, as_grader, reward_name

SERVICES = ("log_metric", "log_extra", "log_total", "trainer_state", "row_numbers", "batch_memory")
SETUP_SECONDS = 600.0


class Grader(Protocol):
    """What scores completions; objects may also have `setup()` and `close()`, async or not."""

    def __call__(
        self, *, prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **columns: Any
    ) -> Sequence[float | None] | Awaitable[Sequence[float | None]]:
        """One number for each completion, or None where the grader does not apply."""
        ...


RewardFunction = Callable[..., Any]
Spec = str | RewardFunction | Sequence[Any]


class TrainerState(NamedTuple):
    """How far the run is, for reward functions that ask for `trainer_state`."""

    global_step: int = 0
    max_steps: int = 0


class Rewards:
    """`rewards(prompts, completions, completion_ids, columns)` -> float32 [N, R], NaN where a function said None.

    `names` are the functions' names made unique, in order; `weights` is float32 [R], ones unless given.

    Async functions of a batch run at the same time. With `workers`, the others run in that many processes; without,
    one after the other in the caller's thread, or with `timeout` in a thread of their own. `timeout` is the seconds
    each function has for a batch; `on_timeout` says what rows get that are late: "stop" (an error), None or a number;
    `on_error` what rows get on which a function raises: "stop" (an error) or None.

    Raises RewardError: no function, or weights that are not one finite number for each function.
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
    ):
        self.functions = tuple(functions)
        self.graders = [as_grader(function) for function in functions]
        self.specs = [None] * len(self.functions) if specs is None else list(specs)
        self.names = _unique([reward_name(function) for function in self.functions])
        self.weights = _weights(weights, self.names)
        if timeout is not None and not timeout > 0:
            raise RewardError(f"rewards.timeout is {timeout}; it is a number of seconds above 0, or none")
        self.timeout, self.on_timeout, self.on_error = timeout, _on_timeout(on_timeout), _on_error(on_error)
        self.loop = Loop()
        self.workers = Workers(workers) if workers else None
        self.is_set_up = False

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
    ) -> np.ndarray:
        """float32 [N, R]; what `submit(...).result().rewards` is."""
        return self.submit(prompts, completions, completion_ids, columns).result().rewards

    def submit(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        state: TrainerState = TrainerState(),  # noqa: B008 (immutable)
    ) -> Pending:
        """Starts what runs beside the caller (async functions and worker processes); `.result()` does the rest.

        `columns` holds a list of N values for each column of the data set; `prompt` is left out.

        Raises RewardError: a function needs an argument the data does not have, or the inputs differ in length.
        """
        _inputs(prompts, completions, completion_ids, columns)
        pending = self.open(prompts, columns, state)
        for row, (completion, ids) in enumerate(zip(completions, completion_ids, strict=True)):
            pending.give(row, completion, ids)
        pending.start()
        return pending

    def open(
        self,
        prompts: Sequence[Any],
        columns: Mapping[str, Sequence[Any]],
        state: TrainerState = TrainerState(),  # noqa: B008 (immutable)
    ) -> Pending:
        """A batch whose completions are given one by one, then `start()`; otherwise like `submit`."""
        self.setup()
        inputs = _inputs(prompts, [None] * len(prompts), [None] * len(prompts), columns)
        calls = [
            Call(name, grader, accepted(name, grader, inputs, SERVICES), {"trainer_state": state})
            for name, grader in zip(self.names, self.graders, strict=True)
        ]
        return Pending(self, calls, inputs)

    @property
    def takes_rows(self) -> bool:
        """True when there is a grader for which giving rows early makes a difference."""
        return any(map(takes_rows, self.graders))

    def setup(self) -> None:
        """Calls `setup()` of every function that has one, once; `submit` does it too."""
        if not self.is_set_up:
            self._call_all("setup")
            self.is_set_up = True

    def close(self) -> None:
        """Calls `close()` of every function that has one, and ends worker processes and the event loop."""
        if self.is_set_up:
            self._call_all("close")
            self.is_set_up = False
        if self.workers is not None:
            self.workers.close()
        self.loop.close()

    def _call_all(self, method: str) -> None:
        for name, function in zip(self.names, self.functions, strict=True):
            try:
                self.loop.run(call_if_there(function, method), SETUP_SECONDS)
            except TimeUpError:
                raise RewardError(f"{method}() of reward {name!r} took more than {SETUP_SECONDS:g} seconds") from None
            except Exception as error:
                raise RewardError(f"{method}() of reward {name!r} raised {type(error).__name__}: {error}") from error


def load_rewards(specs: Spec | Sequence[Spec], weights: Sequence[float] | None = None,
                 timeout: float | None = None, **options: Any) -> Rewards:  # fmt: skip
    """The rewards for `specs`: a callable, a name, or a (nested) list of them; `options` are those of `Rewards`.

    A name is a built-in function ("exact_match"), "module:function", "module.function" or "path/to/file.py:function"
    (of a file alone, its `compute_score`), and may set options to literals: "soft_overlong(max_length=256, cache=64)".
    A class is made with the options.

    Raises ConfigError: an unknown name, or options the function does not have; RewardError: weights that do not fit.
    """
    flat = list(_flatten(specs))
    names = [spec if isinstance(spec, str) else None for spec in flat]
    return Rewards([_resolve(spec) for spec in flat], weights, timeout, specs=names, **options)


def load_grader(spec: str | RewardFunction) -> Any:
    """The grader of one specification, in the form in which it is called."""
    return as_grader(_resolve(spec))


def _flatten(specs: Any) -> Iterable[str | RewardFunction]:
    if isinstance(specs, str) or callable(specs) or hasattr(specs, "grade"):
        yield specs
    elif isinstance(specs, Iterable):
        for spec in specs:
            yield from _flatten(spec)
    else:
        raise RewardError(f"a reward is a function or a name, not {specs!r}")


def _resolve(spec: str | RewardFunction) -> RewardFunction:
    """The function of a specification, its options bound; an object of its class."""
    if not isinstance(spec, str):
        return spec if not callable(spec) else resolve(spec, BUILT_IN)
    name = f"{spec}:compute_score" if spec.endswith(".py") else spec
    function, options = resolve_with_options(name, BUILT_IN)
    if isinstance(function, type):
        if function is CombinedGrader:
            options["graders"] = [_resolve(each) for each in options.get("graders", ())]
        try:
            inspect.signature(function).bind(**options)
        except TypeError as error:
            raise RewardError(
                f"the reward {spec!r}: {error}; write {spec.partition('(')[0]}(name=value, ...)"
            ) from None
        return function(**options)
    return functools.partial(function, **options) if options else function


def _weights(weights: Sequence[float] | None, names: tuple[str, ...]) -> np.ndarray:
    if not names:
        raise RewardError("there is no reward function; name one in rewards.functions, such as exact_match")
    weights = [1.0] * len(names) if weights is None or len(weights) == 0 else weights
    if len(weights) != len(names):
        raise RewardError(
            f"rewards.weights has {len(weights)} numbers for {len(names)} functions "
            f"({', '.join(names)}); give one for each, or none for all ones"
        )
    if not all(math.isfinite(weight) for weight in weights):
        raise RewardError(f"rewards.weights is {tuple(weights)}; every weight is a finite number")
    return np.asarray(weights, np.float32)


def _on_timeout(value: str | float | None) -> str | float | None:
    if value == "stop" or value is None:
        return value
    if value == "none":
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isfinite(number):
        return number
    raise RewardError(f"rewards.on_timeout is {value!r}; it is stop, none, or the number that late rows get")


def _on_error(value: str | None) -> str | None:
    if value in ("stop", "none", None):
        return "stop" if value == "stop" else None
    raise RewardError(f"rewards.on_error is {value!r}; it is stop or none")


def _unique(names: list[str]) -> tuple[str, ...]:
    """The names, each repeated one with _2, _3, ... (the first that is free)."""
    taken: list[str] = []
    for name in names:
        candidates = (name if count == 1 else f"{name}_{count}" for count in range(1, len(names) + 2))
        taken.append(next(candidate for candidate in candidates if candidate not in taken))
    return tuple(taken)


def _inputs(
    prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Any], columns: Mapping[str, Any]
) -> dict[str, list[Any]]:
    """Everything a reward function may ask for, by name, each of N values."""
    own = {"prompts": list(prompts), "completions": list(completions), "completion_ids": list(completion_ids)}
    for name in columns:
        if name in own or name in SERVICES:
            raise RewardError(f"the data has a column named {name!r}, which rewards use themselves; rename it")
    inputs = own | {name: list(values) for name, values in columns.items() if name != "prompt"}
    for name, values in inputs.items():
        if len(values) != len(prompts):
            raise RewardError(f"{name} has {len(values)} values for {len(prompts)} prompts; give one for each")
    return inputs
