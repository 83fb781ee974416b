"""Matrices of experts in MXFP4, as gpt-oss stores them: read, slice by slice, as numbers.

A matrix `[E,in,out]` named `x` is stored as `x_blocks` `[E,out,in/32,16]`, two 4-bit floats in a byte, the lower half
first, and `x_scales` `[E,out,in/32]`, one power of two for 32 inputs (OCP Microscaling Formats 1.0: E2M1 and E8M0).
"""

from typing import Any

import ml_dtypes
import numpy as np

from jaxrl_llm.config import ConfigError

METHOD = "mxfp4"  # the quant_method of config.json
BLOCK = 32  # numbers of one scale
SUFFIXES = ("_blocks", "_scales")
FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], np.float32)


class Matrices:
    """The matrices of a layer's experts, sliced like a tensor of safetensors; their numbers are those of bfloat16."""

    def __init__(self, blocks: Any, scales: Any):
        self.blocks, self.scales = blocks, scales

    def get_slice(self, name: str) -> "Matrices":
        """The matrices themselves, which stand in for the file of their tensor `name`."""
        return self

    def get_shape(self) -> list[int]:
        """`[E, in, out]`."""
        experts, columns, blocks, _ = self.blocks.get_shape()
        return [experts, blocks * BLOCK, columns]

    def get_dtype(self) -> str:
        """The type that holds every number exactly."""
        return "BF16"

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """The slice `[experts, inputs, outputs]`; blocks that it needs a part of are read whole."""
        experts, inputs, outputs = (part.indices(size) for part, size in zip(index, self.get_shape(), strict=True))
        first, last = inputs[0] // BLOCK, -(-inputs[1] // BLOCK)
        at = (slice(*experts[:2]), slice(*outputs[:2]), slice(first, last))
        codes, scales = np.asarray(self.blocks[(*at, slice(None))]), np.asarray(self.scales[at])
        numbers = np.stack([FP4[codes & 15], FP4[codes >> 4]], axis=-1).reshape(*codes.shape[:3], BLOCK)
        numbers = np.ldexp(numbers, scales.astype(np.int32)[..., None] - 127).reshape(*codes.shape[:2], -1)
        found = numbers.swapaxes(1, 2)[:, inputs[0] - first * BLOCK : inputs[1] - first * BLOCK]
        return found.astype(ml_dtypes.bfloat16)


def with_matrices(where: dict[str, Any]) -> dict[str, Any]:
    """The files of tensors by name, with matrices in the place of each pair of blocks and scales.

    Raises ConfigError for a pair whose shapes do not belong together.
    """
    found = dict(where)
    blocks, scales = SUFFIXES
    for name in where:
        matrix = name.removesuffix(blocks)
        if name.endswith(blocks) and matrix + scales in where:
            own = [found.pop(part).get_slice(part) for part in (name, matrix + scales)]
            shape, of_scales = (tuple(part.get_shape()) for part in own)
            if len(shape) != 4 or shape[:-1] != of_scales or shape[-1] != BLOCK // 2:
                raise ConfigError(
                    f"tensor {name} has shape {shape} and {matrix}{scales} {of_scales}, but MXFP4 has {BLOCK // 2} "
                    "bytes for each scale: the file is damaged"
                )
            found[matrix] = Matrices(*own)
    return found
