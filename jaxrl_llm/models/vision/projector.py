"""Projectors, from the patches of an encoder to embeddings of the decoder."""

from typing import Any

import jax
from flax import nnx

from jaxrl_llm.models.layers import Linear


def pixel_shuffle(x, factor: int) -> jax.Array:
    """`[M,S/f^2,D f^2]`: each square of f x f patches of x `[M,S,D]` as one, row by row (arXiv 2408.12637)."""
    tiles, patches, width = x.shape
    side = round(patches**0.5)
    x = x.reshape(tiles, side // factor, factor, side // factor, factor, width).swapaxes(2, 3)
    return x.reshape(tiles, patches // factor**2, -1)


class ShuffleProjector(nnx.Module):
    """A linear map of squares of patches, that of Idefics3 and SmolVLM."""

    def __init__(self, width: int, out: int, factor: int, net: Any, rngs: nnx.Rngs):
        self.factor = factor
        self.proj = Linear(width * factor**2, out, net, rngs)

    def __call__(self, x):
        return self.proj(pixel_shuffle(x, self.factor))
