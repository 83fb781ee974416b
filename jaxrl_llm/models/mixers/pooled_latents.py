"""Sparse attention to pools of tokens as a mixer (GLM-5.3): what an indexer rates and chooses are pools, not tokens.

Every `index_pool` tokens of a document are a pool, counted from its first token, so that padding and packing move none.
The key of a pool is made of those of its tokens, number by number: `sum_i softmax_i(gate_i + place_i) k_i`, with gates
that are a map of the tokens, and learned numbers of each place in a pool. A token attends to the `index_top /
index_pool` best of the pools that are complete with it, and to the tokens behind the last of these. So it may not see
itself where it completes a pool. Rows of up to `index_top` tokens see everything, and are not rated.

Letters: b tokens of a pool, m pools; others as in sparse_attention.py.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.distributed.sharding import constrain
from jaxrl_llm.models import quantize
from jaxrl_llm.models.layers import Linear
from jaxrl_llm.models.mixers.attention import AttentionArrays
from jaxrl_llm.models.mixers.latent_attention import LatentAttention
from jaxrl_llm.models.mixers.mixer import AttentionInputs, DecodeInputs, Passing
from jaxrl_llm.models.mixers.query_blocks import NONE, Places, best, over_queries, tokens_of, with_latest
from jaxrl_llm.models.mixers.sparse_attention import Indexer, SparseCache, SparseLatentAttention, rated


class PromptPools(NamedTuple):
    """The cache of prompts: their latents, the keys of their pools, and what pools are made of, of their last tokens.

    Rows have a `SparseCache`, whose keys are what pools are made of.
    """

    latents: jax.Array
    pools: jax.Array  # [...,G,P/b,e], those that the prompt completes before the others
    latest: jax.Array  # [...,G,b-1,2e]


class PoolIndexer(Indexer):
    """The heads that rate pools, as an `Indexer` rates tokens."""

    def __init__(self, config, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.gate = Linear(config.width, config.index_head_dim, config, rngs)
        self.places = nnx.Param(jnp.zeros((config.index_pool, config.index_head_dim), config.param_dtype))

    def __call__(self, x, residual, positions, arrays: AttentionArrays):
        """As an `Indexer` returns them, where keys `[...,t,2e]` are what those of pools are made of: keys and gates."""
        q, keys, weights = super().__call__(x, residual, positions, arrays)
        return q, jnp.concatenate([keys, jax.lax.stop_gradient(self.gate(x))], axis=-1), weights

    def pooled(self, tokens, dtype) -> jax.Array:
        """The keys `[...,m,e]` of pools, made of those of their tokens `[...,m*b,2e]`."""
        size = self.config.index_pool
        tokens = quantize.widened(tokens, jnp.float32).reshape(*tokens.shape[:-2], -1, size, tokens.shape[-1])
        keys, gates = jnp.split(tokens, 2, axis=-1)
        shares = jax.nn.softmax(gates + self.places[...].astype(jnp.float32), axis=-2)
        return jax.lax.stop_gradient((shares * keys).sum(-2)).astype(dtype)


class PooledLatentAttention(SparseLatentAttention):
    """Causal attention of H heads to the latents of the pools that an indexer chooses. A `Mixer`."""

    shares_prefixes = False  # of whose pools some would be part of a prefix and part of the row
    own_first = ("pools",)
    untrained = (*SparseLatentAttention.untrained, "indexer/gate/kernel", "indexer/places")
    indexer_class = PoolIndexer
    indexer: PoolIndexer

    @staticmethod
    def rating(config, tokens, pairs):
        """The operations of the indexer, which rates pools."""
        return SparseLatentAttention.rating(config, tokens, pairs / config.index_pool)

    def prefill(self, x, inputs: AttentionInputs, arrays: AttentionArrays) -> tuple[jax.Array, Passing]:
        """As `SparseLatentAttention.prefill`, with the caches of prompts."""
        out, passing = super().prefill(x, inputs, arrays)
        latents, keys = passing.cache
        pools, _ = self._pools_of_rows(keys, inputs, x.dtype)
        latest = jnp.pad(keys, ((0, 0), (self.config.index_pool - 1, 0), (0, 0)))[:, keys.shape[1] :]
        return out, passing._replace(cache=PromptPools(latents, pools, constrain(latest, "rows", None, None)))

    @staticmethod
    def empty_cache(prompt: PromptPools, rows: int, size: int) -> SparseCache:
        """Empty latents and keys of rows, as `LatentAttention.empty_cache` makes them."""
        return SparseCache(*LatentAttention.empty_cache((prompt.latents, prompt.latest), rows, size))

    def _pools_of_rows(self, keys, inputs: AttentionInputs, dtype) -> tuple[jax.Array, jax.Array]:
        """The keys `[N,m,e]` of the pools of whole rows, and where their last tokens are `[N,m]`; T where there are no
        more. Documents lie in one piece each."""
        size, length = self.config.index_pool, keys.shape[1]
        last = (inputs.segments != 0) & (inputs.positions % size == size - 1)
        ends = jnp.sort(jnp.where(last, jnp.arange(length), length), axis=1)[:, : length // size]
        places = (ends[..., None] + jnp.arange(1 - size, 1)).reshape(len(ends), -1, 1)
        pools = self.indexer.pooled(jnp.take_along_axis(keys, places, axis=1, mode="clip"), dtype)
        return constrain(pools, "rows", None, None), ends

    def _chosen_of_rows(self, q, keys, weights, inputs: AttentionInputs) -> jax.Array:
        size, length = self.config.index_pool, keys.shape[1]
        pools, ends = self._pools_of_rows(keys, inputs, q.dtype)
        owners = jnp.take_along_axis(inputs.segments, ends, axis=1, mode="fill", fill_value=0)

        def chosen(block, end: int):
            places, q, weights = block
            count = end // size  # pools that may be complete there
            seen = (places.segments[:, :, None] == owners[:, None, :count]) & (owners != 0)[:, None, :count]
            seen &= ends[:, None, :count] <= places.index[:, :, None]
            kept = self._best(rated("nti,nmi->ntm", q, pools[:, :count], weights), seen)
            last = jnp.take_along_axis(ends[:, None], kept, axis=-1, mode="fill", fill_value=NONE)
            first = jnp.where(kept < NONE, last + 1 - size, NONE)
            own = jnp.where(places.segments != 0, places.positions, -1)
            return tokens_of(with_latest(first, places.index, own, size), places.index, size)

        return over_queries(chosen, (Places.of(inputs), q, weights), 4 * max(self.config.index_top, length // size))

    def _chosen_of_next(self, q, prompt: PromptPools, row, weights, inputs: DecodeInputs) -> jax.Array:
        size, (groups, rows, length, _) = self.config.index_pool, row.shape
        before, in_prompt = inputs.prompt_mask.shape[1], prompt.pools.shape[1]
        count = inputs.prompt_mask.sum(-1)
        whole, rest = count // size, count % size  # pools that the prompt completes, and its tokens behind them
        latest = jnp.broadcast_to(prompt.latest[:, None], (groups, rows, *prompt.latest.shape[1:]))
        pools = (size - 1 + length) // size
        places = (size - 1 - rest)[:, None] + jnp.arange(pools * size)
        tokens = jnp.concatenate([latest, row], axis=2)
        tokens = jnp.take_along_axis(tokens, places[:, None, :, None], axis=2, mode="clip")
        own_pools = self.indexer.pooled(tokens, q.dtype)
        scores = (
            rated("grwi,gmi->grwm", q, prompt.pools, weights),
            rated("grwi,grmi->grwm", q, own_pools, weights),
        )
        # Tokens and pools by their numbers in the document, those of prompts before those of rows.
        number = jnp.broadcast_to(jnp.arange(in_prompt), (groups, in_prompt))
        number = jnp.where(number < whole[:, None], number, length + before)  # the row's own
        number = jnp.concatenate([number, whole[:, None] + jnp.arange(pools)], axis=1)[:, None, None]
        own = count[:, None, None] + inputs.length[:, :, None] + jnp.arange(q.shape[2])  # [G,R,W]
        kept = self._best(jnp.concatenate(scores, axis=-1), (number + 1) * size <= own[..., None] + 1)
        first = size * jnp.take_along_axis(number, kept, axis=-1, mode="fill", fill_value=0)
        padding = (before - count)[:, None, None]  # before a prompt's tokens
        first = jnp.where(kept < NONE, padding[..., None] + first, NONE)
        return tokens_of(with_latest(first, padding + own, own, size), padding + own, size)

    def _best(self, scores, seen) -> jax.Array:
        """The indices of the best pools that are `seen`, `[...,m]` as both are."""
        return best(scores, seen, self.config.index_top // self.config.index_pool)
