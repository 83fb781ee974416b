"""OpenAI's own client against the server: answers are those of `generate`, and their parts fit together."""

import copy
import itertools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

import jaxrl_llm
from jaxrl_llm.data.templates import render_prompt
from tests.data.spacing_tokenizer import SPACINGS, spacing_tokenizer
from tests.serving.conftest import LONGEST

openai = pytest.importorskip("openai")

CHAT = [{"role": "user", "content": "sort:90817="}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def test_a_chat_is_that_of_generate(client, sorter):
    (texts,) = jaxrl_llm.generate(sorter, [CHAT], 12, samples=3, seed=7)
    answer = client.chat.completions.create(model="sorter", messages=CHAT, max_tokens=12, n=3, seed=7)
    assert [choice.message.content for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == [0, 1, 2] and len(set(texts)) > 1
    assert answer.object == "chat.completion" and answer.model == "sorter"
    usage = answer.usage
    assert usage.prompt_tokens == len(render_prompt(sorter.tokenizer, CHAT))
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    again = client.chat.completions.create(model="sorter", messages=CHAT, max_tokens=12, n=3, seed=7)
    assert [choice.message.content for choice in again.choices] == texts


def test_texts_and_ids_are_completed_alike(client, sorter):
    prompts, texts = ["sort:4821=", "sort:7651="], ["1248", "1567"]
    ids = [render_prompt(sorter.tokenizer, prompt) for prompt in prompts]
    for prompt in (prompts, ids):
        answer = client.completions.create(
            model="sorter", prompt=prompt, max_tokens=12, temperature=0, extra_body={"return_token_ids": True}
        )
        assert [choice.text for choice in answer.choices] == texts
        assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
        assert [choice.prompt_token_ids for choice in answer.choices] == ids
        decode = sorter.tokenizer.decode
        assert [decode(choice.token_ids, skip_special_tokens=True) for choice in answer.choices] == texts
    one = client.completions.create(model="sorter", prompt=ids[0], max_tokens=2, temperature=0)
    assert one.choices[0].text == texts[0][:2] and one.choices[0].finish_reason == "length"


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1e-5, 1e-300, 0.0009])
def test_hardly_any_temperature_is_greedy(client, temperature):
    """Clients that divide by it write such for greedy; log-probs are those of greedy, at temperature 1."""
    found = [
        client.completions.create(
            model="sorter", prompt="sort:4821=", max_tokens=6, temperature=each, seed=3, logprobs=1
        ).choices[0]
        for each in (temperature, 0)
    ]
    assert found[0] == found[1] and found[0].logprobs.token_logprobs[0] < -0.1


def test_log_probs_are_the_trainers(client, sorter):
    """Of the sampled tokens at the sampling temperature, whatever is filtered: those of the network on the same ids."""
    ids = render_prompt(sorter.tokenizer, CHAT)
    answer = client.chat.completions.create(
        model="sorter", messages=CHAT, max_tokens=8, seed=3, temperature=0.7, top_p=0.9, logprobs=True, top_logprobs=3,
        extra_body={"return_token_ids": True, "top_k": 20},
    )  # fmt: skip
    (choice,) = answer.choices
    assert answer.prompt_token_ids == ids
    row = np.asarray([ids + choice.token_ids])
    logits = np.asarray(sorter(row))[0, len(ids) - 1 : row.shape[1] - 1].astype(np.float64) / 0.7
    logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    entries = choice.logprobs.content
    assert len(entries) == len(choice.token_ids)
    for place, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(logps[place, choice.token_ids[place]], abs=1e-4)
        likeliest = np.sort(logps[place])[::-1][:3]
        np.testing.assert_allclose([top.logprob for top in entry.top_logprobs], likeliest, atol=1e-4)
        assert entry.token == sorter.tokenizer.decode([choice.token_ids[place]])
    text = client.completions.create(model="sorter", prompt="sort:4821=", max_tokens=4, seed=1, logprobs=0)
    logprobs = text.choices[0].logprobs
    assert "".join(logprobs.tokens).startswith(text.choices[0].text)
    assert logprobs.text_offset[0] == 0 and len(logprobs.token_logprobs) == len(logprobs.tokens)


