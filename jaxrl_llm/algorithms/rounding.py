"""Stochastic rounding: sums of small changes to numbers that are stored in few bits.

A change of less than half the spacing of its storage type is lost by rounding to the nearest, in every step again.
Rounded up or down at random, with the probabilities that make the mean exact, such changes add up to their sum.
"""

from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array


def stochastic_round(x, dtype, key) -> Array:
    """Returns `x` in `dtype`, each number rounded to one of its two neighbours there so that its expectation is `x`.

    `dtype` is bfloat16, float16 or float8_e4m3fn, which has no infinity: its `x` is within its range. A number that
    `dtype` has stays as it is, as do infinities and NaN. The draw comes from `key` alone, however `x` is sharded.
    Source: arXiv 1502.02551; of parameters in bfloat16, arXiv 2010.06192.
    """
    x = jnp.asarray(x, jnp.float32)
    dropped = 23 - jnp.finfo(dtype).nmant  # of the bits of a float32's fraction, which are all uniform noise reaches
    noise = jax.random.bits(key, x.shape, jnp.uint32) >> (32 - dropped)

    def rounded(x) -> Array:
        bits = (jax.lax.bitcast_convert_type(x, jnp.uint32) + noise) >> dropped << dropped
        return jax.lax.bitcast_convert_type(bits, jnp.float32)

    near, normal = rounded(x), float(jnp.finfo(dtype).smallest_normal)
    if normal > jnp.finfo(jnp.float32).smallest_normal:  # numbers below it are as far apart as in the octave above it
        moved = jnp.copysign(normal, x)
        near = jnp.where(jnp.abs(x) < normal, rounded(x + moved) - moved, near)
    return jnp.where(jnp.isfinite(x), near, x).astype(dtype)


def round_like(tree: Any, like: Any, key) -> Any:
    """Returns the arrays of `tree` in the types of those of `like`, rounded stochastically where these are narrower.

    Each array draws from its own key, `fold_in(key, its number among the leaves)`.
    """
    leaves, structure = jax.tree.flatten(tree)
    rounded = [
        stochastic_round(x, old.dtype, jax.random.fold_in(key, i))
        if jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(old.dtype).bits < jnp.finfo(x.dtype).bits
        else x
        for i, (x, old) in enumerate(zip(leaves, jax.tree.leaves(like), strict=True))
    ]
    return jax.tree.unflatten(structure, rounded)
