"""Projectors, from the patches of an encoder to embeddings of the decoder."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.models.layers import LayerNorm, Linear, RMSNorm
from jaxrl_llm.models.vision.perceiver import PerceiverProjector


def pixel_shuffle(x, factor: int) -> jax.Array:
    """`[M,S/f^2,D f^2]`: each square of f x f patches of x `[M,S,D]` as one, row by row (arXiv 2408.12637)."""
    tiles, patches, width = x.shape
    side = round(patches**0.5)
    x = x.reshape(tiles, side // factor, factor, side // factor, factor, width).swapaxes(2, 3)
    return x.reshape(tiles, patches // factor**2, -1)


class ShuffleProjector(nnx.Module):
    """A linear map of squares of patches, that of Idefics3 and SmolVLM."""

    def __init__(self, config: Any, net: Any, rngs: nnx.Rngs):
        """`config` is a VisionConfig."""
        self.factor = config.merge
        self.proj = Linear(config.encoder.width * config.merge**2, net.width, net, rngs)

    def __call__(self, x):
        return self.proj(pixel_shuffle(x, self.factor))


class LinearProjector(nnx.Module):
    """A linear map of patches, that of PaliGemma and Llama 3.2 Vision."""

    def __init__(self, config: Any, net: Any, rngs: nnx.Rngs):
        self.proj = Linear(config.encoder.features_width, net.width, net, rngs, True)

    def __call__(self, x):
        return self.proj(x)


class AverageProjector(nnx.Module):
    """A linear map of the means of squares of patches, behind a norm, that of Gemma 3."""

    def __init__(self, config: Any, net: Any, rngs: nnx.Rngs):
        self.factor, encoder = config.merge, config.encoder
        self.norm = RMSNorm(encoder.width, dataclasses.replace(net, norm_eps=encoder.norm_eps), rngs)
        self.proj = Linear(encoder.width, net.width, net, rngs)

    def __call__(self, x):
        squares = pixel_shuffle(x, self.factor)
        return self.proj(self.norm(squares.reshape(*squares.shape[:2], self.factor**2, -1).mean(axis=2)))


class TwoMapsProjector(nnx.Module):
    """Two linear maps of squares of patches, with GELU between them: behind a norm that of InternVL, else LLaVA's."""

    def __init__(self, config: Any, net: Any, rngs: nnx.Rngs, normed: bool = True):
        self.factor, square = config.merge, config.encoder.width * config.merge**2
        self.norm = LayerNorm(square, 1e-5, net.param_dtype) if normed else None
        self.fc1 = Linear(square, net.width, net, rngs, True)
        self.fc2 = Linear(net.width, net.width, net, rngs, True)

    def __call__(self, x):
        x = pixel_shuffle(x, self.factor)
        x = x if self.norm is None else self.norm(x)
        return self.fc2(jax.nn.gelu(self.fc1(x), approximate=False))


class GatedProjector(nnx.Module):
    """A gated feed-forward of squares of patches, that of Command A Vision, or behind a norm that of Aya Vision."""

    def __init__(self, config: Any, net: Any, rngs: nnx.Rngs):
        self.factor, square = config.merge, config.encoder.width * config.merge**2
        self.norm = LayerNorm(square, config.projector_norm, net.param_dtype) if config.projector_norm else None
        self.fc1 = Linear(square, config.projector_ffn, net, rngs, True)
        self.fc2 = Linear(config.projector_ffn // 2, net.width, net, rngs, True)

    def __call__(self, x):
        x = pixel_shuffle(x, self.factor)
        up, gate = jnp.split(self.fc1(x if self.norm is None else self.norm(x)), 2, axis=-1)
        return self.fc2(jax.nn.silu(gate) * up)


PROJECTORS = {
    "shuffle": ShuffleProjector,
    "average": AverageProjector,
    "linear": LinearProjector,
    "perceiver": PerceiverProjector,
    "gated": GatedProjector,
    "two_maps": TwoMapsProjector,
    "bare_maps": functools.partial(TwoMapsProjector, normed=False),
}
