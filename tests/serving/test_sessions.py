"""Sessions of agents without a network: what goes on with a row, what forks, budgets, seeds and rewards."""

import dataclasses
import json
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import httpx
import pytest

from jaxrl_llm.data.images import ImageLimits, data_url
from jaxrl_llm.data.observations import TurnTokenizer
from jaxrl_llm.data.templates import render_prompt
from jaxrl_llm.models.files.hf import find_tokenizer, remember_images
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.serving.bodies import parse
from jaxrl_llm.serving.choice import Choice
from jaxrl_llm.serving.errors import BadRequestError
from jaxrl_llm.serving.handles import Handle, Tokens
from jaxrl_llm.serving.responses import ResponsesRequest
from jaxrl_llm.serving.sessions import MODEL, Branch, Call, Session, SessionSpec
from tests.data.qwen_vl import qwen_vl_folder
from tests.data.smolvlm import picture

EOS = 257
QUESTION = {"role": "user", "content": "sort:21="}


@pytest.fixture(scope="module")
def turns():
    return TurnTokenizer(find_tokenizer("embedded:sort"), (EOS,), 64)


def session_of(turns, key=b"key", **bounds) -> Session:
    spec = {"sampling": SamplingParams(0.7), "prompt": 40, "completion": 60, "calls": 4} | bounds
    return Session("1-0", key, SessionSpec(**spec), turns)


def ask(session, text="12", reason: str | None = "stop", **body):
    """A call of the session that is answered with the tokens of `text`; returns the request and the branch it made.

    reason: "stop" at the end of text, "length", or None where the text has a stop string or ends with a stop id.
    """
    call, chat, turns = Call(session), "messages" in body, session.turns
    session.check_open()
    asked = call.bounded(parse({"model": MODEL, **body}, chat, turns.tokenizer, [MODEL], turns.eos, 2**31, 320,
                               1024, call.render))  # fmt: skip
    ids = [*turns.tokenizer(text, add_special_tokens=False)["input_ids"], *(turns.eos[:1] if reason == "stop" else ())]
    reason = "stop" if ids[-1] in asked.ends else reason
    choice = Choice(0, asked, turns.tokenizer, asked.prompts[0])
    choice.add(Tokens(ids, [-0.5] * len(ids), [], [], reason))
    assert choice.ids == ids and choice.finish_reason is not None
    call.record([choice])
    return asked, session.branches[-1]


def test_thoughts_that_are_told_apart_stay_in_the_row(turns):
    """A call goes on with the sampled tokens, thoughts included, where it has these beside the text."""
    session = session_of(turns)
    _, one = ask(session, "<think>Hm.</think>\n12", messages=[QUESTION], separate_reasoning=True)
    assert one.messages == [{"role": "assistant", "content": "12", "reasoning_content": "Hm."}]
    said = {"role": "assistant", "content": "12", "reasoning_content": "Hm. "}
    asked, two = ask(session, messages=[QUESTION, said, QUESTION], separate_reasoning=True)
    assert two.parent is one and turns.decode(one.completion_ids, True) == "<think>Hm.</think>\n12"
    assert asked.prompts[0][: len(one.prompt_ids + one.completion_ids)] == one.prompt_ids + one.completion_ids
    for other in ({**said, "reasoning_content": "Oh."}, {"role": "assistant", "content": "12"}):
        assert ask(session, messages=[QUESTION, other, QUESTION])[1].parent is None


