"""Attention of whole rows by kernels that form the scores block by block: cuDNN's and jax's own ones.

No pass keeps scores in memory (arXiv 2307.08691).
"""

import functools
import importlib.util
import math
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.sharding import (
    activation_spec,
    attention_dims,
    context_shards,
    head_shards,
    is_sharded,
)

BY_SEGMENTS = {"splash", "flash"}  # read no mask where segments say all that a token sees
MASKED_LENGTH = 4096  # the longest rows whose mask `[N,T,T]` costs accelerators little
UNMASKED = "mesh.context shards rows too long for the mask that a kernel would read"
OF_SINKS = 8  # more numbers of a head with sinks: cuDNN takes multiples of 8
BLOCKS = (512, 256, 128)  # tokens of a block of the TPU's kernel, which takes multiples of 128
WASTE = 1 / 8  # of a row that may be padded for a larger block


def is_in_chunks(config, length: int) -> bool:
    """True where rows of that length are longer than the chunks in which some layers attend, which takes a mask."""
    return config.sliding_chunks and length > config.sliding_window


@functools.cache
def has_triton() -> bool:
    """True where Pallas kernels are compiled by Triton: not by jax versions to come, nor for GPUs before Ampere."""
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None and not is_before_ampere()


def has_flash() -> bool:
    """True where `flash_attention` runs: jax 0.12 says that versions to come have its kernel no more."""
    try:
        return has_triton() and importlib.util.find_spec("jax.experimental.pallas.ops.gpu.attention") is not None
    except ModuleNotFoundError:  # nor what it lies in
        return False


def is_before_ampere() -> bool:
    """True on NVIDIA GPUs without units for bfloat16, such as T4 and V100."""
    capability = getattr(jax.local_devices()[0], "compute_capability", "")
    return bool(re.fullmatch(r"[1-7]\.\d+", capability))


def implementation(config, length: int, by_mask: bool, backend: str | None = None) -> str:
    """The attention of rows of that length: `config.attention`, or what `auto` stands for on a backend, else this one.

    `by_mask`: segments alone do not say what a token sees. On TPUs splash; on GPUs, in 16 bits, cudnn with a mask or,
    for long rows, flash; xla where those cannot be had. Where the mesh shards the positions of rows, it is `context`
    (models/mixers/context_attention.py) in place of xla, and of kernels that would need a mask of long rows. Raises
    ConfigError for kernels that are asked for and have no complete rows there.
    """
    if config.attention == "auto":
        return _auto(config, length, by_mask, backend)[0]
    if config.attention == "xla":
        return _plain(config)
    if not head_copies(config):
        raise ConfigError(
            f"model.attention = {config.attention!r} computes complete rows, and mesh.context = {context_shards()} "
            f"shards them: mesh.tensor x mesh.context does not divide the model's {config.heads} heads. Make it divide "
            "them, or use 'auto' or 'xla'."
        )
    return config.attention


def head_copies(config) -> int:
    """As how many heads a kernel computes each key/value head, so that a mesh that shards the positions of rows can
    shard heads in their place; 0 where no number will do."""
    if context_shards() == 1 or len(set(attention_dims(config.kv_heads))) == 1:
        return 1
    shards = head_shards()
    return math.lcm(config.kv_heads, shards) // config.kv_heads if config.heads % shards == 0 else 0


def _plain(config) -> str:
    # Attention without a kernel.
    return "xla" if head_copies(config) == 1 else "context"


def described(config, backend: str | None = None) -> str:
    """The attention of whole rows in words: the kernel, and that of long rows; or why no kernel serves."""
    if config.attention != "auto":
        return config.attention
    choices: dict[str, list[str]] = {}
    for length, rows in ((MASKED_LENGTH, f"rows up to {MASKED_LENGTH} tokens"), (MASKED_LENGTH + 1, "longer ones")):
        for kind in config.layer_configs:
            name, reason = _auto(config.of(kind), length, False, backend)
            text = name if reason is None else f"{name} ({reason})"
            if rows not in choices.setdefault(text, []):
                choices[text].append(rows)
    if len(choices) == 1:
        return next(iter(choices))
    return ", ".join(f"{text} for {' and '.join(rows)}" for text, rows in choices.items())


def check_attention(config, backend: str) -> None:
    """Raises ConfigError where attention is asked for that programs compiled for the backend cannot have."""
    here = f"this is a {backend}"
    sinks = {"it has no sinks, as this model has": config.attention_sinks}
    biases = {
        "it adds no ALiBi to scores, as this model does": bool(config.alibi),
        "it sees no entries before a window, as this model's attention does": bool(config.output_groups),
    }
    on_gpus = {
        **biases,
        f"it runs on NVIDIA GPUs, and {here}": backend != "gpu",
        f"it takes bfloat16 or float16, and model.dtype is {config.dtype}": config.dtype == "float32",
        "it does not cap scores, as this model does": config.attention_softcap is not None,
    }
    reasons = {
        "cudnn": on_gpus,
        "flash": {
            **on_gpus,
            **sinks,
            f"jax {jax.__version__} has no kernel of it for this GPU": not has_flash(),
            "it has no sliding window, as this model has": config.sliding_window is not None,
            "it is causal, and this model's images are seen in both directions": (
                config.vision is not None and config.vision.bidirectional
            ),
        },
        "splash": {**biases, **sinks, f"it runs on TPUs, and {here}": backend != "tpu"},
    }
    holding = [reason for reason, holds in reasons.get(config.attention, {}).items() if holds]
    if holding:
        raise ConfigError(f"model.attention = {config.attention!r}: {'; '.join(holding)}. Use 'xla'.")


