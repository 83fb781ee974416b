"""Attention as a mixer: full and sliding, of whole rows and, with cached keys and values, of their next tokens."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl_llm.distributed.sharding import attention_dims, constrain, context_shards
from jaxrl_llm.models import quantize
from jaxrl_llm.models.decode_attention import decode_attention
from jaxrl_llm.models.fused_attention import flash_attention, fused_attention, implementation, splash_attention
from jaxrl_llm.models.layers import Linear, RMSNorm, soft_cap
from jaxrl_llm.models.mixer import AttentionInputs, DecodeInputs, LayerConfig
from jaxrl_llm.models.rope import frequencies, rotate

QUERY_BLOCKS, SMALLEST_BLOCK = 4, 64  # blocks that the queries of a row are split into, and the least queries of one
# The dimensions of a row's keys and values (heads j, positions c, numbers d) in the order that each backend decodes in
# place with; in another one it would copy the caches before every chunk of steps, and back behind it. Heads before
# positions are read untransposed, and TPUs write a token's heads as one tile. A row has few queries (H/J) for its many
# keys: with these last, attention of 64 rows is 2.5 times faster on CPUs at 256 tokens and 3.4 times at 1024.
ROW_DIMS = {"cpu": ("jdc", "jcd"), "gpu": ("jcd", "jcd"), "tpu": ("cjd", "cjd")}
MASKED = -1e30  # finite, so that a row with nothing to attend to (padding) stays finite too
NO_WINDOW = 2**30  # of a layer that sees everything, among layers that do not


class KeyValues(NamedTuple):
    """Keys and values: of a prompt both `[..., J, P, d]`, of its rows `[..., *ROW_DIMS]` of the backend."""

    k: jax.Array
    v: jax.Array


class AttentionArrays(NamedTuple):
    """In what layers of attention differ besides their parameters; one layer's, or those of many, stacked."""

    inv_freq: Any  # [r/2] inverse frequencies of the r rotated dimensions; 0: not rotated
    scale: Any = 1.0  # of rotated dimensions
    window: Any = None  # a token sees this many, itself included; None: all before it


