"""DeepSeek sparse attention as a mixer (arXiv 2512.02556, section 2.1): latent attention to some of the tokens before.

An indexer of few small heads rates the tokens that a token sees, and it attends to the `index_top` best of them. The
choice has no gradient, so that training keeps the indexer as it is. It may serve the layers behind it too (arXiv
2603.12201). Rows of up to `index_top` tokens see everything, and are not rated; of longer ones the choice is `[...,k]`,
the places of k = `index_top` tokens, query_blocks.NONE where fewer are seen.

Letters: i heads of the indexer, e numbers of each; others as in latent_attention.py.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.distributed.sharding import constrain
from jaxrl_llm.models.layers import LayerNorm, Linear
from jaxrl_llm.models.mixers.attention import AttentionArrays, einsum, write_tokens
from jaxrl_llm.models.mixers.latent_attention import LatentAttention, QueryGrowth
from jaxrl_llm.models.mixers.mixer import AttentionInputs, DecodeInputs, Passing
from jaxrl_llm.models.mixers.query_blocks import NONE, ChoosesTokens, Places, best, filled, over_queries
from jaxrl_llm.models.rope import rotate


class SparseCache(NamedTuple):
    """The latents of tokens, and their keys for the indexer: both as `LatentAttention` has latents."""

    latents: Any  # (): they are those of another layer
    keys: jax.Array


class Indexer(nnx.Module):
    """The heads that rate tokens: `I[t,s] = sum_i w[t,i] relu(q[t,i] . k[s])`, all of it in fp32.

    Its queries are made of what latent queries are made of or, where there are none, of hidden states behind a norm.
    """

    def __init__(self, config, rngs: nnx.Rngs):
        self.config = c = config
        eps = c.norm_eps if c.index_norm_eps is None else c.index_norm_eps
        self.q_norm = None if c.query_rank else LayerNorm(c.width, eps, c.param_dtype)
        self.q = Linear(c.query_rank or c.width, c.index_heads * c.index_head_dim, c, rngs)
        self.growth = QueryGrowth(c.index_heads, c.param_dtype) if c.query_growth_learned else None
        self.k = Linear(c.width, c.index_head_dim, c, rngs)
        self.k_norm = LayerNorm(c.index_head_dim, eps, c.param_dtype)
        self.proj = Linear(c.width, c.index_heads, c, rngs)

    def __call__(self, x, residual, positions, arrays: AttentionArrays):
        """Queries `[...,t,i,e]` of the `residual` `[...,t,r]` that latent queries are made of (None: of x), keys
        `[...,t,e]` and weights `[...,t,i]` of x."""
        c = self.config

        def turned(a):
            # The last numbers come first, of queries and keys alike: their products stay the same.
            a = jnp.roll(a, c.rotated_size, axis=-1) if c.index_rotates_last else a
            return rotate(a, positions, arrays.inv_freq, arrays.scale, c.index_interleaved)

        q = self.q(residual if self.q_norm is None else self.q_norm(x)).reshape(*x.shape[:-1], c.index_heads, -1)
        q = turned(q if self.growth is None else self.growth(q, positions))
        keys = turned(self.k_norm(self.k(x))[..., None, :])[..., 0, :]
        weights = self.proj(x.astype(jnp.float32)) * (c.index_heads * c.index_head_dim) ** -0.5
        return jax.lax.stop_gradient((q, keys, weights))


class SparseLatentAttention(ChoosesTokens, LatentAttention):
    """Causal attention of H heads to the latents of the tokens that an indexer chooses. A `Mixer`."""

    untrained = tuple(f"indexer/{leaf}" for leaf in (
        "q/kernel", "k/kernel", "k_norm/scale", "k_norm/shift", "proj/kernel", "q_norm/scale", "q_norm/shift",
        "growth/scale", "growth/shift",
    ))  # fmt: skip
    indexer_class: type[Indexer] = Indexer

    def __init__(self, config, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.indexer = self.indexer_class(config, rngs)

    def prefill(self, x, inputs: AttentionInputs, arrays: AttentionArrays) -> tuple[jax.Array, Passing]:
        """Output `[N,T,D]`, the latents `[N,T,c+e]` and the indexer's keys `[N,T,e]`, and what is chosen, `[N,T,k]` or,
        where all tokens are, None."""
        q, keys, weights = self._index(x, inputs.positions, arrays)
        keys, chosen = constrain(keys, "rows", None, None), None
        if x.shape[1] > self.config.index_top:
            chosen = self._chosen_of_rows(q, keys, weights, inputs)
        out, latents = super().prefill(x, inputs, arrays, chosen)
        return out, Passing(SparseCache(latents, keys), latents, chosen=chosen)

    def decode(
        self, x, inputs: DecodeInputs, prompt: SparseCache, cache: SparseCache, arrays: AttentionArrays, chosen=None
    ) -> tuple[jax.Array, Passing]:
        """The next W tokens of each row: output `[G,R*W,D]`, the row's cache with theirs, and what is chosen."""
        groups, rows = inputs.length.shape
        q, new, weights = (
            a.reshape(groups, rows, -1, *a.shape[3:])
            for a in self._index(x[:, :, None], inputs.positions[:, :, None], arrays)
        )
        keys = write_tokens(cache.keys, new[..., None, :], inputs.length, "cjd", sharded=False)
        if inputs.prompt_mask.shape[1] + keys.shape[2] > self.config.index_top:
            chosen = self._chosen_of_next(q, prompt, keys[..., 0, :], weights, inputs)
        out, latents = super().decode(x, inputs, prompt.latents, cache.latents, arrays, chosen)
        return out, Passing(SparseCache(latents, keys), (prompt.latents, latents), chosen=chosen)

    def _index(self, x, positions, arrays: AttentionArrays):
        residual = None
        if self.q_a is not None and self.q_a_norm is not None:
            residual = self.q_a_norm(self.q_a(x))  # XLA computes it once
        return self.indexer(x, residual, positions, arrays)

    def _chosen_of_rows(self, q, keys, weights, inputs: AttentionInputs) -> jax.Array:
        """The tokens `[N,T,k]` that those of whole rows attend to."""
        top = self.config.index_top

        def chosen(block, end: int):
            places, q, weights = block
            seen = places.see(inputs, end)
            if end <= top:
                return filled(jnp.where(seen, jnp.arange(end), NONE), top)
            return best(rated("nti,nsi->nts", q, keys[:, :end], weights), seen, top)

        return over_queries(chosen, (Places.of(inputs), q, weights), 4 * keys.shape[1])

    def _chosen_of_next(self, q, prompt, row, weights, inputs: DecodeInputs) -> jax.Array:
        """The tokens `[G,R,W,k]`, of those of prompt and row `P+S`, that the next tokens attend to, of keys `[G,R,S,e]`
        of the row."""
        scores = [rated("grwi,gsi->grws", q, prompt.keys, weights), rated("grwi,grsi->grws", q, row, weights)]
        place = (inputs.length[:, :, None] + jnp.arange(q.shape[2]))[..., None]
        seen = (inputs.prompt_mask[:, None, None], jnp.arange(row.shape[2]) <= place)
        seen = (jnp.broadcast_to(mask, a.shape) for mask, a in zip(seen, scores, strict=True))
        return best(jnp.concatenate(scores, axis=-1), jnp.concatenate([*seen], axis=-1), self.config.index_top)


