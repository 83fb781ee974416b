"""The objective of reward models: Bradley-Terry on the scores of a pair's last tokens."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.batch import Batch
from jaxrl_llm.algorithms.losses import Metric, Metrics
from jaxrl_llm.algorithms.sequence_logps import split_pairs
from jaxrl_llm.models.logprobs import last_scores
from jaxrl_llm.models.net import Net, Params
from jaxrl_llm.training.objectives.objective import Objective, Positions, checked_loss, row_metrics, weighted


def reward_model(loss_of: Callable[..., Any], net: Net) -> Objective:
    """The mean over pairs of the loss of their scores; `net` has a score head.

    `loss_of(chosen, rejected, margins)`, all `[pairs]`, is as `preference_losses.bradley_terry`.
    """

    def prepare(batch: Batch) -> Batch:
        valid = (batch.mask > 0).any(axis=1).reshape(-1, 2).all(axis=1)
        return batch.prepare(row_weights=jnp.repeat(valid / jnp.maximum(valid.sum(), 1), 2))

    def loss(params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        scores, row_weights = last_scores(net, params, batch.inputs), batch.prepared.row_weights
        chosen, rejected = split_pairs(scores)
        share, counted = split_pairs(row_weights)[0], row_weights > 0
        margins = None if batch.margins is None else split_pairs(batch.margins)[0]
        per_pair, own = checked_loss(loss_of(chosen, rejected, margins), share.shape, "pair")
        return weighted(share, per_pair), row_metrics(own, share) | {
            "accuracy": Metric((share * (chosen > rejected)).sum(), "sum"),
            "margin": Metric((share * (chosen - rejected)).sum(), "sum"),
            "mean_reward": Metric((row_weights * scores).sum() / 2, "sum"),
            "min_reward": Metric(jnp.where(counted, scores, jnp.inf).min(), "min"),
            "max_reward": Metric(jnp.where(counted, scores, -jnp.inf).max(), "max"),
        }

    return Objective(prepare, loss, positions=Positions(last=True))
