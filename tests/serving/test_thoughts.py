"""Thoughts of every form, told apart from the text behind them: whole and in streams, in Messages and in chats."""

import copy
import json

import httpx
import pytest

pytest.importorskip("starlette")

from jaxrl_llm.environments.tool_calls import THINKING
from jaxrl_llm.serving.bodies import parse
from jaxrl_llm.serving.choice import Choice
from jaxrl_llm.serving.errors import BadRequestError
from jaxrl_llm.serving.handles import Tokens
from jaxrl_llm.serving.messages import MessagesRequest
from jaxrl_llm.serving.responses import ResponsesRequest
from jaxrl_llm.serving.thoughts import HEADERS, can_think
from tests.environments.test_tool_calls import FORMS, MARK, SCHEMAS, A, B
from tests.serving.test_openai_client import CALL, CHAT, TOOL, Told
from tests.serving.test_responses import checked

MESSAGES = [{"role": "user", "content": "sort:1="}]
THOUGHT = "Is 3 < 4? é 私 </thin"


@pytest.fixture(scope="module")
def marked(sorter):
    """The tokenizer with the marks of all forms as special tokens."""
    tokenizer = copy.deepcopy(sorter.tokenizer)
    marks = {mark for text in FORMS.values() for mark in MARK.findall(text)} | {*THINKING, *THINKING.values()}
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(marks)})
    return tokenizer


def told_apart(tokenizer, text, size, prompt=(), reason="stop", **fields):
    """(thoughts, text, calls, finish reason) of an answer with that text, `size` tokens at a time."""
    body = {"messages": MESSAGES, "separate_reasoning": True, **fields}
    asked = parse(body, True, tokenizer, ["sorter"], (257,), 4000, len(tokenizer), 8)
    choice = Choice(0, asked, tokenizer, [*asked.prompts[0], *prompt])
    ids, said, thought = [*tokenizer.encode(text), *([257] if reason == "stop" else [])], "", ""
    for start in range(0, len(ids), size):
        part = ids[start : start + size]
        piece = choice.add(Tokens(part, [0.0] * len(part), [], [], reason if start + size >= len(ids) else None))
        assert not (said and piece.thought)  # thoughts come first
        said, thought = said + piece.text, thought + piece.thought
        if choice.finish_reason is not None:
            break
    assert (said, thought) == (choice.text[: choice.given], choice.thought)
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in choice.calls]
    return thought, said, calls, choice.finish_reason


@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
@pytest.mark.parametrize("mark", THINKING)
def test_thoughts_of_every_form(sorter, marked, mark, special):
    tokenizer, close = marked if special else sorter.tokenizer, THINKING[mark]
    behind = close + HEADERS.get(close, "")
    for size in (1, 3, 4000):
        for stream in (True, False):

            def found(text, **fields):
                return told_apart(tokenizer, text, size, stream=stream, **fields)  # noqa: B023 (called in the loop)

            assert found(f"{mark}\n{THOUGHT}\n{behind}\n\nYes. ") == (THOUGHT, "Yes. ", [], "stop")
            assert found(f"{mark}{THOUGHT}{behind}So: no.", stop=[" < ", " n"]) == (THOUGHT, "So:", [], "stop")
            assert found(f"No {mark}s{close}.")[0] == ""  # thoughts are what an answer begins with
            begun = tokenizer.decode(tokenizer.encode(mark[:-1]), skip_special_tokens=True)
            assert found(mark[:-1]) == ("", begun, [], "stop")
            assert found(f"{mark}{behind}Yes.") == ("", "Yes.", [], "stop")
            assert found(f"{mark} {THOUGHT}", reason="length") == (THOUGHT, "", [], "length")
            opened = tokenizer.encode(mark + "\n")  # by the prompt
            assert found(f"{THOUGHT}\n{behind}Yes.", prompt=opened) == (THOUGHT, "Yes.", [], "stop")


