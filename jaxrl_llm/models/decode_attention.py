"""Attention of a decode step as one kernel on GPUs: a row's queries over its prompt's cache and its own.

The plain path (attention.py) is a dozen kernels and reads row caches to their end; this one stops at each row's newest
token. Scores stay on the chip (arXiv 2307.08691), and few rows share the chip by splitting their keys.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.distributed.sharding import activation_spec, is_sharded

BLOCK = 64  # keys that are read at once
LEAST = 16  # rows and columns of the smallest matmul tile, whose sizes are powers of two; the rest of a tile is zeros
PROGRAMS = 256  # that fill a GPU; fewer are split, up to SPLITS times
SPLITS = 16
MASKED = -1e30  # finite, so that a row with nothing to attend to (padding) stays finite too


def decode_attention(
    q,
    prompt,
    cache,
    prompt_start,
    length,
    window=None,
    softcap: float | None = None,
    chunks: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """`[G,R,J,W,H/J,d]`: attention of (scaled) queries of that shape to keys and values of prompts and rows.

    `prompt` are keys and values `[G,J,P,d]`, seen from `prompt_start` `[G]` on; `cache` those of rows `[G,R,J,C,d]`, of
    which token w of the W sees the first `length + w + 1`, `length` `[G,R]`. `window` is the number of tokens that a
    query sees, itself included; with `chunks` it sees what is in its own chunk of that many positions. `softcap` bounds
    the scores. `interpret` runs the kernel without a GPU, for tests.
    Softmax and sums are in fp32; keys and values of another type are converted to that of the queries as they are read.
    """
    if window is None:
        window = jnp.iinfo(jnp.int32).max // 2
    window = jnp.full((1,), window, jnp.int32)
    run = functools.partial(_attend, softcap=softcap, chunks=chunks, interpret=interpret)
    if is_sharded():
        queries = activation_spec(q.shape, "rows", None, "heads", None, None, None)
        prompts = activation_spec(prompt[0].shape, "rows", "heads", None, None)
        rows = activation_spec(cache[0].shape, "rows", None, "heads", None, None)
        starts, lengths = (jax.sharding.PartitionSpec(*spec) for spec in (queries[:1], queries[:2]))
        in_specs = (queries, (prompts,) * 2, (rows,) * 2, starts, lengths, jax.sharding.PartitionSpec())
        run = jax.shard_map(run, in_specs=in_specs, out_specs=queries, check_vma=False)
    return run(q, tuple(prompt), tuple(cache), prompt_start, length, window)


def _attend(q, prompt, cache, prompt_start, length, window, softcap: float | None, chunks: bool, interpret: bool):
    # Imported here: only runs on GPUs need it.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    g, r, j, w, per_token, d = q.shape
    queries = w * per_token
    tile, width = (max(LEAST, 2 ** math.ceil(math.log2(size))) for size in (queries, d))
    splits = min(SPLITS, max(1, 2 ** int(math.log2(PROGRAMS / min(g * r * j, PROGRAMS)))))
    sizes = prompt[0].shape[-2], cache[0].shape[-2]

    def kernel(q_ref, prompt_k, prompt_v, row_k, row_v, start_ref, length_ref, window_ref, *out_refs):
        number = jnp.arange(tile)
        is_number = jnp.arange(width)[None] < d
        is_query = (number < queries)[:, None] & is_number
        queries_ = triton.load(q_ref, mask=is_query, other=0.0)
        start, length, first_window = start_ref[0], length_ref[0], window_ref[0]
        in_row = length + number // per_token  # the place of each query's token in the row's cache
        window = first_window  # of the first token, and of each query
        if chunks:  # back to where the chunk begins
            window = ((sizes[0] - start + in_row) % first_window + 1)[:, None]
            first_window = (sizes[0] - start + length) % first_window + 1
        # The blocks that some query sees, those of the prompt and then those of the row; a split has its share of them.
        newest = length + w - 1
        first_in_prompt = jnp.maximum(start, sizes[0] + length - first_window + 1) // BLOCK
        prompt_blocks = jnp.maximum(pl.cdiv(sizes[0], BLOCK) - first_in_prompt, 0)
        first_in_row = jnp.maximum(length - first_window + 1, 0) // BLOCK
        row_blocks = pl.cdiv(jnp.minimum(newest + 1, sizes[1]), BLOCK) - first_in_row
        share = pl.cdiv(prompt_blocks + row_blocks, splits)
        low = pl.program_id(3) * share
        high = jnp.minimum(low + share, prompt_blocks + row_blocks)

        def over(keys, values, size: int, first, seen, low, high, state):
            def body(block, state):
                out, top, total = state
                place = (first + block) * BLOCK + jnp.arange(BLOCK)
                at = pl.ds((first + block) * BLOCK, BLOCK)
                k, v = (
                    triton.load(x.at[at, :], mask=(place < size)[:, None] & is_number, other=0.0).astype(queries_.dtype)
                    for x in (keys, values)
                )
                scores = triton.dot(queries_, k.T)
                scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
                scores = jnp.where(seen(place[None]) & (place < size)[None], scores, MASKED)
                highest = jnp.maximum(top, scores.max(axis=1))
                fading = jnp.exp(top - highest)
                shares = jnp.exp(scores - highest[:, None])
                out = out * fading[:, None] + triton.dot(shares.astype(v.dtype), v)
                return out, highest, total * fading + shares.sum(axis=1)

            return jax.lax.fori_loop(low, high, body, state)

        state = (jnp.zeros((tile, width), jnp.float32), jnp.full((tile,), MASKED, jnp.float32), jnp.zeros((tile,)))

        def in_prompt(place):
            return (place >= start) & (sizes[0] - place + in_row[:, None] < window)

        def in_own(place):
            return (place <= in_row[:, None]) & (in_row[:, None] - place < window)

        of_prompt = (prompt_k, prompt_v, sizes[0], first_in_prompt, in_prompt)
        state = over(*of_prompt, low, jnp.minimum(high, prompt_blocks), state)
        of_row = (row_k, row_v, sizes[1], first_in_row, in_own)
        low_in_row = jnp.maximum(low - prompt_blocks, 0)
        out, top, total = over(*of_row, low_in_row, jnp.maximum(high - prompt_blocks, low_in_row), state)
        if splits == 1:
            triton.store(out_refs[0], (out / total[:, None]).astype(out_refs[0].dtype), mask=is_query)
            return
        out_ref, *number_refs = out_refs
        triton.store(out_ref, out, mask=is_query)
        for ref, x in zip(number_refs, (top, total), strict=True):
            triton.store(ref, x, mask=number < queries)

    def spec(shape, index) -> Any:
        return pl.BlockSpec(shape, index)

    of_queries = spec((None, None, None, tile, width), lambda g, r, j, s: (g, r, j, 0, 0))
    of_prompt = spec((None, None, sizes[0], width), lambda g, r, j, s: (g, j, 0, 0))
    of_row = spec((None, None, None, sizes[1], width), lambda g, r, j, s: (g, r, j, 0, 0))
    if splits == 1:
        shapes, out_specs = (jax.ShapeDtypeStruct((g, r, j, queries, d), q.dtype),), (of_queries,)
    else:
        lead = (splits, g, r, j, queries)
        shapes = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*lead, d), lead, lead))
        wide = spec((None, None, None, None, tile, width), lambda g, r, j, s: (s, g, r, j, 0, 0))
        narrow = spec((None, None, None, None, tile), lambda g, r, j, s: (s, g, r, j, 0))
        out_specs = (wide, narrow, narrow)
    found = pl.pallas_call(
        kernel,
        grid=(g, r, j, splits),
        in_specs=[
            of_queries, of_prompt, of_prompt, of_row, of_row,
            spec((1,), lambda g, r, j, s: (g,)),
            spec((None, 1), lambda g, r, j, s: (g, r)),
            spec((1,), lambda g, r, j, s: (0,)),
        ],
        out_specs=out_specs,
        out_shape=shapes,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="decode_attention",
    )(q.reshape(g, r, j, queries, d), *prompt, *cache, prompt_start, length, window)  # fmt: skip
    if splits == 1:
        return found[0].reshape(q.shape)
    out, top, total = found
    fading = jnp.exp(top - top.max(axis=0))
    out = (out * fading[..., None]).sum(axis=0) / (total * fading).sum(axis=0)[..., None]
    return out.astype(q.dtype).reshape(q.shape)