def test_prompts_are_scored(client, sorter):
    """What lm-eval asks for: `echo` with log-probs; a token is greedy where its number is the largest of its place."""
    texts = ["sort:4821=1248", "sort:90817=019"]
    ids = [render_prompt(sorter.tokenizer, text) for text in texts]
    answer = client.completions.create(
        model="sorter", prompt=ids, max_tokens=1, temperature=0, echo=True, logprobs=1, seed=1234,
        extra_body={"prompt_logprobs": 3},
    )  # fmt: skip
    for text, row, choice in zip(texts, ids, answer.choices, strict=True):
        logits = np.asarray(sorter(np.asarray([row])))[0].astype(np.float64)
        logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        found = choice.logprobs
        assert choice.text.startswith(text) and found.tokens[: len(row)] == list(text)
        assert len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == len(row) + 1
        assert found.token_logprobs[0] is found.top_logprobs[0] is choice.prompt_logprobs[0] is None
        assert found.text_offset == list(range(len(row) + 1))
        for place in range(1, len(row)):
            before = logps[place - 1]
            assert found.token_logprobs[place] == pytest.approx(before[row[place]], abs=1e-4)
            is_greedy = found.token_logprobs[place] == max(found.top_logprobs[place].values())
            assert is_greedy == (before.argmax() == row[place])
            told = choice.prompt_logprobs[place]
            assert told[str(row[place])]["rank"] == 1 + (before > before[row[place]]).sum()
            by_rank = sorted(told.items(), key=lambda entry: entry[1]["rank"])[:3]
            assert [int(index) for index, _ in by_rank] == np.argsort(-before)[:3].tolist()


@pytest.mark.slow
def test_prompts_are_scored_alone(client):
    """Without a completion, also where the prompt leaves no room for one: what is told is that of the prompt."""
    for prompt in ("sort:4821=1248", "7" * LONGEST):
        ask = {"model": "sorter", "prompt": [prompt] * 2, "echo": True, "logprobs": 1, "temperature": 0}
        answer = client.completions.create(**ask, max_tokens=0)
        assert answer.usage.completion_tokens == 0 and answer.usage.prompt_tokens == 2 * len(prompt)
        for choice in answer.choices:
            assert choice.text == prompt and choice.finish_reason == "length"
            assert choice.logprobs.text_offset == list(range(len(prompt)))
            assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.top_logprobs) == len(prompt)
        if len(prompt) < LONGEST:
            longer = client.completions.create(**ask, max_tokens=2).choices[0].logprobs
            assert answer.choices[0].logprobs.token_logprobs == longer.token_logprobs[: len(prompt)]


def spaced(spacing, chat, **body):
    """A request and its choice, to which the tokens behind "ab" in "ab c d" have come one by one."""
    from jaxrl_llm.serving.bodies import parse
    from jaxrl_llm.serving.choice import Choice
    from jaxrl_llm.serving.handles import Tokens

    tokenizer = spacing_tokenizer(spacing)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    asked = parse(body, chat, tokenizer, ["sorter"], (2,), 128, len(tokenizer), 8)
    choice = Choice(0, asked, tokenizer, asked.prompts[0])
    ids = tokenizer.encode("ab c d")[len(tokenizer.encode("ab")) :]
    for number, index in enumerate(ids, 1):
        choice.add(Tokens([index], [-1.0], [], [], "length" if number == len(ids) else None))
    return asked, choice


@pytest.mark.parametrize("spacing", SPACINGS)
def test_a_completion_goes_on_with_its_prompt_as_it_stands(spacing):
    """With the space that its first token brings, which decoders of SentencePiece's kind leave out of a text."""
    from jaxrl_llm.commands.generate import completion_text
    from jaxrl_llm.models.logprobs import Likeliest
    from jaxrl_llm.serving.choice import Piece

    for stream in (True, False):
        asked, choice = spaced(spacing, False, prompt="ab", logprobs=0, stream=stream)
        assert choice.text == " c d"
    told = choice.logprobs(Piece(choice.text, choice.ids, choice.logps, choice.top))
    assert told["tokens"] == [" c", " d"] and told["text_offset"] == [0, 2]
    model = SimpleNamespace(tokenizer=choice.tokenizer)
    assert completion_text(model, "ab", asked.prompts[0], choice.ids) == " c d"
    # The beginning of the row is a token, and no part of the text.
    count = len(asked.prompts[0])
    choice.handle = SimpleNamespace(scores=Likeliest(*np.zeros((2, count)), *np.zeros((2, count, 1)).astype(int)))
    text, before = choice.echoed()
    assert text == "ab" and before["tokens"][0] == "<s>" and before["text_offset"][:2] == [0, 0]
    assert before["text_offset"][-1] == 1


