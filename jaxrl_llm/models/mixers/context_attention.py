"""Attention of rows whose positions `mesh.context` shards, whatever its size: memory is linear in the row.

A device gathers the keys and values of complete rows once, and its queries see them a block at a time (online softmax,
arXiv 2205.14135), as in Llama 3's context parallelism (arXiv 2407.21783, section 3.3.2). Rings (arXiv 2310.01889) send
as much in as many messages as there are devices, each of which waits for the slowest; they save what is gathered, which
grouped queries make small beside the activations of a layer. Scores are formed block by block in both passes, and
blocks that no query sees (behind it, of other documents, before its window) are left out.

Later queries see more keys. So that devices have equally many blocks, each swaps the second half of its queries with
the device that is as far from the end of the row as it is from the start; keys stay where they are.
"""

import functools
import math
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxrl_llm.distributed.sharding import activation_spec, is_sharded
from jaxrl_llm.models.kernels.decode_attention import MASKED
from jaxrl_llm.models.layers import soft_cap

RESULT = "context_attention"  # as which policies of rematerialisation know results
SCORES = 2**24  # that a block may have, of all its rows and heads
BLOCKS = "blocks_of_keys_"  # the name of a loop over them, followed by their number
SIZE = 8  # numbers of tokens that matrix units take


class Places(NamedTuple):
    """Where tokens `[N,T]` are in their rows, which says who sees whom."""

    index: jax.Array  # in the row
    segments: jax.Array  # 0 is padding
    positions: jax.Array
    earliest: jax.Array | None = None  # the least position that the token sees; None: it sees all before it
    prefixes: jax.Array | None = None  # another segment that it sees
    runs: jax.Array | None = None  # from 1, of tokens that see each other, also what is behind them; 0: in none
    beyond: jax.Array | None = None  # runs that see each other whatever the window


def context_attention(q, k, v, places: Places, softcap: float | None, sinks=None, slopes=None) -> jax.Array:
    """`[N,T,J,H/J,d]`: attention of (scaled) queries `[N,T,J,H/J,d]` to keys and values `[N,T,J,d]`.

    `sinks` `[J,H/J]` are scores of one more token each, without a value, and `slopes` `[J,H/J]` times the position of a
    key are added to its scores. Tokens that see nothing, padding, get zeros. Softmax and sums are in fp32.
    """
    if not is_sharded():
        return _local(None, softcap, q, k, v, sinks, slopes, places)
    queries = activation_spec(q.shape, "rows", "positions", "heads", None, None)
    keys = PartitionSpec(*queries[:2], queries[2], None)
    of_heads, of_tokens = PartitionSpec(queries[2], None), PartitionSpec(*queries[:2])
    run = jax.shard_map(
        functools.partial(_local, queries[1], softcap),
        in_specs=(queries, keys, keys, of_heads, of_heads, of_tokens),
        out_specs=queries,
        check_vma=False,
    )
    return run(q, k, v, sinks, slopes, places)


