"""The parts of a decoder layer: linear maps, RMS norm, attention, gated feed-forward.

Matrix products run in the compute dtype; norms, rotary angles and softmax in fp32.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.distributed.sharding import attention_dims, constrain, context_shards
from jaxrl_llm.models import lora, quantize
from jaxrl_llm.models.attention import fused_attention, splash_attention
from jaxrl_llm.models.rope import rotate

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": jax.nn.gelu, "gelu": functools.partial(jax.nn.gelu, approximate=False)}
QUERY_BLOCKS, SMALLEST_BLOCK = 4, 64  # blocks that the queries of a row are cut into, and queries of one at least
MASKED = -1e30  # finite, so that a row with nothing to attend to (padding) stays finite too


class KeyValues(NamedTuple):
    """Keys and values: of a prompt both `[..., J, P, d]`; of its rows keys `[..., J, d, C]`, values `[..., J, C, d]`.

    Heads before positions, so that decoding reads them untransposed. A row has few queries (H/J) for its many keys:
    with positions last, attention of 64 rows is 2.5 times faster on CPU at 256 tokens and 3.4 times at 1024.
    """

    k: jax.Array
    v: jax.Array


class LayerTraits(NamedTuple):
    """In what layers differ besides their parameters; one layer's, or those of many, stacked."""

    waves: Any  # [r/2] inverse frequencies of the r rotated dimensions; 0: not rotated
    scale: Any = 1.0  # of rotated dimensions
    window: Any = None  # a token sees this many, itself included; None: all before it


class Seen(NamedTuple):
    """What the tokens of given rows see: what is True in the mask, or else their own segment up to themselves."""

    segments: jax.Array  # [N,T] 0 is padding
    mask: jax.Array | None  # [N,T,T] (query, key)


class Linear(nnx.Module):
    """`x @ kernel (+ bias)`, kernel `[in, out]`.

    A map with a `name`, one of `lora.TARGETS`, may have an adapter, and a kernel that is quantised.
    """

    def __init__(self, d_in: int, d_out: int, config, rngs: nnx.Rngs, bias: bool = False, name: str = ""):
        kernel = jax.random.normal(rngs.params(), (d_in, d_out), config.param_dtype) * config.init_scale
        self.quantize = config.quantize if name else "none"
        stored = kernel if self.quantize == "none" else quantize.quantize(kernel, self.quantize)
        self.kernel = nnx.Dict(jax.tree.map(nnx.Param, stored)) if isinstance(stored, dict) else nnx.Param(stored)
        self.bias = nnx.Param(jnp.zeros((d_out,), config.param_dtype)) if bias else None
        self.lora = own = config.lora if config.lora is not None and name in config.lora.targets else None
        self.lora_a = nnx.Param(lora.init_a(rngs.lora(), d_in, own.rank)) if own else None
        self.lora_b = nnx.Param(jnp.zeros((own.rank, d_out), jnp.float32)) if own else None
        self.lora_key = nnx.Param(jnp.zeros((2,), jnp.uint32)) if own and own.dropout else None

    def __call__(self, x):
        # Rows and positions as one dimension: with two, XLA's CPU backend computes the weight gradient 4 times slower.
        # Where both are cut over devices, one dimension could not be, and devices would compute each other's part.
        rows = x.reshape(-1, x.shape[-1]) if context_shards() == 1 else x
        dense = isinstance(self.kernel, nnx.Param)
        stored = self.kernel[...] if dense else {name: part[...] for name, part in self.kernel.items()}
        product = quantize.frozen_matmul if self.lora is not None or not dense else quantize.matmul
        y: jax.Array = product(rows, stored, self.quantize)
        if self.lora is not None and self.lora_a is not None and self.lora_b is not None:
            key_data = None if self.lora_key is None else self.lora_key[...]
            y += lora.delta(rows, self.lora_a[...], self.lora_b[...], self.lora, key_data)
        y = y.reshape(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


class RMSNorm(nnx.Module):
    """`x / rms(x) * (scale + norm_offset)` over the last dimension, in fp32."""

    def __init__(self, size: int, config, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.full((size,), 1.0 - config.norm_offset, config.param_dtype))
        self.eps, self.offset = config.norm_eps, config.norm_offset

    def __call__(self, x):
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32)
        return (x32 * (scale + self.offset if self.offset else scale)).astype(x.dtype)


def soft_cap(x, cap: float | None):
    """`cap * tanh(x / cap)`, within +-cap; x itself without a cap (arXiv 2408.00118, section 2)."""
    return x if cap is None else cap * jnp.tanh(x / cap)