def _auto(config, length: int, by_mask: bool, backend: str | None) -> tuple[str, str | None]:
    # What `auto` stands for and, where that is no kernel, why.
    backend = backend or jax.default_backend()
    plain, copies = _plain(config), head_copies(config)
    if backend not in ("gpu", "tpu"):
        return plain, f"there is no kernel for a {backend}"
    if config.alibi:
        return plain, "no kernel adds ALiBi to scores, as this model does"
    if config.output_groups:
        return plain, "no kernel sees a window and entries before it, as this model's attention does"
    if copies == 0 or (copies > 1 and config.index_top):  # of which layers that choose tokens make no copies
        return plain, "mesh.context shards rows whose heads it cannot shard"
    masked = copies == 1 or length <= MASKED_LENGTH  # whether a mask of the row may be made
    if backend == "tpu":
        if config.attention_sinks:
            return plain, "no kernel of TPUs has this model's attention sinks"
        return ("splash", None) if masked or not by_mask else (plain, UNMASKED)
    if config.dtype == "float32":
        return plain, "kernels take 16 bits, and model.dtype is float32"
    if is_before_ampere():
        return plain, "kernels take GPUs from Ampere on"
    if config.attention_softcap is not None:
        return plain, "no kernel caps scores, as this model does"
    sinks = config.attention_sinks
    needs_mask = by_mask or config.sliding_window is not None or sinks
    if not needs_mask and length > MASKED_LENGTH and has_flash():
        return "flash", None
    if not masked:
        return plain, UNMASKED
    # cuDNN takes heads of up to 256 numbers from Hopper on.
    capability = getattr(jax.local_devices()[0], "compute_capability", "0")
    largest = 256 if float(capability) >= 9 else 128
    most = largest - OF_SINKS if sinks else largest
    if config.head_dim % 8 or config.head_dim > most:
        beside = ", beside sinks" if sinks else ""
        return plain, f"cudnn takes heads of multiples of 8 up to {most}{beside}, not of {config.head_dim}"
    return "cudnn", None


def flash_attention(q, k, v, segments, interpret: bool = False) -> jax.Array:
    """`[N,T,J,H/J,d]`: attention of (scaled) queries `[N,T,J,H/J,d]` to keys and values `[N,T,J,d]`, on GPUs.

    A token sees the tokens of its segment `[N,T]` up to itself: memory is linear in T. Tokens of padding get finite
    numbers. On a mesh each device computes its rows and heads. `interpret` runs the kernel without a GPU, for tests.

    By jax.experimental.pallas.ops.gpu.attention: softmax and sums in fp32.
    """
    # Imported here: only runs on GPUs need it.
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        from jax.experimental.pallas.ops.gpu import attention as gpu

    block = 64 if q.shape[-1] <= 128 else 32  # larger ones do not fit into the chip's shared memory
    blocks = gpu.BlockSizes(**dict.fromkeys(gpu.BlockSizes.__dataclass_fields__, block))

    def attend(q, k, v, segments):
        extra = -q.shape[1] % block
        heads = q.shape[3]
        k, v = (jnp.repeat(x, heads, axis=2) for x in (k, v))  # the kernel has as many heads of keys as of queries
        q_, k, v, ids = (
            jnp.pad(x, ((0, 0), (0, extra), *((0, 0),) * (x.ndim - 2)))
            for x in (q.reshape(*q.shape[:2], -1, q.shape[-1]), k, v, segments.astype(jnp.int32))
        )
        out: Any = gpu.mha(q_, k, v, ids, 1.0, True, blocks, interpret=interpret)
        return out[:, : q.shape[1]].reshape(q.shape)

    if not is_sharded():
        return attend(q, k, v, segments)
    queries, keys, rows = _specs_of_whole_rows(q, k)
    in_specs = (queries, keys, keys, rows)
    return jax.shard_map(attend, in_specs=in_specs, out_specs=queries, check_vma=False)(q, k, v, segments)


