"""The vision part of a model: an encoder and a projector, and the places of their features among the tokens of rows."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.algorithms.batch import ImageEmbeddings, Images
from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.sharding import constrain, row_shards
from jaxrl_llm.models.vision.any_resolution import NUMBERS, of_first_tiles, put_together, token_counts
from jaxrl_llm.models.vision.patch_embedder import PatchEmbedder, PatchEmbedderConfig
from jaxrl_llm.models.vision.patch_rows import PatchRows, PatchRowsConfig, Tokens, token_grid
from jaxrl_llm.models.vision.perceiver import PerceiverConfig, PerceiverProjector
from jaxrl_llm.models.vision.projector import PROJECTORS
from jaxrl_llm.models.vision.siglip import Siglip, SiglipConfig, seen_patches
from jaxrl_llm.models.vision.tiled import NUMBERS as TILED_NUMBERS
from jaxrl_llm.models.vision.tiled import Tiled, TiledConfig, seen_features

PATCHES_AT_ONCE = 2**14  # of the rows of a shard: enough for matmuls, and activations of a gigabyte or two


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """The shape of a model's vision part. Hashable: it is part of a ModelConfig."""

    encoder: SiglipConfig | PatchRowsConfig  # of tiles of one size, or of images of any size
    merge: int  # patches along each side of a square that becomes one token
    image_token: int  # the token id whose embeddings the features of tiles replace
    projector: str = "shuffle"  # one of projector.PROJECTORS; "": the encoder gives embeddings of the decoder
    # Layers in which the decoder's tokens of an image see all: "all"; "sliding", in the window. "prompt": in all layers
    # those of a prompt do, its images included.
    bidirectional: str = ""
    blank_tokens: tuple[int, ...] = ()  # in whose place the decoder reads the token `blank`, wherever no feature is
    blank: int = 0
    projector_ffn: int = 0  # channels of a gated projector, gates included
    projector_norm: float = 0.0  # epsilon of its norm; 0: it has none
    perceiver: PerceiverConfig | None = None  # of the projector `perceiver`
    # Tokens whose embeddings are features too where they begin an image, are between its tiles, or end it: the last.
    marks: tuple[int, ...] = ()
    newline: str = ""  # tiles of an image are put together, as `any_resolution` says: "exact", or "interpolated"

    @property
    def tile_tokens(self) -> int:
        """Tokens that a tile becomes."""
        assert isinstance(self.encoder, SiglipConfig)
        if self.perceiver is not None:
            return self.perceiver.latents
        return 1 if self.is_read_apart else (self.encoder.side // self.merge) ** 2

    @property
    def tile_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of every tile; of a Tiled encoder of every image, its tiles one below another."""
        assert isinstance(self.encoder, SiglipConfig)
        tiles = self.encoder.tiles if isinstance(self.encoder, TiledConfig) else 1
        return (tiles * self.encoder.image_size, self.encoder.image_size, self.encoder.channels)

    @property
    def is_read_apart(self) -> bool:
        """True where layers of the decoder read the features of images, which are no tokens of its."""
        return isinstance(self.encoder, TiledConfig)

    @property
    def numbers(self) -> int:
        """Numbers of an image or a tile that `Images.grids` has beside the pixels of tiles; 0: it has none."""
        return TILED_NUMBERS if self.is_read_apart else NUMBERS if self.newline else 0


class Vision(nnx.Module):
    """Embeddings of a decoder of width `net.width` from the pixels of tiles."""

    def __init__(self, config: VisionConfig, net: Any, rngs: nnx.Rngs):
        # Of the settings that matrices have, adapters are the tower's only where it is trained by them.
        lora = net.lora if net.vision_training == "lora" else None
        stays = {"quantize": "none", "qat": "none", "matmul_dtype": "auto"}
        own = dataclasses.replace(net, lora=lora, init_scale=config.encoder.init_scale, **stays)
        self.config, self.has_axes = config, bool(net.rope_axes)
        if isinstance(config.encoder, PatchRowsConfig):
            shape = config.encoder
            bare = isinstance(shape, PatchEmbedderConfig)
            self.encoder = PatchEmbedder(shape, own, rngs) if bare else PatchRows(shape, own, rngs)
            self.projector = None
        else:
            shape = config.encoder
            self.encoder = Tiled(shape, own, rngs) if isinstance(shape, TiledConfig) else Siglip(shape, own, rngs)
            self.projector = PROJECTORS[config.projector](config, own, rngs)
        line = jax.random.normal(rngs.params(), (net.width,), net.param_dtype) if config.newline else None
        self.newline = None if line is None else nnx.Param(line * net.width**-0.5)

    def encode(self, images: Images, dtype, checkpointed) -> jax.Array:
        """The features `[N,M,D]` of the M tokens of all images of a row, in order, those of `PatchRows` `[N,M,(1+E)D]`.

        Rows are encoded some at a time, those of a shard of the mesh by it, where they have more than PATCHES_AT_ONCE.
        Raises ConfigError for pixels of another shape than the model's.
        """
        encoder, mesh = self.config.encoder, cast(Any, jax.sharding.get_abstract_mesh())
        patches = images.pixels.shape[1]  # of a row, or its tiles
        if isinstance(encoder, SiglipConfig):
            patches *= self.config.tile_shape[0] // encoder.patch_size * encoder.side
        shards = 1 if mesh.empty else row_shards(mesh)
        rows, rest = divmod(len(images.pixels), shards)
        fitting = (n for n in range(1, rows) if rows % n == 0 and rows // n * patches <= PATCHES_AT_ONCE)
        parts = next(fitting, max(rows, 1))
        if parts == 1 or rest:
            return self._encode(images, dtype, checkpointed)

        def split(x) -> jax.Array:
            x = x.reshape(shards, parts, -1, *x.shape[1:]).swapaxes(0, 1)
            return x.reshape(parts, -1, *x.shape[3:])

        # As many activations as a part has, in the backward pass too.
        one = jax.checkpoint(lambda part: self._encode(part, dtype, checkpointed), prevent_cse=False)
        found = jax.lax.map(one, jax.tree.map(split, images))
        found = found.reshape(parts, shards, -1, *found.shape[2:]).swapaxes(0, 1)
        return constrain(found.reshape(-1, *found.shape[3:]), "rows", None, None)

    def _encode(self, images: Images, dtype, checkpointed) -> jax.Array:
        pixels, encoder = images.pixels, self.config.encoder
        if isinstance(self.encoder, PatchRows | PatchEmbedder) and isinstance(encoder, PatchRowsConfig):
            if pixels.ndim != 3 or pixels.shape[2] != encoder.patch_numbers or images.grids is None:
                raise ConfigError(
                    f"images have pixels of shape {pixels.shape} and grids {getattr(images.grids, 'shape', None)}, but "
                    f"this model reads patches [rows, patches, {encoder.patch_numbers}] and grids [rows, images, 2]"
                )
            pixels = 2 * (pixels - 0.5) if encoder.from_zero else pixels
            count = pixels.shape[1] // self.config.merge**2
            values = self.encoder(pixels.astype(dtype), self._tokens(images, count), checkpointed)
            if not (self.config.marks and isinstance(self.encoder, PatchRows)):
                return values
            marks = self.encoder.merger.marks.astype(values.dtype)
            return jnp.concatenate([values, jnp.broadcast_to(marks, (len(values), *marks.shape))], axis=1)
        rows, _, *shape = pixels.shape
        numbers, of_grids = self.config.numbers, 0 if images.grids is None else images.grids.shape[2]
        if tuple(shape) != self.config.tile_shape or of_grids != numbers:
            grids = f", and grids of {numbers} numbers" if numbers else ""
            raise ConfigError(
                f"tiles of images are {' x '.join(map(str, shape))} (height, width, channels), but this model reads "
                f"{' x '.join(map(str, self.config.tile_shape))}{grids}: use the image processor of its folder"
            )
        assert self.projector is not None
        if isinstance(self.encoder, Tiled):
            tiles, grids = self.encoder.config.tiles, self._grids(images).reshape(-1, TILED_NUMBERS)
            pixels = pixels.reshape(-1, tiles, shape[0] // tiles, *shape[1:]).astype(dtype)
            pixels = constrain(pixels, "rows", None, None, None, None)
            values = self.projector(self.encoder(pixels, grids, checkpointed))
            return constrain(values.reshape(rows, -1, values.shape[-1]), "rows", None, None)
        assert isinstance(self.encoder, Siglip)
        pixels = constrain(pixels.reshape(-1, *shape).astype(dtype), "rows", None, None, None)
        if isinstance(self.projector, PerceiverProjector):
            seen = seen_patches(pixels, encoder.patch_size)
            features = self.encoder(jnp.where(jnp.isnan(pixels), 0, pixels), checkpointed, seen)
            values = self.projector(features, seen)
        else:
            values = self.projector(self.encoder(pixels, checkpointed))
        if self.newline is not None:
            values = values.reshape(rows, -1, *values.shape[1:])
            grids = of_first_tiles(images.grids, images.count)
            return put_together(values, self.newline[...], grids, self.config.newline == "interpolated")
        return constrain(values.reshape(rows, -1, values.shape[-1]), "rows", None, None)

    def _grids(self, images: Images) -> jax.Array:
        """The numbers `[N,K,2]` of the images that a Tiled encoder reads, 0 behind those of a row."""
        own = jnp.arange(images.grids.shape[1]) < images.count[:, None]  # features may be there without pixels
        return jnp.where(own[..., None], images.grids, 0)

    def seen(self, tokens, segments, positions, images: Images) -> jax.Array:
        """The features of a Tiled encoder that each token sees, as `seen_features` has them."""
        assert isinstance(self.encoder, Tiled)
        own = self._grids(images)
        return seen_features(tokens, segments, positions, self.config.image_token, own, self.encoder.config)

    def _tokens(self, images: Images, count: int) -> Tokens:
        return token_grid(images.grids, images.count, count, self.config.merge)

    def place(self, tokens, segments, positions, size: int, images: Images) -> ImageEmbeddings:
        """The places of the rows' image tokens among the `size` features of the images of each row, which end with the
        marks, without values.

        Segments 0 are padding, whatever the token; `positions` `[N,T]` count from 0 in each segment.
        """
        is_image = (tokens == self.config.image_token) & (segments != 0)
        # Image tokens behind those of a row's images (a completion may have some) keep the embedding of their id.
        index = jnp.cumsum(is_image, axis=1) - 1
        if not isinstance(self.encoder, PatchRows | PatchEmbedder):
            known = images.count * self.config.tile_tokens
            if self.config.newline:
                known = token_counts(of_first_tiles(images.grids, images.count), self.config.tile_tokens).sum(axis=1)
            return ImageEmbeddings(None, jnp.where(is_image & (index < known[:, None]), index, -1))
        size -= len(self.config.marks)
        grid = self._tokens(images, size)
        known = (grid.y < grid.high).sum(axis=1)
        index = jnp.where(is_image & (index < known[:, None]), index, -1)
        index = self._with_marks(index, tokens, segments, size) if self.config.marks else index
        return ImageEmbeddings(None, index, image_positions(index, positions, grid) if self.has_axes else None)

    def _with_marks(self, index, tokens, segments, size: int) -> jax.Array:
        """The index, in which tokens that mark images have a feature from `size` on, each its own.

        Behind the last tile there may be two, of which the last one ends the image: those that a completion may have
        behind these keep the embedding of their id, as image tokens do.
        """
        is_mark = (tokens[..., None] == jnp.array(self.config.marks)) & (segments != 0)[..., None]
        mark, any_mark, ends = is_mark.argmax(-1), is_mark.any(-1), is_mark[..., -1]
        of_image = jnp.where(index >= 0, segments, 0)

        def moved(x, by: int):
            return jax.lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), (by, -by, 0)))

        beside = (moved(of_image, 1) == segments) | (moved(of_image, -1) == segments)
        beside |= (moved(of_image, 2) == segments) & moved(any_mark & ~ends, 1)
        return jnp.where(any_mark & beside, size + mark, index)


def image_positions(index, positions, grid: Tokens) -> jax.Array:
    """Positions `[N,T,3]` of tokens in time, height and width (arXiv 2409.12191).

    The tokens of an image have one time, and rows and columns that count from it; text behind an image goes on behind
    the largest of these. `positions` `[N,T]` count from 0 in each segment, `index` is that of `ImageEmbeddings`.
    """
    is_image = index >= 0

    def of_token(x):
        return jnp.where(is_image, jnp.take_along_axis(x, jnp.maximum(index, 0), axis=1), 0)

    count, most = of_token(grid.high * grid.wide), of_token(jnp.maximum(grid.high, grid.wide))
    saved = jnp.where(is_image & (of_token(grid.place) == count - 1), count - most, 0)
    before = jnp.cumsum(saved, axis=1) - saved
    start = jnp.arange(index.shape[1]) - positions
    time = positions - (before - jnp.take_along_axis(before, start, axis=1)) - of_token(grid.place)
    return jnp.stack([time, time + of_token(grid.y), time + of_token(grid.x)], axis=-1)


def with_images(x, images: ImageEmbeddings) -> jax.Array:
    """Embeddings x `[R,W,D]`, in which those of image tokens are the images'."""
    return jnp.where((images.index >= 0)[..., None], _of_tokens(x, images, 0), x)


def deepened(x, images: ImageEmbeddings, layer) -> jax.Array:
    """Hidden states x `[R,W,D]` after a layer of the decoder, with the features that images add there (arXiv
    2406.04334)."""
    return x + jnp.where((images.index >= 0)[..., None], _of_tokens(x, images, layer + 1), 0)


def _of_tokens(x, images: ImageEmbeddings, part) -> jax.Array:
    """A part `[R,W,D]` of the values, at the tokens of x; any number at tokens without one."""
    values = images.values.reshape(*images.values.shape[:2], -1, x.shape[-1])
    values = jax.lax.dynamic_index_in_dim(values, part, 2, keepdims=False)
    by_source = jnp.maximum(images.index, 0).reshape(len(values), -1, 1)
    return jnp.take_along_axis(values, by_source, axis=1).reshape(x.shape).astype(x.dtype)


def image_runs(index, segments) -> jax.Array:
    """A number `[N,T]`, from 1, of the run of image tokens that a token is in; 0: in none.

    `index` `[N,T]` is -1 where no image is. Images with no token between them are one run, and a segment ends one.
    """
    segments = jnp.where(index >= 0, segments, 0)
    changes = jnp.diff(segments, axis=1, prepend=0) != 0
    return jnp.where(segments != 0, jnp.cumsum(changes, axis=1), 0)
