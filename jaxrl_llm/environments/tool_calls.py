"""Tool calls in what a policy writes: Hermes' and Qwen's tagged JSON, and Llama 3's bare JSON."""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
PYTHON_TAG = "<|python_tag|>"
ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "</s>")


class ToolCall(NamedTuple):
    """One call: the tool's name and arguments; `error` says what is wrong with one that cannot be read."""

    name: str
    arguments: dict[str, Any]
    error: str | None = None


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The calls in a turn, in order; none when it asks for no tool.

    `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them (Hermes, Qwen); or a turn that is
    nothing but JSON with `name` and `parameters` (Llama 3), one object, several with semicolons between, or a list.
    A call that is meant but malformed has an `error`.
    """
    tagged = TAGGED.findall(text)
    if tagged:
        return [_read(body) for body in tagged]
    marked = PYTHON_TAG in text
    body = text.rpartition(PYTHON_TAG)[2].strip()
    for end in ENDS:
        body = body.removesuffix(end).strip()
    if not body.startswith(("{", "[")):
        return []
    objects = _objects(body)
    if objects and all(isinstance(found, Mapping) and "name" in found for found in objects):
        return [_call(found) for found in objects]
    return [ToolCall("", {}, f"the call {_short(body)} is not JSON with name and parameters")] if marked else []


def _read(body: str) -> ToolCall:
    try:
        return _call(json.loads(body))
    except json.JSONDecodeError as error:
        return ToolCall("", {}, f"the call {_short(body.strip())} is not JSON: {error}")


def _call(found: Any) -> ToolCall:
    if isinstance(found, Mapping) and isinstance(found.get("function"), Mapping):  # as OpenAI nests it
        found = found["function"]
    if not isinstance(found, Mapping) or not isinstance(found.get("name"), str):
        return ToolCall("", {}, f"the call {_short(found)} is not an object with name and arguments")
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            return ToolCall(found["name"], {}, f"the arguments {_short(arguments)} are not JSON")
    if not isinstance(arguments, Mapping):
        return ToolCall(found["name"], {}, f"the arguments {_short(arguments)} are not an object")
    return ToolCall(found["name"], dict(arguments))


def _objects(body: str) -> list[Any]:
    """The JSON values of a text that holds only those, with semicolons or white space between; none otherwise."""
    decoder, found, place = json.JSONDecoder(), [], 0
    while place < len(body):
        try:
            value, place = decoder.raw_decode(body, place)
        except json.JSONDecodeError:
            return []
        found += value if isinstance(value, list) else [value]
        while place < len(body) and (body[place].isspace() or body[place] == ";"):
            place += 1
    return found


def _short(value: Any, limit: int = 200) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=repr)
    return text if len(text) <= limit else text[: limit - 3] + "..."
