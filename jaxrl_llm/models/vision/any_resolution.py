"""Images of any resolution as LLaVA-1.6 and LLaVA-OneVision (arXiv 2408.03326) read them: a tile of the whole image,
then the tiles of a grid, whose patches are put together row by row, without those of the padding around the image.

An image is six numbers: rows and columns of its grid of tiles, of the patches of the grid that are its own, and of the
tokens that these become. They are 0, 0, 0, 0, 1, 0 of one that is a tile of the whole alone.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.distributed.sharding import constrain

NUMBERS = 6


def of_first_tiles(grids, count) -> jax.Array:
    """The grids `[N,K,6]` of the images that the first `count` `[N]` tiles of rows are, and 0 for others."""
    tiles = 1 + grids[..., 0] * grids[..., 1]
    return jnp.where((jnp.cumsum(tiles, axis=1) <= count[:, None])[..., None], grids, 0)


def token_counts(grids, patches: int):
    """The tokens `[N,K]` of images with the `grids` `[N,K,6]`, whose tiles have so many patches; 0 where all are 0."""
    high, wide = grids[..., 4], grids[..., 5]
    return (patches + high * (wide + 1)) * (high > 0)


def put_together(values, newline, grids, interpolated: bool) -> jax.Array:
    """The embeddings `[N,M,D]` of the tokens of images, in order, from those `[N,K,S,D]` of the patches of K tiles.

    The patches of the whole are the first tokens of an image; `newline` `[D]` follows each row of those of the grid.
    Where images may have fewer tokens than patches (`interpolated`) these are bilinear, edges on edges. M is what K
    tiles may have at most; tokens behind those of the images are any numbers.
    """
    rows, tiles, patches, width = values.shape
    side = round(patches**0.5)
    counts = token_counts(grids, patches)
    ends = jnp.cumsum(counts, axis=1)
    index = jnp.arange(tiles * (patches + side))
    image = jnp.minimum((index[:, None] >= ends[:, None, :]).sum(-1), tiles - 1)

    def of_image(x):
        return jnp.take_along_axis(x, image, axis=1)

    tiles_of = (1 + grids[..., 0] * grids[..., 1]) * (counts > 0)
    first = of_image(jnp.cumsum(tiles_of, axis=1) - tiles_of)
    place = index - of_image(ends - counts)
    down, across, kept_high, kept_wide, high, wide = (of_image(grids[..., n]) for n in range(NUMBERS))
    row, column = jnp.divmod(jnp.maximum(place - patches, 0), wide + 1)
    flat = values.reshape(rows, tiles * patches, width)

    def at(y, x):  # of the patches that are the image's own, between equal margins
        y, x = y + (down * side - kept_high) // 2, x + (across * side - kept_wide) // 2
        tile = 1 + y // side * across + x // side
        source = first * patches + jnp.where(place < patches, place, tile * patches + y % side * side + x % side)
        source = jnp.clip(source, 0, tiles * patches - 1)
        return jnp.take_along_axis(flat, source[..., None], axis=1)

    def taps(place, kept, count):  # the neighbours along an axis, and the share of the second
        scale = kept / jnp.maximum(count, 1)
        source = jnp.maximum((place + 0.5) * scale - 0.5, 0.0)
        low = jnp.floor(source).astype(jnp.int32)
        return low, jnp.minimum(low + 1, jnp.maximum(kept - 1, 0)), (source - low)[..., None]

    if interpolated:
        (y, below, by_y), (x, right, by_x) = taps(row, kept_high, high), taps(column, kept_wide, wide)
        found = (at(y, x) * (1 - by_x) + at(y, right) * by_x) * (1 - by_y)
        found += (at(below, x) * (1 - by_x) + at(below, right) * by_x) * by_y
    else:
        found = at(row, column)
    ends_row = (place >= patches) & (column == wide)
    found = jnp.where(ends_row[..., None], newline, found).astype(values.dtype)
    return constrain(found, "rows", None, None)
