"""Corrections for samples that another policy drew: importance weights, and sequences to leave out."""

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.aggregation import as_float, as_mask, masked_mean, masked_sum

Array = jax.Array

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def importance_correction(
    old_logps, sample_logps, mask, mode: str = "sequence_mask", maximum=3.0, minimum=None
) -> tuple[Array, Array]:
    """Returns weights that correct for a sampler that differs from the trainer, and the ratios they came from.

    Shapes: `old_logps` (trainer), `sample_logps` (sampler), `mask` and both results `[N, T]`. The ratio is
    `exp(old_logps - sample_logps)` of each token, or of the whole row, `exp(sum_t(...))`, in the `sequence` modes (the
    same number on every token). `truncate` clips the ratio to [minimum, maximum]; `mask` sets ratios outside it to 0.
    None is no bound. A NaN difference (a token the sampler could not score) counts as ratio 1. No gradient flows.

    Both sides must be log-probs of the same distribution: full vocabulary, same temperature. The sum over tokens makes
    long rows leave the range sooner. Raises ValueError for an unknown mode. Source: truncated importance sampling,
    Ionides (2008); defaults of TRL (`sequence_mask`, 3.0); verl uses `token_truncate`, 2.0.
    """
    if mode not in MODES:
        raise ValueError(f"unknown importance correction {mode!r}; choose one of {', '.join(MODES)}")
    difference = jax.lax.stop_gradient(as_float(old_logps) - as_float(sample_logps))
    mask = as_mask(mask, difference.shape)
    difference = jnp.where(mask & ~jnp.isnan(difference), difference, 0.0)
    if mode.startswith("sequence"):
        difference = jnp.broadcast_to(difference.sum(axis=1, keepdims=True), mask.shape)
    ratio = jnp.exp(difference)
    if mode.endswith("truncate"):
        return jnp.clip(ratio, minimum, maximum), ratio
    lowest = -jnp.inf if minimum is None else minimum
    highest = jnp.inf if maximum is None else maximum
    return jnp.where((ratio >= lowest) & (ratio <= highest), ratio, 0.0), ratio


def off_policy_sequence_mask(advantages, sampling_logps, logps, mask, threshold) -> Array:
    """Returns 1.0 on rows to keep and 0.0 on bad rows that the policy has moved away from, `[N, T]`.

    Shapes: `advantages [N]` or `[N, T]`; `sampling_logps, logps, mask [N, T]`. A token is dropped where A < 0 and the
    mean over its row of `sampling_logps - logps` exceeds `threshold` (nats per token). NaN differences (tokens the
    sampler could not score) add nothing to the sum. No gradient flows. Multiply the policy loss by it; the KL term is
    not masked. Source: DeepSeek-V3.2, arXiv 2512.02556.
    """
    logps = jax.lax.stop_gradient(as_float(logps))
    difference = jnp.nan_to_num(as_float(sampling_logps) - logps, nan=0.0)
    drift = masked_mean(difference, mask, axis=-1, keepdims=True)
    advantages = as_float(advantages)
    advantages = advantages[:, None] if advantages.ndim == 1 else advantages
    return jnp.broadcast_to((advantages >= 0) | (drift <= threshold), logps.shape).astype(jnp.float32)


def mismatch_kl(old_logps, sample_logps, mask) -> Array:
    """Returns the mean per token of the k3 estimate of KL(sampler || trainer), a scalar in nats; 0 when they agree.

    Shapes: all `[N, T]`. With `x = old_logps - sample_logps`: `mean(exp(x) - 1 - x)`, never negative.
    """
    x = as_float(old_logps) - as_float(sample_logps)
    x = jnp.where(as_mask(mask, x.shape) & ~jnp.isnan(x), x, 0.0)
    return masked_sum(jnp.expm1(x) - x, mask) / jnp.maximum(masked_sum(jnp.ones_like(x), mask), 1.0)
