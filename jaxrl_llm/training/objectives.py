"""The objectives an update can minimise. Each reads a `Batch` and returns one number per token; the only reduction is
`sum(weights * loss)`.

An objective is two pure functions. `prepare(batch)` fills in what needs the whole optimizer batch (weights, and each
token's share in metrics); `loss(params, batch)` is then called on each micro-batch, and losses and metrics add up.
"""

import inspect
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import policy_losses
from jaxrl_llm.algorithms.aggregation import loss_weights
from jaxrl_llm.algorithms.batch import Batch
from jaxrl_llm.algorithms.kl import kl_estimate
from jaxrl_llm.config import ConfigError, resolve
from jaxrl_llm.models.transformer import Net, Params
from jaxrl_llm.policy import token_logps

Metrics = dict[str, jax.Array]


class Objective(NamedTuple):
    """What an update minimises. Metrics add up over micro-batches, some by maximum or minimum (`merged_by`).

    Where the whole batch matters through the policy itself, `observe(params, part)` gives numbers per row of each
    micro-batch, without gradient, and those of the whole batch are the second argument of `prepare`.
    """

    prepare: Callable[..., Batch]
    loss: Callable[[Params, Batch], tuple[jax.Array, Metrics]]
    observe: Callable[[Params, Batch], jax.Array] | None = None


def merged_by(name: str) -> str:
    """How a metric of two parts is made one: "max" (`x/max`, `max_x`), "min" (`x/min`, `min_x`), else "sum"."""
    for kind in ("max", "min"):
        if name.endswith(f"/{kind}") or name.startswith(f"{kind}_"):
            return kind
    return "sum"


def _weigh(batch: Batch, mode: str, **options) -> Batch:
    mask = batch.mask
    return batch.replace(
        weights=loss_weights(mask, mode, **options),
        token_share=mask / jnp.maximum(mask.sum(), 1.0),
    )


def policy_gradient(config, net: Net) -> Objective:
    """`policy loss + beta * KL - entropy_coef * entropy`, per token.

    Without `batch.old_logps` the policy that is updated is the one that sampled, and the ratio is 1.
    """
    algorithm = config.algorithm
    policy_loss = resolve(algorithm.loss, policy_losses)
    options = {"delta": algorithm.delta, "dual_clip": algorithm.dual_clip}
    options = {name: value for name, value in options.items() if value is not None}
    unknown = options.keys() - inspect.signature(policy_loss).parameters.keys()
    if unknown:
        raise ConfigError(
            f"algorithm.{sorted(unknown)[0]} is set, but algorithm.loss = {algorithm.loss!r} has no such option"
        )
    epsilons = (algorithm.epsilon_low, algorithm.epsilon_high)
    level = "sequence" if str(algorithm.loss).startswith("gspo") else "token"

    def prepare(batch: Batch) -> Batch:
        return _weigh(
            batch,
            algorithm.aggregation,
            max_completion_length=config.rollout.max_completion_length,
            microbatch_rows=config.batch.microbatch_rows or batch.rows,
        )

    def loss(params: Params, batch: Batch):
        logps, entropy = token_logps(
            net, params, batch.tokens, batch.segments, batch.positions, config.rollout.temperature, batch.prompt_width
        )
        old_logps = jax.lax.stop_gradient(logps) if batch.old_logps is None else batch.old_logps
        per_token = policy_loss(logps, old_logps, batch.advantages, *epsilons, mask=batch.mask, **options)
        clipped = policy_losses.clip_fractions(
            logps, old_logps, batch.advantages, *epsilons, mask=batch.mask, level=level
        )
        mismatch = jnp.where(batch.mask > 0, jnp.abs(old_logps - batch.sample_logps), 0.0)
        measured = {
            "entropy": entropy,
            "clip_ratio/low_mean": clipped.low,
            "clip_ratio/high_mean": clipped.high,
            "clip_ratio/region_mean": clipped.region,
            "sampling/logp_difference/mean": mismatch,
        }
        if batch.ref_logps is not None:
            measured["kl"] = kl_estimate(logps, batch.ref_logps, algorithm.kl)
            per_token += algorithm.beta * measured["kl"]
        if algorithm.entropy_coef:
            per_token -= algorithm.entropy_coef * entropy
        metrics = {name: (batch.token_share * value).sum() for name, value in measured.items()}
        metrics["sampling/logp_difference/max"] = mismatch.max()
        return (batch.weights * per_token).sum(), metrics

    return Objective(prepare, loss)


def sft(config, net: Net) -> Objective:
    """Cross-entropy of the tokens in the mask, averaged over the tokens of the optimizer batch."""

    def prepare(batch: Batch) -> Batch:
        return _weigh(batch, "token")

    def loss(params: Params, batch: Batch):
        logps, entropy = token_logps(net, params, batch.tokens, batch.segments, batch.positions)
        value = -(batch.weights * logps).sum()
        return value, {"entropy": (batch.token_share * entropy).sum()}

    return Objective(prepare, loss)
