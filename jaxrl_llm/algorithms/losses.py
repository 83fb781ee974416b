"""Metrics a loss returns beside its value, and facts it declares of itself.

A loss returns one number per token, row or pair; a loss with metrics returns `(loss, {name: Metric})`. No table
elsewhere names a loss: what others must know of it stands beside it, as `declare(...)` or as plain attributes of a
function of the user's own.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms.aggregation import as_float, as_mask, masked_mean, masked_sum

Array = jax.Array
F = TypeVar("F", bound=Callable[..., Any])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Metric:
    """A number of a batch, and how the numbers of its micro-batches become one.

    A loss gives `[N,T]`, `[N]` or `[]` and says with `reduce` how they become a scalar: "mean" over the tokens of the
    optimizer batch, "row_mean" over its rows (a row counts once, however long it is), "sum", or "max" or "min" over
    its tokens.
    """

    value: Array
    reduce: str = dataclasses.field(default="mean", metadata={"static": True})

    def __float__(self) -> float:
        return float(self.value)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.asarray(self.value, dtype)


Metrics = dict[str, Metric]
LEVELS = ("token", "sequence", "sequence_sum")  # of the ratio pi / pi_old that a loss reads: see `log_ratio_at`

# The number of no micro-batch at all, and how two of them become one.
NEUTRAL = {"sum": 0.0, "max": -jnp.inf, "min": jnp.inf}
MERGE = {"sum": jnp.add, "max": jnp.maximum, "min": jnp.minimum}


def declare(**facts: Any) -> Callable[[F], F]:
    """A decorator that sets attributes of a function.

    A policy loss may declare

    - `ratio`: the level (`log_ratio_at`) of the ratio that it reads, by which the KL term is corrected too:
      "token" (the default), "sequence", "sequence_sum", or "level", whatever its option of that name says;
    - `select`: a function of the same arguments that picks, over the whole optimizer batch, the few tokens `[N,T]`
      which the loss gets as `selected`;
    - `old_logps`: "sampler" where its ratio compares with the sampler's log-probs by design, "reference" where it does
      with the reference's, "unread" where its value and its gradient do not depend on them;
    - `unread`: those of epsilon_low and epsilon_high that it takes and does not read.

    A preference loss may declare

    - `rows`: "pair" (the default), "triple" for a pair and a gold completion of its prompt, which is learned by its
      likelihood alone; "label" for labelled completions, "label_and_mismatch" where each is followed by the same
      prompt with another row's completion;
    - `reference`: True where it reads the reference's log-probs (None: it has no say in what a reward is);
    - `compares_pairs`: True where its value depends on which pairs are given together; its metrics are not read;
    - `mean_logps`: True where rewards and log-probs are means over tokens, in the metrics too;
    - `reward`: the implicit reward of (mean) log-probs, given the loss's options, where that is not the log-ratio;
    - `options`: options that the objective reads for it, with their defaults: `nll_weight`, the weight of the
      negative log-likelihood of the chosen completion, or of the gold one, `nll_on_prompt` and `running_mean`.
    """

    def mark(function: F) -> F:
        for name, value in facts.items():
            setattr(function, name, value)
        return function

    return mark


def loss_inputs(logps, old_logps, advantages, mask) -> tuple[Array, Array, Array]:
    """Returns `(logps, log_ratio, advantages)` of a policy loss, all `[N, T]` and at least float32.

    Shapes: `logps, old_logps, mask [N, T]`, `advantages [N]` or `[N, T]`. Outside the mask, if there is one, log-probs
    and log-ratio are 0. Gradients flow to `logps` alone. Raises ValueError for arrays of another rank.
    """
    check_rank(2, logps=logps, old_logps=old_logps, mask=mask)
    logps = as_float(logps)
    log_ratio = logps - jax.lax.stop_gradient(as_float(old_logps))
    if mask is not None:
        mask = as_mask(mask, logps.shape)
        log_ratio, logps = jnp.where(mask, log_ratio, 0.0), jnp.where(mask, logps, 0.0)
    advantages = jax.lax.stop_gradient(as_float(advantages))
    if advantages.ndim == logps.ndim - 1:
        advantages = advantages[..., None]
    return logps, log_ratio, jnp.broadcast_to(advantages, logps.shape)


def log_ratio_at(level: str, log_ratio, mask) -> Array:
    """Returns the log-ratio `[N, T]` that a loss reads at a level, of the tokens' own `[N, T]`.

    `token`: each token's own. `sequence` (GSPO): the mean over the masked tokens of its row, on each token of the row;
    `sequence_sum` (RLOO): their sum. Both need `mask [N, T]`. Raises ValueError for an unknown level and for these
    without a mask.
    """
    if level not in LEVELS or (level != "token" and mask is None):
        raise ValueError(
            f"levels of a ratio are 'token', and 'sequence' and 'sequence_sum' together with a mask; got {level!r}"
        )
    if level == "token":
        return log_ratio
    over_row = masked_mean if level == "sequence" else masked_sum
    return jnp.broadcast_to(over_row(log_ratio, mask, axis=-1, keepdims=True), log_ratio.shape)


def bounded_log_ratio(log_ratio: Array) -> Array:
    """Returns log-ratios of any shape, bounded to +-20 as verl bounds them.

    A log-ratio, above all the sum over a long row, may pass 88, from where on float32's exp is infinite: the gradient
    of what the clip takes out is then 0 * inf, NaN, as is the loss where A = 0. No clip range reaches as far as these.
    """
    return jnp.clip(log_ratio, -20.0, 20.0)


def bounded_ratio(log_ratio: Array) -> Array:
    """Returns the ratio exp(log_ratio), with the log-ratio within the bounds of `bounded_log_ratio`."""
    return jnp.exp(bounded_log_ratio(log_ratio))


def with_metrics(result: Any) -> tuple[Array, Metrics]:
    """(loss, metrics) of what a loss returned, which may be the loss alone."""
    loss, metrics = result if isinstance(result, tuple) else (result, {})
    return loss, metrics


def check_rank(rank: int, **arrays: Any) -> None:
    """Raises ValueError for an array, named by its argument, that has another number of dimensions; None passes."""
    for name, x in arrays.items():
        if x is not None and np.ndim(x) != rank:
            raise ValueError(f"{name} has shape {np.shape(x)}; it takes an array with {rank} dimensions")
