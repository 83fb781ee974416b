"""Attention as a mixer: full and sliding, of whole rows and, with cached keys and values, of their next tokens."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl_llm.distributed.sharding import attention_dims, constrain, context_shards
from jaxrl_llm.models import quantize
from jaxrl_llm.models.kernels.decode_attention import MASKED, by_kernel, decode_attention
from jaxrl_llm.models.kernels.fused_attention import (
    cudnn_attention,
    flash_attention,
    head_copies,
    implementation,
    is_in_chunks,
    splash_attention,
)
from jaxrl_llm.models.layers import Linear, RMSNorm, as_blocks, over_rms, side_by_side, soft_cap
from jaxrl_llm.models.mixers.context_attention import Places, context_attention
from jaxrl_llm.models.mixers.mixer import AttentionInputs, Cacheless, DecodeInputs, LayerConfig
from jaxrl_llm.models.rope import frequencies, rotate

QUERY_BLOCKS, SMALLEST_BLOCK = 4, 64  # blocks that the queries of a row are split into, and the least queries of one
# The dimensions of a row's keys and values (heads j, positions c, numbers d) in the order that each backend decodes in
# place with; in another one it would copy the caches before every chunk of steps, and back behind it. Heads before
# positions are read untransposed, and TPUs write a token's heads as one tile. A row has few queries (H/J) for its many
# keys: with these last, attention of 64 rows is 2.5 times faster on CPUs at 256 tokens and 3.4 times at 1024.
ROW_DIMS = {"cpu": ("jdc", "jcd"), "gpu": ("jcd", "jcd"), "tpu": ("cjd", "cjd")}
NO_WINDOW = 2**30  # of a layer that sees everything, among layers that do not


class KeyValues(NamedTuple):
    """Keys and values: of a prompt both `[..., J, P, d]`, of its rows `[..., *ROW_DIMS]` of the backend."""

    k: jax.Array
    v: jax.Array


class ShiftedKeyValues(NamedTuple):
    """Keys and values of a prompt behind which positions do not go on by one."""

    k: jax.Array
    v: jax.Array
    shift: jax.Array  # [..., G] added to the positions of the tokens behind it


class AttentionArrays(NamedTuple):
    """In what layers of attention differ besides their parameters; one layer's, or those of many, stacked."""

    inv_freq: Any  # [r/2] inverse frequencies of the r rotated dimensions; 0: not rotated
    scale: Any = 1.0  # of rotated dimensions
    window: Any = None  # a token sees this many, itself included; None: all before it
    rotated: Any = None  # whether the layer has rotary positions, where more than the rotation depends on it


