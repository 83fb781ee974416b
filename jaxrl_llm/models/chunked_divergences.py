"""From two hidden states to the distance of their distributions: chunked over positions, as log-probs are."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.distillation import (
    generalized_jsd,
    hybrid_distances,
    sorted_distance,
    with_tail,
    without_tail,
)
from jaxrl_llm.algorithms.kl import full_kl
from jaxrl_llm.models.chunked_softmax import (
    Table,
    by_hidden_and_table,
    by_kernel,
    gradients_of,
    logits_of,
    over_chunks,
    products_of,
    table_of,
    zero_totals,
)
from jaxrl_llm.models.layers import soft_cap


class Distributions(NamedTuple):
    """Distributions over the vocabulary as a network's head forms them, of a policy that is not trained."""

    hidden: jax.Array  # [N,X,D] what the head reads
    kernel: jax.Array  # [D,V]
    softcap: jax.Array | None = None  # [] of its logits, where it is another network


class TopTokens(NamedTuple):
    """The k likeliest tokens of distributions over the vocabulary."""

    ids: jax.Array  # [N,X,k] int32
    logps: jax.Array  # [N,X,k]


def chunked_kl(
    hidden, kernel, reference: Distributions, temperature: float, softcap: float | None = None, count=None
) -> jax.Array:
    """`full_kl` `[N,X]` of softmax(logits / temperature) and that of the reference; arguments as in `chunked_logps`.

    Both logits are formed for a chunk of columns at a time, in fp32, and again in the backward pass.
    """
    kl: Any = _chunked_kl((float(temperature), softcap), hidden, kernel, reference, count)
    return kl


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked_kl(options: tuple[float, float | None], hidden, kernel, reference: Distributions, count):
    return _kl_forward(options, hidden, kernel, reference, count)[0]


def _kl_forward(options, hidden, kernel, reference: Distributions, count):
    tables = table_of(hidden, kernel), table_of(reference.hidden, reference.kernel)

    def chunk(columns):
        policy, other = _pair_of_log_probs(options, columns, hidden, reference, tables)
        return (full_kl(policy, other),)

    (kl,), _ = over_chunks(chunk, hidden, tables[0], count)
    return kl, (hidden, kernel, reference, count)


def _pair_of_log_probs(options, columns, hidden, reference: Distributions, tables):
    """The log-probs `[N,s,V]` of the policy and of the reference in some columns."""
    pairs = zip((hidden, reference.hidden), tables, strict=True)
    return (jax.nn.log_softmax(logits_of(columns(h), table, *options), axis=-1) for h, table in pairs)


# Why not `chunked_divergence` with beta 1: this gradient by hand is exactly 0 where policy and reference agree, while
# autodiff through `generalized_jsd` leaves noise near 1e-7.
def _kl_backward(options, residuals, gradient):
    hidden, kernel, reference, count = residuals
    (temperature, softcap), tables = options, (table_of(hidden, kernel), table_of(reference.hidden, reference.kernel))

    def by_products(columns, h):
        policy, other = _pair_of_log_probs(options, columns, hidden, reference, tables)
        kl = full_kl(policy, other)
        d = columns(gradient)[..., None] * jnp.exp(policy) * (policy - other - kl[..., None]) / temperature
        if softcap is None:
            return d
        return d * (1.0 - (logits_of(h, tables[0], *options) * (temperature / softcap)) ** 2)

    return *gradients_of(by_products, hidden, kernel, tables[0], count), None, None


_chunked_kl.defvjp(_kl_forward, _kl_backward)


def chunked_divergence(
    hidden,
    kernel,
    teacher: Distributions | TopTokens,
    temperature: float,
    beta: float,
    softcap: float | None = None,
    count=None,
    top_k: int = 0,
    tail: bool = True,
    least: float | None = None,
) -> jax.Array:
    """`generalized_jsd` `[N,X]` of softmax(logits / temperature) and a teacher; other arguments as in `chunked_logps`.

    Of a teacher's whole distributions both logits are formed for a chunk of columns at a time, in fp32, and again in
    the backward pass; tokens that one of the two heads lacks are in neither distribution. Of a teacher's likeliest
    tokens, the divergence is over these and one entry for all others (`with_tail`), or, with `tail` False, of the two
    distributions given that it is one of these; theirs are log-probs at this temperature already. With `top_k` the same
    is done with that many likeliest tokens of the policy and a teacher's whole distributions. The log-probs of such
    tokens count as `least` at least, in both, and the policy's have no gradient below it.
    """
    options = _Divergence(float(temperature), softcap, float(beta), top_k, tail, least)
    divergence: Any = _chunked_divergence(options, hidden, kernel, teacher, count)
    return divergence


