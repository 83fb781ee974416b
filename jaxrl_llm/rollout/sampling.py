"""From logits to tokens: filters (top-k, top-p, min-p) and one-uniform inverse-CDF sampling."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

BLOCK = 128  # tokens per block of the two-level inverse CDF


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Temperature and filters, which act in the order temperature, top_k, top_p, min_p; temperature 0 is greedy.

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

    @property
    def greedy(self) -> "SamplingParams":
        """The same of the likeliest tokens: temperature 0, at which no filter changes anything."""
        return dataclasses.replace(self, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)

    @property
    def logps_temperature(self) -> float:
        """The temperature of log-probs, the sampler's and the trainer's: 1 where sampling is greedy."""
        return self.temperature or 1.0

    @property
    def processes(self) -> bool:
        """True where logits are changed before the temperature."""
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


def sample_by_row(logits, uniforms, rows: RowSampling, changed=None, process=None):
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
        drawn_from, drawn_shares = given.astype(jnp.float32) / temperature, shares
        if changed is not None and process is not None:
            drawn_from = process() / temperature
            processed = jnp.exp(drawn_from - drawn_from.max(-1, keepdims=True))
            drawn_shares = jnp.where(changed[:, None], processed, shares)
        return jax.lax.cond(filtered.any(), kept, lambda probs: probs, drawn_shares), jnp.argmax(drawn_from, axis=-1)

    settles = greedy | filtered if changed is None else greedy | filtered | changed
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

    With probabilities as `amounts` it is the edge of the nucleus, with ones the k-th largest. Found by halving over
    the bit patterns of floats, which are ordered as positive floats are: exact in 31 sums over the vocabulary, where
    sorting it costs 15 times more. The likeliest token is always kept.
    """

    def halve(_, bounds):
        low, high = bounds  # the tokens of at least `low` hold the goal, those of at least `high` do not
        middle = low + (high - low) // 2
        kept = jnp.where(probs >= jax.lax.bitcast_convert_type(middle, jnp.float32), amounts, 0.0)
        enough = kept.sum(-1, keepdims=True) >= goal
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    above_all = jax.lax.bitcast_convert_type(probs.max(-1, keepdims=True), jnp.int32) + 1
    low, _ = jax.lax.fori_loop(0, 31, halve, (jnp.zeros_like(above_all), above_all))
    return jax.lax.bitcast_convert_type(low, jnp.float32)


def inverse_cdf(probs, uniforms):
    """The token `[M]` at which the cumulative sum of `probs` `[M,V]` (any scale) first exceeds uniform x total.

    Two levels, blocks and tokens in the block, so that rounding stays local and no sum runs over the whole vocabulary.
    A token of probability 0 is never drawn.
    """
    blocks = _blocks(probs)
    block_sums = blocks.sum(-1)
    cumulative = jnp.cumsum(block_sums, axis=-1)
    goal = uniforms * cumulative[:, -1]
    block = _first_above(cumulative, block_sums, goal)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    below = jnp.take_along_axis(cumulative - block_sums, block[:, None], axis=1)[:, 0]
    return block * BLOCK + _first_above(jnp.cumsum(inside, axis=-1), inside, goal - below)


def _blocks(probs):
    """`[M,V]` as `[M,V/BLOCK,BLOCK]`, filled up with 0."""
    rows, vocab = probs.shape
    return jnp.pad(probs, ((0, 0), (0, -vocab % BLOCK))).reshape(rows, -1, BLOCK)


def _first_above(cumulative, masses, goal):
    """The first index whose mass is not 0 and whose cumulative sum exceeds the goal; if none does, the last not 0."""
    possible = masses > 0
    above = possible & (cumulative > goal[:, None])
    last = masses.shape[-1] - 1 - jnp.argmax(possible[:, ::-1], axis=-1)
    return jnp.where(above.any(-1), jnp.argmax(above, axis=-1), last)
