"""What goes over the wire, against the SDK's own conversions."""

import json
import math

import numpy as np
import pytest

from jaxrl_llm.serving.errors import BadRequestError
from jaxrl_llm.tools.tinker.messages import (
    EMPTY,
    Completion,
    GradientAnswer,
    Likeliest,
    SampleAnswer,
    gradient_message,
    gradient_request,
    gradient_request_of_json,
    prompt_tokens,
)

tinker = pytest.importorskip("tinker")
types = tinker.types
from tinker.proto import request_conv, response_conv, tinker_public_pb2  # noqa: E402 (skipped without)
from tinker.types.forward_backward_input import ForwardBackwardInput  # noqa: E402
from tinker.types.forward_backward_request import ForwardBackwardRequest  # noqa: E402

DRAW = np.random.default_rng(0)


def received(message):
    """The request as it comes out of the bytes of a message."""
    return gradient_request(gradient_message(message.SerializeToString()))


def in_proto(data, loss_fn="cross_entropy", config=None, seq_id=1):
    """The message that the SDK sends."""
    given = ForwardBackwardInput(data=data, loss_fn=loss_fn, loss_fn_config=config)
    request = ForwardBackwardRequest(forward_backward_input=given, model_id="run:train:0", seq_id=seq_id)
    return request_conv.forward_backward_request_to_proto(request)


def datum(chunks, **inputs):
    chunks = [types.EncodedTextChunk(tokens=tokens) for tokens in chunks]
    return types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=inputs)


# Requests.


def test_a_request_comes_out_as_it_went_in():
    weights, targets = np.float32([0.5, -1.0, 1e-30]), np.array([7, 2**40, 0])
    message = in_proto(
        [
            datum([[1, 2], [], [3]], target_tokens=targets, weights=weights),
            datum([[319]], target_tokens=[5], weights=[2.0]),
        ],
        "ppo",
        {"clip_low_threshold": 0.75, "clip_high_threshold": 3},
        seq_id=9,
    )
    message.forward_only = True
    found = received(message)
    assert (found.loss_fn, found.forward_only) == ("ppo", True)
    read = gradient_message(message.SerializeToString())
    assert (read.model_id, read.seq_id) == ("run:train:0", 9)
    assert found.options == {"clip_low_threshold": 0.75, "clip_high_threshold": 3.0}
    assert [row.tokens.tolist() for row in found.data] == [[1, 2, 3], [319]]
    first, second = (row.inputs for row in found.data)
    np.testing.assert_array_equal(first["target_tokens"], targets)
    np.testing.assert_array_equal(first["weights"], weights)
    assert {name: x.dtype for name, x in first.items()} == {"target_tokens": np.int64, "weights": np.float32}
    assert (second["target_tokens"].tolist(), second["weights"].tolist()) == ([5], [2.0])


def test_options_may_be_words():
    assert received(in_proto([], config={"type": "tv"})).options == {"type": "tv"}


def test_distributions_come_out_whole_dense_and_sparse():
    torch = pytest.importorskip("torch")
    targets = DRAW.integers(1, 300, (6, 4))
    weights = DRAW.normal(size=(6, 4)).astype(np.float32)
    kept = np.array([[1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]])
    sparse = datum([[1] * 6], target_tokens=torch.tensor(targets * kept), weights=torch.tensor(weights * kept))
    message = in_proto([datum([[1] * 6], target_tokens=targets, weights=weights), sparse])
    for name in ("target_tokens", "weights"):  # the SDK leaves zeros out where that is shorter
        assert not message.data[0].loss_fn_inputs[name].HasField("sparse_csr")
        assert message.data[1].loss_fn_inputs[name].HasField("sparse_csr")
    for row, mask in zip(received(message).data, (1, kept), strict=True):
        np.testing.assert_array_equal(row.inputs["target_tokens"], targets * mask)
        np.testing.assert_array_equal(row.inputs["weights"], weights * np.float32(mask))