class _Divergence(NamedTuple):
    """The arguments of `chunked_divergence` that are no arrays."""

    temperature: float
    softcap: float | None
    beta: float
    top_k: int
    tail: bool
    least: float | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked_divergence(options: _Divergence, hidden, kernel, teacher, count):
    return _divergence_forward(options, hidden, kernel, teacher, count)[0]


def _divergence_forward(options, hidden, kernel, teacher: Distributions | TopTokens, count):
    table = _shared_table(hidden, kernel, teacher)
    divergence_of = _divergence_by_products(options, teacher)

    def chunk(columns):
        return (divergence_of(columns)(products_of(columns(hidden), table)),)

    (divergence,), _ = over_chunks(chunk, hidden, table, count)
    return divergence, (hidden, kernel, teacher, count)


def _shared_table(hidden, kernel, teacher: Distributions | TopTokens) -> Table:
    """The head's matrix `[V,D]`, of the tokens that the teacher has too."""
    table = table_of(hidden, kernel)
    return table.first(teacher.kernel.shape[1]) if isinstance(teacher, Distributions) else table


def _divergence_by_products(options, teacher: Distributions | TopTokens):
    """A function of columns that returns the divergence `[N,s]` as a function of the policy's matmul there."""
    temperature, softcap, beta, top_k, tail, least = options

    def restricted(log_probs):
        log_probs = log_probs if least is None else jnp.maximum(log_probs, least)
        return with_tail(log_probs) if tail else without_tail(log_probs)

    def policy(products):
        return jax.nn.log_softmax(soft_cap(products, softcap) / temperature, axis=-1)

    if isinstance(teacher, TopTokens):

        def of_top(columns, products):
            own = jnp.take_along_axis(policy(products), columns(teacher.ids), axis=-1)
            return generalized_jsd(restricted(own), restricted(columns(teacher.logps)), beta)

        return lambda columns: functools.partial(of_top, columns)
    table = table_of(teacher.hidden, teacher.kernel)

    def of_all(columns, products):
        logits = logits_of(columns(teacher.hidden), table.first(products.shape[-1]), temperature, teacher.softcap)
        own, theirs = policy(products), jax.nn.log_softmax(logits, axis=-1)
        if top_k:
            ids = jax.lax.top_k(jax.lax.stop_gradient(own), top_k)[1]
            own, theirs = (restricted(jnp.take_along_axis(x, ids, axis=-1)) for x in (own, theirs))
        return generalized_jsd(own, theirs, beta)

    return lambda columns: functools.partial(of_all, columns)


def _divergence_backward(options, residuals, gradient):
    hidden, kernel, teacher, count = residuals
    table = _shared_table(hidden, kernel, teacher)
    divergence_of = _divergence_by_products(options, teacher)

    def by_products(columns, h):
        return jax.vjp(divergence_of(columns), products_of(h, table))[1](columns(gradient))[0]

    return *gradients_of(by_products, hidden, kernel, table, count), None, None


_chunked_divergence.defvjp(_divergence_forward, _divergence_backward)


class AlignedDistributions(NamedTuple):
    """A teacher's distributions over a vocabulary of its own, at the last token of each span of text."""

    hidden: jax.Array  # [N,X,D] what the head reads
    kernel: jax.Array  # [D,W]
    prefix_logps: jax.Array  # [N,X] of the teacher's tokens of the span before its last one, together
    softcap: jax.Array | None = None  # [] of its logits
    matches: jax.Array | None = None  # [V] the teacher's id of each token, -1: none; None: nothing is known of them


