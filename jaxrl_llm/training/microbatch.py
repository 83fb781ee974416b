"""The rows of a step, and micro-batches of them: equal runs or, with a layout, the rows that lie in the same packed
rows."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.algorithms.batch import Batch, Images, Inputs, PackedLayout
from jaxrl_llm.distributed.sharding import constrain_rows, row_sharding


@dataclasses.dataclass(frozen=True)
class BatchSpec:
    """The rows of a step, and how they are split into updates and forward passes."""

    prompts: int  # of given data its examples: rows, pairs, or groups of packed rows
    group_size: int
    minibatches: int
    microbatch_rows: int
    num_iterations: int
    shuffle: bool
    seed: int
    logps_microbatch_rows: int = 0

    @property
    def rows(self) -> int:
        """The number of rows N of a step: prompts times the rows of each."""
        return self.prompts * self.group_size

    @property
    def forward_rows(self) -> int:
        """Rows of one pass without gradients: by default a micro-batch, or a minibatch where it is not split."""
        return self.logps_microbatch_rows or self.microbatch_rows or self.rows // self.minibatches


class MicroBatches(NamedTuple):
    """Number of micro-batches (an int, or an array `[]` where only the layout knows), and each by its index."""

    count: Any
    take: Callable[[Any], Batch]


def microbatches_of(batch: Batch, count: int, shards: int) -> MicroBatches:
    """The micro-batches of a batch: those of its layout, or else `count` equal ones (see `split_rows`)."""
    layout = batch.inputs.layout
    if layout is None:
        split = batch.map_rows(lambda x: split_rows(x, count, shards))
        return MicroBatches(count, lambda number: split.map_rows(lambda x: x[number]))
    one = layout.row_idx.shape[1] == 1
    used = 1 if one else layout.num_microbatches.max()
    return MicroBatches(used, lambda number: _packed_microbatch(batch, layout.microbatch(number)))


def _packed_microbatch(batch: Batch, layout: PackedLayout) -> Batch:
    """The rows of one micro-batch, with its layout; rows that fill it up are 0 in every array."""
    shards = layout.row_idx.shape[0]

    def leaf(x):
        own = x.reshape(shards, -1, *x.shape[1:])
        index = layout.row_idx.reshape(*layout.row_idx.shape, *(1,) * (x.ndim - 1))
        taken = jnp.take_along_axis(own, jnp.minimum(index, own.shape[1] - 1), axis=1)
        taken = jnp.where(index < own.shape[1], taken, jnp.zeros((), x.dtype))
        return constrain_rows(taken.reshape(-1, *x.shape[1:]))

    return batch.map_rows(leaf).with_layout(layout)


def map_microbatches(function: Callable[[Batch], Any], batch: Batch, count: int, shards: int) -> Any:
    """`function` of every micro-batch, put together: arrays `[rows,...]`, or with one entry for each two, three, ...
    rows, become arrays of the whole batch; 0 on rows that are in no micro-batch."""
    layout = batch.inputs.layout
    if layout is None:
        split, with_shared = batch.map_rows(lambda x: split_rows(x, count, shards)).rows_alone()
        return join_rows(jax.lax.map(lambda rows: function(with_shared(rows)), split), shards)
    micro, rows = microbatches_of(batch, count, shards), layout.row_idx
    shapes = jax.eval_shape(lambda: function(micro.take(0)))

    def rows_per_entry(x) -> int:
        return rows.shape[0] * rows.shape[2] // x.shape[0]

    def write(index, total, x):
        step = rows_per_entry(x)
        where = index[:, ::step] // step
        x = x.reshape(shards, -1, *x.shape[1:])
        # Each shard writes its own rows: no data moves between devices.
        return jax.vmap(lambda old, at, new: old.at[at].set(new, mode="drop"))(total, where, x)

    def step(number, total):
        outputs = function(micro.take(number))
        return jax.tree.map(lambda old, x: write(rows[:, number], old, x), total, outputs)

    def empty(x):
        return jnp.zeros((shards, batch.rows // shards // rows_per_entry(x), *x.shape[1:]), x.dtype)

    total = jax.lax.fori_loop(0, micro.count, step, jax.tree.map(empty, shapes))
    return jax.tree.map(lambda x: constrain_rows(x.reshape(-1, *x.shape[2:])), total)


def rows_at(batch: Batch, index, run: int, mesh: Mesh) -> Batch:
    """The rows at `index`, sharded over the mesh; each `run` of them are of one prompt."""
    taken = batch.map_rows(lambda x: jax.lax.with_sharding_constraint(x[index], row_sharding(mesh)))
    images, own = batch.inputs.images, taken.inputs.images
    if not isinstance(images, Images) or not isinstance(own, Images) or images.source is None:
        return taken
    shared = images.pixels, images.features
    shards, held = jax.tree.leaves(shared)[0].shape[:2]
    number = index // (batch.rows // shards) * held + images.source[index]  # among those of all shards
    run = math.gcd(run, len(index) // shards)
    pixels, features = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[number[::run]], shared)
    return taken.replace(inputs=taken.inputs.replace(images=share_images(own, pixels, features, len(index), shards)))


def share_images(images: Images, pixels, features, rows: int, shards: int) -> Images:
    """The images with `pixels` or `features` `[F,...]`, of which each is of rows / F adjacent rows of one shard."""
    shared = {"pixels": pixels, "features": features}
    shared = jax.tree.map(lambda x: x.reshape(shards, -1, *x.shape[1:]), shared)
    held = jax.tree.leaves(shared)[0].shape[1]
    shared["source"] = jnp.arange(rows, dtype=jnp.int32) // (rows // shards // held) % held
    return dataclasses.replace(images, **jax.tree.map(constrain_rows, shared))


def shared_features(inputs: Inputs, encode: Callable[[Images], jax.Array]) -> jax.Array | None:
    """The features `[Z,b,M,(1+E)D]` of the images whose pixels rows share, each encoded once; None where rows share
    none."""
    images = inputs.images
    if not isinstance(images, Images) or images.source is None or images.pixels is None:
        return None
    held = images.pixels.shape[:2]
    pixels = images.pixels.reshape(-1, *images.pixels.shape[2:])

    def firsts(x):  # of the adjacent rows that share, see `share_images`
        return x.reshape(len(pixels), -1, *x.shape[1:])[:, 0]

    own = jax.tree.map(firsts, dataclasses.replace(images, pixels=None, source=None))
    own = dataclasses.replace(own, pixels=pixels)
    features = encode(jax.tree.map(constrain_rows, own))
    return constrain_rows(features.reshape(*held, *features.shape[1:]))


def with_features(inputs: Inputs, features: jax.Array | None) -> Inputs:
    """The rows, which share these features of `shared_features`, if there are any, in place of pixels."""
    if features is None:
        return inputs
    assert isinstance(inputs.images, Images)
    return inputs.replace(images=dataclasses.replace(inputs.images, pixels=None, features=features))


def split_rows(x: jax.Array, count: int, shards: int) -> jax.Array:
    """An array `[N,...]` with a leading dimension of `count` micro-batches.

    Each takes an equal run of adjacent rows from every shard of the mesh, so that splitting moves no data.
    """
    x = x.reshape(shards, count, -1, *x.shape[1:]).swapaxes(0, 1)
    return x.reshape(count, -1, *x.shape[3:])


def join_rows(split: Any, shards: int) -> Any:
    """The inverse of `split_rows` for a tree of arrays `[count, n, ...]`: `[N, ...]`, in the order of the batch."""

    def leaf(x):
        x = x.reshape(x.shape[0], shards, -1, *x.shape[2:]).swapaxes(0, 1)
        return x.reshape(-1, *x.shape[3:])

    return jax.tree.map(leaf, split)