def cudnn_attention(q, k, v, mask, sinks=None) -> jax.Array:
    """`[N,t,J,H/J,d]`: attention of (scaled) queries `[N,t,J,H/J,d]` to keys and values `[N,s,J,d]`.

    The mask is `[N,t,s]` or, of each key/value head, `[N,J,t,s]`. `sinks` `[J,H/J]` are scores of one more token each,
    which has no value. By `jax.nn.dot_product_attention`, on NVIDIA GPUs, in bfloat16 or float16. jax raises an error
    for heads that cuDNN does not take.
    """
    size = q.shape[-1]
    if sinks is not None:
        q, k, v, mask = with_sinks(q, k, v, mask, sinks)
    heads = q.reshape(*q.shape[:2], -1, q.shape[-1])
    # With a mask, cuDNN has gradients of rows of even length alone.
    odd_queries, odd_keys = q.shape[1] % 2, k.shape[1] % 2
    heads = jnp.pad(heads, ((0, 0), (0, odd_queries), (0, 0), (0, 0)))
    k, v = (jnp.pad(x, ((0, 0), (0, odd_keys), (0, 0), (0, 0))) for x in (k, v))
    mask = jnp.pad(mask, ((0, 0),) * (mask.ndim - 2) + ((0, odd_queries), (0, odd_keys)))
    mask = mask[:, None] if mask.ndim == 3 else jnp.repeat(mask, heads.shape[2] // mask.shape[1], axis=1)
    out = jax.nn.dot_product_attention(heads, k, v, mask=mask, scale=1.0, implementation="cudnn")
    return out[:, : q.shape[1]].reshape(q.shape)[..., :size]


def with_sinks(q, k, v, mask, sinks) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Queries, keys, values and mask of `cudnn_attention` with one more key, whose scores are `sinks` `[J,H/J]`.

    Queries get OF_SINKS more numbers, which that key alone multiplies by others than zero. Three of them are the sink:
    its leading bits, those behind them and the rest, so that the score has all bits of fp32, and its gradient is that
    of the first. To scale outputs by their log-sum-exp instead would be one pass more over them, and jax rounds that of
    cuDNN to 16 bits.
    """
    rest, parts = jnp.broadcast_to(sinks.astype(jnp.float32), q.shape[:-1]), []
    for _ in range(3):
        parts.append(rest.astype(q.dtype))
        rest = jax.lax.stop_gradient(rest - parts[-1].astype(jnp.float32))
    more = ((0, 0),) * 4 + ((0, OF_SINKS - len(parts)),)
    q = jnp.concatenate([q, jnp.pad(jnp.stack(parts, axis=-1), more)], axis=-1)
    k, v = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, OF_SINKS))) for x in (k, v))
    k = k.at[:, -1, :, -OF_SINKS:].set(1)
    return q, k, v, jnp.pad(mask, ((0, 0), (0, 0), (0, 1)), constant_values=True)


def splash_attention(
    q, k, v, segments, mask=None, window: int | None = None, softcap: float | None = None, interpret: bool = False
) -> jax.Array:
    """`[N,T,J,H/J,d]`: attention of (scaled) queries `[N,T,J,H/J,d]` to keys and values `[N,T,J,d]`, on TPUs.

    A token sees the tokens of its segment `[N,T]` up to itself, the last `window` of them where that is given: memory
    is linear in T. With a `mask` `[N,T,T]` (query, key) it sees what is True there, and nothing else is read; each pass
    copies the mask, four bytes an entry. Tokens that see nothing, padding, get finite numbers. `softcap` bounds the
    scores. On a mesh each device computes its rows and heads. `interpret` runs the kernel without a TPU, for tests.

    By jax.experimental.pallas.ops.tpu.splash_attention: softmax and sums in fp32.
    """
    row = functools.partial(_row, window=window, softcap=softcap, interpret=interpret)
    compute = jax.vmap(row, in_axes=(0, 0, 0, 0, None if mask is None else 0))
    if not is_sharded():
        return compute(q, k, v, segments, mask)
    queries, keys, rows = _specs_of_whole_rows(q, k)
    # The kernel does not say along which axes its results vary, which check_vma would ask of it.
    run = jax.shard_map(compute, in_specs=(queries, keys, keys, rows, rows), out_specs=queries, check_vma=False)
    return run(q, k, v, segments, mask)


def _specs_of_whole_rows(q, k) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
    """The specs of queries `[N,T,J,H/J,d]`, keys `[N,T,J,d]` and numbers `[N]` where every device has whole rows."""
    query_dims, key_dims = attention_dims(k.shape[2])
    queries = activation_spec(q.shape, "rows", *query_dims, None, None)
    return queries, activation_spec(k.shape, "rows", *key_dims, None), PartitionSpec(queries[0])


def _row(q, k, v, segments, mask, window: int | None, softcap: float | None, interpret: bool):
    """Attention of one row: q `[T,J,H/J,d]`, k and v `[T,J,d]`."""
    # Imported here: it takes a quarter of a second, which only runs on TPUs need.
    from jax.experimental.pallas.ops.tpu import splash_attention as tpu

    length, shape = len(q), q.shape
    block = block_size(length)
    extra = -length % block
    size = (length + extra, length + extra)
    heads = (x.reshape(length, -1, x.shape[-1]) for x in (q, k, v))
    q, k, v = (jnp.pad(x, ((0, extra), (0, 0), (0, 0))).swapaxes(0, 1) for x in heads)  # [J,T+extra,d]
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


def block_size(length: int) -> int:
    """The largest of BLOCKS for which a row of that many tokens is padded by no more than WASTE, else the smallest."""
    return next((block for block in BLOCKS if -length % block <= WASTE * length), BLOCKS[-1])
