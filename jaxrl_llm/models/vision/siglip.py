"""SigLIP (arXiv 2303.15343), the encoder of SmolVLM, Idefics3 and others: a ViT whose patches all see each other."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.distributed.sharding import constrain
from jaxrl_llm.models.layers import ACTIVATIONS, Linear, stacked

CUDNN_HEAD = 128  # the largest heads that cuDNN takes on every GPU


@dataclasses.dataclass(frozen=True)
class SiglipConfig:
    """The shape of a SigLIP encoder. Hashable: it is part of a ModelConfig."""

    width: int = 1152
    layers: int = 12
    heads: int = 16
    ffn: int = 3072
    image_size: int = 224  # height and width of a tile
    patch_size: int = 32
    channels: int = 3
    norm_eps: float = 1e-6
    activation: str = "gelu_tanh"
    init_scale: float = 0.02

    @property
    def side(self) -> int:
        """Patches along each side of a tile."""
        return self.image_size // self.patch_size


class LayerNorm(nnx.Module):
    """`(x - mean) / std * scale + shift` over the last dimension, in fp32 (arXiv 1607.06450)."""

    def __init__(self, size: int, eps: float, dtype: str):
        self.scale, self.shift = nnx.Param(jnp.ones((size,), dtype)), nnx.Param(jnp.zeros((size,), dtype))
        self.eps = eps

    def __call__(self, x):
        x32 = x.astype(jnp.float32)
        x32 -= x32.mean(axis=-1, keepdims=True)
        x32 *= jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (x32 * self.scale[...].astype(jnp.float32) + self.shift[...].astype(jnp.float32)).astype(x.dtype)


def by_head(x, heads: int) -> jax.Array:
    """x `[N,P,D]` as `[N,P,heads,D/heads]`, sharded over heads where the mesh shards them."""
    return constrain(x.reshape(*x.shape[:2], heads, -1), "rows", None, "heads", None)


class PatchAttention(nnx.Module):
    """Attention of every patch of a tile to all of them."""

    def __init__(self, config: SiglipConfig, net: Any, rngs: nnx.Rngs):
        self.heads, self.kind = config.heads, net.attention
        self.q, self.k, self.v, self.out = (
            Linear(config.width, config.width, net, rngs, True, name) for name in ("q", "k", "v", "out")
        )

    def __call__(self, x):
        q, k, v = (by_head(project(x), self.heads) for project in (self.q, self.k, self.v))
        size = q.shape[-1]
        fused = jax.default_backend() == "gpu" and q.dtype.itemsize == 2 and size % 8 == 0 and size <= CUDNN_HEAD
        kernel = "cudnn" if fused and self.kind != "xla" else "xla"
        return self.out(jax.nn.dot_product_attention(q, k, v, implementation=kernel).reshape(x.shape))


class PatchFeedForward(nnx.Module):
    """`fc2(activation(fc1(x)))`."""

    def __init__(self, config: Any, net: Any, rngs: nnx.Rngs):
        """`config` is that of an encoder."""
        self.fc1 = Linear(config.width, config.ffn, net, rngs, True, "fc1")
        self.fc2 = Linear(config.ffn, config.width, net, rngs, True, "fc2")
        self.activation = ACTIVATIONS[config.activation]

    def __call__(self, x):
        return self.fc2(constrain(self.activation(self.fc1(x)), "rows", None, "ffn"))


class EncoderLayer(nnx.Module):
    """Attention and a feed-forward, each behind a norm and with a residual."""

    def __init__(self, config: SiglipConfig, net: Any, rngs: nnx.Rngs):
        self.norm1 = LayerNorm(config.width, config.norm_eps, net.param_dtype)
        self.attention = PatchAttention(config, net, rngs)
        self.norm2 = LayerNorm(config.width, config.norm_eps, net.param_dtype)
        self.mlp = PatchFeedForward(config, net, rngs)

    def __call__(self, x):
        x = constrain(x + self.attention(self.norm1(x)), "rows", None, None)
        return constrain(x + self.mlp(self.norm2(x)), "rows", None, None)


class Patches(nnx.Module):
    """The embeddings of a tile's patches: a linear map of their pixels."""

    def __init__(self, config: SiglipConfig, net: Any, rngs: nnx.Rngs):
        # Columns before rows of pixels: a convolution's weights in files, transposed.
        shape = (config.patch_size, config.patch_size, config.channels, config.width)
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), shape, net.param_dtype) * net.init_scale)
        self.bias = nnx.Param(jnp.zeros((config.width,), net.param_dtype))

    def __call__(self, pixels):
        size, _, channels, width = self.kernel.shape
        tiles, side = len(pixels), pixels.shape[1] // size
        x = pixels.reshape(tiles, side, size, side, size, channels).transpose(0, 1, 3, 4, 2, 5)
        kernel = self.kernel[...].astype(x.dtype).reshape(-1, width)
        return x.reshape(tiles, side * side, -1) @ kernel + self.bias[...].astype(x.dtype)


class Positions(nnx.Module):
    """A learned embedding of each place in a tile. Tiles are whole, so the place of a patch is its number.

    transformers works it out in floating point, and rounds to a neighbour in tiles of 19, 25, 29, ... patches a side:
    none that a published model has.
    """

    def __init__(self, config: SiglipConfig, net: Any, rngs: nnx.Rngs):
        shape = (config.side**2, config.width)
        self.weight = nnx.Param(jax.random.normal(rngs.params(), shape, net.param_dtype) * net.init_scale)

    def __call__(self, x):
        return x + self.weight[...].astype(x.dtype)


class Siglip(nnx.Module):
    """Features `[M,S,D]` of the S patches of tiles `[M,H,W,C]`.

    `net` has the types, adapters and attention of a ModelConfig, and `checkpointed` wraps the program of a layer.
    """

    def __init__(self, config: SiglipConfig, net: Any, rngs: nnx.Rngs):
        self.patch, self.position = Patches(config, net, rngs), Positions(config, net, rngs)
        self.layers = stacked(functools.partial(EncoderLayer, config, net), config.layers, rngs)
        self.norm = LayerNorm(config.width, config.norm_eps, net.param_dtype)

    def __call__(self, pixels, checkpointed=lambda step: step):
        graph, layers = nnx.split(self.layers)
        x = constrain(self.position(self.patch(pixels)), "rows", None, None)
        x, _ = jax.lax.scan(checkpointed(lambda x, layer: (nnx.merge(graph, layer)(x), None)), x, layers)
        return self.norm(x)
