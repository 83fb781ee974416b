"""Attention of whole rows by kernels that form the scores block by block: cuDNN's on NVIDIA GPUs, jax's own on TPUs.

Neither pass keeps scores in memory (arXiv 2307.08691).
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.sharding import activation_spec, attention_dims, context_shards, is_sharded

BLOCKS = (512, 256, 128)  # tokens of a block of the TPU's kernel, which takes multiples of 128
WASTE = 1 / 8  # of a row that may be padded for a larger block


def fused_attention(q, k, v, mask, implementation: Literal["xla", "cudnn"]) -> jax.Array:
    """`[N,t,J,H/J,d]`: attention of (scaled) queries `[N,t,J,H/J,d]` to keys and values `[N,s,J,d]`, mask `[N,t,s]`.

    By `jax.nn.dot_product_attention`, whose implementation `cudnn` runs on NVIDIA GPUs, in bfloat16 or float16. jax
    raises an error for shapes that it does not take.
    """
    heads = q.reshape(*q.shape[:2], -1, q.shape[-1])
    out = jax.nn.dot_product_attention(heads, k, v, mask=mask[:, None], scale=1.0, implementation=implementation)
    return out.reshape(q.shape)


def splash_attention(
    q, k, v, segments, mask=None, window: int | None = None, softcap: float | None = None, interpret: bool = False
) -> jax.Array:
    """`[N,T,J,H/J,d]`: attention of (scaled) queries `[N,T,J,H/J,d]` to keys and values `[N,T,J,d]`, on TPUs.

    A token sees the tokens of its segment `[N,T]` up to itself, the last `window` of them where that is given: memory
    is linear in T. With a `mask` `[N,T,T]` (query, key) it sees what is True there, and nothing else is read; each pass
    copies the mask, four bytes an entry. Tokens that see nothing, padding, get finite numbers. `softcap` bounds the
    scores. On a mesh each device computes its rows and heads. Raises ConfigError where it has some positions of them
    alone. `interpret` runs the kernel without a TPU, for tests.

    By jax.experimental.pallas.ops.tpu.splash_attention: softmax and sums in fp32.
    """
    row = functools.partial(_row, window=window, softcap=softcap, interpret=interpret)
    compute = jax.vmap(row, in_axes=(0, 0, 0, 0, None if mask is None else 0))
    if not is_sharded():
        return compute(q, k, v, segments, mask)
    query_dims, key_dims = attention_dims(k.shape[2])
    if query_dims != key_dims:
        raise ConfigError(
            f"model.attention = 'splash' computes whole rows, and mesh.context = {context_shards()} shards them: "
            f"mesh.tensor x mesh.context does not divide the model's {k.shape[2]} key/value heads. Make it divide "
            "them, or use 'xla'."
        )
    queries = activation_spec(q.shape, "rows", *query_dims, None, None)
    keys = activation_spec(k.shape, "rows", *key_dims, None)
    rows = jax.sharding.PartitionSpec(queries[0])
    # The kernel does not say along which axes its results vary, which check_vma would ask of it.
    run = jax.shard_map(compute, in_specs=(queries, keys, keys, rows, rows), out_specs=queries, check_vma=False)
    return run(q, k, v, segments, mask)


def _row(q, k, v, segments, mask, window: int | None, softcap: float | None, interpret: bool):
    """Attention of one row: q `[T,J,H/J,d]`, k and v `[T,J,d]`."""
    # Imported here: it takes a quarter of a second, which only runs on TPUs need.
    from jax.experimental.pallas.ops.tpu import splash_attention as tpu

    length, shape = len(q), q.shape
    block = block_size(length)
    extra = -length % block
    size = (length + extra, length + extra)
    q, k, v = (_by_head(x.reshape(length, -1, x.shape[-1]), extra) for x in (q, k, v))
    # Gradients of queries by a kernel of their own: the one that forms all keeps them once for each block of keys.
    names = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    make: Any = functools.partial(
        tpu.make_splash_mha,
        block_sizes=tpu.BlockSizes(**dict.fromkeys(names, block)),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=softcap,
        interpret=interpret,
    )
    if mask is None:
        causal = tpu.CausalMask(size) if window is None else tpu.LocalMask(size, (window - 1, 0), offset=0)
        ids = jnp.pad(segments.astype(jnp.int32), (0, extra))
        out = make(tpu.MultiHeadMask([causal]))(q, k, v, segment_ids=tpu.SegmentIds(ids, ids))
    else:
        # A row of the mask that is False throughout would divide by zero.
        mask = jnp.pad(mask, ((0, extra), (0, extra))) | jnp.eye(size[0], dtype=bool)
        kernel = make(mask[None])
        # Tracing makes an array of a flag that the kernel reads while it is traced.
        kernel.fwd_mask_info = jax.tree.map(lambda x: x if jnp.ndim(x) else True, kernel.fwd_mask_info)
        out = kernel(q, k, v)
    return out.swapaxes(0, 1)[:length].reshape(shape)


def _by_head(x, extra: int):
    """`[J,T+extra,d]` of x `[T,J,d]`."""
    return jnp.pad(x, ((0, extra), (0, 0), (0, 0))).swapaxes(0, 1)


def block_size(length: int) -> int:
    """The largest of BLOCKS for which a row of that many tokens is padded by no more than WASTE, else the smallest."""
    return next((block for block in BLOCKS if -length % block <= WASTE * length), BLOCKS[-1])
