"""Micro-batches of a batch: equal runs of its rows or, with a layout, the rows that lie in the same packed rows."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.batch import Batch, Layout
from jaxrl_llm.distributed.sharding import constrain


class Parts(NamedTuple):
    """How many micro-batches there are (a number, or `[]` where the layout says), and each by its number."""

    count: Any
    take: Callable[[Any], Batch]


def parts_of(batch: Batch, count: int, shards: int) -> Parts:
    """The micro-batches of a batch: those of its layout, or else `count` equal ones (see `split_rows`)."""
    layout = batch.layout
    if layout is None:
        split = split_rows(batch, count, shards)
        return Parts(count, lambda number: jax.tree.map(lambda x: x[number], split))
    rows = batch.replace(layout=None, observed_layout=None)
    single = layout.rows.shape[1] == 1
    return Parts(1 if single else layout.parts.max(), lambda number: _packed_part(rows, layout.part(number)))


def _packed_part(batch: Batch, layout: Layout) -> Batch:
    """The rows of one micro-batch, with its layout; rows that fill it up are 0 in every array."""
    shards = layout.rows.shape[0]

    def leaf(x):
        own = x.reshape(shards, -1, *x.shape[1:])
        index = layout.rows.reshape(*layout.rows.shape, *(1,) * (x.ndim - 1))
        taken = jnp.take_along_axis(own, jnp.minimum(index, own.shape[1] - 1), axis=1)
        taken = jnp.where(index < own.shape[1], taken, jnp.zeros((), x.dtype))
        return constrain(taken.reshape(-1, *x.shape[1:]), "rows", *(None,) * (x.ndim - 1))

    return jax.tree.map(leaf, batch).replace(layout=layout)


def map_parts(function, batch: Batch, count: int, shards: int):
    """What `function(part)` gives of each micro-batch, arrays `[rows,...]` or one for each two, three, ... rows, as
    arrays of the whole batch; 0 on rows that are in none."""
    if batch.layout is None:
        return join_rows(jax.lax.map(function, split_rows(batch, count, shards)), shards)
    parts, rows = parts_of(batch, count, shards), batch.layout.rows
    shapes = jax.eval_shape(lambda: function(parts.take(0)))

    def together(x) -> int:
        return rows.shape[0] * rows.shape[2] // x.shape[0]

    def write(index, whole, x):
        step = together(x)
        where = index[:, ::step] // step
        x = x.reshape(shards, -1, *x.shape[1:])
        return jax.vmap(lambda old, at, new: old.at[at].set(new, mode="drop"))(whole, where, x)

    def step(number, whole):
        found = function(parts.take(number))
        return jax.tree.map(lambda old, x: write(rows[:, number], old, x), whole, found)

    def empty(x):
        return jnp.zeros((shards, batch.rows // shards // together(x), *x.shape[1:]), x.dtype)

    whole = jax.lax.fori_loop(0, parts.count, step, jax.tree.map(empty, shapes))
    return jax.tree.map(lambda x: constrain(x.reshape(-1, *x.shape[2:]), "rows", *(None,) * (x.ndim - 2)), whole)


def split_rows(batch, parts: int, shards: int):
    """The arrays `[N,...]` with a leading dimension of `parts` micro-batches.

    Each takes an equal run of adjacent rows from every shard of the mesh, so that splitting moves no data.
    """

    def leaf(x):
        x = x.reshape(shards, parts, -1, *x.shape[1:]).swapaxes(0, 1)
        return x.reshape(parts, -1, *x.shape[3:])

    return jax.tree.map(leaf, batch)


def join_rows(parts, shards: int):
    """The inverse of `split_rows`: arrays `[parts, n, ...]` as `[N, ...]`, in the order of the batch."""

    def leaf(x):
        x = x.reshape(x.shape[0], shards, -1, *x.shape[2:]).swapaxes(0, 1)
        return x.reshape(-1, *x.shape[3:])

    return jax.tree.map(leaf, parts)


def observed_by(batch: Batch) -> Batch:
    """The batch whose layout is that of the rows an objective observes."""
    return dataclasses.replace(batch, layout=batch.observed_layout or batch.layout, observed_layout=None)
