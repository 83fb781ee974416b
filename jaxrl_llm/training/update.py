"""`State` and the update: gradients of an objective over micro-batches, then one optimizer step.

The only module of `training` that differentiates by parameters; objectives do so by log-probs.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.algorithms.batch import Batch, Inputs
from jaxrl_llm.algorithms.losses import MERGE, NEUTRAL, Metric, Metrics
from jaxrl_llm.algorithms.random_streams import DROPOUT, ROUNDING
from jaxrl_llm.algorithms.rounding import round_like
from jaxrl_llm.distributed.sharding import is_sharded, on_device, on_host, row_shards, shardings
from jaxrl_llm.models.adapters.lora import combine, has_adapters, with_dropout
from jaxrl_llm.models.net import Params
from jaxrl_llm.training.microbatch import map_microbatches, microbatches_of, shared_features, with_features
from jaxrl_llm.training.moments import updates_made
from jaxrl_llm.training.objectives.objective import Objective
from jaxrl_llm.training.transformations import Prodigy, state_of


@dataclasses.dataclass(frozen=True)
class UpdateSpec:
    """Settings of an update besides its objective and its optimizer."""

    microbatch_rows: int  # 0: the whole optimizer batch at once
    schedule: Callable[[Any], Any] | None  # learning rate by the number of updates made, for the metric; None: unknown
    offload: bool  # optimizer moments live in the host's memory
    offload_params: bool  # and so do parameters, trained and frozen
    dropout: float  # of adapters
    seed: int
    gradient_point: Callable[[Params, optax.OptState], Params] | None  # None: the parameters themselves


class Frozen(NamedTuple):
    """Parameters that training reads and never changes: those that `lora.split` gives as frozen.

    Updates take them as an argument of their own, which is not donated.
    """

    params: Params = {}  # noqa: RUF012 (an empty tree, which nothing changes)
    critic: Params = {}  # noqa: RUF012


NOTHING = Frozen()
# Where the backward pass adds each layer's gradient to the sums over micro-batches: XLA would hold all of a
# micro-batch's, with what they are summed over devices from. On one GPU that saves little, for a tenth more kernels.
ADDS_IN_PLACE: dict[str, Callable[[], bool]] = {"cpu": lambda: True, "gpu": is_sharded, "tpu": lambda: False}
Update = Callable[..., tuple["State", Metrics]]  # (state, batch, frozen parameters)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """State that training changes. `step` counts training steps; the optimizer counts its own updates.

    `params` are those that are trained, which are all but those of `Frozen`.

    `critic` is the same of PPO's critic, whose own `step` stays 0.
    """

    step: jax.Array
    params: Params
    opt_state: optax.OptState
    critic: "State | None" = None


def optimizer_shapes(
    params: Params, optimizer: optax.GradientTransformation, mesh: Mesh, offload: bool
) -> tuple[Any, Any]:
    """The shapes of the optimizer's state, and the shardings; with `offload` arrays live in the host's memory."""
    shapes = jax.eval_shape(optimizer.init, params)
    places = shardings(shapes, mesh)
    if offload:
        places = jax.tree.map(lambda x, s: s.with_memory_kind("pinned_host") if x.ndim else s, shapes, places)
    return shapes, places


def init_state(params: Params, optimizer: optax.GradientTransformation, mesh: Mesh, offload: bool = False) -> State:
    """The state before the first step; optimizer moments are sharded like the parameters they belong to.

    With `offload` they live in the host's memory.
    """
    _, places = optimizer_shapes(params, optimizer, mesh, offload)
    opt_state = jax.jit(optimizer.init, out_shardings=places)(on_device(params))
    step = jax.device_put(jnp.zeros((), jnp.int32), NamedSharding(mesh, PartitionSpec()))
    return State(step, params, opt_state)


def merge_frozen(state: State, frozen: Frozen) -> State:
    """The state with frozen and trained parameters as one tree, to compute with; no array is copied."""
    critic = state.critic
    if critic is not None:
        critic = dataclasses.replace(critic, params=combine(frozen.critic, critic.params))
    return dataclasses.replace(state, params=combine(frozen.params, state.params), critic=critic)


def make_update(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    spec: UpdateSpec,
    mesh: Mesh,
    update_critic: Update | None = None,
    shares_critic: bool = False,
) -> Update:
    """The jitted `update(state, batch, frozen) -> (state, metrics)` of `optimizer_step`; the state is donated.

    `update_critic` is the optimizer step of `state.critic`, whose metrics are named `critic/...`; without it a critic
    stays as it is. Where the policy `shares_critic`, the objective is of the parameters of both, and so is the
    optimizer.
    """
    step = optimizer_step(objective, optimizer, spec, mesh)

    def with_critic(state: State, batch: Batch, frozen: Frozen = NOTHING) -> tuple[State, Metrics]:
        assert update_critic is not None
        state, critic_metrics = _critic_step(update_critic, state, batch, frozen)
        state, metrics = step(state, batch, frozen)
        return state, critic_metrics | metrics

    def with_shared_critic(state: State, batch: Batch, frozen: Frozen = NOTHING) -> tuple[State, Metrics]:
        assert state.critic is not None
        joint = State(state.step, {**state.params, **state.critic.params}, state.opt_state)
        joint, metrics = step(joint, batch, frozen)
        return split_critic(joint, state.critic), metrics

    update = with_shared_critic if shares_critic else step if update_critic is None else with_critic
    return jax.jit(update, donate_argnums=0)


def make_critic_update(update_critic: Update) -> Update:
    """The jitted `update(state, batch, frozen) -> (state, metrics)` of the critic alone; the state is donated."""
    return jax.jit(partial(_critic_step, update_critic), donate_argnums=0)


def _critic_step(update_critic: Update, state: State, batch: Batch, frozen: Frozen = NOTHING) -> tuple[State, Metrics]:
    critic, metrics = update_critic(state.critic, batch, Frozen(frozen.critic))
    return dataclasses.replace(state, critic=critic), {f"critic/{name}": x for name, x in metrics.items()}


def split_critic(joint: State, critic: State) -> State:
    """The state with its critic apart again; the optimizer stays that of both."""
    own = {name: joint.params[name] for name in critic.params}
    policy = {name: x for name, x in joint.params.items() if name not in own}
    return State(joint.step, policy, joint.opt_state, dataclasses.replace(critic, params=own))


def optimizer_step(
    objective: Objective, optimizer: optax.GradientTransformation, spec: UpdateSpec, mesh: Mesh
) -> Update:
    """One optimizer step, `(state, batch, frozen) -> (state, metrics)`, to be jitted by `make_update`. A critic stays.

    The batch is one optimizer batch. It is weighed as a whole and then split into micro-batches, whose gradients add
    up in fp32: the update does not depend on their number. They are taken, and metrics are, at `spec.gradient_point`.
    Images that rows share are encoded once, before the micro-batches; the gradients of their features, which add up
    over these, then go back through the encoder at once (arXiv 2101.06983): the sum that each row alone would give.
    Parameters in fewer bits are rounded stochastically, by the seed and the number of updates made. A gradient that is
    not finite leaves parameters and optimizer as they were and sets `nonfinite_gradient` to 1.
    """
    shards = row_shards(mesh)

    def moved(state: State, gradients: Params, updates) -> tuple[State, Metrics]:
        """The state after a step of the optimizer, which has made so many `updates` before, and the step's metrics."""
        if spec.offload:
            state = dataclasses.replace(state, opt_state=on_device(state.opt_state))
        norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(norm)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(spec.seed), ROUNDING), updates)

        def step(state: State, gradients: Params) -> State:
            changes, opt_state = optimizer.update(gradients, state.opt_state, state.params)
            params = round_like(jax.tree.map(jnp.add, state.params, changes), state.params, key)
            return State(state.step, params, opt_state)

        if jax.default_backend() == "cpu":  # in place: to choose afterwards XLA's CPU compiler copies the old state
            new = jax.lax.cond(finite, step, lambda state, _: state, state, gradients)
        else:
            new = jax.tree.map(partial(jnp.where, finite), step(state, gradients), state)
        if spec.offload:
            new = dataclasses.replace(new, opt_state=on_host(new.opt_state))
        if spec.offload_params:
            new = dataclasses.replace(new, params=on_host(new.params))
        own = {"grad_norm": norm, "nonfinite_gradient": 1.0 - finite}
        if spec.schedule is not None:
            own["lr"] = jnp.asarray(spec.schedule(updates))
        elif (rate := optax.tree_utils.tree_get(new.opt_state, "learning_rate", filtering=_is_number)) is not None:
            own["lr"] = jnp.asarray(rate)  # of optax.inject_hyperparams
        if (estimate := state_of(state.opt_state, Prodigy)) is not None:
            own["lr"] *= estimate.d
        return new, {name: Metric(value, "sum") for name, value in own.items()}

    def update(state: State, batch: Batch, frozen: Frozen = NOTHING) -> tuple[State, Metrics]:
        critic, state = state.critic, dataclasses.replace(state, critic=None)
        if spec.offload_params:
            state, frozen = dataclasses.replace(state, params=on_device(state.params)), Frozen(on_device(frozen.params))
        updates, point = updates_made(state.opt_state), state.params
        if spec.gradient_point is not None:
            read = on_device(state.opt_state) if spec.offload else state.opt_state  # the rest stays where it is
            point = spec.gradient_point(state.params, read)
        if batch.seeds is not None:  # a batch that is used again draws other numbers
            batch = batch.replace(seeds=batch.seeds + updates.astype(batch.seeds.dtype))
        count = (spec.microbatch_rows and batch.rows // spec.microbatch_rows) or 1

        def dropped(params: Params, number) -> Params:  # each micro-batch of each update drops other entries
            params = combine(frozen.params, params)
            if not spec.dropout or not has_adapters(params):
                return params
            key = jax.random.fold_in(jax.random.key(spec.seed), DROPOUT)
            return with_dropout(params, jax.random.fold_in(jax.random.fold_in(key, updates), number))

        def encode(vision: Params, inputs: Inputs):  # there are fewer micro-batches than rows
            params = dropped({**point, **vision}, batch.rows)
            return None if objective.encode is None else shared_features(inputs, partial(objective.encode, params))

        vision = {name: x for name, x in point.items() if name == "vision"}
        # Only pixels are kept until the gradients of features are known.
        features, through_encoder = jax.vjp(jax.checkpoint(partial(encode, inputs=batch.inputs)), vision)
        dtype = jnp.float32 if features is None else features.dtype
        batch = batch.replace(inputs=with_features(batch.inputs, features))
        batch = _prepare(objective, combine(frozen.params, point), batch, count, shards)
        # Their gradients add up in fp32, as those of parameters do.
        trained = point, None if features is None or not vision else features.astype(jnp.float32)

        def loss_of(trained: tuple[Params, Any], microbatch: Batch, number) -> tuple[jax.Array, Metrics]:
            params, own = trained
            own = None if own is None else own.astype(dtype)
            microbatch = microbatch.replace(inputs=with_features(microbatch.inputs, own))
            loss, metrics = objective.loss(dropped(params, number), microbatch)
            return loss, {"loss": Metric(loss, "sum"), **metrics}

        gradients_of = jax.value_and_grad(loss_of, has_aux=True)
        micro, zero = microbatches_of(batch, count, shards), jnp.zeros((), jnp.int32)
        if isinstance(micro.count, int) and micro.count == 1:
            (_, metrics), gradients = gradients_of(trained, micro.take(0), zero)
            gradients = jax.tree.map(lambda x: x.astype(jnp.float32), gradients)
        else:
            # One program, whatever their number: the loop's length may be known to the device alone.
            (_, metrics), gradients = jax.eval_shape(gradients_of, trained, jax.eval_shape(micro.take, 0), zero)

            def add(number, total):
                (_, metrics), gradients = gradients_of(trained, micro.take(number), number)
                return _merge(total[0], metrics), jax.tree.map(jnp.add, total[1], gradients)

            def add_in_place(number, total):
                loss_at = partial(loss_of, microbatch=micro.take(number), number=number)
                return _merge(total, add_gradients(loss_at, trained, sums))

            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), gradients)
            in_fp32 = all(x.dtype == jnp.float32 for x in jax.tree.leaves(gradients))
            if in_fp32 and ADDS_IN_PLACE.get(jax.default_backend(), ADDS_IN_PLACE["tpu"])():
                sums = jax.tree.map(jax.new_ref, zeros)
                metrics = jax.lax.fori_loop(0, micro.count, add_in_place, _neutral(metrics))
                gradients = jax.tree.map(jax.freeze, sums)
            else:
                metrics, gradients = jax.lax.fori_loop(0, micro.count, add, (_neutral(metrics), zeros))
        gradients, of_features = gradients
        if of_features is not None:
            (own,) = through_encoder(of_features.astype(dtype))
            gradients |= jax.tree.map(lambda x, y: x + y.astype(jnp.float32), {"vision": gradients["vision"]}, own)

        new, of_step = moved(state, gradients, updates)
        return dataclasses.replace(new, critic=critic), metrics | of_step

    return update


