"""What goes over the wire: requests as typed values, and answers in the two forms that clients of Tinker read.

Requests for gradients come as protobuf messages, of earlier clients as JSON; answers that hold arrays go back as the
client's `Accept` says. The numbers of the fields are those of `tinker_public.proto` of its SDK 0.38.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from jaxrl_llm.serving.errors import BadRequestError

PROTOBUF = "application/x-protobuf"
DTYPES = {1: np.dtype(np.float32), 2: np.dtype(np.int64), 3: np.dtype(np.int32)}
NAMES = {"float32": np.dtype(np.float32), "int64": np.dtype(np.int64)}
EMPTY = -99999.0  # the log-prob where there is no likeliest token
MOST_NUMBERS = 2**25  # of a request's arrays that come without their zeros; others are as long as the request
# Fields by name: number and type; `*` is repeated. A map is a repeated message of a key and a value.
FIELDS = {
    "Tensor": {"dense": "1 bytes", "sparse_csr": "2 SparseCsr", "dtype": "3 int32", "shape": "4 int64*"},
    "SparseCsr": {"values": "1 bytes", "crow_indices": "2 bytes", "col_indices": "3 bytes"},
    "Chunk": {"encoded_text": "1 Tokens", "image": "2 Other", "dmel": "3 Other"},
    "Tokens": {"tokens": "1 bytes"},
    "Other": {},
    "NamedTensor": {"key": "1 string", "value": "2 Tensor"},
    "Datum": {"model_input": "1 Chunk*", "loss_fn_inputs": "2 NamedTensor*"},
    "Option": {"key": "1 string", "value": "2 OptionValue"},
    "OptionValue": {"number": "1 double", "text": "2 string"},
    "Number": {"key": "1 string", "value": "2 double"},
    "ForwardBackwardRequest": {
        "model_id": "1 string", "seq_id": "2 int32", "data": "3 Datum*", "loss_fn": "4 string",
        "loss_fn_config": "5 Number*", "forward_only": "6 bool", "loss_fn_config_v2": "7 Option*",
    },
    "BatchedTensor": {"data": "1 bytes", "offsets": "2 bytes", "dtype": "3 int32", "trailing_shape": "4 int64*"},
    "NamedBatch": {"key": "1 string", "value": "2 BatchedTensor"},
    "ArrayRecord": {"type_tag": "1 string", "fields": "2 NamedBatch*", "num_datums": "3 int64"},
    "ForwardBackwardOutput": {
        "loss_fn_output_type": "1 string", "loss_fn_outputs": "2 ArrayRecord*", "metrics": "3 Number*",
    },
    "TopkLogprobs": {"token_ids": "1 bytes", "logprobs": "2 bytes", "k": "3 uint32", "length": "4 uint32"},
    "SampledSequence": {
        "stop_reason": "1 int32", "tokens": "2 bytes", "logprobs": "3 bytes", "topk_sampled_logprobs": "4 TopkLogprobs",
    },
    "SampleResponse": {
        "sequences": "1 SampledSequence*", "prompt_logprobs": "2 bytes", "topk_prompt_logprobs": "3 TopkLogprobs",
        "prompt_cache_hit_tokens": "4 int32",
    },
}  # fmt: skip


def _message(name: str) -> Any:
    """The class of a message."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"jaxrl_llm.tinker.{name}"))


@functools.cache
def _pool() -> descriptor_pool.DescriptorPool:
    kinds: dict[str, Any] = {"bytes": 12, "string": 9, "double": 1, "int32": 5, "int64": 3, "uint32": 13, "bool": 8}
    file = descriptor_pb2.FileDescriptorProto(name="tinker.proto", package="jaxrl_llm.tinker", syntax="proto3")
    for message, fields in FIELDS.items():
        described = file.message_type.add(name=message)
        for field, (number, kind) in ((field, text.split()) for field, text in fields.items()):
            base = kind.rstrip("*")
            added = described.field.add(name=field, number=int(number), label=3 if kind.endswith("*") else 1)
            added.type = kinds.get(base, 11)  # 11 is a message
            if base not in kinds:
                added.type_name = f".jaxrl_llm.tinker.{base}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


