"""Kimi delta attention as a mixer (arXiv 2510.26692): a gated delta net whose states decay by each number of a key.

`S <- diag(exp(g)) S`, then `S <- S + k (beta (v - k S))`, and the token's output is `q S / sqrt(d)`, with g `[d]` for
each head: of inputs a it is `-exp(A) softplus(a)` or, with a `delta_floor`, `delta_floor sigmoid(exp(A) a)`. The
letters are those of delta_net.py.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.models.layers import Linear
from jaxrl_llm.models.mixers.delta_net import CHUNK, ApartDeltaNet, Chunk, apart
from jaxrl_llm.models.mixers.triangular import solved

BLOCK = 16  # tokens whose decays of each other are formed one after another


def within_chunks(q, k, v, g, beta, segments, before) -> Chunk:
    """The chunks of q, k `[...,t,h,d]`, v `[...,t,h,r,v]`, g `[...,t,h,r,d]`, beta `[...,t,h,r]`, segments `[...,t]`.

    As `delta_net.within_chunks`, with decays of each number of a key. That of s at t is a product of two factors: what
    is left of s before the block that t is in, and of that at t. Neither is above 1, whatever the decays. Only in a
    block of 16 tokens each pair has its own. A log decay is a sum over the tokens between, never a difference of sums
    from the first token, which after fast decays would have lost the digits of slow ones.
    """
    q, k = (jnp.moveaxis(a, -3, -2)[..., None, :, :] for a in (q, k))  # [...,h,1,t,d]
    v, g, beta = jnp.moveaxis(v, -4, -2), jnp.moveaxis(g, -4, -2), jnp.moveaxis(beta, -3, -1)  # [...,h,r,t,...]
    length = g.shape[-2]
    same = (segments[..., :, None] == segments[..., None, :])[..., None, None, :, :]
    causal, later = (jnp.tril(jnp.ones((length,) * 2, bool), -first) for first in (0, 1))
    of_state = (segments == before[..., None])[..., None, None, :, None]
    from_state = jnp.where(of_state, jnp.exp(jnp.cumsum(g, axis=-2)), 0)
    to_last = jnp.where(same[..., -1, :, None], jnp.exp(behind(g)), 0)
    keys, among = decayed((k, q), k, g)
    wanted = jnp.concatenate([v, from_state * k], axis=-1) * beta[..., None]
    lower = jnp.where(later & same, keys, 0) * beta[..., None]
    own, taken = jnp.split(solved(lower, wanted), [v.shape[-1]], axis=-1)
    reads = jnp.concatenate([taken, from_state * q], axis=-2)
    return Chunk(own, reads, jnp.where(causal & same, among, 0), from_state[..., -1, :], to_last * k)


def behind(g) -> jax.Array:
    """The sums of g `[...,t,d]` over the tokens behind each."""
    return jax.lax.cumsum(jnp.pad(g[..., 1:, :], (*((0, 0),) * (g.ndim - 2), (0, 1), (0, 0))), g.ndim - 2, reverse=True)


def decayed(reads, keys, g) -> list[jax.Array]:
    """`sum_d read_td keys_sd exp(g_(s+1)d + ... + g_td)` `[...,t,s]` for s up to t; for other s it means nothing.

    Of each of the reads `[...,t,d]`, keys and log decays g `[...,t,d]`.
    """
    length = g.shape[-2]
    size = min(BLOCK, length)
    blocks = -(-length // size)

    def split(x):  # [...,n,b,d]
        x = jnp.pad(x, (*((0, 0),) * (x.ndim - 2), (0, blocks * size - length), (0, 0)))
        return x.reshape(*x.shape[:-2], blocks, size, x.shape[-1])

    of_reads, of_keys, of_g = [split(read) for read in reads], split(keys), split(g)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def column(_, token):
        """Of one token s of every block: all pairs at once would be b arrays as large as the keys."""
        s, key = token
        later = jnp.arange(size)[:, None] > s
        right = key[..., None, :] * jnp.exp(jnp.cumsum(jnp.where(later, of_g, 0), axis=-2))
        return None, [(read * right).sum(-1) for read in of_reads]

    tokens = jnp.arange(size), jnp.moveaxis(of_keys, -2, 0)
    within = [jnp.moveaxis(x, 0, -1) for x in jax.lax.scan(column, None, tokens, unroll=min(size, 4))[1]]  # [...,n,b,b]
    if blocks == 1:
        return [x[..., 0, :, :] for x in within]
    # What is left of token s at the end of its block m, and of that after the blocks between m and n.
    n, m, other = jnp.ix_(*[jnp.arange(blocks)] * 3)
    between = (m < other) & (other < n)
    passed = jnp.where(between[..., None], of_g.sum(-2)[..., None, None, :, :], 0).sum(-2)  # [...,n,m,d]
    left = (of_keys * jnp.exp(behind(of_g)))[..., None, :, :, :] * jnp.exp(passed)[..., None, :]  # [...,n,m,b,d]
    left = left.reshape(*left.shape[:-3], -1, left.shape[-1])  # [...,n,s,d]
    is_own = jnp.arange(blocks * size) // size == jnp.arange(blocks)[:, None, None]

    def whole(read, own):
        across = jnp.einsum("...ntd,...nsd->...nts", read * jnp.exp(jnp.cumsum(of_g, axis=-2)), left)
        found = jnp.where(is_own, jnp.tile(own, blocks), across)
        return found.reshape(*found.shape[:-3], -1, blocks * size)[..., :length, :length]

    return [whole(read, own) for read, own in zip(of_reads, within, strict=True)]


class KimiDelta(ApartDeltaNet):
    """Kimi delta attention with short convolutions before it and a gated norm behind. A `Mixer`.

    The inputs of g, and the gates, come of maps of low rank.
    """

    norm_eps = None
    gate = staticmethod(jax.nn.sigmoid)
    within = staticmethod(within_chunks)
    chunk = CHUNK  # longer ones have more blocks, of which each has its own decays of all keys

    def __init__(self, config, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        c, heads = config, config.delta_value_heads
        decays = jax.random.uniform(rngs.params(), (1, 1, heads, 1), jnp.float32, 1.0, 16.0)
        self.log_decay = nnx.Param(jnp.log(decays).astype(c.param_dtype))
        self.step_bias = nnx.Param(jnp.ones((heads * c.delta_key_dim,), c.param_dtype))

    @staticmethod
    def inputs(heads: int, values: int, size: int) -> int:
        """The numbers of a token that beta and g are made of."""
        return heads * values * (1 + size)

    @staticmethod
    def kept_size(size: int) -> int:
        """The decays of a head: one for each number of a key."""
        return size

    def _add_projections(self, values: int, rngs: nnx.Rngs) -> None:
        c = self.config
        decays = c.delta_value_heads * c.delta_key_dim
        self._add_queries_keys_values(values, rngs)
        self.b = Linear(c.width, c.delta_value_heads, c, rngs, name="b")
        self.f_a = Linear(c.width, c.delta_value_dim, c, rngs, name="f_a")
        self.f_b = Linear(c.delta_value_dim, decays, c, rngs, name="f_b")
        self.g_a = Linear(c.width, c.delta_value_dim, c, rngs, name="g_a")
        self.g_b = Linear(c.delta_value_dim, values, c, rngs, name="g_b")

    def _project(self, x):
        """Of x `[...,D]`: what is convolved `[...,m]`, the gates z `[...,h,1,v]`, inputs of beta and g `[...,h+hd]`."""
        c = self.config
        z = self.g_b(self.g_a(apart(x))).reshape(*x.shape[:-1], c.delta_key_heads, -1, c.delta_value_dim)
        ba = jnp.concatenate([self.b(apart(x)), self.f_b(self.f_a(apart(x)))], axis=-1)
        return self._mixed(x), z, ba

    def _heads(self, latest, ba):
        """Queries and keys `[...,h,d]`, values `[...,h,1,v]`, log decays g `[...,h,1,d]`, beta `[...,h,1]`, in fp32."""
        c = self.config
        h, r, d = c.delta_key_heads, c.delta_value_heads // c.delta_key_heads, c.delta_key_dim
        b, a = jnp.split(ba.astype(jnp.float32), [h * r], axis=-1)
        a = (a + self.step_bias[...].astype(jnp.float32)).reshape(*a.shape[:-1], h, r, d)
        rate = jnp.exp(self.log_decay[...].astype(jnp.float32)).reshape(h, r, 1)
        g = -rate * jax.nn.softplus(a) if c.delta_floor is None else c.delta_floor * jax.nn.sigmoid(rate * a)
        return *self._queries_keys_values(latest), g, jax.nn.sigmoid(b).reshape(*b.shape[:-1], h, r)


class FlatKimiDelta(KimiDelta):
    """Kimi delta attention whose files have the rates of decay in one dimension (GLM-5.3)."""

    def __init__(self, config, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.log_decay = nnx.Param(self.log_decay[...].reshape(-1))


class WideKimiDelta(FlatKimiDelta):
    """Kimi delta attention whose g and gates come of maps of full rank (Ling 3)."""

    def _add_projections(self, values: int, rngs: nnx.Rngs) -> None:
        c = self.config
        self._add_queries_keys_values(values, rngs)
        self.b = Linear(c.width, c.delta_value_heads, c, rngs, name="b")
        self.f = Linear(c.width, c.delta_value_heads * c.delta_key_dim, c, rngs, name="f")
        self.z = Linear(c.width, values, c, rngs, name="z")

    def _project(self, x):
        z = self.z(x).reshape(*x.shape[:-1], self.config.delta_key_heads, -1, self.config.delta_value_dim)
        return self._mixed(x), z, jnp.concatenate([self.b(apart(x)), self.f(x)], axis=-1)
