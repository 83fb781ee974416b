"""Per-token KL estimates between the policy and a reference, and the controllers of the KL coefficient."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.aggregation import as_float, magnitude

Array = jax.Array

KINDS = ("k1", "abs", "k2", "k3")


def kl_estimate(logps, ref_logps, kind: str = "k3", *, ratio=None, log_ratio_clamp=None, k2_gradient=False) -> Array:
    """Returns per-token estimates of KL(policy || reference), of the shape of `logps`.

    Shapes: `logps, ref_logps [N, T]` in nats. With `k1 = logps - ref_logps`:

    - `k1`: k1 itself. Unbiased and of either sign; meant for rewards. As a loss term its expected gradient is zero.
    - `abs`: `|k1|`, with gradient 0 at 0.
    - `k2`: `k1^2 / 2`. Its gradient is the unbiased gradient of the KL for on-policy samples.
    - `k3`: `exp(-k1) - 1 + k1`, unbiased and never negative (GRPO's loss term).

    `ratio [N, T]` or `[N, 1]`, pi / pi_old with its gradient, multiplies the estimate: the importance-corrected
    estimate for samples of an older policy (DeepSeek-V3.2, arXiv 2512.02556). `log_ratio_clamp` bounds k1 to
    [-c, c] before the formula, outside of which the gradient is zero (verl uses 20, OpenRLHF 10). `k2_gradient=True`
    keeps the value and takes the gradient of k2 instead (verl's `k3+`). Raises ValueError for an unknown kind.
    Source: Schulman, "Approximating KL divergence" (2020).
    """
    k1 = as_float(logps) - as_float(ref_logps)
    if log_ratio_clamp is not None:
        k1 = jnp.clip(k1, -log_ratio_clamp, log_ratio_clamp)
    if kind == "k1":
        estimate = k1
    elif kind == "abs":
        estimate = magnitude(k1)
    elif kind == "k2":
        estimate = 0.5 * jnp.square(k1)
    elif kind == "k3":
        estimate = jnp.expm1(-k1) + k1
    else:
        raise ValueError(f"unknown KL estimate {kind!r}; choose one of {', '.join(KINDS)}")
    if k2_gradient:
        k2 = 0.5 * jnp.square(k1)
        estimate = jax.lax.stop_gradient(estimate - k2) + k2
    return estimate if ratio is None else estimate * ratio


def full_kl(log_probs, ref_log_probs) -> Array:
    """Returns KL(policy || reference) `[...]` of distributions over a vocabulary: `sum_v p_v (log p_v - log q_v)`.

    `log_probs, ref_log_probs [..., V]` in nats, each normalised. It is no estimate: given a prefix, it does not depend
    on the token that was sampled, and its gradient is that of the KL itself. A token of log-prob -inf adds
    nothing.
    """
    log_probs = as_float(log_probs)
    difference = jnp.where(log_probs > -jnp.inf, log_probs - as_float(ref_log_probs), 0.0)
    return (jnp.exp(log_probs) * difference).sum(-1)


@dataclass(frozen=True)
class FixedKL:
    """A KL coefficient that stays what it is, with the interface of `AdaptiveKL`."""

    coef: float | Array


@dataclass(frozen=True)
class AdaptiveKL:
    """A KL coefficient that drifts so that the measured KL approaches `target`.

    `coef` is the only state, a scalar, so a checkpoint of this pytree restores the controller; `target` (nats) and
    `horizon` (rows) are static. Source: Ziegler et al., arXiv 1909.08593.
    """

    coef: float | Array
    target: float = 0.1
    horizon: float = 10_000.0

    def update(self, kl, n) -> "AdaptiveKL":
        """Returns the controller after a batch of `n` completions whose mean KL was `kl`.

        Formula: `coef * (1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon)`. `kl` is the mean over rows of each row's
        mean KL per token.
        """
        error = jnp.clip(as_float(kl) / self.target - 1.0, -0.2, 0.2)
        return replace(self, coef=self.coef * (1.0 + error * n / self.horizon))


jax.tree_util.register_dataclass(FixedKL, data_fields=["coef"], meta_fields=[])
jax.tree_util.register_dataclass(AdaptiveKL, data_fields=["coef"], meta_fields=["target", "horizon"])
