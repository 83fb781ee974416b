"""From token log-probs `[N, T]` to what preference losses read: sums and lengths per row, pairs, and pair weights.

The rows of a preference pair are adjacent, chosen first: rows 0, 2, 4, ... are chosen and rows 1, 3, 5, ... rejected.
With `together=3` each pair has a gold completion behind it, which is in no pair: rows 0, 3, 6, ... are chosen.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.aggregation import as_float, as_mask, masked_mean, masked_sum

Array = jax.Array


def sequence_logps(logps, mask, ld_alpha=None, together=2) -> tuple[Array, Array]:
    """Returns `(sums [N], lengths [N])`, the log-prob of each row's masked tokens and how many they are.

    Shapes: `logps, mask [N, T]`. With `ld_alpha` the sums are those of `length_desensitized_logps`, of rows in pairs.
    """
    if ld_alpha is None:
        sums = masked_sum(logps, mask, axis=1)
    else:
        sums = length_desensitized_logps(logps, mask, ld_alpha, together)
    return sums, as_float(as_mask(mask).sum(axis=1))


def split_pairs(rows, together=2) -> tuple[Array, Array]:
    """Returns `(chosen, rejected)`, each `[pairs, ...]`, of rows `[N, ...]`: the first and the second of `together`.

    Raises ValueError when `together` does not divide N.
    """
    rows = jnp.asarray(rows)
    if rows.shape[0] % together:
        raise ValueError(f"{rows.shape[0]} rows do not form pairs; a pair is {together} adjacent rows, chosen first")
    return rows[0::together], rows[1::together]


def length_desensitized_logps(logps, mask, ld_alpha, together=2) -> Array:
    """Returns log-prob sums `[N]` in which tokens beyond the shorter completion of the pair weigh `ld_alpha`.

    Shapes: `logps, mask [N, T]`, rows in pairs. Formula: the sum over the first min(len_chosen, len_rejected) masked
    tokens plus `ld_alpha` times the sum over the rest; 1 is the plain sum, 0 ignores the tail. Use it for the policy
    and the reference alike. Raises ValueError for rows that do not form pairs. Source: LD-DPO, arXiv 2409.06411.
    """
    logps = as_float(logps)
    mask = as_mask(mask, logps.shape)
    order = jnp.cumsum(mask, axis=1)
    chosen, rejected = split_pairs(order[:, -1], together)
    shared = jnp.repeat(jnp.minimum(chosen, rejected), together)[:, None]
    return masked_sum(logps * jnp.where(order <= shared, 1.0, ld_alpha), mask, axis=1)


def wpo_weights(logps, log_sum_squares, mask, together=2) -> Array:
    """Returns WPO's pair weights `[pairs]`, without gradient; multiply the per-pair loss by them.

    Shapes: `logps, mask [N, T]`, rows in pairs; `log_sum_squares [N, T]` is `log sum_v p_v^2` of the distribution each
    token was drawn from. Formula: the product over the two rows of `exp(mean_t(logps - log_sum_squares))`, not bounded
    above. Raises ValueError for rows that do not form pairs. Source: WPO, arXiv 2406.11827.
    """
    aligned = jax.lax.stop_gradient(as_float(logps) - as_float(log_sum_squares))
    chosen, rejected = split_pairs(jnp.exp(masked_mean(aligned, mask, axis=1)), together)
    return chosen * rejected
