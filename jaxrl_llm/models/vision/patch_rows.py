"""The encoder of Qwen2.5-VL (arXiv 2502.13923): a ViT over the patches of images of any size, one row of them a row.

Patches have rotary positions of two axes. They see the others of their window or, in some layers, all of their image.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.sharding import constrain
from jaxrl_llm.models.layers import FeedForward, Linear, RMSNorm
from jaxrl_llm.models.rope import rotate


@dataclasses.dataclass(frozen=True)
class PatchRowsConfig:
    """The shape of the encoder. Hashable: it is part of a ModelConfig."""

    width: int = 1280
    layers: int = 32
    heads: int = 16
    ffn: int = 3420
    patch_size: int = 14
    frames: int = 2  # of a patch; an image is repeated so often
    channels: int = 3
    merge: int = 2  # patches along each side of a square that becomes one token
    window_size: int = 112  # pixels along each side of a window
    full_layers: tuple[int, ...] = (7, 15, 23, 31)  # in which patches see all of their image
    init_scale: float = 0.02

    @property
    def patch_shape(self) -> tuple[int, int, int, int]:
        """Channels, frames, height and width of a patch."""
        return (self.channels, self.frames, self.patch_size, self.patch_size)

    @property
    def patch_numbers(self) -> int:
        """The numbers of a patch."""
        return int(np.prod(self.patch_shape))

    @property
    def window_tokens(self) -> int:
        """Tokens along each side of a window."""
        return self.window_size // self.merge // self.patch_size


def patch_rows(images: Sequence[np.ndarray], config: PatchRowsConfig) -> tuple[np.ndarray, np.ndarray]:
    """The patches `[P,numbers]` of images `[H,W,C]`, those of a square of a token adjacent, and their grids `[K,2]`.

    A grid is the number of patches along the height and the width. Raises ConfigError for an image that no whole number
    of tokens fills.
    """
    side, merge = config.patch_size, config.merge
    rows, grids = [np.zeros((0, config.patch_numbers), np.float32)], []
    for image in images:
        image = np.asarray(image, np.float32)
        if image.ndim != 3 or image.shape[2] != config.channels or any(n % (side * merge) for n in image.shape[:2]):
            raise ConfigError(
                f"an image of shape {image.shape} (height, width, channels) does not have {config.channels} channels, "
                f"and multiples of {side * merge} pixels: use the image processor of the model's folder"
            )
        high, wide = (n // side for n in image.shape[:2])
        x = image.reshape(high // merge, merge, side, wide // merge, merge, side, -1).transpose(0, 3, 1, 4, 6, 2, 5)
        x = x.reshape(high * wide, config.channels, 1, side, side)
        rows.append(np.repeat(x, config.frames, axis=2).reshape(high * wide, -1))
        grids.append((high, wide))
    return np.concatenate(rows), np.array(grids, np.int32).reshape(-1, 2)


class Tokens(NamedTuple):
    """Where the tokens of a row's images are, in the order of the row; all `[N,M]`."""

    image: jax.Array  # number of its image; that of all images where there is none
    place: jax.Array  # place among the tokens of its image
    y: jax.Array
    x: jax.Array
    high: jax.Array  # tokens along the height of its image
    wide: jax.Array


