"""Attention to blocks that are rated by their pooled keys, as a mixer (the QSA of Qwen4-Exp).

`index_block` tokens next to each other are a block, counted from the start of a document, so that padding and packing
move none. An indexer of few heads rates the blocks that are complete at a token,

    I[t,b] = sum_i relu(q[t,i] . k[b]),    k[b] = rotated(norm(mean of the keys of the tokens of b)),

as far as the first token of b. The token sees the `index_top` / `index_block` best of them, and the tokens behind, of
whose block some are still to come. All heads see the same. The choice has no gradient, so that training keeps the
indexer as it is. Rows too short for more complete blocks than are chosen are not rated.

Letters: e numbers of an indexer's head, b blocks, B tokens of one; others as in attention.py.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.distributed.sharding import constrain
from jaxrl_llm.models import quantize
from jaxrl_llm.models.layers import Linear, RMSNorm
from jaxrl_llm.models.mixers.attention import (
    Attention,
    AttentionArrays,
    KeyValues,
    ShiftedKeyValues,
    einsum,
    write_tokens,
)
from jaxrl_llm.models.mixers.latent_attention import LatentAttention
from jaxrl_llm.models.mixers.mixer import AttentionInputs, DecodeInputs
from jaxrl_llm.models.mixers.query_blocks import (
    NONE,
    ChoosesTokens,
    Places,
    attend_next_to_chosen,
    best,
    by_blocks,
    over_queries,
    tokens_of,
    with_latest,
)
from jaxrl_llm.models.rope import rotate


class PooledPrompt(NamedTuple):
    """The cache of prompts: keys and values, and what the indexer has of complete blocks and of the tokens behind."""

    kept: KeyValues | ShiftedKeyValues
    blocks: jax.Array  # [...,G,b,e] the rated keys of blocks; of those behind the last complete one anything
    tail: jax.Array  # [...,G,B,e] keys of the tokens behind it, and then anything
    first: jax.Array  # [...,G,r/2] the position of the first of these


class PooledRow(NamedTuple):
    """The cache of rows: keys and values, and their keys for the indexer behind room for the prompt's tail."""

    kept: KeyValues
    keys: jax.Array  # [...,G,R,S+B,1,e]; places are counted from the start of the block in which the prompt ends


