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
from jaxrl_llm.algorithms.aggregation import loss_weights, masked_mean
from jaxrl_llm.algorithms.batch import Batch
from jaxrl_llm.algorithms.controllers import top_entropy_mask
from jaxrl_llm.algorithms.kl import kl_estimate
from jaxrl_llm.algorithms.off_policy import importance_correction, mismatch_kl, off_policy_sequence_mask
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.resolve import resolve_with_options, split_options
from jaxrl_llm.models.chunked_softmax import Slopes
from jaxrl_llm.models.logprobs import token_logps, token_statistics
from jaxrl_llm.models.transformer import Net, Params

Metrics = dict[str, jax.Array]


class Reads(NamedTuple):
    """Of which tokens an objective reads what the net says; by default of those in the mask, of all rows."""

    last: bool = False  # of each row's last token, and of the state after it
    unmasked: bool = False  # of all that are no padding
    alternate: bool = False  # the loss reads rows 0, 2, 4, ..., and `observe` the others


class Objective(NamedTuple):
    """What an update minimises. Metrics add up over micro-batches, some by maximum or minimum (`merged_by`).

    Where the whole batch matters through the policy itself, `observe(params, part)` gives numbers per row of each
    micro-batch, without gradient, and those of the whole batch are the second argument of `prepare`.
    """

    prepare: Callable[..., Batch]
    loss: Callable[[Params, Batch], tuple[jax.Array, Metrics]]
    observe: Callable[[Params, Batch], Any] | None = None
    reads: Reads = Reads()


def merged_by(name: str) -> str:
    """How a metric of two parts is made one: "max" (`x/max`, `max_x`, `x_max`), "min" (the same), else "sum"."""
    words = name.rpartition("/")[2].split("_")
    return next((kind for kind in ("max", "min") if kind in (words[0], words[-1])), "sum")


def weigh(batch: Batch, mode: str, **options) -> Batch:
    """The batch with the weights of an aggregation mode (`loss_weights`), and each token's share in metrics."""
    mask = batch.mask
    return batch.prepare(
        weights=loss_weights(mask, mode, **options),
        token_share=mask / jnp.maximum(mask.sum(), 1.0),
    )


# Filled in by the objective, so no options of a policy loss.
GIVEN = ("logps", "old_logps", "advantages", "epsilon_low", "epsilon_high", "mask", "key", "importance_weights",
         "selected")  # fmt: skip
# Which ratio `clip_ratio/*` counts, where it is not each token's; losses without a clip range do not measure it.
CLIP_LEVELS = {"gspo": "sequence", "gspo_token": "sequence", "luspo": "sequence", "rloo": "sequence_sum"}
# Losses that treat few tokens otherwise, chosen among those of the whole optimizer batch.
SELECTIONS = {"clip_cov": policy_losses.clip_cov_tokens, "kl_cov": policy_losses.kl_cov_tokens}
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
    """`policy term + beta * KL` per token (see `_policy_term`), minus `entropy_coef` x the mean entropy of a token.

    The entropy bonus is that of the tokens whose policy term counts, the same in every aggregation mode. Without
    `batch.old_logps` the policy that is updated is the one that sampled, and the ratio is 1. The KL term is masked by
    nothing but the mask; with `kl_bias_correction` it is multiplied by the ratio that the loss clips. Warns of k1 in
    the loss, whose gradient is 0 in expectation.
    """
    algorithm, chosen = config.algorithm, policy_loss(config)
    if algorithm.beta and kl_kind(config) == "k1" and not algorithm.kl_in_reward:
        warnings.warn(
            "algorithm.kl is k1 in the loss: the expected gradient of this term is 0, so beta does not hold the policy "
            "near the reference; use k3 or k2, or algorithm.kl_in_reward",
            stacklevel=2,
        )

    def scored(params: Params, batch: Batch):
        return token_logps(net, params, batch.inputs, config.rollout.temperature)

    def prepare(batch: Batch, observed=None) -> Batch:
        if observed is not None and algorithm.top_entropy_quantile < 1:
            keep = top_entropy_mask(observed[1], batch.mask, algorithm.top_entropy_quantile).astype(jnp.float32)
            batch = batch.prepare(keep=keep, entropy_share=keep / jnp.maximum(keep.sum(), 1.0))
        if observed is not None and chosen.name in SELECTIONS:
            batch = batch.prepare(selected=_selected(algorithm, chosen, observed[0], batch))
        batch = batch.prepare(row_weights=jnp.full(batch.rows, 1.0 / batch.rows))
        return weigh(
            batch,
            algorithm.aggregation,
            max_completion_length=config.rollout.max_completion_length,
            microbatch_rows=config.batch.microbatch_rows or batch.rows,
            token_count=batch.scalars.token_count,
        )

    def loss(params: Params, batch: Batch):
        slopes = policy_slopes(config, batch)
        statistics = token_statistics(net, params, batch.inputs, config.rollout.temperature, slopes=slopes)
        return policy_terms(config, statistics.logps, statistics.entropy, batch)

    observes = algorithm.top_entropy_quantile < 1 or chosen.name in SELECTIONS
    return Objective(prepare, loss, scored if observes else None)


