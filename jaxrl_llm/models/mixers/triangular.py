"""Triangular systems of many small matrices, by products alone, and their gradients."""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def solved(lower, wanted):
    """`(I + lower)^-1 wanted` of strictly lower triangular matrices `[...,C,C]`.

    By the inverse, which the gradients need too, and products. Not by `lax.linalg.triangular_solve`: on CPUs each call
    of it holds a thread of XLA's pool until others have computed its batch, so that two of them at once, on two cores,
    wait for ever.
    """
    return _inverse(lower) @ wanted


def _inverse(lower):
    """The inverse of `I + lower`, from blocks on the diagonal that double their size:

    `[[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]]`, as stable as substitution.
    """
    lead, size, block = lower.shape[:-2], lower.shape[-1], 1
    whole = 2 ** (size - 1).bit_length()
    lower = jnp.pad(lower, (*((0, 0),) * len(lead), (0, whole - size), (0, whole - size)))
    # Behind a barrier: XLA's GPU compiler would form all of it again for each of the blocks that are cut out of it.
    lower = jax.lax.optimization_barrier(lower) if jax.default_backend() == "gpu" else lower
    inverse = jnp.ones((*lead, whole, 1, 1), lower.dtype)
    while block < whole:
        pairs = whole // (2 * block)
        below = lower.reshape(*lead, pairs, 2, block, pairs, 2, block)[..., :, 1, :, :, 0, :]
        below = jnp.moveaxis(jnp.diagonal(below, axis1=-4, axis2=-2), -1, -3)
        first, second = jnp.moveaxis(inverse.reshape(*lead, pairs, 2, block, block), -3, 0)
        corner = -exact(exact(second, below), first)
        above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([above, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        block *= 2
    return inverse[..., 0, :size, :size]


def exact(a, b) -> jax.Array:
    """`a @ b` in full fp32 on every backend."""
    return jnp.matmul(a, b, precision="highest")  # TPUs round the factors of other products to bfloat16


def _solved_forward(lower, wanted):
    inverse = _inverse(lower)
    found = inverse @ wanted
    return found, (inverse, found)


def _solved_backward(residuals, gradient):
    inverse, found = residuals
    by_wanted = inverse.swapaxes(-1, -2) @ gradient
    return -by_wanted @ found.swapaxes(-1, -2), by_wanted


solved.defvjp(_solved_forward, _solved_backward)
