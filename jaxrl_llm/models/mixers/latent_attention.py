"""Multi-head latent attention as a mixer (arXiv 2405.04434, section 2.1): keys and values come from one small latent.

Letters: c numbers of a latent, e rotated numbers of a key, which all heads share, n other numbers of a query or key
(n + e = d), v numbers of a value. The cache of a token is `[c + e]`, whatever the number of heads.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.distributed.sharding import constrain
from jaxrl_llm.models import quantize
from jaxrl_llm.models.kernels.decode_attention import MASKED, by_kernel, decode_attention
from jaxrl_llm.models.layers import Linear, RMSNorm
from jaxrl_llm.models.mixers.attention import (
    Attention,
    AttentionArrays,
    attend,
    combined_softmax,
    einsum,
    grown,
    write_tokens,
)
from jaxrl_llm.models.mixers.mixer import AttentionInputs, DecodeInputs
from jaxrl_llm.models.mixers.query_blocks import (
    as_mask,
    at,
    attend_to_choice,
    attend_to_chosen,
    attend_to_copies,
    copies_pay,
    copies_pay_next,
    over_queries,
)
from jaxrl_llm.models.rope import Rope, rotate


class QueryGrowth(nnx.Module):
    """The factors `s log(t + 1) + b` of the queries at position t, of which each head has an s and a b (scalable
    softmax, arXiv 2501.19399), in fp32."""

    def __init__(self, heads: int, dtype: str):
        self.scale, self.shift = nnx.Param(jnp.zeros((heads,), dtype)), nnx.Param(jnp.ones((heads,), dtype))

    def __call__(self, q, positions):
        """The queries `[...,t,H,d]` of positions `[...,t]`."""
        scale, shift = (x[...].astype(jnp.float32) for x in (self.scale, self.shift))
        factors = scale * jnp.log1p(positions.astype(jnp.float32))[..., None] + shift
        return (q * factors[..., None]).astype(q.dtype)


class LatentAttention(nnx.Module):
    """Causal attention of H heads to latents. A `Mixer`.

    Rows are computed with the keys and values of every head. Decoding folds the maps from latents to these into queries
    and outputs, and reads the latents alone; and so do rows far longer than the tokens that are chosen of them.
    """

    path = "latent"
    shares_prefixes = True
    projects_latents = True  # False: they are those of the layer that `LayerConfig.shares` names, and not cached again
    layer_arrays = staticmethod(Attention.layer_arrays)

    @staticmethod
    def flops(config, tokens, pairs):
        """The operations of scores and of weighted values, with the keys and values of every head."""
        return 2.0 * config.heads * (config.head_dim + config.value_head_dim) * pairs

    def __init__(self, config, rngs: nnx.Rngs):
        self.config = c = config
        plain = c.head_dim - c.rotated_size
        inner = dataclasses.replace(c, norm_eps=c.norm_eps if c.latent_norm_eps is None else c.latent_norm_eps)
        out = c.heads * c.head_dim
        self.q = None if c.query_rank else Linear(c.width, out, c, rngs, name="q")
        self.q_a = Linear(c.width, c.query_rank, c, rngs, c.attention_bias, "q_a") if c.query_rank else None
        self.q_a_norm = RMSNorm(c.query_rank, inner, rngs) if c.query_rank else None
        self.q_b = Linear(c.query_rank, out, c, rngs, name="q_b") if c.query_rank else None
        own, stored = self.projects_latents, c.latent_size + c.rotated_size
        self.kv_a = Linear(c.width, stored, c, rngs, c.attention_bias, "kv_a") if own else None
        self.kv_a_norm = RMSNorm(c.latent_size, inner, rngs) if own else None
        self.kv_b = Linear(c.latent_size, c.heads * (plain + c.value_head_dim), c, rngs, name="kv_b")
        self.o = Linear(c.heads * c.value_head_dim, c.width, c, rngs, c.attention_output_bias, "o")
        numbers = c.attention_gate == "numbers"  # each has a gate, else each head
        gates = c.heads * (c.value_head_dim if numbers else 1)
        self.gate = Linear(c.width, gates, c, rngs, name="gate" if numbers else "z") if c.attention_gate else None
        self.sinks = nnx.Param(jnp.zeros((c.heads,), c.param_dtype)) if c.attention_sinks else None
        self.growth = QueryGrowth(c.heads, c.param_dtype) if c.query_growth_learned else None

    def prefill(self, x, inputs: AttentionInputs, arrays: AttentionArrays, chosen=None) -> tuple[jax.Array, Any]:
        """Output `[N,T,D]` and the layer's own latents `[N,T,c+e]`.

        Tokens attend to those that are `chosen` of each row, `[N,T,k]`, or to all before them.
        """
        c = self.config
        if inputs.inv_freq is not None:
            arrays = arrays._replace(inv_freq=inputs.inv_freq)
        plain, rotated = self._queries(x, inputs.positions, arrays)
        own = self._latents(x, inputs.positions, arrays)
        latents = inputs.shared if own is None else own
        passed = () if own is None else constrain(own, "rows", None, None)
        if chosen is not None and self._reads_chosen_alone(x.shape[1], chosen.shape[-1]):
            return self._output(self._of_chosen(plain, rotated, latents, chosen), x), passed
        keys_values = self.kv_b(latents[..., : c.latent_size]).reshape(*x.shape[:-1], c.heads, -1)
        keys, values = jnp.split(keys_values, [c.head_dim - c.rotated_size], axis=-1)
        shared = jnp.broadcast_to(latents[..., None, c.latent_size :], (*keys.shape[:-1], c.rotated_size))
        q, k = jnp.concatenate([plain, rotated], axis=-1), jnp.concatenate([keys, shared], axis=-1)
        if chosen is None:
            out = attend(c, q[..., None, :], k, values, inputs, arrays.window, self._sinks())
        else:
            rest = inputs, chosen, lambda _, chosen: chosen[:, None], 0, self._sinks()
            out = attend_to_choice(c, q[..., None, :], k, values, *rest)
        return self._output(out, x), passed

    def decode(
        self, x, inputs: DecodeInputs, prompt, cache, arrays: AttentionArrays, chosen=None
    ) -> tuple[jax.Array, Any]:
        """The next W tokens of each row: output `[G,R*W,D]` and the row's latents `[G,R,S,1,c+e]` with theirs.

        They attend to those that are `chosen` of the P+S tokens of prompt and row, `[G,R,W,k]`, or to all they see.
        """
        c, (groups, rows) = self.config, inputs.length.shape
        places = (inputs.positions[:, :, None], arrays)
        shape = (groups, rows, x.shape[1] // rows)  # said in full: rotated ones may have no numbers
        plain, rotated = (a.reshape(*shape, *a.shape[3:]) for a in self._queries(x[:, :, None], *places))
        own = self._latents(x[:, :, None], *places)
        if own is None:
            prompt, stored = inputs.shared
        else:
            own = own.reshape(*shape, 1, own.shape[-1])
            stored = cache = write_tokens(cache, own, inputs.length, "cjd", sharded=False)
        to_keys = to_values = self.kv_b.matrix(x.dtype).reshape(c.latent_size, c.heads, -1)
        if jax.default_backend() == "gpu":
            # Both maps are read whole, where of parts XLA would write a copy first. Zeros meet the map to values.
            plain = jnp.pad(plain, (*((0, 0),) * 4, (0, c.value_head_dim)))
        else:
            to_keys, to_values = jnp.split(to_keys, [plain.shape[-1]], axis=-1)
        q = jnp.concatenate([jnp.einsum("grwhn,chn->grwhc", plain, to_keys), rotated], axis=-1)
        sinks = self._sinks()
        if chosen is None and by_kernel(c, q.dtype):
            start = inputs.prompt_mask.shape[1] - inputs.prompt_mask.sum(-1)
            heads = (prompt[:, None],), (stored.swapaxes(2, 3),)  # keys of one head
            numbers = {"latent": c.latent_size, "sinks": None if sinks is None else sinks.T}
            seen = decode_attention(q[:, :, None], *heads, start, inputs.length, **numbers)[:, :, 0]
        elif chosen is not None and copies_pay_next(chosen.size, prompt[..., 0].size + stored[..., 0, 0].size):
            before, row = prompt.shape[1], stored[..., 0, :]
            of_row = jax.vmap(jax.vmap(at))(row, chosen - before)
            own = jnp.where((chosen < before)[..., None], jax.vmap(at)(prompt, chosen), of_row)
            own = quantize.widened(own, x.dtype)
            seen = attend_to_copies(q, own, own[..., : c.latent_size], chosen, sinks)
        else:
            in_prompt = einsum("grwhc,gpc->grwhp", q, prompt)
            in_row = einsum("grwhc,grsc->grwhs", q, stored[..., 0, :])
            place = (inputs.length[:, :, None] + jnp.arange(q.shape[2]))[..., None, None]
            prompt_seen, row_seen = inputs.prompt_mask[:, None, None, None], jnp.arange(in_row.shape[-1]) <= place
            if chosen is not None:
                before = in_prompt.shape[-1]
                both = as_mask(chosen, before + in_row.shape[-1])[..., None, :]
                prompt_seen, row_seen = both[..., :before], both[..., before:]
            in_prompt = jnp.where(prompt_seen, in_prompt, MASKED)
            in_row = jnp.where(row_seen, in_row, MASKED)
            in_prompt, in_row = (a.astype(x.dtype) for a in combined_softmax([in_prompt, in_row], sinks))
            seen = einsum("grwhp,gpc->grwhc", in_prompt, prompt[..., : c.latent_size])
            seen += einsum("grwhs,grsc->grwhc", in_row, stored[..., 0, : c.latent_size])
        out = jnp.einsum("grwhc,chv->grwhv", seen.astype(x.dtype), to_values)[..., -c.value_head_dim :]
        return self._output(out, x), cache

    @staticmethod
    def empty_cache(prompt, rows: int, size: int) -> Any:
        """Latents `[...,G,R,S,1,c+e]` of rows, of prompts `[...,G,P,c+e]`, and what else there is of that form."""

        def empty(x):
            *lead, _, d = x.shape
            return constrain(
                jnp.zeros((*lead, rows, size, 1, d), x.dtype), *(None,) * (len(lead) - 1), "rows", *(None,) * 4
            )

        return jax.tree.map(empty, prompt)

    @staticmethod
    def grow_cache(cache, size: int) -> Any:
        """The row caches with room for `size` tokens."""
        return jax.tree.map(
            lambda x: jnp.pad(x, ((0, 0),) * (x.ndim - 3) + ((0, size - x.shape[-3]), (0, 0), (0, 0))), cache
        )

    @staticmethod
    def prompt_cache(prompt, row, end, size: int) -> Any:
        """Prompt caches of `size` tokens: those before the place `end` of prompts with their only rows behind them."""

        def cut(x, *own):
            x = jnp.concatenate([x, *(a[..., 0, :, 0, :] for a in own)], axis=-2)
            padded = jnp.pad(x, ((0, 0),) * (x.ndim - 2) + ((size, 0), (0, 0)))
            return jax.lax.dynamic_slice_in_dim(padded, end, size, axis=x.ndim - 2)

        return jax.tree.map(cut, prompt, *(() if row is None else (row,)))

    def _reads_chosen_alone(self, length: int, count: int) -> bool:
        """True where rows of that length attend to copies of the `count` latents that are chosen for each token."""
        c = self.config
        sizes = c.heads, 2 * c.latent_size + c.rotated_size, c.latent_size + c.rotated_size
        # An adapter's dropout is drawn for the latents of each token, which folded maps do not read.
        return self.kv_b.lora_key is None and copies_pay(c, length, count, *sizes)

    def _of_chosen(self, plain, rotated, latents, chosen) -> jax.Array:
        """The heads' outputs `[N,T,H,v]` of queries, by copies of the latents `[N,T,c+e]` that are chosen for each."""
        c, dtype, sinks = self.config, plain.dtype, self._sinks()
        # In fp32, as their gradients are then summed over blocks.
        maps = self.kv_b.matrix(dtype).astype(jnp.float32).reshape(c.latent_size, c.heads, -1)
        keys = constrain(latents, "rows", None, None)[:, None].astype(jnp.float32)

        def attended(block, _):
            plain, rotated, chosen = block
            to_keys, to_values = jnp.split(maps.astype(dtype), [plain.shape[-1]], axis=-1)
            q = jnp.concatenate([jnp.einsum("nthd,chd->nthc", plain, to_keys), rotated], axis=-1)
            own_sinks = None if sinks is None else sinks.T
            seen = attend_to_chosen(q[:, :, None], keys, c.latent_size, chosen[:, None], own_sinks)
            return jnp.einsum("nthc,chv->nthv", seen[:, :, 0], to_values)

        each = chosen.shape[-1] * max(keys.shape[-1] * dtype.itemsize, 4 * c.heads)
        return over_queries(attended, (plain, rotated, chosen), each)

    def _output(self, out, x):
        """The layer's output `[...,D]` of the heads' `[...,H,v]`, times the sigmoid of their gates where they have."""
        if self.gate is not None:
            by_head = (*x.shape[:-1], self.config.heads, -1)
            gates = jax.nn.sigmoid(self.gate(x).astype(jnp.float32)).astype(out.dtype)
            out = out.reshape(by_head) * gates.reshape(by_head)
        return self.o(out.reshape(*x.shape[:-1], -1))

    def _sinks(self):
        """The scores `[H,1]` of the sinks in fp32, None without sinks."""
        return None if self.sinks is None else self.sinks[...].astype(jnp.float32)[:, None]

    def _queries(self, x, positions, arrays: AttentionArrays) -> tuple[jax.Array, jax.Array]:
        """Queries (scaled), the numbers that are not rotated `[...,t,H,n]` and those that are `[...,t,H,e]`."""
        c = self.config
        if self.q_a is not None and self.q_a_norm is not None and self.q_b is not None:
            q = self.q_b(self.q_a_norm(self.q_a(x)))
        else:
            assert self.q is not None
            q = self.q(x)
        q = q.reshape(*x.shape[:-1], c.heads, c.head_dim) * (c.latent_scales[0] * score_scale(c.head_dim, c.rope))
        q = grown(c, q, positions, arrays)
        q = q if self.growth is None else self.growth(q, positions)
        plain, rotated = jnp.split(q, [c.head_dim - c.rotated_size], axis=-1)
        return plain, rotate(rotated, positions, arrays.inv_freq, arrays.scale, c.rope_interleaved)

    def _latents(self, x, positions, arrays: AttentionArrays) -> jax.Array | None:
        """Latents `[...,t,c+e]`, None where they are those of another layer."""
        if self.kv_a is None or self.kv_a_norm is None:
            return None
        latent, shared = jnp.split(self.kv_a(x), [self.config.latent_size], axis=-1)
        turn = (positions, arrays.inv_freq, arrays.scale, self.config.rope_interleaved)
        latent = self.kv_a_norm(latent) * self.config.latent_scales[1]
        return jnp.concatenate([latent, rotate(shared[..., None, :], *turn)[..., 0, :]], axis=-1)


def score_scale(size: int, rope: Rope) -> float:
    """The factor of the scores of queries and keys of `size` numbers, which yarn's `mscale_all_dim` makes larger."""
    longer = rope.factor > 1 and rope.mscale_all_dim
    return size**-0.5 * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1 if longer else 1) ** 2