class UldOptions(NamedTuple):
    """The settings of a distance between distributions over two vocabularies."""

    temperature: float
    teacher_temperature: float
    beta: float = 1.0  # of matched tokens
    weights: tuple[float, float] | None = None  # of matched and other tokens; None: the share of the matched, the rest


def chunked_uld(
    hidden,
    kernel,
    prefix_logps,
    teacher: AlignedDistributions,
    options: UldOptions,
    softcap: float | None = None,
    count=None,
) -> jax.Array:
    """The distance `[N,X]` of a policy from a teacher with another vocabulary, where both end a span of text.

    The distribution of a span is that of its last token times the probability of the tokens before it in the span,
    `exp(prefix_logps)` `[N,X]`, to which gradients flow as well. The distance is `sorted_distance` or, with
    `teacher.matches`, the weighted sum of `hybrid_distances`. Logits of both are formed for a chunk of columns at a
    time, in fp32, and again in the backward pass; other arguments as in `chunked_logps`.
    """
    distance: Any = _chunked_uld((options, softcap), hidden, kernel, prefix_logps, teacher, count)
    return distance


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked_uld(options, hidden, kernel, prefix, teacher, count):
    return _uld_forward(options, hidden, kernel, prefix, teacher, count)[0]


def _uld_forward(options, hidden, kernel, prefix, teacher, count):
    table = table_of(hidden, kernel)
    distance_of = _uld_by_products(options, teacher)

    def chunk(columns):
        return (distance_of(columns)(products_of(columns(hidden), table), columns(prefix)),)

    (distance,), _ = over_chunks(chunk, hidden, table, count)
    return distance, (hidden, kernel, prefix, teacher, count)


def _uld_by_products(options: tuple[UldOptions, float | None], teacher: AlignedDistributions):
    """A function of columns that returns the distance `[N,s]` by the policy's matmul there and its prefixes."""
    settings, softcap = options
    table = table_of(teacher.hidden, teacher.kernel)

    def distance(columns, products, prefix):
        own = jax.nn.log_softmax(soft_cap(products, softcap) / settings.temperature, axis=-1)
        logits = logits_of(columns(teacher.hidden), table, settings.teacher_temperature, teacher.softcap)
        p = jnp.exp(own + prefix[..., None])
        q = jnp.exp(jax.nn.log_softmax(logits, axis=-1) + columns(teacher.prefix_logps)[..., None])
        if teacher.matches is None:
            return sorted_distance(p, q)
        matched, unmatched = hybrid_distances(p, q, teacher.matches, settings.beta)
        share = (teacher.matches >= 0).sum() / len(table.matrix)  # of the teacher's tokens
        weights = (share, 1.0 - share) if settings.weights is None else settings.weights
        return weights[0] * matched + weights[1] * unmatched

    return lambda columns: functools.partial(distance, columns)


def _uld_backward(options, residuals, gradient):
    hidden, kernel, prefix, teacher, count = residuals
    table = table_of(hidden, kernel)
    distance_of = _uld_by_products(options, teacher)

    def chunk(columns, d_table):
        h = columns(hidden)
        d, d_prefix = jax.vjp(distance_of(columns), products_of(h, table), columns(prefix))[1](columns(gradient))
        d_hidden, d_table = by_hidden_and_table(d, h, table, d_table)
        return (d_hidden, d_prefix), d_table

    (d_hidden, d_prefix), d_table = over_chunks(chunk, hidden, table, count, zero_totals(hidden, table))
    return d_hidden.astype(hidden.dtype), by_kernel(d_table, kernel), d_prefix, None, None


_chunked_uld.defvjp(_uld_forward, _uld_backward)


def chunked_top(hidden, kernel, temperature: float, k: int, softcap: float | None = None, count=None) -> TopTokens:
    """The k likeliest tokens of softmax(logits / temperature), the first one first; arguments as in `chunked_logps`."""
    table = table_of(hidden, kernel)

    def chunk(columns):
        logps = jax.nn.log_softmax(logits_of(columns(hidden), table, temperature, softcap), axis=-1)
        return jax.lax.top_k(logps, k)

    (logps, ids), _ = over_chunks(chunk, hidden, table, count)
    return TopTokens(ids, logps)