def test_calls_with_images(tmp_path):
    """A call goes on with those that an earlier one had; the same text with another image forks."""
    tokenizer = find_tokenizer(str(qwen_vl_folder(tmp_path)))
    remember_images(tokenizer, tmp_path)
    session = session_of(TurnTokenizer(tokenizer, (tokenizer.eos_token_id,), 200), prompt=200, completion=200, calls=5)
    pad, texts = tokenizer.convert_tokens_to_ids("<|image_pad|>"), ("what?", "and?")
    shown = [{"type": "image_url", "image_url": {"url": data_url(picture(*size))}} for size in ((40, 20), (9, 30))]
    questions = [
        {"role": "user", "content": [image, {"type": "text", "text": text}]}
        for image, text in zip(shown, texts, strict=True)
    ]
    first, one = ask(session, messages=questions[:1])
    assert first.prompts[0].count(pad) == 8 and first.tiles == one.tiles and len(first.tiles) == 1
    said = {"role": "assistant", "content": "12"}
    second, two = ask(session, messages=[questions[0], said, questions[1]])
    assert (
        two.parent is one and len(two.tiles) == 2 and [image.size for image in two.tiles.images] == [(20, 40), (30, 9)]
    )
    assert second.prompts[0][: len(one.prompt_ids)] == one.prompt_ids and second.prompts[0].count(pad) == 12
    other = {"role": "user", "content": [shown[1], {"type": "text", "text": "what?"}]}
    _, fork = ask(session, messages=[other, said, questions[1]])
    assert fork.parent is None and len(session.leaves) == 2
    drawn = {"role": "assistant", "content": [shown[1], {"type": "text", "text": "12"}]}
    third, _ = ask(session, messages=[questions[0], drawn, questions[0]])  # an answer that no call of it has given
    assert len(third.tiles) == 3
    with pytest.raises(BadRequestError, match="which stands for one"):
        ask(session, prompt="what is <|image_pad|>?")
    with pytest.raises(BadRequestError, match="send the image itself"):
        ask(session, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/a.png"}}]}])


def checked(branch: Branch) -> Branch:
    assert len(branch.completion_ids) == len(branch.mask) == len(branch.logps)
    assert all((logp == -0.5) == (kept == 1) for logp, kept in zip(branch.logps, branch.mask, strict=True))
    return branch


def test_messages_that_extend_a_call_keep_its_tokens(turns):
    session = session_of(turns)
    first, one = ask(session, messages=[QUESTION])
    assert first.prompts == [render_prompt(turns.tokenizer, [QUESTION])] and first.sampling == SamplingParams(0.7)
    # As a client gives it back: space around the text, and fields without a value.
    said = {"role": "assistant", "content": " 12\n", "refusal": None, "tool_calls": None}
    second, two = ask(session, "1", messages=[QUESTION, said, {"role": "user", "content": "least?"}])
    assert second.prompts[0][: len(one.prompt_ids) + 3] == [*one.prompt_ids, *one.completion_ids]
    assert turns.tokenizer.decode(second.prompts[0]).endswith("12<|end|><|user|>least?<|end|><|assistant|>")
    assert checked(two).prompt_ids == one.prompt_ids and two.turns == 2 and session.leaves == [two]
    assert [x["content"] for x in two.messages] == ["12", "least?", "1"] and sum(two.mask) == 5
    # Each turn: its end, its call, and the ids that it answered.
    between = tuple(second.prompts[0][len(one.prompt_ids) + 3 :])
    assert two.marks == ((3, 0, tuple(one.prompt_ids)), (len(two.completion_ids), 1, between))
    # The same conversation as one that the template renders as a whole.
    whole = [QUESTION, {"role": "assistant", "content": "12"}, {"role": "user", "content": "least?"}]
    assert second.prompts[0] == render_prompt(turns.tokenizer, whole)


def test_a_turn_that_was_cut_off_is_ended_by_the_template(turns):
    session = session_of(turns)
    ask(session, "12", "length", messages=[QUESTION], max_tokens=2)
    said = {"role": "assistant", "content": "12"}
    _, two = ask(session, "1", messages=[QUESTION, said, QUESTION])
    assert turns.tokenizer.decode(two.prompt_ids + two.completion_ids[:3]).endswith("12<|end|>")
    assert checked(two).mask[:3] == [1, 1, 0]
    # Or goes on where it was cut.
    _, three = ask(session, "!", messages=[QUESTION, said])
    assert three.mask == [1] * 4 and three.parent is session.branches[0]


def test_a_history_that_was_rewritten_forks(turns):
    session = session_of(turns)
    _, one = ask(session, messages=[QUESTION])
    other = [QUESTION, {"role": "assistant", "content": "21"}, {"role": "user", "content": "least?"}]
    _, two = ask(session, "1", messages=other)
    assert two.prompt_ids == render_prompt(turns.tokenizer, other) and two.parent is None and two.turns == 1
    assert session.leaves == [one, two] and session.retokenised == 0
    # What was offered besides is part of a history.
    tools = [{"type": "function", "function": {"name": "f"}}]
    _, three = ask(session, messages=[QUESTION, {"role": "assistant", "content": "12"}, QUESTION], tools=tools)
    assert three.parent is None and session.leaves == [one, two, three]


def test_calls_of_tools_go_on(turns):
    session = session_of(turns, completion=200)
    tools = [{"type": "function", "function": {"name": "add"}}]
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    _, one = ask(session, call, messages=[QUESTION], tools=tools)
    called = {"id": "mine", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    said = {"role": "assistant", "content": "", "tool_calls": [called]}
    result = {"role": "tool", "tool_call_id": "mine", "content": "1"}
    _, two = ask(session, "1", messages=[QUESTION, said, result], tools=tools)
    assert two.parent is one and [x["role"] for x in two.messages] == ["assistant", "tool", "assistant"]
    # Of two calls the client was shown one: that is another conversation.
    _, both = ask(session, call + call, messages=[QUESTION], tools=tools, parallel_tool_calls=False)
    assert len(both.messages[0]["tool_calls"]) == 2
    _, fork = ask(session, "1", messages=[QUESTION, said, {**result, "content": "2"}], tools=tools)
    assert fork.parent is one


@pytest.mark.parametrize("by_id", [True, False])
def test_calls_of_responses_go_on(turns, by_id):
    """By the id of the response before, or with its items, each call before its output as some programs have them."""
    session, tool = session_of(turns, completion=400), {"type": "function", "name": "f", "parameters": {}}
    question = {"role": "user", "content": "sort:21="}
    first = ResponsesRequest({"input": [question], "tools": [tool]}, session.conversations)
    call = '<tool_call>{"name": "f", "arguments": {"x": %d}}</tool_call>'
    _, branch = ask(session, f"So: \n{call % 1}\n{call % 2}", **first.chat)
    said = branch.messages[-1]
    session.conversations.add("resp_1", [*first.messages, {**said, "content": "So:"}])
    calls = [
        {"type": "function_call", "call_id": called["id"], "name": called["function"]["name"],
         "arguments": json.dumps(called["function"]["arguments"])}
        for called in said["tool_calls"]
    ]  # fmt: skip
    outputs = [{"type": "function_call_output", "call_id": one["call_id"], "output": "3"} for one in calls]
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So:"}]}
    body = {"input": [question, message, calls[0], outputs[0], calls[1], outputs[1]], "tools": [tool]}
    if by_id:
        body |= {"input": outputs, "previous_response_id": "resp_1"}
    asked, after = ask(session, **ResponsesRequest(body, session.conversations).chat)
    assert after.parent is branch and after.turns == 2 and session.retokenised == 0 and len(calls) == 2
    assert asked.prompts[0][: len(branch.prompt_ids) + len(branch.completion_ids)] == [
        *branch.prompt_ids, *branch.completion_ids
    ]  # fmt: skip
    other = [{**question, "content": "sort:1="}, *body["input"][1:]] if not by_id else [*outputs, question]
    _, forked = ask(session, **ResponsesRequest({**body, "input": other}, session.conversations).chat)
    assert forked.parent is (branch if by_id else None)


def test_texts_and_ids_go_on(turns):
    session = session_of(turns, calls=9)
    _, one = ask(session, prompt="sort:21=")
    second, two = ask(session, "1", prompt="sort:21=12sort:=")
    assert two.parent is one and checked(two).mask == [1] * 3 + [0] * 6 + [1] * 2
    third, three = ask(session, "9", prompt=[*second.prompts[0], *two.completion_ids[-2:], 65])
    assert three.parent is None  # ids do not say where texts ended
    fourth, four = ask(session, "7", prompt=[*third.prompts[0], *three.completion_ids, 66])
    assert four.parent is three and fourth.prompts[0][-1] == 66 and four.mask == [1, 1, 0, 1, 1]
    _, again = ask(session, prompt="sort:21=")
    assert again.parent is None, "the same question is asked anew"


REACT = {"prompt": "sort:", "stop": ["\nObs:"]}


@pytest.mark.parametrize(
    ("sampled", "following", "goes_on"),
    [
        ("x\nObs:", "\nObs: 4\nNext:", True),
        ("x\nObs:", " 4", False),  # behind what the client was shown: a prompt without the stop string
        ("x\nObs:", "\nOther: 4", False),
    ],
)
def test_a_stop_string_is_in_the_row_once(turns, sampled, following, goes_on):
    """A call goes on where its prompt has what was sampled; else it begins a row, and none has the string twice."""
    session = session_of(turns)
    _, one = ask(session, sampled, None, **REACT)
    prompt = REACT["prompt"] + one.messages[0]["content"] + following
    assert one.messages[0]["content"] == "x"
    asked, two = ask(session, **REACT | {"prompt": prompt})
    assert turns.tokenizer.decode(asked.prompts[0]) == prompt
    assert two.parent is (one if goes_on else None)
    assert checked(two).mask[: len(sampled)] == [1] * (len(sampled) if goes_on else 3)


def test_a_stop_token_and_a_shown_stop_string_are_in_the_row_once(turns):
    session = session_of(turns, calls=9)
    body = {"prompt": "sort:", "stop_token_ids": [ord("\n")]}
    _, one = ask(session, "x\n", None, **body)
    asked, two = ask(session, **body | {"prompt": "sort:x\ny"})
    assert turns.tokenizer.decode(asked.prompts[0]) == "sort:x\ny" and two.parent is one
    _, fork = ask(session, **body | {"prompt": "sort:xy"})
    assert fork.parent is None
    body = {**REACT, "include_stop_str_in_output": True}
    _, one = ask(session, "z\nObs:", None, **body)
    _, two = ask(session, **body | {"prompt": "sort:z\nObs: 4"})
    assert one.messages[0]["content"] == "z\nObs:" and two.parent is one


def test_a_chat_whose_answer_was_cut_at_a_stop_string_forks(turns):
    """The template ends the turn behind what the client was shown; where it was shown the string the row goes on."""
    session = session_of(turns, calls=9)
    for included in (False, True):
        body = {"stop": ["\nObs:"], "include_stop_str_in_output": included}
        _, one = ask(session, "x\nObs:", None, messages=[QUESTION], **body)
        said = {"role": "assistant", "content": one.messages[0]["content"]}
        messages = [QUESTION, said, {"role": "user", "content": "4"}]
        asked, two = ask(session, messages=messages, **body)
        assert asked.prompts[0] == render_prompt(turns.tokenizer, messages)
        assert two.parent is (one if included else None)


@pytest.mark.parametrize(("name", "value"), [("logit_bias", {"65": 5}), ("bad_words", ["no"]), ("min_tokens", 3)])
def test_what_a_session_does_not_sample_by_is_refused(turns, name, value):
    with pytest.raises(BadRequestError, match=rf"{name} is .*which sessions do not take") as raised:
        ask(session_of(turns), prompt="x", **{name: value})
    assert raised.value.param == name
    ask(session_of(turns), prompt="x", **{name: type(value)()})


def test_a_prompt_that_is_scored_alone_is_no_call(turns):
    with pytest.raises(BadRequestError, match="max_tokens is 0, but sessions are of what they sample"):
        ask(session_of(turns), prompt="x", max_tokens=0, echo=True)


def test_seeds_are_of_the_row_and_the_prompt(turns):
    def seeds(key, prompts):
        session = session_of(turns, key, calls=9)
        return [ask(session, prompt=prompt)[0].seed for prompt in prompts]

    one = seeds(b"a", ["x", "y", "x"])
    assert len(set(one)) == 3 and all(0 <= seed < 2**32 for seed in one)
    assert seeds(b"a", ["y", "x", "x"]) == [one[1], one[0], one[2]]  # whatever comes first
    assert not set(seeds(b"b", ["x", "y", "x"])) & set(one)


def test_budgets(turns):
    session = session_of(turns, calls=2, tokens=5)
    asked, _ = ask(session, prompt="sort:21=", max_tokens=50)
    assert asked.limits == [5]
    asked, _ = ask(session, prompt="x", max_tokens=50)
    assert asked.limits == [2]
    with pytest.raises(BadRequestError, match="made its 2 calls") as raised:
        session.check_open()
    assert raised.value.status == 403
    full, short = session_of(turns, tokens=5), session_of(turns, completion=3)
    full.sampled = 5
    with pytest.raises(BadRequestError, match=r"its 5 tokens \(environment.agent_tokens"):
        full.check_open()
    with pytest.raises(BadRequestError, match=r"up to 40 \(rollout.max_prompt_length"):
        ask(session_of(turns), prompt="x" * 41)
    ask(short, prompt="sort:21=")
    with pytest.raises(BadRequestError, match=r"up to 3 tokens \(rollout.max_completion_length"):
        ask(short, prompt="sort:21=12x")
    with pytest.raises(BadRequestError, match="one a call"):
        ask(session_of(turns), prompt=["a", "b"])
    asked, _ = ask(several := session_of(turns, tokens=5), prompt="sort:21=", n=2)
    assert asked.limits == [2]
    with pytest.raises(BadRequestError, match=r"agent_tokens\), .*: 2 are left for n = 3") as raised:
        ask(several, prompt="sort:21=", n=3)
    assert raised.value.status == 403 and raised.value.code == "budget_exceeded"


def test_calls_at_once_keep_to_the_tokens_of_their_session(turns):
    """Each keeps what it may take until it has ended, however it ends, and what it has not taken is free again."""
    pytest.importorskip("uvicorn")
    from jaxrl_llm.serving.gateway import Gateway

    waiting: SimpleQueue[list[Handle]] = SimpleQueue()
    counts = types.SimpleNamespace(waiting=0, weight_version=0)
    queue = types.SimpleNamespace(submit=waiting.put, cancel=lambda handles: None, counts=counts, adapters={})
    gateway = Gateway(queue, turns, 320, 60, ImageLimits())
    [session] = gateway.open([b"key"], SessionSpec(SamplingParams(), 40, 60, 100, tokens=10))
    sub_agent = session.open_sub_agent({"name": "searcher"})
    gateway.sessions[sub_agent.name] = sub_agent
    end = Tokens([50, 49], [-0.5, -0.5], [], [], "stop")

    def post(of=session, **body):
        key = {"Authorization": f"Bearer {gateway.key}"}
        return httpx.post(f"{gateway.base_url(of)}/completions", json={"prompt": "x", **body}, headers=key, timeout=60)

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(post, max_tokens=6)
        [one] = waiting.get(timeout=60)
        second = pool.submit(post, sub_agent, max_tokens=60, stream=True)
        [two] = waiting.get(timeout=60)
        assert (one.request.limit, two.request.limit) == (6, 4)
        for of in (session, sub_agent):
            refused = post(of)
            assert refused.status_code == 403 and "0 are left for n = 1" in refused.text
        one.deliver(end)
        assert first.result().json()["usage"]["completion_tokens"] == 2
        third = pool.submit(post, n=2, max_tokens=60)
        three = waiting.get(timeout=60)
        assert [handle.request.limit for handle in three] == [2, 2]
        two.deliver(end)
        assert second.result().status_code == 200
        three[0].deliver(MemoryError("none left"))  # nothing of it is kept
        assert third.result().status_code == 503
        fourth = pool.submit(post, max_tokens=60)
        [four] = waiting.get(timeout=60)
        assert four.request.limit == 6
        gateway.end(session, "the step is over")
        refused = fourth.result()  # and not with a status with which clients ask again by themselves
        assert refused.status_code == 403 and "the session is over: the step is over" in refused.text
    assert (session.sampled, sub_agent.sampled) == (2, 2) and session.tokens_left == 6
    gateway.close()


def test_a_long_text_is_tokenised_beside_the_calls_of_others(turns, monkeypatch):
    pytest.importorskip("uvicorn")
    from jaxrl_llm.serving.gateway import Call, Gateway

    started, release, render = threading.Event(), threading.Event(), Call.render

    def slow(self, prompt, *rest):
        if len(prompt) > 2**16:
            started.set()
            assert release.wait(60)
        return render(self, prompt, *rest)

    monkeypatch.setattr(Call, "render", slow)
    counts = types.SimpleNamespace(waiting=0, weight_version=0)
    queue = types.SimpleNamespace(submit=None, cancel=lambda handles: None, counts=counts, adapters={})
    gateway = Gateway(queue, turns, 320, 60, ImageLimits())
    [session] = gateway.open([b"key"], SessionSpec(SamplingParams(), 40, 60, 100))
    url, options = gateway.base_url(session), {"headers": {"Authorization": f"Bearer {gateway.key}"}, "timeout": 60}
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(httpx.post, f"{url}/completions", json={"prompt": "x" * 2**17}, **options)
        assert started.wait(60)
        assert httpx.get(f"{url}/models", **options).status_code == 200  # before it
        release.set()
        assert f"the prompt has {2**17} tokens" in long.result().text
    gateway.close()


def test_tokens_are_counted_without_a_call(turns):
    """And nothing is sampled outside of sessions."""
    pytest.importorskip("uvicorn")
    from jaxrl_llm.serving.gateway import Gateway

    gateway = Gateway(types.SimpleNamespace(cancel=lambda handles: None), turns, 320, 60, ImageLimits())
    [session] = gateway.open([b"key"], SessionSpec(SamplingParams(), 40, 60, 100))
    options = {"headers": {"x-api-key": gateway.key}, "timeout": 60}
    for address, model in ((gateway.base_url(session), "any"), (f"{gateway.url}/session/v1", session.name)):
        body = {"model": model, "messages": [QUESTION]}
        counted = httpx.post(f"{address}/messages/count_tokens", json=body, **options).json()
        assert counted == {"input_tokens": len(render_prompt(turns.tokenizer, [QUESTION]))}
    assert session.calls == 0
    assert httpx.post(f"{gateway.url}/v1/chat/completions", json={"messages": [QUESTION]}, **options).status_code == 404
    gateway.close()


def test_sub_agents_have_names_keys_and_limits_of_their_own(turns):
    session = session_of(turns, calls=4, tokens=12)
    first, second = (session.open_sub_agent({"name": "searcher", "max_turns": 1, "max_tokens": 3}) for _ in range(2))
    other = session.open_sub_agent({"name": "writer", "seconds": 100})
    assert (first.role, first.name, other.name) == ("searcher", "1-0.0", "1-0.2")
    assert len({one.key for one in session.family()}) == 4 and session.family() == [first, second, other, session]
    # Keys depend on the name and how many had it, not on what else was opened.
    alone = session_of(turns)
    writer, searcher = (alone.open_sub_agent({"name": name}) for name in ("writer", "searcher"))
    assert (writer.key, searcher.key) == (other.key, first.key)
    asked, _ = ask(first, prompt="sort:21=", max_tokens=50)
    assert asked.limits == [3]
    with pytest.raises(BadRequestError, match=r"the sub-agent 'searcher' has made its 1 call \(max_turns\)"):
        first.check_open()
    asked, _ = ask(other, "123", prompt="sort:21=", max_tokens=50)
    assert asked.limits == [9]  # of the session's 12
    asked, _ = ask(session, "123", prompt="sort:21=", max_tokens=50)
    assert asked.limits == [5]
    other.sampled += 1
    with pytest.raises(BadRequestError, match=r"the session has its 12 tokens \(environment.agent_tokens"):
        second.check_open()
    second.spec = dataclasses.replace(second.spec, end=0.0)
    other.sampled -= 1
    with pytest.raises(BadRequestError, match="the sub-agent 'searcher' has had its seconds"):
        second.check_open()
    session.over = "its agent has ended"
    with pytest.raises(BadRequestError, match="the session is over: its agent has ended"):
        other.open_sub_agent({"name": "reader"})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "name is None"),
        ({"name": "x" * 101}, "up to 100 characters"),
        ({"name": "a", "calls": 1}, "no field 'calls'; it takes name, compared_in, max_turns, max_tokens, seconds"),
        ({"name": "a", "compared_in": "row"}, "compared_in is 'row'; it takes group or session"),
        ({"name": "a", "max_turns": 1.5}, "max_turns is 1.5; it takes a number above 0"),
        ({"name": "a", "seconds": float("inf")}, "seconds is inf"),
        ({"name": "a", "max_tokens": 0}, "max_tokens is 0"),
        ({"name": "a", "max_tokens": 10**400}, "max_tokens is 1000"),
    ],
)
def test_sub_agents_that_cannot_be_opened(turns, body, message):
    with pytest.raises(BadRequestError, match=message):
        session_of(turns).open_sub_agent(body)


def test_rewards_that_are_posted(turns):
    session = session_of(turns)
    session.calls = 2
    for body in ({"reward": 1}, {"reward": {"right": 1.0, "short": 0.5}}, {"reward": 0.25, "turn": 0}):
        session.set_reward(body)
    assert session.reward == {"right": 1.0, "short": 0.5} and session.turn_rewards == {0: 0.25}
    for turn, state in enumerate([{"square": "e4"}, None]):
        session.set_reward({"reward": 0.5, "turn": turn, "state": state})
    assert session.turn_rewards == {0: 0.5, 1: 0.5} and session.turn_states == {0: {"square": "e4"}}
    wrong = ["1", float("nan"), 10**400, True, {}, {"a": "b"}, None]
    further = [{"reward": 1, "turn": -1}, {"reward": {"a": 1}, "turn": 1}, {"reward": 1, "why": 1}, {}]
    further += [{"reward": 1, "state": "e4"}, {"reward": 1, "turn": 2}]
    for body in [*({"reward": value} for value in wrong), *further]:
        with pytest.raises(BadRequestError):
            session.set_reward(body)
    session.over = "it took too long"
    with pytest.raises(BadRequestError, match="it took too long"):
        session.set_reward({"reward": 1})
