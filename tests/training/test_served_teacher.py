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
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.training.served_teacher import ServedTeacher, Server, TeacherError
from jaxrl_llm.training.teacher import TeacherSpec

MESH = make_mesh(devices=jax.devices()[:1])
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


def teacher_at(url, top_k=0):
    return ServedTeacher(TeacherSpec(bool(top_k), 1.0, top_k), Server(url, "m", timeout=20.0), MESH)


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
    with serving(reply, status) as (url, _), jax.set_mesh(MESH), pytest.raises(TeacherError, match=words):
        teacher_at(url).logps(inputs(), 1)


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
    config.teacher.path = "server(url='http://localhost:1/v1', model='m')"
    validate(config)
    config.teacher.update(settings)
    with pytest.raises(ConfigError, match=words):
        validate(config)


def test_a_temperature_that_the_server_does_not_take():
    config = default()
    config.teacher.path, config.rollout.temperature = "server(url='http://localhost:1/v1', model='m')", 0.7
    with pytest.raises(ConfigError, match=r"is 0\.7, but the server of teacher\.path gives log-probs at temperature 1"):
        validate(config)