@pytest.mark.parametrize("form", [form for form in FORMS if form != "llama 4"])  # which is the whole turn
@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
def test_calls_behind_thoughts(sorter, marked, form, special):
    """Of every form, and where the thoughts have not closed before."""
    tokenizer = marked if special else sorter.tokenizer
    harmony = form.startswith("gpt-oss")
    mark = "<|channel|>analysis<|message|>" if harmony else "<think>"
    close = THINKING[mark] + ("<|start|>assistant" if form in ("gpt-oss", "gpt-oss, as rendered") else "")
    said = "" if harmony else "So: "
    for size, stream in ((1, True), (3, False), (4000, True)):
        ask = {"tools": SCHEMAS, "stream": stream}
        text = f"{mark}{THOUGHT}{close}{said}{FORMS[form]}"
        assert told_apart(tokenizer, text, size, **ask) == (THOUGHT, said, [A, B], "tool_calls")
        if not harmony:
            text = f"{mark}{THOUGHT}{FORMS[form]}"
            assert told_apart(tokenizer, text, size, **ask) == (THOUGHT, "", [A, B], "tool_calls")


def test_templates_that_think():
    assert can_think("{{ '<think>\\n\\n</think>' }}") and can_think("{% set x = message.split('[/THINK]') %}")
    assert not can_think("") and not can_think("<|im_start|>system\n<tool_call></tool_call><|end|>")


@pytest.fixture
def thinking(running, monkeypatch):
    """Has the server's template be one that thinks, and the model say a text."""

    def says(text, reason="stop"):
        tokenizer = running.server.tokenizer
        ids = [*tokenizer.encode(text), *([tokenizer.eos_token_id] if reason == "stop" else [])]
        monkeypatch.setattr(running.server, "queue", Told(running.server.queue, ids, reason))
        monkeypatch.setattr(running.server, "template", "<think></think>")

    return says


@pytest.mark.parametrize("name", ["whole", "stream"])
def test_messages_have_blocks_of_thoughts(running, thinking, name):
    from tests.serving.test_messages import streamed

    def asked(text, **fields):
        thinking(text)
        tool = {"name": "add", "input_schema": {"type": "object"}}
        body = {"model": "sorter", "max_tokens": 12, "messages": CHAT, "tools": [tool], **fields}
        with httpx.Client(base_url=running.url, timeout=120) as web:
            found = streamed(web, body)[1] if name == "stream" else web.post("/v1/messages", json=body).json()
        assert all(block.get("signature") == found["id"] for block in found["content"] if block["type"] == "thinking")
        return [(block["type"], block.get(block["type"], block.get("input"))) for block in found["content"]]

    text = f"<think>\nHm.\n</think>\n\nLet me see. {CALL}"
    blocks = [("thinking", "Hm."), ("text", "Let me see."), ("tool_use", {"a": 3})]
    assert asked(text) == asked(text, thinking={"type": "enabled", "budget_tokens": 1024}) == blocks
    omitted = asked(text, thinking={"type": "adaptive", "display": "omitted"})
    assert omitted == [("thinking", ""), *blocks[1:]]
    assert asked(f"<think>Hm.</think>{CALL}") == [blocks[0], blocks[2]]
    assert asked("<think>Hm. So") == [("thinking", "Hm. So")] and asked("Yes.") == [("text", "Yes.")]


@pytest.mark.parametrize(
    ("text", "reason", "said", "calls"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", "stop", "Yes.", 0),
        (f"<think>Hm.</think> So: {CALL}", "stop", "So:", 1),
        (f"<think>Hm.</think>{CALL}", "stop", None, 1),
        ("<think>Hm.</think>", "stop", "", 0),
        ("<think>Hm.", "length", None, 0),
    ],
)
def test_responses_have_items_of_reasoning(client, running, thinking, text, reason, said, calls):
    """Alike whole and streamed; and the conversation goes on with them, by an id or by the items themselves."""
    thinking(text, reason)
    tool = {"type": "function", "name": "add", "parameters": {}}
    ask = {"model": "sorter", "input": "x", "tools": [tool], "reasoning": {"effort": "low", "summary": "auto"}}
    found = client.responses.create(**ask)
    kinds = ["reasoning"] + ["message"] * (said is not None) + ["function_call"] * calls
    assert [item.type for item in found.output] == kinds and found.output_text == (said or "")
    assert found.output[0].content[0].text == "Hm." and found.reasoning.effort == "low"
    assert found.status == ("incomplete" if reason == "length" else "completed")
    details, own = found.usage.output_tokens_details, text.partition("</think>")
    assert details.reasoning_tokens == len((own[0] + own[1]).encode())
    events = checked(list(client.responses.create(**ask, stream=True)))
    final = events[-1].response
    if final.status == "completed":  # what the client's own accumulator makes of them
        with client.responses.stream(**ask) as stream:
            list(stream)
            assert [item.type for item in stream.get_final_response().output] == kinds
    for one, other in zip(final.output, found.output, strict=True):  # but the ids
        assert {**one.to_dict(), "id": "", "call_id": ""} == {**other.to_dict(), "id": "", "call_id": ""}
    added = [event for event in events if event.type == "response.output_item.added"]
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.output_index for event in added] == [event.output_index for event in done] == list(range(len(kinds)))
    assert [event.item.to_dict() for event in done] == [item.to_dict() for item in final.output]
    thoughts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(thoughts) == "Hm."
    items = [item.to_dict() for item in found.output]
    called = [item["call_id"] for item in items if item["type"] == "function_call"]
    outputs = [{"type": "function_call_output", "call_id": call, "output": "4"} for call in called]
    behind = [*outputs, {"role": "user", "content": "And?"}]
    kept = [
        ResponsesRequest(body, running.server.conversations, "<think>").chat["messages"]
        for body in ({"input": behind, "previous_response_id": found.id},
                     {"input": [{"role": "user", "content": "x"}, *items, *behind]})
    ]  # fmt: skip
    if said is not None or calls:
        assert kept[0] == kept[1] and kept[0][1]["reasoning_content"] == "Hm."


