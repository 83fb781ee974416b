"""Policy-gradient losses, one function each, all called the same way and all returning one number per token.

    loss = f(logps, old_logps, advantages, epsilon_low, epsilon_high, mask=mask, **options)      # [N, T]

- `logps [N, T]` carry the gradient; `old_logps [N, T]` belong to the policy the samples are measured against.
- `advantages` are `[N]`, one per row, or `[N, T]`. Their gradient is never taken.
- `epsilon_low`, `epsilon_high` bound the ratio pi / pi_old as each function says. A loss without a clip range accepts
  them and does not read them, so that one objective can call any loss by name.
- `mask [N, T]` is true on the tokens that count. Losses over whole sequences need it; for the others it is optional and
  makes the log-ratio 0 outside it, so that padding can neither overflow nor receive a gradient.
- A loss that clips returns `(loss, metrics)`: where it clipped, as `Metric`s that say how they are reduced.

In this order:

    a clipped ratio             of tokens: ppo_clip (PPO, GRPO, DAPO), gmpo; of rows: gspo, gspo_token, luspo, rloo
    a bounded weight            cispo, sapo, vespo
    REINFORCE, off policy       reinforce, importance_sampling, rollout_is, topr, dro
    bounded probabilities       dppo, dppo_tv, dppo_kl, ipo, opd
    regression to the reward    a2po
    some tokens apart           clip_cov, kl_cov, m2po; which ones says `token_selection`
    the critic                  value_clip

The caller reduces with `sum(loss_weights * loss)` (`aggregation.loss_weights`) and adds KL and entropy terms. A loss
that is one number per sequence is spread over its row: every token of the row holds that number, so that the
`sequence` aggregation (mean over rows of the row's token mean) gives back the mean over sequences.

The clip-higher names follow DAPO: the ratio stays within [1 - epsilon_low, 1 + epsilon_high].
"""

import math
import warnings

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.aggregation import as_float, as_mask, magnitude, masked_mean, masked_sum
from jaxrl_llm.algorithms.clipping import (  # noqa: F401 (ClipFractions is read from here too)
    ClipFractions,
    clip_fractions,
    clip_metrics,
    clipped_surrogate,
    reduction_at,
)
from jaxrl_llm.algorithms.losses import (
    Metric,
    Metrics,
    bounded_log_ratio,
    bounded_ratio,
    declare,
    log_ratio_at,
    loss_inputs,
)
from jaxrl_llm.algorithms.token_selection import (  # noqa: F401 (top_entropy_mask is read from here too)
    clip_cov_tokens,
    kl_cov_tokens,
    m2po_tokens,
    top_entropy_mask,
)

Array = jax.Array

# The losses, which algorithm.loss knows by name.
__all__ = (
    "a2po",
    "cispo",
    "clip_cov",
    "dppo",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "gmpo",
    "gspo",
    "gspo_token",
    "importance_sampling",
    "ipo",
    "kl_cov",
    "luspo",
    "m2po",
    "opd",
    "ppo_clip",
    "reinforce",
    "rloo",
    "rollout_is",
    "sapo",
    "topr",
    "vespo",
)
EPSILONS = ("epsilon_low", "epsilon_high")


