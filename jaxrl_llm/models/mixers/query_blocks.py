"""Attention of whole rows to the tokens that are chosen for each, in blocks of queries.

A row of T tokens has T^2 pairs, which no array here holds. Blocks of queries rate what they see, keep the indices of
what they choose, and attend to that: by a mask of the block where a row is not much longer than what is chosen, else to
copies of the chosen keys and values alone. The backward pass computes each block again.

Letters: t queries of a block, S keys, k chosen ones; others as in attention.py.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.distributed.sharding import attention_dims, constrain, context_shards, is_sharded, row_shards
from jaxrl_llm.models import quantize
from jaxrl_llm.models.kernels.decode_attention import MASKED
from jaxrl_llm.models.kernels.fused_attention import cudnn_attention, implementation
from jaxrl_llm.models.mixers.attention import (
    QUERY_BLOCKS,
    SMALLEST_BLOCK,
    KeyValues,
    attend_next,
    combined_softmax,
    in_blocks,
    row_dims,
)
from jaxrl_llm.models.mixers.mixer import AttentionInputs, DecodeInputs

BLOCK_BYTES = 2**27  # of the largest array of a block of queries, on each device
OF_COPY = 450  # products, of matrices on an H100, in the time of writing a number of 16 bits and reading it twice
OF_SCORE = 1200  # and in that of what plain XLA writes and reads of a score
UNSEEN = -jnp.inf  # the score of a token that is not seen
NONE = 2**30  # the index in the place of a chosen token, where fewer are seen than may be chosen


class ChoosesTokens:
    """What mixers say which attend to `index_top` tokens at most, and to all where a row has no more."""

    @staticmethod
    def reads_mask(config, length: int) -> bool:
        """False where rows of that length are attended in blocks of queries, which have their own masks."""
        return length <= config.index_top

    @staticmethod
    def attended(config, places):
        """The number of tokens that those at `places` in their document attend to, itself included; of pools, also
        those behind the last complete one."""
        behind = (places + 1) % max(config.index_pool, 1)
        return jnp.minimum(places + 1 - behind, config.index_top) + behind

    @staticmethod
    def rating(config, tokens, pairs):
        """The operations by which tokens are rated, as `Mixer.flops` counts those of attention."""
        return 2.0 * config.index_heads * config.index_head_dim * pairs


class Places(NamedTuple):
    """Where tokens are in their rows."""

    index: jax.Array  # [N,t]
    segments: jax.Array  # [N,t]
    positions: jax.Array  # [N,t]
    prefixes: jax.Array | None  # [N,t] as in `AttentionInputs`

    @classmethod
    def of(cls, inputs: AttentionInputs) -> "Places":
        """Those of all tokens of rows."""
        index = jnp.broadcast_to(jnp.arange(inputs.segments.shape[1]), inputs.segments.shape)
        return cls(index, inputs.segments, inputs.positions, inputs.prefixes)

    def see(self, inputs: AttentionInputs, end: int) -> jax.Array:
        """True where these tokens see one of the first `end` of their rows, `[N,t,end]`, as `attention_mask` has it."""
        keys = inputs.segments[:, None, :end]
        seen = self.segments[:, :, None] == keys
        if self.prefixes is not None:
            seen |= self.prefixes[:, :, None] == keys
        return seen & (jnp.arange(end) <= self.index[:, :, None]) & (keys != 0)


def over_queries(compute: Callable[[Any, int], Any], queries: Any, each: int, sharded: bool = True) -> Any:
    """The results `[N,T,...]` of `compute(block, end)`, of all blocks of `queries`, a pytree of arrays `[N,T,...]`.

    All tokens of a block `[N,t,...]` are before the place `end`, which is known while programs are traced. `each` are
    the bytes of the largest array of one query, by which the size of blocks is chosen. On meshes with a context axis a
    block has as many tokens of each shard of the positions, unless they are not `sharded`.
    """
    rows, length = jax.tree.leaves(queries)[0].shape[:2]
    shards = context_shards() if sharded else 1
    own = length // shards
    mesh: Any = jax.sharding.get_abstract_mesh()
    held = max(rows // (row_shards(mesh) if is_sharded() else 1), 1)
    size = max(BLOCK_BYTES // (each * held) // 8 * 8, 8)
    size = min(size, max(-(-own // QUERY_BLOCKS), SMALLEST_BLOCK), own)
    # Those of a part have one `end`: with a part for each block there would be as many programs.
    part = -(-own // (size * QUERY_BLOCKS)) * size if shards == 1 else own
    found = []
    for start in range(0, own, part):
        count, end = min(part, own - start), min(start + part, own) if shards == 1 else length
        number = -(-count // size)

        def blocks(x, start=start, count=count, number=number):  # [b,N,t,...]
            rest = x.shape[2:]
            x = x.reshape(rows, shards, own, *rest)[:, :, start : start + count]
            x = jnp.pad(x, ((0, 0), (0, 0), (0, number * size - count), *((0, 0),) * len(rest)))
            x = jnp.moveaxis(x.reshape(rows, shards, number, size, *rest), 2, 0)
            x = x.reshape(number, rows, shards * size, *rest)
            return constrain(x, None, "rows", "positions" if sharded else None, *(...,) * len(rest))

        def whole(x, count=count, number=number):  # [N,shards,t,...]
            rest = x.shape[3:]
            x = jnp.moveaxis(x.reshape(number, rows, shards, size, *rest), 0, 2)
            return x.reshape(rows, shards, number * size, *rest)[:, :, :count]

        body = jax.checkpoint(lambda block, end=end: compute(block, end), prevent_cse=False)
        found.append(jax.tree.map(whole, jax.lax.map(body, jax.tree.map(blocks, queries))))
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=2).reshape(rows, length, *x[0].shape[3:]), *found)


def best(scores, seen, count: int) -> jax.Array:
    """The indices `[...,count]` of the best that are `seen`, `[...,S]` as both are; NONE where fewer are."""
    values, index = jax.lax.top_k(jnp.where(seen, scores, UNSEEN), min(count, scores.shape[-1]))
    return filled(jnp.where(values > UNSEEN, index, NONE), count)


def filled(index, count: int) -> jax.Array:
    """The indices `[...,k]` and NONE behind them, `count` together."""
    return jnp.pad(index, ((0, 0),) * (index.ndim - 1) + ((0, count - index.shape[-1]),), constant_values=NONE)


def as_mask(chosen, size: int) -> jax.Array:
    """True for the `chosen` `[...,k]` of `size` tokens, `[...,size]`."""

    def mask(index):
        return jnp.zeros(size, bool).at[index].set(True, mode="drop")

    # Mapped, dimensions of rows stay those of rows, along which meshes divide them.
    for _ in chosen.shape[:-1]:
        mask = jax.vmap(mask)
    return mask(chosen)


def tokens_of(first, own, size: int) -> jax.Array:
    """The tokens `[...,b*size]`, up to the one at `own` `[...]`, of blocks of `size` tokens that begin at `first`
    `[...,b]`; NONE for those of a block whose first one is NONE."""
    tokens = jnp.where(first[..., None] < NONE, first[..., None] + jnp.arange(size), NONE)
    return jnp.where(tokens <= own[..., None, None], tokens, NONE).reshape(*first.shape[:-1], -1)


def with_latest(first, index, position, size: int) -> jax.Array:
    """Where blocks begin `[...,b+1]`: those at `first` `[...,b]`, and the one in which a token is that is the `index`th
    of its row and the `position`th of its document, `[...]`; NONE where it completes that, or is padding, -1."""
    within = position % size
    return jnp.concatenate([first, jnp.where(within < size - 1, index - within, NONE)[..., None]], axis=-1)


def copies_pay(config, length: int, count: int, heads: int, folded: int, copied: int) -> bool:
    """True where, in rows of that length, attention to copies of `count` keys for each token takes less time than masks
    of half the row: of `copied` numbers each, with which `heads` queries make `folded` products.

    By the rates of an H100, which those of other accelerators are alike: products of matrices against what is moved.
    """
    by_kernel = implementation(config, length, True) == "cudnn"
    apart = config.head_dim + config.value_size
    masked = length / 2 * config.heads * (apart if by_kernel else apart + OF_SCORE)
    return count * (heads * folded + OF_COPY * copied) < masked


def attend_to_choice(config, q, k, v, inputs: AttentionInputs, choice, tokens, copies: int, sinks=None) -> jax.Array:
    """`[N,T,J,H/J,v]`: attention of whole rows, as `attend` computes it, to `tokens(places, choice)`, which are those
    `[N,J or 1,t,k]` of a block of queries with that part of the choice `[N,T,...]`; to so many `copies` of keys for
    each token or, where it is 0, by masks."""
    query_dims, key_dims = attention_dims(k.shape[2])
    q = constrain(q, "rows", *query_dims, None, None)
    # In fp32, as their gradients are then summed over blocks.
    k, v = (constrain(a, "rows", *key_dims, None).astype(jnp.float32) for a in (k, v))

    def attended(block, end: int):
        q, places, choice = block
        chosen = tokens(places, choice)
        if copies:
            return attend_to_chosen(q, k.swapaxes(1, 2), v.swapaxes(1, 2), chosen, sinks)
        mask = as_mask(chosen, end)
        keys, values = (a[:, :end].astype(q.dtype) for a in (k, v))
        return attend_to_mask(config, q, keys, values, mask if mask.shape[1] > 1 else mask[:, 0], sinks)

    each = max(copies * k.shape[2] * k.shape[3] * q.dtype.itemsize, 4 * (copies or k.shape[1]) * config.heads)
    return over_queries(attended, (q, Places.of(inputs), choice), each, query_dims[0] is not None)


def by_blocks(config, length: int, first, count: int) -> Callable[..., jax.Array]:
    """What is in the place of `attend` in rows of that length, where tokens attend to at most `count` tokens of blocks
    that begin at `first` `[N,T,b]` or, of each key/value head, `[N,T,J,b]`."""

    def tokens(places: Places, first):
        first = first[:, None] if first.ndim == 3 else first.swapaxes(1, 2)
        return tokens_of(first, places.index[:, None], config.index_block)

    both = config.head_dim + config.value_size
    pay = copies_pay(config, length, count, config.heads, both, config.kv_heads * both)
    return functools.partial(attend_to_choice, choice=first, tokens=tokens, copies=count if pay else 0)


def attend_to_mask(config, q, k, v, mask, sinks=None) -> jax.Array:
    """`[N,t,J,H/J,d]`: attention of one block, of queries of that shape (scaled) to the keys and values `[N,S,J,d]`
    where the mask `[N,t,S]` or, of each of their heads, `[N,J,t,S]` is True."""
    if implementation(config, q.shape[1], True) != "cudnn":
        return in_blocks(config, q, k, v, mask, sinks)
    size = v.shape[-1]
    v = jnp.pad(v, ((0, 0),) * 3 + ((0, k.shape[-1] - size),))  # the kernel takes values of the size of keys
    return cudnn_attention(q, k, v, mask, sinks)[..., :size]


def attend_to_chosen(q, keys, values, chosen, sinks=None) -> jax.Array:
    """`[N,t,J,H/J,v]`: attention of one block, of queries `[N,t,J,H/J,d]` (scaled) to the `chosen` `[N,J or 1,t,k]` of
    keys `[N,J,S,d]` and values `[N,J,S,v]`; or, where `values` is v, these are the first numbers of keys.

    Keys and values in fp32 get gradients that are summed so, over all queries that have chosen them.
    """
    own_heads = chosen.shape[1] > 1
    index = chosen if own_heads else chosen[:, 0]

    def copied(x):
        return jax.vmap(jax.vmap(at, (0, 0 if own_heads else None)))(x, index).astype(q.dtype)  # [N,J,t,k,d]

    own = copied(keys)
    own_values = own[..., :values] if isinstance(values, int) else copied(values)
    sinks = None if sinks is None else sinks[:, None, :, None]
    return attend_to_copies(q.swapaxes(1, 2), own, own_values, chosen, sinks).swapaxes(1, 2)


def attend_next_to_chosen(config, q, prompt: KeyValues, cache: KeyValues, inputs: DecodeInputs, chosen, sinks=None):
    """`[G,R,W,J,H/J,v]`: as `attend_next`, of the next tokens to those that are `chosen` of prompt and row `P+S`,
    `[G,R,W,J or 1,k]`."""
    before, dims = prompt.k.shape[2], row_dims()
    size = cache.k.shape[2 + dims[0].index("c")]
    groups, rows = inputs.length.shape
    if not copies_pay_next(chosen[..., 0, :].size, groups * (before + rows * size)):
        both = as_mask(chosen, before + size)
        both = (both[..., :before], both[..., before:])
        return attend_next(config, q, prompt, cache, inputs, sinks=sinks, chosen=both)
    heads = prompt.k.shape[1]
    index = jnp.broadcast_to(chosen, (*chosen.shape[:3], heads, chosen.shape[-1]))

    def copied(of_prompt, of_row, dims: str):  # [G,R,W,J,k,d]
        inner = dims.replace("j", "")

        def from_row(x, index):
            taken = jnp.take(x, index, axis=inner.index("c"), mode="clip")
            return taken if inner == "cd" else jnp.moveaxis(taken, 0, -1)

        ours = jax.vmap(jax.vmap(at, (0, 2), 2))(of_prompt, index)
        for_rows = jax.vmap(from_row, (dims.index("j"), 1), 1)
        theirs = jax.vmap(jax.vmap(for_rows))(of_row, jnp.maximum(index - before, 0))
        return quantize.widened(jnp.where((index < before)[..., None], ours, theirs), q.dtype)

    keys, values = (copied(*args) for args in zip(prompt, cache, dims, strict=True))
    return attend_to_copies(q, keys, values, index, None if sinks is None else sinks[..., None])


def copies_pay_next(copies: int, stored: int) -> bool:
    """True where decoding reads less by copies of so many tokens, which are read, written, and read again, than by all
    that are stored."""
    return 3 * copies < stored


def attend_to_copies(q, keys, values, chosen, sinks=None) -> jax.Array:
    """`[...,r,v]`: attention of queries `[...,r,d]` to keys `[...,k,d]` and values `[...,k,v]` of their own, where they
    are `chosen` `[...,k]`, not NONE. `sinks` `[...,r,1]` are scores of one more each, without a value."""
    scores = jnp.einsum("...rd,...kd->...rk", q, keys, preferred_element_type=jnp.float32)
    scores = jnp.where((chosen < NONE)[..., None, :], scores, MASKED)
    (weights,) = combined_softmax([scores], sinks)
    weights = weights.astype(q.dtype)
    out = jnp.einsum("...rk,...kv->...rv", weights, values, preferred_element_type=jnp.float32)
    return out.astype(q.dtype)


def at(x, index) -> jax.Array:
    """x `[S,...]` at the index; the first or last one where there is none such."""
    return x.at[jnp.maximum(index, 0)].get(mode="clip")
