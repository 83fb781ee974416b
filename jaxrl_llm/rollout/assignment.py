"""The caches of a slot grid: empty ones of rows that are assigned to it, those of rows that move, and as they grow."""

import functools

import jax
import jax.numpy as jnp

from jaxrl_llm.models.mixers.mixer import Mixer
from jaxrl_llm.models.net import Net, replace_caches
from jaxrl_llm.rollout.scheduler import IDLE, SlotGrid
from jaxrl_llm.rollout.slots import Prompts, Rows, Slots, flat, take


@functools.partial(jax.jit, static_argnames=("decoder", "capacity", "empty"))
def assign(
    decoder: Net, all_prompts: Prompts, rows: Rows, keys, grid: SlotGrid, capacity: int, empty: bool = True
) -> tuple[Prompts, Slots]:
    """The prompts and slots of a grid, with empty row caches for `capacity` tokens, or with none unless `empty`."""
    shards, g, r = grid.row.shape
    axis, all_prompts = decoder.prompt_axis, all_prompts._replace(experts=None)
    prompts = all_prompts
    if (shards * g, r) != rows.length.shape or not empty:  # of all rows at once they are read where they are
        cache = jax.tree.map(lambda x: take(x, grid.prompt, axis), all_prompts.cache)
        tokens, mask = (take(x, grid.prompt, 0) for x in (all_prompts.tokens, all_prompts.mask))
        prompts = all_prompts._replace(cache=cache, tokens=tokens, mask=mask)
    cache = decoder.empty_caches(prompts.cache, r, capacity) if empty else ()

    def assigned(x):
        return take(x, jnp.maximum(grid.row, 0).reshape(shards, -1), 0).reshape(shards * g, r, *x.shape[1:])

    grid_rows = jax.tree.map(lambda x: assigned(flat(x, 0)), rows)
    grid_rows = grid_rows._replace(finished=grid_rows.finished | (grid.row == IDLE).reshape(shards * g, r))
    return prompts, Slots(cache, grid_rows, assigned(keys), jnp.zeros((), jnp.int32), capacity)


def reassign(
    decoder: Net, all_prompts: Prompts, rows: Rows, keys, slots: Slots, grid: SlotGrid, sources
) -> tuple[Prompts, Slots]:
    """The prompts and slots of a grid, with the row caches that `slots` had at `sources`, and has no longer.

    `sources` `[shards, G*R]` are the slots that the grid's rows had before (`SlotGrid.slots_in`).
    """
    moved = functools.partial(_moved, sources=sources, axis=decoder.prompt_axis, rows=grid.row.shape[-1])
    cache = replace_caches(decoder.with_mixers(slots.cache), lambda _, cache: moved(cache))
    prompts, following = assign(decoder, all_prompts, rows, keys, grid, slots.capacity, empty=False)
    return prompts, following.replace(cache=cache)


@functools.partial(jax.jit, static_argnames=("axis", "rows"))
def _moved(cache, sources, axis: int, rows: int):
    """The row caches of one run of layers at `sources`, with so many rows a prompt."""

    def move(x):
        taken = take(flat(x, axis), sources, axis)
        return taken.reshape(*x.shape[:axis], taken.shape[axis] // rows, rows, *x.shape[axis + 2 :])

    return jax.tree.map(move, cache)


def grow(decoder: Net, slots: Slots, capacity: int) -> Slots:
    """The slots with room for `capacity` completion tokens in the row caches, which `slots` has no longer."""

    def grown(mixer: type[Mixer], cache):
        shapes = jax.eval_shape(functools.partial(mixer.grow_cache, size=capacity), cache)
        same = jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, cache)  # of a state, or of another layer
        return cache if same else _grown(cache, mixer, capacity)

    cache = replace_caches(decoder.with_mixers(slots.cache), grown)
    return slots.replace(cache=cache, capacity=capacity)


@functools.partial(jax.jit, static_argnames=("mixer", "size"))
def _grown(cache, mixer: type[Mixer], size: int):
    return mixer.grow_cache(cache, size)