def policy_terms(config, logps, entropy, batch: Batch) -> tuple[jax.Array, Metrics]:
    """The loss of a prepared batch in terms of its tokens' log-probs and entropies `[N,T]`, and its metrics."""
    algorithm = config.algorithm
    old_logps = jax.lax.stop_gradient(logps) if batch.old_logps is None else batch.old_logps
    per_token, measured = _policy_term(algorithm, policy_loss(config), logps, old_logps, batch)
    totals = {"policy_term": (batch.prepared.weights * per_token).sum()}
    if batch.ref_logps is not None:
        ratio = _kl_ratio(config, logps - old_logps, batch.mask) if algorithm.kl_bias_correction else None
        measured["kl"] = kl_estimate(logps, batch.ref_logps, kl_kind(config), ratio=ratio)
        per_token += (algorithm.beta if batch.scalars.kl_coef is None else batch.scalars.kl_coef) * measured["kl"]
    value = (batch.prepared.weights * per_token).sum()
    if algorithm.entropy_coef or batch.scalars.entropy_coef is not None:
        coef = algorithm.entropy_coef if batch.scalars.entropy_coef is None else batch.scalars.entropy_coef
        bonus = entropy * (
            batch.prepared.token_share if batch.prepared.entropy_share is None else batch.prepared.entropy_share
        )
        totals |= {"policy_loss": value} | ({} if batch.prepared.keep is None else {"entropy_kept": bonus.sum()})
        value -= (coef * bonus).sum()
    metrics = {name: (_share(config, name, batch) * x).sum() for name, x in {"entropy": entropy, **measured}.items()}
    metrics |= _mismatch_metrics(algorithm, old_logps, batch) | _clip_extremes(measured, batch.mask)
    return value, metrics | totals


# Losses that depend on log-probs through their change since the rows were sampled alone.
BY_CHANGE = ("ppo_clip", "gspo", "gspo_token", "cispo", "sapo", "reinforce", "rloo", "gmpo", "luspo")


def policy_slopes(config, batch: Batch) -> Slopes | None:
    """The derivatives by each log-prob `[N,T]` of the loss of `policy_terms`, where they are known before those are.

    That is where the updated policy is the one that sampled, so that ratios are 1: the derivatives are those at any
    log-probs, and of the KL term those at the reference's. None where the log-probs themselves enter.
    """
    algorithm, chosen = config.algorithm, policy_loss(config)
    enters = (
        algorithm.importance_correction != "none",
        algorithm.off_policy_mask_threshold is not None,
        algorithm.entropy_coef or batch.scalars.entropy_coef is not None,
        algorithm.kl_bias_correction and batch.ref_logps is not None,
        chosen.name not in BY_CHANGE,
        batch.old_logps is not None,
    )
    if any(enters):
        return None

    def policy_part(logps):
        per_token, _ = _policy_term(algorithm, chosen, logps, jnp.zeros_like(logps), batch)
        return (batch.prepared.weights * per_token).sum()

    constant = jax.grad(policy_part)(jnp.zeros(batch.mask.shape))
    if batch.ref_logps is None:
        return Slopes(constant)
    coef = algorithm.beta if batch.scalars.kl_coef is None else batch.scalars.kl_coef
    return Slopes(constant, batch.prepared.weights * coef, batch.ref_logps, kl_kind(config))


def _share(config, name: str, batch: Batch) -> jax.Array:
    """Each token's share `[N,T]` in a metric: a mean over tokens or, of the clipping of whole rows, over rows."""
    if not name.startswith("clip_ratio/") or policy_loss(config).name not in CLIP_LEVELS:
        return batch.prepared.token_share
    return batch.mask * (batch.prepared.row_weights / jnp.maximum(batch.mask.sum(axis=1), 1.0))[:, None]


def _selected(algorithm, chosen: PolicyLoss, logps, batch: Batch) -> jax.Array:
    """The tokens `[N,T]` of the whole batch that the loss treats otherwise."""
    old_logps = logps if batch.old_logps is None else batch.old_logps
    options = dict(chosen.options) | ({"key": jax.random.key(batch.seeds[0])} if chosen.asks_for("key") else {})
    found = SELECTIONS[chosen.name](
        logps, old_logps, batch.advantages, algorithm.epsilon_low, algorithm.epsilon_high, mask=batch.mask, **options
    )
    return found.astype(jnp.float32)


def _kl_ratio(config, log_ratio, mask) -> jax.Array:
    """The ratio, with its gradient, that corrects the KL term: of tokens or, where the loss has one, of sequences."""
    log_ratio = jnp.where(mask > 0, log_ratio, 0.0)
    if CLIP_LEVELS.get(policy_loss(config).name) == "sequence":
        log_ratio = masked_mean(log_ratio, mask, axis=-1, keepdims=True)
    return jnp.exp(log_ratio)


