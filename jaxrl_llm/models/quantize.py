"""Weight-only quantisation of frozen matrices: `int8` per output channel, `int4` and `nf4` per block of 64 inputs.

A quantised kernel is a dict of `codes` and `absmax`, in place of the array. Two codes of 4 bits share a byte on every
backend. Products dequantise in the compute dtype and give no gradient to the kernel.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.config import ConfigError

KINDS = ("none", "int8", "int4", "nf4")
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

Kernel = jax.Array | dict[str, jax.Array]


def quantize(kernel: jax.Array, kind: str) -> dict[str, jax.Array]:
    """The codes and scales of kernels `[..., in, out]`.

    int8: codes int8 `[..., in, out]`, absmax `[..., 1, out]`, value = codes / 127 * absmax. int4, nf4: codes uint8
    `[..., in/2, out]`, of inputs 2i (low half) and 2i+1; absmax `[..., in/block, out]`; value = level[code] * absmax,
    where block is 64 or the largest divisor of `in` that 64 has too. Raises ConfigError for an odd number of inputs.
    """
    x = kernel.astype(jnp.float32)
    *lead, d_in, d_out = x.shape
    if kind == "int8":
        absmax = jnp.abs(x).max(axis=-2, keepdims=True)
        return {"codes": jnp.round(x / _nonzero(absmax) * 127.0).astype(jnp.int8), "absmax": absmax}
    if d_in % 2:
        raise ConfigError(f"model.quantize = {kind!r} needs matrices with an even number of inputs, not {d_in}")
    block = math.gcd(d_in, BLOCK)
    x = x.reshape(*lead, d_in // block, block, d_out)
    absmax = jnp.abs(x).max(axis=-2)
    x = (x / _nonzero(absmax)[..., None, :]).reshape(*lead, d_in, d_out)
    levels = _levels(kind)
    codes = jnp.searchsorted((levels[1:] + levels[:-1]) / 2, x, method="compare_all").astype(jnp.uint8)
    return {"codes": codes[..., ::2, :] | codes[..., 1::2, :] << 4, "absmax": absmax}


def dequantize(kernel: dict[str, jax.Array], kind: str, dtype) -> jax.Array:
    """The matrix `[..., in, out]` that `quantize` stored."""
    codes, absmax = kernel["codes"], kernel["absmax"]
    if kind == "int8":
        return (codes.astype(jnp.float32) * (absmax / 127.0)).astype(dtype)
    *lead, half, d_out = codes.shape
    pairs = jnp.stack([codes & 15, codes >> 4], axis=-2)
    values = jnp.asarray(_levels(kind))[pairs.astype(jnp.int32)].reshape(*lead, absmax.shape[-2], -1, d_out)
    return (values * absmax[..., None, :]).astype(dtype).reshape(*lead, 2 * half, d_out)


def as_matrix(kernel: Kernel, kind: str, dtype) -> jax.Array:
    """The kernel, quantised or not, as an array of `dtype`."""
    return dequantize(kernel, kind, dtype) if isinstance(kernel, dict) else kernel.astype(dtype)


def matmul(x, kernel: Kernel, kind: str) -> jax.Array:
    """`x @ kernel`, x `[n, in]`, in the dtype of x."""
    return x @ as_matrix(kernel, kind, x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _frozen_matmul(x, kernel: Kernel, kind: str) -> jax.Array:
    return matmul(x, kernel, kind)


def frozen_matmul(x, kernel: Kernel, kind: str) -> jax.Array:
    """`matmul` with a gradient for x alone.

    The backward pass keeps the kernel as it is stored, and converts it again: autodiff would keep the converted matrix
    of every layer.
    """
    found: Any = _frozen_matmul(x, kernel, kind)
    return found


def _forward(x, kernel: Kernel, kind: str):
    return matmul(x, kernel, kind), kernel


def _backward(kind: str, kernel: Kernel, gradient):
    return gradient @ as_matrix(kernel, kind, gradient.dtype).T, None


_frozen_matmul.defvjp(_forward, _backward)


def _levels(kind: str) -> np.ndarray:
    return {"int4": INT4, "nf4": NF4}[kind]


def _nonzero(absmax):
    return jnp.where(absmax == 0, 1.0, absmax)
