"""The encoder of Llama 3.2 Vision (arXiv 2407.21783, section 7.1): a ViT whose patches see those of all tiles of their
image, with learned embeddings of the shape of the grid of tiles, and behind it layers whose outputs have gates."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.distributed.sharding import constrain
from jaxrl_llm.models.layers import LayerNorm, Linear, stacked
from jaxrl_llm.models.vision.layers import PatchFeedForward, attention_kernel, by_head
from jaxrl_llm.models.vision.siglip import Patches, SiglipConfig

MULTIPLE = 8  # the patches of a tile, and its class token, are padded to a multiple of that
NUMBERS = 2  # of an image: the number of its grid's shape, from 1, and its tiles


@dataclasses.dataclass(frozen=True)
class TiledConfig(SiglipConfig):
    """The shape of the encoder. Hashable: it is part of a ModelConfig."""

    width: int = 1280
    layers: int = 32
    ffn: int = 5120
    image_size: int = 448
    patch_size: int = 14
    norm_eps: float = 1e-5
    activation: str = "gelu"
    class_token: bool = True  # which is a feature
    clip: bool = True
    global_layers: int = 8
    tiles: int = 4  # of an image, the most; an image with fewer has zeros in the place of the others
    ratios: int = 8  # shapes that a grid of tiles may have
    read_layers: tuple[int, ...] = (3, 7, 15, 23, 30)  # from 0, whose outputs are features too

    @property
    def features(self) -> int:
        """Patches of a tile, and its class token."""
        return self.side**2 + 1

    @property
    def features_width(self) -> int:
        """Numbers of a feature."""
        return self.width * (1 + len(self.read_layers))


class TiledAttention(nnx.Module):
    """Attention of the patches of all tiles of an image; what pads them sees no padding."""

    def __init__(self, config: TiledConfig, net: Any, rngs: nnx.Rngs):
        self.heads, self.tiles, self.kind = config.heads, config.tiles, net.attention
        self.q, self.k, self.v, self.o = (
            Linear(config.width, config.width, net, rngs, False, name) for name in ("q", "k", "v", "o")
        )

    def __call__(self, x, pads):
        q, k, v = (by_head(linear(x), self.heads) for linear in (self.q, self.k, self.v))
        kernel = attention_kernel(q, self.kind)

        def attend(part):
            queries, own = part
            mask = ~(own[:, None, :, None] & pads[:, None, None, :])
            return jax.nn.dot_product_attention(queries, k, v, mask=mask, implementation=kernel)

        if kernel == "cudnn":
            return self.o(attend((q, pads)).reshape(x.shape))
        # Of one tile at a time: the scores of all patches would be four times as many numbers.
        blocks = (a.reshape(len(a), self.tiles, -1, *a.shape[2:]).swapaxes(0, 1) for a in (q, pads))
        return self.o(jax.lax.map(jax.checkpoint(attend), tuple(blocks)).swapaxes(0, 1).reshape(x.shape))


class TiledLayer(nnx.Module):
    """Attention and a feed-forward, each behind a norm and with a residual; what they add may have a gate."""

    def __init__(self, config: TiledConfig, net: Any, gated: bool, rngs: nnx.Rngs):
        self.norm1, self.norm2 = (LayerNorm(config.width, config.norm_eps, net.param_dtype) for _ in range(2))
        self.attention = TiledAttention(config, net, rngs)
        self.mlp = PatchFeedForward(config, net, rngs)
        gates = (nnx.Param(jnp.full((1,), jnp.pi / 4, net.param_dtype)) if gated else None for _ in range(2))
        self.gate1, self.gate2 = gates

    def __call__(self, x, pads):
        x = constrain(x + _opened(self.attention(self.norm1(x), pads), self.gate1), "rows", None, None)
        return constrain(x + _opened(self.mlp(self.norm2(x)), self.gate2), "rows", None, None)


def _opened(x, gate):
    """x times the tanh of the gate, where there is one."""
    return x if gate is None else x * jnp.tanh(gate[...]).astype(x.dtype)


class GridEmbedding(nnx.Module):
    """Embeddings of the places in grids `[ratios + 1, tiles x n D]`, behind a gate: `[I,tiles,n,D]` for I images."""

    def __init__(self, config: TiledConfig, net: Any, rngs: nnx.Rngs, each: int = 1):
        self.shape = (config.tiles, each, config.width)
        shape = (config.ratios + 1, config.tiles * each * config.width)
        self.weight = nnx.Param(jax.random.normal(rngs.params(), shape, net.param_dtype) * net.init_scale)
        self.gate = nnx.Param(jnp.zeros((1,), net.param_dtype))

    def __call__(self, ratio, dtype):
        found = self.weight[...][ratio].reshape(len(ratio), *self.shape).astype(dtype)
        return found * jnp.tanh(self.gate[...]).astype(dtype)


class Tiled(nnx.Module):
    """Features `[I,tiles,S,(1+E)D]` of the class token and the patches of images `[I,tiles,H,W,C]`: outputs of the last
    layer and, behind them, of E earlier ones, number by number.

    `net` has the types, adapters and attention of a ModelConfig, and `checkpointed` wraps the program of a layer.
    """

    def __init__(self, config: TiledConfig, net: Any, rngs: nnx.Rngs):
        def norm():
            return LayerNorm(config.width, 1e-5, net.param_dtype)

        self.config, self.patch = config, Patches(config, net, rngs)
        self.class_token = nnx.Param(jnp.zeros((config.width,), net.param_dtype))
        shape = (config.features, config.width)
        self.position = nnx.Param(jax.random.normal(rngs.params(), shape, net.param_dtype) * net.init_scale)
        self.places = GridEmbedding(config, net, rngs, config.features)
        self.before, self.behind = (GridEmbedding(config, net, rngs) for _ in range(2))
        self.first_norm, self.norm = norm(), norm()
        self.layers = stacked(functools.partial(TiledLayer, config, net, False), config.layers, rngs)
        self.global_layers = stacked(functools.partial(TiledLayer, config, net, True), config.global_layers, rngs)

    def __call__(self, pixels, grids, checkpointed):
        """`grids` `[I,2]` are the NUMBERS of the images."""
        c, (images, tiles, *_) = self.config, pixels.shape
        x = self.patch(pixels.reshape(images * tiles, *pixels.shape[2:])).reshape(images, tiles, -1, c.width)
        ratio = grids[:, 0]
        x += self.before(ratio, x.dtype)
        first = jnp.broadcast_to(self.class_token[...].astype(x.dtype), (images, tiles, 1, c.width))
        x = jnp.concatenate([first, x], axis=2)
        shut = 1 - jnp.tanh(self.places.gate[...])
        x += (shut * self.position[...]).astype(x.dtype) + self.places(ratio, x.dtype)
        padding = -c.features % MULTIPLE
        x = jnp.pad(self.first_norm(x), ((0, 0), (0, 0), (0, padding), (0, 0)))
        pads = jnp.arange(tiles)[:, None] >= grids[:, 1, None, None]
        pads = (pads | (jnp.arange(x.shape[2]) >= c.features)).reshape(images, -1)

        def through(x, stack, start: int, end: int):
            graph, layers = nnx.split(stack)
            layers = jax.tree.map(lambda x: jax.lax.slice_in_dim(x, start, end), layers)
            return jax.lax.scan(checkpointed(lambda x, layer: (nnx.merge(graph, layer)(x, pads), None)), x, layers)[0]

        x, start, read = constrain(x.reshape(images, -1, c.width), "rows", None, None), 0, []
        for layer in c.read_layers:
            x, start = through(x, self.layers, start, layer + 1), layer + 1
            read.append(x)
        x = x if start == c.layers else through(x, self.layers, start, c.layers)
        x = self.norm(x).reshape(images, tiles, -1, c.width) + self.behind(ratio, x.dtype)
        x = through(x.reshape(images, -1, c.width), self.global_layers, 0, c.global_layers)
        x = jnp.concatenate([x, *([jnp.stack(read, axis=-1).reshape(images, x.shape[1], -1)] if read else [])], axis=-1)
        return x.reshape(images, tiles, -1, x.shape[-1])[:, :, : c.features]


def seen_features(tokens, segments, positions, image_token: int, grids, config: TiledConfig) -> jax.Array:
    """`[N,T,K x tiles x S]`: which features of its row's K images a token sees, those of the last image at it or before
    it in its segment, and of images whose tokens are adjacent to that one's.

    `grids` `[N,K,2]` are 0 behind the images of a row, and image tokens behind those of its images show nothing.
    `positions` `[N,T]` count from 0 in each segment.
    """
    is_image = (tokens == image_token) & (segments != 0)
    number = jnp.cumsum(is_image, axis=1)  # of the last image, from 1
    is_image &= number <= (grids[..., 1] > 0).sum(axis=1)[:, None]
    number = jnp.cumsum(is_image, axis=1)
    start = jnp.arange(tokens.shape[1]) - positions
    before = jnp.take_along_axis(number - is_image, start, axis=1)  # images before the segment
    follows = jnp.roll(is_image, 1, axis=1) & (positions > 0)
    first = jax.lax.cummax(jnp.where(is_image & ~follows, number, 0), axis=1)  # of those that are adjacent
    image = jnp.arange(1, grids.shape[1] + 1)
    shown = (image >= first[..., None]) & (image <= number[..., None]) & (number > before)[..., None]  # [N,T,K]
    filled = jnp.arange(config.tiles) < grids[..., 1, None]  # [N,K,tiles]
    seen = shown[..., None] & filled[:, None]
    return jnp.repeat(seen.reshape(*tokens.shape, -1), config.features, axis=-1)
