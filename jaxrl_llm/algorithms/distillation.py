"""Distillation: the distance of a policy from its teacher, by sampled tokens or by whole distributions."""

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.aggregation import as_float
from jaxrl_llm.algorithms.kl import full_kl

Array = jax.Array


def distilled_advantages(advantages, logps, teacher_logps, mask, coef: float = 1.0) -> Array:
    """Returns `advantages - coef * (logps - teacher_logps)` `[N,T]` where the mask is 1, and 0 elsewhere.

    Shapes: `advantages, logps, teacher_logps, mask [N,T]`, log-probs in nats, of the sampled tokens under the policy
    that sampled them and under the teacher. Nothing of it is differentiated: the policy gradient with these advantages
    is that of `coef * KL(policy || teacher)`, estimated token by token from the policy's own samples.
    Source: "On-Policy Distillation" (Thinking Machines Lab, 2025); MiniLLM with gamma = 0, arXiv 2306.08543.
    """
    log_ratio = jax.lax.stop_gradient(as_float(logps) - as_float(teacher_logps))
    return (as_float(advantages) - coef * log_ratio) * (as_float(mask) > 0)


def generalized_jsd(log_probs, teacher_log_probs, beta: float) -> Array:
    """Returns the generalised Jensen-Shannon divergence `[...]` of distributions `[..., V]`, in nats.

    With P the teacher and Q the policy: KL(P || Q) for `beta` 0, KL(Q || P) for 1, and between them
    `beta KL(P || M) + (1 - beta) KL(Q || M)` with the mixture `M = beta P + (1 - beta) Q`. It is 0 where both are the
    same. `log_probs, teacher_log_probs` are normalised; gradients flow to both. It is not continuous at the ends:
    towards them it falls to 0 and not to the KLs. Divided by beta it approaches KL(P || Q) as beta goes to 0.
    Source: GKD, arXiv 2306.13649, eq. 1.
    """
    policy, teacher = as_float(log_probs), as_float(teacher_log_probs)
    if beta == 0:
        return full_kl(teacher, policy)
    if beta == 1:
        return full_kl(policy, teacher)
    mixture = jnp.logaddexp(policy + jnp.log1p(-beta), teacher + jnp.log(beta))
    return beta * full_kl(teacher, mixture) + (1.0 - beta) * full_kl(policy, mixture)


def with_tail(log_probs) -> Array:
    """Returns log-probs `[..., k + 1]`: those of k tokens `[..., k]`, and that of all other tokens together.

    A divergence of these is a lower bound of that of the whole distributions, near it where the k tokens have most of
    the mass. A tail below 1e-7 counts as 1e-7: float32 has no digits for it.
    """
    log_probs = as_float(log_probs)
    mass = jnp.minimum(jax.nn.logsumexp(log_probs, axis=-1, keepdims=True), -1e-7)
    return jnp.concatenate([log_probs, jnp.log(-jnp.expm1(mass))], axis=-1)


def without_tail(log_probs) -> Array:
    """Returns log-probs `[..., k]` of k tokens, conditional on one of them being drawn."""
    log_probs = as_float(log_probs)
    return log_probs - jax.nn.logsumexp(log_probs, axis=-1, keepdims=True)
