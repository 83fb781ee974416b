"""Matmuls of training with operands in 8 bits (`model.matmul_dtype`), scaled by the largest number that they hold.

Of `y = x W`, with x `[..., in]`, W `[in, out]` and the gradient g `[..., out]` of y, a standing for any of them:

- fp8: `y = x8 W8 / (s t)`, where `x8 = e4m3(s x)` and `W8 = e4m3(t W)` have a scale for each token and each column, as
  in torchao's recipe `rowwise`. The backward pass is that of the codes: `dx = s g8 W8^T / r` and `dW = t x8^T g8 / r`
  of `g8 = e5m2(r g / (s t))`, with one scale for all of g, whose type has 30 binades (Megatron's `hybrid`; arXiv
  2209.05433). A scale is `2^floor(log2(M / max |a|))`, M the largest number of the type: 448, and 57344 of e5m2.
- int8: `y = x8 W8 / (s t)` of `round(s x)` and `round(t W)`, scales 127 / max |a|, and `dx = g8 W8^T / r` with a scale
  for each token of g / t. That is rounded stochastically, as most of its numbers are far below the largest and would be
  0 each time. dW is computed in the type of x, as in AQT's `config_v4`: its sum is over tokens of different sizes.

A token's scale is its own, so the log-probs of a row are the same beside whichever others it is computed. Those of fp8
are powers of two, under each of which a number has the same bits, and which change no bit of a sum.

The matmuls are of the codes themselves, which XLA has kernels for; scales come behind the sum, in the kernel of what is
computed next. Sums are in fp32 or int32. W is stored and trained in its own type.
"""

import functools
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.kernels.grouped_matmul import RESULT

MATMUL_DTYPES = ("auto", "fp8", "int8")
OPERAND, GRADIENT = jnp.float8_e4m3fn, jnp.float8_e5m2
LARGEST = 127.0  # of int8, whose -128 is not used
ALIGNED = 16  # kernels of fp8 take dimensions that this divides
# Maps that make the decays and the step sizes of recurrent layers: small ones, of which exponentials are taken.
PRECISE = ("a", "b", "ba", "f", "f_a", "f_b", "x")
HIGHEST = jax.lax.Precision.HIGHEST


def check_matmul_dtype(config, device: str, has_fp8: bool) -> None:
    """Raises ConfigError for matmuls in 8 bits of matrices in few bits, and in fp8 on a device of that name without
    matrix units for them."""
    if config.matmul_dtype != "auto" and {config.quantize, config.qat} != {"none"}:
        raise ConfigError(
            f"matmul_dtype is {config.matmul_dtype}, but quantize is {config.quantize} and qat {config.qat}: matrices "
            "that have few bits already are not converted again. Leave one out"
        )
    if config.matmul_dtype == "fp8" and not has_fp8:
        raise ConfigError(
            f"model.matmul_dtype is fp8, but this device ({device}) multiplies no numbers in fp8: NVIDIA's GPUs do "
            "from Ada and Hopper on, TPUs from version 7 on. Set it to int8, or auto"
        )


def dtype_of(name: str, d_in: int, d_out: int, matmul_dtype: str) -> str:
    """The `matmul_dtype` of a linear map of that name and those sizes: auto where it stays in the type of the inputs.

    Maps without a name are those that are no part of mixers and feed-forwards: heads, routers and the like.
    """
    return matmul_dtype if name and name not in PRECISE and not (d_in % ALIGNED or d_out % ALIGNED) else "auto"


def eight_bit_matmul(x, kernel, kind: str) -> jax.Array:
    """`x @ kernel` in the type of x, of `kind` fp8 or int8; the gradient of the kernel has its type."""
    return checkpoint_name(cast(jax.Array, _matmul(kind, x, kernel)), RESULT)


class _Codes(NamedTuple):
    """Numbers in 8 bits, and the factors, 1 over scales, that they are multiplied with to be those they stand for."""

    codes: jax.Array
    factors: jax.Array


