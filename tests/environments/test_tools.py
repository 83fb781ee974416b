"""Tools that are called, and turns as messages with their calls."""

import asyncio
import inspect
from typing import Any

import pytest

from jaxrl_llm.environments.tool_calls import ToolCall
from jaxrl_llm.environments.tools import ToolResult, call_tool, turn_message


def table(key: str):
    return {(1, 2): 3}


def circle(key: str):
    circle: dict[str, Any] = {}
    circle["circle"] = circle
    return circle


@pytest.mark.parametrize(("tool", "error"), [(table, "TypeError: keys must be str"), (circle, "ValueError: Circular")])
def test_results_that_json_cannot_hold_are_answered_with_the_error(tool, error):
    """Of a tool as of one that is async."""

    async def later(key: str):
        return tool(key)

    call = ToolCall("tool", {"key": "a"})
    now, then = call_tool(call, {"tool": tool}), call_tool(call, {"tool": later})
    assert isinstance(now, ToolResult) and now.failed and error in now.message["content"]
    assert inspect.isawaitable(then) and asyncio.run(then) == now


@pytest.mark.parametrize("name", ["file \udce9.txt", ["file \udce9.txt"]])
def test_results_are_text_that_tokenizers_take(name):
    """Names of files may be none."""
    result = call_tool(ToolCall("tool", {}), {"tool": lambda: name})
    assert isinstance(result, ToolResult) and not result.failed and "file \ufffd.txt" in result.message["content"]


def of_calls(*calls):
    return [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]


@pytest.mark.parametrize(
    ("raw", "content", "calls"),
    [
        ('Now.\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>', "Now.", [("add", {"a": 1})]),
        ('{"name": "now", "parameters": {}}<|eot_id|>', "", [("now", {})]),
        ('So: <|python_tag|>{"name": "now", "parameters": {}}', "So:", [("now", {})]),
        ('<tool_call>{"name": "add", "arguments": {"a": "\\ud83d"}}</tool_call>', "", [("add", {"a": "\ufffd"})]),
        ('<tool_call>{"name": "now"}</tool_call> <tool_call>{oops</tool_call>', "the text", None),
        ("No call.", "the text", None),
    ],
)
def test_messages_of_turns(raw, content, calls):
    """As TRL makes them: rewards of its users look for `tool_calls`."""
    message = turn_message("the text", raw)
    assert message == {"role": "assistant", "content": content, **({"tool_calls": of_calls(*calls)} if calls else {})}
