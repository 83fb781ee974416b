"""From logits to tokens: filters (top-k, top-p, min-p) and one-uniform inverse-CDF sampling."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.config.schema import COLDEST
from jaxrl_llm.distributed.sharding import constrain, vocab_shards

BLOCK = 128  # tokens per block of the two-level inverse CDF
PARTS = 16  # that GPUs divide the bit patterns of probabilities into at once; a power of two


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Temperature and filters, which act in the order temperature, top_k, top_p, min_p; temperature 0 is greedy.

    A temperature below `COLDEST` becomes 0: clients that divide by it write 1e-5 for greedy.
    The others act on the logits before (processors.py). logit_bias: pairs of a token id and what is added to its logit.
    bad_words: sequences of token ids that are not sampled. min_tokens: tokens of a completion before it may end.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0

    def __post_init__(self) -> None:
        if self.temperature < COLDEST:
            object.__setattr__(self, "temperature", 0.0)

    @property
    def greedy(self) -> "SamplingParams":
        """These settings with temperature 0, which takes the likeliest tokens, and at which no filter changes
        anything."""
        return dataclasses.replace(self, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)

    @property
    def filters(self) -> bool:
        """True where some tokens are left out: by top_k, top_p or min_p."""
        return bool(self.top_k) or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def logps_temperature(self) -> float:
        """The temperature of log-probs, the sampler's and the trainer's: 1 where sampling is greedy."""
        return self.temperature or 1.0

    @property
    def processes(self) -> bool:
        """True where penalties, biases or forbidden tokens change logits before the temperature divides them."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return penalties != (1.0, 0.0, 0.0) or bool(self.logit_bias or self.bad_words or self.min_tokens)


class RowSampling(NamedTuple):
    """Settings of rows `[...]` that differ from row to row, in the place of one `SamplingParams` and the engine's eos.

    Rows of a rollout have none; those that are served each have their own.
    """

    temperature: Any  # [...]
    top_p: Any
    top_k: Any
    min_p: Any
    ends: Any  # [...,E] ids that end the row; -1 is none
    repetition_penalty: Any = None  # [...]; these are for processors.py
    frequency_penalty: Any = None
    presence_penalty: Any = None
    bias_ids: Any = None  # [...,E] ids whose logits are changed, and by what; the vocabulary's size is none
    biases: Any = None  # [...,E]
    bad_words: Any = None  # [...,W,L] sequences that are not sampled (processors.padded_words)
    min_tokens: Any = None  # [...] tokens before the row may end
    allowed: Any = None  # [...,V/32] uint32, a bit for each token that may come next; None where no row is guided
    top_ids: Any = None  # [...,C,A] the likeliest tokens at each place; None where no row asks for them
    top_logps: Any = None


def sample_by_row(logits, uniforms, rows: RowSampling, changed, process):
    """`sample` with settings of each row, `[M]`: bit for bit the tokens that a batch of rows like it would get.

    `process()` are the processed logits `[M,V]`, computed where rows have asked for that: `changed` `[M]`. While all
    rows have a temperature alone, a step costs what it does with one temperature for all.
    """
    given, greedy = logits, rows.temperature == 0
    temperature = jnp.where(greedy, 1.0, rows.temperature)[:, None]
    logits = given.astype(jnp.float32) / temperature
    top = logits.max(-1, keepdims=True)
    shares = jnp.exp(logits - top)
    filtered = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)

    def kept(probs):
        # One filter for a row, none for its neighbour: each is computed for all and taken where it is asked for.
        count = jnp.minimum(rows.top_k, probs.shape[-1])[:, None]
        enough = _threshold(probs, jnp.ones_like(probs), count.astype(jnp.float32))
        probs = jnp.where((probs >= enough) | (count == 0), probs, 0.0)
        top_p = rows.top_p[:, None]
        mass = top_p * probs.sum(-1, keepdims=True)
        probs = jnp.where((probs >= _threshold(probs, probs, mass)) | (top_p >= 1), probs, 0.0)
        min_p = rows.min_p[:, None]
        return jnp.where((probs >= min_p * probs.max(-1, keepdims=True)) | (min_p <= 0), probs, 0.0)

    def settled(shares):
        """The shares that are drawn from, and each row's likeliest token."""
        drawn_from = process() / temperature
        processed = jnp.exp(drawn_from - drawn_from.max(-1, keepdims=True))
        drawn_shares = jnp.where(changed[:, None], processed, shares)
        return jax.lax.cond(filtered.any(), kept, lambda probs: probs, drawn_shares), jnp.argmax(drawn_from, axis=-1)

    settles = greedy | filtered | changed
    if jax.default_backend() == "gpu":
        whole, top, total = _drawn_in_one_pass(given, uniforms, temperature)

        def with_settled():
            # Formed here: an operand of both branches would be written in every step.
            scaled = given.astype(jnp.float32) / temperature
            probs, likeliest = settled(jnp.exp(scaled - scaled.max(-1, keepdims=True)))
            return jnp.where(greedy, likeliest, jnp.where(settles, inverse_cdf(probs, uniforms), whole))

        tokens = jax.lax.cond(settles.any(), with_settled, lambda: whole)
        return tokens.astype(jnp.int32), _logps(given, tokens, temperature, top, total)
    as_they_are = jnp.zeros_like(rows.temperature, jax.eval_shape(jnp.argmax, shares).dtype)
    probs, likeliest = jax.lax.cond(settles.any(), settled, lambda shares: (shares, as_they_are), shares)
    tokens = jnp.where(greedy, likeliest, inverse_cdf(probs, uniforms))
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1) - top
    return tokens.astype(jnp.int32), chosen[:, 0] - jnp.log(_blocks(shares).sum(-1).sum(-1))


