"""Hyper-connections (arXiv 2409.19606): S streams of hidden states `[N,T,S,D]` take the place of the residual.

Mixer and feed-forward of a layer read one weighted sum of the streams, and what they give is added to each stream with
a weight of its own. With `hyper_sinkhorn` the streams are mixed by a doubly stochastic matrix too, so that mixing makes
nothing larger (manifold-constrained, arXiv 2512.24880: DeepSeek-V4, GLM-5.3); without they are added to as they are
(independent: Hy4). Of the streams X of a token, with `S + S (+ S^2)` outputs of one map, in fp32:

    u, v, W   = scale * proj(vec(X)) / rms(vec(X)) + shift, a scale for each of the three
    read      = (sigmoid(u) + eps) @ X
    written   = hyper_scale * sigmoid(v), and eps where streams are not mixed
    X         = sinkhorn(W)^T @ X + written x out(read)

`ModelConfig.hyper_streams` switches it on. The parameters of a layer are in `mixer_streams` and `mlp_streams` (`proj`,
`scale`, `shift`), those that make one hidden state of the last streams in `streams` of the model.

A block asks two things of any connection: called with the streams it returns what is read, and the function that adds
an output to them. The model asks of its `streams` that they be spread out and gathered. So another kind of streams is
another pair of such modules.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl_llm.distributed.sharding import constrain
from jaxrl_llm.models.layers import Linear


class HyperWeights(nnx.Module):
    """The numbers that weigh the streams of a token, in groups of `sizes`, of which each has a scale.

    Its parameters are fp32 in any net, and in exports of 16 bits too, as in transformers.
    """

    def __init__(self, config, rngs: nnx.Rngs, *sizes: int):
        self.sizes, self.norm_eps = sizes, config.norm_eps
        wide = dataclasses.replace(config, param_dtype="float32")
        self.proj = Linear(config.hyper_streams * config.width, sum(sizes), wide, rngs)
        self.scale, self.shift = nnx.Param(jnp.ones((len(sizes),))), nnx.Param(jnp.zeros((sum(sizes),)))

    def __call__(self, streams) -> list[jax.Array]:
        """The groups `[...,size]` in fp32, of streams `[...,S,D]`."""
        flat = streams.astype(jnp.float32).reshape(*streams.shape[:-2], -1)
        # A sum is divided by the rms behind the map, which so reads the streams as they are.
        inverse = jax.lax.rsqrt(jnp.square(flat).mean(-1, keepdims=True) + self.norm_eps)
        scale = jnp.repeat(self.scale[...], np.array(self.sizes), total_repeat_length=sum(self.sizes))
        return jnp.split(self.proj(flat) * inverse * scale + self.shift[...], np.cumsum(self.sizes)[:-1], axis=-1)


class HyperConnection(nnx.Module):
    """The weights by which mixer or feed-forward read the streams, and by which their outputs are added to these."""

    def __init__(self, config, rngs: nnx.Rngs):
        count, self.steps = config.hyper_streams, config.hyper_sinkhorn
        self.eps, self.most = config.hyper_eps, config.hyper_scale
        self.weights = HyperWeights(config, rngs, count, count, *([count**2] if self.steps else []))

    def __call__(self, streams) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
        """The input `[...,D]` read of streams `[...,S,D]`, and the function of an output `[...,D]` that returns the
        streams behind it."""
        read, written, *mixing = self.weights(streams)
        written = self.most * jax.nn.sigmoid(written) + (0.0 if mixing else self.eps)

        def added(out) -> jax.Array:
            kept = streams.astype(jnp.float32)
            if mixing:
                # The streams first: of dimensions as small as these as the last ones TPUs would pad each to a tile.
                logits = jnp.moveaxis(mixing[0], -1, 0).reshape(*streams.shape[-2:-1] * 2, *streams.shape[:-2])
                mix = jnp.moveaxis(sinkhorn(logits, self.steps, self.eps), (0, 1), (-2, -1))
                kept = (mix[..., None] * kept[..., None, :]).sum(-3)
            return (kept + written[..., None] * out.astype(jnp.float32)[..., None, :]).astype(streams.dtype)

        return weighed(read, streams, self.eps), added


class HyperStreams(nnx.Module):
    """The streams of embeddings, and the hidden states of the last streams: a sum of theirs that is weighted as what
    layers read is, or with the `hyper_head` "mean" their mean."""

    def __init__(self, config, rngs: nnx.Rngs):
        self.count, self.eps = config.hyper_streams, config.hyper_eps
        self.weights = None if config.hyper_head == "mean" else HyperWeights(config, rngs, config.hyper_streams)

    def spread_out(self, x) -> jax.Array:
        """The streams `[N,T,S,D]` of embeddings x `[N,T,D]`, all alike."""
        streams = jnp.broadcast_to(x[..., None, :], (*x.shape[:-1], self.count, x.shape[-1]))
        return constrain(streams, "rows", "positions", None, None)

    def gathered(self, streams) -> jax.Array:
        """The hidden states `[N,T,D]` of streams `[N,T,S,D]`."""
        if self.weights is None:
            x = streams.astype(jnp.float32).mean(-2).astype(streams.dtype)
        else:
            x = weighed(self.weights(streams)[0], streams, self.eps)
        return constrain(x, "rows", "positions", None)


def weighed(weights, streams, eps: float) -> jax.Array:
    """The sum `[...,D]` of streams `[...,S,D]`, times the sigmoids of the weights `[...,S]` and eps."""
    shares = jax.nn.sigmoid(weights) + eps
    return (shares[..., None] * streams.astype(jnp.float32)).sum(-2).astype(streams.dtype)


def sinkhorn(logits, steps: int, eps: float) -> jax.Array:
    """The matrices `[S,S,...]` of these logits, positive, whose rows and columns are brought to sums of 1 in turn."""

    def over_sums(x, axis: int):
        return x / (x.sum(axis, keepdims=True) + eps)

    matrices = over_sums(jax.nn.softmax(logits, axis=1) + eps, 0)
    # A loop, which is differentiated as a scan: unrolled it would be most of the program of a layer.
    return jax.lax.fori_loop(1, steps, lambda _, x: over_sums(over_sums(x, 1), 0), matrices)