@dataclasses.dataclass(frozen=True)
class Datum:
    """A row: N tokens that are read, and arrays about each of them for the loss."""

    tokens: np.ndarray  # [N] integers
    inputs: Mapping[str, np.ndarray]  # [N] or [N,K]


@dataclasses.dataclass(frozen=True)
class GradientRequest:
    """Rows, and the loss whose gradient over them is added to that of a run; with `forward_only` it is not."""

    data: Sequence[Datum]
    loss_fn: str
    options: Mapping[str, Any]
    forward_only: bool


def gradient_message(body: bytes) -> Any:
    """The protobuf message of a request, whose `model_id` and `seq_id` are certain. Raises BadRequestError."""
    message = _message("ForwardBackwardRequest")()
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise BadRequestError("the body is no ForwardBackwardRequest of Tinker's SDK 0.38") from None
    return message


def gradient_request(message: Any) -> GradientRequest:
    """The request that a protobuf message holds. Raises BadRequestError."""
    data, filled = [], 0
    for number, datum in enumerate(message.data):
        if any(not chunk.HasField("encoded_text") for chunk in datum.model_input):
            raise _not_text(f"datum {number}")
        tokens = [_numbers(x.encoded_text.tokens, DTYPES[3], f"the text of datum {number}") for x in datum.model_input]
        inputs = {}
        for entry in datum.loss_fn_inputs:
            tensor, where = entry.value, f"{entry.key} of datum {number}"
            if (dtype := DTYPES.get(tensor.dtype)) is None:
                raise BadRequestError(f"{where} has the type {tensor.dtype}; it takes float32 or int64")
            if tensor.HasField("sparse_csr"):
                sparse = tensor.sparse_csr
                rows, columns = (_numbers(x, DTYPES[2], where) for x in (sparse.crow_indices, sparse.col_indices))
                filled += math.prod(tensor.shape)
                if filled > MOST_NUMBERS:
                    raise BadRequestError(f"arrays without their zeros have more than {MOST_NUMBERS} numbers with them")
                inputs[entry.key] = _dense(_numbers(sparse.values, dtype, where), rows, columns, tensor.shape, where)
            else:
                inputs[entry.key] = _shaped(_numbers(tensor.dense, dtype, where), tensor.shape, where)
        data.append(Datum(np.concatenate([np.zeros(0, np.int32), *tokens]), inputs))
    options: dict[str, Any] = {entry.key: entry.value for entry in message.loss_fn_config}
    for entry in message.loss_fn_config_v2:
        options[entry.key] = entry.value.text or entry.value.number
    return GradientRequest(data, message.loss_fn, options, message.forward_only)


def gradient_request_of_json(body: Mapping[str, Any], forward_only: bool) -> GradientRequest:
    """The request that JSON of an earlier client holds. Raises BadRequestError."""
    given = body.get("forward_input" if forward_only else "forward_backward_input")
    if not isinstance(given, Mapping) or not isinstance(given.get("data"), list):
        raise BadRequestError("forward_backward_input takes an object with data, a list, and loss_fn")
    data = []
    for number, datum in enumerate(given["data"]):
        try:
            inputs = {}
            for name, tensor in datum["loss_fn_inputs"].items():
                values = np.atleast_1d(tensor["data"]).astype(NAMES[tensor["dtype"]], casting="same_kind")
                inputs[name] = _shaped(values, tensor.get("shape") or (), f"{name} of datum {number}")
            data.append(Datum(np.asarray(prompt_tokens(datum["model_input"], f"datum {number}"), np.int64), inputs))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise BadRequestError(f"datum {number} cannot be read: {type(error).__name__}: {error!s:.200}") from None
    options = given.get("loss_fn_config") or {}
    if not isinstance(options, Mapping):
        raise BadRequestError(f"loss_fn_config is {options!r:.100}; it takes an object")
    return GradientRequest(data, str(given.get("loss_fn")), options, forward_only)