def _policy_term(algorithm, chosen: PolicyLoss, logps, old_logps, batch: Batch) -> tuple[jax.Array, Metrics]:
    """The policy loss `[N,T]`, and what is measured of it per token.

    Multiplied, in this order, by the off-policy sequence mask, by the top-entropy mask and by the importance weights of
    the sampler, which a loss that asks for `importance_weights` gets instead.
    """
    epsilons, mask, advantages = (algorithm.epsilon_low, algorithm.epsilon_high), batch.mask, batch.advantages
    given = dict(chosen.options)
    if chosen.name in SELECTIONS:
        given["selected"] = batch.prepared.selected
    elif chosen.asks_for("key"):
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
    measured = _clip_metrics(algorithm, chosen.name, logps, old_logps, batch) | _ratio_metrics(logps, old_logps, mask)
    if algorithm.off_policy_mask_threshold is not None:
        keep = off_policy_sequence_mask(
            advantages, batch.sample_logps, logps, mask, algorithm.off_policy_mask_threshold
        )
        per_token, measured["off_policy_masked"] = per_token * keep, 1.0 - keep
    if batch.prepared.keep is not None:
        per_token *= batch.prepared.keep
    return per_token if correction is None else per_token * correction, measured


def _ratio_metrics(logps, old_logps, mask) -> Metrics:
    """How far the policy is from the one that started the step: both KL estimates, and the ratio itself."""
    change = jax.lax.stop_gradient(jnp.where(mask > 0, logps - old_logps, 0.0))
    return {"ratio/kl": -change, "ratio/squared": 0.5 * jnp.square(change), "ratio/mean": jnp.exp(change)}


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


def _clip_extremes(measured: Metrics, mask) -> Metrics:
    """The smallest share of a row's tokens that the lower bound clips, and the largest that the upper one does."""
    if "clip_ratio/low_mean" not in measured:
        return {}
    low, high = (masked_mean(measured[f"clip_ratio/{side}_mean"], mask, axis=-1) for side in ("low", "high"))
    live = (mask > 0).any(axis=-1)
    return {
        "clip_ratio/low_min": jnp.where(live, low, jnp.inf).min(),
        "clip_ratio/high_max": jnp.where(live, high, 0.0).max(),
    }


def _mismatch_metrics(algorithm, old_logps, batch: Batch) -> Metrics:
    """How far the sampler's log-probs are from the trainer's, before any correction.

    The ratio is that of whole rows where `importance_correction` is, else that of tokens.
    """
    live, share = batch.mask > 0, batch.prepared.token_share
    difference = jnp.where(live, jnp.abs(old_logps - batch.sample_logps), 0.0)
    level = "sequence" if algorithm.importance_correction.startswith("sequence") else "token"
    _, ratio = importance_correction(old_logps, batch.sample_logps, batch.mask, f"{level}_truncate")
    return {
        "sampling/sampling_logp_difference/mean": (share * difference).sum(),
        "sampling/sampling_logp_difference/max": difference.max(),
        "sampling/importance_sampling_ratio/mean": (share * ratio).sum(),
        "sampling/importance_sampling_ratio/min": jnp.where(live, ratio, jnp.inf).min(),
        "sampling/importance_sampling_ratio/max": jnp.where(live, ratio, 0.0).max(),
        # The mean over this part's tokens, times the share they have in the optimizer batch.
        "rollout_corr/kl": mismatch_kl(old_logps, batch.sample_logps, batch.mask) * share.sum(),
    }


def sft(config, net: Net) -> Objective:
    """Cross-entropy of the tokens in the mask, averaged over the tokens of the optimizer batch.

    With `label_smoothing` the targets are smoothed (arXiv 1512.00567), and where the batch has seeds the embeddings get
    NEFTune's noise (arXiv 2310.05914): uniform in +- neftune_alpha / sqrt(tokens of the row x D).
    """
    smoothing, alpha = config.algorithm.label_smoothing, config.algorithm.neftune_alpha

    def prepare(batch: Batch) -> Batch:
        return weigh(batch, "token")

    def loss(params: Params, batch: Batch):
        noise = None if batch.seeds is None else neftune_noise(batch, net.config.width, alpha)
        inputs, slopes = batch.inputs.replace(noise=noise), Slopes(-batch.prepared.weights)
        tokens = token_statistics(net, params, inputs, smoothing=smoothing, slopes=slopes)
        measured = {"entropy": tokens.entropy, "mean_token_accuracy": tokens.is_top}
        value = -(batch.prepared.weights * tokens.logps).sum()
        return value, {name: (batch.prepared.token_share * x).sum() for name, x in measured.items()}

    return Objective(prepare, loss)


def neftune_noise(batch: Batch, width: int, alpha: float) -> jax.Array:
    """Noise `[N,T,D]`, each row's from its own seed; 0 on padding."""
    real = (batch.inputs.segments != 0).astype(jnp.float32)
    size = alpha * jax.lax.rsqrt(jnp.maximum(real.sum(-1), 1.0) * width)
    shape = (batch.inputs.tokens.shape[1], width)
    noise = jax.vmap(lambda seed: jax.random.uniform(jax.random.key(seed), shape, minval=-1.0))(batch.seeds)
    return noise * (size[:, None] * real)[..., None]