class PooledIndexer(nnx.Module):
    """The heads that rate blocks."""

    def __init__(self, config, rngs: nnx.Rngs):
        self.config = c = config
        self.qk = Linear(c.width, (c.index_heads + 1) * c.index_head_dim, c, rngs)
        self.q_norm, self.k_norm = (RMSNorm(c.index_head_dim, c, rngs) for _ in range(2))

    def __call__(self, x, positions, arrays: AttentionArrays):
        """Queries `[...,t,i,e]` and keys `[...,t,e]` of x, the latter as they are pooled."""
        both = self.qk(x).reshape(*x.shape[:-1], -1, self.config.index_head_dim)
        q = rotate(self.q_norm(both[..., :-1, :]), positions, arrays.inv_freq, arrays.scale)
        return jax.lax.stop_gradient((q, both[..., -1, :]))

    def pooled(self, keys, positions, arrays: AttentionArrays, dtype):
        """The rated keys `[...,b,e]` of blocks, of the keys `[...,b,B,e]` of their tokens and the positions `[...,b]`,
        or `[...,b,r/2]`, of the first ones."""
        mean = quantize.widened(keys, jnp.float32).mean(-2).astype(dtype)
        pooled = rotate(self.k_norm(mean)[..., None, :], positions, arrays.inv_freq, arrays.scale)[..., 0, :]
        return jax.lax.stop_gradient(pooled)

    def chosen(self, dims: str, q, parts, complete) -> jax.Array:
        """The best of the `complete` blocks `[...,t,b]`, NONE where fewer are chosen than may be.

        `parts` are arrays of their keys, one behind another, of queries q `[...,t,i,e]`; `dims` are for each those of
        the product with one head, parted by spaces.
        """

        def rated(q):
            found = [einsum(each, q, keys) for each, keys in zip(dims.split(), parts, strict=True)]
            return jax.nn.relu(jnp.concatenate(found, axis=-1))

        # Head by head: the scores of all of them would be many times the mask.
        heads = jnp.moveaxis(q, -2, 0)
        scores, _ = jax.lax.scan(lambda total, q: (total + rated(q), None), jnp.zeros(complete.shape), heads)
        return best(scores, complete, self.config.index_top // self.config.index_block)


class PooledAttention(ChoosesTokens, Attention):
    """Causal grouped-query attention to the blocks that an indexer chooses, and to the latest tokens. A `Mixer`."""

    shares_prefixes = False  # of whose blocks one would be part of a prefix and part of the row
    own_first = ("blocks",)
    untrained = tuple(f"indexer/{leaf}" for leaf in ("qk/kernel", "q_norm/scale", "k_norm/scale"))

    def __init__(self, config, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.indexer = PooledIndexer(config, rngs)

    @staticmethod
    def reads_mask(config, length: int) -> bool:
        """False where there are more complete blocks than are chosen."""
        return length // config.index_block <= config.index_top // config.index_block

    @staticmethod
    def attended(config, places):
        """The tokens of the blocks that are chosen, and those behind the last complete one."""
        behind = (places + 1) % config.index_block
        return jnp.minimum(places + 1 - behind, config.index_top) + behind

    @staticmethod
    def rating(config, tokens, pairs):
        """The operations of the indexer, which rates blocks."""
        return ChoosesTokens.rating(config, tokens, pairs / config.index_block)

    def prefill(self, x, inputs: AttentionInputs, arrays: AttentionArrays) -> tuple[jax.Array, PooledPrompt]:
        """Output `[N,T,D]`, the layer's own keys and values `[N,J,T,d]`, and the indexer's keys."""
        size, length, segments = self.config.index_block, x.shape[1], inputs.segments
        places = inputs.positions if inputs.rotary is None else inputs.rotary
        q, keys = self.indexer(x, places, arrays)
        keys, segments = (constrain(a, "rows", *(None,) * (a.ndim - 1)) for a in (keys, segments))
        # The last tokens of blocks that are complete in the row; T where there are no more.
        ends = (inputs.positions % size == size - 1) & (segments != 0)
        last = jnp.sort(jnp.where(ends, jnp.arange(length), length), axis=1)[:, : max(length // size, 1)]
        members = last[..., None] + jnp.arange(1 - size, 1)
        blocks = self.indexer.pooled(_at(keys, members), _at(places, members[..., 0]), arrays, x.dtype)
        blocks = constrain(blocks, "rows", None, None)
        choosing = None
        if not self.reads_mask(self.config, length):
            choice = self._chosen_of_rows(q, blocks, last, inputs)
            choosing = by_blocks(self.config, length, choice, choice.shape[-1] * size)
        out, kept = super().prefill(x, inputs, arrays, choosing)
        assert isinstance(kept, KeyValues | ShiftedKeyValues)
        begun = length - (segments != 0).sum(1) % size
        tail = _at(keys, begun[:, None] + jnp.arange(size))
        first = _at(places, begun).reshape(len(x), -1)
        first = jnp.broadcast_to(first, (len(x), arrays.inv_freq.shape[-1]))
        return out, PooledPrompt(kept, blocks, constrain(tail, "rows", None, None), first)

    def decode(
        self, x, inputs: DecodeInputs, prompt: PooledPrompt, cache: PooledRow, arrays: AttentionArrays
    ) -> tuple[jax.Array, PooledRow]:
        """The next W tokens of each row: output `[G,R*W,D]`, and the row's cache with theirs."""
        size, before = self.config.index_block, inputs.prompt_mask.shape[1]
        behind = inputs.prompt_mask.sum(-1, keepdims=True) % size  # tokens of prompts in the block in which they end
        shift = prompt.kept.shift if isinstance(prompt.kept, ShiftedKeyValues) else jnp.zeros_like(behind[:, 0])
        q, new = (
            a.reshape(*inputs.length.shape, -1, *a.shape[3:])
            for a in self.indexer(x[:, :, None], (inputs.positions + shift[:, None])[:, :, None], arrays)
        )
        keys = write_tokens(cache.keys, new[..., None, :], inputs.length + behind, "cjd", sharded=False)
        choosing = None
        if not self.reads_mask(self.config, before + keys.shape[2] - size):
            chosen = self._chosen_of_next(q, keys[..., 0, :], prompt, shift, inputs, arrays)
            choosing = functools.partial(attend_next_to_chosen, chosen=chosen)
        out, kept = super().decode(x, inputs, prompt.kept, cache.kept, arrays, choosing)
        return out, PooledRow(kept, keys)

    def _chosen_of_rows(self, q, blocks, last, inputs: AttentionInputs) -> jax.Array:
        """Where the blocks begin `[N,T,b]` whose tokens those of whole rows see, by queries q `[N,T,i,e]` and blocks
        `[N,b,e]`, of which the last tokens are `last` `[N,b]`; NONE where it is fewer."""
        size = self.config.index_block
        owners = jnp.take_along_axis(inputs.segments, last, axis=1, mode="fill", fill_value=0)

        def chosen(block, end: int):
            places, q = block
            count = max(end // size, 1)  # blocks that may be complete there
            complete = (places.segments[:, :, None] == owners[:, None, :count]) & (owners != 0)[:, None, :count]
            complete &= last[:, None, :count] <= places.index[:, :, None]
            kept = self.indexer.chosen("nte,nbe->ntb", q, [blocks[:, :count]], complete)
            ends = jnp.take_along_axis(last[:, None], kept, axis=-1, mode="fill", fill_value=NONE)
            position = jnp.where(places.segments != 0, places.positions, -1)
            return with_latest(jnp.where(kept < NONE, ends + 1 - size, NONE), places.index, position, size)

        return over_queries(chosen, (Places.of(inputs), q), 4 * max(blocks.shape[1], self.config.index_top))

    def _chosen_of_next(self, q, keys, prompt: PooledPrompt, shift, inputs: DecodeInputs, arrays) -> jax.Array:
        """The tokens `[G,R,W,1,k]`, of those of prompt and row `P+S`, that the next ones see, by queries q
        `[G,R,W,i,e]` and the row's keys `[G,R,S+B,e]`."""
        size, mask, before = self.config.index_block, inputs.prompt_mask, prompt.blocks.shape[1]
        groups, rows = inputs.length.shape
        length = mask.sum(-1, keepdims=True)  # [G,1]
        whole, behind = length // size, length % size
        own = keys[:, :, : keys.shape[2] // size * size].reshape(groups, rows, -1, size, keys.shape[-1])
        in_tail = (jnp.arange(size) < behind)[:, None, :, None]
        own = own.at[:, :, 0].set(jnp.where(in_tail, prompt.tail[:, None], own[:, :, 0]))
        number = whole + jnp.arange(own.shape[2])  # [G,b] of the row's blocks in the document
        first = (number * size + shift[:, None])[..., None] + jnp.zeros_like(prompt.first)[:, None]
        first = first.at[:, 0].set(jnp.where(behind > 0, prompt.first, first[:, 0]))
        blocks = self.indexer.pooled(own, first[:, None], arrays, q.dtype)
        place = (inputs.length[:, :, None] + jnp.arange(q.shape[2]))[..., None]  # [G,R,W,1]
        of_prompt = jnp.broadcast_to((jnp.arange(before) < whole)[:, None, None], (*place.shape[:3], before))
        of_row = (number[:, None, None] + 1) * size <= place + length[:, None, None] + 1
        complete = jnp.concatenate([of_prompt, of_row], axis=-1)
        kept = self.indexer.chosen("grwe,gbe->grwb grwe,grbe->grwb", q, [prompt.blocks, blocks], complete)
        start = (mask.shape[1] - length)[..., None]  # where the first token is: padding is on the left
        number = jnp.concatenate([jnp.broadcast_to(jnp.arange(before), (groups, before)), number], axis=-1)
        first = jnp.take_along_axis(number[:, None, None], kept, axis=-1, mode="fill", fill_value=0)
        first = jnp.where(kept < NONE, start[..., None] + first * size, NONE)
        place, own = mask.shape[1] + place[..., 0], length[..., None] + place[..., 0]
        return tokens_of(with_latest(first, place, own, size), place, size)[..., None, :]

    @staticmethod
    def empty_cache(prompt: PooledPrompt, rows: int, size: int) -> PooledRow:
        """Empty keys and values of rows, as `Attention.empty_cache` makes them, and keys of the indexer."""
        room = size + prompt.tail.shape[-2]
        return PooledRow(
            Attention.empty_cache(prompt.kept, rows, size), LatentAttention.empty_cache(prompt.tail, rows, room)
        )

    @staticmethod
    def grow_cache(cache: PooledRow, size: int) -> PooledRow:
        """The row caches with room for `size` tokens."""
        kept = Attention.grow_cache(cache.kept, size)
        before = size * cache.kept.k.size // kept.k.size  # tokens that there was room for
        return PooledRow(kept, LatentAttention.grow_cache(cache.keys, size + cache.keys.shape[-3] - before))


def _at(a, index) -> jax.Array:
    """Of the tokens of rows a `[N,T,...]` those with the index `[N,...]`; any where there are none such."""
    return jax.vmap(lambda row, i: row[jnp.clip(i, 0, len(row) - 1)])(a, index)
