"""Distillation by whole distributions: the divergence of the policy from its teacher at every token of the mask."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.batch import Batch
from jaxrl_llm.algorithms.losses import Metric, Metrics
from jaxrl_llm.models.chunked_softmax import Distributions, TopTokens
from jaxrl_llm.models.logprobs import TeacherRows, TokenStatistics, token_statistics
from jaxrl_llm.models.transformer import Net, Params
from jaxrl_llm.training.objectives.objective import Objective, token_metrics, weigh


@dataclasses.dataclass(frozen=True)
class DivergenceSpec:
    """Settings of `teacher`, for a divergence in the loss."""

    coef: float
    beta: float  # 0 KL(teacher || policy), 1 KL(policy || teacher), between them the generalised JSD
    temperature: float
    importance_max: float | None = None  # of the weight of a token, its ratio with the old policy; None: no weight
    top_k: int = 0  # of the policy's likeliest tokens, which alone are read; 0: all, or the teacher's
    tail: bool = True  # where likeliest tokens are read, one entry is for all others


def teacher_of(spec: DivergenceSpec | None, batch: Batch) -> TeacherRows | None:
    """The teacher's distributions that a batch holds, where the loss reads them."""
    if spec is None:
        return None
    scalars = batch.scalars
    if batch.teacher_ids is not None:
        top = TopTokens(batch.teacher_ids, batch.teacher_top_logps)
        return TeacherRows(top, spec.temperature, spec.beta, tail=spec.tail)
    whole = Distributions(batch.teacher_hidden, scalars.teacher_head, scalars.teacher_softcap)
    return TeacherRows(whole, spec.temperature, spec.beta, spec.top_k, spec.tail)


def teacher_term(spec: DivergenceSpec, tokens: TokenStatistics, batch: Batch) -> tuple[jax.Array, Metric]:
    """`coef * divergence` `[N,T]` of the tokens, 0 on rows that are not taught, and the mean divergence of the others.

    With `importance_max` a token's term is multiplied by its ratio with the old policy, up to that, without gradient.
    """
    assert tokens.divergence is not None
    term, metric = spec.coef * tokens.divergence, Metric(tokens.divergence)
    if batch.taught is not None:
        term *= batch.taught[:, None]
        metric = Metric(batch.prepared.taught_share * tokens.divergence, "sum")
    if spec.importance_max is not None and batch.old_logps is not None:
        change = jax.lax.stop_gradient(jnp.where(batch.mask > 0, tokens.logps - batch.old_logps, 0.0))
        term *= jnp.minimum(jnp.exp(change), spec.importance_max)
    return term, metric


def distillation(
    spec: DivergenceSpec,
    aggregation: str,
    max_completion_length: int,
    microbatch_rows: int,
    temperature: float,
    net: Net,
) -> Objective:
    """`coef * divergence` of the tokens in the mask, and nothing else (GKD, arXiv 2306.13649).

    `temperature` is that of the rollouts, and so of the ratio of `importance_max` and of the entropy; the divergence
    has its own.
    """

    def prepare(batch: Batch) -> Batch:
        return weigh(
            batch,
            aggregation,
            max_completion_length=max_completion_length,
            microbatch_rows=microbatch_rows or batch.rows,
            token_count=batch.scalars.token_count,
        )

    def loss(params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        teacher = teacher_of(spec, batch)
        tokens = token_statistics(net, params, batch.inputs, temperature, measured=True, teacher=teacher)
        term, divergence = teacher_term(spec, tokens, batch)
        metrics = {
            "entropy": Metric(tokens.entropy),
            "mean_token_accuracy": Metric(tokens.is_top),
            "teacher/divergence": divergence,
        }
        return (batch.prepared.weights * term).sum(), token_metrics(metrics, batch)

    return Objective(prepare, loss)
