"""The vision part of a model: an encoder and a projector, and the place of what they give among the tokens of rows."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.algorithms.batch import ImageEmbeddings
from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.sharding import constrain
from jaxrl_llm.models.vision.projector import PROJECTORS
from jaxrl_llm.models.vision.siglip import Siglip, SiglipConfig


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """The shape of a model's vision part. Hashable: it is part of a ModelConfig."""

    encoder: SiglipConfig
    merge: int  # patches along each side of a square that becomes one token
    image_token: int  # the token id whose embeddings the features of tiles replace
    projector: str = "shuffle"  # one of projector.PROJECTORS
    bidirectional: bool = False  # the decoder's tokens of an image see all of them

    @property
    def tile_tokens(self) -> int:
        """Tokens that a tile becomes."""
        return (self.encoder.side // self.merge) ** 2

    @property
    def tile_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of every tile."""
        return (self.encoder.image_size, self.encoder.image_size, self.encoder.channels)


class Vision(nnx.Module):
    """Embeddings of a decoder of width `net.width` from the pixels of tiles."""

    def __init__(self, config: VisionConfig, net: Any, rngs: nnx.Rngs):
        # Of the settings that matrices have, adapters are the tower's only where it is trained by them.
        lora = net.lora if net.vision_training == "lora" else None
        own = dataclasses.replace(net, lora=lora, quantize="none", init_scale=config.encoder.init_scale)
        self.config = config
        self.encoder = Siglip(config.encoder, own, rngs)
        self.projector = PROJECTORS[config.projector](config.encoder, config.merge, own, rngs)

    def encode(self, pixels, dtype, checkpointed) -> jax.Array:
        """The embeddings `[N,M,D]` of the M tokens of all tiles of a row, in order, of pixels `[N,K,H,W,C]`.

        Raises ConfigError for tiles of another shape than the model's.
        """
        rows, _, *shape = pixels.shape
        if tuple(shape) != self.config.tile_shape:
            raise ConfigError(
                f"tiles of images are {' x '.join(map(str, shape))} (height, width, channels), but this model reads "
                f"{' x '.join(map(str, self.config.tile_shape))}: use the image processor of its folder"
            )
        pixels = constrain(pixels.reshape(-1, *shape).astype(dtype), "rows", None, None, None)
        values = self.projector(self.encoder(pixels, checkpointed))
        return constrain(values.reshape(rows, -1, values.shape[-1]), "rows", None, None)

    def place(self, tokens, segments, features, count) -> ImageEmbeddings:
        """The embeddings of the rows' image tokens: `features` of the first `count` tiles of each row.

        Segments 0 are padding, whatever the token.
        """
        is_image = (tokens == self.config.image_token) & (segments != 0)
        # Image tokens behind those of a row's tiles (a completion may have some) keep the embedding of their id.
        place = jnp.cumsum(is_image, axis=1) - 1
        in_tiles = is_image & (place < count[:, None] * self.config.tile_tokens)
        return ImageEmbeddings(features, jnp.where(in_tiles, place, -1))


def with_images(x, images: ImageEmbeddings) -> jax.Array:
    """Embeddings x `[R,W,D]`, in which those of image tokens are the images'."""
    index = images.index
    by_source = jnp.maximum(index, 0).reshape(len(images.values), -1, 1)
    picked = jnp.take_along_axis(images.values, by_source, axis=1).reshape(x.shape)
    return jnp.where((index >= 0)[..., None], picked.astype(x.dtype), x)


def image_runs(index, segments) -> jax.Array:
    """A number `[N,T]`, from 1, of the run of image tokens that a token is in; 0: in none.

    `index` `[N,T]` is -1 where no image is. Images with no token between them are one run, and a segment ends one.
    """
    segments = jnp.where(index >= 0, segments, 0)
    changes = jnp.diff(segments, axis=1, prepend=0) != 0
    return jnp.where(segments != 0, jnp.cumsum(changes, axis=1), 0)
