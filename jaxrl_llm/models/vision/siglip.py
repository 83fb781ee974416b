"""Encoders of tiles, ViTs whose patches all see each other: SigLIP (arXiv 2303.15343), that of SmolVLM, Idefics3 and
others, CLIP's (arXiv 2103.00020), with a token of the whole tile, InternViT (arXiv 2312.14238), with that and factors
of what its layers add, and that of Idefics2, whose images may fill a part of their tile."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl_llm.distributed.sharding import constrain
from jaxrl_llm.models.layers import LayerNorm, Linear, stacked
from jaxrl_llm.models.vision.layers import PatchFeedForward, attention_kernel, by_head, norm_of


@dataclasses.dataclass(frozen=True)
class SiglipConfig:
    """The shape of the encoder, that of SigLIP unless other fields say so. Hashable: it is part of a ModelConfig."""

    width: int = 1152
    layers: int = 12
    heads: int = 16
    ffn: int = 3072
    image_size: int = 224  # height and width of a tile
    patch_size: int = 32
    channels: int = 3
    norm_eps: float = 1e-6
    activation: str = "gelu_tanh"
    norm: str = "layer"  # or "rms"
    attention_bias: bool = True  # of queries, keys and values
    qk_norm: bool = False  # over all heads at once
    class_token: bool = False  # a token in front of the patches; it is no feature
    clip: bool = False  # that of CLIP: patches have no bias, and a norm is before the first layer
    features_from: int = 0  # the layer, counted from 1, whose outputs are features; 0: the last one's, behind the norm
    layer_scale: float = 0.0  # where the factors of what layers add start, one a channel; 0: there are none
    last_norm: bool = True
    # An image of any shape is in the first rows and columns of its tile, whose other pixels are NaN.
    partly_filled: bool = False
    init_scale: float = 0.02

    @property
    def side(self) -> int:
        """Whole patches along each side of a tile."""
        return self.image_size // self.patch_size

    @property
    def features_width(self) -> int:
        """Numbers of a feature."""
        return self.width


class PatchAttention(nnx.Module):
    """Attention of every patch of a tile to all of them, or to those that are `seen`."""

    def __init__(self, config: SiglipConfig, net: Any, rngs: nnx.Rngs):
        self.heads, self.kind = config.heads, net.attention
        biases = {"q": config.attention_bias, "k": config.attention_bias, "v": config.attention_bias, "out": True}
        self.q, self.k, self.v, self.out = (
            Linear(config.width, config.width, net, rngs, bias, name) for name, bias in biases.items()
        )
        self.q_norm = norm_of("rms", config.width, 1e-6, net, rngs) if config.qk_norm else None
        self.k_norm = norm_of("rms", config.width, 1e-6, net, rngs) if config.qk_norm else None

    def __call__(self, x, seen=None):
        """`seen` `[M,S]` are the patches that all attend to; None: to all."""
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (by_head(a, self.heads) for a in (q, k, v))
        kernel, mask = attention_kernel(q, self.kind), None if seen is None else seen[:, None, None]
        return self.out(jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=kernel).reshape(x.shape))


class EncoderLayer(nnx.Module):
    """Attention and a feed-forward, each behind a norm and with a residual."""

    def __init__(self, config: SiglipConfig, net: Any, rngs: nnx.Rngs):
        self.norm1 = norm_of(config.norm, config.width, config.norm_eps, net, rngs)
        self.attention = PatchAttention(config, net, rngs)
        self.norm2 = norm_of(config.norm, config.width, config.norm_eps, net, rngs)
        self.mlp = PatchFeedForward(config, net, rngs)
        scale = jnp.full((config.width,), config.layer_scale, net.param_dtype)
        self.scale1, self.scale2 = (nnx.Param(scale) if config.layer_scale else None for _ in range(2))

    def __call__(self, x, seen=None):
        x = _added(x, self.attention(self.norm1(x), seen), self.scale1)
        return _added(x, self.mlp(self.norm2(x)), self.scale2)


def _added(x, out, scale) -> jax.Array:
    out = out if scale is None else out * scale[...].astype(out.dtype)
    return constrain(x + out, "rows", None, None)


class Patches(nnx.Module):
    """The embeddings of a tile's patches: a linear map of their pixels; those beyond the last whole patch are left
    out."""

    def __init__(self, config: SiglipConfig, net: Any, rngs: nnx.Rngs):
        # Columns before rows of pixels: a convolution's weights in files, transposed.
        shape = (config.patch_size, config.patch_size, config.channels, config.width)
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), shape, net.param_dtype) * net.init_scale)
        self.bias = None if config.clip else nnx.Param(jnp.zeros((config.width,), net.param_dtype))

    def __call__(self, pixels):
        size, _, channels, width = self.kernel.shape
        tiles, side = len(pixels), pixels.shape[1] // size
        x = pixels[:, : side * size, : side * size].reshape(tiles, side, size, side, size, channels)
        x = x.transpose(0, 1, 3, 4, 2, 5)
        kernel = self.kernel[...].astype(x.dtype).reshape(-1, width)
        x = x.reshape(tiles, side * side, -1) @ kernel
        return x if self.bias is None else x + self.bias[...].astype(x.dtype)


class PositionEmbedding(nnx.Module):
    """A learned embedding of each place in a tile, that of the class token first. Tiles are whole, so the place of a
    patch is its number.

    transformers works it out in floating point, and rounds to a neighbour in tiles of 19, 25, 29, ... patches a side:
    none that a published model has.
    """

    def __init__(self, config: SiglipConfig, net: Any, rngs: nnx.Rngs):
        shape = (config.side**2 + config.class_token, config.width)
        shape = (1, *shape) if config.class_token and not config.clip else shape  # files of InternViT have a tile
        self.weight = nnx.Param(jax.random.normal(rngs.params(), shape, net.param_dtype) * net.init_scale)

    def __call__(self, x, seen=None):
        weight = self.weight[...].astype(x.dtype)
        return x + (weight if seen is None else weight[places(seen)])


def seen_patches(pixels, size: int) -> jax.Array:
    """The patches `[M,S]` of tiles `[M,H,W,C]`, `size` pixels a side, all of whose pixels are the image's."""
    side = pixels.shape[1] // size
    filled = ~jnp.isnan(pixels[:, : side * size, : side * size]).any(-1)
    return filled.reshape(-1, side, size, side, size).all((2, 4)).reshape(-1, side * side)


