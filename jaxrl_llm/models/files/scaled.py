"""Matrices of codes of which a scale, and maybe a zero point, for each block makes numbers: read slice by slice.

It is what the formats of bitsandbytes.py, block_fp8.py, compressed_tensors.py and gptq.py have in common.
"""

import functools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxrl_llm.config import ConfigError

# Types of 8 bits that safetensors gives NumPy no arrays of.
FLOATS = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu}


class Matrices:
    """A matrix, or a stack of them, sliced like a tensor of safetensors: (code - zero) * scale, in fp32.

    `codes` are `[..., out, in]`; `scales` and `zeros` `[..., out/n, in/m]` are of blocks of n x m numbers, smaller at
    the ends. With `groups` [in], inputs have the scales and zeros of that column each. Codes, scales and zeros may be
    tensors of files, which are read as they are sliced.
    """

    def __init__(
        self, codes: Any, scales: Any, block: tuple[int, int], zeros: Any = None, groups: np.ndarray | None = None
    ):
        self.codes, self.scales, self.block, self.zeros = codes, scales, block, zeros
        is_order = groups is None or np.array_equal(groups, np.arange(len(groups)) // block[1])
        self.groups = None if is_order else groups

    def get_slice(self, name: str) -> "Matrices":
        """The matrix itself, which stands in for the file of its tensor `name`."""
        return self

    def get_shape(self) -> list[int]:
        """`[..., out, in]`."""
        return list(shape_of(self.codes))

    def get_dtype(self) -> str:
        """The type that numbers and scales are multiplied in."""
        return "F32"

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """The slice `[..., outputs, inputs]`, of which blocks that are needed in part have their scales read whole."""
        index = bounded(index, self.get_shape())
        ends = list(zip(index[-2:], self.block, strict=True))
        blocks = [slice(at.start // n, -(-at.stop // n)) for at, n in ends]
        own = [np.arange(at.start, at.stop) // n - at.start // n for at, n in ends]
        if self.groups is not None:
            blocks[1], own[1] = slice(None), self.groups[index[-1]]

        def each(x: Any) -> np.ndarray:
            x = np.asarray(x[(*index[:-2], *blocks)]).astype(np.float32)
            return np.take(np.take(x, own[0], -2), own[1], -1)

        numbers = np.asarray(self.codes[index]).astype(np.float32)
        if self.zeros is not None:
            numbers -= each(self.zeros)
        return numbers * each(self.scales)

    def steps(self, kind: str, inputs: int) -> "Matrices | None":
        """The scale of each number, where so many inputs next to each other have one scale, and model.quantize of that
        kind has a code for each number over it: integers from -128 on in int8, from -8 on in int4, and what is in fp8.

        None otherwise.
        """
        shape, is_fp8 = self.get_shape(), isinstance(self.codes, np.ndarray)
        is_shared = self.groups is None and (self.block[1] >= shape[-1] or self.block[1] % inputs == 0)
        if not is_shared or is_fp8 != (kind == "fp8"):
            return None
        if not is_fp8:
            zeros = np.unique(0 if self.zeros is None else self.zeros[(slice(None),) * len(shape)])
            numbers = (self.codes.levels if isinstance(self.codes, Packed) else np.arange(-128, 128)) - zeros[0]
            end = {"int4": 8, "int8": 128}.get(kind, 0)
            if len(zeros) > 1 or (numbers != np.round(numbers)).any() or numbers.min() < -end or numbers.max() >= end:
                return None
        return Matrices(np.broadcast_to(np.float32(1), shape), self.scales, self.block)


class Packed:
    """A matrix `[out, in]` of codes of few bits, k in a word of `words`, `[out, in/k]`, or `[out/k, in]` with axis 0.

    Slices of it are in fp32: `levels` [2^bits] are the numbers of the codes. The codes of a word are of numbers next to
    each other, the first in the lowest bits or, with `places` [k], each in that place. `added` is added to words before
    they are taken apart, with carries.
    """

    def __init__(
        self,
        words: Any,
        shape: Sequence[int],
        levels: np.ndarray,
        axis: int = 1,
        places: Sequence[int] | None = None,
        added: int = 0,
    ):
        self.words, self.shape, self.levels, self.axis, self.added = words, tuple(shape), levels, axis, added
        self.bits = len(levels).bit_length() - 1
        self.places = places

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """The slice `[outputs, inputs]`, for which words that it needs a part of are read whole."""
        at = bounded(index, self.shape)
        own = at[self.axis]
        count = WORD_BITS[self.words.get_dtype()] // self.bits
        first = own.start // count
        at = [*at]
        at[self.axis] = slice(first, -(-own.stop // count))
        words = np.asarray(self.words[tuple(at)])
        words = (words if self.axis else words.T).view(f"u{words.itemsize}")
        words = words + words.dtype.type(self.added)
        shifts = np.asarray(self.places or range(count), words.dtype) * words.dtype.type(self.bits)
        codes = words[..., None] >> shifts & words.dtype.type(len(self.levels) - 1)
        codes = codes.reshape(len(words), words.shape[1] * count)
        codes = codes[:, own.start - first * count : own.stop - first * count]
        return self.levels[codes if self.axis else codes.T]


class Transposed:
    """A matrix of a file with rows for columns, sliced like it."""

    def __init__(self, matrix: Any):
        self.matrix = matrix

    def get_shape(self) -> list[int]:
        """`[columns, rows]`."""
        return self.matrix.get_shape()[::-1]

    def get_dtype(self) -> str:
        """The type of its numbers."""
        return self.matrix.get_dtype()

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """The slice `[columns, rows]`."""
        return np.asarray(self.matrix[index[::-1]]).T


WORD_BITS = {"I32": 32, "U8": 8, "I8": 8}  # by the types of words


def bounded(index: tuple[slice, ...], shape: Sequence[int]) -> tuple[slice, ...]:
    """The slices with a start and an end each, of an array of that shape."""
    return tuple(slice(*part.indices(size)) for part, size in zip(index, shape, strict=True))


def shape_of(x: Any) -> tuple[int, ...]:
    """The shape of an array, or of a tensor of a file that is not read yet."""
    return tuple(x.shape if hasattr(x, "shape") else x.get_shape())


def opener(where: dict[str, Any], files: dict[str, Path]) -> Callable[..., Any]:
    """A function that gives a tensor by its name, to be sliced; with `exponents`, bytes are those of powers of two.

    `where` are the files by names of tensors, and `files` their paths. Floats of 8 bits are mapped into memory, whole
    files at once: the experts of a model are more matrices than a process may have maps.
    """

    @functools.cache
    def mapped(path: Path) -> tuple[dict[str, Any], np.ndarray]:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            return json.loads(file.read(size)), np.memmap(path, np.uint8, "r", 8 + size)

    def tensor(name: str, exponents: bool = False) -> Any:
        found = where[name].get_slice(name)
        dtype = {**FLOATS, "U8": FLOATS["F8_E8M0"] if exponents else None}.get(found.get_dtype())
        if dtype is None:
            return found if len(found.get_shape()) > 1 else where[name].get_tensor(name)
        header, numbers = mapped(files[name])
        start, end = header[name]["data_offsets"]
        return np.asarray(numbers[start:end]).view(dtype).reshape(found.get_shape())

    return tensor


def check_parts(matrix: str, parts: Iterable[str], where: dict[str, Any]) -> None:
    """Raises ConfigError where the files lack one of the tensors that a matrix is stored as."""
    if missing := [part for part in parts if part not in where]:
        raise ConfigError(f"the model lacks tensors that belong to {matrix}: {', '.join(missing)}")


def blocked(
    name: str,
    codes: Any,
    scales_name: str,
    scales: Any,
    usual: Sequence[tuple[int, int]],
    said: str,
    zeros: Any = None,
    order: str = "",
    groups: np.ndarray | None = None,
) -> Matrices:
    """The matrix `name`, with scales of the whole, of blocks that are among the `usual` ones or, as some matrices may
    have others than the rest, of blocks that divide it evenly. `groups` are those of inputs, from the tensor `order`.

    Raises ConfigError, with what is `said` of blocks in config.json, for scales of none, for zeros of other blocks, and
    for groups that have no scales.
    """
    shape, grid = shape_of(codes), shape_of(scales)
    if zeros is not None and shape_of(zeros) != grid:
        raise ConfigError(
            f"tensor {name} has zero points of shape {shape_of(zeros)} and scales {scales_name} of shape {grid}, but "
            "each scale has a zero point: the file is damaged"
        )
    if groups is not None and (groups.shape != shape[-1:] or groups.min() < 0 or groups.max() >= grid[-1]):
        raise ConfigError(f"tensor {order} names no group, of {grid[-1]}, for each of {shape[-1]} inputs")
    if len(shape) == 2 and math.prod(grid) == 1:
        one = [x if x is None else np.reshape(x[(slice(None),) * len(grid)], (1, 1)) for x in (scales, zeros)]
        return Matrices(codes, one[0], (shape[0], shape[1]), one[1])
    if len(grid) == len(shape) and grid[:-2] == shape[:-2]:
        sizes = list(zip(shape[-2:], grid[-2:], strict=True))
        for block in usual:
            if all(-(-size // n) == count for (size, count), n in zip(sizes, block, strict=True)):
                return Matrices(codes, scales, block, zeros, groups)
        if all(count and size % count == 0 for size, count in sizes):
            return Matrices(codes, scales, (shape[-2] // grid[-2], shape[-1] // grid[-1]), zeros, groups)
    raise ConfigError(
        f"tensor {name} of shape {shape} has scales {scales_name} of shape {grid}, which are of no blocks of it "
        f"({said})"
    )