def ppo_clip(
    logps, old_logps, advantages, epsilon_low, epsilon_high, delta=None, dual_clip=None, *, mask=None
) -> tuple[Array, Metrics]:
    """Returns the clipped surrogate `[N, T]` of PPO, GRPO and DAPO, and `clip_ratio/*`.

    Formula, r = exp(logps - old_logps): `-min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A)`.
    `delta` bounds r from above in the unclipped branch too (INTELLECT-2, arXiv 2505.07291): for A < 0 the loss stops at
    `-delta A`, so delta is larger than 1 + epsilon_high. `dual_clip` bounds the loss of A < 0 by `-dual_clip A`
    (arXiv 1912.09729; verl always uses 3.0) and is larger than 1, else ValueError.
    Source: PPO, arXiv 1707.06347; clip-higher, DAPO, arXiv 2503.14476.
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip bounds the ratio of bad samples from above and must exceed 1; got {dual_clip}")
    _, log_ratio, advantages = loss_inputs(logps, old_logps, advantages, mask)
    loss = clipped_surrogate(bounded_ratio(log_ratio), advantages, epsilon_low, epsilon_high, delta)
    if dual_clip is not None:
        loss = jnp.where(advantages < 0, jnp.minimum(loss, -dual_clip * advantages), loss)
    return loss, clip_metrics(logps, old_logps, advantages, epsilon_low, epsilon_high, mask=mask, dual_clip=dual_clip)


@declare(ratio="sequence")
def gspo(logps, old_logps, advantages, epsilon_low, epsilon_high, delta=None, *, mask) -> tuple[Array, Metrics]:
    """Returns the clipped surrogate of the length-normalised sequence ratio, spread over `[N, T]`.

    Formula: `s = exp(mean_t(logps - old_logps))` over the masked tokens, loss `-min(s A, clip(s) A)` on every token of
    the row; aggregate with `sequence`. The paper's ranges are small, 3e-4 below and 4e-4 above. `delta` as `ppo_clip`.
    Source: GSPO, arXiv 2507.18071.
    """
    _, log_ratio, advantages = loss_inputs(logps, old_logps, advantages, mask)
    ratio = bounded_ratio(masked_mean(log_ratio, mask, axis=-1, keepdims=True))
    loss = clipped_surrogate(ratio, advantages, epsilon_low, epsilon_high, delta)
    return loss, clip_metrics(logps, old_logps, advantages, epsilon_low, epsilon_high, mask=mask, level="sequence")


@declare(ratio="sequence")
def gspo_token(logps, old_logps, advantages, epsilon_low, epsilon_high, *, mask) -> tuple[Array, Metrics]:
    """Returns GSPO's loss `[N, T]` with the gradient of each token scaled by that token's own advantage.

    Formula: `s_t = stop(s) * exp(logps - stop(logps))` with s as in `gspo`; the value equals `gspo`, and so does the
    gradient when the advantage is one number per row. Source: GSPO-token, arXiv 2507.18071.
    """
    _, log_ratio, advantages = loss_inputs(logps, old_logps, advantages, mask)
    sequence = masked_mean(jax.lax.stop_gradient(log_ratio), mask, axis=-1, keepdims=True)
    # 0, with the gradient of the log-probs.
    moving = as_float(logps) - jax.lax.stop_gradient(as_float(logps))
    ratio = bounded_ratio(sequence + jnp.where(as_mask(mask, moving.shape), moving, 0.0))
    loss = clipped_surrogate(ratio, advantages, epsilon_low, epsilon_high)
    return loss, clip_metrics(logps, old_logps, advantages, epsilon_low, epsilon_high, mask=mask, level="sequence")


@declare(ratio="sequence")
def luspo(logps, old_logps, advantages, epsilon_low, epsilon_high, delta=None, *, mask) -> tuple[Array, Metrics]:
    """Returns GSPO's loss times the number of tokens of its row, spread over `[N, T]`.

    Aggregated with `sequence` this is the mean over rows of `len * loss`; `gspo` aggregated with `sequence_sum` is the
    same number. Source: LUSPO, arXiv 2602.05261.
    """
    lengths = as_mask(mask).sum(axis=-1, keepdims=True)
    loss, metrics = gspo(logps, old_logps, advantages, epsilon_low, epsilon_high, delta, mask=mask)
    return lengths * loss, metrics


@declare(ratio="sequence_sum")
def rloo(logps, old_logps, advantages, epsilon_low, epsilon_high, *, mask) -> tuple[Array, Metrics]:
    """Returns the clipped surrogate of the whole sequence's ratio, spread over `[N, T]`.

    Formula: `s = exp(sum_t(logps - old_logps))`, not length-normalised, loss `-min(s A, clip(s) A)` on every token of
    the row; aggregate with `sequence`. The sum is bounded to +-20. Source: RLOO, arXiv 2402.14740, clipped as in TRL.
    """
    _, log_ratio, advantages = loss_inputs(logps, old_logps, advantages, mask)
    ratio = bounded_ratio(masked_sum(log_ratio, mask, axis=-1, keepdims=True))
    loss = clipped_surrogate(ratio, advantages, epsilon_low, epsilon_high)
    return loss, clip_metrics(logps, old_logps, advantages, epsilon_low, epsilon_high, mask=mask, level="sequence_sum")


def gmpo(logps, old_logps, advantages, epsilon_low, epsilon_high, *, mask) -> tuple[Array, Metrics]:
    """Returns the loss of the geometric mean of one-sidedly clipped token ratios, spread over `[N, T]`.

    Formula: log-ratios are clipped to [-epsilon_low, epsilon_high], only from above where A > 0 and only from below
    elsewhere; `s = exp(mean_t clipped)`, loss `-s A` on every token of the row; aggregate with `sequence`. The epsilons
    bound the log-ratio; the paper uses 0.4. Source: GMPO, arXiv 2507.20673.
    """
    _, log_ratio, advantages = loss_inputs(logps, old_logps, advantages, mask)
    clipped = jnp.where(advantages > 0, jnp.minimum(log_ratio, epsilon_high), jnp.maximum(log_ratio, -epsilon_low))
    loss = -bounded_ratio(masked_mean(clipped, mask, axis=-1, keepdims=True)) * advantages
    # The epsilons bound the log-ratio: as bounds of the ratio they are 1 - exp(-low) and exp(high) - 1.
    low, high = -jnp.expm1(-as_float(epsilon_low)), jnp.expm1(as_float(epsilon_high))
    return loss, clip_metrics(logps, old_logps, advantages, low, high, mask=mask)


@declare(ratio="level", unread=("epsilon_low",))
def cispo(
    logps, old_logps, advantages, epsilon_low, epsilon_high, *, mask=None, minimum=None, level="token"
) -> tuple[Array, Metrics]:
    """Returns REINFORCE with a capped importance weight, `-stop(min(r, epsilon_high)) A logps`, `[N, T]`.

    `epsilon_high` is the cap of the ratio itself (5.0 is recommended), not a distance from 1; a number of 1 or less
    shrinks the weight of on-policy samples too, and warns. `minimum` is an optional lower cap. verl's two-sided form is
    `epsilon_high=1 + eps, minimum=1 - eps`. `epsilon_low` is not read. No gradient flows through the weight.
    `level="sequence"` weighs a row by its length-normalised ratio (`log_ratio_at`; TRL's importance_sampling_level).
    Source: CISPO, MiniMax-M1, arXiv 2506.13585; cap as in ScaleRL, arXiv 2510.13786.
    """
    if isinstance(epsilon_high, (int, float)) and epsilon_high <= 1:
        warnings.warn(
            f"cispo reads epsilon_high as the cap of the ratio itself: {epsilon_high} caps the weight of every sample "
            "at that, on-policy ones too; the usual value is 5.0",
            stacklevel=2,
        )
    clipped = clip_fractions(logps, old_logps, advantages, 0.0, epsilon_high - 1.0, mask=mask, level=level)
    logps, log_ratio, advantages = loss_inputs(logps, old_logps, advantages, mask)
    weights = jnp.clip(jnp.exp(log_ratio_at(level, log_ratio, mask)), minimum, epsilon_high)
    metrics = {"cispo_clip_ratio": Metric(clipped.high, reduction_at(level))}
    return -jax.lax.stop_gradient(weights) * advantages * logps, metrics


@declare(ratio="level", unread=EPSILONS)
def sapo(
    logps, old_logps, advantages, epsilon_low=None, epsilon_high=None, *, mask=None,
    temperature_positive=1.0, temperature_negative=1.05, level="token",
) -> Array:  # fmt: skip
    """Returns the soft-gated surrogate `[N, T]`: a sigmoid of the ratio in place of a clip.

    Formula: `-A (4 / tau) sigmoid(tau (r - 1))`, tau = temperature_positive where A > 0, else temperature_negative. The
    epsilons are not read. `level="sequence"` takes the length-normalised ratio of the row (`log_ratio_at`).
    Source: SAPO, arXiv 2511.20347.
    """
    _, log_ratio, advantages = loss_inputs(logps, old_logps, advantages, mask)
    tau = jnp.where(advantages > 0, temperature_positive, temperature_negative)
    ratio = bounded_ratio(log_ratio_at(level, log_ratio, mask))
    return -advantages * (4.0 / tau) * jax.nn.sigmoid(tau * (ratio - 1.0))


@declare(unread=EPSILONS)
def vespo(
    logps, old_logps, advantages, epsilon_low=None, epsilon_high=None, *, mask, importance_weights=None,
    k_positive=2.0, lambda_positive=3.0, k_negative=3.0, lambda_negative=2.0,
) -> tuple[Array, Metrics]:  # fmt: skip
    """Returns REINFORCE `[N, T]` weighted by a gamma-shaped function of the sequence ratio, `-stop(phi(w)) A logps`.

    Formula: `w = exp(sum_t log-ratio [+ sum_t log importance_weights])`, `phi(w) = exp(lambda + k log w - lambda w)`,
    which is 1 at w = 1; (k, lambda) are the positive pair where A >= 0. Token log-ratios are bounded to +-20 and log w
    to [log 1e-8, 20]. `importance_weights [N, T]` or `[N, 1]` (`off_policy.importance_correction`) enter w, so the
    caller does not multiply the loss by them again. The epsilons are not read. The metric `vespo/phi_seq_mean` is phi,
    a mean over rows. Source: VESPO, arXiv 2602.10693.
    """
    logps, log_ratio, advantages = loss_inputs(logps, old_logps, advantages, mask)
    lowest = math.log(1e-8)
    log_w = masked_sum(bounded_log_ratio(log_ratio), mask, axis=-1, keepdims=True)
    if importance_weights is not None:
        extra = jnp.clip(jnp.log(as_float(importance_weights)), lowest, 20.0)
        log_w = log_w + (masked_sum(extra, mask, axis=-1, keepdims=True) if extra.shape[-1] > 1 else extra)
    log_w = jnp.clip(log_w, lowest, 20.0)
    k = jnp.where(advantages >= 0, k_positive, k_negative)
    lam = jnp.where(advantages >= 0, lambda_positive, lambda_negative)
    phi = jax.lax.stop_gradient(jnp.exp(lam + k * log_w - lam * jnp.exp(log_w)))
    return -phi * advantages * logps, {"vespo/phi_seq_mean": Metric(phi, "row_mean")}


@declare(old_logps="unread", unread=EPSILONS)
def reinforce(logps, old_logps, advantages, epsilon_low=None, epsilon_high=None, *, mask=None) -> Array:
    """Returns `-A logps`, `[N, T]`; `old_logps` and the epsilons are not read.

    Source: REINFORCE, Williams (1992); with group advantages it is GPG, arXiv 2504.02546.
    """
    logps, _, advantages = loss_inputs(logps, old_logps, advantages, mask)
    return -advantages * logps


@declare(old_logps="sampler", unread=EPSILONS)
def importance_sampling(logps, old_logps, advantages, epsilon_low=None, epsilon_high=None, *, mask=None) -> Array:
    """Returns the importance-weighted loss `-r A`, `[N, T]`, without a bound.

    `old_logps` are the sampler's log-probs; the epsilons are not read. Source: `importance_sampling` of Tinker and
    SkyRL, which sum it over tokens (aggregation `token_sum`).
    """
    _, log_ratio, advantages = loss_inputs(logps, old_logps, advantages, mask)
    return -bounded_ratio(log_ratio) * advantages


@declare(old_logps="sampler")
def rollout_is(logps, old_logps, advantages, epsilon_low=0.2, epsilon_high=0.2, *, mask=None) -> tuple[Array, Metrics]:
    """Returns REINFORCE weighted by the ratio, 0 where that left its range, `-keep stop(r) A logps`, `[N, T]`.

    A token is kept where `1 - epsilon_low < r < 1 + epsilon_high`, whatever the sign of A. `old_logps` are the
    sampler's log-probs. The metric `clip_ratio/region_mean` is the share of tokens that are dropped. Source: GLM-5,
    arXiv 2602.15763 (double-sided importance sampling); SkyRL, `rollout_is`.
    """
    logps, log_ratio, advantages = loss_inputs(logps, old_logps, advantages, mask)
    ratio = jax.lax.stop_gradient(bounded_ratio(log_ratio))
    keep = (ratio > 1.0 - epsilon_low) & (ratio < 1.0 + epsilon_high)
    loss = -jnp.where(keep, ratio, 0.0) * advantages * logps
    return loss, {"clip_ratio/region_mean": Metric((~keep).astype(jnp.float32))}


@declare(old_logps="sampler", unread=EPSILONS)
def topr(logps, old_logps, advantages, epsilon_low=None, epsilon_high=None, *, mask) -> Array:
    """Returns tapered off-policy REINFORCE, `-w A logps` `[N, T]`: w is 1 where A >= 0, else the row's ratio up to 1.

    Formula: `w = stop(min(1, exp(sum_t log-ratio)))` of rows with A < 0, so that completions which the policy has moved
    away from already are not pushed further. `old_logps` are the sampler's log-probs; the epsilons are not read.
    Source: TOPR, arXiv 2503.14286.
    """
    logps, log_ratio, advantages = loss_inputs(logps, old_logps, advantages, mask)
    row = jnp.exp(jnp.minimum(log_ratio.sum(axis=1, keepdims=True), 0.0))
    weights = jax.lax.stop_gradient(jnp.where(advantages >= 0, 1.0, row))
    return -weights * advantages * logps


@declare(unread=EPSILONS)
def dro(logps, old_logps, advantages, epsilon_low=None, epsilon_high=None, *, mask=None, beta=0.1) -> Array:
    """Returns REINFORCE with a quadratic penalty, `-(A logps - beta / 2 (logps - old_logps)^2)`, `[N, T]`.

    The epsilons are not read. Source: Direct Reward Optimisation, arXiv 2405.19107; verl 0.9, `dro`, which has no
    default of beta.
    """
    logps, log_ratio, advantages = loss_inputs(logps, old_logps, advantages, mask)
    return 0.5 * beta * jnp.square(log_ratio) - advantages * logps


def _check_threshold(loss: str, threshold) -> None:
    if isinstance(threshold, (int, float)) and threshold < 0:
        raise ValueError(f"{loss} leaves out every token below a threshold of 0; got {threshold}")


def _moved(logps: Array, log_ratio: Array) -> Array:
    """Returns by how much the probability of each token has risen since it was sampled `[N, T]`, without gradient."""
    return jax.lax.stop_gradient(jnp.exp(logps) - jnp.exp(logps - log_ratio))


def _kept_ratio(log_ratio: Array, advantages: Array, keep: Array, kl_coef) -> Array:
    """Returns `-keep A r + kl_coef (log r)^2` `[N, T]`, without reading the ratio of tokens that are not kept."""
    surrogate = jnp.where(keep, -advantages * bounded_ratio(jnp.where(keep, log_ratio, 0.0)), 0.0)
    return surrogate + kl_coef * jnp.square(log_ratio)


def _kept_reinforce(logps: Array, log_ratio: Array, advantages: Array, keep: Array, maximum) -> Array:
    """Returns `-keep stop(min(r, maximum)) A logps` `[N, T]`."""
    weights = jnp.where(keep, jnp.minimum(bounded_ratio(log_ratio), maximum), 0.0)
    return -jax.lax.stop_gradient(weights) * advantages * logps


@declare(old_logps="sampler")
def dppo(logps, old_logps, advantages, epsilon_low=0.2, epsilon_high=0.2, *, mask=None, kl_coef=1e-3) -> Array:
    """Returns the importance-weighted loss `[N, T]` with tokens dropped whose probability moved too far.

    Formula: `-keep A r + kl_coef (log r)^2`. A token is dropped where A > 0 and its probability rose by more than
    epsilon_high, or A <= 0 and it fell by more than epsilon_low; the bounds are differences of probabilities (binary
    total variation), not of ratios. `old_logps` are the sampler's log-probs. Source: DPPO, arXiv 2602.04879, with the
    default of prime-rl; aggregate with `token`.
    """
    logps, log_ratio, advantages = loss_inputs(logps, old_logps, advantages, mask)
    moved = _moved(logps, log_ratio)
    keep = jnp.where(advantages > 0, moved <= epsilon_high, moved >= -epsilon_low)
    return _kept_ratio(log_ratio, advantages, keep, kl_coef)


@declare(old_logps="sampler")
def dppo_tv(logps, old_logps, advantages, epsilon_low=0.2, epsilon_high=0.2, *, mask=None, maximum=20.0) -> Array:
    """Returns verl's form of DPPO with total variation, `-keep stop(min(r, maximum)) A logps`, `[N, T]`.

    Tokens are kept as by `dppo`; the ratio is a weight without gradient, and log r is bounded to +-20. `old_logps` are
    the sampler's log-probs. Source: arXiv 2602.04879; verl 0.9, `dppo_tv`.
    """
    logps, log_ratio, advantages = loss_inputs(logps, old_logps, advantages, mask)
    moved = _moved(logps, log_ratio)
    keep = jnp.where(advantages > 0, moved <= epsilon_high, moved >= -epsilon_low)
    return _kept_reinforce(logps, log_ratio, advantages, keep, maximum)


@declare(old_logps="sampler")
def dppo_kl(logps, old_logps, advantages, epsilon_low=0.2, epsilon_high=0.2, *, mask=None, maximum=20.0) -> Array:
    """Returns verl's form of DPPO with a binary KL, `-keep stop(min(r, maximum)) A logps`, `[N, T]`.

    With p and q the token's probability by the policy and by `old_logps` (the sampler's), the divergence is
    `d = q log(q / p) + (1 - q) log((1 - q + 1e-8) / (1 - p + 1e-8))`. A token is dropped where A > 0, p > q and
    d > epsilon_high, or A <= 0, p < q and d > epsilon_low. Source: arXiv 2602.04879; verl 0.9, `dppo_kl`.
    """
    logps, log_ratio, advantages = loss_inputs(logps, old_logps, advantages, mask)
    p, q = jnp.exp(logps), jnp.exp(logps - log_ratio)
    divergence = -q * log_ratio + (1.0 - q) * jnp.log((1.0 - q + 1e-8) / (1.0 - p + 1e-8))
    rises = (divergence <= epsilon_high) | (p <= q)
    falls = (divergence <= epsilon_low) | (p >= q)
    return _kept_reinforce(logps, log_ratio, advantages, jnp.where(advantages > 0, rises, falls), maximum)


@declare(old_logps="sampler", unread=EPSILONS)
def ipo(
    logps, old_logps, advantages, epsilon_low=None, epsilon_high=None, *, mask=None, threshold=0.1, kl_coef=1e-3
) -> Array:
    """Returns the importance-weighted loss `[N, T]` without tokens whose probability moved far, in either direction.

    Formula: `-keep A r + kl_coef (log r)^2`, keep where the probability changed by `threshold` at most, whatever the
    sign of A. `old_logps` are the sampler's log-probs; the epsilons are not read. This is no preference loss: identity
    preference optimisation, `preference_losses.ipo`, has the same name. Raises ValueError for a negative threshold.
    Source: prime-rl 0.8, `ipo`; aggregate with `token`.
    """
    _check_threshold("ipo", threshold)
    logps, log_ratio, advantages = loss_inputs(logps, old_logps, advantages, mask)
    keep = jnp.abs(_moved(logps, log_ratio)) <= threshold
    return _kept_ratio(log_ratio, advantages, keep, kl_coef)


@declare(old_logps="sampler", unread=("epsilon_high",))
def opd(logps, old_logps, advantages, epsilon_low=0.2, epsilon_high=None, *, mask=None, kl_coef=1e-3) -> Array:
    """Returns the importance-weighted loss `[N, T]` of on-policy distillation, whose signal follows the policy.

    Formula: `-keep stop(A - log r) r + kl_coef (log r)^2`. Of a teacher's advantages, `log p_teacher - log p_old`, the
    signal `A - log r` is `log p_teacher - log p` of the policy as it is in each update. A token is dropped where its
    probability fell by more than epsilon_low, whatever its signal; epsilon_high is not read. `old_logps` are the
    sampler's log-probs. Source: prime-rl 0.8, `ref_kl`; aggregate with `token`.
    """
    logps, log_ratio, advantages = loss_inputs(logps, old_logps, advantages, mask)
    keep = _moved(logps, log_ratio) >= -epsilon_low
    signal = jax.lax.stop_gradient(advantages - log_ratio)
    return _kept_ratio(log_ratio, signal, keep, kl_coef)


@declare(ratio="sequence_sum", old_logps="reference", unread=EPSILONS)
def a2po(
    logps, old_logps, advantages, epsilon_low=None, epsilon_high=None, *, mask, beta2=1e-3
) -> tuple[Array, Metrics]:
    """Returns the squared distance of a row's implicit reward from its advantage, on every token of the row, `[N, T]`.

    Formula: `(beta2 sum_t (logps - old_logps) - A)^2`, where `old_logps` are the reference's and A is `r - V*`
    (`advantages.a2po_advantages`); aggregate with `sequence`. It is 0 for the policy that is best under a KL penalty of
    weight beta2, whichever policy has sampled. The epsilons are not read. The metric `a2po/implicit_reward` is beta2
    times the row's log-ratio. Source: A*-PO, arXiv 2505.20686; beta2 1e-3 as TRL.
    """
    _, log_ratio, advantages = loss_inputs(logps, old_logps, advantages, mask)
    reward = jnp.broadcast_to(beta2 * masked_sum(log_ratio, mask, axis=-1, keepdims=True), log_ratio.shape)
    return jnp.square(reward - advantages), {"a2po/implicit_reward": Metric(reward, "row_mean")}


@declare(select=clip_cov_tokens)
def clip_cov(
    logps, old_logps, advantages, epsilon_low, epsilon_high, *, mask, key=None, fraction=2e-4, lower=1.0, upper=5.0,
    selected=None,
) -> tuple[Array, Metrics]:  # fmt: skip
    """Returns `ppo_clip` `[N, T]` with a random few of the tokens of high covariance taken out.

    A token's covariance is `(A - mean A) * (logp - mean logp)`, means over the masked tokens given. Of the tokens with
    covariance in (lower, upper) that the clip leaves alone, `max(1, floor(fraction * tokens))` are drawn uniformly with
    `key` (a JAX random key, a fresh one per update) and their loss is 0. `selected [N, T]`, `clip_cov_tokens` of a
    larger batch that these rows are a part of, takes the place of the draw. Source: Clip-Cov, arXiv 2505.22617.
    """
    if selected is None:
        selected = clip_cov_tokens(
            logps, old_logps, advantages, epsilon_low, epsilon_high, mask=mask, key=key, fraction=fraction, lower=lower,
            upper=upper,
        )  # fmt: skip
    loss, metrics = ppo_clip(logps, old_logps, advantages, epsilon_low, epsilon_high, mask=mask)
    return jnp.where(as_mask(selected), 0.0, loss), metrics


@declare(select=kl_cov_tokens, unread=EPSILONS)
def kl_cov(
    logps, old_logps, advantages, epsilon_low=None, epsilon_high=None, *, mask, fraction=2e-4, kl_coef=1.0,
    selected=None,
) -> Array:  # fmt: skip
    """Returns the unclipped surrogate `-r A`, `[N, T]`, with a KL penalty on the tokens of highest covariance.

    The `max(1, floor(fraction * tokens))` tokens with the largest covariance (see `clip_cov`) get
    `+ kl_coef * |logps - old_logps|`; `selected [N, T]`, `kl_cov_tokens` of a larger batch, may name them instead. The
    epsilons are not read. Source: KL-Cov, arXiv 2505.22617.
    """
    if selected is None:
        selected = kl_cov_tokens(logps, old_logps, advantages, mask=mask, fraction=fraction)
    _, log_ratio, advantages = loss_inputs(logps, old_logps, advantages, mask)
    return -bounded_ratio(log_ratio) * advantages + jnp.where(as_mask(selected), kl_coef * magnitude(log_ratio), 0.0)


@declare(select=m2po_tokens, old_logps="sampler", unread=EPSILONS)
def m2po(
    logps, old_logps, advantages, epsilon_low=None, epsilon_high=None, *, mask, threshold=0.04, selected=None
) -> tuple[Array, Metrics]:
    """Returns `-r A`, `[N, T]`, 0 on the tokens that moved farthest, so that the second moment of log r is bounded.

    The tokens of the largest `(log r)^2` are taken out until the mean of the others over the masked tokens given is at
    most `threshold`; `selected [N, T]`, `m2po_tokens` of a larger batch, may name them instead. `old_logps` are the
    sampler's log-probs; the epsilons are not read. Raises ValueError for a negative threshold. Source: M2PO, arXiv
    2510.01161 (threshold 0.04); so AReaL's `m2_threshold`, there within a micro-batch.
    """
    _check_threshold("m2po", threshold)
    if selected is None:
        selected = m2po_tokens(logps, old_logps, advantages, mask=mask, threshold=threshold)
    _, log_ratio, advantages = loss_inputs(logps, old_logps, advantages, mask)
    out = as_mask(selected)
    loss = jnp.where(out, 0.0, -bounded_ratio(jnp.where(out, 0.0, log_ratio)) * advantages)
    return loss, {"m2po/masked": Metric(out.astype(log_ratio.dtype))}


def value_clip(values, old_values, returns, epsilon=None) -> Array:
    """Returns the critic's loss `[N, T]`: half the larger of the squared errors with and without a clipped step.

    Formula: `max((V - R)^2, (clip(V, V_old - epsilon, V_old + epsilon) - R)^2) / 2`; `epsilon=None` is the plain
    squared error. Shapes: `values, old_values, returns [N, T]`. Source: PPO, arXiv 1707.06347; epsilon 0.2 in TRL, 0.5
    in verl.
    """
    values, old_values, returns = as_float(values), as_float(old_values), as_float(returns)
    loss = jnp.square(values - returns)
    if epsilon is not None:
        clipped = jnp.clip(values, old_values - epsilon, old_values + epsilon)
        loss = jnp.maximum(loss, jnp.square(clipped - returns))
    return 0.5 * loss
