"""Gated delta net as a mixer (arXiv 2412.06464): a state a head that each token decays, corrects and reads.

For every value head, with keys and queries of unit length: `S <- exp(g) S`, then `S <- S + k (beta (v - k S))`, and the
token's output is `q S / sqrt(d)`. Queries, keys and values come from a short convolution over the latest tokens.

Letters: h key heads, r value heads of each, d numbers of a key, v of a value, m numbers that are convolved
(queries, keys and values of a token), t tokens of a chunk.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.distributed.sharding import constrain
from jaxrl_llm.models import quantize
from jaxrl_llm.models.layers import Linear
from jaxrl_llm.models.mixers.chunk_states import across
from jaxrl_llm.models.mixers.mixer import AttentionInputs, DecodeInputs, NoMixer
from jaxrl_llm.models.mixers.short_conv import (
    AT_ONCE,
    NO_SEGMENT,
    convolved,
    latest_at,
    latest_in_rows,
    written,
)
from jaxrl_llm.models.mixers.triangular import exact, solved

CHUNK = 64  # tokens whose effect on the state is worked out together, on CPUs and of short rows


class PromptState(NamedTuple):
    """The cache of prompts: the state behind them, and the inputs of the convolution from their last tokens."""

    state: jax.Array  # [...,G,h,r,d,v]
    tail: jax.Array  # [...,G,K-1,m] of a convolution over K tokens; 0 before the prompt


class Change(NamedTuple):
    """The step that a token makes of the state S before it: `S <- kept S + key added`."""

    kept: jax.Array  # [...,G,R,h,r,1], or [...,h,r,d]
    key: jax.Array  # [...,G,R,h,d]
    added: jax.Array  # [...,G,R,h,r,v]

    def where(self, rows, other: "Change | None" = None) -> "Change":
        """This change in the `rows` `[G,R]`, and in others the `other` one, or none."""
        others = (1, 0, 0) if other is None else other
        pairs = zip(self, others, strict=True)
        return Change(*(jnp.where(rows.reshape(*rows.shape, *(1,) * (x.ndim - 2)), x, y) for x, y in pairs))

    def made(self, state, reads) -> tuple[jax.Array, jax.Array]:
        """The states `[G,R,h,r,d,v]` with the change, and `reads` `[G,R,h,r,t,d]` times these."""
        state = state * self.kept[..., None] + self.key[..., None, :, None] * self.added[..., None, :]
        count = reads.shape[-2]
        if jax.default_backend() == "cpu" or count > 2:
            return state, exact(reads, state)
        # Sums, and no products: XLA forms them in the pass that writes the states, for GPUs one sum at most. There two
        # are one of complex numbers.
        if jax.default_backend() == "gpu" and count == 2:
            both = (jax.lax.complex(reads[..., 0, :], reads[..., 1, :])[..., None] * state).sum(-2)
            return state, jnp.stack([both.real, both.imag], axis=-2)
        return state, jnp.stack([(reads[..., i, :, None] * state).sum(-2) for i in range(count)], axis=-2)


class RowState(NamedTuple):
    """The cache of rows: the state before token `place`, and all that later states follow from."""

    state: jax.Array  # [...,G,R,h,r,d,v] fp32
    change: Change  # by token `place`, made where the next token reads the state
    place: jax.Array  # [...,G,R]
    recent: jax.Array  # [...,G,R,S,m+2hr] of token i in i % S: what is convolved, beta's and g's inputs


class Chunk(NamedTuple):
    """The terms by which a run of tokens reads and updates any state S.

    With `reads S` in two halves, taken and read, `added = own - taken` is what tokens add along their keys, and their
    outputs are `read + among added`. Where tokens correct nothing, `reads S` is what is read alone.
    """

    own: jax.Array  # [...,h,r,t,v]
    reads: jax.Array  # [...,h,r,2t,d], of both halves: one product reads S once; or [...,h,r,t,d]
    among: jax.Array  # [...,h,r,t,t]
    kept: jax.Array  # [...,h,r,1], or [...,h,r,d]: the share of S that is left behind the last token
    keys: jax.Array  # [...,h,r,t,d]: with what is left of each then

    def parts(self, found) -> tuple[jax.Array, jax.Array]:
        """The values that tokens read and those that they add, both `[...,h,r,t,v]`, of `found`, which is `reads S`."""
        if found.shape[-2] == self.own.shape[-2]:
            return found, self.own
        taken, read = jnp.split(found, 2, axis=-2)
        return read, self.own - taken


def within_chunks(q, k, v, g, beta, segments, before) -> Chunk:
    """The chunks of q, k `[...,t,h,d]`, v `[...,t,h,r,v]`, g and beta `[...,t,h,r]`, segments `[...,t]`.

    `before` `[...]` are the segments that states are of. What tokens add solves a triangular system, as in section 3.2
    of arXiv 2406.06484, with decays as in arXiv 2412.06464. Tokens of other segments neither decay nor see each other.
    """
    q, k = (jnp.moveaxis(a, -3, -2) for a in (q, k))  # [...,h,t,d]
    v, g, beta = jnp.moveaxis(v, -4, -2), jnp.moveaxis(g, -3, -1), jnp.moveaxis(beta, -3, -1)  # [...,h,r,t,...]
    decay, from_state = decays(g, segments, before)
    later = jnp.tril(jnp.ones((g.shape[-1],) * 2, bool), -1)
    keys, among = (jnp.einsum("...td,...sd->...ts", a, k)[..., None, :, :] * decay for a in (k, q))
    wanted = jnp.concatenate([v, from_state[..., None] * k[..., None, :, :]], axis=-1) * beta[..., None]
    own, taken = jnp.split(solved(jnp.where(later, keys * beta[..., None], 0), wanted), [v.shape[-1]], axis=-1)
    read, left = (a[..., None] * b[..., None, :, :] for a, b in ((from_state, q), (decay[..., -1, :], k)))
    return Chunk(own, jnp.concatenate([taken, read], axis=-2), among, from_state[..., -1:], left)


def decays(g, segments, before) -> tuple[jax.Array, jax.Array]:
    """The shares that are left of token s at token t `[...,h,r,t,s]`, and of the state before at t `[...,h,r,t]`.

    g are log decays `[...,h,r,t]`, segments `[...,t]`, `before` `[...]` those of states; of others nothing is left.
    """
    causal, later = (jnp.tril(jnp.ones((g.shape[-1],) * 2, bool), -first) for first in (0, 1))
    seen = (causal & (segments[..., :, None] == segments[..., None, :]))[..., None, None, :, :]
    # Summed from each token on: as differences of sums from the first, decays of long chunks would lose their digits.
    between = jnp.cumsum(jnp.where(later, g[..., :, None], 0), axis=-2)
    of_state = (segments == before[..., None])[..., None, None, :]
    from_state = jnp.where(of_state, jnp.exp(jnp.cumsum(g, axis=-1)), 0)
    return jnp.exp(jnp.where(seen, between, -jnp.inf)), from_state


class GatedDeltaNet(nnx.Module):
    """A gated delta net with a short convolution before it and a gated norm behind. A `Mixer`.

    Whole rows are computed in chunks, one after another: memory and time are linear in T, and a state starts anew with
    each segment. A decode step first brings the state to the row's length, by the change that the step before worked
    out for its first token and from the inputs of further tokens that were accepted since. It keeps the state as it is
    there, and the change by its own first token: tokens that prove wrong leave no trace.
    """

    path = "delta"
    shares_prefixes = False
    layer_arrays = staticmethod(NoMixer.layer_arrays)
    output_name = "out"  # of `lora.TARGETS`
    norm_eps: float | None = None  # of the norm behind; None: the model's
    gate = staticmethod(jax.nn.silu)  # of z, which multiplies the normed
    chunk = 128  # tokens of a chunk on accelerators, whose loops have few turns and large products
    within = staticmethod(within_chunks)  # the terms of a run of tokens
    products = 3  # of a token with a state: its key reads, its correction is written, its query reads

    def __init__(self, config, rngs: nnx.Rngs):
        self.config = c = config
        values = c.delta_value_heads * c.delta_value_dim
        self.mixed = 2 * c.delta_key_heads * c.delta_key_dim + values
        self._add_projections(values, rngs)
        self._add_filters(rngs)
        decays = jax.random.uniform(rngs.params(), (c.delta_value_heads,), jnp.float32, 0.01, 16.0)
        self.log_decay = nnx.Param(jnp.log(decays).astype(c.param_dtype))
        self.step_bias = nnx.Param(jnp.ones((c.delta_value_heads,), c.param_dtype))
        self.norm_scale = nnx.Param(jnp.ones((c.delta_value_dim,), c.param_dtype))
        self.out = Linear(values, c.width, c, rngs, name=self.output_name)

    @classmethod
    def flops(cls, config, tokens, pairs):
        """The operations of the products of a token with the states of all heads."""
        return 2.0 * cls.products * config.delta_value_heads * config.delta_key_dim * config.delta_value_dim * tokens

    def prefill(self, x, inputs: AttentionInputs, arrays) -> tuple[jax.Array, PromptState]:
        """Output `[N,T,D]`, and the states behind rows that are padded on the left."""
        mixed, z, ba = self._project(x)
        mixed, ba, segments = (constrain(a, "rows", *(None,) * (a.ndim - 1)) for a in (mixed, ba, inputs.segments))
        latest, tail = latest_in_rows(mixed, segments, self.config.delta_conv)
        heads = self._heads(latest, ba)
        out, state = self._through_rows(heads, segments)
        out = self._with_skip(out, heads[2])
        return self._output(out, z), PromptState(_sharded(state, 1), tail)

    def decode(self, x, inputs: DecodeInputs, prompt: PromptState, cache: RowState, arrays):
        """The next W tokens of each row: output `[G,R*W,D]`, and the row's state before them with their inputs."""
        length = inputs.length
        width = x.shape[1] // length.shape[1]
        mixed, z, ba = (a.reshape(*length.shape, width, *a.shape[2:]) for a in self._project(x))
        recent = written(cache.recent, jnp.concatenate([mixed, ba], axis=-1), length)
        fresh = length == 0
        place = jnp.where(fresh, 0, cache.place)

        def begin(_, state):
            first = quantize.widened(prompt.state, jnp.float32)[:, None]
            return jnp.where(fresh[..., None, None, None, None], first, state)

        def step(state, change, first, count, behind):
            """Outputs of `count` tokens from `first` on, the state before them, and what the first of them changes.

            The state of rows that are `behind` gets the `change` of the token before.
            """
            places = first[..., None] + jnp.arange(count)
            numbers = jnp.take_along_axis(recent, (places % recent.shape[2])[..., None], axis=2)
            own = quantize.widened(numbers[..., self.mixed :], x.dtype)
            q, k, v, g, beta = self._heads(latest_at(places, recent, prompt.tail, x.dtype), own)
            same = jnp.zeros((*first.shape, count), jnp.int32)
            chunk = self.within(q, k, v, g, beta, same, same[..., 0])
            state, found = change.where(behind).made(state, chunk.reads)
            out, added = chunk.parts(found)
            out = jnp.moveaxis(out + exact(chunk.among, added), -2, 2)  # [G,R,t,h,r,v]
            kept = jnp.exp(g[:, :, 0])
            change = Change(kept.reshape(*kept.shape[:4], -1), k[:, :, 0], added[..., 0, :])
            return self._with_skip(out, v), state, change

        def follow(number, held):
            (state, change), first = held, place + number + 1
            _, state, following = step(state, change, first, 1, first < length)
            return state, following.where(first < length, change)

        # Loops, of no trip mostly, and not branches, whose results XLA would copy. Then one pass over the states, which
        # brings them to the row's length and reads them for the new tokens.
        state = jax.lax.fori_loop(0, fresh.any().astype(jnp.int32), begin, cache.state)
        state, change = jax.lax.fori_loop(0, (length - place).max() - 1, follow, (state, cache.change))
        out, state, change = step(_sharded(state, 2), change, length, width, place < length)
        change = Change(*(constrain(a, "rows", None, "heads", *(None,) * (a.ndim - 3)) for a in change))
        recent = constrain(recent, "rows", None, None, None)
        return self._output(out, z).reshape(x.shape), RowState(_sharded(state, 2), change, length, recent)

    @classmethod
    def empty_cache(cls, prompt: PromptState, rows: int, size: int) -> RowState:
        """The states of rows, which are as large for any `size`."""
        *lead, taps, mixed = prompt.tail.shape
        numbers = mixed + cls.inputs(*prompt.state.shape[-4:-1])
        stacked = (None,) * (len(lead) - 1)
        # Tokens accepted since the state's place, the convolution before them, and the step's own.
        recent = jnp.zeros((*lead, rows, 2 * AT_ONCE + taps, numbers), prompt.tail.dtype)
        h, r, d, v = prompt.state.shape[-4:]

        def zeros(*shape):
            names = (*stacked, "rows", None, "heads", *(None,) * (len(shape) - 1))
            return constrain(jnp.zeros((*lead, rows, *shape), jnp.float32), *names)

        return RowState(
            zeros(h, r, d, v),
            Change(zeros(h, r, cls.kept_size(d)), zeros(h, d), zeros(h, r, v)),
            constrain(jnp.zeros((*lead, rows), jnp.int32), *stacked, "rows", None),
            constrain(recent, *stacked, "rows", None, None, None),
        )

    @staticmethod
    def grow_cache(cache: RowState, size: int) -> RowState:
        """The row caches, which need no more room."""
        return cache

    @staticmethod
    def inputs(heads: int, values: int, size: int) -> int:
        """The numbers of a token that beta and g are made of, of so many key heads h, value heads r of each, and d."""
        return 2 * heads * values

    @staticmethod
    def kept_size(size: int) -> int:
        """The decays of a head with keys of that size."""
        return 1

    def _through_rows(self, heads, segments) -> tuple[jax.Array, jax.Array]:
        """The outputs `[N,T,h,r,v]` of the tokens of whole rows, what `_heads` gives of them, and the last states."""
        q, k, v, g, beta = heads
        is_short = jax.default_backend() == "cpu" or segments.shape[1] <= CHUNK
        return chunked(self.within, q, k, v, g, beta, segments, CHUNK if is_short else self.chunk)

    def _with_skip(self, out, v):
        """The heads' outputs `[...,t,h,r,v]` with what their values add to them directly: nothing."""
        return out

    def _add_filters(self, rngs: nnx.Rngs) -> None:
        """The weights of the convolution, which `_filters` reads."""
        self.conv = self._new_filters(self.mixed, rngs)

    def _filters(self):
        """The weights `[m,1,K]` of the convolution."""
        return self.conv[...]

    def _new_filters(self, numbers: int, rngs: nnx.Rngs) -> nnx.Param:
        c = self.config
        return nnx.Param(jax.random.normal(rngs.params(), (numbers, 1, c.delta_conv), c.param_dtype) * c.init_scale)

    def _add_projections(self, values: int, rngs: nnx.Rngs) -> None:
        """The maps that `_project` reads, of nets with so many numbers of values."""
        c = self.config
        self.qkvz = Linear(c.width, self.mixed + values, c, rngs, name="qkvz")
        self.ba = Linear(c.width, 2 * c.delta_value_heads, c, rngs, name="ba")

    def _project(self, x):
        """Of x `[...,D]`: what is convolved `[...,m]`, the gates z `[...,h,r,v]`, inputs of beta and g `[...,h,2r]`."""
        c = self.config
        h, r = c.delta_key_heads, c.delta_value_heads // c.delta_key_heads
        sizes = (c.delta_key_dim, c.delta_key_dim, r * c.delta_value_dim)
        by_head = self.qkvz(x).reshape(*x.shape[:-1], h, -1)
        *parts, z = jnp.split(by_head, [sum(sizes[: n + 1]) for n in range(3)], axis=-1)
        mixed = jnp.concatenate([a.reshape(*x.shape[:-1], -1) for a in parts], axis=-1)
        return mixed, z.reshape(*z.shape[:-1], r, -1), self.ba(apart(x))

    def _heads(self, latest, ba):
        """Queries and keys `[...,h,d]`, values `[...,h,r,v]`, log decays g and beta `[...,h,r]`, in fp32.

        `latest` are the K arrays `[...,m]` of what is convolved, the tokens' own the last.
        """
        h, r = self.config.delta_key_heads, self.config.delta_value_heads // self.config.delta_key_heads
        b, a = jnp.split(ba.astype(jnp.float32).reshape(*ba.shape[:-1], h, 2 * r), 2, axis=-1)
        step_bias, log_decay = (p[...].astype(jnp.float32).reshape(h, r) for p in (self.step_bias, self.log_decay))
        g = -jnp.exp(log_decay) * jax.nn.softplus(a + step_bias)
        beta = jax.nn.sigmoid(b)
        return *self._queries_keys_values(latest), g, 2 * beta if self.config.delta_negative else beta

    def _queries_keys_values(self, latest):
        """Queries and keys `[...,h,d]`, values `[...,h,r,v]`, in fp32."""
        c = self.config
        h, r = c.delta_key_heads, c.delta_value_heads // c.delta_key_heads
        mixed = convolved(latest, self._filters()).astype(latest[0].dtype)
        mixed = jax.nn.silu(mixed).astype(jnp.float32)
        q, k, v = jnp.split(mixed, [h * c.delta_key_dim, 2 * h * c.delta_key_dim], axis=-1)
        q, k = (a.reshape(*a.shape[:-1], h, -1) for a in (q, k))
        q, k = (a * jax.lax.rsqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
        return q * c.delta_key_dim**-0.5, k, v.reshape(*v.shape[:-1], h, r, c.delta_value_dim)

    def _output(self, out, z):
        """The layer's output of the heads' `[...,h,r,v]`: normed, times the gate of z, and mapped to `[...,D]`."""
        eps = self.config.norm_eps if self.norm_eps is None else self.norm_eps
        normed = out * jax.lax.rsqrt((out * out).mean(-1, keepdims=True) + eps)
        gate = jax.nn.sigmoid if self.config.delta_sigmoid else self.gate
        normed = normed * self.norm_scale[...].astype(jnp.float32) * gate(z.astype(jnp.float32))
        return self.out(normed.astype(z.dtype).reshape(*z.shape[:-3], -1))


class SplitDeltaNet(GatedDeltaNet):
    """A gated delta net with separate maps for what is convolved, the gates, and the inputs of beta and g (Qwen3.5)."""

    def _add_projections(self, values: int, rngs: nnx.Rngs) -> None:
        c = self.config
        self._add_queries_keys_values(values, rngs)
        self.z = Linear(c.width, values, c, rngs, name="z")
        self.b = Linear(c.width, c.delta_value_heads, c, rngs, name="b")
        self.a = Linear(c.width, c.delta_value_heads, c, rngs, name="a")

    def _add_queries_keys_values(self, values: int, rngs: nnx.Rngs) -> None:
        self.qkv = Linear(self.config.width, self.mixed, self.config, rngs, name="qkv")

    def _project(self, x):
        b, a = (each(apart(x)).reshape(*x.shape[:-1], self.config.delta_key_heads, -1) for each in (self.b, self.a))
        ba = jnp.concatenate([b, a], axis=-1).reshape(*x.shape[:-1], -1)
        z = self.z(x).reshape(*x.shape[:-1], self.config.delta_key_heads, -1, self.config.delta_value_dim)
        return self._mixed(x), z, ba

    def _mixed(self, x):
        return self.qkv(x)


class ApartDeltaNet(SplitDeltaNet):
    """A gated delta net that has queries, keys and values of maps and convolutions of their own (OLMo Hybrid)."""

    output_name = "o"
    norm_eps = 1e-5

    def _add_queries_keys_values(self, values: int, rngs: nnx.Rngs) -> None:
        c, keys = self.config, self.config.delta_key_heads * self.config.delta_key_dim
        self.q = Linear(c.width, keys, c, rngs, name="q")
        self.k = Linear(c.width, keys, c, rngs, name="k")
        self.v = Linear(c.width, values, c, rngs, name="v")

    def _add_filters(self, rngs: nnx.Rngs) -> None:
        c = self.config
        keys, values = c.delta_key_heads * c.delta_key_dim, c.delta_value_heads * c.delta_value_dim
        self.q_conv, self.k_conv, self.v_conv = (self._new_filters(size, rngs) for size in (keys, keys, values))

    def _filters(self):
        return jnp.concatenate([each[...] for each in (self.q_conv, self.k_conv, self.v_conv)])

    def _mixed(self, x):
        return jnp.concatenate([self.q(x), self.k(x), self.v(x)], axis=-1)


def apart(x):
    """x, for maps of few columns: XLA's GPU compiler would make those of one x one product, of a copy of all."""
    return jax.lax.optimization_barrier(x) if jax.default_backend() == "gpu" else x


def _sharded(state, lead: int):
    return constrain(state, "rows", *(None,) * (lead - 1), "heads", None, None, None)


def chunked(within, q, k, v, g, beta, segments, chunk: int = CHUNK) -> tuple[jax.Array, jax.Array]:
    """The outputs `[N,T,h,r,v]` of all tokens, and the states `[N,h,r,d,v]` of the last segments.

    `within` are the terms of a chunk, as `within_chunks` gives them. q, k `[N,T,h,d]`, v `[N,T,h,r,v]`, g and beta
    `[N,T,h,r]`, g also `[N,T,h,r,d]`, segments `[N,T]`. Chunks are worked out side by side, and their states one after
    another.
    """
    (rows, length), segments = segments.shape, jnp.asarray(segments, jnp.int32)
    extra = -length % chunk  # before the row, so that the last state is that of its last token

    def chunks(x, value=0):
        x = jnp.pad(x, ((0, 0), (extra, 0), *((0, 0),) * (x.ndim - 2)), constant_values=value)
        return jnp.moveaxis(x.reshape(rows, -1, chunk, *x.shape[2:]), 1, 0)

    def step(state, chunk: Chunk):
        out, added = chunk.parts(chunk.reads @ state)
        left = state * chunk.kept[..., None] + chunk.keys.swapaxes(-1, -2) @ added
        return left, (out, added)

    ids = chunks(segments, NO_SEGMENT)
    before = jnp.concatenate([jnp.full((1, rows), NO_SEGMENT, jnp.int32), ids[:-1, :, -1]])
    q, k, v, g, beta = (chunks(a) for a in (q, k, v, g, beta))
    all_chunks = within(q, k, v, g, beta, ids, before)
    if jax.default_backend() == "cpu":  # which gain nothing by fewer steps, and lose by more products
        start = jnp.zeros((rows, *v.shape[3:5], k.shape[-1], v.shape[-1]), jnp.float32)
        state, (out, added) = jax.lax.scan(step, _sharded(start, 1), all_chunks)
    else:
        out, added, state = across(all_chunks.own, all_chunks.reads, all_chunks.kept, all_chunks.keys)
    out = jnp.moveaxis(out + all_chunks.among @ added, -2, 2)  # [M,N,t,h,r,v]
    return jnp.moveaxis(out, 0, 1).reshape(rows, -1, *out.shape[3:])[:, extra:], state
