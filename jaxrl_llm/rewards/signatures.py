"""The interface of a reward, and adapters to it from every way in which rewards are written.

| written for | as | becomes |
|---|---|---|
| TRL, axolotl, this library | `f(prompts, completions, completion_ids, **columns) -> list` | itself |
| verl | `compute_score(data_source, solution_str, ground_truth, extra_info) -> float or dict` | a RowGrader |
| verl, a whole batch | `f(data_sources, solution_strs, ground_truths, extra_infos) -> list` | a batch function |
| Harmony | an object with `grade(sample)`, `setup()` | a RowGrader |
| OpenAI, a Python grader | `grade(sample, item) -> float` | a RowGrader |
| verifiers, a function of a Rubric | `f(prompt, completion, **columns) -> float` | a RowGrader |
"""

import functools
import inspect
import itertools
import json
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.config.resolve import ConfigError, closest

ANSWERS = ("ground_truth", "solution")  # columns that hold the right answer in data of verl's and TRL's users
VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")  # the batch form adds an s to each


class RewardError(ConfigError):
    """A reward function that failed, hung, or returned something that is not one number for each completion."""


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
        """The row's other columns, under Harmony's name."""
        return self.columns

    @property
    def text(self) -> str:
        """The completion's text, of the last message when it is a conversation."""
        return text_of(self.completion)

    @property
    def turns(self) -> list[tuple[str, str]]:
        """(role, content) of every message, the completion last."""
        messages = []
        for value, role in ((self.prompt, "user"), (self.completion, "assistant")):
            messages += [{"role": role, "content": value}] if isinstance(value, str) else value
        return [(message["role"], message.get("content") or "") for message in messages]

    def last_content(self) -> str:
        """The completion's text, under Harmony's name."""
        return self.text


@dataclass(frozen=True)
class RowGrader:
    """A grader of one completion at a time: `grade(sample) -> number | None | mapping | awaitable` of one.

    Its rows are independent: one that fails or is late leaves the others their rewards. needs: columns that it cannot
    be called without.
    """

    grade: Callable[[Sample], Any]
    name: str
    needs: tuple[str, ...] = ()


def as_grader(reward: Any) -> Any:
    """The batch function or RowGrader that stands for a reward written in any of the known ways.

    Raises RewardError: an object that is neither callable nor has a `grade` method, or a class without an instance.
    """
    if isinstance(reward, type):
        raise RewardError(f"the reward {reward.__name__} is a class; make one: {reward.__name__}(...)")
    if isinstance(reward, RowGrader):
        return reward
    grade = getattr(reward, "grade", None)
    if callable(grade) and not inspect.isfunction(reward):
        if not accepts(grade, "completions"):
            return RowGrader(grade, reward_name(reward))
        # A bound method takes no attributes; a partial of it can be named like the method.
        return functools.update_wrapper(functools.partial(grade), grade) if is_async(grade) else grade
    if not callable(reward):
        raise RewardError(f"a reward is a function, a name, or an object with grade(sample), not {reward!r}")
    names = parameter_names(reward)
    if "solution_strs" in names or "solution_str" in names:
        return _verl_grader(reward, "solution_strs" in names)
    if names == ("sample", "item"):
        return _openai_grader(reward)
    if "completion" in names and not {"prompts", "completions", "completion_ids"} & set(names):
        return _rubric_grader(reward)
    return reward


def _verl_grader(function: Callable[..., Any], is_batch: bool) -> Any:
    """The grader that calls verl's `compute_score`, or its batch form, with the columns of verl's rows."""
    plural = "s" if is_batch else ""
    takes = [key for key in VERL_ARGUMENTS if accepts(function, key + plural)]

    def row_arguments(text: str, columns: Mapping[str, Any]) -> dict[str, Any]:
        values = {"solution_str": text} | ({"ground_truth": ground_truth(columns)} if "ground_truth" in takes else {})
        return {key: values.get(key, columns.get(key)) for key in takes}

    def grade_row(sample: Sample) -> Any:
        return function(**row_arguments(sample.text, sample.columns))

    def grade_batch(completions: Sequence[Any], **columns: Any) -> Any:
        rows = list(map(row_arguments, map(text_of, completions), rows_of(columns, len(completions))))
        return function(**{key + plural: [row[key] for row in rows] for key in takes})

    grade = grade_batch if is_batch else grade_row
    if is_async(function):
        synchronous = grade

        # An async function is recognised by its definition, so an async one is wrapped in an async one.
        async def grade(*args: Any, **kwargs: Any) -> Any:
            return await synchronous(*args, **kwargs)

    if not is_batch:
        return RowGrader(grade, reward_name(function))
    grade.__name__ = reward_name(function)
    return grade


