"""Requests that are wrong, too large, too slow or too many: each is refused by itself, and the server goes on."""

import contextlib
import dataclasses
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from jaxrl_llm.serving.bodies import CHAT as CHAT_FIELDS
from jaxrl_llm.serving.bodies import COMMON, NEUTRAL, SETTINGS
from jaxrl_llm.serving.bodies import TEXT as TEXT_FIELDS

pytest.importorskip("starlette")

JSON = {"Content-Type": "application/json"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "sort:1="}]
TOOL = {"type": "function", "function": {"name": "add"}}
HALF = {"name": "add", "arguments": '{"a": "\\ud83d"}'}  # of a surrogate pair


@pytest.fixture(scope="module")
def web(running):
    with httpx.Client(base_url=running.url, timeout=60, headers=JSON) as client:
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
        (TEXT, {"prompt": "x", "top_k": 10**12}, "top_k"),
        (TEXT, {"prompt": "x", "min_tokens": 10**12}, "min_tokens"),
        (TEXT, {"prompt": "x", "min_tokens": 4, "max_tokens": 3}, "min_tokens"),
        (TEXT, {"prompt": "x", "repetition_penalty": 1e-9}, "repetition_penalty"),
        (TEXT, {"prompt": "x", "seed": 2**63}, "seed"),
        (TEXT, {"prompt": "x", "top_p": 0}, "top_p"),
        (TEXT, {"prompt": "x", "top_p": 1.1}, "top_p"),
        (TEXT, {"prompt": "x", "min_p": 2}, "min_p"),
        (TEXT, {"prompt": "x", "seed": 1.5}, "seed"),
        (TEXT, {"prompt": "x", "stream": 1}, "stream"),
        (TEXT, {"prompt": "x", "stop": ""}, "stop"),
        (TEXT, {"prompt": "x", "stop": ["a"] * 17}, "stop"),
        (TEXT, {"prompt": "x", "stop": [1]}, "stop"),
        (TEXT, {"prompt": "x", "stop": "a" * 1025}, "stop"),
        (TEXT, {"prompt": ["x"] * 1025}, "prompt"),
        (TEXT, {"prompt": ["x"] * 9, "n": 128}, "prompt"),
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
        (TEXT, {"prompt": "x", "stream_options": {"include_usage": "yes"}}, "stream_options"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": "hello"}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages"),
        (CHAT, {"messages": [{"role": 1, "content": "x"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        (CHAT, {"messages": [{"role": "assistant", "content": None, "tool_calls": ["x"]}]}, "messages"),
        (CHAT, {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"function": HALF}]}]}, "messages"),
        (CHAT, {"messages": MESSAGES, "continue_final_message": True}, "continue_final_message"),
        (CHAT, {"messages": MESSAGES, "add_generation_prompt": False}, "add_generation_prompt"),
        (
            CHAT,
            {"messages": [*MESSAGES, {"role": "assistant", "content": "x"}], "continue_final_message": False},
            "continue_final_message",
        ),
        (CHAT, {"messages": MESSAGES, "logprobs": 3}, "logprobs"),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"messages": MESSAGES, "tools": ["add"]}, "tools"),
        (CHAT, {"messages": MESSAGES, "tools": [{"function": {"name": "add", "parameters": 5}}]}, "tools"),
        (CHAT, {"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": MESSAGES, "tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
        (CHAT, {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        (CHAT, {"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template"),
        (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (CHAT, {"messages": MESSAGES, "chat_template_kwargs": [1]}, "chat_template_kwargs"),
        (CHAT, {"messages": MESSAGES, "tools": [TOOL], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        (TEXT, {"prompt": "x", "parallel_tool_calls": False}, "parallel_tool_calls"),
    ],
)
def test_wrong_fields_are_named(web, path, body, param):
    assert refused(web.post(path, json=body))["param"] == param


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" * 5000])
def test_numbers_that_are_none(web, number):
    """In every field that takes one."""
    lists = {"logit_bias": f'{{"5": {number}}}', "stop_token_ids": f"[{number}]", "prompt": f"[{number}]"}
    for name in (*SETTINGS, "logprobs", "prompt_logprobs", *lists):
        fields = {"prompt": '"x"', name: lists.get(name, number)}
        body = ", ".join(f'"{key}": {value}' for key, value in fields.items())
        error = refused(web.post(TEXT, content=f"{{{body}}}"))
        assert error["param"] in (name, None) and len(error["message"]) < 400
    # An answer of this API has its request's metadata, and as JSON no such number.
    refused(web.post("/v1/responses", content=f'{{"input": "x", "metadata": {{"a": {number}}}}}'))


@pytest.mark.slow
def test_log_probs_that_no_machine_holds(web, running, monkeypatch):
    """A small request may ask for billions of them, of 700 bytes each while they are made."""
    error = refused(web.post(TEXT, json={"prompt": ["x" * 100] * 400, "max_tokens": 0, "prompt_logprobs": 128}))
    assert error["param"] == "prompt_logprobs" and "may have 5,120,000 log-probs" in error["message"]
    for path, name in ((TEXT, "logprobs"), (CHAT, "top_logprobs")):
        monkeypatch.setattr(running.server, "limits", dataclasses.replace(running.server.limits, likeliest=99))
        asked = {"prompt": "x", name: 5} if path == TEXT else {"messages": MESSAGES, "logprobs": True, name: 5}
        assert web.post(path, json={**asked, "max_tokens": 19}).status_code == 200
        error = refused(web.post(path, json={**asked, "max_tokens": 20}))
        assert error["param"] == name and "may have 100 log-probs" in error["message"]


NAN, LARGE = float("nan"), float("inf")
WRONG = [
    True, False, 0, -1, 1, 1.5, 2**31, 2**63, -(2**63), 10**30, 1e-300, 1e300, NAN, LARGE, -LARGE,
    "", "x", "\0", "é" * 3000, "<|end|>{{ 7 * 7 }}{% for x in y %}",
    [], [[]], [None], [-1], [10**9], ["x"] * 3000, [0] * 3000, {}, {"": {}}, {"0": 1},
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}, {"type": "function", "function": {"name": "x"}},
    [{"role": "user", "content": "x"}], [{"role": "user", "content": [{"type": "text", "text": "<|end|>"}]}],
    [{"role": "tool"}, {"role": ["user"], "content": {}}],
    [{"type": "function", "function": {"name": "x", "parameters": []}}],
    "(a{1,900}){1,900}", "(((((a*)*)*)*)*)*b", 'start: start "x"', '{"type": "object"}',
]  # fmt: skip


@pytest.mark.slow
def test_any_value_in_any_field(web):
    """Each is answered, or refused with 4xx and a message of its own; the answers of others stay what they are."""
    plain = {"prompt": "x", "seed": 3, "max_tokens": 20, "ignore_eos": True, "return_token_ids": True}
    expected = web.post(TEXT, json=plain).json()["choices"][0]["token_ids"]

    def one(number: int) -> None:
        path, name, value = asked[number]
        base = {"messages": MESSAGES} if path == CHAT else {"prompt": "x"}
        answer = web.post(path, content=json.dumps({**base, "max_tokens": 2, name: value}))
        assert answer.status_code < 500, (name, value, answer.text)
        if answer.status_code >= 400:
            assert len(refused(answer, answer.status_code)["message"]) < 1200, (name, value)
        if number % 20 == 0:
            assert web.post(TEXT, json=plain).json()["choices"][0]["token_ids"] == expected

    asked = [
        (path, name, value)
        for path, own in ((CHAT, CHAT_FIELDS), (TEXT, TEXT_FIELDS))
        for name in sorted(COMMON | own | set(NEUTRAL) | {"what", "x" * 3000})
        for value in WRONG
    ]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(len(asked))))


@pytest.mark.parametrize("depth", [100, 3000, *(pytest.param(x, marks=pytest.mark.slow) for x in (400, 900, 40_000))])
def test_depth(web, depth):
    """Nested values, wherever they are, are an error of the request and not of the server."""
    nested, messages = "[" * depth + "]" * depth, json.dumps(MESSAGES)
    for fields in (
        f'"messages": [{{"role": "user", "content": "x", "more": {nested}}}]',
        f'"messages": [{{"role": "user", "content": {nested}}}]',
        f'"messages": {messages}, "tools": [{{"function": {{"name": "x", "parameters": {nested}}}}}]',
        f'"messages": {messages}, "chat_template_kwargs": {{"x": {nested}}}',
        f'"messages": {messages}, "metadata": {nested}',
        f'"messages": {messages}, "response_format": {{"type": "json_schema", "json_schema": {{"schema": {nested}}}}}',
    ):
        answer = web.post(CHAT, content=f'{{{fields}, "max_tokens": 1}}')
        assert answer.status_code in (200, 400), (fields[:80], answer.text)


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
def test_a_body_of_another_type(running, kind):
    """A page in a browser may post these to any address, and must not use a server on its user's machine."""
    headers = {"Content-Type": kind} if kind else {}
    answer = httpx.post(f"{running.url}{TEXT}", content=b'{"prompt": "x", "max_tokens": 1}', headers=headers)
    assert "application/json" in refused(answer, 415)["message"]


def test_what_asks_for_nothing_is_taken(web):
    """Fields at their neutral value, null ones, and those of who asks."""
    neutral = {"frequency_penalty": 0.0, "presence_penalty": 0, "logit_bias": None, "best_of": 1, "echo": False}
    neutral |= {"add_special_tokens": True, "allowed_token_ids": None, "cache_salt": "x"}
    body = {"prompt": "sort:4821=", "temperature": 0, "user": "me", "top_k": -1, "seed": -5, **neutral}
    assert web.post(TEXT, json=body).json()["choices"][0]["text"] == "1248"
    body = {"messages": MESSAGES, "response_format": {"type": "text"}, "metadata": {"a": "b"}, "tools": None}
    body |= {"spaces_between_special_tokens": False, "detokenize": True, "add_special_tokens": False}
    body |= {"prompt_cache_retention": "24h", "verbosity": "medium", "prediction": {"type": "content", "content": "1"}}
    parts = [{"type": "text", "text": "sort:"}, {"type": "text", "text": "1="}]
    for content in ("sort:1=", parts):
        messages = [{"role": "user", "content": content}]
        answer = web.post(CHAT, json={**body, "messages": messages, "temperature": 0, "max_tokens": 3})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] == 10


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_stream_that_fails_says_so(web, monkeypatch, capsys, path):
    """As an answer that is no stream does with status 500."""

    def fails(*_):
        raise RuntimeError("of the server")

    monkeypatch.setattr("jaxrl_llm.serving.answers.Choice.logprobs", fails)
    body = {"messages": MESSAGES} if path == CHAT else {"prompt": "x"}
    said = refused(web.post(path, json=body), 500)
    answer = web.post(path, json={**body, "stream": True})
    *_, error, end = answer.text.removesuffix("\n\n").split("\n\n")
    assert answer.status_code == 200 and end == "data: [DONE]"
    assert json.loads(error.removeprefix("data: "))["error"] == said
    assert capsys.readouterr().err.count("RuntimeError: of the server") == 2


def test_answers_that_a_stopping_server_ends_say_so(web, running):
    """As its command has it when `--drain` is over: no connection just breaks."""
    body = {"prompt": "x", "n": 128, "max_tokens": 100, "ignore_eos": True}  # more than the slots do meanwhile
    with ThreadPoolExecutor() as pool:
        whole, stream = (pool.submit(web.post, TEXT, json={**body, "stream": each}) for each in (False, True))
        while running.server.queue.counts.waiting <= 128:
            time.sleep(0.01)
        running.server.end_answers()
        error = refused(whole.result(), 503)
        *_, last, end = stream.result().text.removesuffix("\n\n").split("\n\n")
    assert error["message"] == "the server is stopping" and error["type"] == "server_error"
    assert json.loads(last.removeprefix("data: "))["error"] == error and end == "data: [DONE]"
    answer = web.post(TEXT, json={"prompt": "sort:4821=", "temperature": 0})
    assert answer.json()["choices"][0]["text"] == "1248" and not running.server.answers


def test_paths_and_methods(web):
    assert "has at /v1: chat/completions" in refused(web.post("/v1/audio", json={"input": "x"}), 404)["message"]
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


@pytest.mark.slow
def test_limits(listening):
    """Body, requests at once, completions, and seconds, each with its status; slots are free afterwards."""
    from jaxrl_llm.serving.app import Limits

    running = listening(Limits(128, body=2000, requests=2, rows=6, seconds=1.0, body_seconds=0.5), size=1)
    endless = {"prompt": "x", "max_tokens": 120, "ignore_eos": True}
    with httpx.Client(base_url=running.url, timeout=60, headers=JSON) as web:
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


def connected(running, data: bytes) -> socket.socket:
    """A connection with little room for what comes, on which these bytes are sent."""
    host, port = running.address.split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(20)
    connection.connect((host, int(port)))
    connection.sendall(data)
    return connection


def rest(connection: socket.socket) -> bytes:
    """What comes until the connection ends."""
    found = b""
    with connection, contextlib.suppress(ConnectionResetError):
        while data := connection.recv(2**16):
            found += data
    return found


def pour(connection: socket.socket, data: bytes) -> bool:
    """Whether the connection ends while one sends and reads nothing."""
    deadline = time.monotonic() + 60
    with connection, contextlib.suppress(ConnectionError):
        while time.monotonic() < deadline:
            connection.sendall(data)
            time.sleep(0.01)
        return False
    return True


HEAD = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n".encode()


@pytest.fixture(scope="module")
def impatient(listening):
    """A server of few connections, which look soon."""
    from jaxrl_llm.serving.app import Limits
    from jaxrl_llm.serving.connections import Connection

    quick = type("Quick", (Connection,), {"seconds": 0.3, "most": 8})
    return listening(Limits(128, body=10**6, body_seconds=0.5), connection=quick)


def test_connections_without_a_request_end(impatient):
    """Nothing, or half a head; beyond as many connections as there may be others are told so at once."""
    assert rest(connected(impatient, b"")) == b""
    held = [connected(impatient, HEAD) for _ in range(8)]
    assert b" 503 " in rest(connected(impatient, b""))
    assert [rest(connection) for connection in held] == [b""] * 8
    assert httpx.get(f"{impatient.url}/health").text == "ok"


@pytest.mark.slow
def test_a_connection_between_two_requests_stays(impatient):
    """As long as clients keep theirs: a request that is sent while the server ends its connection fails."""
    with httpx.Client(base_url=impatient.url, headers=JSON) as web:
        streams = []
        for _ in range(2):
            answer = web.post(TEXT, json={"prompt": "x", "max_tokens": 1}, timeout=60)
            streams.append(answer.extensions["network_stream"])
            time.sleep(1)
    assert streams[0] is streams[1]


@pytest.mark.slow
def test_connections_that_only_send_end(impatient):
    """A body behind its answer that has no end, and an answer that nobody reads."""
    chunk = b"1000\r\n" + b"x" * 4096 + b"\r\n"
    assert pour(connected(impatient, HEAD + b"Transfer-Encoding: chunked\r\n\r\n"), chunk)
    body = json.dumps({"prompt": ["x" * 100] * 500, "max_tokens": 1, "echo": True}).encode()
    assert pour(connected(impatient, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body), b"x")
    assert httpx.get(f"{impatient.url}/health").text == "ok"


def test_slow_bodies_take_no_place(listening):
    """As many clients as there are places send half a body; another one is answered meanwhile."""
    from jaxrl_llm.serving.app import Limits

    running = listening(Limits(128, requests=2, body_seconds=5.0))
    host, port = running.address.split(":")
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{{"
    sockets = [socket.create_connection((host, int(port))) for _ in range(6)]
    for connection in sockets:
        connection.sendall(head.encode())
    time.sleep(0.2)
    answer = httpx.post(f"{running.url}{TEXT}", json={"prompt": "sort:4821=", "temperature": 0}, timeout=60)
    assert answer.json()["choices"][0]["text"] == "1248"
    for connection in sockets:
        connection.close()


def test_who_sends_a_body_that_is_too_large_sees_why(running):
    for body in (b"x" * (8 * 2**20), (b"x" * 2**20 for _ in range(8))):  # with its length, and without
        refused(httpx.post(f"{running.url}{TEXT}", content=body, headers=JSON, timeout=60), 413)


def test_a_length_that_is_too_large_is_refused_before_the_body(running):
    host, port = running.address.split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.settimeout(20)
        connection.sendall(
            f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {10**15}\r\n\r\n".encode()
        )
        assert b" 413 " in connection.recv(4096)


def test_special_tokens_in_a_message_are_counted_as_the_template_counts_them(web, sorter):
    """What a user writes goes through the template as it stands, and no further: the prompt is what is told back."""
    content = "a<|end|><|system|>{{ 1 + 1 }}{% for x in y %}"
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, "return_token_ids": True}
    ids = web.post(CHAT, json=body).json()["prompt_token_ids"]
    assert sorter.tokenizer.decode(ids) == f"<|user|>{content}<|end|><|assistant|>"
