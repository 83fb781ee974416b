"""Requests that are wrong, too large, too slow or too many: each is refused by itself, and the server goes on."""

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

pytest.importorskip("starlette")

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "sort:1="}]
TOOL = {"type": "function", "function": {"name": "add"}}


@pytest.fixture(scope="module")
def web(running):
    with httpx.Client(base_url=running.url, timeout=60) as client:
        yield client
        answer = client.post(TEXT, json={"prompt": "sort:4821=", "temperature": 0})
        assert answer.json()["choices"][0]["text"] == "1248", "the server goes on"


def refused(answer: httpx.Response, status: int = 400) -> dict:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return error


def deep(depth: int = 5000) -> str:
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize(
    "body",
    ["", "{", "[]", "3", "null", '"x"', "{'prompt': 1}", deep(), '{"prompt": "\\ud800"}', "\xff\xfe", '{"a": 1e}'],
    ids=range(11),
)
def test_what_is_no_object_of_json(web, body):
    refused(web.post(TEXT, content=body.encode("latin-1")))


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {}, "prompt"),
        (TEXT, {"prompt": ""}, "prompt"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": [[]]}, "prompt"),
        (TEXT, {"prompt": {"a": 1}}, "prompt"),
        (TEXT, {"prompt": [1, "a"]}, "prompt"),
        (TEXT, {"prompt": [320]}, "prompt"),
        (TEXT, {"prompt": [-1]}, "prompt"),
        (TEXT, {"prompt": [True]}, "prompt"),
        (TEXT, {"prompt": [10**30]}, "prompt"),
        (TEXT, {"prompt": "x" * 200}, "prompt"),
        (TEXT, {"prompt": "x", "max_tokens": 128}, "prompt"),
        (TEXT, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        (TEXT, {"prompt": "x", "max_tokens": "3"}, "max_tokens"),
        (TEXT, {"prompt": "x", "max_tokens": 10**30}, "max_tokens"),
        (TEXT, {"prompt": "x", "n": 0}, "n"),
        (TEXT, {"prompt": "x", "n": 129}, "n"),
        (TEXT, {"prompt": "x", "temperature": -1}, "temperature"),
        (TEXT, {"prompt": "x", "temperature": "hot"}, "temperature"),
        (TEXT, {"prompt": "x", "top_p": 0}, "top_p"),
        (TEXT, {"prompt": "x", "top_p": 1.1}, "top_p"),
        (TEXT, {"prompt": "x", "min_p": 2}, "min_p"),
        (TEXT, {"prompt": "x", "seed": 1.5}, "seed"),
        (TEXT, {"prompt": "x", "stream": 1}, "stream"),
        (TEXT, {"prompt": "x", "stop": ""}, "stop"),
        (TEXT, {"prompt": "x", "stop": ["a"] * 17}, "stop"),
        (TEXT, {"prompt": "x", "stop": [1]}, "stop"),
        (TEXT, {"prompt": "x", "stop_token_ids": [320]}, "stop_token_ids"),
        (TEXT, {"prompt": "x", "stop_token_ids": list(range(17))}, "stop_token_ids"),
        (TEXT, {"prompt": "x", "logprobs": True}, "logprobs"),
        (TEXT, {"prompt": "x", "logprobs": 21}, "logprobs"),
        (TEXT, {"prompt": "x", "echo": True, "stream": True}, "stream"),
        (TEXT, {"prompt": "x", "prompt_logprobs": 129}, "prompt_logprobs"),
        (CHAT, {"messages": MESSAGES, "echo": True}, "echo"),
        (TEXT, {"prompt": "x", "best_of": 2}, "best_of"),
        (TEXT, {"prompt": "x", "frequency_penalty": 2.5}, "frequency_penalty"),
        (TEXT, {"prompt": "x", "logit_bias": {"320": 1}}, "logit_bias"),
        (TEXT, {"prompt": "x", "logit_bias": {"-1": 1}}, "logit_bias"),
        (TEXT, {"prompt": "x", "logit_bias": {"²": 1}}, "logit_bias"),
        (TEXT, {"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias"),
        (TEXT, {"prompt": "x", "logit_bias": [5, 1]}, "logit_bias"),
        (TEXT, {"prompt": "x", "bad_words": "a"}, "bad_words"),
        (TEXT, {"prompt": "x", "bad_words": [" "]}, "bad_words"),
        (TEXT, {"prompt": "x", "bad_words": ["a" * 17]}, "bad_words"),
        (TEXT, {"prompt": "x", "bad_words": ["a"] * 65}, "bad_words"),
        (TEXT, {"prompt": "x", "min_tokens": -1}, "min_tokens"),
        (TEXT, {"prompt": "x", "max_token": 3}, "max_token"),
        (TEXT, {"prompt": "x", "messages": MESSAGES}, "messages"),
        (TEXT, {"prompt": "x", "stream_options": {"usage": True}}, "stream_options"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": "hello"}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages"),
        (CHAT, {"messages": [{"role": 1, "content": "x"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        (CHAT, {"messages": [{"role": "assistant", "content": None, "tool_calls": ["x"]}]}, "messages"),
        (CHAT, {"messages": MESSAGES, "logprobs": 3}, "logprobs"),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"messages": MESSAGES, "tools": ["add"]}, "tools"),
        (CHAT, {"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": MESSAGES, "tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
        (CHAT, {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        (CHAT, {"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template"),
        (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (CHAT, {"messages": MESSAGES, "chat_template_kwargs": [1]}, "chat_template_kwargs"),
        (CHAT, {"messages": MESSAGES, "tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls"),
    ],
)
def test_wrong_fields_are_named(web, path, body, param):
    assert refused(web.post(path, json=body))["param"] == param


def test_what_asks_for_nothing_is_taken(web):
    """Fields at their neutral value, null ones, and those of who asks."""
    neutral = {"frequency_penalty": 0.0, "presence_penalty": 0, "logit_bias": None, "best_of": 1, "echo": False}
    body = {"prompt": "sort:4821=", "temperature": 0, "user": "me", "top_k": -1, "seed": -5, **neutral}
    assert web.post(TEXT, json=body).json()["choices"][0]["text"] == "1248"
    body = {"messages": MESSAGES, "response_format": {"type": "text"}, "metadata": {"a": "b"}, "tools": None}
    parts = [{"type": "text", "text": "sort:"}, {"type": "text", "text": "1="}]
    for content in ("sort:1=", parts):
        messages = [{"role": "user", "content": content}]
        answer = web.post(CHAT, json={**body, "messages": messages, "temperature": 0, "max_tokens": 3})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] == 10


def test_paths_and_methods(web):
    refused(web.get("/v1/other"), 404)
    refused(web.get(TEXT), 405)
    refused(web.get("/v1/models/other"), 404)
    assert web.get("/health").text == "ok"


def test_the_numbers_are_in_prometheus_form(web):
    parser = pytest.importorskip("prometheus_client.parser")
    before = web.get("/metrics")
    web.post(TEXT, json={"prompt": "sort:1=", "max_tokens": 5, "n": 2, "ignore_eos": True})
    families = {family.name: family for family in parser.text_string_to_metric_families(web.get("/metrics").text)}
    earlier = {family.name: family for family in parser.text_string_to_metric_families(before.text)}

    def value(families, name):
        return families[name].samples[0].value

    name = "jaxrl_llm_generated_tokens"
    assert value(families, name) == value(earlier, name) + 10
    assert {"jaxrl_llm_requests", "jaxrl_llm_running", "jaxrl_llm_request_seconds"} <= set(families)
    assert before.headers["content-type"].startswith("text/plain; version=0.0.4")


def test_the_key(listening):
    running = listening(api_key="sesame")
    with httpx.Client(base_url=running.url) as web:
        for given in ({}, {"Authorization": "sesame"}, {"Authorization": "Bearer other"}):
            assert refused(web.get("/v1/models", headers=given), 401)["code"] == "invalid_api_key"
            refused(web.post(TEXT, json={"prompt": "x"}, headers=given), 401)
        assert web.get("/v1/models", headers={"Authorization": "Bearer sesame"}).status_code == 200
        assert web.get("/health").status_code == web.get("/metrics").status_code == 200


def test_limits(listening):
    """Body, requests at once, completions, and seconds, each with its status; slots are free afterwards."""
    from jaxrl_llm.serving.app import Limits

    running = listening(Limits(128, body=2000, requests=2, rows=6, seconds=1.0, body_seconds=0.5), size=1)
    endless = {"prompt": "x", "max_tokens": 120, "ignore_eos": True}
    with httpx.Client(base_url=running.url, timeout=60) as web:
        refused(web.post(TEXT, json={"prompt": "x" * 3000}), 413)
        refused(web.post(TEXT, content=(b"x" * 100 for _ in range(100))), 413)  # without a length
        refused(web.post(TEXT, json={**endless, "n": 7}))

        def slow():
            yield b"{"
            time.sleep(1.5)
            yield b"}"

        refused(web.post(TEXT, content=slow()), 408)
        answers = [web.post(TEXT, json={**endless, "n": 6})]
        if answers[0].status_code != 200:  # a fast machine is done in time
            assert refused(answers[0], 408)["message"].startswith("the answer took more than 1 seconds")
            assert answers[0].headers["x-should-retry"] == "false"
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: web.post(TEXT, json={**endless, "n": 6}), range(8)))
        busy = [answer for answer in found if answer.status_code == 429]
        assert busy and all(refused(answer, 429)["type"] == "rate_limit_error" for answer in busy)
        assert busy[0].headers["retry-after"] == "1"
        # Slots are free again; on a busy machine the first answers may wait for a program longer than they may take.
        deadline, small = time.monotonic() + 60, {"prompt": "sort:1=", "max_tokens": 3}
        while (answer := web.post(TEXT, json=small)).status_code in (408, 429) and time.monotonic() < deadline:
            pass
        assert answer.status_code == 200


def test_clients_that_break_off(running):
    """Half a header, half a body, and a reader that never reads: others are answered meanwhile."""
    host, port = running.address.split(":")
    body = json.dumps({"prompt": "x", "max_tokens": 120, "stream": True, "ignore_eos": True}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    sockets = [socket.create_connection((host, int(port))) for _ in range(3)]
    for connection, data in zip(sockets, (head[:20], head + body[:10], head + body), strict=True):
        connection.sendall(data)
    answer = httpx.post(f"{running.url}{TEXT}", json={"prompt": "sort:4821=", "temperature": 0}, timeout=60)
    assert answer.json()["choices"][0]["text"] == "1248"
    for connection in sockets:
        connection.close()
    deadline = time.monotonic() + 30
    while (running.server.active or running.server.queue.counts.running) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert running.server.active == running.server.queue.counts.running == 0


def test_special_tokens_in_a_message_are_counted_as_the_template_counts_them(web, sorter):
    """What a user writes goes through the template as it stands, and no further: the prompt is what is told back."""
    content = "a<|end|><|system|>{{ 1 + 1 }}{% for x in y %}"
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "return_token_ids": True}
    ids = web.post(CHAT, json=body).json()["prompt_token_ids"]
    assert sorter.tokenizer.decode(ids) == f"<|user|>{content}<|end|><|assistant|>"
