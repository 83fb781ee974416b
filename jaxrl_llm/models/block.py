"""A decoder layer: a mixer and a feed-forward, with norms before or behind them, and what stands beside."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.distributed.sharding import constrain
from jaxrl_llm.models.altup import AltUp, Laurel
from jaxrl_llm.models.gated_streams import GatedConnection
from jaxrl_llm.models.hyper_connections import HyperConnection
from jaxrl_llm.models.layers import FeedForward, RMSNorm
from jaxrl_llm.models.mixers.mixer import AttentionInputs, DecodeInputs, LayerConfig, Mixer, NoMixer, Passing
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.moe import ExpertsBeside, MixtureOfExperts, Routing
from jaxrl_llm.models.ngrams import NGrams
from jaxrl_llm.models.per_layer import PerLayerInput
from jaxrl_llm.models.tiled_mlp import tiled_mlp


class Block(nnx.Module):
    """A decoder layer: a mixer, then a dense feed-forward or a mixture of experts, each with norms and a residual.

    Of a layer that is a mixer or a feed-forward alone the other part adds nothing, and has no norms.
    """

    def __init__(self, config: ModelConfig, layer: LayerConfig, rngs: nnx.Rngs, path: str = ""):
        """`path` is where its parameters are in those of the layer, when it is a part of one."""
        config = config.of(layer)

        def norm(*kinds: str, of: bool = True):
            return RMSNorm(config.width, config, rngs) if of and config.norms in kinds else None

        def part(name: str) -> ModelConfig:  # both may have a map of one name, whose adapters differ
            return config.adapted_in(f"{path}{name}/")

        mixes = layer.mixer is not NoMixer
        self.residual_scale = config.residual_scale
        self.input_norm = norm("pre", "both", of=mixes)
        self.mixer_path = layer.mixer.path  # the mixer's own name, which parameters and checkpoints have
        setattr(self, layer.mixer.path, layer.mixer(part(layer.mixer.path), rngs))
        self.attention_out_norm = norm("post", "both", "sum", of=mixes)
        beside = layer.experts and config.experts_beside  # which have the norms of their inputs themselves
        self.side_by_side, self.norms_sums = bool(config.parallel_ffn), config.norms == "sum"
        self.post_attention_norm = norm("pre", "both", of=not (beside or layer.bare or config.parallel_ffn == "shared"))
        experts = ExpertsBeside if beside else MixtureOfExperts
        feed_forward = experts if layer.experts else FeedForward
        self.mlp = None if layer.bare else feed_forward(part("mlp"), rngs)
        self.mlp_tile_tokens = config.mlp_tile_tokens
        self.mlp_out_norm = norm("post", "both", "sum", of=not layer.bare)
        self.per_layer = PerLayerInput(config, rngs) if config.per_layer_width else None
        self.out_scale = nnx.Param(jnp.ones((1,), config.param_dtype)) if config.layer_scale else None
        self.altup = AltUp(config, rngs) if config.altup_streams else None
        self.laurel = Laurel(config, rngs) if config.laurel_rank else None
        streams = bool(config.hyper_streams)
        connection = GatedConnection if config.hyper_rank else HyperConnection
        self.mixer_streams = connection(config, rngs) if streams and mixes else None
        self.mlp_streams = connection(config, rngs) if streams and not layer.bare else None
        self.ngrams = NGrams(config, layer.ngrams, rngs) if layer.ngrams is not None else None

    @property
    def mixer(self) -> Mixer:
        """The layer's mixer."""
        return getattr(self, self.mixer_path)

    def apply(self, x, inputs: AttentionInputs, counted, replayed, arrays) -> tuple[jax.Array, Routing | None, Any]:
        """Hidden states after the layer, the routing, and what layers that share this one's get of it.

        `counted` `[N,T]` is how often a token counts in the routing, `replayed` `[N,T,k]` the experts that tokens go
        to, or None.
        """
        x = x if self.ngrams is None else self.ngrams.prefill(x, inputs)[0]
        read, added = connected(self.mixer_streams, x)
        mixed, cache = self.mixer.prefill(normed(self.input_norm, read), inputs, arrays)
        _, passed, gate, chosen = Passing.of(cache, cache)
        x, _, routing = self._feed_forward(read, added, mixed, inputs.tokens, gate, counted, replayed)
        return x, routing, (passed, chosen)

    def prefill(self, x, inputs: AttentionInputs, arrays) -> tuple[jax.Array, tuple[Any, jax.Array | None], Any]:
        """Hidden states after the layer, the mixer's cache and the experts `[N,T,k]` of each token, and what layers
        that share this one's get of it."""
        if self.ngrams is not None:
            x, beside = self.ngrams.prefill(x, inputs)
        read, added = connected(self.mixer_streams, x)
        mixed, cache = self.mixer.prefill(normed(self.input_norm, read), inputs, arrays)
        own, passed, gate, chosen = Passing.of(cache, cache)
        own = own if self.ngrams is None else (own, beside)
        x, experts, _ = self._feed_forward(read, added, mixed, inputs.tokens, gate)
        return x, (own, experts), (passed, chosen)

    def decode(
        self, x, inputs: DecodeInputs, prompt, cache, arrays
    ) -> tuple[jax.Array, tuple[Any, jax.Array | None], Any]:
        """As `prefill`, of the next tokens x of rows, whose mixer's cache is `cache` and comes back with them in it."""
        if self.ngrams is not None:
            (prompt, their_prompt), (cache, beside) = prompt, cache
            x, beside = self.ngrams.decode(x, inputs, their_prompt, beside)
        read, added = connected(self.mixer_streams, x)
        mixed, cache = self.mixer.decode(normed(self.input_norm, read), inputs, prompt, cache, arrays)
        own, passed, gate, chosen = Passing.of(cache, (prompt, cache))
        own = own if self.ngrams is None else (own, beside)
        x, experts, _ = self._feed_forward(read, added, mixed, inputs.tokens, gate)
        return x, (own, experts), (passed, chosen)

    def _feed_forward(
        self, before, added, mixed, tokens, gate=None, counted=None, replayed=None
    ) -> tuple[jax.Array, jax.Array | None, Routing | None]:
        """The output of the layer, of what its mixer has read and made, which the function `added` adds."""
        if gate is not None and not gate.size:
            return before, None, None
        x = self._summed(added, mixed, self.attention_out_norm)
        if self.laurel is not None:
            x = (x + self.laurel(normed(self.input_norm, before))) * 2**-0.5
        if self.mlp is None:
            return x, None, None
        read, added = connected(self.mlp_streams, x)
        # The norm that the mixer has computed is not computed again by XLA.
        norm = self.post_attention_norm or (self.input_norm if self.side_by_side else None)
        out, experts, routing = normed(norm, before if self.side_by_side else read), None, None
        if isinstance(self.mlp, MixtureOfExperts):
            out, experts, routing = self.mlp(out, counted, replayed, tokens)
        else:
            out = tiled_mlp(self.mlp, out, self.mlp_tile_tokens)
        out = out if gate is None else out * gate.astype(out.dtype)
        return self._summed(added, out, self.mlp_out_norm), experts, routing

    def finished(self, x, own, streams=None):
        """Hidden states after the layer, with what its numbers `[N,T,P]` of the tokens, or None, add to them; all
        streams of them, where it has predicted `streams`."""
        if self.altup is not None:
            added = functools.partial(self.per_layer.added, own=own) if self.per_layer is not None else jnp.zeros_like
            return self.altup.corrected(streams, x, added)
        x = x if self.per_layer is None else self.per_layer(x, own)
        x = x if self.out_scale is None else x * jax.lax.stop_gradient(self.out_scale[...]).astype(x.dtype)
        return x

    def _summed(self, added, out, norm: RMSNorm | None):
        """The hidden states with what mixer or feed-forward give `added`, normed alone or together."""
        out = out if self.norms_sums else normed(norm, out)
        x = added(out if self.residual_scale == 1.0 else out * self.residual_scale)
        x = normed(norm, x) if self.norms_sums else x
        return constrain(x, "rows", "positions", *(None,) * (x.ndim - 2))


def normed(norm: RMSNorm | None, x):
    """x `[...,D]` after the norm, where there is one."""
    return x if norm is None else norm(x)


def connected(
    streams: HyperConnection | GatedConnection | None, x
) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """The input of mixer or feed-forward, of hidden states x, and the function that adds their output to these."""
    return (x, functools.partial(jnp.add, x)) if streams is None else streams(x)
