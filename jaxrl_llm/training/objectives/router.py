"""The auxiliary loss of mixtures of experts: an objective and, with it, the even use of experts."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.batch import Batch
from jaxrl_llm.algorithms.losses import Metric, Metrics
from jaxrl_llm.models.moe import Routing, balance_loss
from jaxrl_llm.models.net import Net, Params, RecordingNet
from jaxrl_llm.training.objectives.objective import Objective


def with_router_loss(make: Callable[[Net], Objective], net: Net) -> Objective:
    """The objective `make(net)`, plus the net's `router_aux_loss_coef` times `balance_loss`; of a dense net, as it is.

    The metric `aux_loss` is that of all tokens that are no padding, prompts included, in one micro-batch. Of several
    it is their mean, weighted by their tokens: evenness is asked of each by itself, as in transformers and verl.
    """
    objective = make(net)
    if not net.config.experts:
        return objective

    def prepare(batch: Batch, *observed) -> Batch:
        real = (batch.inputs.segments != 0).sum(axis=1).astype(jnp.float32)
        return objective.prepare(batch, *observed).prepare(real_share=real / jnp.maximum(real.sum(), 1.0))

    def loss(params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        routings: list[Routing] = []
        value, metrics = make(RecordingNet(net.config, routings.append)).loss(params, batch)
        share = batch.prepared.real_share.sum() / len(routings)
        auxiliary = share * sum(balance_loss(routing) for routing in routings)
        return value + net.config.router_aux_loss_coef * auxiliary, metrics | {"aux_loss": Metric(auxiliary, "sum")}

    return objective._replace(prepare=prepare, loss=loss)
