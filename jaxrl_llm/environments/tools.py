"""Tools: Python functions that the policy may call, described to it by their signature and docstring."""

import inspect
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, NamedTuple

from transformers.utils import get_json_schema

from jaxrl_llm.environments.protocol import EpisodeError
from jaxrl_llm.environments.tool_calls import ToolCall

Tool = Callable[..., Any]


class Answer(NamedTuple):
    """The message of role tool that answers a call, and whether the call failed."""

    message: dict[str, Any]
    failed: bool


def tool_schemas(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    """The JSON schema of each tool, as chat templates take it.

    Raises EpisodeError for a function without type hints, or without a docstring that describes it and its arguments.
    """
    schemas = []
    for tool in tools:
        try:
            schemas.append(get_json_schema(tool))
        except Exception as error:
            raise EpisodeError(
                f"the tool {name_of(tool)!r} cannot be described: {error}; give every argument a type, and a docstring "
                "that says what the tool does, with a line for each argument under Args:"
            ) from error
    return schemas


def name_of(tool: Any) -> str:
    """The name a tool is called by."""
    return getattr(tool, "__name__", type(tool).__name__)


def by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    """Tools by their names. Raises EpisodeError when two have the same."""
    found: dict[str, Tool] = {}
    for tool in tools:
        if name_of(tool) in found:
            raise EpisodeError(f"there are two tools named {name_of(tool)!r}; rename one")
        found[name_of(tool)] = tool
    return found


def public_methods(environment: Any) -> list[Tool]:
    """The methods of an object that are tools: the public ones, save `reset`, `step`, `get_reward` and `close`."""
    own = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    kept = ("reset", "step", "get_reward", "close")
    return [getattr(environment, name) for name, _ in own if not name.startswith("_") and name not in kept]


def call_tool(call: ToolCall, tools: Mapping[str, Tool]) -> Answer | Awaitable[Answer]:
    """The answer to a call; awaitable for an async tool.

    A call that is malformed, of an unknown tool, or on which the tool raises is answered with what is wrong: the policy
    may mend it.
    """
    tool = tools.get(call.name)
    if call.error is not None:
        return _answer(call, {"error": call.error}, True)
    if tool is None:
        return _answer(call, {"error": f"there is no tool {call.name!r}; there are {', '.join(tools) or 'none'}"}, True)
    try:
        inspect.signature(tool).bind(**call.arguments)
        result = tool(**call.arguments)
    except Exception as error:
        return _answer(call, {"error": f"{type(error).__name__}: {error}"}, True)
    return _awaited(call, result) if inspect.isawaitable(result) else _answer(call, result)


async def _awaited(call: ToolCall, result: Awaitable[Any]) -> Answer:
    try:
        return _answer(call, await result)
    except Exception as error:
        return _answer(call, {"error": f"{type(error).__name__}: {error}"}, True)


def _answer(call: ToolCall, result: Any, failed: bool = False) -> Answer:
    content = result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)
    return Answer({"role": "tool", "name": call.name or "unknown", "content": content}, failed)