def places(seen) -> jax.Array:
    """The places `[M,S]`, among those of a whole tile, of the patches of images that fill a part of it, all that are
    `seen`: the image is stretched over the tile."""
    side = round(seen.shape[1] ** 0.5)
    grid = seen.reshape(-1, side, side)
    ends = ((1 + np.arange(side - 1)) / side).astype(np.float32)

    def along(count):  # in fp32, as transformers has it
        start = jnp.arange(side, dtype=jnp.float32) * (1 / jnp.maximum(count, 1).astype(jnp.float32))[:, None]
        return jnp.searchsorted(ends, jnp.minimum(start, 1 - 1e-6), side="right")

    rows, columns = along(grid[:, :, 0].sum(1)), along(grid[:, 0].sum(1))
    return (rows[:, :, None] * side + columns[:, None]).reshape(seen.shape)


class Siglip(nnx.Module):
    """Features `[M,S,D]` of the S patches of tiles `[M,H,W,C]`.

    `net` has the types, adapters and attention of a ModelConfig, and `checkpointed` wraps the program of a layer.
    """

    def __init__(self, config: SiglipConfig, net: Any, rngs: nnx.Rngs):
        self.patch, self.position = Patches(config, net, rngs), PositionEmbedding(config, net, rngs)
        shape = (config.width,) if config.clip else (1, 1, config.width)
        self.class_token = nnx.Param(jnp.zeros(shape, net.param_dtype)) if config.class_token else None
        self.first_norm = LayerNorm(config.width, config.norm_eps, net.param_dtype) if config.clip else None
        self.layers = stacked(functools.partial(EncoderLayer, config, net), config.layers, rngs)
        self.norm = LayerNorm(config.width, config.norm_eps, net.param_dtype) if config.last_norm else None
        self.features_from = config.features_from

    def __call__(self, pixels, checkpointed=lambda step: step, seen=None):
        """`seen` `[M,S]` are the patches of images that fill a part of their tile."""
        graph, layers = nnx.split(self.layers)
        if self.features_from:  # the layers and the norm behind it are kept for the files, and not computed
            layers = jax.tree.map(lambda x: jax.lax.slice_in_dim(x, 0, self.features_from), layers)
        x, first = self.patch(pixels), self.class_token
        tiles, patches, width = x.shape
        if first is not None:
            x = jnp.concatenate([jnp.broadcast_to(first[...].astype(x.dtype), (tiles, 1, width)), x], axis=1)
        x = self.position(x, seen)
        x = constrain(x if self.first_norm is None else self.first_norm(x), "rows", None, None)
        x, _ = jax.lax.scan(checkpointed(lambda x, layer: (nnx.merge(graph, layer)(x, seen), None)), x, layers)
        return (x if self.norm is None or self.features_from else self.norm(x))[:, -patches:]
