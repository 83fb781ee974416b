"""Masked moments, whitening and the loss weights `[N, T]` that carry every aggregation mode.

A loss never averages itself. It returns one number per token (`[N, T]`), and the scalar is always

    sum(loss_weights(mask, mode) * loss)

with the weights computed once over the whole optimizer batch. Splitting the batch into micro-batches afterwards splits
the sum, so the gradient does not depend on the micro-batch size, on accumulation or on the number of devices.
"""

import jax
import jax.numpy as jnp

Array = jax.Array

MODES = ("sequence", "token", "prompt", "constant", "sequence_sum", "token_sum", "microbatch_token", "rollout_token")


def as_float(x) -> Array:
    """Returns `x` as a floating array of at least 32 bits.

    Integers, booleans, float16 and bfloat16 become float32; float32 and float64 stay as they are. Every function of
    this package passes its inputs through here, so that integer rewards are not truncated and half precision log-probs
    are not summed in half precision.
    """
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def as_mask(mask, shape=None) -> Array:
    """Returns `mask` as booleans, true where it is above zero, broadcast to `shape` if one is given."""
    mask = jnp.asarray(mask) > 0
    return mask if shape is None else jnp.broadcast_to(mask, shape)


def magnitude(x) -> Array:
    """Returns `|x|` with gradient 0 at 0, where JAX's own absolute value has gradient 1.

    Log-ratios are exactly 0 on the first update of a step, so that point is a common one and must not pull anywhere.
    """
    x = as_float(x)
    return jnp.where(x == 0, 0.0, jnp.abs(x))


def masked_sum(x, mask, axis=None, keepdims: bool = False) -> Array:
    """Returns the sum of `x` where `mask` is true; values outside the mask are never read, NaN included.

    Shapes: `x` any, `mask` broadcastable to it; the result has `axis` reduced.
    """
    x = as_float(x)
    return jnp.sum(jnp.where(as_mask(mask, x.shape), x, 0.0), axis=axis, keepdims=keepdims)


def masked_mean(x, mask, axis=None, keepdims: bool = False) -> Array:
    """Returns the mean of `x` where `mask` is true, and 0 where the mask is empty.

    Shapes: `x` any, `mask` broadcastable to it; the result has `axis` reduced. Formula: `sum(x * mask) / max(n, 1)`
    with n the number of true entries.
    """
    x = as_float(x)
    count = jnp.sum(as_mask(mask, x.shape), axis=axis, keepdims=keepdims, dtype=x.dtype)
    return masked_sum(x, mask, axis, keepdims) / jnp.maximum(count, 1.0)


def masked_var(x, mask, ddof: int = 1, axis=None, keepdims: bool = False) -> Array:
    """Returns the variance of `x` where `mask` is true; 0 with `ddof` or fewer true entries.

    Shapes: as `masked_mean`. `ddof=1` is the unbiased estimate `sum((x - mean)^2) / (n - 1)`, `ddof=0` the biased one.
    """
    x = as_float(x)
    x = jnp.where(as_mask(mask, x.shape), x, 0.0)  # squares outside the mask would give the gradient NaN
    centered = x - masked_mean(x, mask, axis, keepdims=True)
    count = jnp.sum(as_mask(mask, x.shape), axis=axis, keepdims=keepdims, dtype=x.dtype)
    return masked_sum(jnp.square(centered), mask, axis, keepdims) / jnp.maximum(count - ddof, 1.0)


def whiten(x, mask, shift_mean: bool = True, ddof: int = 1, eps: float = 1e-8, divide: bool = True) -> Array:
    """Returns `x` scaled to unit variance over the mask, and 0 outside the mask.

    Shapes: `x [...]`, `mask` broadcastable; all axes share one mean and one variance, so each token weighs the same.
    Formula: `(x - mean) * rsqrt(var + eps)`; with `shift_mean=False` the mean is added back (reward whitening), with
    `divide=False` the mean is subtracted and nothing else (OpenRLHF's `no_std_norm`).
    The largest value is subtracted first, so equal values give exact zeros whatever the rounding of their mean.
    Source: PPO as in Ziegler et al. (arXiv 1909.08593); `ddof=1` as TRL and verl, `ddof=0` as OpenRLHF.
    """
    x = as_float(x)
    mask = as_mask(mask, x.shape)
    x = jnp.where(mask, x, 0.0)
    shifted = x - jnp.max(x, where=mask, initial=jnp.finfo(x.dtype).min)
    whitened = shifted - masked_mean(shifted, mask)
    if divide:
        whitened *= jax.lax.rsqrt(masked_var(shifted, mask, ddof) + eps)
    return jnp.where(mask, whitened if shift_mean else whitened + masked_mean(x, mask), 0.0)


