"""Attention of a decode step as one kernel on GPUs: a row's queries over its prompt's cache and its own.

The plain path (attention.py) is a dozen kernels and reads row caches to their end; this one stops at each row's newest
token. Scores stay on the chip (arXiv 2307.08691), and few rows share the chip by splitting their keys. Latents (arXiv
2405.04434) are read once, for the scores of all heads and for their values.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl_llm.distributed.sharding import activation_spec, is_sharded
from jaxrl_llm.models.kernels.fused_attention import has_triton
from jaxrl_llm.models.quantize import as_fp8

BLOCK = 64  # keys that are read at once; of latents half as many
TILE = 64  # queries of a program, at most
LEAST = 16  # rows and columns of the smallest matmul tile, whose sizes are powers of two; the rest of a tile is zeros
PROGRAMS = 256  # that fill a GPU, of latents half as many; fewer are split, up to SPLITS times
SPLITS = 16
MASKED = -1e30  # finite, so that a row with nothing to attend to (padding) stays finite too


def by_kernel(config, dtype) -> bool:
    """True where a decode step of the model, computed in that type, attends by the kernel and not in the plain way."""
    plain = config.attention == "xla" or config.alibi
    return jax.default_backend() == "gpu" and dtype.itemsize == 2 and not plain and has_triton()


def decode_attention(
    q,
    prompt,
    cache,
    prompt_start,
    length,
    window=None,
    softcap: float | None = None,
    chunks: bool = False,
    sinks=None,
    latent: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """`[G,R,J,W,H/J,d]`: attention of (scaled) queries of that shape to keys and values of prompts and rows.

    `prompt` are keys and values `[G,J,P,d]`, seen from `prompt_start` `[G]` on; `cache` those of rows `[G,R,J,C,d]`, of
    which token w of the W sees the first `length + w + 1`, `length` `[G,R]`. `window` is the number of tokens that a
    query sees, itself included; with `chunks` it sees what is in its own chunk of that many positions. `softcap` bounds
    the scores. `sinks` `[J,H/J]` are scores of one more token each, which has no value. With `latent` prompt and cache
    are keys alone, of one head for all queries: the first `latent` of their d numbers are the values, and the result
    has as many. `interpret` runs the kernel without a GPU, for tests.
    Softmax and sums are in fp32; keys and values of another type are converted to that of the queries as they are read.
    """
    if window is None:
        window = jnp.iinfo(jnp.int32).max // 2
    window = jnp.full((1,), window, jnp.int32)
    run = functools.partial(_attend, softcap=softcap, chunks=chunks, latent=latent, interpret=interpret)
    if is_sharded():
        keys, queries = ("heads", None) if latent is None else (None, "heads")  # which of the two heads are sharded
        of_queries = activation_spec(q.shape, "rows", None, keys, None, queries, None)
        prompts = activation_spec(prompt[0].shape, "rows", keys, None, None)
        rows = activation_spec(cache[0].shape, "rows", None, keys, None, None)
        starts, lengths = (PartitionSpec(*spec) for spec in (of_queries[:1], of_queries[:2]))
        of_sinks = None if sinks is None else PartitionSpec(of_queries[2], of_queries[4])
        in_specs = (of_queries, prompts, rows, starts, lengths, PartitionSpec(), of_sinks)
        run = jax.shard_map(run, in_specs=in_specs, out_specs=of_queries, check_vma=False)
    return run(q, tuple(map(as_fp8, prompt)), tuple(map(as_fp8, cache)), prompt_start, length, window, sinks)


def _attend(
    q, prompt, cache, prompt_start, length, window, sinks,
    softcap: float | None, chunks: bool, latent: int | None, interpret: bool,
):  # fmt: skip
    # Imported here: only runs on GPUs need it.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    def columns(size: int) -> int:
        return max(LEAST, 2 ** math.ceil(math.log2(size)))

    g, r, j, w, per_token, d = q.shape
    queries = w * per_token
    size_v = d if latent is None else latent
    # How many numbers of a key are loaded at once, by where they begin: those of a value, and of a latent the others.
    parts = {0: size_v} if size_v == d else {0: size_v, size_v: d - size_v}
    width, width_v = max(start + columns(size) for start, size in parts.items()), columns(size_v)
    tile = min(columns(queries), TILE)
    tiles = -(-queries // tile)
    # A program of latents has the registers and the shared memory of two others.
    block, programs, warps = (BLOCK, PROGRAMS, 4) if latent is None else (BLOCK // 2, -(-PROGRAMS // 2), 8)
    splits = min(SPLITS, max(1, 2 ** int(math.log2(programs / min(g * r * j * tiles, programs)))))
    sizes = prompt[0].shape[-2], cache[0].shape[-2]

    def load(ref, at, is_row) -> list[jax.Array]:
        """The parts `[rows, columns]` of queries, keys or values."""
        return [
            triton.load(
                ref.at[at, pl.ds(start, columns(size))],
                mask=is_row[:, None] & (jnp.arange(columns(size))[None] < size),
                other=0.0,
            )
            for start, size in parts.items()
        ]

    def kernel(q_ref, prompt_refs, row_refs, start_ref, length_ref, window_ref, sinks_ref, *out_refs):
        split, number = pl.program_id(4), pl.program_id(3) * tile + jnp.arange(tile)
        is_query = number < queries
        queries_ = load(q_ref, slice(None), is_query)
        start, length, first_window = start_ref[0], length_ref[0], window_ref[0]
        in_row = length + number // per_token  # the place of each query's token in the row's cache
        window = first_window  # of the first token, and of each query
        if chunks:  # back to where the chunk begins
            window = ((sizes[0] - start + in_row) % first_window + 1)[:, None]
            first_window = (sizes[0] - start + length) % first_window + 1
        # The blocks that some query sees, those of the prompt and then those of the row; a split has its share of them.
        newest = length + w - 1
        first_in_prompt = jnp.maximum(start, sizes[0] + length - first_window + 1) // block
        prompt_blocks = jnp.maximum(pl.cdiv(sizes[0], block) - first_in_prompt, 0)
        first_in_row = jnp.maximum(length - first_window + 1, 0) // block
        row_blocks = pl.cdiv(jnp.minimum(newest + 1, sizes[1]), block) - first_in_row
        share = pl.cdiv(prompt_blocks + row_blocks, splits)
        low = split * share
        high = jnp.minimum(low + share, prompt_blocks + row_blocks)

        def over(refs, size: int, first, seen, low, high, state):
            def body(number, state):
                out, top, total = state
                place = (first + number) * block + jnp.arange(block)
                at = pl.ds((first + number) * block, block)
                keys, *values = ([x.astype(q.dtype) for x in load(ref, at, place < size)] for ref in refs)
                scores = sum(triton.dot(x, k.T) for x, k in zip(queries_, keys, strict=True))
                scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
                scores = jnp.where(seen(place[None]) & (place < size)[None], scores, MASKED)
                highest = jnp.maximum(top, scores.max(axis=1))
                fading = jnp.exp(top - highest)
                shares = jnp.exp(scores - highest[:, None])
                v = keys[0] if latent is not None else values[0][0]
                out = out * fading[:, None] + triton.dot(shares.astype(v.dtype), v)
                return out, highest, total * fading + shares.sum(axis=1)

            return jax.lax.fori_loop(low, high, body, state)

        top, total = jnp.full((tile,), MASKED, jnp.float32), jnp.zeros((tile,))
        if sinks_ref is not None:  # the first split has the sinks
            sink = triton.load(sinks_ref, mask=is_query, other=0.0)
            top, total = jnp.where(split == 0, sink, top), jnp.where(split == 0, 1.0, total)
        state = (jnp.zeros((tile, width_v), jnp.float32), top, total)

        def in_prompt(place):
            return (place >= start) & (sizes[0] - place + in_row[:, None] < window)

        def in_own(place):
            return (place <= in_row[:, None]) & (in_row[:, None] - place < window)

        of_prompt = (prompt_refs, sizes[0], first_in_prompt, in_prompt)
        state = over(*of_prompt, low, jnp.minimum(high, prompt_blocks), state)
        of_row = (row_refs, sizes[1], first_in_row, in_own)
        low_in_row = jnp.maximum(low - prompt_blocks, 0)
        out, top, total = over(*of_row, low_in_row, jnp.maximum(high - prompt_blocks, low_in_row), state)
        is_number = is_query[:, None] & (jnp.arange(width_v)[None] < size_v)
        if splits == 1:
            triton.store(out_refs[0], (out / total[:, None]).astype(out_refs[0].dtype), mask=is_number)
            return
        out_ref, *number_refs = out_refs
        triton.store(out_ref, out, mask=is_number)
        for ref, x in zip(number_refs, (top, total), strict=True):
            triton.store(ref, x, mask=is_query)

    def spec(shape, index) -> Any:
        return pl.BlockSpec(shape, index)

    of_queries, of_out = (
        spec((None, None, None, tile, size), lambda g, r, j, t, s: (g, r, j, t, 0)) for size in (width, width_v)
    )
    of_prompt = spec((None, None, sizes[0], width), lambda g, r, j, t, s: (g, j, 0, 0))
    of_row = spec((None, None, None, sizes[1], width), lambda g, r, j, t, s: (g, r, j, 0, 0))
    if splits == 1:
        shapes, out_specs = (jax.ShapeDtypeStruct((g, r, j, queries, size_v), q.dtype),), (of_out,)
    else:
        lead = (splits, g, r, j, queries)
        shapes = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*lead, size_v), lead, lead))
        wide = spec((None, None, None, None, tile, width_v), lambda g, r, j, t, s: (s, g, r, j, t, 0))
        narrow = spec((None, None, None, None, tile), lambda g, r, j, t, s: (s, g, r, j, t))
        out_specs = (wide, narrow, narrow)
    if sinks is not None:
        sinks = jnp.tile(sinks, (1, w))
    found = pl.pallas_call(
        kernel,
        grid=(g, r, j, tiles, splits),
        in_specs=[
            of_queries, (of_prompt,) * len(prompt), (of_row,) * len(cache),
            spec((1,), lambda g, r, j, t, s: (g,)),
            spec((None, 1), lambda g, r, j, t, s: (g, r)),
            spec((1,), lambda g, r, j, t, s: (0,)),
            None if sinks is None else spec((None, tile), lambda g, r, j, t, s: (j, t)),
        ],
        out_specs=out_specs,
        out_shape=shapes,
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=2),
        interpret=interpret,
        name="decode_attention",
    )(q.reshape(g, r, j, queries, d), prompt, cache, prompt_start, length, window, sinks)  # fmt: skip
    shape = (*q.shape[:-1], size_v)
    if splits == 1:
        return found[0].reshape(shape)
    out, top, total = found
    fading = jnp.exp(top - top.max(axis=0))
    out = (out * fading[..., None]).sum(axis=0) / (total * fading).sum(axis=0)[..., None]
    return out.astype(q.dtype).reshape(shape)
