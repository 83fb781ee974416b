"""Anthropic's Messages API: messages are the chats that ask the same, whole and in streams."""

import json
import time

import httpx
import pytest

pytest.importorskip("starlette")

from jaxrl_llm.serving.errors import BadRequestError
from jaxrl_llm.serving.messages import MessagesRequest
from jaxrl_llm.serving.queue import StoppedError
from tests.serving.test_openai_client import CALL, CHAT, Told

TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {"a": {"enum": [3]}}}}
ASK = {"model": "sorter", "max_tokens": 12, "messages": CHAT}


@pytest.fixture
def web(running):
    with httpx.Client(base_url=running.url, timeout=120) as client:
        yield client


@pytest.fixture
def say(running, sorter, monkeypatch):
    """Has the server answer with a text."""

    def says(text):
        ids = [*sorter.tokenizer.encode(text), sorter.tokenizer.eos_token_id]
        monkeypatch.setattr(running.server, "queue", Told(running.server.queue, ids))

    return says


def streamed(web, body):
    """The events of a stream, and the message that they make, as Anthropic's SDK accumulates it."""
    with web.stream("POST", "/v1/messages", json={**body, "stream": True}) as answer:
        frames = answer.read().decode().removesuffix("\n\n").split("\n\n")
    events = []
    for frame in frames:
        kind, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {events[-1]['type']}"
    message, written = events[0]["message"], {}
    for event in events[1:]:
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
            assert event["index"] == len(message["content"]) - 1
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], message["content"][event["index"]]
            if delta["type"] != "input_json_delta":
                field = delta["type"].removesuffix("_delta")
                block[field] += delta[field]
            else:
                written[event["index"]] = written.get(event["index"], "") + delta["partial_json"]
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
    for index, text in written.items():
        message["content"][index]["input"] = json.loads(text)
    return [event["type"] for event in events], message


def test_a_message_is_that_of_the_chat(web):
    options = {"temperature": 0.9, "top_p": 0.95, "top_k": 20, "seed": 7}
    chat = web.post("/v1/chat/completions", json={**ASK, **options}).json()
    found = web.post("/v1/messages", json={**ASK, **options}).json()
    assert found["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert (found["type"], found["role"], found["model"]) == ("message", "assistant", "sorter")
    ended = "end_turn" if chat["choices"][0]["finish_reason"] == "stop" else "max_tokens"
    assert (found["stop_reason"], found["stop_sequence"]) == (ended, None)
    usage = found["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    assert found["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]
    kinds, message = streamed(web, {**ASK, **options})
    assert kinds[:3] == ["message_start", "content_block_start", "content_block_delta"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert {**message, "id": ""} == {**found, "id": ""}
    cut = web.post("/v1/messages", json={**ASK, **options, "max_tokens": 1}).json()
    assert cut["stop_reason"] == "max_tokens" and cut["usage"]["output_tokens"] == 1


@pytest.mark.parametrize(
    ("text", "fields", "blocks", "end"),
    [
        (f"Let me see. \n{CALL}", {}, ["Let me see.", {"a": 3}], ("tool_use", None)),
        (f"{CALL}\n{CALL}", {}, [{"a": 3}, {"a": 3}], ("tool_use", None)),
        (f"{CALL}\n{CALL}", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, [{"a": 3}],
         ("tool_use", None)),
        (f"No: {CALL}", {"tool_choice": {"type": "none"}}, [f"No: {CALL}"], ("end_turn", None)),
        ("It is 5. So", {"stop_sequences": [".", ". S", "x"]}, ["It is 5"], ("stop_sequence", ".")),
        ("  It is 5. ", {}, ["  It is 5. "], ("end_turn", None)),
        ("", {}, [], ("end_turn", None)),
    ],
)  # fmt: skip
def test_blocks_and_ends(web, say, text, fields, blocks, end):
    say(text)
    ask = {**ASK, "tools": [TOOL], **fields}
    found = web.post("/v1/messages", json=ask).json()
    assert [block.get("text") or block.get("input") for block in found["content"]] == blocks
    assert (found["stop_reason"], found["stop_sequence"]) == end
    _, message = streamed(web, ask)

    def known(message):
        return [{**block, "id": ""} for block in message["content"]], message["stop_reason"], message["stop_sequence"]

    assert known(message) == known(found)


def test_messages_are_those_of_a_chat():
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    body = {
        "max_tokens": 5,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "See:"}, image]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"}, {"type": "text", "text": "So:"},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 3}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "4"}]},
                {"type": "text", "text": "And?"},
            ]},
        ],
        "tools": [TOOL],
        "tool_choice": {"type": "tool", "name": "add"},
    }  # fmt: skip
    chat = MessagesRequest(body).chat
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    call = {"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}
    assert chat["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "See:"}, picture]},
        {"role": "assistant", "content": "So:", "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "t1", "content": "4"},
        {"role": "user", "content": "And?"},
    ]
    function = {"name": "add", "description": "Adds.", "parameters": TOOL["input_schema"]}
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "add"}}


