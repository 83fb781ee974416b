"""`State` and the update: gradients of an objective over micro-batches, then one optimizer step."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.algorithms.batch import Batch
from jaxrl_llm.algorithms.random_streams import DROPOUT
from jaxrl_llm.distributed.sharding import on_device, on_host, row_shards, shardings
from jaxrl_llm.models.lora import combine, has_adapters, with_dropout
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.training.microbatch import MicroBatches, map_microbatches, microbatches_of
from jaxrl_llm.training.objectives.policy_gradient import Metrics, Objective, merged_by
from jaxrl_llm.training.optimizers import learning_rate_schedule


class Frozen(NamedTuple):
    """Parameters that training reads and never changes: of a model with adapters all others, else none.

    Updates take them as an argument of their own, which is not donated.
    """

    params: Params = {}  # noqa: RUF012 (an empty tree, which nothing changes)
    critic: Params = {}  # noqa: RUF012


NOTHING = Frozen()
Update = Callable[..., tuple["State", Metrics]]  # (state, batch, frozen parameters)


NEUTRAL = {"sum": 0.0, "max": -jnp.inf, "min": jnp.inf}  # what a metric of no micro-batch is


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What training changes. `step` counts training steps; the optimizer counts its own updates.

    `params` are those that are trained: all, or the adapters and a score head.

    `critic` is the same of PPO's critic, whose own `step` stays 0.
    """

    step: jax.Array
    params: Params
    opt_state: optax.OptState
    critic: "State | None" = None


def init_state(params: Params, optimizer: optax.GradientTransformation, mesh: Mesh, offload: bool = False) -> State:
    """The state before the first step; optimizer moments are cut over the mesh like the parameters they belong to.

    With `offload` they live in the host's memory.
    """
    shapes = jax.eval_shape(optimizer.init, params)
    places = shardings(shapes, mesh)
    if offload:
        places = jax.tree.map(lambda x, s: s.with_memory_kind("pinned_host") if x.ndim else s, shapes, places)
    opt_state = jax.jit(optimizer.init, out_shardings=places)(params)
    step = jax.device_put(jnp.zeros((), jnp.int32), NamedSharding(mesh, PartitionSpec()))
    return State(step, params, opt_state)


def whole(state: State, frozen: Frozen) -> State:
    """The state with whole models for parameters, to compute with; no array is copied."""
    critic = state.critic
    if critic is not None:
        critic = dataclasses.replace(critic, params=combine(frozen.critic, critic.params))
    return dataclasses.replace(state, params=combine(frozen.params, state.params), critic=critic)


def make_update(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    config,
    mesh: Mesh,
    learn_critic: Update | None = None,
) -> Update:
    """The jitted `update(state, batch, frozen) -> (state, metrics)` of `learner`; the state is donated.

    `learn_critic` is the learner of `state.critic`; its metrics are named `critic/...`, and during the first
    `critic.warmup_steps` training steps the policy stays as it is. Without one, the objective is of the policy's and
    the critic's parameters together, and so is the optimizer.
    """
    learn = learner(objective, optimizer, config, mesh)

    def update(state: State, batch: Batch, frozen: Frozen = NOTHING) -> tuple[State, Metrics]:
        if state.critic is None:
            return learn(state, batch, frozen.params)
        if learn_critic is None:
            return _learn_together(learn, state, state.critic, batch, frozen.params)
        critic, critic_metrics = learn_critic(state.critic, batch, frozen.critic)
        before = dataclasses.replace(state, critic=None)
        after, metrics = learn(before, batch, frozen.params)
        after = _choose(state.step >= config.critic.warmup_steps, after, before)
        metrics["nonfinite_gradient"] = jnp.maximum(
            metrics["nonfinite_gradient"], critic_metrics.pop("nonfinite_gradient")
        )
        return dataclasses.replace(after, critic=critic), metrics | {
            f"critic/{k}": v for k, v in critic_metrics.items()
        }

    return jax.jit(update, donate_argnums=0)


def join_critic(state: State, critic: State) -> State:
    """The state whose parameters are the policy's and those of a critic that shares its network; see `part_critic`."""
    return State(state.step, {**state.params, **critic.params}, state.opt_state)


def part_critic(joint: State, critic: State) -> State:
    """The state with its critic apart again; the optimizer stays that of both."""
    own = {name: joint.params[name] for name in critic.params}
    policy = {name: x for name, x in joint.params.items() if name not in own}
    return State(joint.step, policy, joint.opt_state, dataclasses.replace(critic, params=own))


def _learn_together(learn: Update, state: State, critic: State, batch: Batch, frozen: Params):
    joint, metrics = learn(join_critic(state, critic), batch, frozen)
    return part_critic(joint, critic), metrics


def _choose(condition, new, old):
    return jax.tree.map(lambda after, before: jnp.where(condition, after, before), new, old)


