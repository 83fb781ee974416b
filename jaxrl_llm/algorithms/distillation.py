"""Distillation: what a teacher says of a policy's tokens, as an advantage."""

import jax

from jaxrl_llm.algorithms.aggregation import as_float

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
