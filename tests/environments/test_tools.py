"""Tool calls in the format of each model family."""

import asyncio
import inspect
from typing import Any

import pytest

from jaxrl_llm.environments.tools import ToolCall, ToolResult, call_tool, parse_tool_calls, turn_message

ADD = ToolCall("add", {"a": 1, "b": 2})


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', [ADD]),
        ('I add.<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call><|im_end|>', [ADD]),
        ('<tool_call>{"name":"add","arguments":{"a":1,"b":2}}</tool_call> and '
         '<tool_call>{"name":"now","arguments":{}}</tool_call>', [ADD, ToolCall("now", {})]),
        ('<tool_call>{"name": "now"}', [ToolCall("now", {})]),
        ('{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>', [ADD]),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}<|eom_id|>', [ADD]),
        ('{"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "now", "parameters": {}}',
         [ADD, ToolCall("now", {})]),
        ('[{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]', []),
        ('<tool_call>{"name": "now"}</tool_call>', [ToolCall("now", {})]),
        ('<|python_tag|>{"name": "now"}', [ToolCall("now", {})]),
        ('{"name": "add", "arguments": {"a": 1, "b": 2}}', [ADD]),
        ('{"name": "Ann", "age": 30}', []),
        ('[{"name": "add", "parameters": {}}, {"name": "Ann"}]', []),
        ("[" * 20_000, []),
        ('{"a":' * 20_000, []),
        ('{"name": "add", "parameters": {"a": ' + "1" * 5000 + "}}", []),
        ("The answer is 3.", []),
        ('{"sum": 3}', []),
        ("{1, 2}", []),
        ("", []),
    ],
    ids=range(20),
)  # fmt: skip
def test_calls(text, calls):
    assert parse_tool_calls(text) == calls


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<tool_call>{'name': 'add'}</tool_call>", "the call {'name': 'add'} is not JSON"),
        ("<tool_call>[1]</tool_call>", "is not an object with name and arguments"),
        ('<tool_call>{"arguments": {}}</tool_call>', "is not an object with name and arguments"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "the arguments [1] are not an object"),
        ('<tool_call>{"name": "add", "arguments": "{1"}</tool_call>', "the arguments {1 are not JSON"),
        ("<|python_tag|>{add(1)}", "is not JSON with name and parameters"),
        ("<|python_tag|>" + "[" * 20_000, "is not JSON with name and parameters"),
        ("<tool_call>" + "[" * 20_000, "is not JSON: maximum recursion depth"),
        ('<tool_call>{"name": "add", "arguments": {"a": ' + "1" * 5000 + "}}</tool_call>", "is not JSON: Exceeds"),
        ('<tool_call>{"name": "add", "arguments": "' + "[" * 20_000 + '"}</tool_call>', "[... are not JSON"),
    ],
    ids=range(10),
)
def test_malformed_calls_have_an_error(text, error):
    (call,) = parse_tool_calls(text)
    assert error in (call.error or "")


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