def test_consecutive_turns_of_one_are_one():
    """As in Anthropic's API: templates that want turns to alternate refused them, and others showed several."""
    text, use = {"type": "text", "text": "c"}, {"type": "tool_use", "id": "t", "name": "add", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "4"}
    said = {"user": ("a", "b"), "assistant": ([text], [use])}, {"user": ([result], "d")}
    asked = [{"role": role, "content": x} for turns in said for role, contents in turns.items() for x in contents]
    call = {"id": "t", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    assert MessagesRequest({"max_tokens": 5, "messages": asked}).chat["messages"] == [
        {"role": "user", "content": "a\n\nb"},
        {"role": "assistant", "content": "c", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t", "content": "4"},
        {"role": "user", "content": "d"},
    ]
    system = [{"role": "system", "content": "x"}, {"role": "system", "content": "y"}, asked[0]]
    chat = MessagesRequest({"max_tokens": 5, "messages": system}).chat
    assert [message["content"] for message in chat["messages"]] == ["x", "y", "a"]
    with pytest.raises(BadRequestError, match="a block None"):
        MessagesRequest({"max_tokens": 5, "messages": [asked[0], {"role": "user", "content": None}]})


def test_many_turns_of_one_take_no_longer_each():
    """They are read on the event loop, where others wait, and a body has room for 100,000."""
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "a"}] * 60_000}
    began = time.process_time()
    chat = MessagesRequest(body).chat
    assert time.process_time() - began < 3
    assert chat["messages"] == [{"role": "user", "content": "\n\n".join("a" * 60_000)}]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"max_tokens": None}, "max_tokens", "max_tokens is missing"),
        ({"max_tokens": -1}, "max_tokens", "max_tokens is -1"),
        ({"messages": "x"}, "messages", "messages takes a list"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "the role 'tool'"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages", "a block 'document'"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]},
            "messages",
            "without name and input",
        ),
        ({"messages": [{"role": "user", "content": ["text"]}]}, "messages", "a block 'text'"),
        ({"system": [{"type": "image"}]}, "system", "system has a block 'image'"),
        ({"system": ["text"]}, "system", "system has a block 'text'"),
        ({"stop_sequences": [""]}, "stop_sequences", "stop_sequences takes a text"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools", "this server hosts none"),
        ({"tools": ["custom"]}, "tools", "one of type 'custom'; this server hosts none"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice", "names none of the tools"),
        ({"tool_choice": "auto"}, "tool_choice", "its type is auto, any"),
        ({"tool_choice": {"type": []}}, "tool_choice", "its type is auto, any"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
            "disable_parallel_tool_use",
            "disable_parallel_tool_use is 1, but it takes",
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 9}},
            "thinking",
            "the model's chat template has no thoughts",
        ),
        ({"thinking": "enabled"}, "thinking", "its type is enabled, adaptive, disabled"),
        ({"thinking": {"type": "disabled", "display": []}}, "thinking", "its display summarized or omitted"),
        ({"output_config": {"effort": ["high"]}}, "output_config", "as effort minimal, low, medium"),
        ({"output_config": {"format": {"type": "yaml"}}}, "output_config", "output_config is {'type': 'yaml'}"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management",
            "an edit 'clear_tool_uses_20250919'",
        ),
        ({"max_completion_tokens": 3}, "max_completion_tokens", "there is no field"),
    ],
)
def test_what_is_refused(web, fields, param, message):
    answer = web.post("/v1/messages", json={**ASK, **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400 and answer.json()["type"] == "error" and error["param"] == param
    assert message in error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (StoppedError("it failed"), 503, "overloaded_error"),
        (RecursionError(), 400, "invalid_request_error"),
        (ValueError("of this test"), 500, "api_error"),
        (BadRequestError("too slow", 408), 408, "timeout_error"),
        (BadRequestError("too large", 413), 413, "request_too_large"),
    ],
)
def test_errors_are_anthropics(web, running, monkeypatch, error, status, kind):
    def fails(*_):
        raise error

    monkeypatch.setattr(running.server.queue, "submit", fails)
    answer = web.post("/v1/messages", json=ASK)
    assert (answer.status_code, answer.json()["type"], answer.json()["error"]["type"]) == (status, "error", kind)
    assert "type" not in web.post("/v1/chat/completions", json=ASK).json()
    other = web.post("/v1/messages/batches", json={}).json()
    assert other["type"] == "error" and other["error"]["type"] == "not_found_error"


