"""PPO's critic: a score head whose value at token t is of the state before that token was drawn.

By default it is a network of its own, with its optimizer, learning rate and clipping (`critic.*`). With
`critic.shared` it is a second head of the policy, and one optimizer minimises `policy loss + critic.coef * value loss`.
Either way it is trained on the batches of the policy. Values, like log-probs, stand at index t of token t.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.batch import Batch
from jaxrl_llm.algorithms.policy_losses import value_clip
from jaxrl_llm.distributed.sharding import shardings
from jaxrl_llm.models.logprobs import token_statistics, token_values
from jaxrl_llm.models.model import Model
from jaxrl_llm.models.transformer import Net, Params
from jaxrl_llm.training.objectives.policy_gradient import Metrics, Objective, policy_gradient, policy_terms
from jaxrl_llm.training.update import State

HEAD = "score"


def critic_config(config):
    """The configuration as the critic's optimizer reads it: what `critic` sets in place of `optimizer`."""
    own = config.copy_and_resolve_references()
    own.optimizer.learning_rate = config.critic.learning_rate
    own.optimizer.max_grad_norm = config.critic.max_grad_norm
    own.optimizer.schedule = config.critic.schedule
    own.optimizer.warmup_steps, own.optimizer.warmup_ratio = 0, 0.0
    return own


def shared_critic(model: Model, key, mesh) -> Model:
    """The critic that is a new score head on the network of `model`: its parameters are that head alone."""
    net = Net(replace(model.net.config, head="score"))
    shape = net.shapes()[HEAD]["kernel"]
    kernel = jax.random.normal(key, shape.shape, shape.dtype) * net.config.init_scale
    params = {HEAD: {"kernel": kernel}}
    return replace(model, net=net, params=jax.device_put(params, shardings(params, mesh)))


def critic_params(config, state: State) -> Params:
    """The parameters of the critic's whole network, of a state with whole models (`update.whole`)."""
    assert state.critic is not None
    if not config.critic.shared:
        return state.critic.params
    return {name: x for name, x in state.params.items() if name != "head"} | state.critic.params


def value_regression(config, net: Net) -> Objective:
    """Half the squared error of the values against `batch.returns`, averaged over tokens.

    With `critic.epsilon` it is the larger of the errors with and without keeping the value near `batch.values`
    (arXiv 1707.06347).
    """

    def prepare(batch: Batch) -> Batch:
        return batch.prepare(token_share=batch.mask / jnp.maximum(batch.mask.sum(), 1.0))

    def loss(params: Params, batch: Batch):
        values = token_values(net, params, batch.inputs)
        return _value_terms(config, values, batch)

    return Objective(prepare, loss)


def policy_and_values(config, net: Net) -> Objective:
    """`policy_gradient` plus `critic.coef` times `value_regression`, of one network with two heads.

    Parameters are those of the policy and `score`, the value head; hidden states are computed once. The metrics of the
    value loss are named `critic/...`.
    """
    policy = policy_gradient(config, net)
    observe = policy.observe

    def loss(params: Params, batch: Batch):
        tokens = token_statistics(
            net, without_head(params), batch.inputs, config.rollout.temperature, value_head=params[HEAD]
        )
        value, metrics = policy_terms(config, tokens.logps, tokens.entropy, batch)
        error, measured = _value_terms(config, tokens.values, batch)
        own = {f"critic/{name}": x for name, x in {"loss": error, **measured}.items()}
        return value + config.critic.coef * error, metrics | own

    if observe is None:
        return Objective(policy.prepare, loss)
    return Objective(policy.prepare, loss, lambda params, batch: observe(without_head(params), batch))


def without_head(params: Params) -> Params:
    """The parameters of the policy alone."""
    return {name: x for name, x in params.items() if name != HEAD}


def _value_terms(config, values, batch: Batch) -> tuple[jax.Array, Metrics]:
    epsilon = config.critic.epsilon
    per_token = value_clip(values, batch.values, batch.returns, epsilon)
    clipped = jnp.zeros_like(values) if epsilon is None else jnp.abs(values - batch.values) > epsilon
    metrics = {"vpred_mean": values, "vf_clipfrac": clipped}
    return (batch.prepared.token_share * per_token).sum(), {
        name: (batch.prepared.token_share * x).sum() for name, x in metrics.items()
    }
