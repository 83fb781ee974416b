"""Moments of an optimizer in the type that stores them: float32, bfloat16, or 8 bits with a scale for each block.

Of 8 bits, numbers are float8_e4m3fn (3 bits of fraction; 448 is the largest, 2^-9 the smallest) times the scale of their
block, which makes its largest number 448. The second moment is stored as its square root, by which updates are divided:
a root has half the relative error, and a block twice the range, 2 * 10^5 to 1 (of the moment 5 * 10^10 to 1).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.algorithms.random_streams import MOMENT_ROUNDING
from jaxrl_llm.algorithms.rounding import round_like, stochastic_round
from jaxrl_llm.models.quantize import FP8, narrowed, widened

MOMENTS = ("mu", "nu", "trace", "v", "v_row", "v_col")  # fields of optax's states that moment_dtype is the type of
SECOND = ("nu", "v")  # those of squares
BLOCK = 256
LEAST_BLOCK = 8  # below, scales would take as much as they save of bfloat16
LEAST_SIZE = 4096  # numbers of an array; smaller ones save nothing (bitsandbytes' min_8bit_size)
LARGEST, SMALLEST = float(jnp.finfo(FP8).max), float(jnp.finfo(FP8).smallest_subnormal)
BYTES = {"float32": 4.0, "bfloat16": 2.0, "float8": 1 + 4 / BLOCK}  # of a number in a large array


class Blocks(NamedTuple):
    """A moment `[..., d]` in 8 bits: value = float8(codes) * scales, of which each is that of `d / n` numbers."""

    codes: jax.Array  # uint8 [..., d], the bytes of float8_e4m3fn
    scales: jax.Array  # float32 [..., n]


def stored_in(transformation: optax.GradientTransformation, dtype: str, seed: int) -> optax.GradientTransformation:
    """The transformation computing in fp32, with the moments of its state stored in `dtype`.

    In float8 those are `Blocks`, where they have 4096 numbers or more in two dimensions or more; others stay float32.

    A narrower type is rounded to stochastically: with b2 = 0.999 the second moment falls by at most 0.1 % in a step,
    less than half the spacing of bfloat16 and of float8. The draws come from `seed` and the number of updates made, so
    that a resumed run repeats them.
    """

    def stored(state: optax.OptState, key: jax.Array) -> optax.OptState:
        def leaf(path, x, number):
            name = moment_name(path)
            if name is None or dtype != "float8":
                return x if name is None else x.astype(dtype)
            is_large = x.ndim > 1 and x.size >= LEAST_SIZE and block_of(x.shape[-1]) >= LEAST_BLOCK
            return in_blocks(x, name in SECOND, jax.random.fold_in(key, number)) if is_large else x

        leaves, structure = jax.tree_util.tree_flatten_with_path(state)
        return structure.unflatten(leaf(path, x, number) for number, (path, x) in enumerate(leaves))

    def wide(tree):
        def leaf(path, x):
            if isinstance(x, Blocks):
                return from_blocks(x, moment_name(path) in SECOND)
            return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x

        return jax.tree_util.tree_map_with_path(leaf, tree, is_leaf=lambda x: isinstance(x, Blocks))

    rounding = jax.random.fold_in(jax.random.key(seed), MOMENT_ROUNDING)

    def init(params):
        return stored(transformation.init(wide(params)), rounding)

    def update(updates, state, params=None):
        updates, new = transformation.update(wide(updates), wide(state), None if params is None else wide(params))
        key = jax.random.fold_in(rounding, updates_made(state))
        return updates, stored(new, key) if dtype == "float8" else round_like(new, state, key)

    return optax.GradientTransformation(init, update)
