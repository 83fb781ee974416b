"""A teacher behind HTTP: requests by token ids, and log-probs of prompts in vLLM's form."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.batch import Batch, Inputs
from jaxrl_llm.config import ConfigError, default, validate
from jaxrl_llm.data import tasks
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.training.setup.given import Given
from jaxrl_llm.training.setup.run import build
from jaxrl_llm.training.teachers.served_teacher import ServedTeacher, Server, TeacherError
from jaxrl_llm.training.teachers.teacher import TeacherSpec

MESH = make_mesh(devices=jax.devices()[:1])
SERVER = "server(url='http://localhost:1/v1', model='m')"
VOCAB = 11
# Rows that are padded on both sides.
TOKENS = np.array([[0, 3, 5, 7, 2, 0], [4, 4, 9, 1, 0, 0]], np.int32)
SEGMENTS = np.array([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]], np.int32)


def distribution(before):
    """Log-probs `[V]` that depend on all tokens before."""
    scores = np.sin(np.arange(VOCAB) * (1 + sum(before) % 5))
    return scores - np.log(np.exp(scores).sum())


def answer(body):
    """A completion's object as vLLM tells it: the likeliest tokens of each place, and the token itself."""
    ids, k = body["prompt"], body["prompt_logprobs"]
    places = [None]
    for place in range(1, len(ids)):
        logps = distribution(ids[:place])
        shown = [*np.argsort(-logps)[:k], ids[place]]
        places.append({str(token): {"logprob": logps[token], "rank": 1, "decoded_token": "?"} for token in shown})
    return {"choices": [{"index": 0, "text": "x", "prompt_logprobs": places}]}


@contextlib.contextmanager
def serving(reply=answer, status=200):
    """A server of these replies: its url, and the bodies that it got."""
    bodies = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            data = json.dumps(reply(bodies[-1])).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", bodies
    finally:
        server.shutdown()
        server.server_close()


def teacher_at(url, top_k=0, key="teacher.path"):
    spec = TeacherSpec(bool(top_k), 1.0, top_k, offload=False, column="teacher")
    return ServedTeacher(spec, Server(url, "m", timeout=20.0), MESH, key)


def inputs():
    return Inputs(jnp.asarray(TOKENS), jnp.asarray(SEGMENTS))


def places():
    """(row, column, tokens before) of every token that has some before it."""
    for row, (tokens, segments) in enumerate(zip(TOKENS, SEGMENTS, strict=True)):
        where = np.flatnonzero(segments)
        for number in range(1, len(where)):
            yield row, where[number], tokens[where[:number]]


def test_log_probs_of_the_tokens():
    with serving() as (url, bodies), jax.set_mesh(MESH):
        found = np.asarray(teacher_at(url).logps(inputs(), 1))
    expected = np.zeros(TOKENS.shape)
    for row, column, before in places():
        expected[row, column] = distribution(before)[TOKENS[row, column]]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert sorted(body["prompt"] for body in bodies) == [[3, 5, 7, 2], [4, 4, 9, 1]]
    with serving() as (url, bodies), jax.set_mesh(MESH):  # rows of another teacher are padding to this one
        read = inputs().replace(segments=jnp.asarray(SEGMENTS * [[0], [1]]))
        np.testing.assert_array_equal(teacher_at(url).logps(read, 1), found * [[0], [1]])
    assert [body["prompt"] for body in bodies] == [[4, 4, 9, 1]]
    assert all(body["model"] == "m" and body["temperature"] == 1.0 for body in bodies)


def test_likeliest_tokens():
    with serving() as (url, _), jax.set_mesh(MESH):
        batch = teacher_at(url, top_k=3).with_distributions(Batch(inputs(), jnp.asarray(SEGMENTS)), inputs(), 1)
    for row, column, before in places():
        logps = distribution(before)
        np.testing.assert_array_equal(batch.teacher_ids[row, column], np.argsort(-logps)[:3])
        np.testing.assert_allclose(batch.teacher_top_logps[row, column], np.sort(logps)[::-1][:3], atol=1e-6)


@pytest.mark.parametrize(
    ("reply", "status", "words"),
    [
        (lambda body: {"error": "no such model"}, 404, "answered 404 .*no such model"),
        (lambda body: {"choices": [{"text": "x"}]}, 200, "without prompt_logprobs .*jaxrl_llm serve"),
        (lambda body: {"choices": [{"prompt_logprobs": [None]}]}, 200, "of another prompt than of 4 tokens"),
        (lambda body: {"choices": [{"prompt_logprobs": [None, {}, {}, {}]}]}, 200, "no log-prob of token"),
    ],
)
def test_answers_that_are_none(reply, status, words):
    for key, options in {"teacher.path": {}, "teacher.others, b": {"key": "teacher.others, b"}}.items():
        message = rf"^{key}: http://127\.0\.0\.1:\d+/v1.*{words}"
        with serving(reply, status) as (url, _), jax.set_mesh(MESH), pytest.raises(TeacherError, match=message):
            teacher_at(url, **options).logps(inputs(), 1)


