"""The encoders of Qwen2-VL (arXiv 2409.12191), 2.5-VL, Qwen3-VL and Qwen3.5, of GLM-4.1V (arXiv 2507.01006), of Mistral
Small 3.1 (Pixtral, arXiv 2410.07073), of Gemma 4, and SigLIP 2 (arXiv 2502.14786), that of LFM2-VL, and MoonViT (arXiv
2504.07491), that of Kimi K2.5: a ViT over patches of images of any size; and that of LFM3-VL, most of whose layers are
convolutions.

The patches of a row's images are one row. They have rotary positions of two axes, learned ones, or both. They see all
of their image or, in most layers of Qwen2.5-VL, their window.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.sharding import constrain
from jaxrl_llm.models.layers import FeedForward, Linear, over_rms, stacked
from jaxrl_llm.models.rope import rotate
from jaxrl_llm.models.vision.clipped import ClippedLinear
from jaxrl_llm.models.vision.layers import PatchFeedForward, by_head, norm_of
from jaxrl_llm.models.vision.mergers import MERGERS, Merger

BLOCK = 1024  # queries of a row that see their image at once, where there are more: scores are [BLOCK,P]


@dataclasses.dataclass(frozen=True)
class PatchRowsConfig:
    """The shape of the encoder. Hashable: it is part of a ModelConfig."""

    width: int = 1280
    layers: int = 32
    heads: int = 16
    kv_heads: int = 0  # of keys and values; 0: as many
    ffn: int = 3420
    patch_size: int = 14
    frames: int = 2  # of a patch; an image is repeated that many times. 0: patches are of images alone
    channels: int = 3
    merge: int = 2  # patches along each side of a square that becomes one token
    conv_layers: tuple[int, ...] = ()  # of those with a convolution in place of attention
    conv_size: int = 3  # patches along each side of what a convolution reads
    window_size: int = 0  # pixels along each side of a window; 0: patches see all of their image in every layer
    full_layers: tuple[int, ...] = ()  # of those with windows, in which patches see all of their image
    norm: str = "rms"  # or "layer"
    norms: str = "pre"  # on the inputs of attention and feed-forward; "both": on their outputs too
    norm_eps: float = 1e-6
    last_norm: bool = False  # behind the last layer
    gated: bool = True  # the feed-forward is a gated one; False: two linear maps
    activation: str = "silu"
    swiglu_limit: float = 0.0  # of gate and up of a gated feed-forward; 0: they are not clipped
    attention_bias: bool = True  # of queries, keys and values
    # The name, for adapters, of the map behind attention; "": attention has none, as most files have queries, keys and
    # values in one matrix.
    attention_adapter: str = ""
    head_norms: str = ""  # "qk": of each head's queries and keys; "qkv": of values too, and scores are not scaled
    bias: bool = True  # of the other maps of layers
    clipped: bool = False  # the inputs and outputs of layers' maps are, see clipped.ClippedLinear
    from_zero: bool = False  # pixels are from 0 to 1, which the network maps to -1 to 1
    # Files have the map of patches as a matrix, not a convolution: of "pixels" with their channels, or of "channels".
    patch_map: str = ""
    patch_bias: bool = False
    patch_norm: bool = False  # of patches, before learned positions are added
    rotary_base: float = 10000.0  # 0: there are no rotary positions
    # The two axes have the same frequencies ("same") or every other one ("alternating"), or a third each are those of
    # time, which is 0, height and width ("time"). The first half of a head turns by its column, the second by its row
    # ("halves"), or neighbouring dimensions turn together, pairs by column and row in turn ("pairs").
    rotary: str = "same"
    rotary_neighbours: bool = False  # as well, dimensions that turn together are neighbours, not of two halves
    positions: int = 0  # along each side of the square of learned positions; 0: there are none
    position_square: bool = False  # files have these as [side,side,D]
    places: str = "linear"  # how these become those of an image: one of PLACES
    merger: str = "stacked"  # one of mergers.MERGERS
    merger_ffn: int = 0
    merger_bias: bool = False
    merger_norm: str = "square"  # of "two_maps": of each square, of each patch ("patch"), or "", none
    standardized: bool = False  # the means of "pooled" are, by a shift and a factor of each number
    merger_adapters: bool = False  # before Qwen3-VL its maps are items of a list, which adapters have no names for
    deepstack: tuple[int, ...] = ()  # layers whose output is added behind the decoder's first layers too
    init_scale: float = 0.02

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """Channels, frames if there are any, height and width of a patch."""
        return (self.channels, *((self.frames,) if self.frames else ()), self.patch_size, self.patch_size)

    @property
    def patch_numbers(self) -> int:
        """The numbers of a patch."""
        return int(np.prod(self.patch_shape))

    @property
    def window_tokens(self) -> int:
        """Tokens along each side of a window."""
        return self.window_size // self.merge // self.patch_size

    @property
    def stacks(self) -> dict[str, tuple[int, ...]]:
        """The layers that are stacked in the parameters of each name."""
        attending = tuple(layer for layer in range(self.layers) if layer not in self.conv_layers)
        return {"vision/encoder/layers": attending, "vision/encoder/conv_layers": self.conv_layers}


def patch_rows(images: Iterable[np.ndarray], config: PatchRowsConfig) -> tuple[np.ndarray, np.ndarray]:
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
        rows.append(np.repeat(x, config.frames or 1, axis=2).reshape(high * wide, -1))
        grids.append((high, wide))
    return np.concatenate(rows), np.array(grids, np.int32).reshape(-1, 2)


class Tokens(NamedTuple):
    """The places of the tokens of a row's images, in the order of the row; all `[N,M]`."""

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
        names = ("q", "k", "v", config.attention_adapter) if config.attention_adapter else ("",) * 4
        biases, linear = (*(config.attention_bias,) * 3, config.bias), ClippedLinear if config.clipped else Linear
        self.kv_heads = config.kv_heads or config.heads
        narrow = config.width // config.heads * self.kv_heads
        self.q, self.k, self.v, self.out = (
            linear(config.width, size, net, rngs, bias, name)
            for size, bias, name in zip((config.width, narrow, narrow, config.width), biases, names, strict=True)
        )
        self.q_norm, self.k_norm = (
            norm_of("rms", config.width // config.heads, config.norm_eps, net, rngs) if config.head_norms else None
            for _ in range(2)
        )

    def __call__(self, x, layout: "Layout", full):
        q = by_head(self.q(x), self.config.heads)
        k, v = (by_head(project(x), self.kv_heads) for project in (self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.config.head_norms == "qkv":
            v = over_rms(v, self.config.norm_eps).astype(v.dtype)
        if layout.angles is not None:
            q, k = (self._rotated(a, layout.angles) for a in (q, k))
        if self.config.window_size:
            x = jax.lax.cond(full, _in_images, self._in_windows, q, k, v, layout)
        else:
            x = _in_images(q, k, v, layout, 1.0 if self.config.head_norms == "qkv" else None)
        return self.out(x.reshape(*x.shape[:2], -1))

    def _rotated(self, x, angles):
        # As the angles: rows before columns, and first dimensions of pairs before second ones.
        if self.config.rotary == "halves":
            x = x.reshape(*x.shape[:-1], 2, 2, -1)[..., ::-1, :, :].swapaxes(-3, -2).reshape(x.shape)
        if self.config.rotary == "pairs":
            x = x.reshape(*x.shape[:-1], -1, 2, 2)[..., ::-1, :].swapaxes(-3, -1).reshape(x.shape)
        if self.config.rotary_neighbours:
            x = x.reshape(*x.shape[:-1], -1, 2).swapaxes(-2, -1).reshape(x.shape)
        return rotate(x, jnp.ones(x.shape[:2], jnp.int32), angles)

    def _in_windows(self, q, k, v, layout: "Layout"):
        # Patches of a window are adjacent, so that those of a block are in it or in one of its neighbours.
        block = (self.config.window_tokens * self.config.merge) ** 2
        length, extra = q.shape[1], -q.shape[1] % block
        k, v = (jnp.repeat(x, self.config.heads // self.kv_heads, axis=2) for x in (k, v))

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


class RowConvolution(nnx.Module):
    """`out(c * conv(b * v))`, where `b, c, v = into(x)` and the convolution, of each channel alone, reads a patch and
    its neighbours in its image."""

    def __init__(self, config: PatchRowsConfig, net: Any, rngs: nnx.Rngs):
        width, size = config.width, config.conv_size
        self.into = Linear(width, 3 * width, net, rngs, False, "into")
        taps = jax.random.normal(rngs.params(), (width, 1, size, size), net.param_dtype) * config.init_scale
        self.filter = nnx.Param(taps)
        self.out = Linear(width, width, net, rngs, False, "out")

    def __call__(self, x, layout: "Layout", full):
        """`full` is not read: there are no windows."""
        b, c, v = jnp.split(self.into(x), 3, axis=-1)
        gated, taps = b * v, self.filter[...].astype(x.dtype)[:, 0]
        half, found = taps.shape[-1] // 2, jnp.zeros_like(gated)
        for down, across in np.ndindex(*taps.shape[1:]):
            index = layout.neighbour(down - half, across - half)
            own = jnp.take_along_axis(gated, jnp.maximum(index, 0)[..., None], axis=1)
            found += jnp.where(index[..., None] >= 0, own, 0) * taps[:, down, across]
        return self.out(c * found)


def _in_images(q, k, v, layout: "Layout", scale: float | None = None):
    def attend(queries):
        q, image = queries
        mask = image[:, None, :, None] == layout.image[:, None, None, :]
        return jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale)

    if q.shape[1] <= BLOCK or q.shape[1] % BLOCK:
        return attend((q, layout.image))
    blocks = (x.reshape(len(x), -1, BLOCK, *x.shape[2:]).swapaxes(0, 1) for x in (q, layout.image))
    return jax.lax.map(jax.checkpoint(attend), tuple(blocks)).swapaxes(0, 1).reshape(q.shape)


class Layout(NamedTuple):
    """The places of patches in the order in which the encoder computes them, that of windows."""

    image: jax.Array  # [N,P]
    window: jax.Array  # [N,P] adjacent where equal
    angles: jax.Array | None  # [N,P,d/2] of rotary positions
    tokens: Tokens  # in which these are, `merge`^2 of each one adjacent
    merge: int

    def neighbour(self, down: int, across: int) -> jax.Array:
        """The number `[N,P]` of the patch so many rows below and columns to the right of each, in its image; -1: none.

        In the order of tokens, which is that of patches where there are no windows."""
        t, m = self.tokens, self.merge
        each = jnp.arange(m * m)
        y, x = t.y[..., None] * m + each // m + down, t.x[..., None] * m + each % m + across
        inside = (y >= 0) & (y < t.high[..., None] * m) & (x >= 0) & (x < t.wide[..., None] * m)
        first = jnp.arange(t.image.shape[1]) - t.place  # token of its image
        token = first[..., None] + y // m * t.wide[..., None] + x // m
        index = jnp.where(inside, token * m * m + y % m * m + x % m, -1)
        return index.reshape(len(index), -1)


class RowLayer(nnx.Module):
    """Attention, or a convolution, and a feed-forward, each behind a norm, or between two, and with a residual."""

    def __init__(self, config: PatchRowsConfig, net: Any, rngs: nnx.Rngs, attends: bool = True):
        def norm():
            return norm_of(config.norm, config.width, config.norm_eps, net, rngs)

        self.norm1, self.norm2 = norm(), norm()
        self.out_norm1, self.out_norm2 = (norm() if config.norms == "both" else None for _ in range(2))
        self.attention = RowAttention(config, net, rngs) if attends else None
        self.conv = None if attends else RowConvolution(config, net, rngs)
        linear = ClippedLinear if config.clipped else Linear
        self.mlp = FeedForward(net, rngs, linear=linear) if config.gated else PatchFeedForward(config, net, rngs)

    def __call__(self, x, layout: Layout, full):
        mixer = self.attention if self.conv is None else self.conv
        assert mixer is not None
        x = _added(x, mixer(self.norm1(x), layout, full), self.out_norm1)
        return _added(x, self.mlp(self.norm2(x)), self.out_norm2)


def _added(x, out, norm) -> jax.Array:
    return constrain(x + (out if norm is None else norm(out)), "rows", None, None)


class InterpolatedPositions(nnx.Module):
    """Learned embeddings of a square of places, interpolated to the patches of an image of any shape."""

    def __init__(self, config: PatchRowsConfig, net: Any, rngs: nnx.Rngs):
        self.side, self.places = config.positions, config.places
        shape = (*((self.side, self.side) if config.position_square else (self.side**2,)), config.width)
        self.weight = nnx.Param(jax.random.normal(rngs.params(), shape, net.param_dtype) * net.init_scale)

    def __call__(self, y, x, high, wide):
        """Embeddings `[N,P,D]` in fp32 of patches at y and x `[N,P]` of images of `high` x `wide` patches: bilinear,
        corners on corners; or edges on edges, bicubic (those of Keys with a = -3/4; places outside are the nearest), or
        bilinear and averaged over what a patch covers where the image has fewer ("antialiased")."""

        def shares(place, size):  # of all places along an axis
            scale = self.side / jnp.maximum(size, 1)[..., None]
            distance = jnp.abs(jnp.arange(self.side) - ((place[..., None] + 0.5) * scale - 0.5))
            near = jnp.maximum(1 - distance / jnp.maximum(scale, 1.0), 0.0)
            return near / jnp.maximum(near.sum(-1, keepdims=True), 0.1)  # those of padding may add up to 0

        table = self.weight[...].astype(jnp.float32).reshape(self.side**2, -1)
        if self.places == "antialiased":
            both = shares(y, high)[..., :, None] * shares(x, wide)[..., None, :]
            # As exact as transformers': accelerators would round the factors.
            return jnp.matmul(both.reshape(*y.shape, -1), table, precision="highest")

        def taps(place, size):  # the neighbours along an axis, and their shares
            if self.places == "cubic":
                at = (place + 0.5) * self.side / jnp.maximum(size, 1) - 0.5
                cells = [jnp.floor(at) + step for step in (-1, 0, 1, 2)]
                inside = [jnp.clip(cell, 0, self.side - 1).astype(jnp.int32) for cell in cells]
                return list(zip(inside, [_keys_cubic(jnp.abs(at - cell)) for cell in cells], strict=True))
            at = place.astype(jnp.float32) * (self.side - 1) / jnp.maximum(size - 1, 1)
            low = jnp.clip(jnp.floor(at), 0, self.side - 1)
            share, low = jnp.clip(at - low, 0, 1), low.astype(jnp.int32)  # that of padding is any number
            return (low, 1 - share), (jnp.minimum(low + 1, self.side - 1), share)

        parts = (
            table[row * self.side + column] * (of_row * of_column)[..., None]
            for row, of_row in taps(y, high)
            for column, of_column in taps(x, wide)
        )
        return sum(parts, jnp.zeros((), jnp.float32))


def _keys_cubic(x, a: float = -0.75) -> jax.Array:
    """The share of a number at distance `x` in what is interpolated (Keys, 1981)."""
    near, far = ((a + 2) * x - (a + 3)) * x**2 + 1, ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return jnp.where(x <= 1, near, jnp.where(x < 2, far, 0.0))


class AxisPositions(nnx.Module):
    """Learned embeddings of columns and of rows; a patch has the sum of its two."""

    def __init__(self, config: PatchRowsConfig, net: Any, rngs: nnx.Rngs):
        shape = (2, config.positions, config.width)
        self.weight = nnx.Param(jax.random.normal(rngs.params(), shape, net.param_dtype) * net.init_scale)

    def __call__(self, y, x, high, wide):
        """Embeddings `[N,P,D]` in fp32 of patches at y and x `[N,P]`."""
        columns, rows = self.weight[...].astype(jnp.float32)
        return columns[x] + rows[y]


PLACES = {"linear": InterpolatedPositions, "cubic": InterpolatedPositions, "antialiased": InterpolatedPositions,
          "axes": AxisPositions}  # fmt: skip


class PatchRows(nnx.Module):
    """Features `[N,M,(1+E)D]` of the M tokens of all images of rows, in order, from patches `[N,P,numbers]`.

    The first D are the embeddings of tokens in the decoder, of width D; the others are added behind each of its first E
    layers. `net` has the types, adapters and D of a ModelConfig.
    """

    def __init__(self, config: PatchRowsConfig, net: Any, rngs: nnx.Rngs):
        self.config = config
        own = dataclasses.replace(
            net, width=config.width, ffn=config.ffn, mlp_bias=config.bias, activation=config.activation,
            norm_offset=0.0, swiglu_limit=config.swiglu_limit, swiglu_everywhere=bool(config.swiglu_limit),
            swiglu_alpha=1.0, swiglu_offset=0.0,
        )  # fmt: skip
        # Dimensions in the order of a map's or a convolution's weights in files, transposed.
        shape = (config.patch_numbers,) if config.patch_map else config.patch_shape[::-1]
        shape = (*shape, config.width)
        patch = {"kernel": nnx.Param(jax.random.normal(rngs.params(), shape, net.param_dtype) * config.init_scale)}
        if config.patch_bias:
            patch["bias"] = nnx.Param(jnp.zeros((config.width,), net.param_dtype))
        self.patch = nnx.Dict(patch)
        norm = norm_of(config.norm, config.width, config.norm_eps, own, rngs) if config.patch_norm else None
        self.patch_norm = norm
        self.position = PLACES[config.places](config, own, rngs) if config.positions else None
        self.layers, self.conv_layers = (
            stacked(functools.partial(RowLayer, config, own, attends=attends), len(layers), rngs) if layers else None
            for attends, layers in zip((True, False), config.stacks.values(), strict=True)
        )
        self.norm = norm_of(config.norm, config.width, config.norm_eps, own, rngs) if config.last_norm else None
        self.merger = MERGERS[config.merger](config, net.width, own, rngs)
        deep, count = (lambda r: Merger(config, net.width, own, r, whole=True)), len(config.deepstack)
        self.deepstack = stacked(deep, count, rngs) if count else None

    def __call__(self, pixels, tokens: Tokens, checkpointed=lambda step: step):
        c = self.config
        order, window = None, tokens.image
        if c.window_size:
            side = c.window_tokens
            across = -(-tokens.wide // side)
            window = jnp.where(tokens.y >= tokens.high, 0, tokens.y // side * across + tokens.x // side)
            window = tokens.image * tokens.image.shape[1] + window
            order = jnp.argsort(window, axis=1, stable=True)
        each, count = jnp.arange(c.merge**2), tokens.image.shape[1]

        def sorted_(x, order=order):
            if order is None:
                return x
            return jnp.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 2)), axis=1)

        def of_patches(x):
            return sorted_(x.reshape(len(x), count, -1)).reshape(len(x), count * c.merge**2, -1)

        def repeated(x):
            return jnp.repeat(sorted_(x), c.merge**2, axis=1)

        pairs = c.width // c.heads // 2
        powers = jnp.arange(pairs) / pairs
        powers = (powers[::2], powers[1::2] if c.rotary == "alternating" else powers[::2])
        if c.rotary == "time":
            powers = (jnp.arange(pairs // 3) / (pairs // 3),) * 2
        places = (tokens.y[..., None] * c.merge + each // c.merge, tokens.x[..., None] * c.merge + each % c.merge)
        places = [of_patches(place) for place in places]
        angles = [x * c.rotary_base**-power for x, power in zip(places, powers, strict=True)] if c.rotary_base else None
        if angles is not None and c.rotary == "time":
            angles = [jnp.zeros_like(angles[0]), *angles]
        layout = Layout(
            repeated(tokens.image), repeated(window), None if angles is None else jnp.concatenate(angles, axis=-1),
            tokens, c.merge,
        )  # fmt: skip
        kernel = self.patch["kernel"][...]
        if c.patch_map == "pixels":  # of rows, columns and channels, where patches have channels first
            kernel = kernel.reshape(c.patch_size, c.patch_size, c.channels, -1).swapaxes(0, 1)
        kernel = kernel.transpose(*reversed(range(kernel.ndim - 1)), -1).reshape(c.patch_numbers, -1)
        x = of_patches(pixels) @ kernel.astype(pixels.dtype)
        if c.patch_bias:
            x += self.patch["bias"][...].astype(x.dtype)
        x = x if self.patch_norm is None else self.patch_norm(x)
        if self.position is not None:
            sizes = (repeated(size * c.merge) for size in (tokens.high, tokens.wide))
            x += self.position(*(place[..., 0] for place in places), *sizes).astype(x.dtype)
        x = constrain(x, "rows", None, None)
        full = jnp.isin(jnp.arange(c.layers), jnp.array(c.full_layers, jnp.int32))
        features = []
        # Layers of one kind run in one scan, up to those whose features are added to the decoder's.
        runs = itertools.groupby(range(c.layers), lambda n: (n in c.conv_layers, sum(last < n for last in c.deepstack)))
        for (convolves, number), run in ((kind, list(run)) for kind, run in runs):
            graph, layers = nnx.split(cast(RowLayer, self.conv_layers if convolves else self.layers))
            first = sum((layer in c.conv_layers) == convolves for layer in range(run[0]))
            end = first + len(run)

            def step(x, layer, graph=graph):
                state, full = layer
                return nnx.merge(graph, state)(x, layout, full), None

            some = jax.tree.map(lambda x, a=first, b=end: jax.lax.slice_in_dim(x, a, b), layers)
            x, _ = jax.lax.scan(checkpointed(step), x, (some, full[run[0] : run[-1] + 1]))
            if self.deepstack is not None and run[-1] in c.deepstack:
                of_merger, mergers = nnx.split(self.deepstack)
                one = jax.tree.map(lambda x, n=number: jax.lax.index_in_dim(x, n, keepdims=False), mergers)
                features.append(nnx.merge(of_merger, one)(x))
        x = x if self.norm is None else self.norm(x)
        features = jnp.concatenate([self.merger(x), *features], axis=-1)
        return features if order is None else sorted_(features, jnp.argsort(order, axis=1))
