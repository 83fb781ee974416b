"""The vision part of Gemma 4 12B, which has no encoder: each patch of images of any size becomes a token by itself."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.distributed.sharding import constrain
from jaxrl_llm.models.layers import LayerNorm, Linear, RMSNorm
from jaxrl_llm.models.vision.patch_rows import PatchRowsConfig, Tokens

EPS = 1e-5  # of the layer norms


@dataclasses.dataclass(frozen=True)
class PatchEmbedderConfig(PatchRowsConfig):
    """The shape of it, of which patches, width, positions and the last norm's epsilon are read. Hashable: it is part of
    a ModelConfig."""

    width: int = 3840
    layers: int = 0
    patch_size: int = 48
    frames: int = 0
    merge: int = 1
    positions: int = 1120


class PatchEmbedder(nnx.Module):
    """Embeddings `[N,M,D]` of the M patches of all images of rows, in order, from their pixels `[N,M,numbers]`.

    A linear map between layer norms, embeddings of the column and of the row, a norm, and a linear map behind a norm
    without a scale. `net` has the types and D of a ModelConfig.
    """

    def __init__(self, config: PatchEmbedderConfig, net: Any, rngs: nnx.Rngs):
        self.config, numbers, width = config, config.patch_numbers, config.width
        self.patch_norm, self.map_norm, self.position_norm = (
            LayerNorm(size, EPS, net.param_dtype) for size in (numbers, width, width)
        )
        self.patch = Linear(numbers, width, net, rngs, True, "fc1")
        shape = (config.positions, 2, width)  # columns, and rows
        self.position = nnx.Param(jax.random.normal(rngs.params(), shape, net.param_dtype) * config.init_scale)
        self.norm = RMSNorm(width, dataclasses.replace(net, norm_eps=config.norm_eps), rngs, scaled=False)
        self.proj = Linear(width, net.width, net, rngs)

    def __call__(self, pixels, tokens: Tokens, checkpointed=lambda step: step):
        size, channels = self.config.patch_size, self.config.channels
        x = pixels.reshape(*pixels.shape[:2], channels, size, size)  # in files the channels of a pixel are adjacent
        x = jnp.moveaxis(x, 2, -1).reshape(pixels.shape)
        x = self.map_norm(self.patch(self.patch_norm(x)))
        table = self.position[...]
        x = self.position_norm(x + (table[tokens.x, 0] + table[tokens.y, 1]).astype(x.dtype))
        return constrain(self.proj(self.norm(x)), "rows", None, None)
