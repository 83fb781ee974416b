"""Alternating updates (AltUp, arXiv 2301.13310) and learned augmented residuals (Laurel, arXiv 2411.07501), which the
layers of Gemma 3n have.

Hidden states between layers are S streams `[N,T,S,D]`. A layer predicts all of them, reads and writes the first alone,
and corrects all by what it changed there.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.distributed.sharding import constrain
from jaxrl_llm.models.layers import Linear, RMSNorm

LEAST_SQUARE = 1e-5  # of the numbers that are scaled, on average


class AltUp(nnx.Module):
    """The prediction of a layer's streams, and their correction."""

    def __init__(self, config, rngs: nnx.Rngs):
        streams, self.width = config.altup_streams, config.width
        self.norm = RMSNorm(config.width, config, rngs)
        self.modality = Linear(config.width, streams, config, rngs)
        self.prediction = Linear(streams, streams**2, config, rngs)
        self.correction = Linear(streams, streams, config, rngs)
        self.scale = nnx.Param(jnp.zeros((config.width,), config.param_dtype))

    def predicted(self, x) -> jax.Array:
        """The streams x `[N,T,S,D]`, each with a mix of all added, whose shares depend on the first."""
        shares = self.prediction(self._modalities(x[..., 0, :])).reshape(*x.shape[:-1], -1)
        return x + jnp.einsum("...jk,...kd->...jd", shares, x)

    def corrected(self, predicted, x, added) -> jax.Array:
        """The predicted streams, of which the first is x `[N,T,D]` by now, each with a share of the change; all but the
        first with `added(first * scale)` `[N,T,D]` too."""
        shares = self.correction(self._modalities(x)) + 1
        streams = predicted + shares[..., None] * (x - predicted[..., 0, :])[..., None, :]
        first = streams[..., :1, :]
        extra = added(first[..., 0, :] * self.scale[...].astype(x.dtype))
        streams = jnp.concatenate([first, streams[..., 1:, :] + extra[..., None, :]], axis=-2)
        return constrain(streams, "rows", "positions", None, None)

    def _modalities(self, x):
        return jnp.tanh(self.modality(self.norm(x) / self.width).astype(jnp.float32)).astype(x.dtype)


class Laurel(nnx.Module):
    """`x + norm(right(left(x)))`, a residual by a map of few numbers."""

    def __init__(self, config, rngs: nnx.Rngs):
        self.left = Linear(config.width, config.laurel_rank, config, rngs)
        self.right = Linear(config.laurel_rank, config.width, config, rngs)
        self.norm = RMSNorm(config.width, config, rngs)

    def __call__(self, x):
        return x + self.norm(self.right(self.left(x)))


class Streams(nnx.Module):
    """The streams of embeddings, and the hidden states of streams: maps `[S-1,D,D]` of all but the first, whose outputs
    are scaled to the rms of the first."""

    def __init__(self, config, rngs: nnx.Rngs):
        shape = (config.altup_streams - 1, config.width, config.width)
        self.spread, self.gather = (
            nnx.Dict(kernel=nnx.Param(jax.random.normal(rngs.params(), shape, config.param_dtype) * config.init_scale))
            for _ in range(2)
        )

    def spread_out(self, x) -> jax.Array:
        """The streams `[N,T,S,D]` of embeddings x `[N,T,D]`."""
        others = jnp.einsum("...d,sdk->...sk", x, self.spread["kernel"][...].astype(x.dtype))
        streams = jnp.concatenate([x[..., None, :], _as_large(others, x)], axis=-2)
        return constrain(streams, "rows", "positions", None, None)

    def gathered(self, x) -> jax.Array:
        """The mean `[N,T,D]` of the streams x `[N,T,S,D]`."""
        first = x[..., 0, :]
        others = jnp.einsum("...sd,sdk->...sk", x[..., 1:, :], self.gather["kernel"][...].astype(x.dtype))
        mean = (first + _as_large(others, first).sum(axis=-2)) / x.shape[-2]
        return constrain(mean, "rows", "positions", None)


def _as_large(others, x) -> jax.Array:
    """The streams `[N,T,S-1,D]`, each with the rms of x `[N,T,D]`."""
    square, own = (jnp.square(a.astype(jnp.float32)).mean(-1, keepdims=True) for a in (x, others))
    # Of embeddings that are all 0, as that of a padding token may be, the root has no gradient.
    ratio = jnp.sqrt(jnp.maximum(square, 1e-30))[..., None, :] * jax.lax.rsqrt(jnp.maximum(own, LEAST_SQUARE))
    return (others * ratio).astype(x.dtype)