def test_tokens_are_counted(web, say):
    """As the prompt of the message that asks the same has them; also those of one that is too long."""
    body = {name: value for name, value in ASK.items() if name != "max_tokens"} | {"system": "Be brief."}
    body |= {"tools": [TOOL], "thinking": {"type": "adaptive"}}
    say("Yes.")
    message = web.post("/v1/messages", json={**body, "max_tokens": 5}).json()
    assert web.post("/v1/messages/count_tokens", json=body).json() == {"input_tokens": message["usage"]["input_tokens"]}
    longer = {**body, "messages": [{"role": "user", "content": "7" * 1000}]}
    assert web.post("/v1/messages/count_tokens", json=longer).json()["input_tokens"] > 1000
    refused = web.post("/v1/messages/count_tokens", json={**body, "messages": []})
    assert refused.status_code == 400 and refused.json()["type"] == "error"


def test_what_agents_send_is_taken(web):
    """As Claude Code does: a header that differs each time, edits of thoughts, and thoughts of another server."""
    billed = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=00000;"}
    turns = [
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "1"}]},
        {"role": "user", "content": "And?"},
    ]
    body = {
        **ASK, "messages": [*CHAT, *turns], "system": [billed, {"type": "text", "text": "Be brief."}],
        "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}, "metadata": {"user_id": "x"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }  # fmt: skip
    plain = {**ASK, "messages": [*CHAT, {"role": "assistant", "content": "1"}, turns[1]], "system": "Be brief."}
    assert MessagesRequest(body).chat["messages"] == MessagesRequest(plain).chat["messages"]
    assert web.post("/v1/messages?beta=true", json=body).json()["stop_reason"] in ("end_turn", "max_tokens")


def test_a_format_is_followed(web):
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"enum": [3]}}, "required": ["a"], "additionalProperties": False}
    form = {"format": {"type": "json_schema", "schema": schema}}
    found = web.post("/v1/messages", json={**ASK, "max_tokens": 80, "output_config": form, "seed": 1}).json()
    assert json.loads(found["content"][0]["text"]) == {"a": 3}


def test_a_stream_that_fails_says_so(web, running, monkeypatch):
    class Failing(Told):
        def submit(self, handles):
            for handle in handles:
                handle.deliver(BadRequestError("the server is stopping", 503))

    monkeypatch.setattr(running.server, "queue", Failing(running.server.queue, []))
    with web.stream("POST", "/v1/messages", json={**ASK, "stream": True}) as answer:
        last = answer.read().decode().removesuffix("\n\n").split("\n\n")[-1]
    assert last.startswith("event: error\n") and "the server is stopping" in last and "overloaded_error" in last


def test_anthropics_own_client(running, say):
    anthropic = pytest.importorskip("anthropic")
    say(f"Let me see. {CALL}")
    with anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0) as client:
        found = client.messages.create(**ASK, tools=[TOOL])
        with client.messages.stream(**ASK, tools=[TOOL]) as stream:
            texts = "".join(stream.text_stream)
            final = stream.get_final_message()
        asks = {name: value for name, value in ASK.items() if name != "max_tokens"}
        (model,) = client.models.list()
        assert (model.id, model.display_name, model.type) == ("sorter", "sorter", "model")
        assert client.messages.count_tokens(**asks, tools=[TOOL]).input_tokens == found.usage.input_tokens
        with pytest.raises(anthropic.BadRequestError, match="there is no field 'container'"):
            client.messages.create(**ASK, extra_body={"container": "x"})
    for message in (found, final):
        anthropic.types.Message.model_validate(message.to_dict())
        assert [block.type for block in message.content] == ["text", "tool_use"] and message.stop_reason == "tool_use"
        assert message.content[0].text == texts == "Let me see." and message.content[1].input == {"a": 3}
