"""Attention to blocks of tokens as a mixer (MiniMax-M3): each key/value head sees some blocks of the tokens before.

An indexer has a small head for each key/value head. It rates every token that a token sees, and a block by the best of
its tokens; the head attends to the `index_top` / `index_block` best blocks, of which the latest `index_local` are
always some. Blocks are counted from the start of a document, so that padding and packing move none. The choice has no
gradient, so that training keeps the indexer as it is. Rows of up to `index_top` tokens see everything, and are not
rated. Letters: e numbers of an indexer's head; others as in attention.py.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.distributed.sharding import constrain
from jaxrl_llm.models.layers import Linear, RMSNorm
from jaxrl_llm.models.mixers.attention import Attention, AttentionArrays, KeyValues, einsum, write_tokens
from jaxrl_llm.models.mixers.latent_attention import LatentAttention
from jaxrl_llm.models.mixers.mixer import AttentionInputs, DecodeInputs
from jaxrl_llm.models.mixers.query_blocks import (
    NONE,
    UNSEEN,
    ChoosesTokens,
    Places,
    attend_next_to_chosen,
    best,
    by_blocks,
    over_queries,
    tokens_of,
)
from jaxrl_llm.models.rope import rotate


class BlockCache(NamedTuple):
    """Keys and values of tokens, and their keys for the indexer, which are kept as latents are."""

    kept: KeyValues
    keys: jax.Array


class BlockIndexer(nnx.Module):
    """The heads that rate tokens: `I[j,t,s] = q[t,j] . k[s]`, of normed and rotated queries and keys."""

    def __init__(self, config, rngs: nnx.Rngs):
        self.config = c = config
        self.q = Linear(c.width, c.index_heads * c.index_head_dim, c, rngs)
        self.k = Linear(c.width, c.index_head_dim, c, rngs)
        self.q_norm, self.k_norm = (RMSNorm(c.index_head_dim, c, rngs) for _ in range(2))

    def __call__(self, x, positions, arrays: AttentionArrays):
        """Queries `[...,t,J,e]` and keys `[...,t,e]` of x."""
        turn = (positions, arrays.inv_freq, arrays.scale)
        q = rotate(self.q_norm(self.q(x).reshape(*x.shape[:-1], self.config.index_heads, -1)), *turn)
        keys = rotate(self.k_norm(self.k(x))[..., None, :], *turn)[..., 0, :]
        return jax.lax.stop_gradient((q, keys))


class BlockAttention(ChoosesTokens, Attention):
    """Causal grouped-query attention to the blocks that an indexer chooses for each key/value head. A `Mixer`."""

    path = "blocks"
    shares_prefixes = False  # of whose blocks some would be part of a prefix and part of the row
    untrained = tuple(f"indexer/{leaf}" for leaf in ("q/kernel", "k/kernel", "q_norm/scale", "k_norm/scale"))

    def __init__(self, config, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.indexer = BlockIndexer(config, rngs)

    @staticmethod
    def attended(config, places):
        """The tokens of as many blocks, of which the last one is complete up to the token itself."""
        return jnp.minimum(places + 1, config.index_top - config.index_block + places % config.index_block + 1)

    def prefill(self, x, inputs: AttentionInputs, arrays: AttentionArrays) -> tuple[jax.Array, BlockCache]:
        """Output `[N,T,D]`, the layer's own keys and values `[N,J,T,d]`, and the indexer's keys `[N,T,e]`."""
        rotary = arrays if inputs.inv_freq is None else arrays._replace(inv_freq=inputs.inv_freq)
        q, keys = self.indexer(x, inputs.positions, rotary)
        keys, choosing = constrain(keys, "rows", None, None), None
        if x.shape[1] > self.config.index_top:
            choice = self._chosen_of_rows(q, keys, inputs)
            choosing = by_blocks(self.config, x.shape[1], choice, self.config.index_top)
        out, kept = super().prefill(x, inputs, arrays, choosing)
        assert isinstance(kept, KeyValues)
        return out, BlockCache(kept, keys)

    def decode(
        self, x, inputs: DecodeInputs, prompt: BlockCache, cache: BlockCache, arrays: AttentionArrays
    ) -> tuple[jax.Array, BlockCache]:
        """The next W tokens of each row: output `[G,R*W,D]`, and the row's cache with theirs."""
        groups, rows = inputs.length.shape
        q, new = (
            a.reshape(groups, rows, -1, *a.shape[3:])
            for a in self.indexer(x[:, :, None], inputs.positions[:, :, None], arrays)
        )
        keys = write_tokens(cache.keys, new[..., None, :], inputs.length, "cjd", sharded=False)
        choosing = None
        if inputs.prompt_mask.shape[1] + keys.shape[2] > self.config.index_top:
            chosen = self._chosen_of_next(q, prompt.keys, keys[..., 0, :], inputs)
            choosing = functools.partial(attend_next_to_chosen, chosen=chosen)
        out, kept = super().decode(x, inputs, prompt.kept, cache.kept, arrays, choosing)
        return out, BlockCache(kept, keys)

    @staticmethod
    def empty_cache(prompt: BlockCache, rows: int, size: int) -> BlockCache:
        """Empty keys and values of rows, as `Attention.empty_cache` makes them, and keys of the indexer."""
        kept, keys = Attention.empty_cache(prompt.kept, rows, size), prompt.keys
        return BlockCache(kept, LatentAttention.empty_cache(keys, rows, size))

    @staticmethod
    def grow_cache(cache: BlockCache, size: int) -> BlockCache:
        """The row caches with room for `size` tokens."""
        return BlockCache(Attention.grow_cache(cache.kept, size), LatentAttention.grow_cache(cache.keys, size))

    def _chosen_of_rows(self, q, keys, inputs: AttentionInputs) -> jax.Array:
        """The places `[N,T,J,b]` of the first tokens of the blocks that each head sees of whole rows, where documents
        lie in one piece each; NONE where it sees fewer."""
        c, positions, segments, length = self.config, inputs.positions, inputs.segments, keys.shape[1]
        blocks, first = positions // c.index_block, jnp.arange(length) - positions % c.index_block
        changes = (jnp.diff(segments, axis=1) != 0) | (jnp.diff(blocks, axis=1) != 0)
        ends = jnp.pad(changes, ((0, 0), (0, 1)), constant_values=True)  # [N,T] the last token of a block

        def chosen(block, end: int):
            places, q = block
            seen = places.see(inputs, end)
            recent = (places.positions // c.index_block)[:, :, None] - blocks[:, None, :end]
            local = (recent >= 0) & (recent < c.index_local)
            local &= places.segments[:, :, None] == segments[:, None, :end]
            last = ends[:, None, :end].at[..., -1].set(True)  # of the tokens that queries see

            def of_head(_, q):
                scores = jnp.where(seen, einsum("nte,nse->nts", q, keys[:, :end]), UNSEEN)
                step = 1
                while step < c.index_block:  # the best of a block's tokens so far, of twice as many each time
                    earlier = jnp.roll(scores, step, axis=-1)
                    within = jnp.arange(end) - step >= first[:, :end]
                    scores = jnp.maximum(scores, jnp.where(within[:, None], earlier, UNSEEN))
                    step *= 2
                rated = jnp.where(last, jnp.where(local, jnp.inf, scores), UNSEEN)
                kept = best(rated, rated > UNSEEN, c.index_top // c.index_block)
                return None, jnp.take_along_axis(first[:, None, :end], kept, axis=-1, mode="fill", fill_value=NONE)

            # Head by head: the scores of all of them would be many times the mask.
            return jnp.moveaxis(jax.lax.scan(of_head, None, jnp.moveaxis(q, -2, 0))[1], 0, 2)

        return over_queries(chosen, (Places.of(inputs), q), 4 * length)

    def _chosen_of_next(self, q, prompt, row, inputs: DecodeInputs) -> jax.Array:
        """The tokens `[G,R,W,J,k]`, of those of prompt and row `P+S`, that each head of the next tokens sees."""
        c, mask = self.config, inputs.prompt_mask
        before, size, width = mask.shape[1], row.shape[2], q.shape[2]
        scores = [einsum("grwje,gse->grwjs", q, prompt), einsum("grwje,grse->grwjs", q, row)]
        place = (inputs.length[:, :, None] + jnp.arange(width))[..., None]
        shape = (*place.shape[:-1], before)
        seen = jnp.concatenate([jnp.broadcast_to(mask[:, None, None], shape), jnp.arange(size) <= place], axis=-1)
        scores = jnp.where(seen[..., None, :], jnp.concatenate(scores, axis=-1), UNSEEN)
        # The prompt is padded on the left, so that all tokens of a row follow one another from `start` on.
        start = (before - mask.sum(-1))[:, None, None, None, None]
        blocks = -(-(before + size) // c.index_block)
        tokens = start + jnp.arange(blocks * c.index_block)
        rates = jnp.take_along_axis(scores, tokens, axis=-1, mode="fill", fill_value=UNSEEN)
        rates = rates.reshape(*rates.shape[:-1], blocks, -1).max(-1)
        own = (place + mask.sum(-1)[:, None, None, None]) // c.index_block
        recent = own - jnp.arange(blocks)
        rates = jnp.where(((recent >= 0) & (recent < c.index_local))[..., None, :], jnp.inf, rates)
        kept = best(rates, rates > UNSEEN, c.index_top // c.index_block)
        return tokens_of(jnp.where(kept < NONE, start + kept * c.index_block, NONE), before + place, c.index_block)
