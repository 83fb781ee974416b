"""The auxiliary loss of mixtures of experts: an objective and, with it, the even use of experts."""

from collections.abc import Callable

import jax.numpy as jnp

from jaxrl_llm.algorithms.batch import Batch
from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.moe import Routing, balance_loss
from jaxrl_llm.models.transformer import Net, Params, RecordingNet
from jaxrl_llm.training.objectives.policy_gradient import Metrics, Objective


def with_router_loss(make: Callable[..., Objective], config, net: Net) -> Objective:
    """The objective `make(config, net)`, plus the net's `router_aux_loss_coef` times `balance_loss`.

    The metric `aux_loss` is that of all tokens that are no padding, prompts included, in one micro-batch. Of several
    it is their mean, weighted by their tokens: evenness is asked of each by itself, as in transformers and verl. A
    dense net's objective stays as it is.

    Raises ConfigError where `model.router_aux_loss_coef` or `model.freeze_router` is set for a dense net.
    """
    objective = make(config, net)
    if not net.config.experts:
        if config.model.router_aux_loss_coef is not None or config.model.freeze_router:
            raise ConfigError(
                "model.router_aux_loss_coef and model.freeze_router are of mixtures of experts, and "
                f"{config.model.path} has no experts: leave them at their defaults"
            )
        return objective

    def prepare(batch: Batch, *observed) -> Batch:
        real = (batch.inputs.segments != 0).sum(axis=1).astype(jnp.float32)
        return objective.prepare(batch, *observed).prepare(real_share=real / jnp.maximum(real.sum(), 1.0))

    def loss(params: Params, batch: Batch) -> tuple:
        found: list[Routing] = []
        value, metrics = make(config, RecordingNet(net.config, found.append)).loss(params, batch)
        shares = batch.prepared.real_share.sum() / len(found)
        auxiliary = shares * sum(balance_loss(routing) for routing in found)
        measured: Metrics = metrics | {"aux_loss": auxiliary}
        return value + net.config.router_aux_loss_coef * auxiliary, measured

    return objective._replace(prepare=prepare, loss=loss)
