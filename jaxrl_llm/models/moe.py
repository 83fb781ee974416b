"""Mixtures of experts: a router sends each token to a few of many feed-forward parts. No token is ever dropped.

Arrays: M tokens, E experts, k experts a token.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.models.layers import ACTIVATIONS, Linear
from jaxrl_llm.sharding import constrain


class Routing(NamedTuple):
    """What the router did with the tokens that are no padding; sums over layers add up."""

    counts: jax.Array  # [E] tokens sent to each expert
    probabilities: jax.Array  # [E] sums of the router's probabilities
    tokens: jax.Array  # [] how many


def balance_loss(routing: Routing):
    """How unevenly experts are used: k when even, up to E; the auxiliary loss of arXiv 2101.03961, eq. 4 to 6.

    `E x sum_e (share of tokens sent to e) x (mean probability of e)`, over the tokens of all layers together, in fp32.
    Its gradient flows through the probabilities. 0 where there are no tokens.
    """
    tokens = jnp.maximum(routing.tokens, 1.0)
    return routing.counts.size * jnp.sum(routing.counts / tokens * (routing.probabilities / tokens))


class Experts(nnx.Module):
    """The stacked feed-forward parts: gate and up `[E,D,F]`, down `[E,F,D]`."""

    def __init__(self, config, rngs: nnx.Rngs):
        self.gate, self.up = (_Kernels(config.experts, config.width, config.expert_ffn, config, rngs) for _ in "gu")
        self.down = _Kernels(config.experts, config.expert_ffn, config.width, config, rngs)
        self.activation = ACTIVATIONS[config.activation]

    def __call__(self, x, weights, chosen):
        """`sum_i weights_i * expert_{chosen_i}(x)` `[M,D]` of tokens x `[M,D]`; weights and chosen `[M,k]`.

        XLA has grouped matrix products on accelerators; on CPU they would be computed for every expert anyway, and
        then computing all experts for each token once is k times less work.
        """
        function = self.dense if jax.default_backend() == "cpu" else self.grouped
        return function(x, weights, chosen)

    def dense(self, x, weights, chosen):
        """All experts for all tokens, weighed: the same sum."""
        experts = self.gate.kernel.shape[0]
        share = jnp.einsum("mk,mke->me", weights, jax.nn.one_hot(chosen, experts, dtype=weights.dtype))
        gate, up = (jnp.einsum("md,edf->emf", x, part.value(x.dtype)) for part in (self.gate, self.up))
        hidden = self.activation(gate) * up * share.T[..., None].astype(x.dtype)
        return jnp.einsum("emf,efd->md", hidden, self.down.value(x.dtype))

    def grouped(self, x, weights, chosen):
        """Each token's own experts only: token copies are sorted by expert and multiplied group by group."""
        k = chosen.shape[-1]
        order = jnp.argsort(chosen.reshape(-1), stable=True)
        sizes = jnp.bincount(chosen.reshape(-1), length=self.gate.kernel.shape[0]).astype(jnp.int32)
        product = functools.partial(jax.lax.ragged_dot, group_sizes=sizes)
        copies = x[order // k]
        hidden = self.activation(product(copies, self.gate.value(x.dtype))) * product(copies, self.up.value(x.dtype))
        out = product(constrain(hidden, "rows", "ffn"), self.down.value(x.dtype))
        out = out * weights.reshape(-1)[order][:, None].astype(x.dtype)
        return jnp.zeros_like(x).at[order // k].add(out)


class _Kernels(nnx.Module):
    def __init__(self, experts: int, d_in: int, d_out: int, config, rngs: nnx.Rngs):
        shape = (experts, d_in, d_out)
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), shape, config.param_dtype) * config.init_scale)

    def value(self, dtype):
        return self.kernel[...].astype(dtype)


class MixtureOfExperts(nnx.Module):
    """A feed-forward layer of E experts, of which each token uses the k with the largest router probabilities.

    Their outputs are weighed by the probabilities, which sum to 1 over the chosen ones with `normalize_top_k`.
    """

    def __init__(self, config, rngs: nnx.Rngs):
        self.config = config
        self.router = Linear(config.width, config.experts, config, rngs)
        self.experts = Experts(config, rngs)

    def __call__(self, x, real=None):
        """Output `[...,D]` of x `[...,D]` and, given which tokens are `real` `[...]` (no padding), the `Routing`."""
        c = self.config
        flat = x.reshape(-1, x.shape[-1])
        probabilities = jax.nn.softmax(self._route(flat).astype(jnp.float32), axis=-1)
        weights, chosen = jax.lax.top_k(probabilities, c.experts_per_token)
        if c.normalize_top_k:
            weights = weights / weights.sum(-1, keepdims=True)
        out = self.experts(flat, weights, chosen).reshape(x.shape)
        if real is None:
            return out, None
        live = real.reshape(-1, 1).astype(jnp.float32)
        used = (jax.nn.one_hot(chosen, c.experts, dtype=jnp.float32) * live[..., None]).sum((0, 1))
        return out, Routing(used, (probabilities * live).sum(0), live.sum())

    def _route(self, x):
        if not self.config.freeze_router:
            return self.router(x)
        return x @ jax.lax.stop_gradient(self.router.kernel[...]).astype(x.dtype)
