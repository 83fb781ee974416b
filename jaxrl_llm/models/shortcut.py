"""A layer of two halves with experts beside both (shortcut-connected mixture of experts, arXiv 2404.05019, as LongCat
has it, arXiv 2509.01322): a half is a mixer and a dense feed-forward, and the experts read what the first half's
feed-forward reads; their outputs are added behind the second half, which so need not wait for them.

    a = x + mixer1(norm(x))          h = norm(a)          b = a + mlp1(h)
    c = b + mixer2(norm(b))          y = c + mlp2(norm(c)) + experts(h)
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.models.block import Block, normed
from jaxrl_llm.models.layers import FeedForward
from jaxrl_llm.models.mixers.latent_attention import LatentAttention
from jaxrl_llm.models.mixers.mixer import AttentionInputs, DecodeInputs, LayerConfig, Mixer
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.moe import MixtureOfExperts, Routing
from jaxrl_llm.models.tiled_mlp import tiled_mlp


class TwoLatentAttentions(LatentAttention):
    """The mixers of both halves, whose caches are pairs. A `Mixer`."""

    @staticmethod
    def flops(config, tokens, pairs):
        """The operations of both."""
        return 2.0 * LatentAttention.flops(config, tokens, pairs)


class Half(Block):
    """A layer with a dense feed-forward whose inputs others read too."""

    def through(self, x, mix: Callable[[Mixer, jax.Array], tuple[jax.Array, Any]]) -> tuple[jax.Array, jax.Array, Any]:
        """Hidden states after it, what its feed-forward reads, and the cache of `mix(mixer, x)`."""
        mixed, cache = mix(self.mixer, normed(self.input_norm, x))
        x = self._summed(functools.partial(jnp.add, x), mixed, None)
        read = normed(self.post_attention_norm, x)
        assert isinstance(self.mlp, FeedForward)
        out = tiled_mlp(self.mlp, read, self.mlp_tile_tokens)
        return self._summed(functools.partial(jnp.add, x), out, None), read, cache


class ShortcutBlock(nnx.Module):
    """A decoder layer of two halves, with experts beside them. It has the methods of a `Block`."""

    altup = None

    def __init__(self, config: ModelConfig, layer: LayerConfig, rngs: nnx.Rngs):
        half = dataclasses.replace(layer, experts=False)
        self.first, self.second = (Half(config, half, rngs, f"{name}/") for name in ("first", "second"))
        self.mlp = MixtureOfExperts(config.of(layer).adapted_in("mlp/"), rngs)

    def apply(self, x, inputs: AttentionInputs, counted, replayed, arrays) -> tuple[jax.Array, Routing | None, Any]:
        """As that of a `Block`; nothing is passed on."""
        mixes = (lambda mixer, x: mixer.prefill(x, inputs, arrays),) * 2
        x, _, _, routing = self._through(x, mixes, counted, replayed)
        return x, routing, (None, None)

    def prefill(self, x, inputs: AttentionInputs, arrays) -> tuple[jax.Array, tuple[Any, jax.Array | None], Any]:
        """As that of a `Block`, with a pair of caches."""
        mixes = (lambda mixer, x: mixer.prefill(x, inputs, arrays),) * 2
        x, caches, experts, _ = self._through(x, mixes)
        return x, (caches, experts), (None, None)

    def decode(
        self, x, inputs: DecodeInputs, prompt, cache, arrays
    ) -> tuple[jax.Array, tuple[Any, jax.Array | None], Any]:
        """As that of a `Block`, with pairs of caches."""
        mixes = [
            lambda mixer, x, caches=caches: mixer.decode(x, inputs, *caches, arrays)
            for caches in zip(prompt, cache, strict=True)
        ]
        x, caches, experts, _ = self._through(x, mixes)
        return x, (caches, experts), (None, None)

    def finished(self, x, own, streams=None):
        """Hidden states after the layer, to which nothing more is added."""
        return x

    def _through(
        self, x, mixes: Sequence[Callable[[Mixer, jax.Array], tuple[jax.Array, Any]]], counted=None, replayed=None
    ) -> tuple[jax.Array, tuple[Any, Any], jax.Array, Routing | None]:
        """Hidden states after the layer, the caches of both mixers, the experts of each token and the routing."""
        x, read, first = self.first.through(x, mixes[0])
        added, experts, routing = self.mlp(read, counted, replayed)
        x, _, second = self.second.through(x, mixes[1])
        return x + added, (first, second), experts, routing
