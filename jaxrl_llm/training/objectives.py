"""The objectives an update can minimise. Each reads a `Batch` and returns one number per token; the only reduction is
`sum(weights * loss)`.

An objective is two pure functions. `prepare(batch)` fills in what needs the whole optimizer batch (weights, and each
token's share in metrics); `loss(params, batch)` is then called on each micro-batch, and losses and metrics add up.
"""

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import policy_losses
from jaxrl_llm.algorithms.aggregation import loss_weights
from jaxrl_llm.algorithms.batch import Batch
from jaxrl_llm.algorithms.entropy import top_entropy_mask
from jaxrl_llm.algorithms.kl import kl_estimate
from jaxrl_llm.algorithms.off_policy import importance_correction, mismatch_kl, off_policy_sequence_mask
from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.transformer import Net, Params
from jaxrl_llm.names import resolve_with_options, split_options
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


def weigh(batch: Batch, mode: str, **options) -> Batch:
    """The batch with the weights of an aggregation mode (`loss_weights`), and each token's share in metrics."""
    mask = batch.mask
    return batch.replace(
        weights=loss_weights(mask, mode, **options),
        token_share=mask / jnp.maximum(mask.sum(), 1.0),
    )


# Filled in by the objective, so no options of a policy loss.
GIVEN = ("logps", "old_logps", "advantages", "epsilon_low", "epsilon_high", "mask", "key", "importance_weights")
# Which ratio `clip_ratio/*` counts, where it is not each token's; losses without a clip range do not measure it.
CLIP_LEVELS = {"gspo": "sequence", "gspo_token": "sequence", "luspo": "sequence", "rloo": "sequence_sum"}
UNCLIPPED = ("sapo", "reinforce", "vespo", "dppo", "kl_cov")


class PolicyLoss(NamedTuple):
    """The policy loss that `algorithm.loss` names, with its options."""

    name: str
    function: Callable[..., jax.Array]
    options: dict[str, Any]

    def asks_for(self, name: str) -> bool:
        """True when the loss has an argument `name`."""
        return name in inspect.signature(self.function).parameters


def policy_loss(config) -> PolicyLoss:
    """The policy loss of a configuration; raises ConfigError for an unknown one, or options that it does not have."""
    algorithm = config.algorithm
    function, options = resolve_with_options(algorithm.loss, policy_losses, GIVEN)
    found = PolicyLoss(split_options(algorithm.loss)[0], function, options)
    for key, value in (("delta", algorithm.delta), ("dual_clip", algorithm.dual_clip)):
        if value is not None and not found.asks_for(key):
            raise ConfigError(
                f"algorithm.{key} is {value}, but algorithm.loss = {algorithm.loss!r} has no such option: leave it none"
            )
        if value is not None:
            options[key] = value
    return found


def kl_kind(config) -> str:
    """The KL estimator: `algorithm.kl`, or what its `auto` stands for."""
    if config.algorithm.kl != "auto":
        return config.algorithm.kl
    return "k1" if config.algorithm.kl_in_reward else "k3"


def needs_key(config) -> bool:
    """True when the policy loss draws random numbers."""
    return policy_loss(config).asks_for("key")


def policy_gradient(config, net: Net) -> Objective:
    """`policy term + beta * KL - entropy_coef * entropy`, per token; see `_policy_term`.

    Without `batch.old_logps` the policy that is updated is the one that sampled, and the ratio is 1. The KL term is
    masked by nothing but the mask; with `kl_bias_correction` it is multiplied by the ratio of each token. Warns of k1
    in the loss, whose gradient is 0 in expectation.
    """
    algorithm, chosen, kind = config.algorithm, policy_loss(config), kl_kind(config)
    if algorithm.beta and kind == "k1" and not algorithm.kl_in_reward:
        warnings.warn(
            "algorithm.kl is k1 in the loss: the expected gradient of this term is 0, so beta does not hold the policy "
            "near the reference; use k3 or k2, or algorithm.kl_in_reward",
            stacklevel=2,
        )

    def scored(params: Params, batch: Batch):
        return token_logps(
            net, params, batch.tokens, batch.segments, batch.positions, config.rollout.temperature, batch.prompt_width
        )

    def prepare(batch: Batch, entropy=None) -> Batch:
        if entropy is not None:
            keep = top_entropy_mask(entropy, batch.mask, algorithm.top_entropy_quantile)
            batch = batch.replace(keep=keep.astype(jnp.float32))
        return weigh(
            batch,
            algorithm.aggregation,
            max_completion_length=config.rollout.max_completion_length,
            microbatch_rows=config.batch.microbatch_rows or batch.rows,
        )

    def loss(params: Params, batch: Batch):
        logps, entropy = scored(params, batch)
        old_logps = jax.lax.stop_gradient(logps) if batch.old_logps is None else batch.old_logps
        per_token, measured = _policy_term(algorithm, chosen, logps, old_logps, batch)
        if batch.ref_logps is not None:
            ratio = jnp.exp(jnp.where(batch.mask > 0, logps - old_logps, 0.0)) if algorithm.kl_bias_correction else None
            measured["kl"] = kl_estimate(logps, batch.ref_logps, kind, ratio=ratio)
            per_token += (algorithm.beta if batch.kl_coef is None else batch.kl_coef[:, None]) * measured["kl"]
        if algorithm.entropy_coef or batch.entropy_coef is not None:
            coef = algorithm.entropy_coef if batch.entropy_coef is None else batch.entropy_coef[:, None]
            per_token -= coef * entropy
        metrics = {name: (batch.token_share * x).sum() for name, x in {"entropy": entropy, **measured}.items()}
        metrics |= _mismatch_metrics(algorithm, old_logps, batch)
        return (batch.weights * per_token).sum(), metrics

    return Objective(prepare, loss, (lambda *x: scored(*x)[1]) if algorithm.top_entropy_quantile < 1 else None)