def test_an_array_without_a_shape_is_flat():
    tensor = types.TensorData(data=[4, 5, 6], dtype="int64")
    found = received(in_proto([datum([[1, 2, 3]], target_tokens=tensor)]))
    assert found.data[0].inputs["target_tokens"].tolist() == [4, 5, 6]
    one = types.TensorData(data=[4], dtype="int64")
    found = received(in_proto([datum([[1]], target_tokens=one)]))
    assert found.data[0].inputs["target_tokens"].shape == (1,)


def as_image(message):
    message.data[1].model_input.add().image.data = b"png"


def cut_tokens(message):
    message.data[1].model_input[0].encoded_text.tokens = b"\0" * 7


def of_no_type(message):
    message.data[1].loss_fn_inputs["target_tokens"].dtype = tinker_public_pb2.DTYPE_BFLOAT16


def cut_numbers(message):
    message.data[1].loss_fn_inputs["target_tokens"].dense = b"\0" * 12


def shaped(*shape):
    def change(message):
        tensor = message.data[1].loss_fn_inputs["target_tokens"]
        tensor.shape[:] = shape

    return change


def sparse(values, rows, columns, *shape):
    def change(message):
        shaped(*shape)(message)
        found = message.data[1].loss_fn_inputs["target_tokens"].sparse_csr
        found.values, found.crow_indices, found.col_indices = (np.int64(x).tobytes() for x in (values, rows, columns))

    return change


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (as_image, "^datum 1 has images or sound"),
        (cut_tokens, "^the text of datum 1 is 7 bytes, no numbers of 4"),
        (of_no_type, "^target_tokens of datum 1 has the type 4"),
        (cut_numbers, "^target_tokens of datum 1 is 12 bytes, no numbers of 8"),
        (shaped(3), r"^target_tokens of datum 1 has 2 numbers, but the shape \[3\]"),
        (shaped(-1, -2), r"^target_tokens of datum 1 has 2 numbers, but the shape \[-1, -2\]"),
        (sparse([1], [0, 1], [0], 2, 3), r"^target_tokens of datum 1 is no sparse array of the shape \[2, 3\]"),
        (sparse([1], [0, 1, 1], [0], 6), "is no sparse array of the shape"),
        (sparse([1], [0, 2, 1], [0], 2, 3), "is no sparse array of the shape"),  # rows end before they begin
        (sparse([1], [0, 1, 2], [0], 2, 3), "is no sparse array of the shape"),
        (sparse([1], [0, 1, 1], [0], 2, 2**60), "^arrays without their zeros have more than 33554432 numbers with"),
        (sparse([], [0, 0, 0], [], 2, -1), "is no sparse array of the shape"),
        (sparse([1], [0, 1, 1], [3], 2, 3), "^target_tokens of datum 1 has columns outside its 3"),
        (sparse([1], [0, 1, 1], [-1], 2, 3), "^target_tokens of datum 1 has columns outside its 3"),
    ],
)
def test_what_cannot_be_read_is_named(change, error):
    message = in_proto([datum([[1, 2]], target_tokens=[3, 4]), datum([[1, 2]], target_tokens=[3, 4])])
    change(message)
    with pytest.raises(BadRequestError, match=error):
        received(message)


def test_a_few_bytes_are_no_many_numbers():
    """Arrays without their zeros are few together, and a row is at least an array."""
    message = in_proto([datum([[1, 2]], target_tokens=[3, 4])] * 3)
    for row in message.data:
        tensor = row.loss_fn_inputs["target_tokens"]
        tensor.shape[:] = (2, 2**23)
        tensor.sparse_csr.crow_indices = np.zeros(3, np.int64).tobytes()
    with pytest.raises(BadRequestError, match=r"^arrays without their zeros have more than 33554432 numbers"):
        received(message)
    body = in_json(loss_fn_inputs={"target_tokens": {"data": 7, "dtype": "int64"}})
    assert gradient_request_of_json(body, forward_only=False).data[1].inputs["target_tokens"].tolist() == [7]


