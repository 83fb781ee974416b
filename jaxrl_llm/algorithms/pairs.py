"""From scored completions to preference pairs, for losses that compare two completions of a prompt."""

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.aggregation import as_float
from jaxrl_llm.algorithms.losses import check_rank

Array = jax.Array


def ranked_pairs(scores, group_size: int, pairs: int = 1) -> tuple[Array, Array]:
    """Returns `(order [N], used [N / 2])`: rows in an order whose adjacent two are a pair, the better one first, and
    which of the pairs are learned from.

    Shapes: `scores [N]`, the completions of a prompt adjacent, NaN for one without a score. The best completion of a
    prompt is beside its worst, the second best beside the second worst, and so on; of equal scores the earlier row
    counts as better. Used are the first `pairs` of each prompt, as far as there are so many, unless both score alike:
    nothing is preferred there. Unused pairs hold any rows of the prompt. Raises ValueError for groups of an odd number
    of rows. Source: online DPO, arXiv 2402.04792, two completions; the best and the worst of several, RSO, 2309.06657.
    """
    check_rank(1, scores=scores)
    if group_size % 2:
        raise ValueError(f"groups of {group_size} completions do not form pairs; group_size is even")
    scores = as_float(scores).reshape(-1, group_size)
    ranked = jnp.argsort(-scores, axis=1, stable=True)  # those without a score last
    count = (~jnp.isnan(scores)).sum(axis=1, keepdims=True)
    rank = jnp.arange(group_size // 2)
    places = jnp.stack([jnp.broadcast_to(rank, (len(scores), rank.size)), jnp.maximum(count - 1 - rank, 0)], axis=-1)
    order = jnp.take_along_axis(ranked, places.reshape(len(scores), -1), axis=1)
    better, worse = jnp.split(jnp.take_along_axis(scores, order, axis=1).reshape(-1, 2), 2, axis=1)
    used = (rank < jnp.minimum(count // 2, pairs)).reshape(-1) & (better > worse)[:, 0]
    return (order + group_size * jnp.arange(len(scores))[:, None]).reshape(-1), used