class Attention(nnx.Module):
    """Causal grouped-query attention: H query heads share J key/value heads. A `Mixer`.

    Full and sliding attention are one mixer with and without a `LayerConfig.window`, so that a scan may run through
    layers of both.
    """

    path = "attention"
    shares_prefixes = True
    projects_keys = True
    output_name = "o"  # of `lora.TARGETS`
    gate_name = "gate"

    def __init__(self, config, rngs: nnx.Rngs):
        c = config
        self.config = c
        self.joins_gates = c.attention_gate == "queries"
        queries, keys, joint = c.heads * c.head_dim * (1 + self.joins_gates), c.kv_heads * c.head_dim, bool(c.joint_qkv)
        own, values = self.projects_keys, c.kv_heads * c.value_size
        self.qkv = Linear(c.width, queries + keys + values, c, rngs, c.attention_bias, "qkv") if joint else None
        self.q = None if joint else Linear(c.width, queries, c, rngs, c.attention_bias, "q")
        own_keys = own and not joint
        self.k = Linear(c.width, keys, c, rngs, c.attention_bias, "k") if own_keys else None
        self.v = Linear(c.width, values, c, rngs, c.attention_bias, "v") if own_keys and not c.keys_as_values else None
        self.o = Linear(c.heads * c.value_size, c.width, c, rngs, c.attention_output_bias, self.output_name)
        gates = c.heads * {"numbers": c.value_size, "heads": 1}.get(c.attention_gate, 0)
        self.gate = Linear(c.width, gates, c, rngs, name=self.gate_name) if gates else None
        self.sinks = nnx.Param(jnp.zeros((c.heads,), c.param_dtype)) if c.attention_sinks else None

        def norm(heads: int):
            sizes = {"whole": heads * c.head_dim, "heads": (heads, c.head_dim)}
            return RMSNorm(sizes.get(c.qk_norm, c.head_dim), c, rngs)

        self.q_norm = norm(c.heads) if c.qk_norm else None
        self.k_norm = norm(c.kv_heads) if c.qk_norm and own else None
        self.v_norm = RMSNorm(c.value_size, c, rngs, scaled=False) if c.value_norm and own else None

    @staticmethod
    def layer_arrays(config, layer: LayerConfig) -> AttentionArrays:
        """Rotary frequencies and the window, which is None where no layer of the model has one."""
        window = layer.window
        if window is None and config.sliding_layers:
            window = NO_WINDOW  # layers that are stacked have either all a window or none
        rotated = layer.rope is not None if config.qk_rms or config.query_growth else None
        if layer.rope is None:
            return AttentionArrays(np.zeros(config.rotated_size // 2, np.float32), 1.0, window, rotated)
        inv_freq = frequencies(layer.rope, config.rotated_size) * np.float32(-1 if config.rope_reversed else 1)
        return AttentionArrays(inv_freq, layer.rope.attention_factor, window, rotated)

    @staticmethod
    def flops(config, tokens, pairs):
        """The operations of scores and of weighted values."""
        return 2.0 * config.heads * (config.head_dim + config.value_size) * pairs

    def prefill(
        self, x, inputs: AttentionInputs, arrays: AttentionArrays, choosing=None
    ) -> tuple[jax.Array, KeyValues | ShiftedKeyValues | tuple[()]]:
        """Output `[N,T,D]` and the layer's own keys and values `[N,J,T,d]`.

        Where tokens attend to some of those before, `choosing(config, q, k, v, inputs, sinks=)` is in the place of
        `attend`.
        """
        if inputs.inv_freq is not None:  # a layer without rotary positions has none in long rows either
            arrays = arrays._replace(inv_freq=jnp.sign(arrays.inv_freq) * inputs.inv_freq)
        positions = inputs.positions if inputs.rotary is None else inputs.rotary
        q, k, v, gate = self._project(x, positions, arrays)
        window = arrays.window
        if window is not None and self.config.sliding_chunks:  # of each token, back to where its chunk begins
            window = inputs.positions % window + 1 if is_in_chunks(self.config, x.shape[1]) else None
        if k is None or v is None:
            k, v = (a.swapaxes(1, 2) for a in inputs.shared)
            return self._output(attend(self.config, q, k, v, inputs, window, self._sinks()), gate, x), ()
        if choosing is None:
            out = attend(self.config, q, k, v, inputs, window, self._sinks())
        else:
            out = choosing(self.config, q, k, v, inputs, sinks=self._sinks())
        cache = KeyValues(*(constrain(a.swapaxes(1, 2), "rows", "heads", None, None) for a in (k, v)))
        if inputs.shift is not None:
            cache = ShiftedKeyValues(*cache, inputs.shift)
        return self._output(out, gate, x), cache

    def decode(
        self,
        x,
        inputs: DecodeInputs,
        prompt: KeyValues | ShiftedKeyValues,
        cache: KeyValues,
        arrays: AttentionArrays,
        choosing=None,
    ) -> tuple[jax.Array, KeyValues]:
        """The next W tokens of each row: output `[G,R*W,D]` and the row cache with their keys and values.

        `prompt` `[G,J,P,d]` is stored once per prompt and read by its R rows, never copied for them; `cache`, made by
        `empty_cache`, is each row's own. `choosing(config, q, prompt, cache, inputs, sinks=)` may be in the place of
        `attend_next`.
        """
        positions = inputs.positions[:, :, None]
        if isinstance(prompt, ShiftedKeyValues):
            positions += prompt.shift[:, None, None]
            prompt = KeyValues(prompt.k, prompt.v)
        q, k, v, gate = self._project(x[:, :, None], positions, arrays, decodes=True)
        q = q.reshape(*inputs.length.shape, -1, *q.shape[3:])  # [G,R,W,J,H/J,d]
        if k is not None and v is not None:
            k, v = (a.reshape(*q.shape[:3], *a.shape[3:]) for a in (k, v))
            cache = _write(cache, k, v, inputs.length)
        if choosing is None:
            out = attend_next(self.config, q, prompt, cache, inputs, arrays.window, self._sinks())
        else:
            out = choosing(self.config, q, prompt, cache, inputs, sinks=self._sinks())
        return self._output(out, gate, x), cache

    @staticmethod
    def empty_cache(prompt: KeyValues | ShiftedKeyValues, rows: int, size: int) -> KeyValues:
        """Row caches with room for `size` tokens, for `rows` rows of each prompt `[..., J, P, d]`."""

        def zeros(of_prompt, dims: str):
            *lead, heads, _, d = of_prompt.shape
            sizes = {"j": heads, "c": size, "d": d}
            # XLA replicates on every device what nothing says how to shard, zeros too.
            names = (*(None,) * (len(lead) - 1), "rows", None, *("heads" if dim == "j" else None for dim in dims))
            return constrain(jnp.zeros((*lead, rows, *(sizes[dim] for dim in dims)), of_prompt.dtype), *names)

        return KeyValues(*map(zeros, (prompt.k, prompt.v), row_dims()))

    @staticmethod
    def grow_cache(cache: KeyValues, size: int) -> KeyValues:
        """The row caches with room for `size` tokens."""

        def grown(x, dims: str):
            axis = x.ndim - 3 + dims.index("c")
            return jnp.pad(x, [(0, size - x.shape[axis] if i == axis else 0) for i in range(x.ndim)])

        return KeyValues(*(grown(x, dims) for x, dims in zip(cache, row_dims(), strict=True)))

    @staticmethod
    def prompt_cache(
        prompt: KeyValues | ShiftedKeyValues, row: KeyValues | None, end, size: int
    ) -> KeyValues | ShiftedKeyValues:
        """Prompt caches of `size` tokens: those before the place `end` of prompts with their only rows behind them."""

        def cut(x, own, dims: str):
            if own is not None:
                own = own.squeeze(own.ndim - 4)
                lead = own.ndim - 3
                own = own.transpose(*range(lead), *(lead + dims.index(dim) for dim in "jcd"))
                x = jnp.concatenate([x, own], axis=-2)
            padded = jnp.pad(x, [(size if axis == x.ndim - 2 else 0, 0) for axis in range(x.ndim)])
            return jax.lax.dynamic_slice_in_dim(padded, end, size, axis=x.ndim - 2)

        pair = zip((prompt.k, prompt.v), row or (None, None), row_dims(), strict=True)
        found = KeyValues(*(cut(*args) for args in pair))
        return ShiftedKeyValues(*found, prompt.shift) if isinstance(prompt, ShiftedKeyValues) else found

    def _project(self, x, positions, arrays: AttentionArrays, decodes: bool = False):
        """Queries `[..., t, J, H/J, d]` (scaled), keys and values `[..., t, J, d]`, gates `[..., t, H*d or H]` of x.

        Keys and values are None where they are those of another layer.
        """
        c, k, v, gate = self.config, None, None, None

        def turned(a, norm):
            a = norm(a) if norm is not None and c.qk_norm == "whole" else a
            a = a.reshape(*x.shape[:-1], -1, c.head_dim)
            a = norm(a) if norm is not None and c.qk_norm in ("head", "heads") else a
            a = rotate(a, positions, arrays.inv_freq, arrays.scale, c.rope_interleaved)
            a = norm(a) if norm is not None and c.qk_norm == "rotated" else a
            return jnp.where(arrays.rotated, over_rms(a, c.norm_eps), a).astype(a.dtype) if c.qk_rms else a

        normed = self._normed_together(x) if decodes else None
        if normed is not None and self.v is not None:
            (q, k), v = jnp.split(turned(normed, None), [c.heads], axis=-2), self.v(x)
        else:
            if self.qkv is not None:
                q, k, v = self._apart(self.qkv(x))
            elif self.q is None or self.k is None:
                assert self.q is not None
                q = self.q(x)
            else:
                both = side_by_side(x, self.q, self.k)
                split = c.heads * c.head_dim * (1 + self.joins_gates)
                q, k = (self.q(x), self.k(x)) if both is None else jnp.split(both, [split], axis=-1)
                v = k if self.v is None else self.v(x)
            if c.qkv_clip is not None and k is not None and v is not None:
                q, k, v = (jnp.clip(a, -c.qkv_clip, c.qkv_clip) for a in (q, k, v))
            if self.joins_gates:
                q, gate = jnp.split(q.reshape(*x.shape[:-1], c.heads, -1), 2, axis=-1)
                q, gate = (a.reshape(*x.shape[:-1], -1) for a in (q, gate))
            q, k = turned(q, self.q_norm), None if k is None else turned(k, self.k_norm)
        gate = gate if self.gate is None else self.gate(x)
        q = grown(c, q, positions, arrays)
        q = q.reshape(*x.shape[:-1], c.kv_heads, c.heads // c.kv_heads, c.head_dim)
        q *= (c.head_dim**-0.5 if c.query_scale is None else c.query_scale) * c.key_scale
        if k is None or v is None:
            return q, None, None, gate
        v = v.reshape(*x.shape[:-1], -1, c.value_size) * c.value_scale
        return q, k, v if self.v_norm is None else self.v_norm(v), gate

    def _apart(self, joint):
        """Queries, keys and values `[..., H*d]` and `[..., J*d]` of the outputs of their one map."""
        c, keys = self.config, self.config.kv_heads * self.config.head_dim
        if c.joint_qkv == "blocks":
            return jnp.split(joint, [c.heads * c.head_dim, c.heads * c.head_dim + keys], axis=-1)
        by_head = joint.reshape(*joint.shape[:-1], c.kv_heads, -1)
        parts = jnp.split(by_head, [by_head.shape[-1] - 2 * c.head_dim, by_head.shape[-1] - c.head_dim], axis=-1)
        return [part.reshape(*joint.shape[:-1], -1) for part in parts]

    def _normed_together(self, x) -> jax.Array | None:
        """Queries and keys behind their norms, as blocks `[..., H/J + 1, J, d]` of heads; None where they are apart."""
        c, q_norm, k_norm = self.config, self.q_norm, self.k_norm
        if q_norm is None or k_norm is None or self.q is None or self.k is None or self.joins_gates:
            return None
        if c.qk_norm != "head" or c.norm_centred or c.qkv_clip is not None:
            return None
        blocks = as_blocks(x, c.kv_heads, c.head_dim, self.q, self.k)
        if blocks is None:
            return None
        is_query = np.arange(blocks.shape[-3])[:, None, None] < c.heads // c.kv_heads
        factors = jnp.where(is_query, q_norm.factors(), k_norm.factors())
        return (over_rms(blocks, c.norm_eps) * factors).astype(x.dtype)

    def _output(self, out, gate, x):
        out = out.reshape(*x.shape[:-1], -1)
        if gate is not None:  # of each number, or of each head
            by_head = (*x.shape[:-1], self.config.heads, -1)
            gate = gate.reshape(by_head)
            if self.config.attention_gate_softplus:
                gate = jax.nn.softplus(gate.astype(jnp.float32)).astype(gate.dtype)
            else:
                gate = jax.nn.sigmoid(gate)
            out = (out.reshape(by_head) * gate).reshape(out.shape)
        return self.o(out)

    def _sinks(self):
        """The scores `[J,H/J]` of the sinks in fp32, None without sinks."""
        if self.sinks is None:
            return None
        return self.sinks[...].astype(jnp.float32).reshape(self.config.kv_heads, -1)


def grown(config, q, positions, arrays: AttentionArrays) -> jax.Array:
    """Queries `[...,t,H,d]` times a factor that grows with the log of their position, where the model has one (arXiv
    2501.19399)."""
    if not config.query_growth:
        return q
    count = positions if config.query_growth_rotated else positions + 1
    growth = 1 + config.query_growth * jnp.log1p(count // config.query_growth_every)
    growth = growth if config.query_growth_rotated else jnp.where(arrays.rotated, 1.0, growth)
    return (q * growth[..., None, None]).astype(q.dtype)


class SharedAttention(Cacheless, Attention):
    """Attention to the keys and values of an earlier layer, whose cache it reads: it has none of its own."""

    projects_keys = False

    def decode(self, x, inputs: DecodeInputs, prompt, cache, arrays: AttentionArrays) -> tuple[jax.Array, Any]:
        """The next W tokens of each row: output `[G,R*W,D]`, from the caches of the other layer, which have them."""
        their_prompt, their_row = inputs.shared
        return super().decode(x, inputs, their_prompt, their_row, arrays)[0], cache


def attend(config, q, k, v, inputs: AttentionInputs, window=None, sinks=None) -> jax.Array:
    """`[N,T,J,H/J,d]`: attention of whole rows, of queries `[N,T,J,H/J,d]` (scaled) to keys and values `[N,T,J,d]`.

    `window` is the number of tokens that a token sees, or one of each `[N,T]`, which only a mask can say. `sinks`
    `[J,H/J]` are scores of one more token each, which has no value. Values may be smaller than keys.
    """
    by, size, shape = implementation(config, q.shape[1], inputs.by_mask), v.shape[-1], q.shape[:-1]
    copies = 1 if by in ("xla", "context") else head_copies(config)
    if copies > 1:
        k, v = (jnp.repeat(a, copies, axis=2) for a in (k, v))
        q = q.reshape(*shape[:2], k.shape[2], -1, q.shape[-1])
        sinks = None if sinks is None else sinks.reshape(k.shape[2], -1)
    # From positions sharded over `context` to heads sharded over it, in two steps that XLA turns into an exchange.
    q, k, v = (constrain(a, "rows", "positions", "heads", *(None,) * (a.ndim - 3)) for a in (q, k, v))
    if by == "context":
        return _in_context(config, q, k, v, inputs, window, sinks)
    query_dims, key_dims = attention_dims(config.kv_heads * copies)
    q = constrain(q, "rows", *query_dims, None, None)
    k, v = (constrain(a, "rows", *key_dims, None) for a in (k, v))
    mask = inputs.mask
    if window is not None and mask is not None and inputs.sliding_mask is not None:
        mask = jnp.where(window == NO_WINDOW, mask, inputs.sliding_mask)
    if window is not None and mask is not None:
        each = window[:, :, None] if jnp.ndim(window) == 2 else window
        mask = mask & (inputs.positions[:, :, None] - inputs.positions[:, None, :] < each)
        if config.sees_prompts and (runs := inputs.runs) is not None:
            mask |= (runs[:, :, None] == runs[:, None, :]) & (runs != 0)[:, None, :]
    if by != "xla" and size < k.shape[-1]:  # kernels take values of the size of keys
        v = jnp.pad(v, ((0, 0),) * 3 + ((0, k.shape[-1] - size),))
    if by == "splash":
        out = _splash(config, q, k, v, inputs.segments, mask, window)
    elif by == "flash":
        out = flash_attention(q, k, v, inputs.segments)
    elif by == "cudnn":
        out = cudnn_attention(q, k, v, mask, sinks)
    else:
        out = in_blocks(config, q, k, v, mask, sinks, inputs.causal, inputs.positions)
    out = constrain(out[..., :size], "rows", *query_dims, None, None)
    out = constrain(out, "rows", "positions", "heads", None, None)
    return out if copies == 1 else out.reshape(*shape, size)


def _in_context(config, q, k, v, inputs: AttentionInputs, window, sinks) -> jax.Array:
    """`attend` without a mask, where the mesh shards the positions of rows and no heads."""
    index = jnp.broadcast_to(jnp.arange(q.shape[1]), inputs.segments.shape)
    runs, beyond = (None, inputs.runs) if config.sees_prompts else (inputs.runs, None)
    if runs is not None and config.vision.bidirectional == "sliding":
        runs = None if window is None else jnp.where(window == NO_WINDOW, 0, runs)
    earliest = None if window is None else inputs.positions - window + 1
    places = Places(index, inputs.segments, inputs.positions, earliest, inputs.prefixes, runs, beyond)
    slopes = slopes_of(config)[..., 0] if config.alibi else None
    return context_attention(q, k, v, places, config.attention_softcap, sinks, slopes)


def attend_next(
    config, q, prompt: KeyValues, cache: KeyValues, inputs: DecodeInputs, window=None, sinks=None, chosen=None
) -> jax.Array:
    """`[G,R,W,J,H/J,d]`: attention of the next W tokens of rows, by queries of that shape (scaled), to what they see of
    prompts and row caches.

    One softmax runs over both. `window` and `sinks` are as in `attend`. Where tokens are `chosen`, of prompt
    `[G,R,W,J,P]` and row `[G,R,W,J,S]`, each head attends to these alone.
    """
    by_head = q.swapaxes(2, 3)  # [G,R,J,W,H/J,d]
    if chosen is None and by_kernel(config, q.dtype) and config.value_size == config.head_dim:
        start = inputs.prompt_mask.shape[1] - inputs.prompt_mask.sum(-1)
        seen = (start, inputs.length, window, config.attention_softcap, config.sliding_chunks)
        return decode_attention(by_head, prompt, cache, *seen, sinks).swapaxes(2, 3)
    q = by_head.reshape(*by_head.shape[:3], -1, by_head.shape[-1])
    in_prompt = einsum("gkjrd,gjpd->gkjrp", q, prompt.k)
    of_keys, of_values = row_dims()
    in_row = einsum(f"gkjrd,gk{of_keys}->gkjrc", q, cache.k)
    in_prompt, in_row = (soft_cap(scores, config.attention_softcap) for scores in (in_prompt, in_row))
    index = jnp.arange(in_row.shape[-1])
    place = (inputs.length[:, :, None] + jnp.arange(by_head.shape[3]))[..., None]  # [G,R,W,1]
    prompt_seen, row_seen = inputs.prompt_mask[:, None, None], index <= place
    prompt_positions = jnp.cumsum(inputs.prompt_mask, axis=-1) - 1  # [G,P]
    if config.alibi:
        biases = (linear_biases(config, x) for x in (prompt_positions, prompt_positions[:, -1:] + 1 + index))
        of_prompt, of_row = (jnp.tile(x, (1, 1, by_head.shape[3], 1))[:, None] for x in biases)  # of queries W*H/J
        in_prompt, in_row = in_prompt + of_prompt, in_row + of_row
    if window is not None:
        prompt_positions = prompt_positions[:, None, None]
        positions = inputs.positions.reshape(place.shape)
        window = positions % window + 1 if config.sliding_chunks else window
        prompt_seen &= positions - prompt_positions < window
        row_seen = row_seen & (place - index < window)
    # Of queries [G,R,1,W*H/J,S]; one for all of them where that is enough.
    each = by_head.shape[4]
    if chosen is None:
        prompt_seen, row_seen = (
            (mask if mask.shape[2] == 1 else jnp.repeat(mask, each, axis=2))[:, :, None]
            for mask in (prompt_seen, row_seen)
        )
    else:
        prompt_seen, row_seen = (jnp.repeat(mask.swapaxes(2, 3), each, axis=3) for mask in chosen)
    in_prompt = jnp.where(prompt_seen, in_prompt, MASKED)
    in_row = jnp.where(row_seen, in_row, MASKED)
    if sinks is not None:  # of the queries [J,W*H/J,1]
        sinks = jnp.tile(sinks, (1, by_head.shape[3]))[..., None]
    in_prompt, in_row = (a.astype(q.dtype) for a in combined_softmax([in_prompt, in_row], sinks))
    # With the weights as the rows of the matmul: as its columns, CPUs take three times as long.
    of_prompt = einsum("gjkrp,gjpd->gjkrd", in_prompt.swapaxes(1, 2), prompt.v).swapaxes(1, 2)
    out = of_prompt + einsum(f"gkjrc,gk{of_values}->gkjrd", in_row, cache.v)
    out = out.reshape(*by_head.shape[:-1], -1).swapaxes(2, 3)  # [G,R,W,J,H/J,d]
    return out.astype(q.dtype)


def in_blocks(config, q, k, v, mask, sinks=None, causal: bool = False, positions=None) -> jax.Array:
    """`attend` in plain XLA, of queries `[N,T,J,H/J,d]` to keys and values `[N,S,J,d]`, with a mask `[N,T,S]` or, of
    each of their heads, `[N,J,T,S]`. `positions` `[N,S]` are those of keys, which ALiBi reads.

    Queries come in blocks. A block of causal ones sees no key behind it: of a long row, half of the scores are never
    formed.
    """
    length = q.shape[1]
    size = length if context_shards() > 1 else max(-(-length // QUERY_BLOCKS), SMALLEST_BLOCK)
    blocks = []
    for start in range(0, length, size):
        end = min(start + size, length)
        size_seen = end if causal else k.shape[1]
        queries, seen = q[:, start:end], mask[..., start:end, :size_seen]
        keys, values = k[:, :size_seen], v[:, :size_seen]
        scores = jnp.einsum("ntjrd,nsjd->njrts", queries, keys, preferred_element_type=jnp.float32)
        scores = soft_cap(scores, config.attention_softcap)
        if config.alibi and positions is not None:
            scores += linear_biases(config, positions[:, :size_seen])[:, :, :, None]
        seen = seen[:, None, None] if seen.ndim == 3 else seen[:, :, None]
        scores = jnp.where(seen, scores, MASKED)
        if sinks is not None:
            one = jnp.broadcast_to(sinks[..., None, None], (*scores.shape[:-1], 1))
            scores = jnp.concatenate([scores, one], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., :size_seen]
        blocks.append(jnp.einsum("njrts,nsjd->ntjrd", weights.astype(values.dtype), values))
    return jnp.concatenate(blocks, axis=1)


def linear_biases(config, positions) -> jax.Array:
    """The numbers `[N,J,H/J,S]`, in fp32, that ALiBi (arXiv 2108.12409) adds to the scores of keys at `positions`
    `[N,S]`.

    It is a slope of each head times the position: to the softmax the same as minus the slope times the distance from
    the query. Head i of n, a power of two, has the slope `2 ** (-alibi * i / n)`; of other numbers of heads those above
    the largest n have every other slope of 2n heads, from the first on.
    """
    return slopes_of(config) * positions[:, None, None, :]


def slopes_of(config) -> np.ndarray:
    """The slopes `[J,H/J,1]` of `linear_biases`, in fp32."""
    n = 2 ** int(math.log2(config.heads))
    shares = np.concatenate([np.arange(1, n + 1) / n, np.arange(1, 2 * n, 2) / (2 * n)])[: config.heads]
    return (2.0 ** (-config.alibi * shares)).astype(np.float32).reshape(config.kv_heads, -1, 1)


def _splash(config, q, k, v, segments, mask, window):
    attend = functools.partial(splash_attention, softcap=config.attention_softcap)
    if mask is not None or window is None:
        return attend(q, k, v, segments, mask)
    sliding = functools.partial(attend, window=config.sliding_window)
    if isinstance(window, jax.Array):  # of a layer in a scan over layers, some of which slide
        return jax.lax.cond(window == config.sliding_window, sliding, attend, q, k, v, segments)
    return (sliding if window == config.sliding_window else attend)(q, k, v, segments)


def combined_softmax(scores: Sequence[jax.Array], sinks=None) -> list[jax.Array]:
    """The softmax over the last dimensions of all scores and, where given, of `sinks` `[...,1]`, whose share is left
    out."""
    # By hand: concatenated, the scores of the prompt would be copied every step.
    tops = [x.max(-1, keepdims=True) for x in scores] + ([] if sinks is None else [sinks])
    top = functools.reduce(jnp.maximum, tops)
    shares = [jnp.exp(x - top) for x in scores]
    total = sum(x.sum(-1, keepdims=True) for x in shares)
    total = total if sinks is None else total + jnp.exp(sinks - top)
    return [x / total for x in shares]


def row_dims() -> tuple[str, str]:
    """The dimensions of a row's keys and values as they are stored, see `KeyValues`."""
    return ROW_DIMS.get(jax.default_backend(), ROW_DIMS["gpu"])


def einsum(dims: str, x, stored) -> jax.Array:
    """The einsum, in fp32, of x and of keys or values, which may be stored in another type."""
    return jnp.einsum(dims, x, quantize.widened(stored, x.dtype), preferred_element_type=jnp.float32)


def _write(cache: KeyValues, k, v, length) -> KeyValues:
    """The row caches with k and v `[G,R,W,J,d]` from the place `length` `[G,R]` of each row on."""
    parts = zip(cache, (k, v), row_dims(), strict=True)
    return KeyValues(*(write_tokens(stored, new, length, dims) for stored, new, dims in parts))


def write_tokens(stored, new, length, dims: str, sharded: bool = True) -> jax.Array:
    """Row caches `[G,R,*dims]` with `new` `[G,R,W,J,d]` from the place `length` `[G,R]` of each row on.

    `dims` orders positions c, heads j, which are `sharded` or not, and numbers d.
    """
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
    return constrain(written, "rows", None, *("heads" if dim == "j" and sharded else None for dim in dims))