def _openai_grader(function: Callable[..., Any]) -> RowGrader:
    """The grader that calls OpenAI's `grade(sample, item)` with a completion and the columns of its row."""

    def grade(sample: Sample) -> Any:
        return function(openai_sample(sample), sample.columns)

    async def grade_async(sample: Sample) -> Any:
        return await grade(sample)

    return RowGrader(grade_async if is_async(function) else grade, reward_name(function))


def _rubric_grader(function: Callable[..., Any]) -> RowGrader:
    """The grader that calls a function of one `completion`, as those of a Rubric are, with what it names of the row."""
    options = function.keywords if isinstance(function, functools.partial) else {}

    def grade(sample: Sample) -> Any:
        values = {**sample.columns, "prompt": sample.prompt, "completion": sample.completion}
        return function(**{key: x for key, x in values.items() if key not in options and accepts(function, key)})

    async def grade_async(sample: Sample) -> Any:
        return await grade(sample)

    needs = tuple(
        each.name
        for each in _parameters(function).values()
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        and each.default is each.empty
        and each.name not in ("prompt", "completion")
    )
    return RowGrader(grade_async if is_async(function) else grade, reward_name(function), needs)


def openai_sample(sample: Sample) -> dict[str, Any]:
    """`sample` of OpenAI's graders: `output_text`, `output_json` (None of a text that is no JSON), `output_tools` and
    `choices`."""
    message = sample.completion if isinstance(sample.completion, str) else sample.completion[-1]
    message = {"role": "assistant", "content": message} if isinstance(message, str) else message
    try:
        tree = json.loads(sample.text)
    except (ValueError, RecursionError):
        tree = None
    calls = message.get("tool_calls") or []
    choices = [{"index": 0, "message": message}]
    return {"output_text": sample.text, "output_json": tree, "output_tools": calls, "choices": choices}


