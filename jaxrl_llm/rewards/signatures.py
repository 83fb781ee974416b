"""From every way a reward is written to the one way graders are called.

| written for | as | becomes |
|---|---|---|
| TRL, axolotl, here | `f(prompts, completions, completion_ids, **columns) -> list` | itself |
| verl | `compute_score(data_source, solution_str, ground_truth, extra_info) -> float or dict` | a row grader |
| verl, a whole batch | `f(data_sources, solution_strs, ground_truths, extra_infos) -> list` | a batch function |
| Harmony | an object with `grade(sample)`, `setup()` | a row grader |
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxrl_llm.config.resolve import closest
from jaxrl_llm.rewards.calls import RewardError, RowGrader, Sample, is_async, parameter_names, parameters_of, text_of

Column = Callable[[Sample], Any]


def as_grader(reward: Any) -> Any:
    """The callable or RowGrader that stands for a reward written in any of the known ways.

    Raises RewardError: an object that is neither callable nor has a `grade` method, or a class that was not made.
    """
    if isinstance(reward, type):
        raise RewardError(f"the reward {reward.__name__} is a class; make one: {reward.__name__}(...)")
    if isinstance(reward, RowGrader):
        return reward
    grade = getattr(reward, "grade", None)
    if callable(grade) and not inspect.isfunction(reward):
        return _from_method(reward, grade)
    if not callable(reward):
        raise RewardError(f"a reward is a function, a name, or an object with grade(sample), not {reward!r}")
    names = parameter_names(reward)
    if "solution_strs" in names:
        return _verl_batch(reward)
    if "solution_str" in names:
        return _verl_row(reward)
    return reward


def _from_method(reward: Any, grade: Callable[..., Any]) -> Any:
    """The grader of an object's `grade` method: of one sample, or of a batch when it asks for completions."""
    name = reward_name(reward)
    if parameters_of(grade) is None or "completions" in parameter_names(grade):
        return functools.update_wrapper(functools.partial(grade), grade) if is_async(grade) else grade
    return RowGrader(grade, name)


def _verl_row(function: Callable[..., Any]) -> RowGrader:
    """A row grader that calls verl's `compute_score` with the columns of a verl row."""
    takes = parameters_of(function)

    def arguments(sample: Sample) -> dict[str, Any]:
        found = {
            "data_source": sample.columns.get("data_source"),
            "solution_str": sample.text,
            "ground_truth": ground_truth(sample.columns),
            "extra_info": sample.columns.get("extra_info"),
        }
        return {key: value for key, value in found.items() if takes is None or key in takes}

    if is_async(function):

        async def grade_async(sample: Sample) -> Any:
            return await function(**arguments(sample))

        return RowGrader(grade_async, reward_name(function))

    def grade(sample: Sample) -> Any:
        return function(**arguments(sample))

    return RowGrader(grade, reward_name(function))


def _verl_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    """A batch function that calls verl's batch form of `compute_score`."""
    takes = parameters_of(function)

    def arguments(completions: Sequence[Any], columns: dict[str, Sequence[Any]]) -> dict[str, list[Any]]:
        rows = [{name: values[row] for name, values in columns.items()} for row in range(len(completions))]
        found = {
            "data_sources": [row.get("data_source") for row in rows],
            "solution_strs": [text_of(completion) for completion in completions],
            "ground_truths": [ground_truth(row) for row in rows],
            "extra_infos": [row.get("extra_info") for row in rows],
        }
        return {key: value for key, value in found.items() if takes is None or key in takes}

    if is_async(function):

        async def grade_async(completions: Sequence[Any], **columns: Any) -> Any:
            return await function(**arguments(completions, _lists(columns)))

        grade_async.__name__ = reward_name(function)
        return grade_async

    def grade(completions: Sequence[Any], **columns: Any) -> Any:
        return function(**arguments(completions, _lists(columns)))

    grade.__name__ = reward_name(function)
    return grade


def _lists(columns: dict[str, Any]) -> dict[str, Sequence[Any]]:
    return {name: values for name, values in columns.items() if isinstance(values, list)}


def ground_truth(columns: dict[str, Any]) -> Any:
    """A row's right answer: the `ground_truth` of its column `reward_model` (verl), or the column `ground_truth`.

    Raises RewardError when it has neither.
    """
    nested = columns.get("reward_model")
    if isinstance(nested, dict) and "ground_truth" in nested:
        return nested["ground_truth"]
    if "ground_truth" in columns:
        return columns["ground_truth"]
    raise RewardError(
        "a function with the arguments of verl's compute_score reads reward_model['ground_truth'] or the column "
        f"ground_truth; the data has the columns {', '.join(columns) or 'none'}"
    )


def reward_name(reward: Any) -> str:
    """The name a reward's metrics go under: `name` or `grader_key` of an object, `__name__` of a function."""
    if isinstance(reward, functools.partial):
        return reward_name(reward.func)
    if inspect.isfunction(reward) or inspect.ismethod(reward):
        return reward.__name__
    for attribute in ("name", "grader_key", "__name__"):
        if isinstance(name := getattr(reward, attribute, None), str):
            return name
    return type(reward).__name__


def accepted(name: str, function: Any, inputs: dict[str, list[Any]], services: Iterable[str] = ()) -> dict[str, Any]:
    """The inputs that a grader's signature takes. Raises RewardError for one it needs and the data lacks.

    `services` are arguments that it gets besides.
    """
    if isinstance(function, RowGrader):
        return inputs
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return inputs
    for parameter in parameters:
        needed = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if needed and parameter.name not in inputs and parameter.name not in services:
            raise RewardError(
                f"reward {name!r} needs {parameter.name!r}, which is neither a column nor set as an option; there are "
                f"{', '.join(inputs)}; the closest is {closest(parameter.name, inputs)}"
            )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        set_already = function.keywords if isinstance(function, functools.partial) else {}
        return {key: values for key, values in inputs.items() if key not in set_already}
    takes = {parameter.name for parameter in parameters}
    return {key: values for key, values in inputs.items() if key in takes}
