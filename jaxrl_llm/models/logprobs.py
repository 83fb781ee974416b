"""From a net to numbers per token: log-probs and entropy, chunked over positions so that `[N,T,V]` never exists.

This is the only place that shifts: the hidden state at t-1 predicts token t, and every array that leaves here speaks at
index t of token t.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.batch import Layout
from jaxrl_llm.distributed.sharding import constrain
from jaxrl_llm.models.chunked_softmax import Slopes, chunked_logps, log_sum_squares, logps_by_slope
from jaxrl_llm.models.transformer import Net, Params, Transformer


def token_logps(
    net: Net, params: Params, tokens, segments, positions=None, temperature: float = 1.0, prompt_width: int = 0,
    layout: Layout | None = None,
):  # fmt: skip
    """Log-probs `[N,T]` of each token given those before it in its segment, and the entropies it was drawn from.

    Both in fp32, at `temperature`, 0 where nothing is predicted: padding, the first token of a segment, and the first
    `prompt_width` columns, which are not computed. With the `layout` of a micro-batch packed rows are computed, and
    tokens that it does not read have 0.
    """
    read = _read(net.bind(params), tokens, segments, positions, prompt_width, layout)
    logps, entropy = _scored(net, params, read, temperature, chunked_logps)
    return logps, entropy


def token_logps_by_slope(net: Net, params: Params, tokens, segments, slopes: Slopes, positions=None,
                         temperature: float = 1.0, prompt_width: int = 0, layout: Layout | None = None,
                         smoothing: float = 0.0, noise=None):  # fmt: skip
    """A number that is 0 and has the gradient of a loss; then, without gradient, what `token_logps` gives and whether
    each token was the likeliest.

    It is that of a loss of which the derivatives by each log-prob are the `slopes`: see `logps_by_slope`.
    """
    model = net.bind(params)
    read = _read(model, tokens, segments, positions, prompt_width, layout, noise)
    constant, weights, ref_logps, kl = slopes
    own = (
        read.sums(constant),
        *(None if x is None else f(x) for f, x in ((read.sums, weights), (read.picks, ref_logps))),
    )
    found: Any = logps_by_slope(
        model.head_input(read.hidden), model.head_kernel(), own, read.targets, float(temperature), kl,
        net.config.logit_softcap, smoothing, read.count,
    )  # fmt: skip
    return found[0], *(read.at_tokens(x) for x in found[1:])


def token_statistics(net: Net, params: Params, tokens, segments, positions=None, smoothing: float = 0.0, noise=None,
                     layout: Layout | None = None):  # fmt: skip
    """What `token_logps` gives, then whether each token was the likeliest and the mean logit over the vocabulary.

    All `[N,T]`; the last two, 1 or 0 and a number, are for metrics and have no gradient. `smoothing` is as in
    `chunked_logps`; noise `[N,T,D]` is added to the embeddings.
    """
    score = functools.partial(_with_statistics, smoothing=smoothing)
    read = _read(net.bind(params), tokens, segments, positions, 0, layout, noise)
    return tuple(_scored(net, params, read, 1.0, score))


def token_statistics_and_squares(net: Net, params: Params, tokens, segments, positions=None,
                                 layout: Layout | None = None):  # fmt: skip
    """What `token_statistics` gives, and `log sum_v p_v^2` of the distribution of each token, without gradient."""
    read = _read(net.bind(params), tokens, segments, positions, 0, layout)
    return tuple(_scored(net, params, read, 1.0, _logps_and_squares))


def token_values(net: Net, params: Params, tokens, segments, positions=None, prompt_width: int = 0,
                 layout: Layout | None = None):  # fmt: skip
    """Values `[N,T]` in fp32, by the score head, of the state each token was drawn in; 0 where `token_logps` is."""
    model = net.bind(params)
    read = _read(model, tokens, segments, positions, prompt_width, layout)
    return read.at_tokens(model.scores(read.hidden))


def token_logps_and_values(
    net: Net, params: Params, score: Params, tokens, segments, positions=None, temperature: float = 1.0,
    prompt_width: int = 0, layout: Layout | None = None,
):  # fmt: skip
    """What `token_logps` gives, and the values `[N,T]` that a score head (`{"kernel": [D,1]}`) gives of the same
    hidden states, in fp32."""

    def score_all(hidden, kernel, targets, temperature: float, softcap: float | None, count):
        found: Any = chunked_logps(hidden, kernel, targets, temperature, False, softcap, 0.0, count)
        values = jnp.matmul(hidden.astype(jnp.float32), score["kernel"].astype(jnp.float32))[..., 0]
        return *found, values

    read = _read(net.bind(params), tokens, segments, positions, prompt_width, layout)
    logps, entropy, values = _scored(net, params, read, temperature, score_all)
    return logps, entropy, values


def last_scores(net: Net, params: Params, tokens, segments, layout: Layout | None = None):
    """Scores `[N]` in fp32, by the score head, of each row's last token that is no padding."""
    model = net.bind(params)
    if layout is not None:
        read = _read(model, tokens, segments, None, 0, layout)
        return read.at_tokens(model.scores(read.hidden)).sum(axis=1)
    hidden = model.hidden(tokens, segments)
    last = jnp.where(segments != 0, jnp.arange(segments.shape[1]), 0).max(axis=1)
    return model.scores(jnp.take_along_axis(hidden, last[:, None, None], axis=1))[:, 0]