@pytest.mark.parametrize("spacing", SPACINGS)
def test_a_turn_is_a_text_of_its_own(spacing):
    """As training decodes it; but a message that is left open goes on."""
    from jaxrl_llm.commands.generate import completion_text
    from jaxrl_llm.data.templates import decode_completion

    user, begun = {"role": "user", "content": "x"}, {"role": "assistant", "content": "ab"}
    for messages in ([user], [user, begun]):
        goes_on = len(messages) == 2  # as vLLM's clients say it
        told = {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}
        asked, choice = spaced(spacing, True, messages=messages, **told)
        alone = decode_completion(choice.tokenizer, choice.ids, False)
        assert choice.text == (alone if len(messages) == 1 else " c d")
        model = SimpleNamespace(tokenizer=choice.tokenizer)
        assert completion_text(model, messages, asked.prompts[0], choice.ids) == choice.text


def test_a_text_completion_takes_the_room_that_is_left(sorter):
    from jaxrl_llm.serving.bodies import parse
    from jaxrl_llm.serving.errors import BadRequestError

    def limits(**body):
        return parse(body, False, sorter.tokenizer, ["sorter"], (257,), 128, 320, 8).limits

    assert limits(prompt=["x" * 100, "x" * 120, "x" * 127]) == [16, 8, 1]
    for body in ({"prompt": "x" * 128}, {"prompt": "x" * 120, "max_tokens": 9}):
        with pytest.raises(BadRequestError, match="this model's rows have 128 tokens"):
            limits(**body)


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "text"])
def test_a_stream_adds_up_to_the_answer(client, chat):
    """Texts, ids and log-probs of the pieces are those of the whole, and usage comes last."""
    options = {"model": "sorter", "max_tokens": 30, "seed": 11, "n": 2, "temperature": 1.3}
    options["extra_body"] = {"return_token_ids": True, "ignore_eos": True, "skip_special_tokens": False}
    if chat:
        create, options = client.chat.completions.create, {**options, "messages": CHAT, "logprobs": True}
    else:
        create, options = client.completions.create, {**options, "prompt": "sort:3=", "logprobs": 1}
    whole = create(**options)
    texts, ids, logps, reasons, usages, pieces = ["", ""], [[], []], [[], []], [None, None], [], 0
    for event in create(**options, stream=True, stream_options={"include_usage": True}):
        if event.usage is not None:
            usages.append(event.usage)
        for choice in event.choices:
            assert reasons[choice.index] is None, "nothing follows the end of a choice"
            pieces += 1
            texts[choice.index] += (choice.delta.content or "") if chat else choice.text
            ids[choice.index] += choice.token_ids
            new = choice.logprobs.content if chat else choice.logprobs.token_logprobs
            logps[choice.index] += [entry.logprob for entry in new] if chat else new
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content if chat else choice.text for choice in whole.choices]
    assert ids == [choice.token_ids for choice in whole.choices]
    assert [len(row) for row in logps] == [len(row) for row in ids] == [30, 30]
    assert reasons == ["length", "length"] and pieces > 6
    assert [usage.completion_tokens for usage in usages] == [60]


