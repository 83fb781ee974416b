"""Distillation by whole distributions: the divergence of the policy from its teacher at every token of the mask."""

import dataclasses

import jax

from jaxrl_llm.algorithms.batch import Batch
from jaxrl_llm.algorithms.losses import Metric, Metrics
from jaxrl_llm.models.chunked_softmax import Distributions, TopTokens
from jaxrl_llm.models.logprobs import TeacherRows, token_statistics
from jaxrl_llm.models.transformer import Net, Params
from jaxrl_llm.training.objectives.objective import Objective, token_metrics, weigh


@dataclasses.dataclass(frozen=True)
class DivergenceSpec:
    """Settings of `teacher`, for a divergence in the loss."""

    coef: float
    beta: float  # 0 KL(teacher || policy), 1 KL(policy || teacher), between them the generalised JSD
    temperature: float


def teacher_of(spec: DivergenceSpec | None, batch: Batch) -> TeacherRows | None:
    """The teacher's distributions that a batch holds, where the loss reads them."""
    if spec is None:
        return None
    scalars = batch.scalars
    if batch.teacher_ids is not None:
        return TeacherRows(TopTokens(batch.teacher_ids, batch.teacher_top_logps), spec.temperature, spec.beta)
    whole = Distributions(batch.teacher_hidden, scalars.teacher_head, scalars.teacher_softcap)
    return TeacherRows(whole, spec.temperature, spec.beta)


def distillation(
    spec: DivergenceSpec, aggregation: str, max_completion_length: int, microbatch_rows: int, net: Net
) -> Objective:
    """`coef * divergence` of the tokens in the mask, and nothing else (GKD, arXiv 2306.13649)."""

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
        tokens = token_statistics(net, params, batch.inputs, spec.temperature, measured=True, teacher=teacher)
        assert tokens.divergence is not None
        metrics = {
            "entropy": Metric(tokens.entropy),
            "mean_token_accuracy": Metric(tokens.is_top),
            "teacher/divergence": Metric(tokens.divergence),
        }
        return spec.coef * (batch.prepared.weights * tokens.divergence).sum(), token_metrics(metrics, batch)

    return Objective(prepare, loss)
