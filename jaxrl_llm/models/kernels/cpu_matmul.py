"""Matmuls of 16-bit arrays in the layouts that XLA lowers to the matrix units of CPUs (AMX).

XLA's CPU backend multiplies 16-bit numbers as they are where it may return the sums in fp32, and where the first factor
ends with the dimension that is summed over. All others it computes in fp32, from converted copies: on a CPU
with AMX four to eight times slower. Other backends need no such care. Sums are fp32 everywhere.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.distributed.sharding import is_sharded


def _is_special(x) -> bool:
    """True where matmuls of x take these layouts: on one device, as sharded rows are laid out otherwise."""
    return jax.default_backend() == "cpu" and not is_sharded() and x.dtype.itemsize == 2 and x.ndim == 2


def matmul(x, kernel) -> jax.Array:
    """`x @ kernel` in the type of x `[..., in]`, to which the kernel `[in, out]` is converted.

    On CPUs the gradient by the kernel is not rounded to 16 bits on its way to the kernel's type.
    """
    return _matmul(x, kernel) if _is_special(x) else x @ kernel.astype(x.dtype)


def matmul_transposed(x, kernel) -> jax.Array:
    """`x @ kernel.T` in the type of x `[..., out]`, to which the kernel `[in, out]` is converted."""
    kernel = kernel.astype(x.dtype)
    return _einsum("no,io->ni", x, kernel).astype(x.dtype) if _is_special(x) else x @ kernel.T


def over_rows(x, y) -> jax.Array:
    """The sum over rows of `x_i y_j`, `[in, out]` in fp32, of x `[..., in]` and y `[..., out]`."""
    if not _is_special(x):
        return jnp.einsum("...i,...j->ij", x, y, preferred_element_type=jnp.float32)
    x, y = (jnp.pad(a, ((0, len(a) % 2), (0, 0))) for a in (x, y))
    # A transposition of the result would be merged into the matmul, in a layout that XLA's CPU backend has no code for.
    return jax.lax.optimization_barrier(_einsum("in,nj->ij", _transposed(x), y))


@jax.custom_vjp
def _matmul(x, kernel):
    return _einsum("ni,io->no", x, kernel.astype(x.dtype)).astype(x.dtype)


def _backward(kept, gradient):
    x, kernel = kept
    return matmul_transposed(gradient, kernel), over_rows(x, gradient).astype(kernel.dtype)


_matmul.defvjp(lambda x, kernel: (_matmul(x, kernel), (x, kernel)), _backward)


def _einsum(dims: str, x, y):
    rows = len(x)
    if rows == 1:  # XLA would multiply a single row number by number
        x = jnp.pad(x, ((0, 1), (0, 0)))
    return jnp.einsum(dims, x, y, preferred_element_type=jnp.float32)[:rows]


def _transposed(x):
    """x `[n, m]` as `[m, n]`, n even.

    Numbers move in pairs: a plain transposition would be fused into the matmul, which then is computed in fp32.
    """
    pairs = jax.lax.bitcast_convert_type(x.reshape(-1, 2, x.shape[1]).swapaxes(1, 2), jnp.uint32)
    return jax.lax.bitcast_convert_type(pairs.T, x.dtype).reshape(x.shape[1], -1)
