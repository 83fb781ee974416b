"""`State` and the update: gradients of an objective over micro-batches, then one optimizer step."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.algorithms.batch import Batch
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.sharding import row_shards, shardings
from jaxrl_llm.training.objectives import Metrics, Objective, merged_by
from jaxrl_llm.training.optimizers import learning_rate_schedule

Update = Callable[["State", Batch], tuple["State", Metrics]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What training changes. `step` counts training steps; the optimizer counts its own updates.

    `critic` is the same of PPO's critic, whose own `step` stays 0.
    """

    step: jax.Array
    params: Params
    opt_state: optax.OptState
    critic: "State | None" = None


def init_state(params: Params, optimizer: optax.GradientTransformation, mesh: Mesh) -> State:
    """The state before the first step; optimizer moments are cut over the mesh like the parameters they belong to."""
    shapes = jax.eval_shape(optimizer.init, params)
    opt_state = jax.jit(optimizer.init, out_shardings=shardings(shapes, mesh))(params)
    step = jax.device_put(jnp.zeros((), jnp.int32), NamedSharding(mesh, PartitionSpec()))
    return State(step, params, opt_state)


def make_update(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    config,
    mesh: Mesh,
    learn_critic: Update | None = None,
) -> Update:
    """The jitted `update(state, batch) -> (state, metrics)` of `learner`; the state is donated.

    `learn_critic` is the learner of `state.critic`; its metrics are named `critic/...`, and during the first
    `critic.warmup_steps` training steps the policy stays as it is.
    """
    learn = learner(objective, optimizer, config, mesh)

    def update(state: State, batch: Batch) -> tuple[State, Metrics]:
        if learn_critic is None or state.critic is None:
            return learn(state, batch)
        critic, critic_metrics = learn_critic(state.critic, batch)
        before = dataclasses.replace(state, critic=None)
        after, metrics = learn(before, batch)
        after = _choose(state.step >= config.critic.warmup_steps, after, before)
        metrics["nonfinite_gradient"] = jnp.maximum(
            metrics["nonfinite_gradient"], critic_metrics.pop("nonfinite_gradient")
        )
        return dataclasses.replace(after, critic=critic), metrics | {
            f"critic/{k}": v for k, v in critic_metrics.items()
        }

    return jax.jit(update, donate_argnums=0)


def _choose(condition, new, old):
    return jax.tree.map(lambda after, before: jnp.where(condition, after, before), new, old)


def learner(objective: Objective, optimizer: optax.GradientTransformation, config, mesh: Mesh) -> Update:
    """One optimizer step, `(state, batch) -> (state, metrics)`, to be jitted by `make_update`.

    The batch is one optimizer batch. It is weighed whole and then split into micro-batches, whose gradients add up: the
    update does not depend on their number. A gradient that is not finite leaves parameters and optimizer as they were
    and sets `nonfinite_gradient` to 1.
    """
    schedule = learning_rate_schedule(config)
    value_and_grad = jax.value_and_grad(objective.loss, has_aux=True)
    shards = row_shards(mesh)

    def gradients_of(params: Params, batch: Batch) -> tuple[Metrics, Params]:
        (loss, metrics), gradients = value_and_grad(params, batch)
        return {"loss": loss, **metrics}, gradients

    def update(state: State, batch: Batch) -> tuple[State, Metrics]:
        parts = (config.batch.microbatch_rows and batch.rows // config.batch.microbatch_rows) or 1
        batch = _prepare(objective, state.params, batch, parts, shards)
        if batch.seeds is not None:  # a batch that is used again draws other numbers
            batch = batch.replace(seeds=batch.seeds + _updates_made(state).astype(batch.seeds.dtype))
        metrics, gradients = _sum_over_parts(gradients_of, state.params, split_rows(batch, parts, shards))
        norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(norm)
        changes, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, changes)
        new = _choose(finite, State(state.step, params, opt_state), state)
        rate = jnp.asarray(schedule(_updates_made(state)))
        return new, metrics | {"grad_norm": norm, "lr": rate, "nonfinite_gradient": 1.0 - finite}

    return update


def make_measure(objective: Objective, part_rows: int, mesh: Mesh) -> Callable[[Params, Batch], Metrics]:
    """The jitted `measure(params, batch) -> metrics`: the loss and metrics of a batch, `part_rows` rows at a time."""
    shards = row_shards(mesh)

    def measures_of(params: Params, batch: Batch) -> tuple[Metrics, dict]:
        loss, metrics = objective.loss(params, batch)
        return {"loss": loss, **metrics}, {}

    def measure(params: Params, batch: Batch) -> Metrics:
        parts = batch.rows // part_rows
        batch = _prepare(objective, params, batch, parts, shards)
        return _sum_over_parts(measures_of, params, split_rows(batch, parts, shards))[0]

    return jax.jit(measure)


def _prepare(objective: Objective, params: Params, batch: Batch, parts: int, shards: int) -> Batch:
    """The batch with what the objective needs of it as a whole, measured in micro-batches where that takes the net."""
    if objective.observe is None:
        return objective.prepare(batch)
    observe = functools.partial(objective.observe, params)
    return objective.prepare(batch, join_rows(jax.lax.map(observe, split_rows(batch, parts, shards)), shards))


def _sum_over_parts(function, params: Params, parts: Batch) -> tuple[Metrics, Params]:
    """Metrics and gradients of `function(params, part)`, added up over the leading dimension of `parts`."""

    def add(total, part):
        metrics, gradients = function(params, part)
        return (_merge_metrics(total[0], metrics), jax.tree.map(jnp.add, total[1], gradients)), None

    first, rest = (jax.tree.map(lambda x, cut=cut: x[cut], parts) for cut in (0, slice(1, None)))
    total = function(params, first)
    return jax.lax.scan(add, total, rest)[0] if jax.tree.leaves(rest)[0].shape[0] else total


def _updates_made(state: State) -> jax.Array:
    """How many updates the optimizer has made: its parts, and its layers where they count apart, count the same."""
    return optax.tree_utils.tree_get_all_with_path(state.opt_state, "count")[0][1].reshape(-1)[0]


def split_rows(batch: Batch, parts: int, shards: int) -> Batch:
    """The batch with a leading dimension of `parts` micro-batches.

    Each takes an equal run of adjacent rows from every shard of the mesh, so that splitting moves no data.
    """

    def leaf(x):
        x = x.reshape(shards, parts, -1, *x.shape[1:]).swapaxes(0, 1)
        return x.reshape(parts, -1, *x.shape[3:])

    return jax.tree.map(leaf, batch)


def join_rows(parts, shards: int):
    """The inverse of `split_rows`: arrays `[parts, n, ...]` as `[N, ...]`, in the order of the batch."""

    def leaf(x):
        x = x.reshape(x.shape[0], shards, -1, *x.shape[2:]).swapaxes(0, 1)
        return x.reshape(-1, *x.shape[3:])

    return jax.tree.map(leaf, parts)


def _merge_metrics(total: Metrics, new: Metrics) -> Metrics:
    merge = {"max": jnp.maximum, "min": jnp.minimum, "sum": jnp.add}
    return {name: merge[merged_by(name)](total[name], new[name]) for name in new}