def _codes(x, axis: int | None, dtype, stochastic: bool = False) -> _Codes:
    """The numbers of x in `dtype`, with a scale for those along `axis`, or for all where it is None.

    Stochastic rounding draws from the largest numbers themselves: there is no key that would have to come here.
    """
    x = x.astype(jnp.float32)
    absmax = jnp.abs(x).max(axis=axis, keepdims=True)
    if dtype == jnp.int8:
        absmax = jnp.where(absmax == 0, 1.0, absmax)
        x *= LARGEST / absmax
        x = jnp.floor(x + _noise(x.shape, _bits(absmax, jnp.uint32))) if stochastic else jnp.round(x)
        return _Codes(x.astype(dtype), absmax / LARGEST)
    # floor(log2(largest / absmax)): of numbers in fp32 the bits are a logarithm whose whole part is in the exponent.
    bits = jax.lax.bitcast_convert_type(jnp.float32(jnp.finfo(dtype).max), jnp.int32) - _bits(absmax, jnp.int32)
    exponent = jnp.where(absmax == 0, 0, jnp.clip(bits >> 23, -126, 126))
    return _Codes((x * _power(exponent)).astype(dtype), _power(-exponent))


def _sums(x, y, of_x: tuple[int, ...], of_y: tuple[int, ...], dtype, precision=None) -> jax.Array:
    """The product of codes, summed over these dimensions, in fp32.

    A kernel writes it in `dtype`, which is half of what it and the next one move: scales of fp8 change no bit of it.
    float16 could not hold it.
    """
    wide = jnp.promote_types(dtype, jnp.bfloat16)
    sums_dtype = jnp.int32 if x.dtype == jnp.int8 else wide
    sums = jax.lax.dot_general(x, y, ((of_x, of_y), ((), ())), precision, sums_dtype)
    return sums.astype(wide).astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(kind: str, x, kernel):
    dtype = OPERAND if kind == "fp8" else jnp.int8
    (x8, of_tokens), (kernel8, of_columns) = _codes(x, -1, dtype), _codes(kernel, 0, dtype)
    return (_sums(x8, kernel8, (x.ndim - 1,), (0,), x.dtype) * of_tokens * of_columns[0]).astype(x.dtype)


def _forward(kind: str, x, kernel):
    # What a gradient that is not asked for would read is not kept: the kernel may be frozen.
    return _matmul(kind, x.value, kernel.value), (x.value if kernel.perturbed else None, kernel.value)


def _backward(kind: str, kept, gradient):
    x, kernel = kept
    last, tokens = (gradient.ndim - 1,), tuple(range(gradient.ndim - 1))
    kernel8, of_columns = _codes(kernel, 0, OPERAND if kind == "fp8" else jnp.int8)
    scaled = gradient.astype(jnp.float32) * of_columns[0]
    if kind == "fp8":
        x8, of_tokens = (None, 1.0) if x is None else _codes(x, -1, OPERAND)
        codes, factor = _codes(scaled * of_tokens, None, GRADIENT)
        # On Hopper sums of fp8 keep 14 bits unless they are asked for in full, which gradients are (arXiv 2412.19437).
        sums = functools.partial(_sums, dtype=gradient.dtype, precision=HIGHEST)
        of_x = sums(codes, kernel8, last, (1,)) * factor / of_tokens
        of_kernel = None if x8 is None else sums(x8, codes, tokens, tokens) * factor.reshape(()) / of_columns
    else:
        codes, factors = _codes(scaled, -1, jnp.int8, stochastic=True)
        of_x = _sums(codes, kernel8, last, (1,), gradient.dtype) * factors
        of_kernel = None if x is None else jax.lax.dot_general(x, gradient, ((tokens, tokens), ((), ())))
    return of_x.astype(gradient.dtype), None if of_kernel is None else of_kernel.astype(kernel.dtype)


_matmul.defvjp(_forward, _backward, symbolic_zeros=True)


def _noise(shape: tuple[int, ...], seeds) -> jax.Array:
    """Numbers from 0 to below 1, in steps of 2^-16, by hashes of their places and the seeds.

    jax's own draws are several times the work of the product. Of finer steps the largest number would round up to 128.
    """
    place = jnp.uint32(0)
    for dim, size in enumerate(shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
    return (_hash(place ^ _hash(seeds).sum(dtype=jnp.uint32)) >> 16).astype(jnp.float32) * 2.0**-16


def _hash(x) -> jax.Array:
    """Another number of 32 bits, by two of the three steps of MurmurHash3's finalizer."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x


def _bits(x, dtype) -> jax.Array:
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), dtype)


def _power(exponent) -> jax.Array:
    """2^exponent in fp32, of exponents from -126 to 127."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
