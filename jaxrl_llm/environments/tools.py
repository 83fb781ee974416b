"""Tools: Python functions that the policy calls, in the forms of tool_call_forms.py."""

import inspect
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from transformers.utils import get_json_schema

from jaxrl_llm.config.user_code import contained
from jaxrl_llm.environments.protocol import EpisodeError, content_parts, encodable, is_image_part, is_picture
from jaxrl_llm.environments.tool_calls import ToolCall, turn_calls

Tool = Callable[..., Any]


class ToolResult(NamedTuple):
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
    """The name by which a model calls the tool: that of the function, or of the class of an object."""
    return getattr(tool, "__name__", type(tool).__name__)


def by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    """Tools by their names. Raises EpisodeError when two have the same."""
    named: dict[str, Tool] = {}
    for tool in tools:
        if name_of(tool) in named:
            raise EpisodeError(f"there are two tools named {name_of(tool)!r}; rename one")
        named[name_of(tool)] = tool
    return named


def public_methods(environment: Any) -> list[Tool]:
    """The methods of an object that are tools: the public ones, save `reset`, `step`, `get_reward` and `close`."""
    methods = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    reserved = ("reset", "step", "get_reward", "close")
    return [getattr(environment, name) for name, _ in methods if not name.startswith("_") and name not in reserved]


def call_tool(call: ToolCall, tools: Mapping[str, Tool]) -> ToolResult | Awaitable[ToolResult]:
    """The result of a call; awaitable for an async tool.

    A result that is an image of PIL, or a list with one, becomes a content in parts; others become text or JSON. A call
    that is malformed, of an unknown tool, or on which the tool raises or returns what is no JSON is answered with the
    error: the policy may correct it in its next turn.
    """
    tool = tools.get(call.name)
    if call.error is not None:
        return _tool_result(call, {"error": call.error}, failed=True)
    if tool is None:
        error = f"there is no tool {call.name!r}; there are {', '.join(tools) or 'none'}"
        return _tool_result(call, {"error": error}, failed=True)
    try:
        inspect.signature(tool).bind(**call.arguments)
        with contained():
            result = tool(**call.arguments)
        if not inspect.isawaitable(result):
            return _tool_result(call, result)
    except Exception as error:
        return _tool_result(call, {"error": f"{type(error).__name__}: {error}"}, failed=True)

    async def awaited() -> ToolResult:
        try:
            with contained():
                return _tool_result(call, await result)
        except Exception as error:
            return _tool_result(call, {"error": f"{type(error).__name__}: {error}"}, failed=True)

    return awaited()


def _tool_result(call: ToolCall, result: Any, failed: bool = False) -> ToolResult:
    listed = result if isinstance(result, list | tuple) else [result]
    if is_picture(result) or (listed is result and any(is_picture(part) or is_image_part(part) for part in listed)):
        content = content_parts(listed)
    else:
        content = encodable(result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False))
    message = {"role": "tool", "name": encodable(call.name) or "unknown", "content": content}
    return ToolResult(message if call.id is None else message | {"tool_call_id": encodable(call.id)}, failed)


def turn_message(text: str, raw: str, schemas: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """A turn as a message of the assistant: its text, or what it says before its calls, and these as `tool_calls`.

    `raw` is the text with special tokens; schemas: of the tools. A turn with a call that cannot be read is its text
    alone, as in TRL.
    """
    found = turn_calls(raw, schemas)
    if not found.calls or any(call.error is not None for call in found.calls):
        return {"role": "assistant", "content": text}
    functions = [{"name": call.name, "arguments": call.arguments} for call in found.calls]
    readable = json.loads(encodable(json.dumps(functions, ensure_ascii=False)))
    tool_calls = [
        {"type": "function", "function": function} | ({} if call.id is None else {"id": encodable(call.id)})
        for call, function in zip(found.calls, readable, strict=True)
    ]
    return {"role": "assistant", "content": found.said.strip(), "tool_calls": tool_calls}