def test_log_probs_that_are_no_numbers():
    def reply(logprob):
        return lambda body: {"choices": [{"prompt_logprobs": [
            None, *({str(token): {"logprob": logprob}} for token in body["prompt"][1:])
        ]}]}  # fmt: skip

    with serving(reply(float("-inf"))) as (url, _), jax.set_mesh(MESH):
        assert np.isfinite(teacher_at(url).logps(inputs(), 1)).all()
    with serving(reply(float("nan"))) as (url, _), jax.set_mesh(MESH), pytest.raises(TeacherError, match="no log-prob"):
        teacher_at(url).logps(inputs(), 1)
    nothing = serving(lambda body: {"choices": [{"prompt_logprobs": [None] * len(body["prompt"])}]})
    with nothing as (url, _), jax.set_mesh(MESH), pytest.raises(TeacherError, match="gave 0 likeliest tokens"):
        teacher_at(url, top_k=1).with_distributions(Batch(inputs(), jnp.asarray(SEGMENTS)), inputs(), 1)


def test_a_server_that_is_not_there():
    with serving() as (url, _):
        pass
    with jax.set_mesh(MESH), pytest.raises(TeacherError, match=r"did not answer within 20 seconds .*change url"):
        teacher_at(url).logps(inputs(), 1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"form": "divergence"}, "teacher.top_k is 0, but teacher.path is a server"),
        ({"quantize": "int8"}, "teacher.quantize is 'int8', but teacher.path is a server"),
    ],
)
def test_contradictions(settings, words):
    config = default()
    config.teacher.path = SERVER
    validate(config)
    config.teacher.update(settings)
    with pytest.raises(ConfigError, match=words):
        validate(config)


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("teacher.path", {"path": SERVER}),
        ("teacher.others, b", {"path": "embedded:sort", "others": ("a=x", f"b={SERVER}")}),
    ],
)
def test_a_temperature_that_the_server_does_not_take(key, settings):
    config = default()
    config.teacher.update(settings)
    validate(config)
    config.rollout.temperature = 0.7
    with pytest.raises(ConfigError, match=rf"is 0\.7, but the server of {key} gives log-probs at temperature 1"):
        validate(config)


@pytest.mark.slow
def test_a_further_teacher_behind_a_server():
    """It rates the rows that name it, and what is wrong with it is said of its entry of teacher.others."""
    rows = [{**row, "teacher": name} for row, name in zip(tasks.generate("sort", size=2), "ab", strict=True)]
    config = default()
    config.batch.prompts, config.rollout.group_size, config.eval.every, config.data.shuffle = 2, 2, -1, False
    config.rollout.max_prompt_length, config.rollout.max_completion_length = 16, 4
    config.teacher.path, config.algorithm.advantage = "embedded:sort", "zero"

    def sure(body):
        return {"choices": [{"prompt_logprobs": [None, *({str(x): {"logprob": -1.0}} for x in body["prompt"][1:])]}]}

    with jax.set_mesh(MESH):
        with serving(sure) as (url, bodies):
            config.teacher.others = (f"b=server(url={url!r}, model='m')",)
            validate(config)
            run = build(config, MESH, Given(train_dataset=rows))
            rated = np.abs(np.asarray(run.source.next(run.state, jax.random.key(1)).batch.advantages)).sum(axis=1)
        assert len(bodies) == 2 and rated[:2].max() < 1e-3 < rated[2:].min()
        with pytest.raises(TeacherError, match=f"^teacher.others, b: {url}/completions did not answer within 120 sec"):
            run.source.next(run.state, jax.random.key(2))
        config.teacher.others = (f"b=server(url={url!r})",)
        with pytest.raises(ConfigError, match=r"^teacher\.others, b = .*missing 1 required .* 'model'; write server"):
            build(config, MESH, Given(train_dataset=rows))
        for path, message in (
            (url, rf"^teacher\.others, b = '{url}' is the address of a server: write server\(url='{url}', model="),
            ("nowhere/at/all", r"^the teacher, of teacher\.others, b: model path 'nowhere/at/all': there is no such"),
        ):
            config.teacher.others = (f"b={path}",)
            with pytest.raises(ConfigError, match=message):
                build(config, MESH, Given(train_dataset=rows))