def _is_number(path: object, x: object) -> bool:
    """True but for the state of a schedule, which `optax.inject_hyperparams` keeps under the same name."""
    return isinstance(x, jax.Array)


def add_gradients(loss_of: Callable[[Any], tuple[jax.Array, Any]], params: Any, sums: Any) -> Any:
    """Adds the gradients of `loss_of(params)` to the references `sums` in the backward pass; returns its second result.

    A parameter must be cut by `lax.slice_in_dim`, as JAX 0.10 has no such addition for `x[a:b]`, and must not enter one
    call (of jit, scan or cond) twice, where it would add one of the two gradients alone. The tests of every family take
    their gradients from here.
    """
    loss, pull_back, others = jax.vjp(loss_of, params, has_aux=True)
    pull_back.with_refs(sums)(jnp.ones_like(loss))
    return others


def make_measure(objective: Objective, rows: int, mesh: Mesh) -> Callable[[Params, Batch], dict[str, jax.Array]]:
    """The jitted `measure(params, batch) -> {name: number}`: loss and metrics of a batch, `rows` rows at a time."""
    shards = row_shards(mesh)

    def measure(params: Params, batch: Batch) -> dict[str, jax.Array]:
        count = batch.rows // rows
        batch = _prepare(objective, params, batch, count, shards)
        micro = microbatches_of(batch, count, shards)

        def metrics_of(number) -> Metrics:
            loss, metrics = objective.loss(params, micro.take(number))
            return {"loss": Metric(loss, "sum"), **metrics}

        if isinstance(micro.count, int) and micro.count == 1:
            metrics = metrics_of(0)
        else:
            start = _neutral(jax.eval_shape(metrics_of, 0))
            metrics = jax.lax.fori_loop(0, micro.count, lambda n, total: _merge(total, metrics_of(n)), start)
        return {name: metric.value for name, metric in metrics.items()}

    return jax.jit(measure)


def _prepare(objective: Objective, params: Params, batch: Batch, count: int, shards: int) -> Batch:
    """The batch with what the objective needs of it as a whole, measured in micro-batches where that takes the net."""
    layout = batch.inputs.layout
    if objective.observe is None:
        return objective.prepare(batch.with_layout(None)).with_layout(layout)
    observed_rows = batch.with_layout(batch.observe_layout or layout)
    observed = map_microbatches(partial(objective.observe, params), observed_rows, count, shards)
    return objective.prepare(batch.with_layout(None), observed).with_layout(layout)


def _neutral(metrics: Metrics) -> Metrics:
    """The metrics of no micro-batch at all, in these shapes."""
    return {
        name: Metric(jnp.full(x.value.shape, NEUTRAL[x.reduce], x.value.dtype), x.reduce) for name, x in metrics.items()
    }


def _merge(total: Metrics, new: Metrics) -> Metrics:
    return {name: Metric(MERGE[x.reduce](total[name].value, x.value), x.reduce) for name, x in new.items()}
