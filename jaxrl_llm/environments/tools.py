"""Tools: Python functions that the policy calls, in the formats of Hermes, Qwen and Llama 3."""

import contextlib
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, NamedTuple

from transformers.utils import get_json_schema

from jaxrl_llm.config.user_code import contained
from jaxrl_llm.environments.protocol import EpisodeError, content_parts, encodable, is_image_part, is_picture

Tool = Callable[..., Any]

TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
PYTHON_TAG = "<|python_tag|>"
# What json.loads raises: an integer of thousands of digits is a plain ValueError, brackets without end are the other.
UNREADABLE = (ValueError, RecursionError)
TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "</s>")


class ToolCall(NamedTuple):
    """One call: the tool's name and arguments, and for a malformed call the `error` in it."""

    name: str
    arguments: dict[str, Any]
    error: str | None = None


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
    """The name a tool is called by."""
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
    return ToolResult({"role": "tool", "name": encodable(call.name) or "unknown", "content": content}, failed)


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The calls in a turn, in order; none when it asks for no tool.

    `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them (Hermes, Qwen); or a turn that is
    nothing but JSON with `name` and `parameters` or `arguments` (Llama 3), one object, several with semicolons between,
    or a list. Behind a tag a call of a tool that takes nothing may leave its arguments out; without one such JSON is an
    answer. A call that is meant but malformed has an `error`.
    """
    tagged = TAGGED.findall(text)
    if tagged:
        calls = []
        for body in tagged:
            try:
                calls.append(_as_call(json.loads(body)))
            except UNREADABLE as error:
                calls.append(ToolCall("", {}, f"the call {_shorten(body.strip())} is not JSON: {error}"))
        return calls
    body = text.rpartition(PYTHON_TAG)[2].strip()
    for end in TURN_ENDS:
        body = body.removesuffix(end).strip()
    if not body.startswith(("{", "[")):
        return []
    # Without the tag a turn that opens with a brace may be an answer, such as {"sum": 3}, {"name": "Ann"} or {1, 2}.
    is_tagged = PYTHON_TAG in text
    with contextlib.suppress(*UNREADABLE):
        values = _json_values(body)
        named = values and all(isinstance(value, Mapping) and "name" in value for value in values)
        if named and (is_tagged or all(value.keys() & {"arguments", "parameters"} for value in values)):
            return [_as_call(value) for value in values]
    return [ToolCall("", {}, f"the call {_shorten(body)} is not JSON with name and parameters")] if is_tagged else []


def turn_message(text: str, raw: str) -> dict[str, Any]:
    """A turn as a message of the assistant: its text, or what stands before its calls, and these as `tool_calls`.

    `raw` is the text with special tokens. A turn with a call that cannot be read is its text alone, as in TRL.
    """
    calls = parse_tool_calls(raw)
    if not calls or any(call.error is not None for call in calls):
        return {"role": "assistant", "content": text}
    said = raw[: min((raw.find(tag) for tag in ("<tool_call>", PYTHON_TAG) if tag in raw), default=0)]
    functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
    readable = json.loads(encodable(json.dumps(functions, ensure_ascii=False)))
    tool_calls = [{"type": "function", "function": function} for function in readable]
    return {"role": "assistant", "content": said.strip(), "tool_calls": tool_calls}


def _as_call(value: Any) -> ToolCall:
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):  # as OpenAI nests it
        value = value["function"]
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return ToolCall("", {}, f"the call {_shorten(value)} is not an object with name and arguments")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except UNREADABLE:
            return ToolCall(value["name"], {}, f"the arguments {_shorten(arguments)} are not JSON")
    if not isinstance(arguments, Mapping):
        return ToolCall(value["name"], {}, f"the arguments {_shorten(arguments)} are not an object")
    return ToolCall(value["name"], dict(arguments))


def _json_values(text: str) -> list[Any]:
    """The JSON values of a text that holds nothing else, with semicolons or white space between.

    Raises as `json.loads`, UNREADABLE.
    """
    decoder, values, position = json.JSONDecoder(), [], 0
    while position < len(text):
        value, position = decoder.raw_decode(text, position)
        values += value if isinstance(value, list) else [value]
        while position < len(text) and (text[position].isspace() or text[position] == ";"):
            position += 1
    return values


def _shorten(value: Any, limit: int = 200) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=repr)
    return text if len(text) <= limit else text[: limit - 3] + "..."