@pytest.mark.parametrize("body", [b"\xff\xff\xff", b'{"data": []}', b"\x22\x02\xff\xfe"])
def test_a_body_that_is_no_message_is_refused(body):
    with pytest.raises(BadRequestError, match="no ForwardBackwardRequest"):
        gradient_request(gradient_message(body))


def in_json(**changes):
    row = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}, {"tokens": [3]}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": [2, 3, 4, 5, 6, 7], "dtype": "int64", "shape": [3, 2]},
            "weights": {"data": [0, 1.5, 1], "dtype": "float32"},
        },
    }
    return {"model_id": "run", "seq_id": 3, "forward_backward_input": {"data": [row, row | changes], "loss_fn": "ppo"}}


def test_json_of_earlier_clients_comes_out_as_it_went_in():
    body = in_json()
    body["forward_backward_input"]["loss_fn_config"] = {"beta": 0.5}
    found = gradient_request_of_json(body, forward_only=False)
    assert (found.loss_fn, found.forward_only) == ("ppo", False)
    assert found.options == {"beta": 0.5}
    for row in found.data:
        assert row.tokens.tolist() == [1, 2, 3]
        assert row.inputs["target_tokens"].tolist() == [[2, 3], [4, 5], [6, 7]]
        assert row.inputs["weights"].tolist() == [0.0, 1.5, 1.0]
        assert {x.dtype.name for x in row.inputs.values()} == {"int64", "float32"}
    renamed = {"model_id": "run", "forward_input": body["forward_backward_input"]}
    found = gradient_request_of_json(renamed, forward_only=True)
    assert (found.forward_only, len(found.data)) == (True, 2)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"model_input": {"chunks": [{"type": "image"}]}}, "^datum 1 has images or sound"),
        ({"model_input": {"chunks": [{"tokens": [1, 2.5]}]}}, "^datum 1 has a chunk without tokens"),
        ({"model_input": {"chunks": [{}]}}, "^datum 1 has a chunk without tokens"),
        ({"model_input": {"chunks": [{"tokens": [2**70]}]}}, "^datum 1 cannot be read: OverflowError"),
        ({"model_input": [1, 2, 3]}, "^datum 1 takes an object with chunks"),
        ({"loss_fn_inputs": [1]}, "^datum 1 cannot be read"),
        ({"loss_fn_inputs": {"weights": {"data": [1.0], "dtype": "bfloat16"}}}, "^datum 1 cannot be read: KeyError"),
        ({"loss_fn_inputs": {"weights": {"data": [1.0, None], "dtype": "float32"}}}, "^datum 1 cannot be read"),
        ({"loss_fn_inputs": {"target_tokens": {"data": [1.5], "dtype": "int64"}}}, "^datum 1 cannot be read"),
        ({"loss_fn_inputs": {"target_tokens": {"data": [1], "dtype": "int64", "shape": [2]}}}, r"the shape \[2\]"),
        ({"loss_fn_inputs": {"target_tokens": {"data": 1, "dtype": "int64", "shape": [2]}}}, "has 1 numbers, but the"),
    ],
)
def test_json_that_cannot_be_read_is_named(changes, error):
    with pytest.raises(BadRequestError, match=error):
        gradient_request_of_json(in_json(**changes), forward_only=False)


@pytest.mark.parametrize(
    "body", [{}, {"forward_backward_input": []}, {"forward_backward_input": {"data": "x", "loss_fn": "ppo"}}]
)
def test_json_without_rows_is_refused(body):
    with pytest.raises(BadRequestError, match="an object with data, a list"):
        gradient_request_of_json(body, forward_only=False)


def test_options_in_json_are_an_object():
    body = in_json()
    body["forward_backward_input"]["loss_fn_config"] = [1]
    with pytest.raises(BadRequestError, match=r"loss_fn_config is \[1\]"):
        gradient_request_of_json(body, forward_only=False)


