"""Tool calls in the format of each model family."""

import pytest

from jaxrl_llm.environments.tools import ToolCall, parse_tool_calls

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
        ("The answer is 3.", []),
        ('{"sum": 3}', []),
        ("{1, 2}", []),
        ("", []),
    ],
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
    ],
)
def test_malformed_calls_have_an_error(text, error):
    (call,) = parse_tool_calls(text)
    assert error in (call.error or "")