def whole(body: Mapping[str, Any], name: str, default: int) -> int:
    """The whole number under that name in a body, or the default. Raises BadRequestError for anything else."""
    value = body.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise BadRequestError(f"{name} is {value!r:.100}; it takes a whole number")
    return default if value is None else value


def prompt_tokens(model_input: Any, where: str = "the prompt") -> list[int]:
    """The token ids of a `ModelInput`. Raises BadRequestError where it has anything else than text."""
    chunks = model_input.get("chunks") if isinstance(model_input, Mapping) else None
    if not isinstance(chunks, list) or not all(isinstance(chunk, Mapping) for chunk in chunks):
        raise BadRequestError(f"{where} takes an object with chunks, a list")
    if any(chunk.get("type", "encoded_text") != "encoded_text" for chunk in chunks):
        raise _not_text(where)
    tokens = [chunk.get("tokens") for chunk in chunks]
    if not all(isinstance(ids, list) and all(isinstance(token, int) for token in ids) for ids in tokens):
        raise BadRequestError(f"{where} has a chunk without tokens, a list of ids")
    return [token for ids in tokens for token in ids]


def _not_text(where: str) -> BadRequestError:
    return BadRequestError(f"{where} has images or sound; this server takes tokens of text alone")


def _numbers(body: bytes, dtype: np.dtype, where: str) -> np.ndarray:
    if len(body) % dtype.itemsize:
        raise BadRequestError(f"{where} is {len(body)} bytes, no numbers of {dtype.itemsize} each")
    return np.frombuffer(body, dtype)


def _shaped(values: np.ndarray, shape: Sequence[int], where: str) -> np.ndarray:
    """The array in a shape; without one as it is."""
    if shape and (min(shape) < 0 or math.prod(shape) != values.size):
        raise BadRequestError(f"{where} has {values.size} numbers, but the shape {list(shape)}")
    return values.reshape(tuple(shape or values.shape))


def _dense(values: np.ndarray, rows: np.ndarray, columns: np.ndarray, shape: Sequence[int], where: str) -> np.ndarray:
    """The array of compressed sparse rows, 0 where they list nothing."""
    counts = np.diff(rows)
    if (
        len(shape) != 2 or len(counts) != shape[0] or shape[1] < 0
        or min(counts, default=0) < 0 or not counts.sum() == len(columns) == len(values)
    ):  # fmt: skip
        raise BadRequestError(f"{where} is no sparse array of the shape {list(shape)}")
    if len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]:
        raise BadRequestError(f"{where} has columns outside its {shape[1]}")
    found = np.zeros(tuple(shape), values.dtype)
    found[np.repeat(np.arange(shape[0]), counts), columns] = values
    return found


@dataclasses.dataclass(frozen=True)
class GradientAnswer:
    """Arrays about each datum, by name, and metrics whose names end with how those of several answers are joined."""

    outputs: Sequence[Mapping[str, np.ndarray]]
    metrics: Mapping[str, float]

    def protobuf(self) -> bytes:
        """The message; datums of one width are joined."""
        answer = _message("ForwardBackwardOutput")(loss_fn_output_type="ArrayRecord")
        for name, value in self.metrics.items():
            answer.metrics.add(key=name, value=value)
        runs: list[list[Mapping[str, np.ndarray]]] = []
        for output in self.outputs:  # in order: a record holds arrays that differ in their first dimension alone
            if runs and all(runs[-1][0][name].shape[1:] == x.shape[1:] for name, x in output.items()):
                runs[-1].append(output)
            else:
                runs.append([output])
        for run in runs:
            record = answer.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(run))
            for name, first in run[0].items():
                arrays = [np.ascontiguousarray(output[name], np.float32) for output in run]
                ends = np.cumsum([0, *(x.nbytes for x in arrays)], dtype=np.int64)
                batch = record.fields.add(key=name).value
                batch.data, batch.offsets, batch.dtype = b"".join(x.tobytes() for x in arrays), ends.tobytes(), 1
                batch.trailing_shape.extend(first.shape[1:])
        return answer.SerializeToString()

    def json(self) -> dict[str, Any]:
        """The message as clients read it that came before protobuf."""
        outputs = [
            {name: {"data": x.ravel().tolist(), "dtype": "float32", "shape": list(x.shape)} for name, x in row.items()}
            for row in self.outputs
        ]
        return {"loss_fn_output_type": "ArrayRecord", "loss_fn_outputs": outputs, "metrics": dict(self.metrics)}


