"""From a net to numbers per token: log-probs and entropy, chunked over positions so that `[N,T,V]` never exists.

This is the only place that shifts: the hidden state at t-1 predicts token t, and every array that leaves here speaks at
index t of token t.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.models.layers import soft_cap
from jaxrl_llm.models.transformer import Net, Params
from jaxrl_llm.sharding import constrain

LOGITS_IN_FLIGHT = 2**24  # logits computed at once, at least one column of rows: 64 MB in fp32


def token_logps(
    net: Net, params: Params, tokens, segments, positions=None, temperature: float = 1.0, prompt_width: int = 0
):
    """Log-probs `[N,T]` of each token given those before it in its segment, and the entropies it was drawn from.

    Both in fp32, at `temperature`, 0 where nothing is predicted: padding, the first token of a segment, and the first
    `prompt_width` columns, which are not computed.
    """
    logps, entropy = _scored(net, params, tokens, segments, positions, temperature, prompt_width, chunked_logps)
    return logps, entropy


def token_statistics(net: Net, params: Params, tokens, segments, positions=None, smoothing: float = 0.0, noise=None):
    """What `token_logps` gives, then whether each token was the likeliest and the mean logit over the vocabulary.

    All `[N,T]`; the last two, 1 or 0 and a number, are for metrics and have no gradient. `smoothing` is as in
    `chunked_logps`; noise `[N,T,D]` is added to the embeddings.
    """
    score = functools.partial(_with_statistics, smoothing=smoothing)
    return tuple(_scored(net, params, tokens, segments, positions, 1.0, 0, score, noise))


def token_statistics_and_squares(net: Net, params: Params, tokens, segments, positions=None):
    """What `token_statistics` gives, and `log sum_v p_v^2` of the distribution of each token, without gradient."""
    return tuple(_scored(net, params, tokens, segments, positions, 1.0, 0, _logps_and_squares))


def token_values(net: Net, params: Params, tokens, segments, positions=None, prompt_width: int = 0):
    """Values `[N,T]` in fp32, by the score head, of the state each token was drawn in; 0 where `token_logps` is."""
    model = net.bind(params)
    hidden = model.hidden(tokens, segments, positions)
    first = max(prompt_width, 1)
    return _at_tokens(model.scores(hidden[:, first - 1 : -1]), segments, first)


def token_logps_and_values(
    net: Net, params: Params, score: Params, tokens, segments, positions=None, temperature: float = 1.0,
    prompt_width: int = 0,
):  # fmt: skip
    """What `token_logps` gives, and the values `[N,T]` that a score head (`{"kernel": [D,1]}`) gives of the same
    hidden states, in fp32."""

    def score_all(hidden, kernel, targets, temperature: float, softcap: float | None):
        found: Any = chunked_logps(hidden, kernel, targets, temperature, False, softcap)
        values = jnp.matmul(hidden.astype(jnp.float32), score["kernel"].astype(jnp.float32))[..., 0]
        return *found, values

    logps, entropy, values = _scored(net, params, tokens, segments, positions, temperature, prompt_width, score_all)
    return logps, entropy, values


def last_scores(net: Net, params: Params, tokens, segments):
    """Scores `[N]` in fp32, by the score head, of each row's last token that is no padding."""
    model = net.bind(params)
    hidden = model.hidden(tokens, segments)
    last = jnp.where(segments != 0, jnp.arange(segments.shape[1]), 0).max(axis=1)
    return model.scores(jnp.take_along_axis(hidden, last[:, None, None], axis=1))[:, 0]


def _scored(
    net: Net, params: Params, tokens, segments, positions, temperature: float, prompt_width: int, score, noise=None
):
    model = net.bind(params)
    hidden = model.hidden(tokens, segments, positions, noise)
    first = max(prompt_width, 1)
    targets = tokens[:, first:]
    hidden = model.head_input(hidden[:, first - 1 : -1])
    scored: Any = score(hidden, model.head_kernel(), targets, float(temperature), softcap=net.config.logit_softcap)
    return [_at_tokens(x, segments, first) for x in scored]


def _at_tokens(x, segments, first: int):
    """Numbers `[N,T-first]` of the predictions of tokens `first` on as `[N,T]`, 0 where no token is predicted."""
    predicted = (segments[:, first:] == segments[:, first - 1 : -1]) & (segments[:, first:] != 0)
    return jnp.pad(jnp.where(predicted, x, 0.0), ((0, 0), (first, 0)))


def _with_statistics(hidden, kernel, targets, temperature: float, softcap: float | None, smoothing: float):
    return chunked_logps(hidden, kernel, targets, temperature, True, softcap, smoothing)


def _logps_and_squares(hidden, kernel, targets, temperature: float, softcap: float | None):
    scored: Any = chunked_logps(hidden, kernel, targets, temperature, True, softcap)
    return *scored, log_sum_squares(*jax.lax.stop_gradient((hidden, kernel)), softcap)


