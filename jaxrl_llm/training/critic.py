"""PPO's critic: a network with a score head whose value at token t is of the state before that token was drawn.

It has its own parameters, optimizer, learning rate and clipping (`critic.*`), and is trained on the batches of the
policy. Values, like log-probs, stand at index t of token t.
"""

import jax.numpy as jnp

from jaxrl_llm.algorithms.aggregation import loss_weights
from jaxrl_llm.algorithms.batch import Batch
from jaxrl_llm.algorithms.policy_losses import value_clip
from jaxrl_llm.models.transformer import Net, Params
from jaxrl_llm.policy import token_values
from jaxrl_llm.training.objectives import Objective


def critic_config(config):
    """The configuration as the critic's optimizer reads it: what `critic` sets in place of `optimizer`."""
    own = config.copy_and_resolve_references()
    own.optimizer.learning_rate = config.critic.learning_rate
    own.optimizer.max_grad_norm = config.critic.max_grad_norm
    own.optimizer.schedule = config.critic.schedule
    own.optimizer.warmup_steps, own.optimizer.warmup_ratio = 0, 0.0
    return own


def value_regression(config, net: Net) -> Objective:
    """Half the squared error of the values against `batch.returns`, averaged over tokens.

    With `critic.epsilon` it is the larger of the errors with and without keeping the value near `batch.values`
    (arXiv 1707.06347).
    """
    epsilon = config.critic.epsilon

    def prepare(batch: Batch) -> Batch:
        share = batch.mask / jnp.maximum(batch.mask.sum(), 1.0)
        return batch.replace(weights=loss_weights(batch.mask, "token"), token_share=share)

    def loss(params: Params, batch: Batch):
        values = token_values(net, params, batch.tokens, batch.segments, batch.positions, batch.prompt_width)
        per_token = value_clip(values, batch.values, batch.returns, epsilon)
        clipped = jnp.zeros_like(values) if epsilon is None else jnp.abs(values - batch.values) > epsilon
        metrics = {"vpred_mean": values, "vf_clipfrac": clipped}
        return (batch.weights * per_token).sum(), {name: (batch.token_share * x).sum() for name, x in metrics.items()}

    return Objective(prepare, loss)