class SharedSparseAttention(ChoosesTokens, LatentAttention):
    """Causal attention of H heads to the latents of the tokens that an earlier layer's indexer chooses. A `Mixer`."""

    @staticmethod
    def rating(config, tokens, pairs):
        """None: it is told what to attend to."""
        return 0.0 * pairs

    def prefill(self, x, inputs: AttentionInputs, arrays: AttentionArrays, chosen=None) -> tuple[jax.Array, Any]:
        """Output `[N,T,D]` and the layer's own latents `[N,T,c+e]`."""
        return super().prefill(x, inputs, arrays, inputs.chosen)

    def decode(
        self, x, inputs: DecodeInputs, prompt, cache, arrays: AttentionArrays, chosen=None
    ) -> tuple[jax.Array, Any]:
        """The next W tokens of each row: output `[G,R*W,D]` and the row's latents with theirs."""
        return super().decode(x, inputs, prompt, cache, arrays, inputs.chosen)


class ReadingSparseAttention(SparseLatentAttention):
    """Sparse attention to the latents of an earlier layer, by an indexer of its own. A `Mixer`."""

    projects_latents = False


class ReadingSharedSparseAttention(SharedSparseAttention):
    """Sparse attention to the latents of an earlier layer, and to the tokens that one has chosen. A `Mixer`."""

    projects_latents = False


def rated(dims: str, q, keys, weights) -> jax.Array:
    """The scores `[...,t,s]` of `Indexer`, whose `dims` are those of one head."""

    def add(total, head):
        q, weight = head
        return total + weight[..., None] * jax.nn.relu(einsum(dims, q, keys)), None

    # Head by head: the scores of all of them would be many times the mask.
    shape = jax.eval_shape(lambda: einsum(dims, q[..., 0, :], keys))
    heads = (jnp.moveaxis(q, -2, 0), jnp.moveaxis(weights, -1, 0))
    return jax.lax.scan(add, jnp.zeros(shape.shape, jnp.float32), heads)[0]
