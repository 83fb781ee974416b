"""Matrices that bitsandbytes has quantised, against its own functions and by hand."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.files import bitsandbytes
from jaxrl_llm.models.quantize import NF4, dequantize, quantize
from tests.models.files.quantized import check_model, check_slices, describe, make_quantized

# bitsandbytes' fp4: a sign, two bits of exponent and one of fraction, over the largest.
FP4 = np.float32([0, 1 / 192, 8 / 12, 1, 4 / 12, 6 / 12, 2 / 12, 3 / 12])
LEVELS = {"nf4": NF4, "fp4": np.concatenate([FP4, -FP4])}
KINDS = ("nf4", "nf4 nested", "fp4 nested", "int8")


def stored(name, matrix, kind, draw):
    """The tensors of a matrix as bitsandbytes stores it, with scales that are drawn, and its numbers, one by one."""
    out, inputs = matrix.shape
    if kind == "int8":
        codes, scales = draw.integers(-127, 128, matrix.shape), np.float32(draw.uniform(0.1, 0.3, out))
        module = name.removesuffix("weight")
        numbers = [[codes[o, i] * (scales[o] / 127) for i in range(inputs)] for o in range(out)]
        tensors = {
            name: torch.tensor(codes, dtype=torch.int8),
            f"{module}SCB": torch.tensor(scales),
            f"{module}weight_format": torch.tensor(0, dtype=torch.uint8),
        }
        return tensors, np.float32(numbers)
    levels, block = LEVELS[kind.split()[0]], 64
    codes = draw.integers(0, 16, out * inputs)
    packed = np.append(codes, 0)[: 2 * math.ceil(codes.size / 2)].reshape(-1, 2)
    state = {"quant_type": kind.split()[0], "blocksize": block, "dtype": "bfloat16", "shape": [out, inputs]}
    count = math.ceil(codes.size / block)
    scales = np.float32(draw.uniform(0.05, 0.15, count))
    tensors = {name: packed[:, :1] << 4 | packed[:, 1:], f"{name}.quant_map": levels}
    if kind.endswith("nested"):
        of_scales, offset = np.float32(draw.uniform(0.01, 0.03, math.ceil(count / 256))), 0.1234
        table = np.sort(np.float32(draw.uniform(-1, 1, 256)))
        chosen = draw.integers(0, 256, count)
        scales = np.float32([table[chosen[n]] * of_scales[n // 256] + np.float32(offset) for n in range(count)])
        tensors |= {f"{name}.nested_absmax": of_scales, f"{name}.nested_quant_map": table}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    tensors[f"{name}.absmax"] = chosen.astype(np.uint8) if kind.endswith("nested") else scales
    numbers = np.float32([levels[code] * scales[n // block] for n, code in enumerate(codes)]).reshape(out, inputs)
    described = f"{name}.quant_state.bitsandbytes__{state['quant_type']}"
    tensors[described] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    as_bytes = {key: x.astype(np.uint8) if x.dtype.kind in "iu" else x for key, x in tensors.items()}
    return {key: torch.tensor(x) for key, x in as_bytes.items()}, numbers


@pytest.fixture(scope="module", params=KINDS)
def quantized(request, tmp_path_factory):
    """A folder whose linear maps are quantised, the oracle with their numbers, and these by name."""
    folder, draw = tmp_path_factory.mktemp("bnb"), np.random.default_rng(1)
    oracle, numbers = make_quantized(folder, lambda name, matrix: stored(name, matrix, request.param, draw))
    describe(folder, {"quant_method": "bitsandbytes", "load_in_4bit": request.param != "int8"})
    return folder, oracle, numbers


def test_a_quantised_model_is_read_as_numbers(quantized, tmp_path):
    folder, oracle, _ = quantized
    check_model(folder, oracle, tmp_path / "out")


def test_any_slice_of_a_matrix(quantized):
    folder, _, numbers = quantized
    with safe_open(folder / "model.safetensors", "numpy") as handle:
        found = bitsandbytes.with_matrices(dict.fromkeys(handle.keys(), handle))
        assert not [name for name in found if "quant" in name or "absmax" in name or "SCB" in name or "format" in name]
        check_slices(found, numbers, rtol=1e-6)


def test_rows_of_odd_length(tmp_path):
    """Which begin in the middle of a byte."""
    tensors, numbers = stored("x.weight", np.empty((7, 5)), "nf4 nested", np.random.default_rng(2))
    save_file(tensors, tmp_path / "x")
    with safe_open(tmp_path / "x", "numpy") as handle:
        found = bitsandbytes.with_matrices(dict.fromkeys(handle.keys(), handle))["x.weight"]
        for rows in (slice(None), slice(1, 4), slice(3, 7)):
            np.testing.assert_allclose(found[rows, 1:4], numbers[rows, 1:4], rtol=1e-6)


def test_stored_again_in_nf4_every_number_stays():
    """The blocks of bitsandbytes are ours, and the largest number of each has the level 1 or -1."""
    draw = np.random.default_rng(3)
    codes, scales = draw.integers(0, 16, (6, 2, 64)), np.float32(draw.uniform(0.05, 0.15, (6, 2, 1)))
    codes[..., draw.integers(64)] = draw.choice([0, 15], (6, 2))
    numbers = (NF4[codes] * scales).reshape(6, 128)
    found = dequantize(quantize(jnp.asarray(numbers.T), "nf4"), "nf4", jnp.float32)
    np.testing.assert_array_equal(found.T, numbers)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda x, name: x.pop(f"{name}.absmax"), "lacks tensors that belong to x.weight: x.weight.absmax"),
        (lambda x, name: x.update({name: x[name].view(torch.int8)}), r"x.weight has codes of 4 bits in I8 \(bnb_4bit"),
        (
            lambda x, name: x.update({f"{name}.absmax": x[f"{name}.absmax"][:2]}),
            "x.weight.absmax has 2 numbers, .* needs 4",
        ),
        (
            lambda x, name: x.update({f"{name}.quant_state.bitsandbytes__nf4": torch.zeros(9, dtype=torch.uint8)}),
            "x.weight.quant_state.bitsandbytes__nf4 is no JSON: the file is damaged",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, changed, message):
    tensors, _ = stored("x.weight", np.empty((4, 64)), "nf4 nested", np.random.default_rng(4))
    changed(tensors, "x.weight")
    save_file(tensors, tmp_path / "x")
    with safe_open(tmp_path / "x", "numpy") as handle, pytest.raises(ConfigError, match=message):
        bitsandbytes.with_matrices(dict.fromkeys(handle.keys(), handle))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_what_bitsandbytes_writes(tmp_path, kind, nested):
    """Of matrices with more than 256 blocks, by its own functions."""
    functional = pytest.importorskip("bitsandbytes").functional
    matrix = torch.randn(160, 192, generator=torch.manual_seed(0))
    codes, state = functional.quantize_4bit(matrix, quant_type=kind, compress_statistics=nested)
    packed = {f"x.weight.{key}": x for key, x in state.as_dict(packed=True).items()}
    save_file({"x.weight": codes, **packed}, tmp_path / "x")
    with safe_open(tmp_path / "x", "numpy") as handle:
        found = bitsandbytes.with_matrices(dict.fromkeys(handle.keys(), handle))["x.weight"]
        np.testing.assert_allclose(found[:, :], functional.dequantize_4bit(codes, state), rtol=1e-5, atol=1e-6)