def test_a_chat_has_them_where_it_is_asked(client, thinking):
    thinking("<think>\nHm.\n</think>\n\nYes.")
    ask = {"model": "sorter", "messages": CHAT, "tools": [TOOL]}
    assert client.chat.completions.create(**ask).choices[0].message.content == "<think>\nHm.\n</think>\n\nYes."
    ask["extra_body"] = {"separate_reasoning": True}
    message = client.chat.completions.create(**ask).choices[0].message
    assert (message.reasoning_content, message.content) == ("Hm.", "Yes.")
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**ask, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm."
    assert "".join(delta.content or "" for delta in deltas) == "Yes."


@pytest.mark.parametrize(
    ("template", "fields", "options"),
    [
        ("<think>", {"thinking": {"type": "enabled"}}, {"enable_thinking": True, "thinking": True}),
        ("<think>", {"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ("", {"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ("", {"thinking": {"type": "adaptive"}}, None),  # a model may have no need of it
        ("<think>", {}, None),
        ("<think>", {"thinking": {"type": "adaptive"}, "chat_template_kwargs": {"thinking": False}},
         {"enable_thinking": True, "thinking": False}),
        ("", {"output_config": {"effort": "xhigh"}}, {"reasoning_effort": "high"}),
    ],
)  # fmt: skip
def test_what_the_template_is_told(template, fields, options):
    body = {"max_tokens": 5, "messages": MESSAGES, **fields}
    assert MessagesRequest(body, None, template).chat.get("chat_template_kwargs") == options


EFFORTS = [("none", "False|"), ("xhigh", "True|high"), ("low", "True|low"), (None, "|")]


@pytest.mark.parametrize(("effort", "told"), EFFORTS)
def test_an_effort_of_a_chat_is_told_to_its_template(sorter, effort, told):
    tokenizer = copy.deepcopy(sorter.tokenizer)
    tokenizer.chat_template = "{{ enable_thinking }}|{{ reasoning_effort }}{# <think> #}"
    body = {"messages": MESSAGES, "reasoning_effort": effort}
    for options in ({}, {"chat_template_kwargs": None}):
        asked = parse(body | options, True, tokenizer, ["sorter"], (257,), 128, len(tokenizer), 8)
        assert tokenizer.decode(asked.prompts[0], skip_special_tokens=True) == told
    assert body == {"messages": MESSAGES, "reasoning_effort": effort}


REFUSED = [("{# <think> #}", "much", "'much'; it takes none, minimal"), ("", "low", "no thoughts")]


@pytest.mark.parametrize(("template", "effort", "said"), REFUSED)
def test_an_effort_that_there_is_not_is_refused(sorter, template, effort, said):
    tokenizer = copy.deepcopy(sorter.tokenizer)
    tokenizer.chat_template = template + "x"
    body = {"messages": MESSAGES, "reasoning_effort": effort}
    with pytest.raises(BadRequestError, match=f"^reasoning_effort is .*{said}"):
        parse(body, True, tokenizer, ["sorter"], (257,), 128, len(tokenizer), 8)
