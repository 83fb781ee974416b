"""Tool calls in answers, in every form: whole and in streams, with marks that are special tokens and that are text."""

import copy
import json

import pytest

pytest.importorskip("starlette")

from jaxrl_llm.serving.bodies import parse
from jaxrl_llm.serving.choice import Choice
from jaxrl_llm.serving.errors import BadRequestError
from jaxrl_llm.serving.handles import Tokens
from tests.environments.test_tool_calls import FORMS, MARK, SCHEMAS, TEMPLATES, A, B

MESSAGES = [{"role": "user", "content": "sort:1="}]


@pytest.fixture(scope="module")
def marked(sorter):
    """The tokenizer with the marks of all forms as special tokens."""
    tokenizer = copy.deepcopy(sorter.tokenizer)
    marks = {mark for text in FORMS.values() for mark in MARK.findall(text)}
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(marks)})
    return tokenizer


def answered(tokenizer, text, size, **fields):
    """(content, calls, finish reason) of an answer with that text, `size` tokens at a time."""
    body = {"messages": MESSAGES, "tools": SCHEMAS, **fields}
    asked = parse(body, True, tokenizer, ["sorter"], (257,), 4000, len(tokenizer), 8)
    choice, ids, given = Choice(0, asked, tokenizer, asked.prompts[0]), [*tokenizer.encode(text), 257], ""
    for start in range(0, len(ids), size):
        part = ids[start : start + size]
        reason = "stop" if start + size >= len(ids) else None
        given += choice.add(Tokens(part, [0.0] * len(part), [], [], reason)).text
        if choice.finish_reason is not None:
            break
    assert given == choice.text[: choice.given]
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in choice.calls]
    return given, calls, choice.finish_reason


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
def test_calls_of_every_form(sorter, marked, form, special):
    """Nothing of a call is given out as text, and all that comes before it is."""
    tokenizer = marked if special else sorter.tokenizer
    said = "" if form in ("llama 4", "gpt-oss, as rendered") else "It is [5] < 6: to="
    ways = (
        ({"stream": True}, (1, 3, 50, 4000)),
        ({}, (3, 4000)),
        ({"stream": True, "skip_special_tokens": False}, (1,)),
    )
    for fields, sizes in ways:
        for size in sizes:
            assert answered(tokenizer, said + FORMS[form], size, **fields) == (said, [A, B], "tool_calls")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
def test_harmony_thinks_before_it_calls(sorter, marked, stream, special):
    text = "<|channel|>analysis<|message|>Call it.<|end|><|start|>assistant" + FORMS["gpt-oss"]
    for size in (1, 4, 4000):
        content, calls, reason = answered(marked if special else sorter.tokenizer, text, size, stream=stream)
        assert (calls, reason) == ([A, B], "tool_calls") and "find_all" not in content and "to=" not in content
        assert content.startswith("analysis" if special else "<|channel|>analysis<|message|>Call it.")


@pytest.mark.parametrize(
    "text",
    [
        "<|tool_call_start|>[find_all(1)]<|tool_call_end|>",
        "[find_all(text='a'), other()]",
        "to be, <|channel|>final<|message|>or not to=",
        "<think>I write <tool_call>.</think>It is 5.",
        " ",
        "t",
    ],
)
def test_what_is_no_call_is_text(marked, text):
    wanted = marked.decode(marked.encode(text), skip_special_tokens=True)
    for size in (1, 3, 4000):
        for stream in (True, False):
            assert answered(marked, text, size, stream=stream) == (wanted, [], "stop")


@pytest.mark.parametrize("stream", [True, False])
def test_stop_strings_beside_tools(marked, stream):
    """What stands before a call that a stop string cuts short is text, as all of it is."""
    content, calls, reason = answered(marked, "So [TOOL_CALLS]find_all[ARGS]{}", 1, stream=stream, stop="all")
    assert (content, calls, reason) == ("So find_", [], "stop")
    content, calls, _ = answered(marked, "So [TOOL_CALLS]find_all[ARGS]{}", 1, stream=stream, stop="none")
    assert (content, calls) == ("So ", [("find_all", {})])


HERMES, LLAMA = ("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"), ("llama3_1", "llama3_2")
SILENT = (  # they write no calls, so that nothing is known against Hermes'
    "cohere", "cohere2", "gemma", "gemma3", "idefics3", "lfm2", "llama3", "llava_next", "phi3", "phi3_5",
    "qwen2_5_vl", "smolvlm",
)  # fmt: skip


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_calls_are_forced_in_the_form_of_the_template(sorter, path):
    """In Hermes' form or Llama 3's; a model of another form is not held to one that it does not know."""
    own, name = copy.deepcopy(sorter.tokenizer), path.stem.removesuffix("_training")
    own.chat_template, own.bos_token = path.read_text(), "<|user|>"
    for fields in ({"tool_choice": "required"}, {"response_format": {"type": "json_object"}}):
        body = {"messages": MESSAGES, "tools": SCHEMAS, **fields}
        if name not in (*HERMES, *LLAMA, *SILENT):
            with pytest.raises(BadRequestError, match=r"Hermes .* and Llama 3; the model's chat template") as raised:
                parse(body, True, own, ["sorter"], (257,), 40_000, len(own), 8)
            assert raised.value.param in fields and "tool_choice" in str(raised.value)
            continue
        guide, param = parse(body, True, own, ["sorter"], (257,), 40_000, len(own), 8).guide or ("", "")
        called = guide[guide.index("tool: ") :]
        assert param in fields and ("<tool_call>" in guide) == (name not in LLAMA)
        assert '{"name": {"const": "find_all"}, "parameters": ' in called if name in LLAMA else '"arguments"' in called