def test_prompts_are_text():
    assert prompt_tokens({"chunks": [{"tokens": [1, 2]}, {"type": "encoded_text", "tokens": []}]}) == [1, 2]
    for prompt in (None, [1, 2], {"chunks": "x"}, {"chunks": [[1]]}, {"chunks": [{"tokens": "12"}]}):
        with pytest.raises(BadRequestError, match=r"^the prompt "):
            prompt_tokens(prompt)
    with pytest.raises(BadRequestError, match=r"^the prompt has images"):
        prompt_tokens({"chunks": [{"type": "image_asset_pointer"}]})


# Answers.

SHAPES = {
    "one length": [(3,), (3,)],
    "lengths": [(5,), (1,), (3,)],
    "distributions": [(5, 2), (1, 2), (4, 7), (2,), (3,), (4, 2)],
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=list(SHAPES))
def test_gradient_answers_are_read_as_they_were(shapes):
    outputs = [{name: DRAW.normal(size=shape).astype(np.float32) for name in ("logprobs", "loss")} for shape in shapes]
    answer = GradientAnswer(outputs, {"loss:sum": 0.1, "other:mean": -3.0})
    found = response_conv.deserialize_forward_backward_output(answer.protobuf())
    assert found.metrics == answer.metrics
    other = answer.json()
    assert (found.loss_fn_output_type, other["metrics"]) == (other["loss_fn_output_type"], answer.metrics)
    json.dumps(other)
    of_json = [{name: types.TensorData(**x) for name, x in row.items()} for row in other["loss_fn_outputs"]]
    for rows in (found.loss_fn_outputs, of_json):
        assert len(rows) == len(outputs)
        for row, output in zip(rows, outputs, strict=True):
            assert row.keys() == output.keys()
            for name, x in output.items():
                assert (row[name].dtype, tuple(row[name].shape)) == ("float32", x.shape)
                np.testing.assert_array_equal(row[name].to_numpy().reshape(x.shape), x)


TOP = Likeliest([[], [5, 7], [9]], [[], [-0.5, -1.5], [-0.25]], 2)
PAIRS = [None, [(5, -0.5), (7, -1.5)], [(9, -0.25)]]


def test_samples_are_read_as_they_were():
    rows = [Completion([4, 257], [-0.5, -0.25], True, TOP), Completion([4, 5, 6], [-1.0, -2.0, -3.0], False, None)]
    answer = SampleAnswer(rows, [math.nan, -1.5, math.nan], TOP)
    found = response_conv.deserialize_sample_response(answer.protobuf())
    assert [row.tokens for row in found.sequences] == [[4, 257], [4, 5, 6]]
    assert [row.logprobs for row in found.sequences] == [[-0.5, -0.25], [-1.0, -2.0, -3.0]]
    assert [row.stop_reason for row in found.sequences] == ["stop", "length"]
    assert [row.topk_logprobs for row in found.sequences] == [PAIRS, None]
    assert found.prompt_logprobs == [None, -1.5, None]
    assert found.topk_prompt_logprobs == PAIRS
    assert found.topk_prompt_logprobs_np.logprobs[2].tolist() == [-0.25, EMPTY]

    other = answer.json()
    assert other["sequences"] == [
        {"tokens": [4, 257], "logprobs": [-0.5, -0.25], "stop_reason": "stop", "topk_logprobs": PAIRS},
        {"tokens": [4, 5, 6], "logprobs": [-1.0, -2.0, -3.0], "stop_reason": "length"},
    ]
    assert (other["prompt_logprobs"], other["topk_prompt_logprobs"]) == ([None, -1.5, None], PAIRS)
    json.dumps(other, allow_nan=False)


def test_samples_without_scores_of_the_prompt_have_none():
    answer = SampleAnswer([Completion([4], [-0.5], True, None)])
    found = response_conv.deserialize_sample_response(answer.protobuf())
    assert (found.prompt_logprobs, found.topk_prompt_logprobs, found.prompt_cache_hit_tokens) == (None, None, 0)
    assert answer.json().keys() == {"type", "sequences"}
