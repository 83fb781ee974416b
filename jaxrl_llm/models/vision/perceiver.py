"""The perceiver of Idefics2 (arXiv 2405.02246): learned latents read the patches of an image and become its tokens, as
many for every image."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.distributed.sharding import constrain
from jaxrl_llm.models.layers import FeedForward, Linear, stacked
from jaxrl_llm.models.vision.layers import attention_kernel, by_head, norm_of


@dataclasses.dataclass(frozen=True)
class PerceiverConfig:
    """The shape of the perceiver, which has the width of the decoder. Hashable: it is part of a ModelConfig."""

    latents: int = 64
    layers: int = 3
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 96
    norm_eps: float = 1e-6


class PerceiverAttention(nnx.Module):
    """Attention of latents `[M,L,D]` to the patches `[M,S,D]` of their image that are seen, and to each other."""

    def __init__(self, config: PerceiverConfig, net: Any, rngs: nnx.Rngs):
        self.heads, self.kv_heads, self.kind = config.heads, config.kv_heads, net.attention
        size, shared = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q = Linear(net.width, size, net, rngs, name="q")
        self.k = Linear(net.width, shared, net, rngs, name="k")
        self.v = Linear(net.width, shared, net, rngs, name="v")
        self.o = Linear(size, net.width, net, rngs, name="o")

    def __call__(self, latents, patches, seen):
        both = jnp.concatenate([patches, latents], axis=1)
        mask = jnp.concatenate([seen, jnp.ones(latents.shape[:2], bool)], axis=1)[:, None, None]
        q = by_head(self.q(latents), self.heads)
        k, v = (by_head(linear(both), self.kv_heads) for linear in (self.k, self.v))
        kernel = attention_kernel(q, self.kind)
        out = jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=kernel)
        return self.o(out.reshape(*latents.shape[:2], -1))


class PerceiverLayer(nnx.Module):
    """Attention and a gated feed-forward of latents, each behind a norm and with a residual."""

    def __init__(self, config: PerceiverConfig, net: Any, rngs: nnx.Rngs):
        def norm():
            return norm_of("rms", net.width, config.norm_eps, net, rngs)

        self.latent_norm, self.patch_norm, self.mlp_norm = norm(), norm(), norm()
        self.attention = PerceiverAttention(config, net, rngs)
        self.mlp = FeedForward(net, rngs, 4 * net.width)

    def __call__(self, latents, patches, seen):
        latents = latents + self.attention(self.latent_norm(latents), self.patch_norm(patches), seen)
        return constrain(latents + self.mlp(self.mlp_norm(latents)), "rows", None, None)


class PerceiverProjector(nnx.Module):
    """A gated feed-forward of patches, and the perceiver that reads what it gives, that of Idefics2."""

    def __init__(self, config: Any, net: Any, rngs: nnx.Rngs):
        """`config` is a VisionConfig."""
        self.gate = Linear(config.encoder.width, config.projector_ffn, net, rngs, name="gate")
        self.up = Linear(config.encoder.width, config.projector_ffn, net, rngs, name="up")
        self.down = Linear(config.projector_ffn, net.width, net, rngs, name="down")
        shape = config.perceiver
        self.latents = nnx.Param(jnp.ones((shape.latents, net.width), net.param_dtype))
        self.layers = stacked(functools.partial(PerceiverLayer, shape, net), shape.layers, rngs)
        self.norm = norm_of("rms", net.width, shape.norm_eps, net, rngs)

    def __call__(self, x, seen):
        """The tokens `[M,L,D]` of images with patches x `[M,S,E]`, of which those that are `seen` `[M,S]` are read."""
        patches, (graph, layers) = self.down(jax.nn.silu(self.gate(x)) * self.up(x)), nnx.split(self.layers)
        latents = jnp.broadcast_to(self.latents[...].astype(x.dtype), (len(x), *self.latents.shape))

        def step(latents, layer):
            return nnx.merge(graph, layer)(latents, patches, seen), None

        return self.norm(jax.lax.scan(step, latents, layers)[0])