def log_sum_squares(hidden, kernel, softcap: float | None = None):
    """`log sum_v p_v^2` `[N,S]` of softmax(logits), in columns; logits as in `chunked_logps`, at temperature 1."""

    def chunk(h):
        logps = jax.nn.log_softmax(_logits(h, kernel, 1.0, softcap), axis=-1)
        return jax.nn.logsumexp(2.0 * logps, axis=-1)

    return _rows(jax.lax.map(chunk, _columns(hidden, _width(hidden, kernel))), hidden.shape[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def chunked_logps(
    hidden, kernel, targets, temperature: float, statistics: bool = False, softcap: float | None = None,
    smoothing: float = 0.0,
):  # fmt: skip
    """Log-probs and entropies `[N,S]` of softmax(logits / temperature) at the targets `[N,S]`.

    With `statistics` also, without gradient, whether the target is the likeliest token and the mean logit. With
    `smoothing` e the log-prob is `(1 - e) log p(target) + e mean_v log p(v)`: label smoothing (arXiv 1512.00567).
    hidden `[N,S,D]` in the compute dtype, kernel `[D,V]`; logits are hidden @ kernel, capped softly. They are formed
    for a few columns at a time, in fp32, and again in the backward pass, which keeps only the log-sum-exp and the
    entropy of each token.
    """
    return _forward(hidden, kernel, targets, temperature, statistics, softcap, smoothing)[0]


def _logits(hidden, kernel, temperature: float, softcap: float | None):
    logits = jnp.matmul(hidden, kernel.astype(hidden.dtype), preferred_element_type=jnp.float32)
    return soft_cap(constrain(logits, "rows", None, "vocab"), softcap) / temperature


def _columns(x, width: int):
    """`[N,S,...]` as `[chunks,N,width,...]`, padded with zeros."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % width), *((0, 0),) * (x.ndim - 2)))
    return x.reshape(x.shape[0], -1, width, *x.shape[2:]).swapaxes(0, 1)


def _rows(x, length: int):
    """The inverse of `_columns`."""
    x = x.swapaxes(0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def _width(hidden, kernel) -> int:
    rows, length = hidden.shape[:2]
    return min(max(LOGITS_IN_FLIGHT // (rows * kernel.shape[1]), 1), length)


def _forward(hidden, kernel, targets, temperature: float, statistics: bool, softcap: float | None, smoothing: float):
    width, length = _width(hidden, kernel), hidden.shape[1]

    def chunk(x):
        h, t = x
        logits = _logits(h, kernel, temperature, softcap)
        normalizer = jax.nn.logsumexp(logits, axis=-1)
        # A masked sum instead of a gather: with the vocabulary cut over devices a gather would collect all of it.
        target = jnp.where(jnp.arange(logits.shape[-1]) == t[..., None], logits, 0.0).sum(-1)
        entropy = normalizer - (jnp.exp(logits - normalizer[..., None]) * logits).sum(-1)
        smoothed = (1 - smoothing) * target + smoothing * logits.mean(axis=-1) if smoothing else target
        found = smoothed - normalizer, entropy
        if statistics:
            found += (target >= logits.max(axis=-1)).astype(jnp.float32), logits.mean(axis=-1)
        return *found, normalizer

    out = jax.lax.map(chunk, (_columns(hidden, width), _columns(targets, width)))
    *found, normalizer = (_rows(x, length) for x in out)
    return tuple(found), (hidden, kernel, targets, found[1], normalizer)


def _backward(temperature: float, statistics: bool, softcap: float | None, smoothing: float, residuals, gradients):
    """d logp = onehot - p;  d entropy = -p (log p + entropy);  both over the logits, then through cap and product."""
    hidden, kernel, targets, entropy, normalizer = residuals
    width, length = _width(hidden, kernel), hidden.shape[1]

    def chunk(d_kernel, x):
        h, t, ent, norm, g_logp, g_entropy = x
        logits = _logits(h, kernel, temperature, softcap)
        logp = logits - norm[..., None]
        p = jnp.exp(logp)
        onehot = jnp.arange(logp.shape[-1]) == t[..., None]
        if smoothing:
            onehot = (1 - smoothing) * onehot + smoothing / logp.shape[-1]
        d = g_logp[..., None] * (onehot - p) - g_entropy[..., None] * p * (logp + ent[..., None])
        if softcap is not None:
            d *= 1.0 - (logits * (temperature / softcap)) ** 2
        d = (d / temperature).astype(h.dtype)
        d_hidden = jnp.einsum("ncv,dv->ncd", d, kernel.astype(h.dtype))
        d_kernel += jnp.einsum("ncd,ncv->dv", h, d, preferred_element_type=jnp.float32)
        return d_kernel, d_hidden

    parts = tuple(_columns(x, width) for x in (hidden, targets, entropy, normalizer, *gradients[:2]))
    d_kernel, d_hidden = jax.lax.scan(chunk, jnp.zeros(kernel.shape, jnp.float32), parts)
    return _rows(d_hidden, length).astype(hidden.dtype), d_kernel.astype(kernel.dtype), None


chunked_logps.defvjp(_forward, _backward)