def test_stop_strings(client, sorter):
    """The text ends before the string, or behind it; tokens behind the one that completed it are left out."""
    ask = {"model": "sorter", "prompt": "sort:4821=", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**ask).choices[0].text
    assert whole == "1248"
    for stop, kept in (("24", "1"), (["48", "2"], "1"), ("8", "124"), ("x", "1248"), ("481", "1248")):
        (choice,) = client.completions.create(**ask, stop=stop, extra_body={"return_token_ids": True}).choices
        assert (choice.text, choice.finish_reason) == (kept, "stop")
        events = client.completions.create(**ask, stop=stop, stream=True)
        assert "".join(event.choices[0].text for event in events) == kept
    (choice,) = client.completions.create(
        **ask, stop="24", extra_body={"include_stop_str_in_output": True, "return_token_ids": True}
    ).choices
    assert choice.text == "124" and sorter.tokenizer.decode(choice.token_ids) == "124"
    ends = sorter.tokenizer.encode("4")
    (choice,) = client.completions.create(**ask, extra_body={"stop_token_ids": ends}).choices
    assert (choice.text, choice.finish_reason) == ("12", "stop")
    special = {"logit_bias": {"259": 100}}  # the token <|user|>, which writes nothing
    for stop, reason, count in (("<|user|>", "stop", 1), ("<|system|>", "length", 12)):
        answer = client.completions.create(**ask, **special, stop=["x", stop])
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", reason)
        assert answer.usage.completion_tokens == count


class Words:
    """A tokenizer whose tokens are these texts."""

    def __init__(self, texts):
        self.texts = texts

    def decode(self, ids, **_):
        return "".join(self.texts[index] for index in ids)


@pytest.mark.parametrize(
    ("texts", "stop", "kept", "behind"),
    [
        (["<", "tool"], ["ol", "o"], "<t", "<to"),
        (["<", "tool"], ["oo", "t"], "<", "<t"),
        (["<", "tool"], ["tool", "oo"], "<t", "<too"),  # `oo` is there before `tool` is
        (["<", "tool"], ["ol", "ool"], "<t", "<tool"),
        (["a stop", " and END"], ["END", "stop"], "a ", "a stop"),
    ],
)
def test_the_stop_string_that_is_complete_first_ends_an_answer(sorter, texts, stop, kept, behind):
    """However the text is cut into tokens, and whichever is first in the list."""
    from jaxrl_llm.serving.bodies import parse
    from jaxrl_llm.serving.choice import Choice
    from jaxrl_llm.serving.handles import Tokens

    for stops, words, stream, include in itertools.product(
        (stop, stop[::-1]), (texts, list("".join(texts))), (True, False), (True, False)
    ):
        body = {"prompt": "x", "stop": stops, "stream": stream, "include_stop_str_in_output": include}
        asked = parse(body, False, sorter.tokenizer, ["sorter"], (257,), 128, 320, 8)
        choice = Choice(0, asked, Words(words), [1])
        given = ""
        for index in range(len(words)):
            given += choice.add(Tokens([index], [0.0], [], [], None)).text
            if choice.finish_reason is not None:
                break
        assert choice.finish_reason == "stop" and given == choice.text == (behind if include else kept)


@pytest.mark.parametrize("written", ["{{ '<' + c.arguments + '>' }}", "{{ '<' + c.arguments | tojson + '>' }}"])
def test_messages_have_the_form_that_the_template_reads(sorter, written):
    """Arguments are texts in DeepSeek's template and objects in Hermes'; parts of text are one text in both.

    A turn of calls alone has no content, which a template may add to another text.
    """
    from jaxrl_llm.serving.bodies import parse

    tokenizer = copy.copy(sorter.tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '[' + m.content }}{% for c in m.tool_calls or [] %}{% set c = c.function %}"
        + written
        + "{% endfor %}]{% endfor %}"
    )
    parts = [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]
    call = {"type": "function", "id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}
    calling = {"role": "assistant", "content": None, "tool_calls": [call]}
    body = {"messages": [{"role": "user", "content": parts}, calling, {"role": "tool", "content": "3"}]}
    (ids,) = parse(body, True, tokenizer, ["sorter"], (257,), 128, 320, 8).prompts
    assert tokenizer.decode(ids) == '[42][<{"a": 1}>][3]'


def test_models(client):
    assert [model.id for model in client.models.list()] == ["sorter"]
    assert client.models.retrieve("sorter").max_model_len == 128
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
        client.completions.create(model="other", prompt="x")


@pytest.mark.slow
def test_a_client_that_leaves_frees_its_slots(client, running):
    """Of a stream, and of an answer that it waits for; what was asked meanwhile by others is what it is alone."""
    queue = running.server.queue
    cancelled = queue.counts.cancelled_rows
    endless = {"model": "sorter", "prompt": "x", "max_tokens": 120, "extra_body": {"ignore_eos": True}, "n": 4}
    stream = client.completions.create(**endless, stream=True)
    next(iter(stream))
    stream.close()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.02).completions.create(**endless)
    (other,) = client.completions.create(model="sorter", prompt="sort:4821=", max_tokens=8, temperature=0).choices
    assert other.text == "1248"
    deadline = time.monotonic() + 30
    while queue.counts.running + queue.counts.waiting and time.monotonic() < deadline:
        time.sleep(0.02)
    assert queue.counts.running + queue.counts.waiting == 0
    assert cancelled < queue.counts.cancelled_rows <= cancelled + 8


