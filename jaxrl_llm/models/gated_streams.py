"""Gated streams (Qwen4-Exp): S streams of hidden states `[N,T,S,D]`, of which mixer and feed-forward read a gated mean.

Another connection than those of hyper_connections.py, whose place in the block it takes. Of the streams X of a token,
and N, each of them normed with scales of its own, side by side one vector n:

    gates   = sigmoid(widen(silu(narrow(n) / S)))
    read    = mean over streams of gates * N
    X       = X + 2 sigmoid(inject(n) / S) x out(read)

The hidden states that the heads read are such a mean of the last streams.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.distributed.sharding import constrain
from jaxrl_llm.models.layers import Linear, RMSNorm, over_rms


class StreamNorm(RMSNorm):
    """An RMS norm of each stream, of `[...,S,D]`, with all scales `[S*D]` in one vector."""

    def __init__(self, config, rngs: nnx.Rngs):
        super().__init__(config.hyper_streams * config.width, config, rngs)

    def __call__(self, x):
        return (over_rms(x, self.eps) * self.factors().reshape(x.shape[-2:])).astype(x.dtype)


class GatedMean(nnx.Module):
    """One hidden state of the streams, and what it was made of."""

    def __init__(self, config, rngs: nnx.Rngs):
        joint = config.hyper_streams * config.width
        self.norm = StreamNorm(config, rngs)
        self.narrow = Linear(joint, config.hyper_rank, config, rngs)
        self.widen = Linear(config.hyper_rank, joint, config, rngs)

    def read(self, streams) -> tuple[jax.Array, jax.Array]:
        """The hidden state `[...,D]` of streams `[...,S,D]`, and these normed, side by side `[...,S*D]`."""
        each = self.norm(streams)
        joint = each.reshape(*streams.shape[:-2], -1)
        gates = jax.nn.sigmoid(self.widen(jax.nn.silu(self.narrow(joint) / streams.shape[-2])))
        return (gates.reshape(streams.shape) * each).mean(-2), joint


class GatedConnection(GatedMean):
    """The weights by which mixer or feed-forward read the streams, and by which their outputs are added to them."""

    def __init__(self, config, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.inject = Linear(config.hyper_streams * config.width, config.hyper_streams, config, rngs)

    def __call__(self, streams) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
        """The input `[...,D]` read of streams `[...,S,D]`, and the function of an output `[...,D]` that returns the
        streams behind it."""
        read, joint = self.read(streams)
        shares = 2 * jax.nn.sigmoid(self.inject(joint) / streams.shape[-2])
        return read, lambda out: streams + shares[..., None] * out[..., None, :]


class GatedStreams(GatedMean):
    """The streams of embeddings, and the hidden states of the last streams."""

    def spread_out(self, x) -> jax.Array:
        """The streams `[N,T,S,D]` of embeddings x `[N,T,D]`, all alike."""
        count = self.narrow.d_in // x.shape[-1]
        streams = jnp.broadcast_to(x[..., None, :], (*x.shape[:-1], count, x.shape[-1]))
        return constrain(streams, "rows", "positions", None, None)

    def gathered(self, streams) -> jax.Array:
        """The hidden states `[N,T,D]` of streams `[N,T,S,D]`."""
        return constrain(self.read(streams)[0], "rows", "positions", None)
