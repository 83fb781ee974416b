"""Weight-only quantisation of matrices: `int8` and `fp8` per output channel, `int4` and `nf4` per block of 64 inputs,
`mxfp4` per block of 32.

A quantised kernel is a dict of `codes` and `absmax` (of mxfp4 `scales`), in place of the array. Two codes of 4 bits
share a byte on every backend. Their matmuls are in kernels/stored_matmul.py. No kernel has a gradient.

Numbers in fp8 are kept as bytes (uint8): compilers for devices without fp8 would widen an array to move a slice of it.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.files import mxfp4

KINDS = ("none", "int8", "fp8", "int4", "nf4", "mxfp4")
PARTS = ("codes", "absmax", "scales")  # of quantised kernels
FP8 = jnp.float8_e4m3fn
# Of 8 bits: the type of the codes, and the code of a column's largest number.
BYTES = {"int8": (jnp.dtype("int8"), 127.0), "fp8": (jnp.dtype("uint8"), float(jnp.finfo(FP8).max))}
BLOCK = 64
# The 16 levels of NormalFloat: equally likely under a normal distribution, with an exact 0 (arXiv 2305.14314, app. E).
NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
INT4 = np.arange(-8, 8, dtype=np.float32) / 7.5
LEVELS = {"int4": INT4, "nf4": NF4, "mxfp4": mxfp4.FP4}

Kernel = jax.Array | dict[str, jax.Array]


def quantize(kernel: jax.Array, kind: str, steps: jax.Array | None = None) -> dict[str, jax.Array]:
    """The codes and scales of kernels `[..., in, out]`.

    int8: codes int8 `[..., in, out]`, absmax `[..., 1, out]`, value = codes / 127 * absmax. fp8: the same with codes
    float8_e4m3fn, as bytes, and 448 for 127. int4, nf4: codes uint8 `[..., in/2, out]`, of inputs 2i (low half) and
    2i+1; absmax `[..., in/block, out]`; value = level[code] * absmax, where block is 64 or the largest divisor of `in`
    that 64 has too. mxfp4: codes as these, of the levels of `mxfp4.FP4`; scales uint8 `[..., in/block, out]`, with 32
    for 64; value = level[code] * 2^(scale - 127). Matrices that are stored so already keep every number. With
    `steps` `[..., in, out]`, the same in a column or block each, so do others in int8, fp8 and int4 whose numbers over
    them are integers from -128 or -8 on, or numbers in fp8.
    Raises ConfigError as `check_inputs`.
    """
    check_inputs(kernel.shape[-2], kind, "model.quantize, or teacher.quantize,")
    x = kernel.astype(jnp.float32)
    *lead, d_in, d_out = x.shape
    if kind in BYTES:
        dtype, largest = BYTES[kind]
        absmax = jnp.abs(x).max(axis=-2, keepdims=True) if steps is None else steps[..., :1, :] * largest
        codes = x / _nonzero(absmax) * largest
        return {"codes": narrowed(jnp.round(codes) if kind == "int8" else codes, dtype), "absmax": absmax}
    block = inputs_of_scale(kind, d_in)
    x = x.reshape(*lead, d_in // block, block, d_out)
    absmax = jnp.abs(x).max(axis=-2) if steps is None else steps[..., ::block, :] * 7.5
    if kind == "mxfp4":
        # The largest of a block has the exponent of the largest level, 4 to 6 (OCP Microscaling Formats 1.0, 6.3).
        stored = {"scales": jnp.clip(jnp.frexp(absmax)[1] + 124, 1, 254).astype(jnp.uint8)}
        sizes = x / _power(stored["scales"])[..., None, :]
        codes = _nearest_even(jnp.abs(sizes)) | (sizes < 0).astype(jnp.uint8) << 3
    else:
        stored, levels = {"absmax": absmax}, LEVELS[kind]
        x = x / _nonzero(absmax)[..., None, :]
        codes = jnp.searchsorted((levels[1:] + levels[:-1]) / 2, x, method="compare_all").astype(jnp.uint8)
    codes = codes.reshape(*lead, d_in, d_out)
    return {"codes": codes[..., ::2, :] | codes[..., 1::2, :] << 4, **stored}


def inputs_of_scale(kind: str, count: int) -> int:
    """The number of inputs next to each other, of `count`, that have one scale."""
    return count if kind in BYTES else math.gcd(count, mxfp4.BLOCK if kind == "mxfp4" else BLOCK)


def check_inputs(count: int, kind: str, setting: str) -> None:
    """Raises ConfigError where matrices with that number of inputs are not stored as `setting` says: two codes of 4
    bits share a byte."""
    if kind not in ("none", *BYTES) and count % 2:
        raise ConfigError(f"{setting} is {kind}, which needs matrices with an even number of inputs, not {count}")


def dequantize(kernel: dict[str, jax.Array], kind: str, dtype) -> jax.Array:
    """The matrix `[..., in, out]` in `dtype` whose codes and scales `quantize` stored, of that `kind`."""
    codes = kernel["codes"]
    if kind in BYTES:
        return (widened(codes, jnp.float32) * (kernel["absmax"] / BYTES[kind][1])).astype(dtype)
    factors = as_factors(scales_of(kernel))
    *lead, half, d_out = codes.shape
    pairs = jnp.stack([codes & 15, codes >> 4], axis=-2)
    values = jnp.asarray(LEVELS[kind])[pairs.astype(jnp.int32)].reshape(*lead, factors.shape[-2], -1, d_out)
    return (values * factors[..., None, :]).astype(dtype).reshape(*lead, 2 * half, d_out)


def scales_of(kernel: dict[str, jax.Array]) -> jax.Array:
    """The scales of a quantised kernel as they are stored: of 4 bits `[..., in/block, out]`."""
    return kernel["scales"] if "scales" in kernel else kernel["absmax"]


def as_factors(scales) -> jax.Array:
    """Scales of codes of 4 bits as fp32: `absmax` as it is, those of mxfp4, exponents in uint8, as powers of two."""
    return _power(scales) if scales.dtype == jnp.uint8 else scales


def as_matrix(kernel: Kernel, kind: str, dtype) -> jax.Array:
    """The kernel `[..., in, out]` in `dtype`, dequantised where it is the codes and scales of that `kind`."""
    return dequantize(kernel, kind, dtype) if isinstance(kernel, dict) else kernel.astype(dtype)


def quantized_as(
    params: dict[str, Any], shapes: dict[str, Any], kind_of: Callable[[str], str], path: str = ""
) -> dict[str, Any]:
    """The parameters with those matrices quantised that `shapes`, of a net that is quantised, has as dicts.

    `kind_of` says how by their paths, of which `path` is that of `params`.
    """
    quantized = {}
    for name, x in params.items():
        shape = shapes.get(name)
        if isinstance(x, dict):
            quantized[name] = quantized_as(x, shape or {}, kind_of, f"{path}{name}/")
        else:
            # Of experts those of one layer at a time: as numbers in fp32 those of all are most of a model.
            make = functools.partial(quantize, kind=kind_of(path))
            make = make if x.ndim <= 3 else functools.partial(jax.lax.map, make)
            quantized[name] = make(x) if isinstance(shape, dict) else x
    return quantized


def narrowed(x, dtype) -> jax.Array:
    """x in `dtype`, where uint8 are the bytes of fp8; numbers beyond the range of fp8 become its largest."""
    if dtype not in (jnp.uint8, FP8):
        return x.astype(dtype)
    largest = BYTES["fp8"][1]
    x = jnp.clip(x, -largest, largest).astype(FP8)
    return jax.lax.bitcast_convert_type(x, jnp.uint8) if dtype == jnp.uint8 else x


def as_fp8(x) -> jax.Array:
    """x as float8_e4m3fn where it is uint8, which hold its bytes; another x as it is."""
    return jax.lax.bitcast_convert_type(x, FP8) if x.dtype == jnp.uint8 else x


def widened(x, dtype) -> jax.Array:
    """The numbers that `narrowed` stored, in the wider `dtype`: its inverse, but for what was rounded."""
    return as_fp8(x).astype(dtype)


def _power(scales) -> jax.Array:
    """2^(scale - 127) in fp32, whose exponent that is; scales are 1 to 254."""
    return jax.lax.bitcast_convert_type(scales.astype(jnp.uint32) << 23, jnp.float32)


def _nearest_even(x) -> jax.Array:
    """The number of the level of `mxfp4.FP4` nearest to x from 0 on; of two as near the even one."""
    middles = (mxfp4.FP4[1:8] + mxfp4.FP4[:7]) / 2
    above = (x >= middle if number % 2 else x > middle for number, middle in enumerate(middles))
    return functools.reduce(jnp.add, (each.astype(jnp.uint8) for each in above))


def _nonzero(absmax):
    return jnp.where(absmax == 0, 1.0, absmax)
