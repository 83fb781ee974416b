"""`Objective`: two or three pure functions that an update minimises."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.aggregation import loss_weights
from jaxrl_llm.algorithms.batch import Batch, Images
from jaxrl_llm.algorithms.losses import NEUTRAL, Metric, Metrics, with_metrics
from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.net import Net, Params

REDUCE: dict[str, Callable[..., jax.Array]] = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min}


class Positions(NamedTuple):
    """The positions that an objective needs the network at; by default the tokens of the mask, of all rows."""

    last: bool = False  # each row's last token, and the state after it
    after: bool = False  # the state after each of these tokens, not the one before it
    unmasked: bool = False  # all tokens that are no padding
    alternate: bool = False  # `loss` reads rows 0, 2, 4, ..., and `observe` the others


class Objective(NamedTuple):
    """`prepare(batch)` fills in `batch.prepared`, which needs the whole optimizer batch; `loss(params, micro-batch)` is
    the loss and its metrics, which add up (or are the extreme) over micro-batches.

    Where the whole batch matters through the policy itself, `observe(params, micro-batch)` gives numbers per row,
    without gradient, and those of the whole batch are the second argument of `prepare`. `encode(params, images)` gives
    the features of images, which the rows of a prompt then share in all micro-batches; None: each encodes its own.
    """

    prepare: Callable[..., Batch]
    loss: Callable[[Params, Batch], tuple[jax.Array, Metrics]]
    observe: Callable[[Params, Batch], Any] | None = None
    positions: Positions = Positions()
    encode: Callable[[Params, Images], jax.Array] | None = None


def encoder_of(net: Net) -> Callable[[Params, Images], jax.Array]:
    """`Objective.encode` of an objective that reads this net."""
    return lambda params, images: net.bind(params).image_features(images)


@dataclasses.dataclass(frozen=True)
class Aggregation:
    """The way from the losses of tokens to one number: the mode `algorithm.aggregation`, and the settings that some
    read."""

    mode: str
    max_completion_length: int
    group_size: int
    microbatch_rows: int  # 0: all rows are one micro-batch

    def weights(self, mask, batch: Batch) -> jax.Array:
        """The `loss_weights` `[N,T]` of the tokens in a mask of the batch."""
        return loss_weights(
            mask,
            self.mode,
            max_completion_length=self.max_completion_length,
            group_size=self.group_size,
            microbatch_rows=self.microbatch_rows or batch.rows,
            token_count=batch.scalars.token_count,
        )


def weigh(batch: Batch, weights) -> Batch:
    """The batch with aggregation weights `[N,T]` of its tokens, and each token's share in means."""
    if batch.observed is not None:
        batch = batch.prepare(observed_share=share_of(batch.observed))
    if batch.positive is not None:
        batch = batch.prepare(positive_share=share_of(batch.mask * batch.positive[:, None]))
    if batch.taught is not None:
        batch = batch.prepare(taught_share=share_of(batch.mask * batch.taught[:, None]))
    return batch.prepare(weights=weights, token_share=share_of(batch.mask))


def share_of(mask) -> jax.Array:
    """The share of each token `[N,T]`, row or pair in a mean over the mask: NaN where that is empty, for there is no
    such mean.

    A loss, to which no token adds nothing, reads it through `counted`.
    """
    # Not divided by NaN: XLA takes booleans over a number for 0 where they are false.
    total = mask.sum()
    return jnp.where(total > 0, mask / jnp.maximum(total, 1), jnp.nan)


def side_shares(mask, first, second) -> jax.Array:
    """The shares `[...,2]` in a mean over either side of a mask, such as chosen and rejected, NaN where that is empty.

    `first` and `second` are true on the sides, and broadcast to the mask.
    """
    return jnp.stack([share_of(mask * first), share_of(mask * second)], axis=-1)


def row_share(mask) -> jax.Array:
    """The share `[N]` of each row in a mean over the rows with a token in the mask `[N,T]`, 0 of all where none has."""
    live = (mask > 0).any(axis=1)
    return live / jnp.maximum(live.sum(), 1)


def counted(share, mask) -> jax.Array:
    """The shares `[N,T]` as weights of a loss: 0 outside the mask, also where it is empty."""
    return jnp.where(mask > 0, share, 0.0)


def token_metrics(metrics: Metrics, batch: Batch) -> Metrics:
    """The metrics `[N,T]`, `[N]` or `[]` of a prepared micro-batch as scalars: its share of a mean, its sum, or its
    extreme over the mask. A row's number stands on each of its tokens."""

    def scalar(metric: Metric) -> Metric:
        x = metric.value[:, None] if jnp.ndim(metric.value) == 1 else metric.value
        if metric.reduce == "mean":
            return Metric((batch.prepared.token_share * x).sum(), "sum")
        if metric.reduce == "row_mean":
            share = batch.prepared.row_weights / jnp.maximum(batch.mask.sum(axis=1), 1.0)
            return Metric((batch.mask * share[:, None] * x).sum(), "sum")
        if metric.reduce != "sum":
            x = jnp.where(batch.mask > 0, x, NEUTRAL[metric.reduce])
        return Metric(REDUCE[metric.reduce](x), metric.reduce)

    return {name: scalar(metric) for name, metric in metrics.items()}


def row_metrics(metrics: Metrics, share) -> Metrics:
    """The metrics of rows or pairs of a micro-batch as scalars, without those whose `share` in a mean is 0."""

    def scalar(metric: Metric) -> Metric:
        x = metric.value
        if metric.reduce in ("mean", "row_mean"):
            return Metric(weighted(share, x), "sum")
        counted = jnp.where(share > 0, x, NEUTRAL[metric.reduce]) if jnp.ndim(x) else x
        return Metric(REDUCE[metric.reduce](counted), metric.reduce)

    return {name: scalar(metric) for name, metric in metrics.items()}


def weighted(weights, values) -> jax.Array:
    """`sum(weights * values)` without reading rows of weight 0: those that fill up a batch may be no number."""
    return (weights * jnp.where(weights > 0, values, 0.0)).sum()


def checked_loss(result: Any, shape: tuple[int, ...], each: str) -> tuple[jax.Array, Metrics]:
    """(loss, metrics) of what a loss returned; raises ConfigError unless it is one number for `each`, of that shape."""
    loss, metrics = with_metrics(result)
    if jnp.shape(loss) != shape:
        raise ConfigError(
            f"algorithm.loss returns an array of the shape {jnp.shape(loss)}, but it must return one number for each "
            f"{each}, {shape}"
        )
    return loss, metrics
