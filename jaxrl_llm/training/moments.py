"""Moments of an optimizer in the type that stores them: float32, bfloat16, or 8 bits with a scale for each block.

In 8 bits a number is one of float8_e4m3fn, times a scale that makes the largest of its block 448. The second moment is
stored as its square root, which updates are divided by: a root has half the relative error, and 17 octaves of it are 35
of the moment.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.algorithms.random_streams import MOMENT_ROUNDING
from jaxrl_llm.algorithms.rounding import round_like, stochastic_round
from jaxrl_llm.models.quantize import FP8, widened

MOMENTS = ("mu", "nu", "trace", "v", "v_row", "v_col", "m1", "m2")  # of optax's states, of moment_dtype
SCHEDULES = ("ScaleByScheduleState", "WeightDecaySchedule", "WrappedScheduleState")  # of optax, which exports the first
SQUARES = ("nu", "v")  # those that are stored as roots in 8 bits
BLOCK = 256
LEAST_SIZE, LEAST_BLOCK = 4096, 8  # of arrays in 8 bits: small ones save nothing, and scales cost 4 bytes each
LARGEST, SMALLEST = float(jnp.finfo(FP8).max), float(jnp.finfo(FP8).smallest_subnormal)
BYTES = {"float32": 4.0, "bfloat16": 2.0, "float8": 1 + 4 / BLOCK}  # of a number, in large arrays


class Blocks(NamedTuple):
    """An array `[..., d]` in 8 bits, d in n blocks: each number is its code times the scale of its block."""

    codes: jax.Array  # uint8 [..., d], bytes of float8_e4m3fn
    scales: jax.Array  # float32 [..., n]


def stored_in(transformation: optax.GradientTransformation, dtype: str, seed: int) -> optax.GradientTransformation:
    """The transformation computing in fp32, with the moments of its state stored in `dtype`.

    In float8 they are `Blocks`; arrays of one dimension, of fewer than 4096 numbers or of blocks of fewer than 8 stay
    float32.

    A narrower type is rounded stochastically: with b2 = 0.999 the second moment falls by at most 0.1 % in a step,
    less than half the spacing of bfloat16, let alone of float8. The draws come from `seed` and the number of updates
    made, so that a resumed run repeats them.
    """

    def wide(tree):
        def leaf(path, x):
            if isinstance(x, Blocks):
                return from_blocks(x, _field(path) in SQUARES)
            return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x

        return jax.tree_util.tree_map_with_path(leaf, tree, is_leaf=lambda x: isinstance(x, Blocks))

    def narrow(state, key):
        def leaf(number, path, x):
            if not _field(path) or x.ndim < 2 or x.size < LEAST_SIZE or block_of(x.shape[-1]) < LEAST_BLOCK:
                return x
            return in_blocks(x, _field(path) in SQUARES, jax.random.fold_in(key, number))

        leaves, structure = jax.tree_util.tree_flatten_with_path(state)
        return structure.unflatten([leaf(number, *entry) for number, entry in enumerate(leaves)])

    def rounding(made):
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), MOMENT_ROUNDING), made)

    def init(params):
        state = transformation.init(wide(params))
        if dtype == "float8":  # the barrier: XLA would compute these constants itself, for minutes
            return narrow(jax.tree.map(jax.lax.optimization_barrier, state), rounding(0))
        return jax.tree_util.tree_map_with_path(lambda path, x: x.astype(dtype) if _field(path) else x, state)

    def update(updates, state, params=None):
        updates, new = transformation.update(wide(updates), wide(state), None if params is None else wide(params))
        key = rounding(updates_made(state))
        return updates, narrow(new, key) if dtype == "float8" else round_like(new, state, key)

    return optax.GradientTransformation(init, update)


def updates_made(state: optax.OptState) -> jax.Array:
    """Number of updates an optimizer has made, by its schedules; those without have counts that are all the same."""
    schedule = next((x for x in jax.tree.leaves(state, is_leaf=_is_schedule) if _is_schedule(x)), None)
    if schedule is not None:
        return schedule.count
    return optax.tree_utils.tree_get_all_with_path(state, "count")[0][1].reshape(-1)[0]


def schedules_further(state: optax.OptState, updates: int | jax.Array) -> optax.OptState:
    """The state with its schedules advanced by so many updates; moments and the counts that correct them stay."""
    return jax.tree.map(
        lambda x: x._replace(count=x.count + updates) if _is_schedule(x) else x, state, is_leaf=_is_schedule
    )


def schedules_scaled(state: optax.OptState, before: int, now: int) -> optax.OptState:
    """The state with its schedules where they would be, had each step made `now` updates and not `before`; moments and
    the counts that correct them stay."""

    def scaled(x):
        count = x.count // before * now + x.count % before * now // before
        return x._replace(count=count.astype(x.count.dtype))

    if before == now:
        return state
    return jax.tree.map(lambda x: scaled(x) if _is_schedule(x) else x, state, is_leaf=_is_schedule)


def _is_schedule(x: object) -> bool:
    return type(x).__name__ in SCHEDULES


def in_blocks(x: jax.Array, squares: bool, key: jax.Array) -> Blocks:
    """The array `[..., d]` in 8 bits; of `squares` the roots, with the sign (of Sophia's, which may be below 0).

    Numbers are rounded stochastically, but no root to 0: where the first moment is not 0, the update would be
    the latter divided by `eps`. The smallest is 1 / 229,376 of the largest root in the block.
    """
    x = jnp.copysign(jnp.sqrt(jnp.abs(x)), x) if squares else x
    blocks = x.reshape(*x.shape[:-1], -1, block_of(x.shape[-1]))
    scales = jnp.abs(blocks).max(axis=-1) / LARGEST
    scaled = x / _spread(jnp.where(scales > 0, scales, 1.0), x.shape)
    if squares:  # by the sign: to compare with 0 XLA would keep the zeros in memory that gradients start from
        scaled = jnp.copysign(jnp.maximum(jnp.abs(scaled), SMALLEST * jnp.abs(jnp.sign(x))), x)
    codes = stochastic_round(jnp.clip(scaled, -LARGEST, LARGEST), FP8, key)
    return Blocks(jax.lax.bitcast_convert_type(codes, jnp.uint8), scales)


def from_blocks(stored: Blocks, squares: bool) -> jax.Array:
    """The float32 array `[..., d]` that `in_blocks` stored."""
    x = widened(stored.codes, jnp.float32) * _spread(stored.scales, stored.codes.shape)
    return x * jnp.abs(x) if squares else x


def block_of(size: int) -> int:
    """The number of the `size` numbers of a row that share a scale: the largest divisor up to 256.

    One of 16 or more that makes the blocks a multiple of 8 goes first, as devices that share a row have whole blocks
    then.
    """
    divisors = [n for n in range(1, BLOCK + 1) if size % n == 0]
    return max([n for n in divisors if n >= 16 and size // n % 8 == 0] or divisors)


def _spread(scales: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The scale of each number `[..., d]`. Were the numbers reshaped in its place, XLA would store a moment in fp32."""
    return jnp.broadcast_to(scales[..., None], (*scales.shape, shape[-1] // scales.shape[-1])).reshape(shape)


def _field(path) -> str | None:
    """The field of an optimizer's state, of MOMENTS, that the array at a path belongs to; None: it is no moment."""
    return next((key.name for key in path if getattr(key, "name", None) in MOMENTS), None)
