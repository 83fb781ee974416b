"""The clipped surrogate of policy losses, and which tokens and rows it clips."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.aggregation import masked_mean
from jaxrl_llm.algorithms.losses import Metric, Metrics, log_ratio_at, loss_inputs

Array = jax.Array


def clipped_surrogate(ratio: Array, advantages: Array, epsilon_low, epsilon_high, delta=None) -> Array:
    """Returns `-min(min(ratio, delta) * A, clip(ratio, 1 - low, 1 + high) * A)`."""
    clipped = jnp.clip(ratio, 1.0 - epsilon_low, 1.0 + epsilon_high)
    if delta is not None:
        ratio = jnp.minimum(ratio, delta)
    return -jnp.minimum(ratio * advantages, clipped * advantages)


class ClipFractions(NamedTuple):
    """Float indicators `[N, T]`, 1 on tokens whose ratio left the range; means over the mask are the fractions."""

    low: Array
    high: Array
    region: Array
    dual: Array


def clip_fractions(
    logps, old_logps, advantages, epsilon_low, epsilon_high, *, mask=None, level: str = "token", dual_clip=None
) -> ClipFractions:
    """Returns which tokens the clip of `ppo_clip` or `gspo` acts on, as `ClipFractions` of `[N, T]` indicators.

    `low`: ratio below 1 - epsilon_low and A < 0; `high`: ratio above 1 + epsilon_high and A > 0; `region`: either. This
    is TRL's `clip_ratio/*`; `region` is also verl's `pg_clipfrac`, since the clipped branch is the larger loss on just
    those tokens. `dual` (verl's `pg_clipfrac_lower`): A < 0 and ratio above `dual_clip`, zero without it. `level` is
    that of the ratio: see `log_ratio_at`, which raises ValueError.
    """
    _, log_ratio, advantages = loss_inputs(logps, old_logps, advantages, mask)
    ratio = jnp.exp(jax.lax.stop_gradient(log_ratio_at(level, log_ratio, mask)))
    low, high = (ratio < 1.0 - epsilon_low) & (advantages < 0), (ratio > 1.0 + epsilon_high) & (advantages > 0)
    dual = jnp.zeros_like(low) if dual_clip is None else (ratio > dual_clip) & (advantages < 0)
    return ClipFractions(*(x.astype(jnp.float32) for x in (low, high, low | high, dual)))


def reduction_at(level: str) -> str:
    """Returns the reduction of an indicator of clipped ratios: of rows where the ratio is a row's."""
    return "mean" if level == "token" else "row_mean"


def clip_metrics(
    logps, old_logps, advantages, epsilon_low, epsilon_high, *, mask, level: str = "token", dual_clip=None
) -> Metrics:
    """Returns TRL's `clip_ratio/*`: the shares of tokens (of rows, at the levels of sequences) that were clipped, the
    smallest share of a row's tokens below and the largest above."""
    clipped = clip_fractions(
        logps, old_logps, advantages, epsilon_low, epsilon_high, mask=mask, level=level, dual_clip=dual_clip
    )
    mask = jnp.ones_like(clipped.low) if mask is None else mask
    low, high = (masked_mean(x, mask, axis=-1) for x in (clipped.low, clipped.high))
    mean = reduction_at(level)
    metrics = {
        "clip_ratio/low_mean": Metric(clipped.low, mean),
        "clip_ratio/high_mean": Metric(clipped.high, mean),
        "clip_ratio/region_mean": Metric(clipped.region, mean),
        "clip_ratio/low_min": Metric(low, "min"),
        "clip_ratio/high_max": Metric(high, "max"),
    }
    return metrics if dual_clip is None else metrics | {"clip_ratio/dual_mean": Metric(clipped.dual, mean)}
