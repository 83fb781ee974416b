"""Distillation: the distance of a policy from its teacher, by sampled tokens, whole distributions or spans of text."""

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.advantages import discounted_returns
from jaxrl_llm.algorithms.aggregation import as_float, as_mask
from jaxrl_llm.algorithms.kl import full_kl

Array = jax.Array

LEAST_PROBABILITY = 1e-8  # that is told from 0 where tokenizers differ, as in TRL


def distilled_advantages(
    advantages,
    logps,
    teacher_logps,
    mask,
    coef: float = 1.0,
    position_gamma: float = 0.0,
    limit: float | None = None,
    gamma: float = 0.0,
) -> Array:
    """Returns `advantages - coef * w * (logps - teacher_logps)` `[N,T]` where the mask is 1, and 0 elsewhere.

    Shapes: `advantages, logps, teacher_logps, mask [N,T]`, log-probs in nats, of the sampled tokens under the policy
    that sampled them and under the teacher. w is 1 or, with `position_gamma`, the `position_weights` of the difference,
    which is cut to -`limit` to `limit` nats in the term itself, as in verl (`loss_max_clamp`). With `gamma` the term of
    a token is the mean of those from it to the row's end, each weighing gamma times the one before it, MiniLLM's with
    its length normalisation: `sum_(s>=t) gamma^(s-t) term_s / sum_(s>=t) gamma^(s-t)`, s over the mask.
    Nothing of it is differentiated: the policy gradient with these advantages and w = 1 is that of
    `coef * KL(policy || teacher)`, estimated token by token from the policy's own samples.
    Source: "On-Policy Distillation" (Thinking Machines Lab, 2025); MiniLLM, arXiv 2306.08543 (gamma = 0 is the same).
    """
    log_ratio = jax.lax.stop_gradient(as_float(logps) - as_float(teacher_logps))
    weights = position_weights(log_ratio, mask, position_gamma) if position_gamma else 1.0
    if limit is not None:
        log_ratio = jnp.clip(log_ratio, -limit, limit)
    log_ratio *= weights
    if gamma:
        lengths = discounted_returns(jnp.ones_like(log_ratio), mask, gamma)
        log_ratio = discounted_returns(log_ratio, mask, gamma) / jnp.maximum(lengths, 1.0)
    return jnp.where(as_mask(mask), as_float(advantages) - coef * log_ratio, 0.0)


def position_weights(log_ratio, mask, gamma: float) -> Array:
    """Returns the weight of each token `[N,T]` by how much of its row's disagreement with the teacher lies before it.

    Shapes: `log_ratio, mask [N,T]`. Formula, over the masked tokens of a row: `1 + gamma * (1 - before / total)`, with
    `before` the sum of `|log_ratio|` up to the token and without it, and `total` that of the row, at least 1e-8. It
    falls from 1 + gamma to 1: the farther policy and teacher have gone apart, the less the teacher knows of the text.
    Source: IW-OPD, arXiv 2606.22600, as TRL.
    """
    distance = jnp.where(as_mask(mask), jnp.abs(as_float(log_ratio)), 0.0)
    before = jnp.cumsum(distance, axis=1) - distance
    return 1.0 + gamma * (1.0 - before / jnp.maximum(distance.sum(axis=1, keepdims=True), 1e-8))


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
    possible = jnp.maximum(policy, teacher) > -jnp.inf  # or else there is no gradient, where neither term reads it
    own, theirs = (jnp.where(possible, x, 0.0) for x in (policy, teacher))
    mixture = jnp.logaddexp(own + jnp.log1p(-beta), theirs + jnp.log(beta))
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


def prefix_logps(logps, ends, width: int) -> Array:
    """Returns the log-probs `[N,width]` of all tokens of a span but its last one together, in that one's column.

    Shapes: `logps [N,S]` of the tokens, in nats; `ends [N,S]` the column of the last token of the span that each of the
    others belongs to, -1 for last tokens and for those in no span. A column without such tokens has 0. A token's
    probability counts as LEAST_PROBABILITY at least. By the chain rule this is the log-prob of the text of the span
    before its last token, given the text before the span.
    """
    kept = jnp.where(ends >= 0, jnp.maximum(as_float(logps), jnp.log(LEAST_PROBABILITY)), 0.0)
    rows, columns = jnp.arange(ends.shape[0])[:, None], jnp.where(ends >= 0, ends, width)
    return jnp.zeros((ends.shape[0], width), kept.dtype).at[rows, columns].add(kept, mode="drop")


@jax.custom_vjp
def sorted_distance(probs, teacher_probs) -> Array:
    """Returns `sum_i |p_(i) - q_(i)|` `[...]` of probabilities `[...,V]` and of a teacher's `[...,W]`, each sorted.

    The likeliest token of the one is compared with the likeliest of the other, whichever tokens they are, and so on;
    the shorter one is filled up with zeros. That is the Wasserstein distance of distributions over vocabularies that
    have nothing in common, where all tokens are equally far from each other. Gradients flow to `probs` alone.
    Source: ULD, arXiv 2402.12030.
    """
    return _sorted_forward(probs, teacher_probs)[0]


def _sorted_forward(probs, teacher_probs):
    p, q = as_float(probs), as_float(teacher_probs)
    tokens = jax.lax.broadcasted_iota(jnp.int32, p.shape, p.ndim - 1)
    ascending, tokens = jax.lax.sort((p, tokens), num_keys=1)
    size = max(p.shape[-1], q.shape[-1])

    def filled(x):  # the least come first
        return jnp.pad(x, (*((0, 0),) * (x.ndim - 1), (size - x.shape[-1], 0)))

    gap = filled(ascending) - filled(jnp.sort(q))
    # A second sort brings the slopes back to their tokens: accelerators scatter slowly.
    _, slopes = jax.lax.sort((tokens, jnp.sign(gap[..., size - p.shape[-1] :])), num_keys=1)
    return jnp.abs(gap).sum(-1), slopes.astype(jnp.result_type(probs))


sorted_distance.defvjp(_sorted_forward, lambda slopes, d: (d[..., None].astype(slopes.dtype) * slopes, None))


def hybrid_distances(probs, teacher_probs, matches, beta: float) -> tuple[Array, Array]:
    """Returns two distances `[...]` of probabilities `[...,V]` from a teacher's `[...,W]`: of matched and other tokens.

    `matches [V]` is the id that each token has in the teacher's vocabulary, -1 where it is not there. The first is
    `generalized_jsd` of the tokens in both, whose probabilities need not add up to 1 and count as LEAST_PROBABILITY at
    least; the second `sorted_distance` of the others. Gradients flow to `probs` alone.
    Source: GOLD, "Unlocking On-Policy Distillation for Any Model Family" (Hugging Face, 2025).
    """
    p, q = as_float(probs), jax.lax.stop_gradient(as_float(teacher_probs))
    matched, size = matches >= 0, q.shape[-1]
    theirs = jnp.zeros(size, bool).at[jnp.where(matched, matches, size)].set(True, mode="drop")
    # Other tokens have the same number on both sides, and so no part in the divergence.
    own_logs, their_logs = (
        jnp.log(jnp.where(matched, jnp.maximum(x, LEAST_PROBABILITY), LEAST_PROBABILITY))
        for x in (p, jnp.take(q, jnp.maximum(matches, 0), axis=-1))
    )
    distance = sorted_distance(jnp.where(matched, 0.0, p), jnp.where(theirs, 0.0, q))
    return generalized_jsd(own_logs, their_logs, beta), distance