def learner(objective: Objective, optimizer: optax.GradientTransformation, config, mesh: Mesh) -> Update:
    """One optimizer step, `(state, batch, frozen) -> (state, metrics)`, to be jitted by `make_update`.

    The batch is one optimizer batch. It is weighed whole and then split into micro-batches, whose gradients add up: the
    update does not depend on their number. A gradient that is not finite leaves parameters and optimizer as they were
    and sets `nonfinite_gradient` to 1.
    """
    schedule = learning_rate_schedule(config)
    shards = row_shards(mesh)

    def update(state: State, batch: Batch, frozen: Params) -> tuple[State, Metrics]:
        count = (config.batch.microbatch_rows and batch.rows // config.batch.microbatch_rows) or 1
        if batch.seeds is not None:  # a batch that is used again draws other numbers
            batch = batch.replace(seeds=batch.seeds + _updates_made(state).astype(batch.seeds.dtype))
        batch = _prepare(objective, combine(frozen, state.params), batch, count, shards)
        gradients_of = _gradients(objective, config, frozen, _updates_made(state))
        metrics, gradients = _sum_over_parts(gradients_of, state.params, microbatches_of(batch, count, shards))
        if config.optimizer.offload:
            state = dataclasses.replace(state, opt_state=on_device(state.opt_state))
        norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(norm)
        changes, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, changes)
        new = _choose(finite, State(state.step, params, opt_state), state)
        if config.optimizer.offload:
            new = dataclasses.replace(new, opt_state=on_host(new.opt_state))
        rate = jnp.asarray(schedule(_updates_made(state)))
        return new, metrics | {"grad_norm": norm, "lr": rate, "nonfinite_gradient": 1.0 - finite}

    return update


def _gradients(objective: Objective, config, frozen: Params, updates):
    """The function `(params, part, number) -> (metrics, gradients)` of one micro-batch; dropout is of its number."""

    def loss_of(params: Params, batch: Batch, number):
        params = combine(frozen, params)
        if config.lora.dropout and has_adapters(params):
            key = jax.random.fold_in(jax.random.key(config.seed), DROPOUT)
            params = with_dropout(params, jax.random.fold_in(jax.random.fold_in(key, updates), number))
        return objective.loss(params, batch)

    def gradients_of(params: Params, batch: Batch, number) -> tuple[Metrics, Params]:
        (loss, metrics), gradients = jax.value_and_grad(loss_of, has_aux=True)(params, batch, number)
        return {"loss": loss, **metrics}, gradients

    return gradients_of


def make_measure(objective: Objective, part_rows: int, mesh: Mesh) -> Callable[[Params, Batch], Metrics]:
    """The jitted `measure(params, batch) -> metrics`: the loss and metrics of a batch, `part_rows` rows at a time."""
    shards = row_shards(mesh)

    def measures_of(params: Params, batch: Batch, number) -> tuple[Metrics, dict]:
        del number
        loss, metrics = objective.loss(params, batch)
        return {"loss": loss, **metrics}, {}

    def measure(params: Params, batch: Batch) -> Metrics:
        count = batch.rows // part_rows
        batch = _prepare(objective, params, batch, count, shards)
        return _sum_over_parts(measures_of, params, microbatches_of(batch, count, shards))[0]

    return jax.jit(measure)


def _prepare(objective: Objective, params: Params, batch: Batch, count: int, shards: int) -> Batch:
    """The batch with what the objective needs of it as a whole, measured in micro-batches where that takes the net."""
    layout = batch.inputs.layout
    if objective.observe is None:
        return objective.prepare(batch.with_layout(None)).with_layout(layout)
    observed_rows = batch.with_layout(batch.observe_layout or layout)
    observed = map_microbatches(functools.partial(objective.observe, params), observed_rows, count, shards)
    return objective.prepare(batch.with_layout(None), observed).with_layout(layout)


def _sum_over_parts(function, params: Params, parts: MicroBatches) -> tuple[Metrics, Params]:
    """Metrics and gradients of `function(params, part, number)`, added up over the micro-batches.

    One program, whatever their number: the loop's length may be known to the device alone.
    """
    first = functools.partial(function, params, number=jnp.zeros((), jnp.int32))
    if isinstance(parts.count, int) and parts.count == 1:
        return first(parts.take(0))

    def add(number, total):
        metrics, gradients = function(params, parts.take(number), number)
        return _merge_metrics(total[0], metrics), jax.tree.map(jnp.add, total[1], gradients)

    metrics, gradients = jax.eval_shape(lambda: first(parts.take(0)))
    start = {name: jnp.full(x.shape, NEUTRAL[merged_by(name)], x.dtype) for name, x in metrics.items()}
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), gradients)
    return jax.lax.fori_loop(0, parts.count, add, (start, zeros))


def _updates_made(state: State) -> jax.Array:
    """How many updates the optimizer has made: its parts, and its layers where they count apart, count the same."""
    return optax.tree_utils.tree_get_all_with_path(state.opt_state, "count")[0][1].reshape(-1)[0]


def _merge_metrics(total: Metrics, new: Metrics) -> Metrics:
    merge = {"max": jnp.maximum, "min": jnp.minimum, "sum": jnp.add}
    return {name: merge[merged_by(name)](total[name], new[name]) for name in new}