class Told:
    """A queue whose rows say what they are told, in the place of a model."""

    def __init__(self, queue, ids, reason="stop"):
        self.queue, self.ids, self.reason = queue, ids, reason

    def submit(self, handles):
        from jaxrl_llm.serving.handles import Tokens

        for handle in handles:
            for start in range(0, len(self.ids), 3):
                part = self.ids[start : start + 3]
                last = start + 3 >= len(self.ids)
                handle.deliver(Tokens(part, [-1.0] * len(part), [], [], self.reason if last else None))

    def __getattr__(self, name):
        return getattr(self.queue, name)


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        (f"Let me see. {CALL}", "Let me see.", [{"a": 3}]),
        (f"{CALL}\n{CALL}", None, [{"a": 3}, {"a": 3}]),
        ('{"name": "add", "parameters": {"a": 3}}', None, [{"a": 3}]),
        ('{"sum": 3} is <tool> it', '{"sum": 3} is <tool> it', []),
        ("<tool_call>add(3)</tool_call>", "<tool_call>add(3)</tool_call>", []),
        ('<tool_call>{"name": "add", "arguments": {"a": "\\ud83d"}}</tool_call>', None, [{"a": "\ufffd"}]),
        ('{"name": "sub", "arguments": {}}', '{"name": "sub", "arguments": {}}', []),
        ('<tool_call>{"name": "add"}</tool_call>', None, [{}]),
        ('{"name": "Ann", "age": 30}', '{"name": "Ann", "age": 30}', []),
        ('{"name": "Ann", "parameters": {}}', '{"name": "Ann", "parameters": {}}', []),
        ("[" * 3000, "[" * 3000, []),
        ("a < b and <tool_", "a < b and <tool_", []),
    ],
)
def test_tool_calls(client, running, sorter, monkeypatch, text, content, arguments):
    """Calls of the families' forms become `tool_calls`, whole and in a stream; what is no call is text as it stands."""
    ids = [*sorter.tokenizer.encode(text), sorter.tokenizer.eos_token_id]
    monkeypatch.setattr(running.server, "queue", Told(running.server.queue, ids))
    ask = {"model": "sorter", "messages": CHAT, "tools": [TOOL]}
    (choice,) = client.chat.completions.create(**ask).choices
    calls = choice.message.tool_calls or []
    assert choice.message.content == content
    assert [json.loads(call.function.arguments) for call in calls] == arguments
    assert choice.finish_reason == ("tool_calls" if arguments else "stop")
    streamed, told, reason = "", [], None
    for event in client.chat.completions.create(**ask, stream=True):
        delta = event.choices[0].delta
        streamed += delta.content or ""
        told += delta.tool_calls or []
        reason = event.choices[0].finish_reason
    assert (streamed.strip() or None) == content and reason == choice.finish_reason
    assert [json.loads(call.function.arguments) for call in told] == arguments
    assert [call.index for call in told] == list(range(len(told)))
    (plain,) = client.chat.completions.create(**ask, tool_choice="none").choices
    assert plain.message.tool_calls is None and plain.message.content == text