class Read(NamedTuple):
    """The hidden states `[Z,S,D]` that predict tokens `[Z,S]`, and the way back to rows `[N,T]`.

    Without a layout Z is N, and S are the columns from the first on that is predicted.
    """

    hidden: jax.Array
    targets: jax.Array
    count: jax.Array | None  # [] how many of the S are in use, in the fullest shard
    at_tokens: Callable[[jax.Array], jax.Array]  # numbers [Z,S] as [N,T], 0 where nothing is read
    sums: Callable[[jax.Array], jax.Array]  # its transpose: the sums of what was given for each of the S
    picks: Callable[[jax.Array], jax.Array]  # values [N,T], alike for all tokens of one of the S, as [Z,S]


def _read(model: Transformer, tokens, segments, positions, prompt_width: int, layout: Layout | None, noise=None):
    if layout is not None:
        return _read_packed(model, tokens, layout)
    first = max(prompt_width, 1)
    predicted = (segments[:, first:] == segments[:, first - 1 : -1]) & (segments[:, first:] != 0)

    def at_tokens(x):
        return jnp.pad(jnp.where(predicted, x, 0.0), ((0, 0), (first, 0)))

    def columns(x):
        return jnp.where(predicted, x[:, first:], 0.0)

    hidden = model.hidden(tokens, segments, positions, noise)[:, first - 1 : -1]
    return Read(hidden, tokens[:, first:], None, at_tokens, columns, columns)


def _read_packed(model: Transformer, tokens, layout: Layout) -> Read:
    shards, places = layout.places.shape

    def take(x, index):  # each shard from its own
        return jnp.take_along_axis(x.reshape(shards, -1), index.reshape(shards, -1), axis=1)

    def rows(x):
        return constrain(x.reshape(-1, x.shape[-1]), "rows", None)

    def at_tokens(x):
        padded = constrain(jnp.pad(x, ((0, 0), (0, 1))), "rows", None)
        return rows(take(padded, layout.slots).reshape(*layout.slots.shape))

    def sums(x):
        empty = jnp.zeros((shards, places), jnp.float32)
        return jax.linear_transpose(at_tokens, empty)(x.astype(jnp.float32))[0]

    def picks(x):
        return take(x, layout.targets)

    packed = take(tokens, layout.source).reshape(layout.source.shape)
    packed, segments, positions, prefixes, uses = (
        rows(x) for x in (packed, layout.segments, layout.positions, layout.prefixes, layout.uses)
    )
    hidden = model.hidden(packed, segments, positions, prefixes=prefixes, uses=uses)
    hidden = constrain(hidden.reshape(shards, -1, hidden.shape[-1]), "rows", None, None)
    hidden = jnp.take_along_axis(hidden, layout.places[..., None], axis=1)
    return Read(hidden, picks(tokens), layout.read.max(), at_tokens, sums, picks)


def _scored(net: Net, params: Params, read: Read, temperature: float, score):
    model = net.bind(params)
    hidden, softcap = model.head_input(read.hidden), net.config.logit_softcap
    scored: Any = score(
        hidden, model.head_kernel(), read.targets, float(temperature), softcap=softcap, count=read.count
    )
    return [read.at_tokens(x) for x in scored]


def _with_statistics(hidden, kernel, targets, temperature: float, softcap: float | None, count, smoothing: float):
    return chunked_logps(hidden, kernel, targets, temperature, True, softcap, smoothing, count)


def _logps_and_squares(hidden, kernel, targets, temperature: float, softcap: float | None, count):
    scored: Any = chunked_logps(hidden, kernel, targets, temperature, True, softcap, 0.0, count)
    return *scored, log_sum_squares(*jax.lax.stop_gradient((hidden, kernel)), softcap, count)
