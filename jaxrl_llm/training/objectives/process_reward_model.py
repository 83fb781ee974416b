"""The objective of process reward models: the cross-entropy of wrong and right at the last token of each step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.batch import Batch
from jaxrl_llm.algorithms.losses import Metric, Metrics
from jaxrl_llm.models.logprobs import step_logits
from jaxrl_llm.models.net import Net, Params
from jaxrl_llm.training.objectives.objective import (
    Objective,
    Positions,
    checked_loss,
    counted,
    row_share,
    share_of,
    side_shares,
    token_metrics,
)


def process_reward_model(loss_of: Callable[..., Any], net: Net) -> Objective:
    """The mean over the steps of the optimizer batch of the loss of their logits; `net` has a step head.

    `loss_of(logits [N,T,2], labels [N,T])` is as `step_losses.step_cross_entropy`. The mask is 1 on the last token of
    each step, and `batch.step_labels` say there how right it is.
    """

    def prepare(batch: Batch) -> Batch:
        mask, right = batch.mask, batch.step_labels > 0.5
        return batch.prepare(
            token_share=share_of(mask), side_share=side_shares(mask, ~right, right), row_weights=row_share(mask)
        )

    def loss(params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        logits, share = step_logits(net, params, batch.inputs), batch.prepared.token_share
        per_step, own = checked_loss(loss_of(logits, batch.step_labels), batch.mask.shape, "token")
        log_odds, right = logits[..., 1] - logits[..., 0], batch.step_labels > 0.5
        correct = (log_odds > 0) == right
        of_wrong, of_right = jnp.moveaxis(batch.prepared.side_share, -1, 0)
        return (counted(share, batch.mask) * per_step).sum(), token_metrics(own, batch) | {
            "accuracy": Metric((share * correct).sum(), "sum"),
            "accuracy_wrong": Metric((of_wrong * correct).sum(), "sum"),
            "accuracy_right": Metric((of_right * correct).sum(), "sum"),
            "margin": Metric((share * jnp.where(right, log_odds, -log_odds)).sum(), "sum"),
            "mean_reward": Metric((share * jax.nn.sigmoid(log_odds)).sum(), "sum"),
        }

    return Objective(prepare, loss, positions=Positions(after=True))
