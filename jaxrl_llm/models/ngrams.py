"""Embeddings of n-grams, which some layers add to their streams of hidden states (Qwen4-Exp's per-layer embeddings).

The n-grams of a token are the last n tokens, itself included, for each n from 2 to `size`. An EOS stands in the place
of tokens before the document and of all up to the last EOS before the token. Each of `heads` tables for each n has a
row for it, of numbers of 64 bits:

    (m[0] token[t] ^ m[1] token[t-1] ^ ... ^ m[n-1] token[t-n+1]) mod p

with odd multipliers m, drawn from a seed for each such layer, and p another prime for each table. The tables lie one
behind another in one. Of the rows of a token side by side, e, and of each of its S streams x,

    g = <norm(key(e)), norm(x)> / sqrt(D)
    v = sigmoid(sign(g) sqrt(|g|)) value(e)
    x = x + v + silu(conv(norm(v)))

where the convolution sees K tokens that are `size` apart. A layer's cache has the latest tokens and inputs of the
convolution beside the cache of its mixer.

Letters: S streams of D numbers, K tokens that the convolution sees, h rows of a token.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl_llm.distributed.sharding import constrain
from jaxrl_llm.models.gated_streams import StreamNorm
from jaxrl_llm.models.layers import Embed, Linear
from jaxrl_llm.models.mixers.delta_net import SplitDeltaNet
from jaxrl_llm.models.mixers.mixer import AttentionInputs, DecodeInputs
from jaxrl_llm.models.mixers.short_conv import AT_ONCE, convolved, latest_at, latest_in_rows, written

MASK = 2**64 - 1
LEAST = 1e-6  # of the absolute values of gates, whose root has no gradient at 0


class NGramConfig(NamedTuple):
    """The tables of n-grams, and the layers that have some."""

    layers: tuple[int, ...]
    eos: int
    width: int  # numbers of a token's rows together
    size: int = 3  # tokens of the longest n-grams
    heads: int = 8  # tables for each n
    rows: int = 20_000_000  # at least so many of each table
    multiple: int = 128  # of which the rows of all tables of a layer are one
    seed: int = 1234
    conv: int = 4  # K
    parts: int = 512  # tensors of files that the tables of a layer are split into

    def primes(self, index: int) -> tuple[int, ...]:
        """The rows of each table of the layer with this index among `layers`: the next primes that no other has."""
        count = (self.size - 1) * self.heads
        return _primes_from(self.rows, (index + 1) * count)[index * count :]

    def total(self, index: int) -> int:
        """The rows of all tables of that layer."""
        return -(-sum(self.primes(index)) // self.multiple) * self.multiple

    def multipliers(self, index: int, vocabulary: int) -> tuple[int, ...]:
        """The multipliers of that layer, whose products with ids of a `vocabulary` have 63 bits: SplitMix64's."""
        gamma, half = 0x9E3779B97F4A7C15, max(1, (2**63 - 1) // vocabulary // 2)
        found = []
        for place in range(1, self.size + 1):
            x = (self.seed + 10007 * index + gamma * (place + 1)) & MASK  # its state steps before it is read
            x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
            x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
            found.append(2 * ((x ^ (x >> 31)) % half) + 1)
        return tuple(found)


@functools.lru_cache
def _primes_from(start: int, count: int) -> tuple[int, ...]:
    found = (n for n in itertools.count(start) if n > 1 and all(n % i for i in range(2, math.isqrt(n) + 1)))
    return tuple(itertools.islice(found, count))


class NGramTail(NamedTuple):
    """The cache of prompts: their last tokens, as `shifted` takes them, and inputs of the convolution."""

    tokens: jax.Array  # [...,G,size-1,1]
    values: jax.Array  # [...,G,(K-1)*size,S*D]


class NGramRecent(NamedTuple):
    """The cache of rows: their latest tokens and inputs of the convolution, enough of them to go back by a step."""

    tokens: jax.Array  # [...,G,R,AT_ONCE+size-1,1] of token i in i % AT_ONCE+size-1; values alike
    values: jax.Array  # [...,G,R,AT_ONCE+(K-1)*size,S*D]


class NGrams(nnx.Module):
    """The tables of a layer, and how it adds what they have to its streams."""

    def __init__(self, config, index: int, rngs: nnx.Rngs):
        c: NGramConfig = config.ngrams
        self.ngrams, self.index, self.vocabulary = c, index, config.vocab_size
        joint, size = config.hyper_streams * config.width, c.width // len(c.primes(index))
        table = dataclasses.replace(config, vocab_size=c.total(index), unpredicted=0, embed_width=0, width=size)
        self.embed = Embed(table, rngs)
        self.key, self.value = Linear(c.width, joint, config, rngs), Linear(c.width, config.width, config, rngs)
        self.key_norm, self.query_norm, self.conv_norm = (StreamNorm(config, rngs) for _ in range(3))
        self.conv = nnx.Param(jnp.zeros((joint, 1, c.conv), config.param_dtype))

    def prefill(self, x, inputs: AttentionInputs) -> tuple[jax.Array, NGramTail]:
        """The streams `[N,T,S,D]` of whole rows with what is added, and the cache of rows padded on the left."""
        assert inputs.tokens is not None
        segments = constrain(inputs.segments, "rows", None)
        tokens = jnp.where(segments == 0, 0, inputs.tokens - self.ngrams.eos)
        latest, tail = latest_in_rows(tokens[..., None], segments, self.ngrams.size)
        values, normed = self._values(x, [token[..., 0] for token in latest])
        taps, values_tail = latest_in_rows(constrain(normed, "rows", None, None), segments, self._reach + 1)
        return self._joined(x, values, taps), NGramTail(tail, values_tail)

    def decode(self, x, inputs: DecodeInputs, prompt: NGramTail, cache: NGramRecent) -> tuple[jax.Array, NGramRecent]:
        """The streams `[G,R*W,S,D]` of the next W tokens of each row, and the row caches with them."""
        assert inputs.tokens is not None
        length = inputs.length
        streams = x.reshape(*length.shape, -1, *x.shape[2:])
        tokens = inputs.tokens.reshape(streams.shape[:3]) - self.ngrams.eos
        places = length[..., None] + jnp.arange(streams.shape[2])
        recent = written(cache.tokens, tokens[..., None], length)
        latest = latest_at(places, recent, prompt.tokens, jnp.int32)
        values, normed = self._values(streams, [token[..., 0] for token in latest])
        own = written(cache.values, normed, length)
        streams = self._joined(streams, values, latest_at(places, own, prompt.values, x.dtype))
        cache = NGramRecent(*(constrain(a, "rows", None, None, None) for a in (recent, own)))
        return streams.reshape(x.shape), cache

    @staticmethod
    def empty_cache(prompt: NGramTail, rows: int) -> NGramRecent:
        """The caches of rows of each prompt, whatever their size; caches of layers may be stacked."""

        def zeros(tail) -> jax.Array:
            *lead, before, numbers = tail.shape
            recent = jnp.zeros((*lead, rows, AT_ONCE + before, numbers), tail.dtype)
            return constrain(recent, *(None,) * (len(lead) - 1), "rows", None, None, None)

        return NGramRecent(*map(zeros, prompt))

    @property
    def _reach(self) -> int:
        """The number of tokens before its own that the convolution sees."""
        return (self.ngrams.conv - 1) * self.ngrams.size

    def _values(self, x, latest: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        """The numbers that are added to the streams x `[...,S,D]` of tokens, and the same normed, as the
        convolution reads them, `[...,S*D]`."""
        c = self.ngrams
        rows = table_rows(shifted(latest, c.eos), c, self.index, self.vocabulary)
        e = self.embed(rows.reshape(len(rows), -1), x.dtype).reshape(*rows.shape[:-1], -1)
        keys = self.key_norm(self.key(e).reshape(x.shape)).astype(jnp.float32)
        gates = (keys * self.query_norm(x)).sum(-1, keepdims=True) / math.sqrt(x.shape[-1])
        gates = jnp.sign(gates) * jnp.sqrt(jnp.maximum(jnp.abs(gates), LEAST))
        values = jax.nn.sigmoid(gates).astype(x.dtype) * self.value(e)[..., None, :]
        return values, self.conv_norm(values).reshape(*x.shape[:-2], -1)

    def _joined(self, x, values, latest: list[jax.Array]) -> jax.Array:
        near = jax.nn.silu(convolved(latest[:: self.ngrams.size], self.conv[...]).astype(x.dtype))
        return x + values + near.reshape(x.shape)


class NGramDeltaNet(SplitDeltaNet):
    """A `SplitDeltaNet` whose layer adds n-grams: its caches are pairs, of its own and those of `NGrams`."""

    @classmethod
    def flops(cls, config, tokens, pairs):
        """The operations of the delta net, and of the convolution of n-grams."""
        taps = 2.0 * config.ngrams.conv * config.hyper_streams * config.width
        return super().flops(config, tokens, pairs) + taps * tokens

    @classmethod
    def empty_cache(cls, prompt: tuple[Any, NGramTail], rows: int, size: int) -> Any:
        """The caches of rows, which are as large for any `size`."""
        return super().empty_cache(prompt[0], rows, size), NGrams.empty_cache(prompt[1], rows)


def shifted(latest: list[jax.Array], eos: int) -> list[jax.Array]:
    """The ids of tokens, of those one place before, and so on, with `eos` in the place of all up to the last one.

    `latest` are their ids less that of EOS, those of the farthest first: so 0 is EOS, and no token, too.
    """
    *before, own = latest
    found, last = [own], jnp.ones_like(own)
    for tokens in reversed(before):
        last = jnp.where(last == 0, 0, tokens)
        found.append(last)
    return [tokens + eos for tokens in found]


def table_rows(tokens: list[jax.Array], config: NGramConfig, index: int, vocabulary: int) -> jax.Array:
    """The rows `[...,h]` of n-grams of `tokens`, arrays `[...]` of ids, the own ones first, as `shifted` gives them."""
    primes, rows = np.array(config.primes(index), np.uint32), []
    starts = np.cumsum(primes) - primes
    digits = [jnp.zeros(tokens[0].shape, jnp.uint32)] * 4
    pairs = zip(tokens, config.multipliers(index, vocabulary), strict=True)
    for place, (ids, multiplier) in enumerate(pairs):
        digits = [a ^ b for a, b in zip(digits, _product(ids.astype(jnp.uint32), multiplier), strict=True)]
        if place:
            own = slice((place - 1) * config.heads, place * config.heads)
            rows.append(starts[own] + _remainder(digits, primes[own]))
    return jnp.concatenate(rows, axis=-1).astype(jnp.int32)


def _product(x, y: int) -> list[jax.Array]:
    """The 16-bit digits of x * y below 2^64, the lowest first: JAX has no integers of 64 bits unless asked for."""
    columns = [jnp.zeros_like(x)] * 6
    for i, j in itertools.product(range(2), range(4)):
        product = (x >> 16 * i & 0xFFFF) * np.uint32(y >> 16 * j & 0xFFFF)
        columns[i + j] += product & 0xFFFF
        columns[i + j + 1] += product >> 16
    for i in range(3):
        columns[i + 1] += columns[i] >> 16
    return [column & 0xFFFF for column in columns[:4]]


def _remainder(digits: list[jax.Array], divisors: np.ndarray) -> jax.Array:
    """The remainders `[...,h]` of numbers with these 16-bit digits `[...]`."""
    step = next(bits for bits in (8, 4, 2, 1) if int(divisors.max()).bit_length() + bits <= 32)  # bits at a time
    rest = jnp.zeros((*digits[0].shape, len(divisors)), jnp.uint32)
    for digit, shift in itertools.product(reversed(digits), range(16 - step, -1, -step)):
        rest = (rest << step | (digit[..., None] >> shift) & (2**step - 1)) % divisors
    return rest
