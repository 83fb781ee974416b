"""OpenAI's Responses API by its own client: responses are the chats that ask the same, and their parts fit together."""

import json
import time
from typing import Literal

import pydantic
import pytest

pytest.importorskip("starlette")

from jaxrl_llm.data.templates import render_prompt
from jaxrl_llm.serving.bodies import parse
from jaxrl_llm.serving.conversations import Conversations
from jaxrl_llm.serving.errors import BadRequestError
from jaxrl_llm.serving.responses import ResponsesRequest
from tests.serving.test_openai_client import CALL, CHAT, Told

openai = pytest.importorskip("openai")

TOOL = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"enum": [3]}}, "required": ["a"]},
    "strict": True,
}
ASK = {"model": "sorter", "input": "sort:90817="}


def read(body, conversations=None):
    return ResponsesRequest(body, conversations or Conversations()).chat


def checked(events):
    """The events, each of which is what the type of OpenAI's package says; it does not check by itself."""
    event_type = pydantic.TypeAdapter(openai.types.responses.ResponseStreamEvent)
    for event in events:
        event_type.validate_python(event.to_dict())
    return events


def saying(monkeypatch, running, sorter, text):
    """Has the server answer with a text."""
    ids = [*sorter.tokenizer.encode(text), sorter.tokenizer.eos_token_id]
    monkeypatch.setattr(running.server, "queue", Told(running.server.queue, ids))
    return len(ids)


def test_a_response_is_that_of_the_chat(client, sorter):
    options = {"temperature": 0.9, "top_p": 0.95, "extra_body": {"seed": 7}}
    chat = client.chat.completions.create(model="sorter", messages=CHAT, max_tokens=12, **options)
    found = client.responses.create(**ASK, max_output_tokens=12, metadata={"run": "1"}, **options)
    assert found.output_text == chat.choices[0].message.content != ""
    assert (found.object, found.status, found.model, found.error) == ("response", "completed", "sorter", None)
    assert (found.temperature, found.top_p, found.max_output_tokens, found.metadata) == (0.9, 0.95, 12, {"run": "1"})
    (message,) = found.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    usage = found.usage
    assert usage.input_tokens == chat.usage.prompt_tokens == len(render_prompt(sorter.tokenizer, CHAT))
    assert usage.output_tokens == chat.usage.completion_tokens
    assert usage.total_tokens == chat.usage.total_tokens
    cut = client.responses.create(**ASK, max_output_tokens=2, **options)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.output_text == found.output_text[:2] and cut.output[0].status == "incomplete"
    assert cut.usage.output_tokens == 2


def test_log_probs_are_those_of_the_chat(client):
    options = {"temperature": 0.7, "top_logprobs": 3, "extra_body": {"seed": 3}}
    chat = client.chat.completions.create(model="sorter", messages=CHAT, max_tokens=8, logprobs=True, **options)
    told = [entry.model_dump() for entry in chat.choices[0].logprobs.content]
    for include in (["message.output_text.logprobs"], []):
        found = client.responses.create(**ASK, max_output_tokens=8, include=include, **options)
        assert [entry.to_dict() for entry in found.output[0].content[0].logprobs] == told
    assert len(told[0]["top_logprobs"]) == 3
    events = checked(list(client.responses.create(**ASK, max_output_tokens=8, stream=True, **options)))
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [entry.to_dict() for entry in done.logprobs] == told
    deltas = [event.logprobs for event in events if event.type == "response.output_text.delta"]
    streamed = [entry.to_dict() for entries in deltas for entry in entries]
    assert streamed == told[: len(streamed)] and len(streamed) >= len(told) - 1
    assert client.responses.create(**ASK, max_output_tokens=2).output[0].content[0].logprobs == []


