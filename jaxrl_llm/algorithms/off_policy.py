"""Corrections for samples that another policy drew: importance weights, and sequences to leave out."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.aggregation import as_float, as_mask, masked_mean, masked_sum
from jaxrl_llm.algorithms.losses import bounded_log_ratio, bounded_ratio

Array = jax.Array

MODES = (
    "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_truncate", "geometric_mask",
)  # fmt: skip
CRITERIA = (
    "token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2",
    "seq_mean_k3", "seq_max_k2", "seq_max_k3", "token_kl", "token_tv", "seq_mean_kl", "seq_mean_tv",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Criterion:
    """A test that a token or a row must pass: its divergence is within [low, high]; of k1, the logs of the ratios."""

    name: str
    low: float
    high: float


def masked_log_ratio(logps, other_logps, mask) -> Array:
    """Returns `logps - other_logps` `[N, T]` without gradient, 0 outside the mask and where it is NaN.

    It is NaN on tokens that a sampler could not score.
    """
    x = jax.lax.stop_gradient(as_float(logps) - as_float(other_logps))
    return jnp.where(as_mask(mask, x.shape) & ~jnp.isnan(x), x, 0.0)


def importance_correction(
    old_logps, sample_logps, mask, mode: str = "sequence_mask", maximum=3.0, minimum=None
) -> tuple[Array, Array]:
    """Returns weights that correct for a sampler that differs from the trainer, and the ratios they came from.

    Shapes: `old_logps` (trainer), `sample_logps` (sampler), `mask` and both results `[N, T]`. The ratio is
    `exp(old_logps - sample_logps)` of each token, or of the whole row, `exp(sum_t(...))`, in the `sequence` modes (the
    same number on every token), or `exp(mean_t(...))` in the `geometric` ones. `truncate` clips the ratio to [minimum,
    maximum]; `mask` sets ratios outside it to 0 (`token_mask` is IcePop, arXiv 2510.18855). None is no bound. A NaN
    difference (a token the sampler could not score) counts as ratio 1. Logs of ratios, also of rows, are bounded to
    +-20: an infinite one would be all that the mean of a batch says. No gradient flows.

    Both sides must be log-probs of the same distribution: full vocabulary, same temperature. The sum over tokens makes
    long rows leave the range sooner. Raises ValueError for an unknown mode. Source: truncated importance sampling,
    Ionides (2008); defaults of TRL (`sequence_mask`, 3.0); verl uses `token_truncate`, 2.0.
    """
    if mode not in MODES:
        raise ValueError(f"unknown importance correction {mode!r}; choose one of {', '.join(MODES)}")
    x = masked_log_ratio(old_logps, sample_logps, mask)
    if mode.startswith("sequence"):
        x = jnp.broadcast_to(x.sum(axis=1, keepdims=True), x.shape)
    elif mode.startswith("geometric"):
        x = jnp.broadcast_to(masked_mean(x, mask, axis=1, keepdims=True), x.shape)
    ratio = bounded_ratio(x)
    if mode.endswith("truncate"):
        return jnp.clip(ratio, minimum, maximum), ratio
    lowest = -jnp.inf if minimum is None else minimum
    highest = jnp.inf if maximum is None else maximum
    return jnp.where((ratio >= lowest) & (ratio <= highest), ratio, 0.0), ratio


def mean_weight(weights, mask, mode: str) -> Array:
    """Returns the mean of the weights of a batch, a scalar by which batch normalisation divides them.

    Shapes: `weights [N, T]` of `importance_correction`, `mask [N, T]`. The mean is over tokens, or over rows that have
    tokens in the `sequence` and `geometric` modes. 1 where all weights are 0. Source: verl's
    `rollout_is_batch_normalize`.
    """
    if mode.startswith("token"):
        mean = masked_mean(weights, mask)
    else:
        mean = masked_mean(masked_mean(weights, mask, axis=1), as_mask(mask, weights.shape).any(axis=1))
    return jnp.where(mean > 1e-8, mean, 1.0)


def rejection_criteria(names: str, bounds: str) -> tuple[Criterion, ...]:
    """Reads criteria joined by commas, `"token_k2,seq_mean_k1"`, and the bounds of each, `"0.5,0.999_1.001"`.

    One bound stands for all of them. `k1` has two, `low_high`, on the ratio; of one, `high`, the other is `1 / high`.
    The others have a largest divergence. Raises ValueError for an unknown criterion, one that is named twice, and
    bounds that do not fit.
    """
    criteria, named = [], [name.strip() for name in names.split(",")]
    given = [bound.strip() for bound in bounds.split(",")]
    if len(given) not in (1, len(named)):
        raise ValueError(f"{bounds!r} has {len(given)} bounds for {len(named)} criteria; give one, or one of each")
    for name, bound in zip(named, given * len(named) if len(given) == 1 else given, strict=False):
        if name not in CRITERIA or named.count(name) > 1:
            fault = "is named twice" if name in CRITERIA else "is unknown"
            raise ValueError(f"the criterion {name!r} {fault}; choose from {', '.join(CRITERIA)}")
        try:
            numbers = [float(number) for number in bound.split("_")]
        except ValueError:
            numbers = []
        most = 2 if name.endswith("k1") else 1
        if not 1 <= len(numbers) <= most or not all(0 < number < math.inf for number in numbers):
            form = "low_high, two positive ratios" if most == 2 else "one positive number"
            raise ValueError(f"{name} has the bound {bound!r}, but takes {form}")
        low, high = (numbers[0], numbers[-1]) if len(numbers) == 2 else (1 / numbers[0], numbers[0])
        if most == 2 and low > high:
            raise ValueError(f"{name} has the bound {bound!r}: the first number is the smaller one")
        criteria.append(Criterion(name, math.log(low), math.log(high)) if most == 2 else Criterion(name, 0.0, high))
    return tuple(criteria)


def rejection_mask(logps, sample_logps, mask, criteria: tuple[Criterion, ...]) -> Array:
    """Returns 1.0 on tokens that pass every criterion and 0.0 on others, `[N, T]`; 1.0 outside the mask.

    Shapes: all `[N, T]`. With `x = logps - sample_logps`, bounded to +-20: `k1 = -x`, so that its bounds are of the
    sampler's probability over the trainer's, `k2 = x^2 / 2`, `k3 = exp(x) - 1 - x`; of each token, or the sum, the mean
    (`seq_mean_k1`: the geometric mean of the ratios) or the maximum over the row, which is kept or dropped whole. `kl`
    and `tv` are of the token or any other, with the sampler's probability p and the trainer's q of the token, each from
    1e-6 to 1 - 1e-6: `p log(p / q) + (1 - p) log((1 - p) / (1 - q))` and `|p - q|`. NaN differences count as 0. No
    gradient flows.
    Source: verl 0.9, `rollout_rs`; Liu et al., "When Speed Kills Stability"; kl and tv are OpenRLHF 0.11's gates.
    """
    x = bounded_log_ratio(masked_log_ratio(logps, sample_logps, mask))
    trainer, sampler = (jax.lax.stop_gradient(as_float(scores)) for scores in (logps, sample_logps))
    sampler = jnp.where(jnp.isnan(sampler), trainer, sampler)
    p, q = (jnp.clip(jnp.exp(scores), 1e-6, 1 - 1e-6) for scores in (sampler, trainer))
    divergences = {
        "k1": -x, "k2": 0.5 * jnp.square(x), "k3": jnp.expm1(x) - x, "tv": jnp.abs(p - q),
        "kl": p * jnp.log(p / q) + (1 - p) * jnp.log((1 - p) / (1 - q)),
    }  # fmt: skip
    keep = jnp.ones(x.shape, bool)
    for criterion in criteria:
        level, divergence = criterion.name.rsplit("_", 1)
        values = divergences[divergence]
        if level == "seq_sum":
            values = masked_sum(values, mask, axis=1, keepdims=True)
        elif level == "seq_mean":
            values = masked_mean(values, mask, axis=1, keepdims=True)
        elif level == "seq_max":  # never negative, and 0 outside the mask
            values = values.max(axis=1, keepdims=True)
        keep &= (values >= criterion.low) & (values <= criterion.high)
    return jnp.where(as_mask(mask, x.shape), keep, True).astype(x.dtype)


def proximal_share(versions, version) -> Array:
    """Returns the share of the way from a token's sampler to the next policy that the policy of `version` steps has
    gone.

    Shapes: `versions` any, the training steps of the policies that sampled, negative where none did (the share is 0
    there), the result the same. Formula: `a / (a + 1)` of the age `a = version - versions`. Source: A-3PO / AReaL,
    `prox_logp_method=loglinear`, where the policy that is updated counts as one step further than the proximal one.
    """
    age = jnp.where(jnp.asarray(versions) < 0, 0, jnp.maximum(version - jnp.asarray(versions), 0)).astype(jnp.float32)
    return age / (age + 1.0)


def interpolated_logps(sample_logps, logps, share) -> Array:
    """Returns log-probs between those of the sampler and those of the policy, `[N, T]`, without gradient.

    Shapes: all `[N, T]`. Formula: `sample_logps + share * (logps - sample_logps)`, linear in the logarithms; the
    policy's where the sampler's are NaN. Source: A-3PO / AReaL, the proximal policy of decoupled PPO without a pass.
    """
    logps = jax.lax.stop_gradient(as_float(logps))
    between = as_float(sample_logps) + share * (logps - as_float(sample_logps))
    return jnp.where(jnp.isnan(between), logps, between)


def off_policy_sequence_mask(advantages, sampling_logps, logps, mask, threshold) -> Array:
    """Returns 1.0 on rows to keep and 0.0 on bad rows that the policy has moved away from, `[N, T]`.

    Shapes: `advantages [N]` or `[N, T]`; `sampling_logps, logps, mask [N, T]`. A token is dropped where A < 0 and the
    mean over its row of `sampling_logps - logps` exceeds `threshold` (nats per token). NaN differences (tokens the
    sampler could not score) add nothing to the sum. No gradient flows. Multiply the policy loss by it; the KL term is
    not masked. Source: DeepSeek-V3.2, arXiv 2512.02556.
    """
    fall = masked_log_ratio(sampling_logps, logps, mask)
    drift = masked_mean(fall, mask, axis=-1, keepdims=True)
    advantages = as_float(advantages)
    advantages = advantages[:, None] if advantages.ndim == 1 else advantages
    return jnp.broadcast_to((advantages >= 0) | (drift <= threshold), fall.shape).astype(jnp.float32)


def mismatch_kl(old_logps, sample_logps, mask) -> Array:
    """Returns the mean per token of the k3 estimate of KL(sampler || trainer), a scalar in nats; 0 when they agree.

    Shapes: all `[N, T]`. With `x = old_logps - sample_logps`, bounded to +-20: `mean(exp(x) - 1 - x)`, never negative.
    """
    x = bounded_log_ratio(masked_log_ratio(old_logps, sample_logps, mask))
    return masked_mean(jnp.expm1(x) - x, mask)