def rows_of(columns: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """The `count` rows of columns, which are lists; what is none, such as `log_metric`, is in no row."""
    lists = {name: values for name, values in columns.items() if isinstance(values, list)}
    return [{name: values[row] for name, values in lists.items()} for row in range(count)]


def ground_truth(columns: Mapping[str, Any]) -> Any:
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
    """The name of a reward in metrics: `name` or `grader_key` of an object, `__name__` of a function."""
    if isinstance(reward, functools.partial):
        return reward_name(reward.func)
    if inspect.isfunction(reward) or inspect.ismethod(reward):
        return reward.__name__
    for attribute in ("name", "grader_key", "__name__"):
        if isinstance(name := getattr(reward, attribute, None), str):
            return name
    return type(reward).__name__


def reward_names(rewards: Iterable[Any]) -> tuple[str, ...]:
    """The names of rewards, each repeated one with _2, _3, ... (the first that is free)."""
    taken: list[str] = []
    for name in map(reward_name, rewards):
        numbered = itertools.chain([name], (f"{name}_{count}" for count in itertools.count(2)))
        taken.append(next(candidate for candidate in numbered if candidate not in taken))
    return tuple(taken)


def accepted(name: str, grader: Any, inputs: dict[str, list[Any]], services: Iterable[str] = ()) -> dict[str, Any]:
    """The inputs that a grader's signature takes; `services` are further arguments that it may require.

    A required argument named by the plural of a column, `answers` where the data has `answer`, gets that column:
    functions take lists, and examples of axolotl and verl are written so. The `answer` of our own functions, but for
    exact_match, is the first of ANSWERS where there is no such column. Raises RewardError for a required argument that
    is none of these, for a function that takes nothing of the rows, and for an answer of ours that is a list or a
    dictionary, to which no completion would be equal.
    """
    if isinstance(grader, RowGrader):
        if missing := [column for column in grader.needs if column not in inputs]:
            raise RewardError(
                f"reward {name!r} needs {missing[0]!r}, which is no column; there are {', '.join(inputs)}; the closest "
                f"is {closest(missing[0], inputs)}"
            )
        return inputs
    # Options of our own functions are keyword-only, and set by name: a column that is called so is none of them.
    function = grader.func if isinstance(grader, functools.partial) else grader
    is_ours = str(getattr(function, "__module__", None)).startswith("jaxrl_llm.rewards.")
    if is_ours:
        options = [each.name for each in _parameters(function).values() if each.kind is each.KEYWORD_ONLY]
        inputs = {key: values for key, values in inputs.items() if key not in options}
    plurals = {}
    for parameter in _parameters(grader).values():
        is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        is_required = parameter.default is parameter.empty and not is_variadic
        if is_required and parameter.kind is parameter.POSITIONAL_ONLY:
            raise RewardError(
                f"reward {name!r} takes {parameter.name!r} by its position alone, but rewards are called by keyword: "
                "leave the / out of its parameters"
            )
        if is_required and parameter.name not in inputs and parameter.name not in services:
            others = ANSWERS if is_ours and parameter.name == "answer" and name != "exact_match" else ()
            column = next((one for one in (parameter.name.removesuffix("s"), *others) if one in inputs), None)
            if column is None:
                way_out = f"the closest is {closest(parameter.name, inputs)}"
                if name == "exact_match":
                    way_out = "rewards.functions has it unless others are named: name yours"
                    way_out += ", or environment for what its steps earn" if "environment_reward" in inputs else ""
                    learned = not inputs.keys().isdisjoint(("completion", "messages", "chosen", "label"))
                    way_out += ", or measure held-out rows by the loss alone (eval.measure=loss)" if learned else ""
                raise RewardError(
                    f"reward {name!r} needs {parameter.name!r}, which is neither a column nor set as an option; there "
                    f"are {', '.join(inputs)}; {way_out}"
                )
            plurals[parameter.name] = inputs[column]
        if is_ours and is_required and parameter.name in ("answer", "tests"):
            values = plurals.get(parameter.name, inputs.get(parameter.name, ()))
            for row, wanted in enumerate(values if parameter.name == "answer" else ()):
                if isinstance(wanted, list | tuple | Mapping):
                    raise RewardError(
                        f"reward {name!r} compares a completion with one answer, but that of row {row} is "
                        f"{shorten(wanted, 80)}: make it a text or a number (data.format takes a function of a row), "
                        "or write a reward of your own, my_rewards.py:function"
                    )
            # An empty field of a table is NaN, the one number that differs from itself.
            plurals[parameter.name] = [None if isinstance(x, numbers.Real) and x != x else x for x in values]
    if takes_any(grader):
        # An option that a specification sets is not overwritten by a column of the same name.
        options = grader.keywords if isinstance(grader, functools.partial) else {}
        return {key: values for key, values in inputs.items() if key not in options} | plurals
    taken = {key: values for key, values in inputs.items() if accepts(grader, key)} | plurals
    if not taken:
        raise RewardError(
            f"reward {name!r} takes no column, and neither prompts nor completions, so that it does not see the rows "
            "that it is to score: give it the argument completions"
        )
    return taken


def is_rowwise(grader: Any) -> bool:
    """True when a grader is called with single rows: a RowGrader, or an async function declared `by_row = True`."""
    if isinstance(grader, RowGrader):
        return True
    declared = grader.func if isinstance(grader, functools.partial) else grader
    return is_async(grader) and getattr(declared, "by_row", False) is True


def is_async(function: Any) -> bool:
    """True when calling `function` gives a coroutine."""
    if isinstance(function, RowGrader):
        return is_async(function.grade)
    if isinstance(function, functools.partial):
        return is_async(function.func)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 (an instance with an async __call__)
    )


def accepts(function: Any, name: str) -> bool:
    """True when `function` can be called with the keyword `name`, also where its signature cannot be read."""
    return name in _parameters(function) or takes_any(function)


def takes_any(function: Any) -> bool:
    """True when `function` can be called with every keyword, also where its signature cannot be read."""
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in _parameters(function).values())


def parameter_names(function: Any) -> tuple[str, ...]:
    """The names of a function's parameters."""
    return tuple(_parameters(function))


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # of functions written in C: they may take anything
        return {"kwargs": inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)}


def text_of(completion: Any) -> str:
    """A completion's text: itself, or the content of its last message, "" where that has none (it calls a tool)."""
    return completion if isinstance(completion, str) else text_of_content(completion[-1].get("content"))


def text_of_content(content: Any) -> str:
    """The text of a content, with `<image>` for each image in it."""
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(part["text"] if part.get("type") == "text" else "<image>" for part in content)


def shorten(value: Any, limit: int = 300) -> str:
    """`repr(value)`, truncated to `limit` characters for an error message; the type of what has none."""
    try:
        text = repr(value)
    except Exception:  # of a user's class, or of an integer of more than 4300 digits
        text = f"a value of {type(value).__name__}"
    return text if len(text) <= limit else text[: limit - 3] + "..."