def loss_weights(
    mask,
    mode: str,
    *,
    max_completion_length: int | None = None,
    row_mask=None,
    group_size: int | None = None,
    microbatch_rows: int | None = None,
    token_count=None,
) -> Array:
    """Returns float32 weights `[N, T]`, zero outside `mask`, such that `sum(weights * loss)` is the loss of `mode`.

    Shapes: `mask [N, T]` true on the tokens that count. `row_mask [N]` (default: all rows) is false on rows that only
    fill up the batch: they get weight 0 and are not counted as rows.

    Modes, with len_i the number of true tokens of row i and R the number of rows:

    - `sequence`: `1 / (R * len_i)`, the mean over rows of each row's token mean (GRPO, arXiv 2402.03300).
    - `token`: `1 / sum_i len_i`, every token the same (DAPO, arXiv 2503.14476).
    - `prompt`: the token mean inside each group of `group_size` adjacent rows, averaged over the groups, so that every
      prompt counts the same (SkyRL's `prompt_mean`).
    - `constant`: `1 / (R * max_completion_length)` (Dr. GRPO, arXiv 2503.20783).
    - `sequence_sum`: `1 / R`, the mean over rows of each row's token sum.
    - `token_sum`: 1, the sum over all tokens (the losses of Tinker; verl's `token-sum`).
    - `microbatch_token`: the token mean inside each block of `microbatch_rows` adjacent rows, averaged over the blocks.
      This is TRL's `bnpo`; it is the one mode whose value depends on the micro-batch size.
    - `rollout_token`: `1 / token_count`, with `token_count`, a number (or `[N]`), the tokens of the rollout divided by
      its optimizer batches. This is TRL's `dapo`, and `token` where there is one optimizer batch.

    A row without tokens gets weight 0 and still counts in R, as in TRL: its token mean is 0 and it enters the mean over
    rows. Denominators are at least 1. Raises ValueError for an unknown mode, for `constant` without
    `max_completion_length`, for `prompt` without a `group_size` and `microbatch_token` without a `microbatch_rows` that
    divides N, and for `rollout_token` without `token_count`.
    """
    mask = as_mask(mask)
    row_mask = jnp.ones(mask.shape[0], bool) if row_mask is None else as_mask(row_mask)
    tokens = jnp.where(row_mask[:, None], mask, False).astype(jnp.float32)
    lengths = tokens.sum(axis=1, keepdims=True)
    row_count = jnp.maximum(row_mask.sum(dtype=jnp.float32), 1.0)
    if mode == "sequence":
        return tokens / (row_count * jnp.maximum(lengths, 1.0))
    if mode == "token":
        return tokens / jnp.maximum(lengths.sum(), 1.0)
    if mode == "prompt":
        return _block_weights(mode, "group_size", tokens, row_mask, group_size)
    if mode == "constant":
        if max_completion_length is None or max_completion_length <= 0:
            raise ValueError(
                f"aggregation 'constant' divides by max_completion_length; got {max_completion_length!r}, "
                "pass the generation limit in tokens"
            )
        return tokens / (row_count * max_completion_length)
    if mode == "sequence_sum":
        return tokens / row_count
    if mode == "token_sum":
        return tokens
    if mode == "microbatch_token":
        return _block_weights(mode, "microbatch_rows", tokens, row_mask, microbatch_rows)
    if mode == "rollout_token":
        if token_count is None:
            raise ValueError("aggregation 'rollout_token' divides by the tokens of a rollout; pass token_count")
        return tokens / jnp.maximum(as_float(token_count).reshape(-1, 1), 1.0)
    raise ValueError(f"unknown aggregation mode {mode!r}; choose one of {', '.join(MODES)}")


def _block_weights(mode: str, name: str, tokens: Array, row_mask: Array, rows: int | None) -> Array:
    """Weights `[N, T]` of the token mean inside each block of `rows` adjacent rows, averaged over blocks with a row."""
    if not rows or rows < 0 or tokens.shape[0] % rows:
        raise ValueError(
            f"aggregation {mode!r} averages over blocks of {name} rows; got {rows!r} for {tokens.shape[0]} rows, pass "
            f"a positive divisor of {tokens.shape[0]}"
        )
    blocks = tokens.reshape(tokens.shape[0] // rows, -1)
    counts = jnp.maximum(blocks.sum(axis=1, keepdims=True), 1.0)
    live = jnp.maximum(row_mask.reshape(-1, rows).any(axis=1).sum(dtype=jnp.float32), 1.0)
    return (blocks / (counts * live)).reshape(tokens.shape)
