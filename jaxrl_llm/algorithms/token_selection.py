"""Choices of a few tokens of the optimizer batch, which a policy loss then treats differently from the others."""

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.aggregation import as_float, as_mask, masked_mean
from jaxrl_llm.algorithms.clipping import clipped_surrogate
from jaxrl_llm.algorithms.losses import loss_inputs

Array = jax.Array


def _covariance(logps: Array, advantages: Array, mask: Array) -> Array:
    """Returns each token's term of cov(advantage, log-prob) over the masked tokens, -inf outside; no gradient."""
    logps = jax.lax.stop_gradient(logps)
    terms = (advantages - masked_mean(advantages, mask)) * (logps - masked_mean(logps, mask))
    return jnp.where(mask, terms, -jnp.inf)


def _largest(values: Array, count: Array) -> Array:
    """Returns booleans, true on the `count` largest entries of `values` (all axes together) that are not -inf."""
    flat = values.reshape(-1)
    order = jnp.argsort(-flat)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(flat.size))
    return ((rank < count) & (flat > -jnp.inf)).reshape(values.shape)


def _count_of(mask: Array, fraction) -> Array:
    """Returns how many tokens are a fraction of those in the mask, at least 1."""
    return jnp.maximum(jnp.floor(fraction * mask.sum(dtype=jnp.float32)), 1.0)


def clip_cov_tokens(
    logps, old_logps, advantages, epsilon_low, epsilon_high, *, mask, key, fraction=2e-4, lower=1.0, upper=5.0
) -> Array:
    """Returns booleans `[N, T]`, true on the tokens that `clip_cov` takes out; see there."""
    logps, log_ratio, advantages = loss_inputs(logps, old_logps, advantages, mask)
    mask = as_mask(mask, logps.shape)
    is_clipped = (
        clipped_surrogate(jnp.exp(log_ratio), advantages, epsilon_low, epsilon_high) > -jnp.exp(log_ratio) * advantages
    )
    covariance = _covariance(logps, advantages, mask)
    candidate = (covariance > lower) & (covariance < upper) & ~is_clipped
    draw = jnp.where(candidate, jax.random.uniform(key, logps.shape), -jnp.inf)
    return _largest(draw, _count_of(mask, fraction))


def kl_cov_tokens(
    logps, old_logps, advantages, epsilon_low=None, epsilon_high=None, *, mask, fraction=2e-4, kl_coef=1.0
) -> Array:
    """Returns booleans `[N, T]`, true on the tokens that `kl_cov` holds back; see there."""
    logps, _, advantages = loss_inputs(logps, old_logps, advantages, mask)
    mask = as_mask(mask, logps.shape)
    return _largest(_covariance(logps, advantages, mask), _count_of(mask, fraction))


def m2po_tokens(logps, old_logps, advantages, epsilon_low=None, epsilon_high=None, *, mask, threshold=0.04) -> Array:
    """Returns booleans `[N, T]`, true on the tokens that `m2po` takes out; see there."""
    _, log_ratio, _ = loss_inputs(logps, old_logps, advantages, mask)
    mask = as_mask(mask, log_ratio.shape)
    squares = jnp.where(mask, jnp.square(jax.lax.stop_gradient(log_ratio)), jnp.inf).reshape(-1)
    order = jnp.argsort(squares)
    # The mean of the smallest so far rises along the order, so that the tokens to keep come first.
    kept = jnp.cumsum(squares[order]) <= threshold * jnp.arange(1, squares.size + 1)
    return mask & ~jnp.zeros_like(kept).at[order].set(kept).reshape(mask.shape)


def top_entropy_mask(entropy, mask, quantile) -> Array:
    """Returns booleans `[N, T]`, true on the masked tokens in the top `quantile` share of entropies.

    Shapes: `entropy, mask [N, T]`. Keeps `entropy >= q` with q the (1 - quantile) quantile, linearly interpolated, over
    all masked tokens of the batch; `quantile=0.2` keeps the top fifth, 1.0 keeps all. Multiply the policy loss by it;
    the loss weights keep counting every token, and the KL term is not masked. Source: arXiv 2506.01939.
    """
    entropy = jax.lax.stop_gradient(as_float(entropy))
    mask = as_mask(mask, entropy.shape)
    ordered = jnp.sort(jnp.where(mask, entropy, jnp.inf).reshape(-1))
    position = jnp.maximum(mask.sum() - 1, 0) * as_float(1.0 - quantile)
    below = jnp.floor(position).astype(jnp.int32)
    above = jnp.ceil(position).astype(jnp.int32)
    low, high = ordered[below], ordered[above]
    threshold = jnp.where(low == high, low, low + (position - below) * (high - low))
    return mask & (entropy >= threshold)
