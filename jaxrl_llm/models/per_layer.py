"""Per-layer embeddings (Gemma 3n, Gemma 4): each layer adds a map of numbers that a token has for this layer alone.

Arrays: L layers, P numbers of a token for a layer.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.distributed.sharding import constrain
from jaxrl_llm.models.layers import ACTIVATIONS, Embed, Linear, RMSNorm


class PerLayerEmbed(nnx.Module):
    """The numbers of tokens for all layers: of a table `[V,L*P]`, and of a projection of their embeddings."""

    def __init__(self, config, rngs: nnx.Rngs):
        self.width = config.per_layer_width
        size = config.layers * self.width
        table = dataclasses.replace(config, vocab_size=config.per_layer_vocab, unpredicted=0, width=size)
        self.embed = Embed(table, rngs)
        self.proj = Linear(config.width, size, config, rngs)
        self.norm = RMSNorm(self.width, config, rngs)
        self.entries = config.per_layer_vocab
        self.blank = config.vision.blank if config.vision is not None and config.vision.blank_tokens else None

    def __call__(self, tokens, x) -> jax.Array:
        """`[L,N,T,P]` of tokens `[N,T]` with the embeddings x `[N,T,D]`."""
        table = self.embed(jnp.where(tokens < self.entries, tokens, 0), x.dtype)  # the last of Gemma 3n have no own
        if self.blank is not None:  # its numbers are not trained, as in transformers, by the images that read them
            table = jnp.where((tokens == self.blank)[..., None], jax.lax.stop_gradient(table), table)
        both = (table, self.proj(x) * x.shape[-1] ** -0.5)
        table, projected = (a.reshape(*x.shape[:-1], -1, self.width) for a in both)
        both = (self.norm(projected) + table * self.width**0.5) * 2**-0.5
        return constrain(jnp.moveaxis(both, -2, 0), None, "rows", "positions", None)


class PerLayerInput(nnx.Module):
    """`x + norm(down(activation(gate(x)) * own))`, `own` a layer's numbers of the tokens."""

    def __init__(self, config, rngs: nnx.Rngs):
        self.gate = Linear(config.width, config.per_layer_width, config, rngs)
        self.down = Linear(config.per_layer_width, config.width, config, rngs)
        self.norm = RMSNorm(config.width, config, rngs)
        self.activation = ACTIVATIONS[config.activation]

    def __call__(self, x, own):
        return x + self.added(x, own)

    def added(self, x, own):
        """The sum's second term, `norm(down(activation(gate(x)) * own))`, of x `[N,T,D]` and the layer's numbers `own`
        `[N,T,P]`."""
        return self.norm(self.down(self.activation(self.gate(x)) * own))
