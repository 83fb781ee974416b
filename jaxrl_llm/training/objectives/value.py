"""PPO's critic: a score head whose value at token t is of the state before that token was drawn.

By default it is a network of its own, with its optimizer, learning rate and clipping (`critic.*`). With
`critic.shared` it is a second head of the policy, and one optimizer minimises `policy loss + critic.coef * value loss`.
Either way it is trained on the batches of the policy. Values, like log-probs, stand at index t of token t.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.batch import Batch
from jaxrl_llm.algorithms.losses import Metric, Metrics
from jaxrl_llm.algorithms.policy_losses import value_clip
from jaxrl_llm.distributed.sharding import shardings
from jaxrl_llm.models.logprobs import token_statistics, token_values
from jaxrl_llm.models.model import Model
from jaxrl_llm.models.net import Net, Params
from jaxrl_llm.training.objectives.distillation import teacher_of
from jaxrl_llm.training.objectives.objective import Objective, counted, encoder_of, share_of, token_metrics
from jaxrl_llm.training.objectives.policy_gradient import PolicySpec, policy_gradient, policy_objective, reference_of
from jaxrl_llm.training.update import State

HEAD = "score"


@dataclasses.dataclass(frozen=True)
class CriticSpec:
    """Settings of `critic` that its objective reads."""

    shared: bool
    epsilon: float | None
    coef: float


def shared_critic(model: Model, key, mesh) -> Model:
    """The critic that is a new score head on the network of `model`: its parameters are that head alone."""
    net = Net(dataclasses.replace(model.net.config, head="score"))
    shape = net.shapes()[HEAD]["kernel"]
    kernel = jax.random.normal(key, shape.shape, shape.dtype) * net.config.init_scale
    params = {HEAD: {"kernel": kernel}}
    return dataclasses.replace(model, net=net, params=jax.device_put(params, shardings(params, mesh)))


def critic_params(spec: CriticSpec, state: State) -> Params:
    """The parameters of the critic's whole network, of a state with whole models (`update.merge_frozen`)."""
    assert state.critic is not None
    if not spec.shared:
        return state.critic.params
    return with_value_head(state.params, state.critic.params)


def with_value_head(policy: Params, critic: Params) -> Params:
    """The network of a shared critic: the parameters of a whole policy, with its own head in place of the policy's."""
    return {name: x for name, x in policy.items() if name != "head"} | critic


def value_regression(spec: CriticSpec, net: Net) -> Objective:
    """Half the squared error of the values against `batch.returns`, averaged over tokens.

    With `critic.epsilon` it is the larger of the errors with and without keeping the value near `batch.values`
    (arXiv 1707.06347).
    """

    def prepare(batch: Batch) -> Batch:
        return batch.prepare(token_share=share_of(batch.mask))

    def loss(params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        return _value_loss(spec, token_values(net, params, batch.inputs), batch)

    return Objective(prepare, loss, encode=encoder_of(net))


def policy_and_values(policy_spec: PolicySpec, spec: CriticSpec, net: Net) -> Objective:
    """`policy_gradient` plus `critic.coef` times `value_regression`, of one network with two heads.

    Parameters are those of the policy and `score`, the value head; hidden states are computed once. The metrics of the
    value loss are named `critic/...`.
    """
    policy = policy_gradient(policy_spec, net)
    observe = policy.observe

    def loss(params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        tokens = token_statistics(
            net, without_head(params), batch.inputs, policy_spec.temperature,
            value_head=params[HEAD], reference=reference_of(batch), teacher=teacher_of(policy_spec.divergence, batch),
        )  # fmt: skip
        value, metrics = policy_objective(policy_spec, tokens, batch)
        error, critic_metrics = _value_loss(spec, tokens.values, batch)
        critic_metrics = {"loss": Metric(error, "sum"), **critic_metrics}
        metrics |= {f"critic/{name}": metric for name, metric in critic_metrics.items()}
        return value + spec.coef * error, metrics

    encode = encoder_of(net)
    return Objective(
        policy.prepare,
        loss,
        None if observe is None else lambda params, batch: observe(without_head(params), batch),
        encode=lambda params, images: encode(without_head(params), images),
    )


def without_head(params: Params) -> Params:
    """The parameters of the policy alone."""
    return {name: x for name, x in params.items() if name != HEAD}


def _value_loss(spec: CriticSpec, values, batch: Batch) -> tuple[jax.Array, Metrics]:
    per_token = value_clip(values, batch.values, batch.returns, spec.epsilon)
    # As TRL and verl count: where the value near the old one has the larger error, and the token no gradient.
    clipped = per_token > 0.5 * jnp.square(values - batch.returns)
    metrics = token_metrics({"vpred_mean": Metric(values), "vf_clipfrac": Metric(clipped)}, batch)
    return (counted(batch.prepared.token_share, batch.mask) * per_token).sum(), metrics
