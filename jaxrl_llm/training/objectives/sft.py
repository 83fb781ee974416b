"""Supervised fine-tuning: the cross-entropy of the tokens in the mask, or another loss of their log-probs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.batch import Batch
from jaxrl_llm.algorithms.losses import Metric, Metrics
from jaxrl_llm.algorithms.sft_losses import nll
from jaxrl_llm.models.chunked_softmax import Slopes
from jaxrl_llm.models.logprobs import token_statistics
from jaxrl_llm.models.transformer import Net, Params
from jaxrl_llm.training.objectives.objective import Objective, token_metrics, weigh


@dataclasses.dataclass(frozen=True)
class SFTSpec:
    """Settings of `algorithm` that supervised fine-tuning reads."""

    label_smoothing: float
    neftune_alpha: float
    loss: Callable[..., Any] = nll  # of algorithms.sft_losses, or the user's own, with its options


def sft(spec: SFTSpec, net: Net) -> Objective:
    """The loss of the tokens in the mask, averaged over the tokens of the optimizer batch: cross-entropy, or DFT's.

    With `label_smoothing` the targets are smoothed (arXiv 1512.00567), and where the batch has seeds the embeddings get
    NEFTune's noise (arXiv 2310.05914): uniform in +- neftune_alpha / sqrt(tokens of the row x D).
    """

    def prepare(batch: Batch) -> Batch:
        return weigh(batch, "token")

    def loss(params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        inputs = batch.inputs
        if batch.seeds is not None:
            inputs = inputs.replace(noise=neftune_noise(batch, net.config.width, spec.neftune_alpha))
        slopes = Slopes(-batch.prepared.weights) if spec.loss is nll else None
        tokens = token_statistics(net, params, inputs, smoothing=spec.label_smoothing, slopes=slopes)
        metrics = {"entropy": Metric(tokens.entropy), "mean_token_accuracy": Metric(tokens.is_top)}
        return (batch.prepared.weights * spec.loss(tokens.logps)).sum(), token_metrics(metrics, batch)

    return Objective(prepare, loss)


def neftune_noise(batch: Batch, width: int, alpha: float) -> jax.Array:
    """Noise `[N,T,D]`, each row's from its own seed; 0 on padding."""
    real = (batch.inputs.segments != 0).astype(jnp.float32)
    size = alpha * jax.lax.rsqrt(jnp.maximum(real.sum(-1), 1.0) * width)
    shape = (batch.inputs.tokens.shape[1], width)
    noise = jax.vmap(lambda seed: jax.random.uniform(jax.random.key(seed), shape, minval=-1.0))(batch.seeds)
    return noise * (size[:, None] * real)[..., None]
