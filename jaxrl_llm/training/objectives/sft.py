"""Supervised fine-tuning: the cross-entropy of the tokens in the mask, or another loss of their log-probs."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.aggregation import loss_weights
from jaxrl_llm.algorithms.batch import Batch
from jaxrl_llm.algorithms.losses import Metric, Metrics
from jaxrl_llm.algorithms.sft_losses import nll
from jaxrl_llm.models.chunked_softmax import Slopes
from jaxrl_llm.models.logprobs import token_statistics
from jaxrl_llm.models.net import Net, Params
from jaxrl_llm.training.objectives.objective import Objective, checked_loss, row_share, token_metrics, weigh


@dataclasses.dataclass(frozen=True)
class SFTSpec:
    """Settings of `algorithm` that supervised fine-tuning reads."""

    label_smoothing: float
    loss: Callable[..., Any] = nll  # of algorithms.sft_losses, or the user's own, with its options


def sft(spec: SFTSpec, net: Net) -> Objective:
    """The loss of the tokens in the mask, averaged over the tokens of the optimizer batch: cross-entropy, or another.

    With `label_smoothing` the targets are smoothed (arXiv 1512.00567).
    """
    takes_entropy = "entropy" in inspect.signature(spec.loss).parameters

    def prepare(batch: Batch) -> Batch:
        return weigh(batch, loss_weights(batch.mask, "token")).prepare(row_weights=row_share(batch.mask))

    def loss(params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        slopes = Slopes(-batch.prepared.weights) if spec.loss is nll else None
        tokens = token_statistics(net, params, batch.inputs, smoothing=spec.label_smoothing, slopes=slopes)
        # Padding has log-prob 0, at which the logarithm of 1 - p is infinite, and so is no weight of 0 times it.
        read = jnp.where(batch.mask > 0, tokens.logps, -1.0)
        more = {"entropy": tokens.entropy} if takes_entropy else {}
        per_token, own = checked_loss(spec.loss(read, **more), batch.mask.shape, "token")
        metrics = {"entropy": Metric(tokens.entropy), "mean_token_accuracy": Metric(tokens.is_top), **own}
        return (batch.prepared.weights * per_token).sum(), token_metrics(metrics, batch)

    return Objective(prepare, loss)
