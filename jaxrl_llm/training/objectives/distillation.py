"""Distillation by whole distributions: the divergence of the policy from its teacher at every token of the mask, or at
the end of every span of text that both tokenizers share."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.batch import Batch
from jaxrl_llm.algorithms.losses import Metric, Metrics
from jaxrl_llm.models.chunked_divergences import AlignedDistributions, Distributions, TopTokens, UldOptions
from jaxrl_llm.models.logprobs import AlignedTeacher, TeacherRows, TokenStatistics, token_statistics
from jaxrl_llm.models.net import Net, Params
from jaxrl_llm.training.objectives.objective import (
    Aggregation,
    Objective,
    encoder_of,
    share_of,
    token_metrics,
    weigh,
)


@dataclasses.dataclass(frozen=True)
class DivergenceSpec:
    """Settings of `teacher`, for a divergence in the loss."""

    coef: float
    beta: float  # 0 KL(teacher || policy), 1 KL(policy || teacher), between them the generalised JSD
    temperature: float
    importance_max: float | None  # of the weight of a token, its ratio with the old policy; None: no weight
    top_k: int  # of the policy's likeliest tokens, which alone are read; 0: all, or the teacher's
    tail: bool  # where likeliest tokens are read, one entry is for all others
    least: float | None  # log-prob that those count as at least
    limit: float | None  # of a token's divergence: one that is larger has no gradient


@dataclasses.dataclass(frozen=True)
class UldSpec:
    """Settings of `teacher`, for a distance from a teacher with another tokenizer in the loss."""

    coef: float
    options: UldOptions
    nll_coef: float  # of the cross-entropy of the tokens themselves, where the loss has nothing else


def teacher_of(spec: DivergenceSpec | UldSpec | None, batch: Batch) -> TeacherRows | AlignedTeacher | None:
    """The teacher's distributions that a batch holds, where the loss reads them."""
    if spec is None:
        return None
    scalars = batch.scalars
    if isinstance(spec, UldSpec):
        rows = AlignedDistributions(
            batch.teacher_hidden,
            scalars.teacher_head,
            batch.teacher_prefix_logps,
            scalars.teacher_softcap,
            scalars.teacher_matches,
        )
        return AlignedTeacher(rows, batch.teacher_ends, spec.options)
    if batch.teacher_ids is not None:
        top = TopTokens(batch.teacher_ids, batch.teacher_top_logps)
        return TeacherRows(top, spec.temperature, spec.beta, tail=spec.tail, least=spec.least)
    whole = Distributions(batch.teacher_hidden, scalars.teacher_head, scalars.teacher_softcap)
    return TeacherRows(whole, spec.temperature, spec.beta, spec.top_k, spec.tail, spec.least)


def teacher_term(spec: DivergenceSpec, tokens: TokenStatistics, batch: Batch) -> tuple[jax.Array, Metric]:
    """`coef * divergence` `[N,T]` of the tokens, 0 on rows that are not taught, and the mean divergence of the others.

    With `limit` a larger divergence counts as that, in the term alone. With `importance_max` a token's term is
    multiplied by its ratio with the old policy, up to that, without gradient.
    """
    assert tokens.divergence is not None
    read = tokens.divergence if spec.limit is None else jnp.minimum(tokens.divergence, spec.limit)
    term, metric = spec.coef * read, Metric(tokens.divergence)
    if batch.taught is not None:
        term *= batch.taught[:, None]
        metric = Metric(batch.prepared.taught_share * tokens.divergence, "sum")
    if spec.importance_max is not None and batch.old_logps is not None:
        change = jax.lax.stop_gradient(jnp.where(batch.mask > 0, tokens.logps - batch.old_logps, 0.0))
        term *= jnp.minimum(jnp.exp(change), spec.importance_max)
    return term, metric


def weigh_spans(batch: Batch, aggregation: Aggregation) -> Batch:
    """The batch with the weights of the spans of text in the mask, which are aggregated as tokens are."""
    assert batch.teacher_ends is not None
    last = (batch.teacher_ends == jnp.arange(batch.mask.shape[1])) & (batch.mask > 0)
    return batch.prepare(span_weights=aggregation.weights(last, batch), span_share=share_of(last))


def span_term(spec: UldSpec, tokens: TokenStatistics, batch: Batch) -> tuple[jax.Array, Metric]:
    """`coef * distance` of all spans, each with its weight, and the metric of their mean."""
    assert tokens.divergence is not None
    total = spec.coef * (batch.prepared.span_weights * tokens.divergence).sum()
    return total, Metric(batch.prepared.span_share * tokens.divergence, "sum")


def distillation(spec: DivergenceSpec | UldSpec, aggregation: Aggregation, temperature: float, net: Net) -> Objective:
    """`coef * divergence` of the tokens in the mask, and nothing else (GKD, arXiv 2306.13649).

    From a teacher with another tokenizer it is `coef * distance` of the spans of text in the mask, and `nll_coef` times
    the cross-entropy of the tokens (ULD, arXiv 2402.12030). `temperature` is that of the rollouts, and so of the ratio
    of `importance_max` and of the entropy; the divergence has its own.
    """

    def prepare(batch: Batch) -> Batch:
        if isinstance(spec, UldSpec):
            batch = weigh_spans(batch, aggregation)
        return weigh(batch, aggregation.weights(batch.mask, batch))

    def loss(params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        teacher, measured = teacher_of(spec, batch), isinstance(spec, DivergenceSpec)
        tokens = token_statistics(net, params, batch.inputs, temperature, measured=measured, teacher=teacher)
        metrics = {"entropy": Metric(tokens.entropy), "mean_token_accuracy": Metric(tokens.is_top)}
        if isinstance(spec, UldSpec):
            value, metrics["teacher/divergence"] = span_term(spec, tokens, batch)
            if spec.nll_coef:
                nll = -(batch.prepared.weights * tokens.logps).sum()
                value, metrics["nll_loss"] = value + spec.nll_coef * nll, Metric(-tokens.logps)
        else:
            term, metrics["teacher/divergence"] = teacher_term(spec, tokens, batch)
            value = (batch.prepared.weights * term).sum()
        return value, token_metrics(metrics, batch)

    return Objective(prepare, loss, encode=encoder_of(net))
