"""The objective of every policy-gradient algorithm: a policy loss per token, a KL term, an entropy bonus."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jaxrl_llm.algorithms.batch import Batch
from jaxrl_llm.algorithms.kl import kl_estimate
from jaxrl_llm.algorithms.losses import (
    Metric,
    Metrics,
    bounded_log_ratio,
    bounded_ratio,
    log_ratio_at,
    with_metrics,
)
from jaxrl_llm.algorithms.off_policy import (
    Criterion,
    importance_correction,
    interpolated_logps,
    masked_log_ratio,
    mean_weight,
    mismatch_kl,
    off_policy_sequence_mask,
    rejection_mask,
)
from jaxrl_llm.algorithms.token_selection import top_entropy_mask
from jaxrl_llm.models.chunked_divergences import Distributions
from jaxrl_llm.models.chunked_softmax import Slopes
from jaxrl_llm.models.logprobs import TokenStatistics, token_logps, token_statistics
from jaxrl_llm.models.net import Net, Params
from jaxrl_llm.training.objectives.distillation import (
    DivergenceSpec,
    UldSpec,
    span_term,
    teacher_of,
    teacher_term,
    weigh_spans,
)
from jaxrl_llm.training.objectives.objective import (
    Aggregation,
    Objective,
    checked_loss,
    counted,
    encoder_of,
    share_of,
    token_metrics,
    weigh,
)


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """A policy loss of `algorithms.policy_losses`, or the user's own, with its options and what it declares."""

    function: Callable[..., Any]
    options: Mapping[str, Any]
    takes: frozenset[str]  # names of its arguments
    ratio: str  # the level of the probability ratio, one of LEVELS
    select: Callable[..., jax.Array] | None
    reads_old_logps: bool


@dataclasses.dataclass(frozen=True)
class PolicySpec:
    """Settings of the objective, from `algorithm`, `rollout` and `batch`, under the same names."""

    loss: PolicyLoss
    aggregation: Aggregation
    epsilon_low: float
    epsilon_high: float
    beta: float
    kl: str
    kl_in_reward: bool
    kl_bias_correction: bool
    entropy_coef: float
    observation_coef: float
    positive_nll_coef: float
    top_entropy_quantile: float
    importance_correction: str
    importance_max: float
    importance_min: float | None
    importance_normalize: bool
    rejection: tuple[Criterion, ...]
    old_logps_of_another: bool  # the sampler's or the reference's: samples are weighed by the policy as it is
    off_policy_mask_threshold: float | None
    temperature: float
    divergence: DivergenceSpec | UldSpec | None  # from the teacher, where it is in the loss
    kl_weights: bool  # rows have weights of the KL term of their own, `batch.kl_weight`