def test_the_events_of_a_stream(client, running, sorter, monkeypatch):
    """In the order of OpenAI's, numbered from 0; the client's own accumulator makes the whole of them."""
    options = {**ASK, "max_output_tokens": 16, "temperature": 1.3, "extra_body": {"seed": 11, "ignore_eos": True}}
    whole = client.responses.create(**options)
    events = checked(list(client.responses.create(**options, stream=True)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * len(deltas),
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(deltas) == whole.output_text and len(deltas) > 1 and whole.status == "incomplete"
    assert events[0].response.status == "in_progress" and events[0].response.output == []
    names = {event.item_id for event in events if hasattr(event, "item_id")}
    assert names == {events[-1].response.output[0].id} and events[-1].response.output_text == whole.output_text
    saying(monkeypatch, running, sorter, "é is 私, not 👍🏽.")
    checked(list(client.responses.create(**ASK, stream=True, include=["message.output_text.logprobs"])))
    with client.responses.stream(**ASK) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.output_text == snapshots[-1] == "é is 私, not 👍🏽." and final.status == "completed"


@pytest.mark.parametrize(
    ("text", "said", "count"),
    [(f"Let me see. \n{CALL}", "Let me see.", 1), (f"{CALL}\n{CALL}", None, 2), ("  It is 5. ", "  It is 5. ", 0)],
)
def test_calls(client, running, sorter, monkeypatch, text, said, count):
    """As items behind the text, alike whole and streamed; none where they are not wanted, and one of several."""
    tokens = saying(monkeypatch, running, sorter, text)
    ask = {**ASK, "tools": [TOOL]}
    found = client.responses.create(**ask)
    openai.types.responses.Response.model_validate(found.to_dict())
    checked(list(client.responses.create(**ask, stream=True)))
    kinds = ["message"] * (said is not None) + ["function_call"] * count
    assert [item.type for item in found.output] == kinds and found.usage.output_tokens == tokens
    assert (found.output_text or None) == said and found.status == "completed"
    calls = [item for item in found.output if item.type == "function_call"]
    assert all(json.loads(call.arguments) == {"a": 3} and call.name == "add" for call in calls)
    assert len({call.call_id for call in calls} | {call.id for call in calls}) == 2 * count
    assert found.tools[0].strict and found.tool_choice == "auto"
    with client.responses.stream(**ask) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [item.type for item in final.output] == kinds and (final.output_text or None) == said
    done = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert done == deltas == [call.arguments for call in calls]
    placed = [event.output_index for event in events if event.type == "response.output_item.added"]
    assert placed == list(range(len(kinds)))
    assert (client.responses.create(**ask, tool_choice="none").output_text) == text
    one = client.responses.create(**ask, parallel_tool_calls=False)
    assert sum(item.type == "function_call" for item in one.output) == min(count, 1)


def test_a_conversation_goes_on(client, running, sorter, monkeypatch):
    """By the id of its last response, or with all of its items: the same chat, without the instructions before."""
    saying(monkeypatch, running, sorter, f"Let me see.{CALL}\n{CALL}")
    question = {"role": "user", "content": "How many?"}
    first = client.responses.create(model="sorter", input=[question], tools=[TOOL], instructions="Be short.")
    calls = [item for item in first.output if item.type == "function_call"]
    outputs = [
        {"type": "function_call_output", "call_id": call.call_id, "output": str(number)}
        for number, call in enumerate(calls)
    ]
    items = [item.to_dict() for item in first.output]
    interleaved = [question, *items[:2], outputs[0], items[2], outputs[1]]  # as some clients have them
    asked = [
        read({"input": given, "previous_response_id": previous, "tools": [TOOL]}, running.server.conversations)
        for given, previous in ((outputs, first.id), ([question, *items, *outputs], None))
    ]
    assert asked[0]["messages"] == asked[1]["messages"]
    roles = [message["role"] for message in asked[0]["messages"]]
    assert roles == ["user", "assistant", "tool", "tool"]
    assert asked[0]["messages"][1]["content"] == "Let me see." and len(asked[0]["messages"][1]["tool_calls"]) == 2
    assert read({"input": interleaved})["messages"] == asked[0]["messages"]
    then = client.responses.create(model="sorter", input=outputs, previous_response_id=first.id, tools=[TOOL])
    chat = parse(asked[0] | {"model": "sorter"}, True, sorter.tokenizer, ["sorter"], (257,), 4000, 320, 8)
    assert then.usage.input_tokens == len(chat.prompts[0]) and then.previous_response_id == first.id
    again = client.responses.create(model="sorter", input="So?", previous_response_id=then.id, store=False)
    assert again.usage.input_tokens > then.usage.input_tokens and not again.store
    for name in (again.id, "resp_0"):
        with pytest.raises(openai.BadRequestError, match="which is not kept here") as raised:
            client.responses.create(model="sorter", input="x", previous_response_id=name)
        assert raised.value.code == "previous_response_not_found"


def test_conversations_are_bounded():
    kept = Conversations(200)
    for number in range(5):
        kept.add(str(number), [{"role": "user", "content": "x" * 30}])
        kept.of("0" if number < 2 else str(number))
    assert kept.of("4") and kept.of("3")
    with pytest.raises(BadRequestError, match="up to 200 bytes"):
        kept.of("1")
    kept.add("large", [{"role": "user", "content": "x" * 300}])
    with pytest.raises(BadRequestError):
        kept.of("large")


def test_items_are_messages():
    def text(said):
        return {"type": "input_text", "text": said}

    thought = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Short. "}]}
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "auto"}
    body = {
        "instructions": "Be kind.",
        "input": [
            {"role": "developer", "content": [text("Be "), text("brief.")]},
            {"type": "message", "role": "user", "content": [text("See:"), image]},
            {**thought, "content": [{"type": "reasoning_text", "text": "Long."}]},
            call,
            {"type": "function_call_output", "call_id": "c1", "output": [text("2")]},
            thought,
            {"type": "message", "role": "assistant", "content": [{**text("Two."), "type": "output_text"}]},
            {"role": "user", "content": "And?"},
        ],
    }  # fmt: skip
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    assert read(body)["messages"] == [
        {"role": "system", "content": "Be kind.\n\nBe brief."},
        {"role": "user", "content": [{"type": "text", "text": "See:"}, picture]},
        {
            "role": "assistant", "content": "", "reasoning_content": "Long.",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "assistant", "content": "Two.", "reasoning_content": "Short. "},
        {"role": "user", "content": "And?"},
    ]  # fmt: skip
    # As programs send them that ask any model.
    assert read({"input": "x", "reasoning": {"effort": None}, "include": ["reasoning.encrypted_content"],
                 "prompt_cache_key": "k", "truncation": "disabled", "text": {"verbosity": "medium"},
                 "client_metadata": {}, "store": False})["messages"]  # fmt: skip


def test_many_calls_take_no_longer_each():
    """They are read on the event loop, where others wait, and a body has room for 60,000."""
    calls = [{"type": "function_call", "call_id": f"c{n}", "name": "add", "arguments": "{}"} for n in range(20_000)]
    began = time.process_time()
    messages = read({"input": [{"role": "user", "content": "x"}, *calls]})["messages"]
    assert time.process_time() - began < 3
    assert [call["id"] for call in messages[1]["tool_calls"]] == [call["call_id"] for call in calls]


class Verdict(pydantic.BaseModel):
    right: Literal["yes", "no"]


def test_formats_and_forced_calls(client):
    pytest.importorskip("llguidance")
    white = {str(ord(space)): -100 for space in " \n"}  # as answers of nothing else would not come to an end
    ask = {**ASK, "temperature": 0, "max_output_tokens": 100, "extra_body": {"logit_bias": white}}
    parsed = client.responses.parse(**ask, text_format=Verdict)
    assert parsed.output_parsed.right in ("yes", "no") and parsed.text.format.type == "json_schema"
    with client.responses.stream(**ask, text_format=Verdict) as stream:
        assert stream.get_final_response().output_parsed == parsed.output_parsed
    with pytest.raises(openai.BadRequestError, match=r"text\.format is .* its type is text") as raised:
        client.responses.create(**ask, text={"format": {"type": "yaml"}})
    assert raised.value.param == "text.format"
    for choice in ("required", {"type": "function", "name": "add"}):
        found = client.responses.create(**ask, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
        (call,) = found.output
        assert call.type == "function_call" and json.loads(call.arguments) == {"a": 3}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": 3}, "input", "input is 3; it takes a text, or a list of items"),
        ({"input": []}, "input", "it takes a text"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "item of type 'item_reference'"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input", "the role 'tool'"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input", "a part 'input_file'"),
        ({"input": [{"role": "user", "content": None}]}, "input", "the content None"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input", "without name, arguments and call_id"),
        (
            {"input": [{"type": "function_call", "name": "x", "arguments": "{", "call_id": "c"}]},
            "input",
            "arguments that are no JSON",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "1"}]},
            "input",
            "the output of a call 'c', and no such call before it",
        ),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "input has no message"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input", "encrypted_content alone"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "https://x.y/z.png"}]}]},
            "input",
            "input has a part 'image_url'; this model reads text",
        ),
        ({"input": "1" * 200}, "input", "this model's rows have 128 tokens"),
        (
            {"input": [{"type": "function_call_output", "call_id": ["c"], "output": "1"}]},
            "input",
            "the output of a call ['c'], and no such call before it",
        ),
        ({"input": [{"role": "user", "content": ["text"]}]}, "input", "input has a part 'text'"),
        ({"input": [{"role": "user", "content": ["input_image"]}]}, "input", "image_url"),
        ({"tools": [{"type": "web_search"}]}, "tools", "one of type 'web_search'; this server hosts none"),
        ({"tools": ["function"]}, "tools", "one of type 'function'; this server hosts none"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice", "tool_choice is"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "names none of the tools"),
        ({"text": "json"}, "text", "text is 'json'"),
        ({"text": {"verbosity": "low"}}, "text", "no verbosity but medium"),
        ({"include": ["file_search_call.results"]}, "include", "include has 'file_search_call.results'"),
        ({"include": 1}, "include", "include has 1"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0, but it takes"),
        ({"max_output_tokens": 1000}, "input", "1000 are asked for as its completion"),
        ({"temperature": -1}, "temperature", "temperature is -1"),
        ({"top_logprobs": 30}, "top_logprobs", "top_logprobs is 30"),
        ({"store": 1}, "store", "store is 1"),
        ({"metadata": "x"}, "metadata", "metadata is 'x'; it takes an object"),
        ({"reasoning": {"effort": "high"}}, "reasoning", "the model's chat template has no thoughts"),
        ({"reasoning": {"effort": ["high"]}}, "reasoning", "as effort none, minimal, low"),
        ({"reasoning": "high"}, "reasoning", "reasoning is 'high'; it takes a summary"),
        ({"background": True}, "background", "this server has no background"),
        ({"conversation": "conv_1"}, "conversation", "this server has no conversation"),
        ({"truncation": "auto"}, "truncation", "this server has no truncation"),
        ({"messages": []}, "messages", "there is no field 'messages'"),
        ({"n": 2}, "n", "there is no field 'n'"),
    ],
)
def test_what_is_refused(client, fields, param, message):
    """In one message that names the field of this API."""
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(model="sorter", input="x", extra_body=fields)
    assert raised.value.param == param and message in raised.value.message
    assert raised.value.type == "invalid_request_error"


def test_a_stream_that_fails_says_so(client, running, monkeypatch):
    class Failing(Told):
        def submit(self, handles):
            for handle in handles:
                handle.deliver(BadRequestError("the server is stopping", 503))

    monkeypatch.setattr(running.server, "queue", Failing(running.server.queue, []))
    *_, last = checked(list(client.responses.create(**ASK, stream=True)))
    assert last.type == "response.failed" and last.response.status == "failed"
    assert (last.response.error.code, last.response.error.message) == ("server_error", "the server is stopping")
    with pytest.raises(openai.InternalServerError, match="the server is stopping"):
        client.responses.create(**ASK)
