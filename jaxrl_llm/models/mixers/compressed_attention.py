"""Attention to the latest tokens and to entries that each stand for several tokens before, as mixers (DeepSeek-V4).

All H heads have one key, which is their value too: a token's `kv`, within a sliding window. Keys are rotated, and so
values; outputs are rotated back at the query's position, so that what a key adds depends on its distance. Each head has
a sink.

Layers may see entries too. The w-th one is of the m tokens of window w, from w*m on in their document, and a token sees
it as soon as the window is complete:

    entry_w = rotated(norm(sum_j softmax_j(score_j + bias_j) kv_j), at w*m)

with weights for each number by itself, over the window's tokens j. In heavily compressed attention m is large, and
every entry is seen. In compressed sparse attention m is small, an entry is of the tokens of the window before too, by
other maps of theirs, and a token sees the `index_top` entries that an indexer rates best. The indexer has entries of
its own, of the same windows. Its choice has no gradient, so that training keeps it as it is.

Windows are counted from the start of a document: padding and packing move none. A row's cache is its latest tokens and
its entries; a window that is not complete yet is computed again when it is.

Letters: m tokens of a window, K tokens that an entry is made of, E entries, i heads of the indexer, e numbers of each;
others as in attention.py, where d are the numbers of a key.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.distributed.sharding import constrain, context_shards
from jaxrl_llm.models import quantize
from jaxrl_llm.models.kernels.decode_attention import MASKED
from jaxrl_llm.models.layers import Linear, RMSNorm, over_rms
from jaxrl_llm.models.mixers.attention import (
    SMALLEST_BLOCK,
    Attention,
    AttentionArrays,
    combined_softmax,
    einsum,
    write_tokens,
)
from jaxrl_llm.models.mixers.latent_attention import LatentAttention
from jaxrl_llm.models.mixers.mixer import AttentionInputs, DecodeInputs
from jaxrl_llm.models.mixers.query_blocks import NONE, ChoosesTokens, as_mask, at, best, copies_pay, over_queries
from jaxrl_llm.models.mixers.short_conv import AT_ONCE, written
from jaxrl_llm.models.mixers.sparse_attention import rated
from jaxrl_llm.models.rope import rotate


class CompressedCache(NamedTuple):
    """The cache of prompts, and that of rows, whose tokens are as in `short_conv.Recent`: token i in i % S."""

    kv: jax.Array  # of the latest tokens: of prompts [...,G,W-1,d], of rows [...,G,R,S,d]
    made_of: tuple[jax.Array, ...]  # of each compressor, what entries are made of: [...,G,K-1,n] and [...,G,R,S,n]
    entries: tuple[jax.Array, ...]  # of each: [...,G,E,d], the last one at the end, and [...,G,R,E,1,d], from the first


class Tokens(NamedTuple):
    """Tokens of whole rows, and where they are."""

    numbers: Any  # [N,t,...] or several such
    positions: jax.Array  # [N,t]
    segments: jax.Array  # [N,t]


class Entries(NamedTuple):
    """The entries of whole rows."""

    values: tuple[jax.Array, ...]  # [N,E,d], of each compressor
    windows: jax.Array  # [N,E]
    segments: jax.Array  # [N,E] 0: there is none

    def complete(self, positions, segments, ratio: int) -> jax.Array:
        """True for the entries of windows of `ratio` tokens that are complete at tokens of these positions and segments
        `[N,t]`, `[N,t,E]`."""
        seen = (self.windows[:, None] < (positions + 1)[:, :, None] // ratio) & (self.segments != 0)[:, None]
        return seen & (segments[:, :, None] == self.segments[:, None])


class Compressor(nnx.Module):
    """The maps that make entries `[...,size]` of K tokens, of windows of `ratio` tokens: K / `ratio` of them each."""

    adapted = ("kv", "gate")  # as which of `lora.TARGETS` the maps may have adapters

    def __init__(self, config, size: int, ratio: int, spans: int, rngs: nnx.Rngs):
        self.size, self.ratio, self.spans = size, ratio, spans
        outputs = spans * size  # those of a token for a later window first
        of_kv, of_scores = self.adapted
        self.kv = Linear(config.width, outputs, config, rngs, name=of_kv)
        self.scores = Linear(config.width, outputs, config, rngs, name=of_scores)
        self.position_bias = nnx.Param(jnp.zeros((ratio, outputs), jnp.float32))
        self.norm = RMSNorm(size, config, rngs)

    def made_of(self, x) -> jax.Array:
        """The numbers that entries are made of, of tokens x `[...,D]`."""
        return jnp.concatenate([self.kv(x), self.scores(x)], axis=-1)

    def entries(self, made_of, windows, arrays: AttentionArrays) -> jax.Array:
        """The entries `[...,E,d]` of windows `[...,E]`, made of their tokens `[...,E,K,n]`."""
        kv, scores = jnp.split(made_of.astype(jnp.float32), 2, axis=-1)
        scores = scores.reshape(*windows.shape, self.spans, self.ratio, self.spans * self.size)
        scores += self.position_bias[...]

        def own(x):  # of each window's tokens those numbers that they have for this one
            x = x.reshape(*windows.shape, self.spans, self.ratio, self.spans, self.size)
            parts = [x[..., span, :, span, :] for span in range(self.spans)]
            return jnp.concatenate(parts, axis=-2)

        earliest = windows[..., None] + jnp.repeat(jnp.arange(self.spans) - self.spans + 1, self.ratio)
        scores = jnp.where((earliest >= 0)[..., None], own(scores), -jnp.inf)
        entry = self.norm((own(kv) * jax.nn.softmax(scores, axis=-2)).sum(-2).astype(made_of.dtype))
        return rotated(entry[..., None, :], windows * self.ratio, arrays)[..., 0, :]


class EntryIndexer(Compressor):
    """The heads that rate entries: `I[t,s] = sum_i w[t,i] relu(q[t,i] . k[s])`, where keys k are entries of its own."""

    adapted = ("", "")

    def __init__(self, config, ratio: int, spans: int, rngs: nnx.Rngs):
        super().__init__(config, config.index_head_dim, ratio, spans, rngs)
        self.heads, size = config.index_heads, config.index_head_dim
        self.q = Linear(config.query_rank, self.heads * size, config, rngs)
        self.proj = Linear(config.width, self.heads, config, rngs)

    def entries(self, made_of, windows, arrays: AttentionArrays) -> jax.Array:
        """As those of a compressor, without gradients."""
        return jax.lax.stop_gradient(super().entries(made_of, windows, arrays))

    def __call__(self, x, residual, positions, arrays: AttentionArrays) -> tuple[jax.Array, jax.Array]:
        """Queries `[...,t,i,e]` of the `residual` `[...,t,r]` that queries are made of, and weights, without
        gradients."""
        q = rotated(self.q(residual).reshape(*x.shape[:-1], self.heads, -1), positions, arrays)
        weights = self.proj(x.astype(jnp.float32)) * (self.heads * self.size) ** -0.5
        return jax.lax.stop_gradient((q, weights))


class WindowAttention(nnx.Module):
    """Causal attention of H heads to the tokens in a window, whose only key is their value. A `Mixer`."""

    path = "window"
    shares_prefixes = False  # of whose windows some would be part of a prefix and part of the row
    spans = 0  # windows whose tokens an entry is made of
    layer_arrays = staticmethod(Attention.layer_arrays)

    @staticmethod
    def reads_mask(config, length: int) -> bool:
        """False: a block of queries has a mask of its own, of its window and the entries before."""
        return False

    @classmethod
    def attended(cls, config, places):
        """The number of tokens and entries that tokens at `places` in their document attend to."""
        return jnp.minimum(places + 1, config.sliding_window)

    @classmethod
    def rating(cls, config, tokens, pairs):
        """None: all entries are seen."""
        return 0.0 * pairs

    def __init__(self, config, rngs: nnx.Rngs):
        self.config = c = config
        self.q_a = Linear(c.width, c.query_rank, c, rngs, name="q_a")
        self.q_a_norm = RMSNorm(c.query_rank, c, rngs)
        self.q_b = Linear(c.query_rank, c.heads * c.head_dim, c, rngs, name="q_b")
        # A compressor has a map of this name too, whose adapter may differ.
        self.kv = Linear(c.width, c.head_dim, c.adapted_in(f"{self.path}/kv"), rngs, name="kv")
        self.kv_norm = RMSNorm(c.head_dim, c, rngs)
        # Of each group of heads, whose outputs are side by side: PEFT has no adapters of such a map.
        self.o_a = Linear(c.heads * c.head_dim // c.output_groups, c.output_groups * c.output_rank, c, rngs)
        self.o_b = Linear(c.output_groups * c.output_rank, c.width, c, rngs, name="o_b")
        self.sinks = nnx.Param(jnp.zeros((c.heads,), jnp.float32))

    @staticmethod
    def ratio(config) -> int:
        """The tokens of a window of entries; 0: there are no entries."""
        return 0

    @property
    def compressors(self) -> tuple[Compressor, ...]:
        """The compressors: that of the entries which are attended to, and that of the indexer's keys."""
        return ()

    @classmethod
    def flops(cls, config, tokens, pairs):
        """The operations of scores and of weighted values."""
        return 4.0 * config.heads * config.head_dim * pairs

    def prefill(self, x, inputs: AttentionInputs, arrays: AttentionArrays) -> tuple[jax.Array, CompressedCache]:
        """Output `[N,T,D]`, and the caches of rows that are prompts, padded on the left."""
        q, kv, residual = self._project(x, inputs.positions, arrays)
        positions, segments = (constrain(a, "rows", None) for a in (inputs.positions, inputs.segments))
        kv, *made_of = (constrain(a, "rows", None, None) for a in (kv, *(y.made_of(x) for y in self.compressors)))
        entries = self._entries_of_rows(made_of, positions, segments, arrays)
        index = self._index(x, residual, inputs.positions, arrays)
        chosen = self._chosen_of_rows(index, entries, positions, segments)
        queries = Tokens((constrain(q, "rows", "positions", "heads", None), *chosen), positions, segments)
        out = self._attend(queries, Tokens(kv, positions, segments), entries)
        before = [self.config.sliding_window, *(part.spans * part.ratio for part in self.compressors)]
        kv, *made_of = (_latest(a, count - 1) for a, count in zip((kv, *made_of), before, strict=True))
        return self._output(out, inputs.positions, arrays), CompressedCache(kv, tuple(made_of), entries.values)

    def decode(
        self, x, inputs: DecodeInputs, prompt: CompressedCache, cache: CompressedCache, arrays: AttentionArrays
    ) -> tuple[jax.Array, CompressedCache]:
        """The next W tokens of each row: output `[G,R*W,D]`, and the row caches with them."""
        length = inputs.length
        q, kv, residual = self._project(x, inputs.positions, arrays)
        made_of, index = [y.made_of(x) for y in self.compressors], self._index(x, residual, inputs.positions, arrays)
        by_token = q, kv, made_of, index
        q, kv, made_of, index = jax.tree.map(lambda a: a.reshape(*length.shape, -1, *a.shape[2:]), by_token)
        before = inputs.prompt_mask.sum(-1)[:, None]  # [G,1] tokens of the prompt
        places = length[..., None] + jnp.arange(q.shape[2])  # [G,R,W] in the row
        kv = written(cache.kv, kv, length)
        made_of = tuple(map(functools.partial(written, length=length), cache.made_of, made_of))
        entries = self._with_new(made_of, prompt, cache, before, places, arrays, x.dtype)

        def near(others):  # [G,R,W,s] of tokens at places [.,.,s], those of the prompt below 0
            distance = places[..., None] - others[:, :, None]
            seen = (distance >= 0) & (distance < self.config.sliding_window)
            return seen & (others >= -before[..., None])[:, :, None]

        slots, newest = kv.shape[2], places[..., -1:]
        held = newest - (newest - jnp.arange(slots)) % slots  # [G,R,S] the place of each token of the cache
        in_prompt = jnp.arange(-prompt.kv.shape[1], 0)[None, None]
        sources = [(prompt.kv, near(in_prompt)), (kv, near(held) & (held >= 0)[:, :, None])]
        if entries:
            seen = self._seen_entries(index, prompt, entries, before, places)
            sources += zip((prompt.entries[0], entries[0][..., 0, :]), seen, strict=True)
        sources = [("gsd" if x.ndim == 3 else "grsd", x, seen) for x, seen in sources if seen.shape[-1]]
        scores = [
            jnp.where(seen[..., None, :], einsum(f"grwhd,{dims}->grwhs", q, x), MASKED) for dims, x, seen in sources
        ]
        pairs = zip(combined_softmax(scores, self.sinks[...][:, None]), sources, strict=True)
        parts = (einsum(f"grwhs,{dims}->grwhd", weights.astype(q.dtype), x) for weights, (dims, x, _) in pairs)
        out = functools.reduce(jnp.add, parts).astype(q.dtype)
        out = out.reshape(*x.shape[:2], *out.shape[3:])
        kv, *made_of = (constrain(a, "rows", None, None, None) for a in (kv, *made_of))
        return self._output(out, inputs.positions, arrays), CompressedCache(kv, tuple(made_of), entries)

    @classmethod
    def empty_cache(cls, prompt: CompressedCache, rows: int, size: int) -> CompressedCache:
        """Caches of rows, of which entries alone need more room for more tokens."""

        def recent(latest):
            *lead, before, numbers = latest.shape
            empty = jnp.zeros((*lead, rows, AT_ONCE + before, numbers), latest.dtype)
            return constrain(empty, *(None,) * (len(lead) - 1), "rows", None, None, None)

        room = (size // ((latest.shape[-2] + 1) // cls.spans) + 1 for latest in prompt.made_of)
        entries = (LatentAttention.empty_cache(x, rows, count) for x, count in zip(prompt.entries, room, strict=True))
        return CompressedCache(recent(prompt.kv), tuple(map(recent, prompt.made_of)), tuple(entries))

    @classmethod
    def grow_cache(cls, cache: CompressedCache, size: int) -> CompressedCache:
        """The row caches with room for `size` tokens."""
        room = (size // ((recent.shape[-2] - AT_ONCE + 1) // cls.spans) + 1 for recent in cache.made_of)
        grown = (LatentAttention.grow_cache(x, count) for x, count in zip(cache.entries, room, strict=True))
        return cache._replace(entries=tuple(grown))

    def _project(self, x, positions, arrays: AttentionArrays):
        """Queries `[...,t,H,d]` (scaled), keys that are values too `[...,t,d]`, and what queries are made of."""
        c = self.config
        residual = self.q_a_norm(self.q_a(x))
        q = over_rms(self.q_b(residual).reshape(*x.shape[:-1], c.heads, c.head_dim), c.norm_eps).astype(x.dtype)
        kv = rotated(self.kv_norm(self.kv(x))[..., None, :], positions, arrays)[..., 0, :]
        return rotated(q, positions, arrays) * c.head_dim**-0.5, kv, residual

    def _output(self, out, positions, arrays: AttentionArrays):
        """The layer's output `[...,t,D]` of what the heads saw `[...,t,H,d]`."""
        groups = self.config.output_groups
        out = rotated(out, positions, arrays._replace(inv_freq=-arrays.inv_freq))
        out = out.reshape(*out.shape[:-2], groups, -1)
        narrow = self.o_a.kernel[...].astype(out.dtype).reshape(out.shape[-1], groups, -1)
        out = jnp.einsum("...gi,igr->...gr", out, narrow)
        return self.o_b(out.reshape(*out.shape[:-2], -1))

    def _index(self, x, residual, positions, arrays: AttentionArrays) -> tuple[jax.Array, ...]:
        """The queries and weights that rate entries, where not all are seen."""
        return ()

    def _entries_of_rows(self, made_of, positions, segments, arrays: AttentionArrays) -> Entries:
        """The entries of whole rows, in which documents lie in one piece each, the last entry at the end."""
        ratio, length = self.ratio(self.config), positions.shape[1]
        if not ratio:
            return Entries((), positions[:, :0], segments[:, :0])
        ends = (positions % ratio == ratio - 1) & (segments != 0)
        last = jnp.sort(jnp.where(ends, jnp.arange(length), -1), axis=1)[:, length - length // ratio :]
        windows, owners = (jnp.take_along_axis(a, jnp.maximum(last, 0), axis=1) for a in (positions // ratio, segments))
        tokens = jnp.maximum(last[..., None] + jnp.arange(1 - self.spans * ratio, 1), 0)  # [N,E,K]

        def made(part: Compressor, x):
            x = jnp.take_along_axis(x, tokens.reshape(len(x), -1)[..., None], axis=1)
            # Sizes are said in full: a row shorter than a window has no entry.
            x = x.reshape(*tokens.shape, x.shape[-1])
            return constrain(part.entries(x, windows, arrays), "rows", None, None)

        return Entries(tuple(map(made, self.compressors, made_of)), windows, jnp.where(last < 0, 0, owners))

    def _chosen_of_rows(self, index, entries: Entries, positions, segments) -> tuple[jax.Array, ...]:
        """The entries `[N,T,k]` that each token of whole rows sees, as the only item; none where it sees all before."""
        count, top = entries.windows.shape[1], self.config.index_top
        if not index or count <= top:
            return ()

        def chosen(block, _):
            q, weights, positions, segments = block
            seen = entries.complete(positions, segments, self.ratio(self.config))
            return best(rated("nti,nsi->nts", q, entries.values[1], weights), seen, top)

        return (over_queries(chosen, (*index, positions, segments), 4 * count),)

    def _attend(self, queries: Tokens, keys: Tokens, entries: Entries) -> jax.Array:
        """`[N,T,H,d]`: attention of whole rows.

        Queries come in blocks as long as the window, or longer: each sees keys of its own block and the one before.
        """
        length, window = keys.numbers.shape[1], self.config.sliding_window
        # In fp32, as their gradients are summed over blocks.
        entries = entries._replace(values=jax.tree.map(lambda x: x.astype(jnp.float32), entries.values[:1]))
        size, shards = max(window, SMALLEST_BLOCK), context_shards()
        own = length // shards  # of a shard of the positions, which is like a row
        if own <= size or length % shards:
            return self._attend_block(queries, keys, entries)

        def blocks(x):  # [b,N*shards,t,...]
            x = constrain(x.reshape(len(x), shards, own, *x.shape[2:]), "rows", "positions", *(...,) * (x.ndim - 1))
            x = jnp.pad(x, ((0, 0), (0, 0), (0, -own % size), *((0, 0),) * (x.ndim - 3)))
            return jnp.moveaxis(x.reshape(len(x) * shards, -1, size, *x.shape[3:]), 1, 0)

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def attended(_, block):
            queries, *keys = block
            both = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *keys)
            return None, self._attend_block(queries, both, entries)

        later = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (size, 0), *((0, 0),) * (x.ndim - 2)))[:, :length], keys)
        queries, keys, later = jax.tree.map(blocks, (queries, keys, later))
        before = jax.tree.map(lambda later, x: jnp.concatenate([later[:1], x[:-1]]), later, keys)
        entries = jax.tree.map(lambda x: jnp.repeat(x, shards, axis=0), entries)
        out = jnp.moveaxis(jax.lax.scan(attended, None, (queries, before, keys))[1], 0, 1)
        out = out.reshape(len(out), -1, *out.shape[3:])[:, :own]
        return out.reshape(-1, length, *out.shape[2:])

    def _attend_block(self, queries: Tokens, keys: Tokens, entries: Entries) -> jax.Array:
        q, *chosen = queries.numbers
        distance = queries.positions[:, :, None] - keys.positions[:, None]
        seen = (distance >= 0) & (distance < self.config.sliding_window) & (keys.segments != 0)[:, None]
        sources = [("nsd", keys.numbers, seen & (queries.segments[:, :, None] == keys.segments[:, None]))]
        if entries.values:
            dims, x, count = "nsd", entries.values[0], entries.windows.shape[1]
            if not chosen:
                seen = entries.complete(queries.positions, queries.segments, self.ratio(self.config))
            elif self._copies_pay(count):
                dims, x, seen = "ntsd", jax.vmap(at)(x, chosen[0]), chosen[0] < NONE
            else:
                seen = as_mask(chosen[0], count)
            sources.append((dims, x.astype(q.dtype), seen))
        sources = [source for source in sources if source[2].shape[-1]]
        scores = [jnp.where(seen[:, :, None], einsum(f"nthd,{dims}->nths", q, x), MASKED) for dims, x, seen in sources]
        pairs = zip(combined_softmax(scores, self.sinks[...][:, None]), sources, strict=True)
        parts = (einsum(f"nths,{dims}->nthd", weights.astype(q.dtype), x) for weights, (dims, x, _) in pairs)
        return functools.reduce(jnp.add, parts).astype(q.dtype)

    def _copies_pay(self, count: int) -> bool:
        """True where queries read copies of the entries that are chosen for each, and not all `count` by a mask."""
        c = self.config
        # Blocks of a mask are of all entries, not of half of them.
        return copies_pay(c, 2 * count, c.index_top, c.heads, 2 * c.head_dim, c.head_dim)

    def _with_new(self, made_of, prompt, cache, before, places, arrays, dtype) -> tuple[jax.Array, ...]:
        """The entries of rows with those of the windows that their next tokens may complete."""
        ratio = self.ratio(self.config)
        if not ratio:
            return ()
        first = (before + places[..., 0]) // ratio  # [G,R]
        windows = first[..., None] + jnp.arange(-(-places.shape[2] // ratio))
        tokens = (windows * ratio - before[..., None])[..., None] + jnp.arange((1 - self.spans) * ratio, ratio)

        def following(part: Compressor, recent, latest, entries):
            index = tokens.reshape(*first.shape, -1)
            own = jnp.take_along_axis(recent, (index % recent.shape[2])[..., None], axis=2)
            in_prompt = jnp.clip(index + latest.shape[1], 0, latest.shape[1] - 1)[..., None]
            of_prompt = jnp.take_along_axis(latest[:, None], in_prompt, axis=2)
            made_of = quantize.widened(jnp.where(index[..., None] < 0, of_prompt, own), dtype)
            new = part.entries(made_of.reshape(*tokens.shape, -1), windows, arrays)
            # A window that is not complete yet has an entry that no token sees, and another one when it is.
            return write_tokens(entries, new[..., None, :], first - before // ratio, "cjd", sharded=False)

        def follow(_, entries):
            return tuple(map(following, self.compressors, made_of, prompt.made_of, entries))

        # A loop, of no trip where no row completes a window, and not a branch, whose results XLA would copy.
        completes = ((before + places[..., -1] + 1) // ratio > first).any()
        return jax.lax.fori_loop(0, completes.astype(jnp.int32), follow, cache.entries)

    def _seen_entries(self, index, prompt, entries, before, places) -> list[jax.Array]:
        """The entries of prompt `[G,R,W,E]` and row that each of the next tokens sees."""
        complete = ((before[..., None] + places + 1) // self.ratio(self.config))[..., None]
        in_prompt = (before // self.ratio(self.config))[..., None, None]  # [G,1,1,1] entries
        counts = [prompt.entries[0].shape[1], entries[0].shape[2]]
        windows = [jnp.arange(-counts[0], 0) + in_prompt, jnp.arange(counts[1]) + in_prompt]
        seen = [(x >= 0) & (x < complete) for x in windows]
        if not index or sum(counts) <= self.config.index_top:
            return seen
        of_indexer = [
            rated("grwi,gsi->grws", index[0], prompt.entries[1], index[1]),
            rated("grwi,grsi->grws", index[0], entries[1][..., 0, :], index[1]),
        ]
        scores, seen = (jnp.concatenate(x, axis=-1) for x in (of_indexer, seen))
        chosen = as_mask(best(scores, seen, self.config.index_top), sum(counts))
        return jnp.split(chosen, [counts[0]], axis=-1)


class HeavilyCompressedAttention(WindowAttention):
    """Causal attention to the tokens in a window and to all entries before, each of many tokens. A `Mixer`."""

    path = "heavily_compressed"
    spans = 1

    def __init__(self, config, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        adapted = config.adapted_in(f"{self.path}/compressor/")
        self.compressor = Compressor(adapted, config.head_dim, self.ratio(config), self.spans, rngs)

    @staticmethod
    def ratio(config) -> int:
        """The tokens of an entry."""
        return config.heavy_ratio

    @property
    def compressors(self) -> tuple[Compressor, ...]:
        """The compressor of entries."""
        return (self.compressor,)

    @classmethod
    def attended(cls, config, places):
        """The tokens of a whole window, and every entry of the tokens before."""
        return WindowAttention.attended(config, places) + (places + 1) // cls.ratio(config)


class CompressedSparseAttention(HeavilyCompressedAttention):
    """Causal attention to the tokens in a window and to the entries that an indexer chooses, each of few tokens. A
    `Mixer`."""

    path = "compressed_sparse"
    spans = 2
    untrained = tuple(
        f"indexer/{x}" for x in ("kv/kernel", "scores/kernel", "position_bias", "norm/scale", "q/kernel", "proj/kernel")
    )

    def __init__(self, config, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.indexer = EntryIndexer(config, self.ratio(config), self.spans, rngs)

    @staticmethod
    def ratio(config) -> int:
        """The tokens of a window, of two of which an entry is made."""
        return config.sparse_ratio

    @property
    def compressors(self) -> tuple[Compressor, ...]:
        """The compressors of entries, and of the indexer's keys."""
        return (self.compressor, self.indexer)

    @classmethod
    def attended(cls, config, places):
        """The tokens of a whole window, and the entries that are chosen."""
        entries = jnp.minimum((places + 1) // cls.ratio(config), config.index_top)
        return WindowAttention.attended(config, places) + entries

    @classmethod
    def rating(cls, config, tokens, pairs):
        """The operations of the indexer, which rates entries."""
        return ChoosesTokens.rating(config, tokens, pairs / cls.ratio(config))

    def _index(self, x, residual, positions, arrays: AttentionArrays) -> tuple[jax.Array, ...]:
        return self.indexer(x, residual, positions, arrays)


def rotated(x, positions, arrays: AttentionArrays) -> jax.Array:
    """x `[...,t,h,d]` with its last dimensions rotated, as many as there are frequencies, two neighbours each."""
    plain, last = jnp.split(x, [x.shape[-1] - 2 * arrays.inv_freq.shape[-1]], axis=-1)
    return jnp.concatenate([plain, rotate(last, positions, arrays.inv_freq, arrays.scale, interleaved=True)], axis=-1)


def _latest(x, count: int) -> jax.Array:
    """The last tokens `[N,count,n]` of rows `[N,T,n]`, behind zeros where they have fewer."""
    return jnp.pad(x, ((0, 0), (count, 0), (0, 0)))[:, x.shape[1] :]