def _policy_term(algorithm, chosen: PolicyLoss, logps, old_logps, batch: Batch) -> tuple[jax.Array, Metrics]:
    """The policy loss `[N,T]`, and what is measured of it per token.

    Multiplied, in this order, by the off-policy sequence mask, by the top-entropy mask and by the importance weights of
    the sampler, which a loss that asks for `importance_weights` gets instead.
    """
    epsilons, mask, advantages = (algorithm.epsilon_low, algorithm.epsilon_high), batch.mask, batch.advantages
    given = dict(chosen.options)
    if chosen.asks_for("key"):
        given["key"] = jax.random.key(batch.seeds[0])
    correction = None
    if algorithm.importance_correction != "none":
        correction, _ = importance_correction(
            old_logps, batch.sample_logps, mask, algorithm.importance_correction, algorithm.importance_max,
            algorithm.importance_min,
        )  # fmt: skip
    if correction is not None and chosen.asks_for("importance_weights"):
        given["importance_weights"], correction = correction, None
    per_token = chosen.function(logps, old_logps, advantages, *epsilons, mask=mask, **given)
    measured = _clip_metrics(algorithm, chosen.name, logps, old_logps, batch)
    if algorithm.off_policy_mask_threshold is not None:
        keep = off_policy_sequence_mask(
            advantages, batch.sample_logps, logps, mask, algorithm.off_policy_mask_threshold
        )
        per_token, measured["off_policy_masked"] = per_token * keep, 1.0 - keep
    if batch.keep is not None:
        per_token *= batch.keep
    return per_token if correction is None else per_token * correction, measured


def _clip_metrics(algorithm, name: str, logps, old_logps, batch: Batch) -> Metrics:
    """On which tokens the loss clipped its ratio."""
    low, high = algorithm.epsilon_low, algorithm.epsilon_high
    if name in UNCLIPPED:
        return {}
    if name == "gmpo":  # its epsilons bound the log-ratio
        low, high = -math.expm1(-low), math.expm1(high)
    if name == "cispo":  # its epsilon_high is the ratio itself
        high -= 1.0
    found = policy_losses.clip_fractions(
        logps, old_logps, batch.advantages, low, high, mask=batch.mask, level=CLIP_LEVELS.get(name, "token"),
        dual_clip=algorithm.dual_clip,
    )  # fmt: skip
    if name == "cispo":
        return {"cispo_clip_ratio": found.high}
    dual = {} if algorithm.dual_clip is None else {"clip_ratio/dual_mean": found.dual}
    return {
        "clip_ratio/low_mean": found.low,
        "clip_ratio/high_mean": found.high,
        "clip_ratio/region_mean": found.region,
        **dual,
    }


def _mismatch_metrics(algorithm, old_logps, batch: Batch) -> Metrics:
    """How far the sampler's log-probs are from the trainer's, before any correction.

    The ratio is that of whole rows where `importance_correction` is, else that of tokens.
    """
    live, share = batch.mask > 0, batch.token_share
    difference = jnp.where(live, jnp.abs(old_logps - batch.sample_logps), 0.0)
    level = "sequence" if algorithm.importance_correction.startswith("sequence") else "token"
    _, ratio = importance_correction(old_logps, batch.sample_logps, batch.mask, f"{level}_truncate")
    return {
        "sampling/logp_difference/mean": (share * difference).sum(),
        "sampling/logp_difference/max": difference.max(),
        "sampling/importance_sampling_ratio/mean": (share * ratio).sum(),
        "sampling/importance_sampling_ratio/min": jnp.where(live, ratio, jnp.inf).min(),
        "sampling/importance_sampling_ratio/max": jnp.where(live, ratio, 0.0).max(),
        # The mean over this part's tokens, times the share they have in the optimizer batch.
        "rollout_corr/kl": mismatch_kl(old_logps, batch.sample_logps, batch.mask) * share.sum(),
    }


def sft(config, net: Net) -> Objective:
    """Cross-entropy of the tokens in the mask, averaged over the tokens of the optimizer batch."""

    def prepare(batch: Batch) -> Batch:
        return weigh(batch, "token")

    def loss(params: Params, batch: Batch):
        logps, entropy = token_logps(net, params, batch.tokens, batch.segments, batch.positions)
        value = -(batch.weights * logps).sum()
        return value, {"entropy": (batch.token_share * entropy).sum()}

    return Objective(prepare, loss)
