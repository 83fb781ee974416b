"""Convolutions over the latest tokens of a row: what they read, in whole rows and of cached tokens, and as a mixer.

Letters: K tokens that a convolution sees, the current one included; m numbers of a token, each convolved by itself.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.sharding import constrain
from jaxrl_llm.models import quantize
from jaxrl_llm.models.layers import Linear
from jaxrl_llm.models.mixers.mixer import AttentionInputs, DecodeInputs, NoMixer

AT_ONCE = 64  # the most tokens of a row that one decode step takes
NO_SEGMENT = -1  # of tokens before the row


def latest_in_rows(x, segments, size: int) -> tuple[list[jax.Array], jax.Array]:
    """The K = `size` tokens that each of x `[N,T,m]` sees, as K arrays `[N,T,m]`, its own the last, and the last K - 1
    tokens of rows `[N,K-1,m]`. Tokens of another segment than its own are zeros."""
    before = jnp.pad(x, ((0, 0), (size - 1, 0), (0, 0)))
    ids = jnp.pad(segments, ((0, 0), (size - 1, 0)), constant_values=NO_SEGMENT)
    length = x.shape[1]
    # One array a tap, and no window of all: that would be K times as large as what is convolved.
    latest = [
        jnp.where((ids[:, tap : tap + length] == segments)[..., None], before[:, tap : tap + length], 0)
        for tap in range(size)
    ]
    tail = jnp.where((ids[:, -size + 1 :] == segments[:, -1:])[..., None], before[:, -size + 1 :], 0)
    return latest, constrain(tail, "rows", None, None)


def latest_at(places, recent, tail, dtype) -> list[jax.Array]:
    """The K tokens that each token at `places` `[G,R,t]` of rows sees, as K arrays `[G,R,t,m]`, its own the last.

    They are the first m numbers of `recent` `[G,R,S,...]`, which has token i at i % S; before the row lie the last
    tokens of its prompt, `tail` `[G,K-1,m]`.
    """
    before, numbers = tail.shape[-2:]
    latest = []
    for tap in range(-before, 1):
        index = places + tap
        own = jnp.take_along_axis(recent, (index % recent.shape[2])[..., None], axis=2)[..., :numbers]
        in_prompt = jnp.clip(index + before, 0, before - 1)[..., None]
        of_prompt = jnp.take_along_axis(quantize.widened(tail, dtype)[:, None], in_prompt, axis=2)
        latest.append(jnp.where(index[..., None] < 0, of_prompt, quantize.widened(own, dtype)))
    return latest


def convolved(latest, weights) -> jax.Array:
    """The convolution in fp32, of K arrays `[...,m]` by weights `[m,1,K]`, which are rounded as those are."""
    weights = weights[..., 0, :].astype(latest[0].dtype).astype(jnp.float32)
    total = jnp.zeros((), jnp.float32)
    for tap, array in enumerate(latest):
        total += array.astype(jnp.float32) * weights[:, tap]
    return total


def written(recent, new, length) -> jax.Array:
    """Recent tokens `[G,R,S,m]` with `new` `[G,R,W,m]` from the place `length` `[G,R]` of each row on.

    Raises ConfigError for more of a row than are kept.
    """
    if new.shape[2] > AT_ONCE:
        raise ConfigError(
            f"layers with a convolution decode up to {AT_ONCE} tokens of a row at once, and not {new.shape[2]}"
        )
    places = (length[..., None] + jnp.arange(new.shape[2])) % recent.shape[2]
    return jax.vmap(jax.vmap(lambda row, at, new: row.at[at].set(new)))(
        recent, places, quantize.narrowed(new, recent.dtype)
    )


class Tail(NamedTuple):
    """The cache of prompts: what is convolved of their last tokens."""

    values: jax.Array  # [...,G,K-1,m]; 0 before the prompt


class Recent(NamedTuple):
    """The cache of rows: what is convolved of their latest tokens, enough of them to go back by a step."""

    values: jax.Array  # [...,G,R,S,m] of token i in i % S


class ShortConv(nnx.Module):
    """A gated short convolution (LFM2, arXiv 2511.23404). A `Mixer`.

    It is `out(c * conv(b * v))`, where `b, c, v = into(x)`.
    """

    path = "conv"
    shares_prefixes = False
    layer_arrays = staticmethod(NoMixer.layer_arrays)

    def __init__(self, config, rngs: nnx.Rngs):
        self.config = c = config
        self.into = Linear(c.width, 3 * c.width, c, rngs, c.conv_bias, "into")
        taps = jax.random.normal(rngs.params(), (c.width, 1, c.conv_size), c.param_dtype) * c.init_scale
        self.filter = nnx.Param(taps)
        self.bias = nnx.Param(jnp.zeros((c.width,), c.param_dtype)) if c.conv_bias else None
        self.out = Linear(c.width, c.width, c, rngs, c.conv_bias, "out")

    @staticmethod
    def flops(config, tokens, pairs):
        """The operations of the convolution."""
        return 2.0 * config.conv_size * config.width * tokens

    def prefill(self, x, inputs: AttentionInputs, arrays) -> tuple[jax.Array, Tail]:
        """Output `[N,T,D]`, and the last tokens of rows that are padded on the left."""
        gated, gates = self._gated(x)
        gated, segments = (constrain(a, "rows", *(None,) * (a.ndim - 1)) for a in (gated, inputs.segments))
        latest, tail = latest_in_rows(gated, segments, self.config.conv_size)
        return self._output(latest, gates), Tail(tail)

    def decode(self, x, inputs: DecodeInputs, prompt: Tail, cache: Recent, arrays) -> tuple[jax.Array, Recent]:
        """The next W tokens of each row: output `[G,R*W,D]`, and the row caches with them."""
        length = inputs.length
        gated, gates = (a.reshape(*length.shape, -1, a.shape[-1]) for a in self._gated(x))
        recent = written(cache.values, gated, length)
        places = length[..., None] + jnp.arange(gated.shape[2])
        out = self._output(latest_at(places, recent, prompt.values, x.dtype), gates)
        return out.reshape(x.shape), Recent(constrain(recent, "rows", None, None, None))

    @staticmethod
    def empty_cache(prompt: Tail, rows: int, size: int) -> Recent:
        """The caches of rows, which are as large for any `size`."""
        *lead, before, width = prompt.values.shape
        recent = jnp.zeros((*lead, rows, AT_ONCE + before, width), prompt.values.dtype)
        return Recent(constrain(recent, *(None,) * (len(lead) - 1), "rows", None, None, None))

    @staticmethod
    def grow_cache(cache: Recent, size: int) -> Recent:
        """The row caches, which need no more room."""
        return cache

    def _gated(self, x) -> tuple[jax.Array, jax.Array]:
        """Of x `[...,D]`: what is convolved, and what multiplies that then."""
        before, behind, values = jnp.split(self.into(x), 3, axis=-1)
        return before * values, behind

    def _output(self, latest, gates):
        total = convolved(latest, self.filter[...])
        total = total if self.bias is None else total + self.bias[...].astype(jnp.float32)
        return self.out(total.astype(gates.dtype) * gates)
