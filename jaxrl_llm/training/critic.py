"""PPO's critic: a network with a score head whose value at token t is of the state before that token was drawn.

It has its own parameters, optimizer, learning rate and clipping (`critic.*`), and is trained on the batches of the
policy. Values, like log-probs, stand at index t of token t.
"""

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.aggregation import masked_mean, masked_var
from jaxrl_llm.algorithms.batch import Batch
from jaxrl_llm.algorithms.policy_losses import value_clip
from jaxrl_llm.models.transformer import Net, Params
from jaxrl_llm.policy import token_values
from jaxrl_llm.training.objectives import Objective, weigh


def critic_config(config):
    """The configuration as the critic's optimizer reads it: `critic.*` in place of `optimizer.*` where both have a key."""
    own = config.copy_and_resolve_references()
    own.optimizer.learning_rate = config.critic.learning_rate
    own.optimizer.max_grad_norm = config.critic.max_grad_norm
    own.optimizer.schedule = config.critic.schedule
    own.optimizer.warmup_steps = 0
    return own


def value_regression(config, net: Net) -> Objective:
    """Half the squared error of the values against `batch.returns`, averaged over tokens.

    With `critic.epsilon` the larger of the errors with and without the value kept near `batch.values` (arXiv 1707.06347).
    """
    epsilon = config.critic.epsilon

    def prepare(batch: Batch) -> Batch:
        return weigh(batch, "token")

    def loss(params: Params, batch: Batch):
        values = token_values(net, params, batch.tokens, batch.segments, batch.positions, batch.prompt_width)
        per_token = value_clip(values, batch.values, batch.returns, epsilon)
        clipped = jnp.zeros_like(values) if epsilon is None else jnp.abs(values - batch.values) > epsilon
        metrics = {"value_mean": values, "value_clip_ratio": clipped, "value_error": jnp.abs(values - batch.returns)}
        return (batch.weights * per_token).sum(), {name: (batch.token_share * x).sum() for name, x in metrics.items()}

    return Objective(prepare, loss)


def explained_variance(values, returns, mask) -> jax.Array:
    """`1 - var(returns - values) / var(returns)` over the mask: 1 for a perfect critic, 0 for a constant one."""
    return 1.0 - masked_var(returns - values, mask) / jnp.maximum(masked_var(returns, mask), 1e-8)


def mean_value(values, mask) -> jax.Array:
    """The mean of the values over the mask."""
    return masked_mean(values, mask)