def _in_json(logps: Sequence[float]) -> list[float]:
    """Log-probs without the infinity that JSON has not."""
    return [EMPTY if x == -math.inf else x for x in logps]


@dataclasses.dataclass(frozen=True)
class Likeliest:
    """The K likeliest tokens and their log-probs at each of N places; a row without any is empty."""

    ids: Sequence[Sequence[int]]
    logps: Sequence[Sequence[float]]
    count: int

    def message(self) -> Any:
        """The message, in which empty places have the log-prob `EMPTY`."""
        ids = np.zeros((len(self.ids), self.count), np.int32)
        logps = np.full((len(self.ids), self.count), EMPTY, np.float32)
        for place, (own, numbers) in enumerate(zip(self.ids, self.logps, strict=True)):
            ids[place, : len(own)], logps[place, : len(own)] = own, numbers
        return _message("TopkLogprobs")(
            token_ids=ids.tobytes(), logprobs=logps.tobytes(), k=self.count, length=len(ids)
        )

    def json(self) -> list[list[tuple[int, float]] | None]:
        """The pairs of id and log-prob at each place, None where there are none."""
        places = zip(self.ids, self.logps, strict=True)
        return [list(zip(ids, _in_json(logps), strict=True)) or None for ids, logps in places]


@dataclasses.dataclass(frozen=True)
class Completion:
    """A completion; `stopped` by one of its ends rather than by its length."""

    tokens: Sequence[int]
    logps: Sequence[float]
    stopped: bool
    top: Likeliest | None


@dataclasses.dataclass(frozen=True)
class SampleAnswer:
    """Completions of a prompt, and log-probs of the prompt's own tokens where they were asked for."""

    sequences: Sequence[Completion]
    prompt_logps: Sequence[float] | None = None  # NaN where there is none
    prompt_top: Likeliest | None = None

    def protobuf(self) -> bytes:
        """The answer as the bytes of Tinker's protobuf message."""
        answer = _message("SampleResponse")(prompt_cache_hit_tokens=0)
        for row in self.sequences:
            added = answer.sequences.add(
                stop_reason=0 if row.stopped else 1,
                tokens=np.asarray(row.tokens, np.int32).tobytes(),
                logprobs=np.asarray(row.logps, np.float32).tobytes(),
            )
            if row.top is not None:
                added.topk_sampled_logprobs.CopyFrom(row.top.message())
        if self.prompt_logps is not None:
            answer.prompt_logprobs = np.asarray(self.prompt_logps, np.float32).tobytes()
        if self.prompt_top is not None:
            answer.topk_prompt_logprobs.CopyFrom(self.prompt_top.message())
        return answer.SerializeToString()

    def json(self) -> dict[str, Any]:
        """The message as clients read it that came before protobuf."""
        found: dict[str, Any] = {"type": "sample", "sequences": []}
        for row in self.sequences:
            shown = {"tokens": list(row.tokens), "logprobs": _in_json(row.logps)}
            shown["stop_reason"] = "stop" if row.stopped else "length"
            found["sequences"].append(shown | ({} if row.top is None else {"topk_logprobs": row.top.json()}))
        if self.prompt_logps is not None:
            found["prompt_logprobs"] = [None if math.isnan(x) else x for x in _in_json(self.prompt_logps)]
        if self.prompt_top is not None:
            found["topk_prompt_logprobs"] = self.prompt_top.json()
        return found