def policy_gradient(spec: PolicySpec, net: Net) -> Objective:
    """`policy loss + beta * KL + coef * divergence` per token, minus `entropy_coef` x the mean entropy of a token.

    Where `batch.observed` marks observation tokens, `observation_coef` x their mean cross-entropy is added (ECHO, arXiv
    2605.24517). Where `batch.positive` marks correct completions, `positive_nll_coef` x the mean cross-entropy of their
    tokens is (VAPO, arXiv 2504.05118, eq. 10).

    The entropy bonus is that of the tokens whose policy term counts, the same in every aggregation mode. Without
    `batch.old_logps` the policy that is updated is the one that sampled, and the ratio is 1, or, with
    `batch.proximal_share`, the old policy is between the two. The KL term is masked by
    nothing but the mask; with `kl_bias_correction` it is multiplied by the ratio that the loss reads. Where
    `batch.kl_weight` is given, it is the weight of the KL term in place of beta, and `batch.loss_weight` multiplies all
    terms of a row; rows and tokens are counted all the same. Warns of k1 in the loss, whose gradient is 0 in
    expectation, unless the ratio multiplies it.
    """
    if (spec.beta or spec.kl_weights) and spec.kl == "k1" and not (spec.kl_in_reward or spec.kl_bias_correction):
        warnings.warn(
            "algorithm.kl is k1 in the loss: the expected gradient of this term is 0, so beta does not hold the policy "
            "near the reference; use k3 or k2, algorithm.kl_bias_correction or algorithm.kl_in_reward",
            stacklevel=2,
        )
    select, ratio_alone = spec.loss.select, reads_ratio_alone(spec.loss)

    def observe(params: Params, batch: Batch):
        return token_logps(net, params, batch.inputs, spec.temperature)

    def prepare(batch: Batch, observed=None) -> Batch:
        if observed is not None and spec.top_entropy_quantile < 1:
            keep = top_entropy_mask(observed[1], batch.mask, spec.top_entropy_quantile).astype(jnp.float32)
            batch = batch.prepare(keep=keep, entropy_share=share_of(keep))
        if observed is not None and select is not None:
            logps = observed[0]
            old_logps = old_logps_of(batch, logps)
            options = {**spec.loss.options, **_random(spec.loss, batch)}
            selected = select(
                logps, old_logps, batch.advantages, spec.epsilon_low, spec.epsilon_high, mask=batch.mask, **options
            )
            batch = batch.prepare(selected=selected.astype(jnp.float32))
        if spec.importance_normalize:
            trainer = observed[0] if observed is not None and spec.old_logps_of_another else batch.old_logps
            weights, _ = _importance_weights(spec, trainer, batch)
            mean = mean_weight(weights, batch.mask, spec.importance_correction)
            batch = batch.prepare(weight_scale=jnp.full(batch.rows, 1.0 / mean))
        batch = batch.prepare(row_weights=jnp.full(batch.rows, 1.0 / batch.rows))
        if isinstance(spec.divergence, UldSpec):
            batch = weigh_spans(batch, spec.aggregation)
        return weigh(batch, _weighed(spec.aggregation.weights(batch.mask, batch), batch))

    def loss(params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        slopes, reference = known_slopes(spec, batch) if ratio_alone else None, reference_of(batch)
        tokens = token_statistics(
            net, params, batch.inputs, spec.temperature, slopes=slopes, reference=reference,
            teacher=teacher_of(spec.divergence, batch),
        )  # fmt: skip
        return policy_objective(spec, tokens, batch)

    weighs_itself = spec.importance_normalize and spec.old_logps_of_another  # by log-probs that no batch brings along
    observes = spec.top_entropy_quantile < 1 or select is not None or weighs_itself
    return Objective(prepare, loss, observe if observes else None, encode=encoder_of(net))


def reference_of(batch: Batch) -> Distributions | None:
    """The reference's distributions, where the KL term sums over them."""
    return None if batch.ref_hidden is None else Distributions(batch.ref_hidden, batch.scalars.ref_head)


def policy_objective(spec: PolicySpec, tokens: TokenStatistics, batch: Batch) -> tuple[jax.Array, Metrics]:
    """The loss of a prepared batch in terms of its tokens' log-probs and entropies `[N,T]`, and its metrics.

    `tokens.kl` is the KL to the reference where it is not estimated from log-probs (`algorithm.kl=full`). The policy
    loss is multiplied, in this order, by the off-policy sequence mask, by the top-entropy mask and by the
    importance weights of the sampler, which a loss that takes `importance_weights` gets instead.
    """
    chosen, prepared, scalars, kl = spec.loss, batch.prepared, batch.scalars, tokens.kl
    mask, advantages = batch.mask, batch.advantages
    # Tokens of environments, and of rows that are left out, may be so unlikely to the policy that ratios overflow.
    logps = jnp.where(mask > 0, tokens.logps, 0.0)
    old_logps = jnp.where(mask > 0, old_logps_of(batch, logps), 0.0)
    # Samples are weighed and rejected by the policy as it is where the old log-probs are none of the trainer's.
    trainer = jax.lax.stop_gradient(logps) if spec.old_logps_of_another else old_logps
    arguments = dict(chosen.options)
    if chosen.select is not None:
        arguments["selected"] = prepared.selected
    else:
        arguments |= _random(chosen, batch)
    correction = None
    if spec.importance_correction != "none":
        correction, _ = _importance_weights(spec, trainer, batch)
        if prepared.weight_scale is not None:
            correction *= prepared.weight_scale[:, None]
    if correction is not None and "importance_weights" in chosen.takes:
        arguments["importance_weights"], correction = correction, None
    result = chosen.function(logps, old_logps, advantages, spec.epsilon_low, spec.epsilon_high, mask=mask, **arguments)
    per_token, metrics = checked_loss(result, mask.shape, "token")
    # How far the policy is from the one that it is compared with: both KL estimates, and the ratio itself.
    change = jax.lax.stop_gradient(logps - old_logps)
    metrics = {
        "entropy": Metric(tokens.entropy),
        **metrics,
        "ratio/kl": Metric(-change),
        "ratio/squared": Metric(0.5 * jnp.square(change)),
        "ratio/mean": Metric(bounded_ratio(change)),
    }
    if spec.off_policy_mask_threshold is not None:
        keep = off_policy_sequence_mask(advantages, batch.sample_logps, logps, mask, spec.off_policy_mask_threshold)
        per_token, metrics["off_policy_masked"] = per_token * keep, Metric(1.0 - keep)
    if spec.rejection:
        keep = rejection_mask(trainer, batch.sample_logps, mask, spec.rejection)
        per_token, metrics["rollout_corr/rejected"] = per_token * keep, Metric(1.0 - keep)
    if prepared.keep is not None:
        per_token *= prepared.keep
    if correction is not None:
        per_token *= correction
    metrics["policy_term"] = Metric(prepared.weights * per_token, "sum")

    if batch.ref_logps is not None:
        ratio = None
        if spec.kl_bias_correction:
            ratio = bounded_ratio(log_ratio_at(chosen.ratio, logps - old_logps, mask))
        kl = kl_estimate(logps, batch.ref_logps, spec.kl, ratio=ratio)
    if kl is not None:
        metrics["kl"] = Metric(kl)
        per_token += _kl_coef(spec, batch) * kl
    if tokens.divergence is not None and isinstance(spec.divergence, DivergenceSpec):
        term, metrics["teacher/divergence"] = teacher_term(spec.divergence, tokens, batch)
        per_token += term
    value = (prepared.weights * per_token).sum()
    if tokens.divergence is not None and isinstance(spec.divergence, UldSpec):
        term, metrics["teacher/divergence"] = span_term(spec.divergence, tokens, batch)
        value += term

    if spec.entropy_coef or scalars.entropy_coef is not None:
        coef = spec.entropy_coef if scalars.entropy_coef is None else scalars.entropy_coef
        kept, share = mask, prepared.token_share
        if prepared.entropy_share is not None:
            kept, share = prepared.keep, prepared.entropy_share
        metrics["policy_loss"] = Metric(value, "sum")
        if prepared.keep is not None:
            metrics["entropy_kept"] = Metric(share * tokens.entropy, "sum")
        value -= (coef * _weighed(counted(share, kept) * tokens.entropy, batch)).sum()
    if batch.observed is not None:
        metrics["observations/nll"] = Metric(-prepared.observed_share * tokens.logps, "sum")
        error = -counted(prepared.observed_share, batch.observed) * tokens.logps
        value += spec.observation_coef * _weighed(error, batch).sum()
    if batch.positive is not None:
        metrics["positive_nll"] = Metric(-prepared.positive_share * logps, "sum")
        error = -counted(prepared.positive_share, batch.mask * batch.positive[:, None]) * logps
        value += spec.positive_nll_coef * _weighed(error, batch).sum()
    return value, token_metrics(metrics | sampler_metrics(spec, trainer, batch), batch)


def _kl_coef(spec: PolicySpec, batch: Batch):
    """The weight of the KL term: a number, or one `[N,1]` for each row."""
    if batch.kl_weight is not None:
        return batch.kl_weight[:, None]
    return spec.beta if batch.scalars.kl_coef is None else batch.scalars.kl_coef


def _weighed(per_token, batch: Batch) -> jax.Array:
    """Terms `[N,T]` of the loss, each times the factor on its row."""
    return per_token if batch.loss_weight is None else per_token * batch.loss_weight[:, None]


def old_logps_of(batch: Batch, logps) -> jax.Array:
    """The old log-probs `[N,T]` that the ratio compares the policy's `logps` with, without gradient."""
    if batch.old_logps is not None:
        return batch.old_logps
    if batch.proximal_share is not None:
        return interpolated_logps(batch.sample_logps, logps, batch.proximal_share)
    return jax.lax.stop_gradient(logps)


def _importance_weights(spec: PolicySpec, old_logps, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """The weights of the samples as `spec` wants them, and the ratios that they came from, `[N,T]`."""
    mode, bounds = spec.importance_correction, (spec.importance_max, spec.importance_min)
    return importance_correction(old_logps, batch.sample_logps, batch.mask, mode, *bounds)


def _random(loss: PolicyLoss, batch: Batch) -> dict[str, Any]:
    """The random key of a loss that takes one."""
    return {"key": jax.random.key(batch.seeds[0])} if "key" in loss.takes else {}


def known_slopes(spec: PolicySpec, batch: Batch) -> Slopes | None:
    """The derivatives by each log-prob `[N,T]` of the loss, where they are known before the log-probs are.

    That is where the updated policy is the one that sampled, so that ratios are 1, of a loss that reads nothing but the
    ratio: the derivatives are those at any log-probs, and of the KL term those at the reference's. There are none where
    the log-probs themselves enter.
    """
    scalars = batch.scalars
    enters = (
        batch.old_logps is not None or batch.proximal_share is not None,
        spec.importance_correction != "none",
        spec.rejection,
        spec.off_policy_mask_threshold is not None,
        spec.entropy_coef or scalars.entropy_coef is not None,
        spec.kl_bias_correction and batch.ref_logps is not None,
        batch.observed is not None and batch.ref_logps is not None,  # which has no log-probs of observation tokens
    )
    if any(enters):
        return None

    zeros = jnp.zeros(batch.mask.shape)
    on_policy = batch.replace(old_logps=zeros, ref_logps=None)
    constant = jax.grad(lambda logps: policy_objective(spec, TokenStatistics(logps, zeros, zeros), on_policy)[0])(zeros)
    if batch.ref_logps is None:
        return Slopes(constant)
    return Slopes(constant, batch.prepared.weights * _kl_coef(spec, batch), batch.ref_logps, spec.kl)


def reads_ratio_alone(loss: PolicyLoss) -> bool:
    """True when the gradient of a policy loss depends on log-probs only through `logps - old_logps`.

    Read from the traced gradient, so that it holds for a loss of the user's as for a built-in one, and no list of names
    can be wrong: every operation that the gradient needs and that takes `logps` or `old_logps` is their difference.
    """
    if loss.select is not None:  # what is selected depends on the log-probs
        return False
    shape = jax.ShapeDtypeStruct((2, 3), jnp.float32)

    def total(logps, old_logps, advantages, mask):
        random = {"key": jax.random.key(0)} if "key" in loss.takes else {}
        result = loss.function(logps, old_logps, advantages, 0.2, 0.2, mask=mask, **loss.options, **random)
        return with_metrics(result)[0].sum()

    try:
        with jax.disable_jit(), warnings.catch_warnings(action="ignore"):  # one flat graph
            graph = jax.make_jaxpr(jax.grad(total))(shape, shape, shape, shape).jaxpr
    except Exception:  # a loss that cannot be traced so says why when it is used
        return False
    logps, old_logps = graph.invars[:2]
    same = {logps, old_logps}  # and their copies: a stop_gradient, a conversion to the same type
    for equation in graph.eqns:
        if equation.primitive.name in ("stop_gradient", "copy", "convert_element_type") and equation.invars[0] in same:
            same.add(equation.outvars[0])
    needed = {id(x) for x in graph.outvars}
    for equation in reversed(graph.eqns):
        if not any(id(x) in needed for x in equation.outvars):
            continue
        needed |= {id(x) for x in equation.invars}
        takes = [x in same for x in equation.invars if not isinstance(x, Literal)]
        copies = equation.outvars[0] in same
        if any(takes) and not copies and not (equation.primitive.name == "sub" and all(takes) and len(takes) == 2):
            return False
    return not any(x in same for x in graph.outvars)


def sampler_metrics(spec: PolicySpec, trainer_logps, batch: Batch) -> Metrics:
    """Distances of the sampler's log-probs from the trainer's, before any correction.

    The ratio is that of whole rows, or its geometric mean, where `importance_correction` is, else that of tokens. Only
    with a correction or a rejection there are more: KL by its direct estimate, chi-squared divergences of tokens and of
    rows, and of the weights that count their mean, their square, and the share of ratios outside the bounds.
    """
    change = masked_log_ratio(trainer_logps, batch.sample_logps, batch.mask)
    mode = spec.importance_correction
    level = "token" if mode == "none" else mode.split("_")[0]
    _, ratio = importance_correction(trainer_logps, batch.sample_logps, batch.mask, f"{level}_truncate")
    # The mean over this micro-batch's tokens, times the share that they have in the optimizer batch.
    drift = mismatch_kl(trainer_logps, batch.sample_logps, batch.mask) * batch.prepared.token_share.sum()
    metrics = {}
    if mode != "none" or spec.rejection:
        of_tokens, of_rows = bounded_log_ratio(change), bounded_log_ratio(change.sum(axis=1))
        metrics |= {
            "rollout_corr/k1_kl": Metric(-change),
            "rollout_corr/chi2_token": Metric(jnp.expm1(2.0 * of_tokens)),
            "rollout_corr/chi2_sequence": Metric(batch.prepared.row_weights * jnp.expm1(2.0 * of_rows), "sum"),
        }
    if mode != "none":
        weights, raw = _importance_weights(spec, trainer_logps, batch)
        low = 0.0 if spec.importance_min is None else spec.importance_min
        metrics |= {
            "rollout_corr/weight": Metric(weights),
            "rollout_corr/weight_squared": Metric(jnp.square(weights)),
            "rollout_corr/fraction_high": Metric((raw > spec.importance_max).astype(raw.dtype)),
            "rollout_corr/fraction_low": Metric((raw < low).astype(raw.dtype)),
        }
    return metrics | {
        "sampling/sampling_logp_difference/mean": Metric(jnp.abs(change)),
        "sampling/sampling_logp_difference/max": Metric(jnp.abs(change), "max"),
        "sampling/importance_sampling_ratio/mean": Metric(ratio),
        "sampling/importance_sampling_ratio/min": Metric(ratio, "min"),
        "sampling/importance_sampling_ratio/max": Metric(ratio, "max"),
        "rollout_corr/kl": Metric(drift, "sum"),
    }