def sample(logits, uniforms, sampling: SamplingParams, processed=None):
    """Tokens `[M]` and their fp32 log-probs `[M]`, from logits `[M,V]` and one uniform number in [0,1) per row.

    The log-prob is over the full vocabulary at the sampling temperature, also under a filter and where tokens are drawn
    from `processed` logits, so that it is the number a trainer computes (greedy: temperature 1).
    """
    if jax.default_backend() == "gpu" and processed is None and not sampling.filters and sampling.temperature > 0:
        tokens, top, total = _drawn_in_one_pass(logits, uniforms, sampling.temperature)
        return tokens.astype(jnp.int32), _logps(logits, tokens, sampling.temperature, top, total)
    logits = logits.astype(jnp.float32) / sampling.logps_temperature
    top = logits.max(-1, keepdims=True)
    shares = jnp.exp(logits - top)  # the only exponentials over the vocabulary: nothing below needs them to sum to 1
    drawn_from, drawn_shares = logits, shares
    if processed is not None:
        drawn_from = processed / sampling.logps_temperature
        drawn_shares = jnp.exp(drawn_from - drawn_from.max(-1, keepdims=True))
    if sampling.temperature == 0:
        tokens = jnp.argmax(drawn_from, axis=-1)
    else:
        tokens = inverse_cdf(kept_shares(drawn_shares, sampling), uniforms)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1) - top
    return tokens.astype(jnp.int32), chosen[:, 0] - jnp.log(_blocks(shares).sum(-1).sum(-1))


def _drawn_in_one_pass(logits, uniforms, temperature):
    """The tokens `[M]` of `inverse_cdf` without a filter, of logits `[M,V]` that are read once, at one temperature or
    those `[M,1]` of rows; the highest logits over it `[M,1]`, and the sums `[M]` of the shares of these.

    XLA's GPU backend reads the logits for the highest, and again for each sum. Here a block's sum is one of shares of
    its own highest logit, and both come of one reduction; of the block that is drawn shares are formed again. Where a
    mesh shards the vocabulary, each device has blocks of its own tokens, and no logits are sent.
    """
    rows, vocab = logits.shape
    shards = vocab_shards(vocab)
    of_shard = vocab // shards

    def joined(a, b):
        top = jnp.maximum(a[0], b[0])
        return top, a[1] * jnp.exp(a[0] - top) + b[1] * jnp.exp(b[0] - top)

    least = float(jnp.finfo(jnp.float32).min)  # in place of -inf, which less itself is no number
    scaled = jnp.maximum(logits.astype(jnp.float32) / temperature, least).reshape(rows, shards, of_shard)
    blocks = constrain(_blocks(scaled, least), "rows", "vocab", None, None)
    found = jax.lax.reduce((blocks, jnp.ones_like(blocks)), (jnp.float32(least), jnp.float32(0)), joined, (3,))
    tops, sums = (constrain(x.reshape(rows, -1), "rows", None) for x in found)
    top = tops.max(-1, keepdims=True)
    block_sums = sums * jnp.exp(tops - top)
    start = jnp.arange(0, blocks.shape[2] * BLOCK, BLOCK)  # the first token of each block, in its shard and in all
    first = (jnp.arange(0, vocab, of_shard)[:, None] + start).reshape(-1)

    def shares_in(block):
        place = start[block % len(start)][:, None] + jnp.arange(BLOCK)
        ids = jnp.minimum(first[block][:, None] + jnp.arange(BLOCK), vocab - 1)
        inside = jnp.take_along_axis(logits, ids, axis=-1)
        return jnp.where(place < of_shard, jnp.exp(inside.astype(jnp.float32) / temperature - top), 0.0)

    block, place = _drawn(block_sums, shares_in, uniforms)
    return first[block] + place, top, block_sums.sum(-1)


