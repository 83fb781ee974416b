"""Losses of process reward models, one function each, from the logits of steps to a loss `[N, T]` where each ends."""

import jax

from jaxrl_llm.algorithms.aggregation import as_float
from jaxrl_llm.algorithms.losses import check_rank

Array = jax.Array


def step_cross_entropy(logits, labels) -> Array:
    """Returns `-(y log p + (1 - y) log(1 - p))`, `[N, T]`, of a step that ends at each token.

    Shapes: `logits [N, T, 2]` of wrong and of right, `labels [N, T]`, y: 1 for a right step, 0 for a wrong one, or the
    share of the attempts from there on that reach the right answer. p is the probability of right, `softmax(logits)`.
    Raises ValueError for other shapes. Source: arXiv 2211.14275, 2305.20050; shares, 2312.08935.
    """
    check_rank(3, logits=logits)
    check_rank(2, labels=labels)
    logits, labels = as_float(logits), as_float(labels)
    log_odds = logits[..., 1] - logits[..., 0]
    return -labels * jax.nn.log_sigmoid(log_odds) - (1.0 - labels) * jax.nn.log_sigmoid(-log_odds)
