"""Matrices in 8-bit floats with a scale for each block, as DeepSeek-V3 stores them: read, slice by slice, as numbers.

A matrix `[...,out,in]` named `x` is stored as E4M3, and the scales that its blocks are multiplied by as `x_scale_inv`
`[...,out/n,in/m]`. Blocks are of n x m = 128 x 128 numbers as a rule, smaller at the ends (arXiv 2412.19437, section
3.3); of 1 x 32 in MXFP8 (MiniMax-M3; OCP Microscaling Formats 1.0), whose scales are bytes, the exponents of powers of
two (E8M0); or the whole of a matrix is one block (Ministral 3), and its scale may be a number.
"""

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.families.entries import refuse

SUFFIX = "_scale_inv"
METHODS = ("fp8", "mxfp8")  # the quant_method of config.json
STORED = "F8_E4M3"
EXPONENTS = ("U8", "F8_E8M0")  # types of scales that are powers of two
WHOLE = (0, 0)  # the block of matrices that have one scale each
INPUTS = "activation_scale"  # ends names of scales of what the matrices are multiplied with, where that is in fp8 too


def block_of(hf: dict[str, Any]) -> tuple[int, int] | None:
    """The rows and columns of a block by config.json, or WHOLE; None where it says nothing of 8-bit floats.

    Raises ConfigError for blocks of other than two dimensions.
    """
    entry = hf.get("quantization_config") or {}
    if entry.get("quant_method") not in METHODS:
        return None
    block = entry.get("weight_block_size", [128, 128])
    if block is None:
        return WHOLE
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        refuse("weight_block_size", block, "two integers from 1, for the rows and columns that have a scale, and null")
    return block[0], block[1]


class Matrices:
    """One such matrix, or a stack of them, sliced like a tensor of safetensors."""

    def __init__(self, codes: np.ndarray, scales: Any, block: tuple[int, int]):
        self.codes, self.scales, self.block = codes, scales, block

    def get_slice(self, name: str) -> "Matrices":
        """The matrix itself, which stands in for the file of its tensor `name`."""
        return self

    def get_shape(self) -> list[int]:
        """`[..., out, in]`."""
        return list(self.codes.shape)

    def get_dtype(self) -> str:
        """The type that numbers and scales are multiplied in."""
        return "F32"

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """The slice `[..., outputs, inputs]`, of which blocks that are needed in part have their scales read whole."""
        index = tuple(slice(*part.indices(size)) for part, size in zip(index, self.codes.shape, strict=True))
        numbers = self.codes[index].astype(np.float32)
        blocks = [slice(at.start // n, -(-at.stop // n)) for at, n in zip(index[-2:], self.block, strict=True)]
        scales = np.asarray(self.scales[(*index[:-2], *blocks)]).astype(np.float32)
        for axis, at, first, n in zip((-2, -1), index[-2:], blocks, self.block, strict=True):
            scales = np.take(scales, np.arange(at.start, at.stop) // n - first.start, axis)
        return numbers * scales


def with_matrices(where: dict[str, Any], files: dict[str, Path], block: tuple[int, int] | None) -> dict[str, Any]:
    """The files of tensors by name, with matrices in the place of each pair of numbers and scales.

    `files` are the paths, by name. They are mapped into memory, as safetensors gives NumPy no floats of 8 bits. Raises
    ConfigError for scales that are neither of those blocks nor of others that divide a matrix evenly.
    """
    if block is None:
        return where
    found: dict[str, Any] = {name: file for name, file in where.items() if not name.endswith(INPUTS)}
    headers: dict[Path, tuple[int, dict[str, Any]]] = {}

    def mapped(name: str, dtype: Any) -> np.ndarray:
        if files[name] not in headers:
            with files[name].open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                headers[files[name]] = 8 + size, json.loads(file.read(size))
        start, header = headers[files[name]]
        entry = header[name]
        return np.memmap(files[name], dtype, "r", start + entry["data_offsets"][0], tuple(entry["shape"]))

    for name in where:
        if name + SUFFIX not in where or where[name].get_slice(name).get_dtype() != STORED:
            continue
        codes, file = mapped(name, ml_dtypes.float8_e4m3fn), found.pop(name + SUFFIX)
        scales = file.get_slice(name + SUFFIX)
        grid = tuple(scales.get_shape())
        is_one = codes.ndim == 2 and math.prod(grid) == 1
        if scales.get_dtype() in EXPONENTS:
            scales = mapped(name + SUFFIX, ml_dtypes.float8_e8m0fnu)
        elif is_one:
            scales = file.get_tensor(name + SUFFIX)
        if is_one:
            scales, grid = np.reshape(scales, (1, 1)), (1, 1)
        found[name] = Matrices(codes, scales, _block(name, codes.shape, grid, block))
    return found


def _block(name: str, shape: tuple[int, ...], grid: tuple[int, ...], usual: tuple[int, int]) -> tuple[int, int]:
    """The block of a matrix with a `grid` of scales: the `usual` one, or that which divides it evenly, as experts may
    have other blocks than the rest."""
    if len(grid) == len(shape) and grid[:-2] == shape[:-2]:
        if all(n and -(-size // n) == count for size, n, count in zip(shape[-2:], usual, grid[-2:], strict=True)):
            return usual
        if all(count and size % count == 0 for size, count in zip(shape[-2:], grid[-2:], strict=True)):
            return shape[-2] // grid[-2], shape[-1] // grid[-1]
    raise ConfigError(
        f"tensor {name} of shape {shape} has scales {name}{SUFFIX} of shape {grid}, which are of no blocks of it "
        f"(weight_block_size of config.json: {list(usual) if usual != WHOLE else None})"
    )