class Attention(nnx.Module):
    """Causal grouped-query attention: H query heads share J key/value heads. A `Mixer`.

    Full and sliding attention are one mixer with and without a `LayerConfig.window`, so that a scan may run through
    layers of both.
    """

    path = "attention"
    shares_prefixes = True

    def __init__(self, config, rngs: nnx.Rngs):
        c = config
        self.config = c
        self.q = Linear(c.width, c.heads * c.head_dim, c, rngs, c.attention_bias, "q")
        self.k = Linear(c.width, c.kv_heads * c.head_dim, c, rngs, c.attention_bias, "k")
        self.v = Linear(c.width, c.kv_heads * c.head_dim, c, rngs, c.attention_bias, "v")
        self.o = Linear(c.heads * c.head_dim, c.width, c, rngs, c.attention_output_bias, "o")
        heads = (c.heads, c.kv_heads) if c.qk_norm_whole else (1, 1)
        self.q_norm = RMSNorm(heads[0] * c.head_dim, c, rngs) if c.qk_norm else None
        self.k_norm = RMSNorm(heads[1] * c.head_dim, c, rngs) if c.qk_norm else None

    @staticmethod
    def layer_arrays(config, layer: LayerConfig) -> AttentionArrays:
        """Rotary frequencies and the window, which is None where no layer of the model has one."""
        window = layer.window
        if window is None and config.sliding_layers:
            window = NO_WINDOW  # layers that are stacked have either all a window or none
        if layer.rope is None:
            return AttentionArrays(np.zeros(config.rotated_size // 2, np.float32), 1.0, window)
        return AttentionArrays(frequencies(layer.rope, config.rotated_size), layer.rope.attention_factor, window)

    def apply(self, x, inputs: AttentionInputs, arrays: AttentionArrays) -> jax.Array:
        """Output `[N,T,D]`."""
        return self.prefill(x, inputs, arrays)[0]

    def prefill(self, x, inputs: AttentionInputs, arrays: AttentionArrays) -> tuple[jax.Array, KeyValues]:
        """Output `[N,T,D]` and the keys and values `[N,J,T,d]`."""
        if inputs.inv_freq is not None:  # a layer without rotary positions has none in long rows either
            arrays = arrays._replace(inv_freq=jnp.where(arrays.inv_freq == 0, 0.0, inputs.inv_freq))
        q, k, v = self._project(x, inputs.positions, arrays)
        # From positions sharded over `context` to heads sharded over it, in two steps that XLA turns into an exchange.
        q, k, v = (constrain(a, "rows", "positions", "heads", *(None,) * (a.ndim - 3)) for a in (q, k, v))
        query_dims, key_dims = attention_dims(self.config.kv_heads)
        q = constrain(q, "rows", *query_dims, None, None)
        k, v = (constrain(a, "rows", *key_dims, None) for a in (k, v))
        mask = inputs.mask
        if arrays.window is not None and mask is not None:
            mask = mask & (inputs.positions[:, :, None] - inputs.positions[:, None, :] < arrays.window)
        by = implementation(self.config, x.shape[1], inputs.by_mask)
        if by == "splash":
            out = self._splash(q, k, v, inputs.segments, mask, arrays.window)
        elif by == "flash":
            out = flash_attention(q, k, v, inputs.segments)
        elif by == "cudnn":
            out = fused_attention(q, k, v, mask, "cudnn")
        else:
            out = self._in_blocks(q, k, v, mask)
        out = constrain(out, "rows", *query_dims, None, None)
        out = constrain(out, "rows", "positions", "heads", None, None)
        cache = KeyValues(*(constrain(a.swapaxes(1, 2), "rows", "heads", None, None) for a in (k, v)))
        return self.o(out.reshape(*x.shape[:-1], -1)), cache

    def decode(
        self, x, inputs: DecodeInputs, prompt: KeyValues, cache: KeyValues, arrays: AttentionArrays
    ) -> tuple[jax.Array, KeyValues]:
        """The next W tokens of each row: output `[G,R*W,D]` and the row cache with their keys and values.

        `prompt` `[G,J,P,d]` is stored once per prompt and read by its R rows, never copied for them; `cache`, made by
        `empty_cache`, is each row's own. One softmax runs over both.
        """
        q, k, v = self._project(x[:, :, None], inputs.positions[:, :, None], arrays)
        q, k, v = (a.reshape(*inputs.length.shape, -1, *a.shape[3:]) for a in (q, k, v))  # [G,R,W,J,...]
        cache = _write(cache, k, v, inputs.length)
        by_head = q.swapaxes(2, 3)  # [G,R,J,W,H/J,d]
        if self.config.attention != "xla" and jax.default_backend() == "gpu" and q.dtype.itemsize == 2:
            in_fp8 = functools.partial(jax.tree.map, quantize.as_fp8)
            start, softcap = inputs.prompt_mask.shape[1] - inputs.prompt_mask.sum(-1), self.config.attention_softcap
            out = decode_attention(by_head, in_fp8(prompt), in_fp8(cache), start, inputs.length, arrays.window, softcap)
            return self.o(out.swapaxes(2, 3).reshape(*x.shape[:-1], -1)), cache
        q = by_head.reshape(*by_head.shape[:3], -1, by_head.shape[-1])
        in_prompt = _einsum("gkjrd,gjpd->gkjrp", q, prompt.k)
        of_keys, of_values = _row_dims()
        in_row = _einsum(f"gkjrd,gk{of_keys}->gkjrc", q, cache.k)
        in_prompt, in_row = (soft_cap(scores, self.config.attention_softcap) for scores in (in_prompt, in_row))
        index = jnp.arange(in_row.shape[-1])
        place = (inputs.length[:, :, None] + jnp.arange(by_head.shape[3]))[..., None]  # [G,R,W,1]
        prompt_seen, row_seen = inputs.prompt_mask[:, None, None], index <= place
        if arrays.window is not None:
            prompt_positions = jnp.cumsum(inputs.prompt_mask, axis=-1)[:, None, None] - 1
            prompt_seen &= inputs.positions.reshape(place.shape) - prompt_positions < arrays.window
            row_seen = row_seen & (place - index < arrays.window)
        prompt_seen, row_seen = (_for_heads(mask, by_head.shape[4]) for mask in (prompt_seen, row_seen))
        in_prompt = jnp.where(prompt_seen, in_prompt, MASKED)
        in_row = jnp.where(row_seen, in_row, MASKED)
        # The softmax over both by hand: concatenated, the scores of the prompt would be copied every step.
        top = jnp.maximum(in_prompt.max(-1, keepdims=True), in_row.max(-1, keepdims=True))
        in_prompt, in_row = jnp.exp(in_prompt - top), jnp.exp(in_row - top)
        total = in_prompt.sum(-1, keepdims=True) + in_row.sum(-1, keepdims=True)
        in_prompt, in_row = ((shares / total).astype(v.dtype) for shares in (in_prompt, in_row))
        # With the weights as the rows of the matmul: as its columns, CPUs take three times as long.
        of_prompt = _einsum("gjkrp,gjpd->gjkrd", in_prompt.swapaxes(1, 2), prompt.v).swapaxes(1, 2)
        out = of_prompt + _einsum(f"gkjrc,gk{of_values}->gkjrd", in_row, cache.v)
        out = out.reshape(by_head.shape).swapaxes(2, 3)  # [G,R,W,J,H/J,d]
        return self.o(out.astype(v.dtype).reshape(*x.shape[:-1], -1)), cache

    @staticmethod
    def empty_cache(prompt: KeyValues, rows: int, size: int) -> KeyValues:
        """Row caches with room for `size` tokens, for `rows` rows of each prompt `[..., J, P, d]`."""
        *lead, heads, _, d = prompt.k.shape
        sizes = {"j": heads, "c": size, "d": d}

        def zeros(dims: str):
            # XLA replicates on every device what nothing says how to shard, zeros too.
            names = (*(None,) * (len(lead) - 1), "rows", None, *("heads" if dim == "j" else None for dim in dims))
            return constrain(jnp.zeros((*lead, rows, *(sizes[dim] for dim in dims)), prompt.k.dtype), *names)

        return KeyValues(*(zeros(dims) for dims in _row_dims()))

    @staticmethod
    def grow_cache(cache: KeyValues, size: int) -> KeyValues:
        """The row caches with room for `size` tokens."""

        def grown(x, dims: str):
            axis = x.ndim - 3 + dims.index("c")
            return jnp.pad(x, [(0, size - x.shape[axis] if i == axis else 0) for i in range(x.ndim)])

        return KeyValues(*(grown(x, dims) for x, dims in zip(cache, _row_dims(), strict=True)))

    @staticmethod
    def prompt_cache(prompt: KeyValues, row: KeyValues | None, end, size: int) -> KeyValues:
        """Prompt caches of `size` tokens: those before the place `end` of prompts with their only rows behind them."""

        def cut(x, own, dims: str):
            if own is not None:
                own = own.squeeze(own.ndim - 4)
                lead = own.ndim - 3
                own = own.transpose(*range(lead), *(lead + dims.index(dim) for dim in "jcd"))
                x = jnp.concatenate([x, own], axis=-2)
            padded = jnp.pad(x, [(size if axis == x.ndim - 2 else 0, 0) for axis in range(x.ndim)])
            return jax.lax.dynamic_slice_in_dim(padded, end, size, axis=x.ndim - 2)

        return KeyValues(*(cut(*args) for args in zip(prompt, row or (None, None), _row_dims(), strict=True)))

    def _project(self, x, positions, arrays: AttentionArrays):
        """Queries `[..., t, J, H/J, d]` (scaled) and keys, values `[..., t, J, d]` of x `[..., t, D]`."""
        c = self.config
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.q_norm is not None and self.k_norm is not None and c.qk_norm_whole:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (a.reshape(*x.shape[:-1], -1, c.head_dim) for a in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None and not c.qk_norm_whole:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (rotate(a, positions, arrays.inv_freq, arrays.scale) for a in (q, k))
        q = q.reshape(*x.shape[:-1], c.kv_heads, c.heads // c.kv_heads, c.head_dim)
        return q * (c.head_dim**-0.5 if c.query_scale is None else c.query_scale), k, v

    def _in_blocks(self, q, k, v, mask):
        # A block of queries sees no key behind it: of a long row, half of the scores are never formed.
        length = q.shape[1]
        size = length if context_shards() > 1 else max(-(-length // QUERY_BLOCKS), SMALLEST_BLOCK)
        blocks = []
        for start in range(0, length, size):
            end = min(start + size, length)
            queries, keys, values, seen = q[:, start:end], k[:, :end], v[:, :end], mask[:, start:end, :end]
            scores = jnp.einsum("ntjrd,nsjd->njrts", queries, keys, preferred_element_type=jnp.float32)
            scores = soft_cap(scores, self.config.attention_softcap)
            weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, MASKED), axis=-1)
            blocks.append(jnp.einsum("njrts,nsjd->ntjrd", weights.astype(values.dtype), values))
        return jnp.concatenate(blocks, axis=1)

    def _splash(self, q, k, v, segments, mask, window):
        attend = functools.partial(splash_attention, softcap=self.config.attention_softcap)
        if mask is not None or window is None:
            return attend(q, k, v, segments, mask)
        sliding = functools.partial(attend, window=self.config.sliding_window)
        if isinstance(window, jax.Array):  # of a layer in a scan over layers, some of which slide
            return jax.lax.cond(window == self.config.sliding_window, sliding, attend, q, k, v, segments)
        return (sliding if window == self.config.sliding_window else attend)(q, k, v, segments)


def _row_dims() -> tuple[str, str]:
    """The dimensions of a row's keys and values as they are stored, see `KeyValues`."""
    return ROW_DIMS.get(jax.default_backend(), ROW_DIMS["gpu"])


def _for_heads(mask, heads: int):
    """The mask `[G,R,1,W*heads,S]` of queries from that of tokens `[G,R,W,S]`; one for all where that is enough."""
    return (mask if mask.shape[2] == 1 else jnp.repeat(mask, heads, axis=2))[:, :, None]


def _einsum(dims: str, x, stored) -> jax.Array:
    """The einsum, in fp32, of x and of keys or values, which may be stored in another type."""
    return jnp.einsum(dims, x, quantize.widened(stored, x.dtype), preferred_element_type=jnp.float32)


def _write(cache: KeyValues, k, v, length) -> KeyValues:
    """The row caches with k and v `[G,R,W,J,d]` from the place `length` `[G,R]` of each row on."""

    def write(stored, new, dims: str):
        # 16-bit floats as integers: XLA's CPU backend would widen the caches, write, and narrow them again. On TPUs
        # integers are laid out otherwise.
        as_bits = stored.dtype.itemsize == 2 and jax.default_backend() == "cpu"
        bits = "uint16" if as_bits else stored.dtype
        axis = dims.index("c")

        def write_row(row, new, length):
            at: tuple = (slice(None),) * axis
            if len(new) == 1:
                return row.at[(*at, length)].set(new[0], mode="drop")
            new = new.transpose(["cjd".index(dim) for dim in dims])
            return row.at[(*at, length + jnp.arange(new.shape[axis]))].set(new, mode="drop")

        old, new = (jax.lax.bitcast_convert_type(x, bits) for x in (stored, quantize.narrowed(new, stored.dtype)))
        # A device writes its own rows. With their numbers among the indices, devices send each other all of k and v.
        written = jax.lax.bitcast_convert_type(jax.vmap(jax.vmap(write_row))(old, new, length), stored.dtype)
        return constrain(written, "rows", None, *("heads" if dim == "j" else None for dim in dims))

    return KeyValues(*(write(*args) for args in zip(cache, (k, v), _row_dims(), strict=True)))
