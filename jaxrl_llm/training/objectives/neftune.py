"""NEFTune (arXiv 2310.05914): noise on the embeddings in the forward passes that are differentiated."""

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.batch import Batch
from jaxrl_llm.algorithms.losses import Metrics
from jaxrl_llm.models.net import Params
from jaxrl_llm.training.objectives.objective import Objective


def with_neftune(objective: Objective, alpha: float, width: int) -> Objective:
    """The objective with `neftune_noise` on the embeddings, of D = `width`, where the batch has seeds: in training.

    What `observe` measures, and log-probs that are computed before an update, are without noise.
    """

    def loss(params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        if batch.seeds is not None:
            batch = batch.replace(inputs=batch.inputs.replace(noise=neftune_noise(batch, width, alpha)))
        return objective.loss(params, batch)

    return objective._replace(loss=loss)


def neftune_noise(batch: Batch, width: int, alpha: float) -> jax.Array:
    """Noise `[N,T,D]`, uniform in +- alpha / sqrt(tokens of the row x D), by each row's own seed; 0 on padding."""
    real = (batch.inputs.segments != 0).astype(jnp.float32)
    size = alpha * jax.lax.rsqrt(jnp.maximum(real.sum(-1), 1.0) * width)
    shape = (batch.inputs.tokens.shape[1], width)
    noise = jax.vmap(lambda seed: jax.random.uniform(jax.random.key(seed), shape, minval=-1.0))(batch.seeds)
    return noise * (size[:, None] * real)[..., None]