def _logps(logits, tokens, temperature, top, total):
    """The log-probs `[M]` of tokens `[M]`, by the results of `_drawn_in_one_pass`."""
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1).astype(jnp.float32) / temperature - top
    return chosen[:, 0] - jnp.log(total)


def kept_shares(probs, sampling: SamplingParams):
    """Probabilities `[M,V]`, at any scale, with the filtered tokens at 0.

    A filter keeps every token as likely as the least likely one it keeps, so ties are never broken by token id.
    """
    if sampling.top_k:
        # min, not [:, -1:]: XLA's CPU backend turns a slice of top_k into a sort of the vocabulary, 100 times slower.
        kth = jax.lax.top_k(probs, min(sampling.top_k, probs.shape[-1]))[0].min(-1, keepdims=True)
        probs = jnp.where(probs >= kth, probs, 0.0)
    if sampling.top_p < 1.0:
        goal = sampling.top_p * probs.sum(-1, keepdims=True)
        probs = jnp.where(probs >= _threshold(probs, probs, goal), probs, 0.0)
    if sampling.min_p > 0.0:
        probs = jnp.where(probs >= sampling.min_p * probs.max(-1, keepdims=True), probs, 0.0)
    return probs


def _threshold(probs, amounts, goal):
    """The largest probability `[M,1]` such that the tokens of at least as much have together the `goal` `[M,1]`.

    With probabilities as `amounts` it is the edge of the nucleus, with ones the k-th largest. Found by dividing the bit
    patterns of floats, which are ordered as positive floats are: exact, where sorting the vocabulary costs 15 times
    more. Halving them takes 31 sums over the vocabulary. GPUs, which are bound by reading it, form PARTS - 1 sums at
    once and read it 8 times. The likeliest token is always kept.
    """
    parts = PARTS if jax.default_backend() == "gpu" else 2

    def divide(_, bounds):
        low, high = bounds  # the tokens of at least `low` hold the goal, those of at least `high` do not
        size = (high - low - 1) // parts + 1
        edges = [low + part * size for part in range(1, parts)]
        kept = [jnp.where(probs >= jax.lax.bitcast_convert_type(edge, jnp.float32), amounts, 0.0) for edge in edges]
        # As one reduction: of so many XLA would make two passes.
        zeros, added = [jnp.float32(0)] * len(kept), functools.partial(jax.tree.map, jax.lax.add)
        sums = jax.lax.reduce(kept, zeros, added, (1,))
        held = sum((edge < high) & (x[:, None] >= goal) for edge, x in zip(edges, sums, strict=True))
        low = low + held * size
        return low, jnp.minimum(low + size, high)

    above_all = jax.lax.bitcast_convert_type(probs.max(-1, keepdims=True), jnp.int32) + 1
    passes = math.ceil(31 / math.log2(parts))
    low, _ = jax.lax.fori_loop(0, passes, divide, (jnp.zeros_like(above_all), above_all))
    return jax.lax.bitcast_convert_type(low, jnp.float32)


def inverse_cdf(probs, uniforms):
    """The token `[M]` at which the cumulative sum of `probs` `[M,V]` (any scale) first exceeds uniform x total.

    Two levels, blocks and tokens in the block, so that rounding stays local and no sum runs over the whole vocabulary.
    A token of probability 0 is never drawn.
    """
    blocks = _blocks(probs)

    def inside(block):
        return jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]

    block, place = _drawn(blocks.sum(-1), inside, uniforms)
    return block * BLOCK + place


def _drawn(block_sums, shares_in, uniforms):
    """The block `[M]` of the token of `inverse_cdf`, and its place in that, of blocks with these sums `[M,...]`.

    `shares_in(block)` are the shares `[M,BLOCK]` of one block of each row.
    """
    cumulative = jnp.cumsum(block_sums, axis=-1)
    goal = uniforms * cumulative[:, -1]
    block = _first_above(cumulative, block_sums, goal)
    inside = shares_in(block)
    below = jnp.take_along_axis(cumulative - block_sums, block[:, None], axis=1)[:, 0]
    return block, _first_above(jnp.cumsum(inside, axis=-1), inside, goal - below)


def _blocks(x, behind=0.0):
    """`[...,V]` as `[...,V/BLOCK,BLOCK]`, filled up with the number `behind`."""
    padding = (*((0, 0),) * (x.ndim - 1), (0, -x.shape[-1] % BLOCK))
    return jnp.pad(x, padding, constant_values=behind).reshape(*x.shape[:-1], -1, BLOCK)


def _first_above(cumulative, masses, goal):
    """The first index whose mass is not 0 and whose cumulative sum exceeds the goal; if none does, the last not 0."""
    possible = masses > 0
    above = possible & (cumulative > goal[:, None])
    last = masses.shape[-1] - 1 - jnp.argmax(possible[:, ::-1], axis=-1)
    return jnp.where(above.any(-1), jnp.argmax(above, axis=-1), last)