def _local(axis: str | None, softcap: float | None, q, k, v, sinks, slopes, places: Places) -> jax.Array:
    """The attention of a device's queries, where `axis` shards positions; None: it has complete rows."""
    rows, length, kv_heads, each = q.shape[:4]
    half = -(-length // 2)
    largest = max(math.isqrt(SCORES // (rows * kv_heads * each)), SIZE)
    size = -(-half // -(-half // largest))
    size += -size % SIZE
    extra = 2 * (half + -half % size) - length
    q, k, v, places = jax.tree.map(
        lambda x: jnp.pad(x, ((0, 0), (0, extra), *((0, 0),) * (x.ndim - 2))), (q, k, v, places)
    )

    def swapped(x):
        if axis is None:
            return x
        devices = jax.lax.axis_size(axis)
        mirror = [(device, devices - 1 - device) for device in range(devices)]
        first, second = jnp.split(x, 2, axis=1)
        return jnp.concatenate([first, jax.lax.ppermute(second, axis, mirror)], axis=1)

    own, of_queries = jax.tree.map(swapped, (q, places))
    of_keys = places._replace(earliest=None, prefixes=None)
    out = _attend(axis, softcap, size, own, k, v, sinks, slopes, of_queries, of_keys)
    return swapped(cast(jax.Array, out))[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(axis, softcap, size, q, k, v, sinks, slopes, queries: Places, keys: Places):
    return _forward(axis, softcap, size, q, k, v, sinks, slopes, queries, keys)[0]


def _forward(axis, softcap, size, q, k, v, sinks, slopes, queries: Places, keys: Places):
    all_k, all_v, of_keys = jax.tree.map(lambda x: _gathered(x, axis), (k, v, keys))
    shape = (len(q), *q.shape[2:4], size)  # [N,J,H/J,t]
    top = jnp.broadcast_to(MASKED if sinks is None else sinks[..., None], shape).astype(jnp.float32)
    total = jnp.full(shape, 0.0 if sinks is None else 1.0, jnp.float32)

    def of_block(_, block):
        q, places, first, last = block

        def add(number, sums):
            top, total, out = sums
            k, v, there = (_block(x, number, size) for x in (all_k, all_v, of_keys))
            scores, seen = _scores(q, k, softcap, slopes, there)[0], _seen(places, there)
            scores = jnp.where(seen, scores, MASKED)
            higher = jnp.maximum(top, scores.max(-1))
            shares, rest = jnp.where(seen, jnp.exp(scores - higher[..., None]), 0.0), jnp.exp(top - higher)
            added = jnp.einsum("njrts,nsjd->njrtd", shares.astype(v.dtype), v, preferred_element_type=jnp.float32)
            return higher, total * rest + shares.sum(-1), out * rest[..., None] + added

        zeros = jnp.zeros((*shape, v.shape[-1]), jnp.float32)
        highest, sums, out = _over(first, last, add, (top, total, zeros), of_keys, size)
        sums = jnp.where(sums == 0.0, 1.0, sums)
        return None, (jnp.moveaxis(out / sums[..., None], 3, 1).astype(q.dtype), highest + jnp.log(sums))

    blocks = (_in_blocks(q, size), _in_blocks(queries, size), *_spans(queries, of_keys, size))
    out, norms = jax.lax.scan(of_block, None, blocks)[1]
    out = jnp.moveaxis(out, 0, 1).reshape(*q.shape[:-1], -1)
    out, norms = (checkpoint_name(x, RESULT) for x in (out, norms))
    return out, (q, k, v, sinks, slopes, queries, keys, out, norms)


def _backward(axis, softcap, size, kept, d_out):
    """Scores once more, and from them the gradients; keys and values are gathered again, so that none waits whole."""
    q, k, v, sinks, slopes, queries, keys, out, norms = kept
    all_k, all_v, of_keys = jax.tree.map(lambda x: _gathered(x, axis), (k, v, keys))

    def of_block(d_keys, block):
        q, places, first, last, d_out, norm, drift = block

        def add(number, sums):
            k, v, there = (_block(x, number, size) for x in (all_k, all_v, of_keys))
            scores, capped = _scores(q, k, softcap, slopes, there)
            shares = jnp.where(_seen(places, there), jnp.exp(scores - norm[..., None]), 0.0)
            d_shares = jnp.einsum("ntjrd,nsjd->njrts", d_out, v, preferred_element_type=jnp.float32)
            d_scores = shares * (d_shares - drift[..., None])
            if softcap is not None:
                d_scores *= 1.0 - (capped / softcap) ** 2
            shares, d_scores = shares.astype(q.dtype), d_scores.astype(q.dtype)
            parts = (
                jnp.einsum("njrts,ntjrd->nsjd", a, b, preferred_element_type=jnp.float32)
                for a, b in ((d_scores, q), (shares, d_out))
            )
            d_keys = (_added(x, part, number, size) for x, part in zip(sums[1:], parts, strict=True))
            return sums[0] + jnp.einsum("njrts,nsjd->ntjrd", d_scores, k, preferred_element_type=jnp.float32), *d_keys

        sums = (jnp.zeros(q.shape, jnp.float32), *d_keys)
        d_q, *d_keys = _over(first, last, add, sums, of_keys, size)
        return tuple(d_keys), d_q.astype(q.dtype)

    drift = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)  # [N,T,J,H/J]
    drift = jnp.moveaxis(_in_blocks(drift, size), 2, -1)  # [b,N,J,H/J,t]
    blocks = (_in_blocks(q, size), _in_blocks(queries, size), *_spans(queries, of_keys, size))
    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (all_k, all_v))
    d_keys, d_q = jax.lax.scan(of_block, zeros, (*blocks, _in_blocks(d_out, size), norms, drift))
    if axis is not None:
        d_keys = (jax.lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True) for x in d_keys)
    d_k, d_v = d_keys
    d_sinks = None if sinks is None else -(jnp.exp(sinks[..., None] - norms) * drift).sum((0, 1, 4))
    d_q = jnp.moveaxis(d_q, 0, 1).reshape(q.shape)
    return d_q, d_k.astype(k.dtype), d_v.astype(v.dtype), d_sinks, None, None, None


_attend.defvjp(_forward, _backward)


def _scores(q, k, softcap: float | None, slopes, keys: Places) -> tuple[jax.Array, jax.Array]:
    """The scores `[N,J,H/J,t,s]` of queries `[N,t,J,H/J,d]` and keys `[N,s,J,d]`, and what they are without slopes."""
    capped = soft_cap(jnp.einsum("ntjrd,nsjd->njrts", q, k, preferred_element_type=jnp.float32), softcap)
    if slopes is None:
        return capped, capped
    return capped + slopes[:, :, None, None] * keys.positions[:, None, None, None, :], capped


def _seen(queries: Places, keys: Places) -> jax.Array:
    """Whether queries see keys, `[N,1,1,t,s]`."""

    def pairs(a, b):
        return a[:, :, None], b[:, None, :]

    def same(a, b):
        a, b = pairs(a, b)
        return (a == b) & (b != 0)

    near = same(queries.segments, keys.segments)
    if queries.prefixes is not None:
        near |= same(queries.prefixes, keys.segments)
    seen = jnp.greater_equal(*pairs(queries.index, keys.index))
    if queries.runs is not None:
        seen |= same(queries.runs, keys.runs)
    if queries.earliest is not None:
        seen &= jnp.less_equal(*pairs(queries.earliest, keys.positions))
    if queries.beyond is not None:
        seen |= same(queries.beyond, keys.beyond)
    return (near & seen)[:, None, None]


def _over(first, last, add, sums: tuple, keys: Places, size: int) -> Any:
    """The sums after `add(number, sums)` of each block of keys from the first on, before the last.

    The compiler does not know how many these are: the loop's name says it, for rows of one document and on average. (Of
    a loop with a fixed number, JAX's partial evaluation keeps the scores of all blocks.)
    """
    with jax.named_scope(f"{BLOCKS}{(keys.index.shape[1] // size + 1) // 2}"):
        return jax.lax.fori_loop(first, last, add, sums)


def _spans(queries: Places, keys: Places, size: int) -> tuple[jax.Array, jax.Array]:
    """For each block of queries the first block of keys that one of them may see, and the one behind the last; the same
    where there is none.

    Blocks are told by the least and the largest of their numbers.
    """
    most = jnp.iinfo(jnp.int32).max

    def ends(x, counts) -> tuple[jax.Array, jax.Array]:
        low, high = (jnp.where(counts, x, other).reshape(len(x), -1, size) for other in (most, -most))
        return low.min(-1), high.max(-1)

    def meet(a, b) -> jax.Array:
        (low, high), (least, largest) = ends(a, a != 0), ends(b, b != 0)
        return (low[:, :, None] <= largest[:, None]) & (least[:, None] <= high[:, :, None])

    of_queries, of_keys = queries.segments != 0, keys.segments != 0
    near = meet(queries.segments, keys.segments)
    if queries.prefixes is not None:
        near |= meet(queries.prefixes, keys.segments)
    seen = ends(keys.index, of_keys)[0][:, None] <= ends(queries.index, of_queries)[1][:, :, None]
    if queries.earliest is not None:
        seen &= ends(queries.earliest, of_queries)[0][:, :, None] <= ends(keys.positions, of_keys)[1][:, None]
    for own, other in ((queries.runs, keys.runs), (queries.beyond, keys.beyond)):
        if own is not None:
            seen |= meet(own, other)
    seen = (near & seen).any(0)  # [b,blocks of keys]
    last = jnp.where(seen.any(-1), seen.shape[1] - jnp.argmax(seen[:, ::-1], axis=-1), 0)
    return jnp.where(last > 0, jnp.argmax(seen, axis=-1), 0), last


def _gathered(x, axis: str | None):
    return x if axis is None else jax.lax.all_gather(x, axis, axis=1, tiled=True)


def _block(tree: Any, number, size: int) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, number * size, size, axis=1), tree)


def _added(x, part, number, size: int):
    return jax.lax.dynamic_update_slice_in_dim(x, _block(x, number, size) + part, number * size, axis=1)


def _in_blocks(tree: Any, size: int) -> Any:
    """Arrays `[b,N,t,...]` of blocks of arrays `[N,T,...]`."""
    return jax.tree.map(lambda x: jnp.moveaxis(x.reshape(len(x), -1, size, *x.shape[2:]), 1, 0), tree)
