r"""The grader: calls the reward functions of a run and returns their numbers as one array.

A reward function has TRL's signature: keyword arguments `prompts`, `completions`, `completion_ids` and every column of
the data set except `prompt`, under its own name; it returns one number for each completion, or None where it does not
apply. It may be `async`. Prompts and completions are text, or lists of messages when the data is conversational. A
function without `**kwargs` gets only what it names.
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.names import closest, resolve, resolve_with_options
from jaxrl_llm.rewards.calls import Call, RewardError, gather, run, shorten

RewardFunction = Callable[..., Any]
Spec = str | RewardFunction | Sequence[Any]


class Rewards:
    """`rewards(prompts, completions, completion_ids, columns)` -> float32 [N, R], NaN where a function said None.

    `names` are the functions' names made unique, in order; `weights` is float32 [R], ones unless given. `timeout` is
    the seconds each function has for a batch; with a limit a function runs in a thread of its own, without one in the
    caller's. Async functions of a batch run at the same time.

    Raises RewardError: no function, or weights that are not one finite number for each function.
    """

    def __init__(
        self, functions: Sequence[RewardFunction], weights: Sequence[float] | None = None, timeout: float | None = None
    ):
        self.functions = tuple(functions)
        self.names = _unique([_name(function) for function in self.functions])
        if not self.functions:
            raise RewardError("there is no reward function; name one in rewards.functions, such as exact_match")
        weights = [1.0] * len(self.functions) if weights is None or len(weights) == 0 else weights
        if len(weights) != len(self.functions):
            raise RewardError(
                f"rewards.weights has {len(weights)} numbers for {len(self.functions)} functions "
                f"({', '.join(self.names)}); give one for each, or none for all ones"
            )
        if not all(math.isfinite(weight) for weight in weights):
            raise RewardError(f"rewards.weights is {tuple(weights)}; every weight is a finite number")
        if timeout is not None and not timeout > 0:
            raise RewardError(f"rewards.timeout is {timeout}; it is a number of seconds above 0, or none")
        self.weights = np.asarray(weights, np.float32)
        self.timeout = timeout

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
    ) -> np.ndarray:
        """float32 [N, R]. `columns` holds a list of N values for each column of the data set; `prompt` is left out.

        Raises RewardError: a function raised (the cause is chained, and the first row it fails on alone is named), ran
        past the time limit, needs an argument the data does not have, returned a number of results that is not N, or a
        result that is not a finite number or None.
        """
        inputs = _inputs(prompts, completions, completion_ids, columns)
        calls = [
            Call(name, function, _accepted(name, function, inputs))
            for name, function in zip(self.names, self.functions, strict=True)
        ]
        together = gather([call for call in calls if call.is_async], self.timeout)
        rewards = np.empty((len(prompts), len(calls)), np.float32)
        for index, call in enumerate(calls):
            results = together[call.name] if call.is_async else run(call, self.timeout)
            rewards[:, index] = _numbers(call.name, results, len(prompts))
        return rewards


def load_rewards(
    specs: Spec | Sequence[Spec], weights: Sequence[float] | None = None, timeout: float | None = None
) -> Rewards:
    """The grader for `specs`: a callable, a name, or a (nested) list of them.

    A name is a built-in function ("exact_match"), "module:function", "module.function" or "path/to/file.py:function",
    and may set the function's options to literals: "soft_overlong(max_length=256, cache=64)".

    Raises ConfigError: an unknown name, or options the function does not have; RewardError: weights that do not fit.
    """
    return Rewards([_resolve(spec) for spec in _flatten(specs)], weights, timeout)


def _flatten(specs: Any) -> Iterable[str | RewardFunction]:
    if isinstance(specs, str) or callable(specs):
        yield specs
    elif isinstance(specs, Iterable):
        for spec in specs:
            yield from _flatten(spec)
    else:
        raise RewardError(f"a reward is a function or a name, not {specs!r}")


def _resolve(spec: str | RewardFunction) -> RewardFunction:
    """The function of a specification, its options bound."""
    package = "jaxrl_llm.rewards.functions"
    if not isinstance(spec, str):
        return resolve(spec, package)
    function, options = resolve_with_options(spec, package)
    return functools.partial(function, **options) if options else function


def _name(function: RewardFunction) -> str:
    if isinstance(function, functools.partial):
        return _name(function.func)
    return getattr(function, "__name__", type(function).__name__)


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
        if name in own:
            raise RewardError(f"the data has a column named {name!r}, which rewards use themselves; rename it")
    inputs = own | {name: list(values) for name, values in columns.items() if name != "prompt"}
    for name, values in inputs.items():
        if len(values) != len(prompts):
            raise RewardError(f"{name} has {len(values)} values for {len(prompts)} prompts; give one for each")
    return inputs


def _accepted(name: str, function: RewardFunction, inputs: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The inputs that the function's signature takes. Raises RewardError for one it needs and the data lacks."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return inputs
    for parameter in parameters:
        needed = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if needed and parameter.name not in inputs:
            raise RewardError(
                f"reward {name!r} needs {parameter.name!r}, which is neither a column nor set as an option; there are "
                f"{', '.join(inputs)}; the closest is {closest(parameter.name, inputs)}"
            )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        set_already = function.keywords if isinstance(function, functools.partial) else {}
        return {key: values for key, values in inputs.items() if key not in set_already}
    takes = {parameter.name for parameter in parameters}
    return {key: values for key, values in inputs.items() if key in takes}


def _numbers(name: str, results: Any, rows: int) -> np.ndarray:
    """float32 [N] of a function's results, NaN for None. Raises RewardError, naming function and row."""
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
    numbers = np.full(rows, np.nan, np.float32)
    for row, value in enumerate(results):
        if value is not None:
            numbers[row] = _number(name, row, value)
    return numbers


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