@pytest.mark.parametrize("parallel", [None, True, False])
def test_one_call_where_several_are_not_wanted(client, running, sorter, monkeypatch, parallel):
    """The first of those that the model makes, as with vLLM."""
    ids = [*sorter.tokenizer.encode(f"{CALL}\n{CALL}"), sorter.tokenizer.eos_token_id]
    monkeypatch.setattr(running.server, "queue", Told(running.server.queue, ids))
    ask = {"model": "sorter", "messages": CHAT, "tools": [TOOL], "extra_body": {"parallel_tool_calls": parallel}}
    (choice,) = client.chat.completions.create(**ask).choices
    events = list(client.chat.completions.create(**ask, stream=True))
    told = [call.function.name for event in events for call in event.choices[0].delta.tool_calls or []]
    called = [call.function.name for call in choice.message.tool_calls]
    assert called == told == ["add"] * (1 if parallel is False else 2)
    assert choice.finish_reason == events[-1].choices[0].finish_reason == "tool_calls"


def test_characters_come_whole(client, running, sorter, monkeypatch):
    """A character of several tokens is in one piece of a stream."""
    text = "é is 私, not 👍🏽."
    ids = [*sorter.tokenizer.encode(text), sorter.tokenizer.eos_token_id]
    assert len(ids) > len(text) + 5
    monkeypatch.setattr(running.server, "queue", Told(running.server.queue, ids))
    events = client.chat.completions.create(model="sorter", messages=CHAT, stream=True)
    pieces = [event.choices[0].delta.content or "" for event in events]
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
    (choice,) = client.chat.completions.create(model="sorter", messages=CHAT, stop=["👍"]).choices
    assert choice.message.content == "é is 私, not "


def test_the_client_of_the_environments_room(running, sorter):
    """`environment.rollout_func = server(...)` samples from it: ids and log-probs as training wants them, at its
    temperature."""
    from jaxrl_llm.environments.server import server

    ids = render_prompt(sorter.tokenizer, "sort:4821=")
    trainer = SimpleNamespace(
        args=SimpleNamespace(
            max_completion_length=6,
            temperature=0.7,
            top_p=1.0,
            top_k=5,
            min_p=0.0,
            repetition_penalty=1.0,
            frequency_penalty=0.0,
            presence_penalty=0.0,
        ),
        num_generations=2,
        tokenize=lambda prompts: [ids for _ in prompts],
    )
    rows = server(f"{running.url}/v1", "sorter")(["sort:4821=", "sort:4821="], trainer)
    assert rows["prompt_ids"] == [ids] * 4
    assert [len(row) for row in rows["logprobs"]] == [len(row) for row in rows["completion_ids"]]
    assert all(1 <= len(row) <= 6 for row in rows["completion_ids"])


@pytest.mark.slow
def test_settings_of_logits_are_those_of_generate(client, sorter):
    """Of rows among others that have none, by the fields of OpenAI and of vLLM."""
    prompt, penalties = "sort:48210=", {"frequency_penalty": 2.0, "presence_penalty": 1.0}
    asked = (  # OpenAI's arguments, further fields of the body, and the arguments of generate
        ({}, {}, {}),
        (penalties, {"repetition_penalty": 20.0}, {"repetition_penalty": 20.0, **penalties}),
        (
            {"logit_bias": {"48": -100, "50": 2.5}},  # without any of the three it is another text
            {"bad_words": ["12", "8"], "min_tokens": 9},
            {"logit_bias": ("48=-100", "50=2.5"), "bad_words": ("12", "8"), "min_new_tokens": 9},
        ),
    )
    expected = [jaxrl_llm.generate(sorter, [prompt], 12, 0.0, **own)[0] for _, _, own in asked]
    assert len(set(expected)) == len(asked)
    ask = {"model": "sorter", "prompt": prompt, "max_tokens": 12, "temperature": 0}
    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(lambda x: client.completions.create(**ask, **x[0], extra_body=x[1]), asked))
    assert [one.choices[0].text for one in found] == expected


def test_a_stop_string_counts_from_the_fewest_tokens_on(client):
    ask = {"model": "sorter", "prompt": "sort:4214=", "max_tokens": 12, "temperature": 0, "stop": ["1", "4"]}
    for fewest, text in ((0, ""), (2, "12"), (3, "12")):
        (choice,) = client.completions.create(**ask, extra_body={"min_tokens": fewest}).choices
        assert choice.text == text, fewest
