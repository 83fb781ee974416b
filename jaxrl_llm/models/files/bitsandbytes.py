"""Matrices that bitsandbytes has quantised to 4 or 8 bits: read, slice by slice, as numbers.

Of 4 bits, a matrix `[out,in]` named `x` is stored as its numbers in a row, two codes in a byte, the upper half first;
they are levels of `x.quant_map` [16] (nf4 or fp4), times the scale `x.absmax` of a block of 64 numbers. With double
quantisation (QLoRA, arXiv 2305.14314, section 3) scales are codes of 8 bits themselves: levels of `x.nested_quant_map`
[256], times `x.nested_absmax` of 256 of them, plus an offset. Sizes and offset are JSON, in a tensor of bytes
`x.quant_state.bitsandbytes__nf4`.

Of 8 bits (arXiv 2208.07339), `x` are integers, and the largest number of each row is beside it, `SCB` [out].
"""

import json
import math
from functools import cached_property
from typing import Any

import numpy as np

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.files import scaled

METHOD = "bitsandbytes"  # the quant_method of config.json
STATE = ".quant_state.bitsandbytes__"
PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
SCALES, FORMAT = "SCB", "weight_format"  # of 8 bits, in place of `weight` at the end of a name


class Matrices:
    """A matrix of 4 bits, sliced like a tensor of safetensors."""

    def __init__(self, name: str, where: dict[str, Any], state: dict[str, Any]):
        self.name, self.where, self.state = name, where, state
        self.codes = where[name].get_slice(name)
        if self.codes.get_dtype() != "U8":
            raise ConfigError(
                f"tensor {name} has codes of 4 bits in {self.codes.get_dtype()} (bnb_4bit_quant_storage), but uint8, "
                "the default there, is what is read: save the model with it"
            )
        count = math.prod(state["shape"])
        blocks = -(-count // state["blocksize"])
        sizes = {"": -(-count // 2), ".absmax": blocks, ".quant_map": 16}
        if "nested_blocksize" in state:
            sizes |= {".nested_absmax": -(-blocks // state["nested_blocksize"]), ".nested_quant_map": 256}
        for end, size in sizes.items():
            if (found := math.prod(where[name + end].get_slice(name + end).get_shape())) != size:
                raise ConfigError(
                    f"tensor {name + end} has {found} numbers, but a matrix of shape {state['shape']} needs {size}: "
                    "the file is damaged"
                )

    def _part(self, end: str) -> np.ndarray:
        return self.where[self.name + end].get_tensor(self.name + end)

    @cached_property
    def scales(self) -> np.ndarray:
        """The scale of each block of numbers, in fp32."""
        scales = self._part(".absmax")
        if "nested_blocksize" not in self.state:
            return scales
        of_scales = np.repeat(self._part(".nested_absmax"), self.state["nested_blocksize"])[: scales.size]
        return self._part(".nested_quant_map")[scales] * of_scales + np.float32(self.state["nested_offset"])

    def get_slice(self, name: str) -> "Matrices":
        """The matrix itself, which stands in for the file of its tensor `name`."""
        return self

    def get_shape(self) -> list[int]:
        """`[out, in]`."""
        return list(self.state["shape"])

    def get_dtype(self) -> str:
        """The type that levels and scales are multiplied in."""
        return "F32"

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """The slice `[outputs, inputs]`, of which rows are read whole."""
        rows, width = slice(*index[0].indices(self.state["shape"][0])), int(np.prod(self.state["shape"][1:]))
        start, stop = rows.start * width, max(rows.stop, rows.start) * width
        pairs = np.asarray(self.codes[start // 2 : -(-stop // 2)]).reshape(-1)
        codes = np.stack([pairs >> 4, pairs & 15], axis=-1).reshape(-1)[start % 2 :][: stop - start]
        numbers = self._part(".quant_map")[codes] * self.scales[np.arange(start, stop) // self.state["blocksize"]]
        return numbers.reshape(-1, *self.state["shape"][1:])[(slice(None), *index[1:])]


def with_matrices(where: dict[str, Any]) -> dict[str, Any]:
    """The files of tensors by name, with matrices in the place of codes, scales and what else belongs to them.

    Raises ConfigError where one of these is missing or of another size, and for codes of 4 bits in another type than
    bytes.
    """
    found = dict(where)
    for name in where:
        matrix, is_state, _ = name.partition(STATE)
        if is_state:
            try:
                state = json.loads(bytes(where[name].get_tensor(name)))
            except ValueError as error:
                raise ConfigError(f"tensor {name} is no JSON: the file is damaged ({error})") from error
            parts = [matrix + end for end in PARTS[: None if "nested_blocksize" in state else 2]]
            scaled.check_parts(matrix, (matrix, *parts), where)
            for part in (name, *parts):
                found.pop(part)
            found[matrix] = Matrices(matrix, where, state)
        elif name.endswith(".weight") and where[name].get_slice(name).get_dtype() == "I8":
            module = name.removesuffix("weight")
            if module + SCALES in where:
                largest, codes = found.pop(module + SCALES).get_tensor(module + SCALES), where[name].get_slice(name)
                found.pop(module + FORMAT, None)
                scales = largest.astype(np.float32)[:, None] * np.float32(1 / 127)
                found[name] = scaled.Matrices(codes, scales, (1, codes.get_shape()[1]))
    return found