def token_grid(grids, count, size: int, merge: int) -> Tokens:
    """The places of the first `size` tokens of rows whose first `count` `[N]` images have these `grids` `[N,K,2]`."""
    live = jnp.arange(grids.shape[1]) < count[:, None]
    grids = jnp.where(live[..., None], grids // merge, 0)
    tokens = grids.prod(-1)
    ends = jnp.cumsum(tokens, axis=1)
    index = jnp.arange(size)
    image = (index[:, None] >= ends[:, None, :]).sum(-1)
    own = jnp.minimum(image, grids.shape[1] - 1)

    def of_image(x):
        return jnp.take_along_axis(x, own, axis=1)

    wide = jnp.maximum(of_image(grids[..., 1]), 1)
    place = index - of_image(ends - tokens)
    return Tokens(image, place, place // wide, place % wide, of_image(grids[..., 0]), wide)


class RowAttention(nnx.Module):
    """Attention of patches to those of their window, or of their image."""

    def __init__(self, config: PatchRowsConfig, net: Any, rngs: nnx.Rngs):
        self.config = config
        self.q, self.k, self.v, self.out = (
            Linear(config.width, config.width, net, rngs, True) for _ in ("q", "k", "v", "out")
        )

    def __call__(self, x, layout: "Layout", full):
        def by_head(x):
            return constrain(x.reshape(*x.shape[:2], self.config.heads, -1), "rows", None, "heads", None)

        q, k, v = (by_head(project(x)) for project in (self.q, self.k, self.v))
        ones = jnp.ones(x.shape[:2], jnp.int32)
        q, k = (rotate(a, ones, layout.angles) for a in (q, k))
        x = jax.lax.cond(full, _in_images, self._in_windows, q, k, v, layout)
        return self.out(x.reshape(*x.shape[:2], -1))

    def _in_windows(self, q, k, v, layout: "Layout"):
        # Patches of a window are adjacent, so that those of a block are in it or in one of its neighbours.
        block = (self.config.window_tokens * self.config.merge) ** 2
        length, extra = q.shape[1], -q.shape[1] % block

        def in_blocks(x, fill=0):
            x = jnp.pad(x, ((0, 0), (0, extra), *((0, 0),) * (x.ndim - 2)), constant_values=fill)
            return x.reshape(len(x), -1, block, *x.shape[2:])

        def with_neighbours(x, fill=0):
            ends = ((0, 0), (1, 1), *((0, 0),) * (x.ndim - 2))
            x = jnp.pad(x, ends, constant_values=fill)
            return jnp.concatenate([x[:, :-2], x[:, 1:-1], x[:, 2:]], axis=2)

        window = in_blocks(layout.window, -1)
        seen = window[..., :, None] == with_neighbours(window, -2)[..., None, :]
        q, k, v = in_blocks(q), with_neighbours(in_blocks(k)), with_neighbours(in_blocks(v))
        scores = jnp.einsum("nbqhd,nbkhd->nbhqk", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(seen[:, :, None], scores, -1e30), axis=-1).astype(v.dtype)
        out = jnp.einsum("nbhqk,nbkhd->nbqhd", weights, v)
        return out.reshape(len(out), -1, *out.shape[3:])[:, :length]


def _in_images(q, k, v, layout: "Layout"):
    seen = layout.image[:, None, :, None] == layout.image[:, None, None, :]
    return jax.nn.dot_product_attention(q, k, v, mask=seen)


class Layout(NamedTuple):
    """The places of patches in the order in which the encoder computes them, that of windows."""

    image: jax.Array  # [N,P]
    window: jax.Array  # [N,P] adjacent where equal
    angles: jax.Array  # [N,P,d/2] of rotary positions


class RowLayer(nnx.Module):
    """Attention and a gated feed-forward, each behind a norm and with a residual."""

    def __init__(self, config: PatchRowsConfig, net: Any, rngs: nnx.Rngs):
        self.norm1 = RMSNorm(config.width, net, rngs)
        self.attention = RowAttention(config, net, rngs)
        self.norm2 = RMSNorm(config.width, net, rngs)
        self.mlp = FeedForward(net, rngs)

    def __call__(self, x, layout: Layout, full):
        x = constrain(x + self.attention(self.norm1(x), layout, full), "rows", None, None)
        return constrain(x + self.mlp(self.norm2(x)), "rows", None, None)


class PatchRows(nnx.Module):
    """Embeddings `[N,M,D]` of the M tokens of all images of rows, in order, from patches `[N,P,numbers]`.

    `net` has what a ModelConfig says of types, adapters and the decoder's width D.
    """

    def __init__(self, config: PatchRowsConfig, net: Any, rngs: nnx.Rngs):
        self.config = config
        own = dataclasses.replace(
            net, width=config.width, ffn=config.ffn, mlp_bias=True, activation="silu", norm_eps=1e-6,
            norm_offset=0.0,
        )  # fmt: skip
        # Dimensions in the order of a convolution's weights in files, transposed.
        shape = (*config.patch_shape[::-1], config.width)
        self.patch = nnx.Dict(
            kernel=nnx.Param(jax.random.normal(rngs.params(), shape, net.param_dtype) * config.init_scale)
        )
        make = nnx.vmap(lambda r: RowLayer(config, own, r), in_axes=0, out_axes=0)
        self.layers = nnx.split_rngs(splits=config.layers)(make)(rngs)
        self.norm = RMSNorm(config.width, own, rngs)
        square = config.width * config.merge**2
        self.fc1, self.fc2 = Linear(square, square, own, rngs, True), Linear(square, net.width, own, rngs, True)

    def __call__(self, pixels, tokens: Tokens, checkpointed=lambda step: step):
        c = self.config
        side = c.window_tokens
        across = -(-tokens.wide // side)
        window = jnp.where(tokens.y >= tokens.high, 0, tokens.y // side * across + tokens.x // side)
        window = tokens.image * tokens.image.shape[1] + window
        order = jnp.argsort(window, axis=1, stable=True)
        each = jnp.arange(c.merge**2)

        def sorted_(x):
            return jnp.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 2)), axis=1)

        def of_patches(x):
            return sorted_(x.reshape(len(x), order.shape[1], -1)).reshape(len(x), order.shape[1] * c.merge**2, -1)

        def repeated(x):
            return jnp.repeat(sorted_(x), c.merge**2, axis=1)

        inv_freq = 10000.0 ** -(jnp.arange(0, c.width // c.heads // 2, 2) / (c.width // c.heads // 2))
        places = (tokens.y[..., None] * c.merge + each // c.merge, tokens.x[..., None] * c.merge + each % c.merge)
        angles = jnp.concatenate([of_patches(place) * inv_freq for place in places], axis=-1)
        layout = Layout(repeated(tokens.image), repeated(window), angles)
        kernel = self.patch["kernel"][...].transpose(3, 2, 1, 0, 4).reshape(c.patch_numbers, -1)
        x = constrain(of_patches(pixels) @ kernel.astype(pixels.dtype), "rows", None, None)
        graph, layers = nnx.split(self.layers)
        full = jnp.isin(jnp.arange(c.layers), jnp.array(c.full_layers, jnp.int32))

        def step(x, layer):
            state, full = layer
            return nnx.merge(graph, state)(x, layout, full), None

        x, _ = jax.lax.scan(checkpointed(step), x, (layers, full))
        x = self.norm(x).reshape(*order.shape, -1)
        x = self.fc2(jax.nn.gelu(self.fc1(x), approximate=False))
        return jnp.take_along_axis(x, jnp.argsort(order, axis=1)[..., None], axis=1)