class Attention(nnx.Module):
    """Causal grouped-query attention: H query heads share J key/value heads.

    Its `LayerTraits` give the rotary frequencies and how far back the layer sees.
    """

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

    def project(self, x, positions, traits: LayerTraits):
        """Queries `[..., t, J, H/J, d]` (scaled) and keys, values `[..., t, J, d]` of x `[..., t, D]`."""
        c = self.config
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.q_norm is not None and self.k_norm is not None and c.qk_norm_whole:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (a.reshape(*x.shape[:-1], -1, c.head_dim) for a in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None and not c.qk_norm_whole:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (rotate(a, positions, traits.waves, traits.scale) for a in (q, k))
        q = q.reshape(*x.shape[:-1], c.kv_heads, c.heads // c.kv_heads, c.head_dim)
        return q * (c.head_dim**-0.5 if c.query_scale is None else c.query_scale), k, v

    def __call__(self, x, positions, seen: Seen, traits: LayerTraits) -> tuple[jax.Array, KeyValues]:
        """Output `[N,T,D]` and the keys and values `[N,J,T,d]`; without a mask only splash attention computes."""
        q, k, v = self.project(x, positions, traits)
        q, k, v = (constrain(a, "rows", "positions", "heads", *(None,) * (a.ndim - 3)) for a in (q, k, v))
        of_queries, of_keys = attention_dims(self.config.kv_heads)
        q = constrain(q, "rows", *of_queries, None, None)
        k, v = (constrain(a, "rows", *of_keys, None) for a in (k, v))
        mask = seen.mask
        if traits.window is not None and mask is not None:
            mask = mask & (positions[:, :, None] - positions[:, None, :] < traits.window)
        if self.config.attention == "splash":
            out = self._by_splash(q, k, v, seen.segments, mask, traits.window)
        else:
            out = self._in_blocks(q, k, v, mask)
        out = constrain(out, "rows", *of_queries, None, None)
        out = constrain(out, "rows", "positions", "heads", None, None)
        cache = KeyValues(*(constrain(a.swapaxes(1, 2), "rows", "heads", None, None) for a in (k, v)))
        return self.o(out.reshape(*x.shape[:-1], -1)), cache

    def _in_blocks(self, q, k, v, mask):
        # A block of queries sees no key behind it: of a long row, half of the scores are never formed.
        length = q.shape[1]
        size = length if context_shards() > 1 else max(-(-length // QUERY_BLOCKS), SMALLEST_BLOCK)
        ends = [(at, min(at + size, length)) for at in range(0, length, size)]
        parts = [self._attended(q[:, at:end], k[:, :end], v[:, :end], mask[:, at:end, :end]) for at, end in ends]
        return jnp.concatenate(parts, axis=1)

    def _by_splash(self, q, k, v, segments, mask, window):
        attend = functools.partial(splash_attention, softcap=self.config.attention_softcap)
        if mask is not None or window is None:
            return attend(q, k, v, segments, mask)
        sliding = functools.partial(attend, window=self.config.sliding_window)
        if isinstance(window, jax.Array):  # of a layer in a scan over layers, some of which slide
            return jax.lax.cond(window == self.config.sliding_window, sliding, attend, q, k, v, segments)
        return (sliding if window == self.config.sliding_window else attend)(q, k, v, segments)

    def _attended(self, q, k, v, mask):
        if self.config.attention == "cudnn":
            return fused_attention(q, k, v, mask, "cudnn")
        scores = jnp.einsum("ntjrd,nsjd->njrts", q, k, preferred_element_type=jnp.float32)
        scores = soft_cap(scores, self.config.attention_softcap)
        weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, MASKED), axis=-1)
        return jnp.einsum("njrts,nsjd->ntjrd", weights.astype(v.dtype), v)

    def decode(
        self, x, positions, prompt: KeyValues, prompt_mask, rows: KeyValues, length, traits: LayerTraits
    ) -> tuple[jax.Array, KeyValues]:
        """The next W tokens of each row: output `[G,R*W,D]` and the row cache with their keys and values.

        x `[G,R*W,D]`: R rows of each of G prompts, a row's tokens adjacent, at `positions` `[G,R*W]`; the first of a
        row goes to the place `length` `[G,R]` of its cache. `prompt` `[G,J,P,d]` is stored once per prompt and read by
        its R rows without being repeated; `rows`, made by `empty_rows`, is each row's own. One softmax runs over both.
        """
        q, k, v = self.project(x[:, :, None], positions[:, :, None], traits)
        q, k, v = (a.reshape(*length.shape, -1, *a.shape[3:]) for a in (q, k, v))  # [G,R,W,J,...]
        rows = _write(rows, k, v, length)
        by_head = q.swapaxes(2, 3)  # [G,R,J,W,H/J,d]
        q = by_head.reshape(*by_head.shape[:3], -1, by_head.shape[-1])
        in_prompt, in_rows = _product("gkjrd,gjpd->gkjrp", q, prompt.k), _product("gkjrd,gkjdc->gkjrc", q, rows.k)
        in_prompt, in_rows = (soft_cap(scores, self.config.attention_softcap) for scores in (in_prompt, in_rows))
        index = jnp.arange(rows.k.shape[-1])
        place = (length[:, :, None] + jnp.arange(by_head.shape[3]))[..., None]  # [G,R,W,1]
        seen, written = prompt_mask[:, None, None], index <= place
        if traits.window is not None:
            prompt_positions = jnp.cumsum(prompt_mask, axis=-1)[:, None, None] - 1
            seen = seen & (positions.reshape(place.shape) - prompt_positions < traits.window)
            written = written & (place - index < traits.window)
        seen, written = (_for_heads(mask, by_head.shape[4]) for mask in (seen, written))
        in_prompt = jnp.where(seen, in_prompt, MASKED)
        in_rows = jnp.where(written, in_rows, MASKED)
        top = jnp.maximum(in_prompt.max(-1, keepdims=True), in_rows.max(-1, keepdims=True))
        in_prompt, in_rows = jnp.exp(in_prompt - top), jnp.exp(in_rows - top)
        total = in_prompt.sum(-1, keepdims=True) + in_rows.sum(-1, keepdims=True)
        in_prompt, in_rows = ((part / total).astype(v.dtype) for part in (in_prompt, in_rows))
        # With the weights as the rows of the product: as its columns, CPUs take three times as long.
        of_prompt = _product("gjkrp,gjpd->gjkrd", in_prompt.swapaxes(1, 2), prompt.v).swapaxes(1, 2)
        out = of_prompt + _product("gkjrc,gkjcd->gkjrd", in_rows, rows.v)
        out = out.reshape(by_head.shape).swapaxes(2, 3)  # [G,R,W,J,H/J,d]
        return self.o(out.astype(v.dtype).reshape(*x.shape[:-1], -1)), rows


def _for_heads(mask, heads: int):
    """The mask `[G,R,1,W*heads,S]` of queries from that of tokens `[G,R,W,S]`; one for all where that is enough."""
    return (mask if mask.shape[2] == 1 else jnp.repeat(mask, heads, axis=2))[:, :, None]


def _product(dims: str, x, stored) -> jax.Array:
    """The einsum, in fp32, of x and of keys or values, which may be stored in another type."""
    return jnp.einsum(dims, x, quantize.widened(stored, x.dtype), preferred_element_type=jnp.float32)


def empty_rows(prompt: KeyValues, repeats: int, size: int) -> KeyValues:
    """Row caches with room for `size` tokens, for `repeats` rows of each prompt `[..., J, P, d]`."""
    *lead, heads, _, d = prompt.k.shape
    shapes = ((*lead, repeats, heads, d, size), (*lead, repeats, heads, size, d))
    # XLA repeats on every device what nothing says how to cut, zeros too.
    dims = (*(None,) * (len(lead) - 1), "rows", None, "heads", None, None)
    return KeyValues(*(constrain(jnp.zeros(shape, prompt.k.dtype), *dims) for shape in shapes))


def longer_rows(rows: KeyValues, size: int) -> KeyValues:
    """The row caches with room for `size` tokens."""
    more = (0, size - rows.k.shape[-1])
    whole = ((0, 0),) * (rows.k.ndim - 2)
    return KeyValues(jnp.pad(rows.k, (*whole, (0, 0), more)), jnp.pad(rows.v, (*whole, more, (0, 0))))


def _write(rows: KeyValues, k, v, length) -> KeyValues:
    """The row caches with k and v `[G,R,W,J,d]` from the place `length` `[G,R]` of each row on."""

    def row(keys, values, k, v, length):
        if len(k) == 1:
            keys = keys.at[:, :, length].set(k[0], mode="drop")
            return keys, values.at[:, length].set(v[0], mode="drop")
        places = length + jnp.arange(len(k))
        keys = keys.at[:, :, places].set(jnp.moveaxis(k, 0, -1), mode="drop")
        return keys, values.at[:, places].set(v.swapaxes(0, 1), mode="drop")

    dtype = rows.k.dtype
    # 16-bit floats as whole numbers: XLA's CPU backend would widen the caches, write, and narrow them again.
    written = "uint16" if dtype.itemsize == 2 else dtype
    old_k, old_v, new_k, new_v = (
        jax.lax.bitcast_convert_type(x, written) for x in (*rows, *(quantize.narrowed(x, dtype) for x in (k, v)))
    )
    # A device writes its own rows. With the rows' numbers among the indices, devices send each other all of k and v.
    both = jax.vmap(jax.vmap(row))(old_k, old_v, new_k, new_v, length)
    both = (jax.lax.bitcast_convert_type(x, dtype) for x in both)
    return KeyValues(*(constrain(x, "rows", None, "heads", None, None) for x in both))


class FeedForward(nnx.Module):
    """`down(activation(gate(x)) * up(x))` (arXiv 2002.05202)."""

    def __init__(self, config, rngs: nnx.Rngs):
        self.gate = Linear(config.width, config.ffn, config, rngs, config.mlp_bias, "gate")
        self.up = Linear(config.width, config.ffn, config, rngs, config.mlp_bias, "up")
        self.down = Linear(config.ffn, config.width, config, rngs, config.mlp_bias, "down")
        self.activation = ACTIVATIONS[config.activation]

    def __call__(self, x):
        hidden = self.activation(self.gate(x)) * self.up(x)
        return self.down(constrain(hidden, "rows", "positions", "ffn"))
