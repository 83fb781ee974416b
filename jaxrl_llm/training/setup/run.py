"""From a configuration to a `Run`: the one place where model, data, rewards, rollouts and updates meet."""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxrl_llm.config import ConfigDict, ConfigError, batch_rows, with_correction
from jaxrl_llm.config.checks.contradictions import check_own_functions
from jaxrl_llm.config.checks.values import in_use
from jaxrl_llm.config.schema import OFFLINE
from jaxrl_llm.data.tokenize import PIXELS
from jaxrl_llm.distributed.sharding import has_host_memory, on_host, row_shards
from jaxrl_llm.environments.agents import Agents
from jaxrl_llm.environments.factory import Environments, load_environments
from jaxrl_llm.models.adapters.lora import has_adapters, split
from jaxrl_llm.models.model import Model, named_rate_factors
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net, Params
from jaxrl_llm.models.vision.row_images import count_tiles
from jaxrl_llm.rewards.functions import environment as environment_reward
from jaxrl_llm.rewards.runner import Rewards
from jaxrl_llm.training.average import Average
from jaxrl_llm.training.checkpoint.data_files import checksums
from jaxrl_llm.training.evaluation.run import Evaluations
from jaxrl_llm.training.images import check_kept
from jaxrl_llm.training.logging.stopwatch import Stopwatch
from jaxrl_llm.training.microbatch import BatchSpec
from jaxrl_llm.training.moments import schedules_further, schedules_scaled
from jaxrl_llm.training.objectives.objective import Objective
from jaxrl_llm.training.objectives.value import critic_params, value_regression
from jaxrl_llm.training.offline import OfflineSource
from jaxrl_llm.training.online import OnlineSource
from jaxrl_llm.training.optimizers import (
    OPTIMIZERS,
    build_optimizer,
    learning_rate_schedule,
    own_function,
    own_optimizer,
    with_rate_factors,
)
from jaxrl_llm.training.packing.planner import Packer, make_packer
from jaxrl_llm.training.setup import specs
from jaxrl_llm.training.setup.data import RunData, read_data
from jaxrl_llm.training.setup.evaluation import build_evaluate
from jaxrl_llm.training.setup.given import NO_OBJECTS, Given
from jaxrl_llm.training.setup.learning_rate import with_learning_rate
from jaxrl_llm.training.setup.memory import fitting_rows, microbatch_room
from jaxrl_llm.training.setup.mesh import check_rows, rows_of_shards
from jaxrl_llm.training.setup.models import build_critic, build_model, check_prompts, check_trainable
from jaxrl_llm.training.setup.objectives import critic_spec, needs_reference, objective_of
from jaxrl_llm.training.setup.sources import build_rewards, mixed_source, offline_source, online_source
from jaxrl_llm.training.setup.warnings import warnings_of
from jaxrl_llm.training.setup.worker import Setup, environment_spec
from jaxrl_llm.training.update import (
    Frozen,
    State,
    Update,
    UpdateSpec,
    init_state,
    make_critic_update,
    make_update,
    merge_frozen,
    optimizer_step,
    split_critic,
)

OFFLOADS = (  # settings that keep arrays in the host's memory
    "model.offload", "optimizer.offload", "critic.offload", "critic.offload_optimizer", "teacher.offload",
    "average.offload", "algorithm.offload_reference",
)  # fmt: skip


class CriticAlone(NamedTuple):
    """The critic's own training: passes before those of the policy, and the first steps of a run."""

    update: Update
    minibatches: int
    passes: int  # over a batch, before the policy's: those that it makes besides them or, `apart`, all
    apart: bool  # the policy's updates leave the critic as it is
    warmup_steps: int  # training steps in which it alone is trained


class Run(NamedTuple):
    """Everything that `train` drives, made once of the configuration by `build`."""

    batch: BatchSpec
    model: Model
    critic: Model | None
    mesh: Mesh
    source: OnlineSource | OfflineSource
    frozen: Frozen
    update: Update
    critic_alone: CriticAlone | None
    evaluation: Evaluations | None
    state: State  # with which it begins
    average: Average | None  # of the policy
    begin: Callable[[Params, Params | None, int], State]  # the state at a step, of parameters that were trained before
    updates_per_step: Mapping[str, int]  # of `policy`, and of a `critic` that is a network of its own
    stopwatch: Stopwatch
    rewards: Rewards
    environments: Environments | Agents | None
    pack: Packer
    config: ConfigDict  # with the number of steps, where num_epochs says it, and the learning rate
    data_files: Mapping[str, str]  # checksums of the files that are trained on; in the first process alone
    notes: list[str]  # lines on the data and the learning rate
    warnings: list[str]

    def get_arrays(self) -> dict[str, Any]:
        """The trees of arrays, by name, that a checkpoint holds besides the training state."""
        return self.source.get_arrays() | ({} if self.average is None else self.average.arrays())

    def restorable(self) -> dict[str, Any]:
        """The trees of arrays, by name, that `set_state` restores, with None for one of any shape."""
        return self.source.restorable() | ({} if self.average is None else self.average.arrays())

    def set_state(self, state: State, host: dict[str, Any], arrays: dict[str, Any]) -> None:
        """Restore what the host and the arrays of a checkpoint hold besides its training state."""
        self.source.set_state(host, arrays)
        if self.average is not None:
            self.average.restore(arrays, merge_frozen(state, self.frozen).params)

    def close(self) -> None:
        """Closes the environments and the rewards: both, also where one fails."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.rewards.close)
            if self.environments is not None:
                stack.callback(self.environments.close)


def build(config, mesh: Mesh, given: Given = NO_OBJECTS) -> Run:
    """The run of a configuration, on `mesh` (which must be set), with objects that are `given` in place of names.

    Data is read before weights. Raises ConfigError for anything the user can fix.
    """
    config = with_correction(config)
    check_own_functions(config)
    needs_reference(config)  # which its loss says: one that cannot be is refused before anything is read
    check_rows(config, batch_rows(config), mesh)
    spec = environment_spec(config, given.environment, given.tools)  # refused before anything is read
    if config.optimizer.name not in OPTIMIZERS:
        own_function(config.optimizer.name)
    data = read_data(config, given)
    config, tokens, name = data.config, data.tokens, config.algorithm.name
    if name not in OFFLINE and tokens is not None and any(count_tiles([x.get(PIXELS) for x in tokens.rows])):
        check_kept(config.algorithm.replay_groups > 0, config.teacher.path is not None)
    with contextlib.ExitStack() as stack:  # what is open is closed where the rest is refused
        environments = load_environments(spec)
        if environments is not None:
            stack.callback(environments.close)
        model = build_model(config, mesh, None, data.tokenizer, given.model)
        rewards = build_rewards(config, given.rewards)
        stack.callback(rewards.close)
        if model.net.config.sees_prompts:
            check_prompts(config, environments is not None)
        if environment_reward in rewards.functions and environments is None and config.environment.rollout_func is None:
            raise ConfigError("rewards.functions names environment, but there is none: set environment.name or agent")
        if given.model is None:
            check_trainable(config, model)
        critic = build_critic(config, model, mesh, given.model) if name == "ppo" else None
        model_type = (model.hf_config or {}).get("model_type", "model without config.json")
        config, notes = with_learning_rate(config, model_type, model.net.config.width, has_adapters(model.params))
        model, critic = offloaded(config, model, critic)
        data = data._replace(notes=[*data.notes, *notes])
        run = assembled(Setup(config, mesh, model, rewards, environments, Stopwatch()), critic, data, given)
        stack.pop_all()
    return run


def assembled(setup: Setup, critic: Model | None, data: RunData, given: Given) -> Run:
    """The run of what `build` has read and opened: its batches, updates and evaluation.

    Raises ConfigError for compute_metrics without an evaluation.
    """
    config, mesh, model, rewards, environments, stopwatch = setup
    average = None
    if (settings := specs.average_spec(config)) is not None:
        average = Average(settings, model.net.config.lora, model.net.config.frozen)
        average.begin(model.params)
    followed = average if config.algorithm.ref_sync_to == "average" else None
    objective = objective_of(config, model.net)
    optimizer, critic_optimizer, rate = optimizers_of(config, model, critic, given.optimizer, given.schedule)
    net, room = model.net.config, microbatch_room(config, model, critic, optimizer, critic_optimizer, mesh)
    batch_of = partial(sized_batch, config, net, room, mesh)
    packer = partial(make_packer, specs.packing_spec(config), net, mesh, objective.positions, room=room)
    advantages = None
    if config.algorithm.name not in OFFLINE:
        source = online_source(setup, critic, data.sources, data.tokens, batch_of, packer, followed)
        pack, batch, advantages = source.learner.pack, source.learner.batch, source.learner.advantages
    else:
        source = offline_source(setup, data.sources, data.tokens, batch_of, packer, followed)
        pack, batch = source.pack, source.batch
    evaluation, compute = None, given.compute_metrics
    if data.held_out:
        evaluation = build_evaluate(setup, objective, source, data.held_out, compute)
    elif compute is not None:
        raise ConfigError(
            "compute_metrics is given, but nothing is evaluated: give eval_dataset, or set eval.fraction or eval.every"
        )
    frozen, trainable = split(model.params, net.frozen)
    notes = data.notes
    if net.frozen_leaves:
        count, of_all = (sum(x.size for x in jax.tree.leaves(tree)) for tree in (trainable, model.params))
        notes = [*notes, f"trained: {count:,} of {of_all:,} numbers of the model (model.trainable, model.frozen)"]
    frozen_critic, of_critic = {}, None if critic is None else critic.params
    if critic is not None and critic_optimizer is not None:
        frozen_critic, of_critic = split(critic.params, critic.net.config.frozen)
    updates = replace(specs.update_spec(config), microbatch_rows=batch.microbatch_rows, schedule=rate)
    critic_net = None if critic is None else critic.net
    update, alone = build_updates(config, objective, optimizer, critic_net, critic_optimizer, updates, mesh)
    begin = partial(begin_state, config, mesh, optimizer, critic_optimizer)
    return Run(
        batch=batch,
        model=model if has_adapters(model.params) else replace(model, changed=True),
        critic=critic,
        mesh=mesh,
        source=mixed_source(setup, source, given.train_dataset) if isinstance(source, OnlineSource) else source,
        frozen=Frozen(frozen, frozen_critic),
        update=update,
        critic_alone=alone,
        evaluation=evaluation,
        state=begin(trainable, of_critic, 0),
        average=average,
        begin=begin,
        updates_per_step={"policy": specs.optimizer_spec(config).updates_per_step}
        | ({} if critic_optimizer is None else {"critic": specs.critic_optimizer_spec(config).updates_per_step}),
        stopwatch=stopwatch,
        rewards=rewards,
        environments=environments,
        pack=pack,
        config=config,
        data_files=checksums(data.sources) if jax.process_index() == 0 else {},
        notes=notes,
        warnings=warnings_of(config, model, advantages, environments),
    )


def offloaded(config, model: Model, critic: Model | None) -> tuple[Model, Model | None]:
    """The model and the critic, in the host's memory where their settings say so.

    Raises ConfigError for any of OFFLOADS on devices that cannot read that memory.
    """
    for key, _ in in_use(config, () if has_host_memory() else OFFLOADS):
        raise ConfigError(
            f"{key} is true, but the memory of a {jax.default_backend()} here has no part in the host's (pinned_host): "
            "set it to false, and shard the parameters over more devices (mesh.fsdp)"
        )
    if config.model.offload:
        model = replace(model, params=on_host(model.params))
    if critic is not None and specs.critic_update_spec(config).offload_params:
        critic = replace(critic, params=on_host(critic.params))
    return model, critic


def optimizers_of(
    config,
    model: Model,
    critic: Model | None,
    optimizer: optax.GradientTransformation | None,
    schedule: Callable[[Any], Any] | None,
) -> tuple[optax.GradientTransformation, optax.GradientTransformation | None, Callable[[Any], Any] | None]:
    """The policy's optimizer, or the one that is given in its place; the optimizer of a critic that is a network of its
    own, or None; and the policy's learning rate as a function of its updates, or None where it is not known."""
    spec, rate = specs.optimizer_spec(config), schedule
    if optimizer is not None:
        optimizer = own_optimizer(spec, optimizer)
    else:
        optimizer, rate = build_optimizer(spec, schedule), schedule or learning_rate_schedule(spec)
    if config.optimizer.rate_factors:
        optimizer = with_rate_factors(optimizer, named_rate_factors(model, config.optimizer.rate_factors))
    apart = critic is not None and not config.critic.shared
    return optimizer, build_optimizer(specs.critic_optimizer_spec(config)) if apart else None, rate


def build_updates(
    config,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    critic: Net | None,
    critic_optimizer: optax.GradientTransformation | None,
    spec: UpdateSpec,
    mesh: Mesh,
) -> tuple[Update, CriticAlone | None]:
    """The update of policy and critic, and the training of a critic apart from it, which one with an optimizer of its
    own may have."""
    update_critic = alone = None
    if critic is not None and critic_optimizer is not None:
        regression = value_regression(critic_spec(config), critic)
        update_critic = optimizer_step(regression, critic_optimizer, sized_critic_updates(config, spec), mesh)
        c, together = config.critic, config.algorithm.num_iterations
        passes, minibatches = c.num_iterations or together, c.minibatches or config.batch.minibatches
        apart = passes < together or minibatches != config.batch.minibatches
        own = passes if apart else passes - together
        if own or c.warmup_steps:
            alone = CriticAlone(make_critic_update(update_critic), minibatches, own, apart, c.warmup_steps)
        update_critic = None if apart else update_critic
    shares = critic is not None and critic_optimizer is None
    return make_update(objective, optimizer, spec, mesh, update_critic, shares), alone


def begin_state(
    config,
    mesh: Mesh,
    optimizer: optax.GradientTransformation,
    critic_optimizer: optax.GradientTransformation | None,
    params: Params,
    of_critic: Params | None,
    step: int,
) -> State:
    """The state at a step of parameters, and of a critic's, with new optimizers, whose schedules are where the step is.

    Without a `critic_optimizer` that of the policy is the critic's too.
    """
    joint = {**params, **of_critic} if of_critic is not None and critic_optimizer is None else params
    state = init_state(joint, optimizer, mesh, config.optimizer.offload)
    apart = 0 if critic_optimizer is None else config.critic.warmup_steps  # in which the policy was not trained
    updates = max(step - apart, 0) * specs.optimizer_spec(config).updates_per_step
    state = replace(state, step=state.step + step, opt_state=schedules_further(state.opt_state, updates))
    if of_critic is None:
        return state
    if critic_optimizer is None:
        return split_critic(state, State(jnp.zeros_like(state.step), of_critic, ()))
    critic = init_state(of_critic, critic_optimizer, mesh, specs.critic_update_spec(config).offload)
    updates = step * specs.critic_optimizer_spec(config).updates_per_step
    return replace(state, critic=replace(critic, opt_state=schedules_further(critic.opt_state, updates)))


def rescheduled(state: State, before: Mapping[str, int], now: Mapping[str, int]) -> State:
    """The state with its schedules where they are with the updates per step `now`, by `Run.updates_per_step`, that were
    counted with those `before` (without an entry: as many)."""

    def scaled(name: str, opt_state: optax.OptState) -> optax.OptState:
        return schedules_scaled(opt_state, before.get(name, now[name]), now[name])

    critic = state.critic
    if critic is not None and "critic" in now:
        critic = replace(critic, opt_state=scaled("critic", critic.opt_state))
    return replace(state, opt_state=scaled("policy", state.opt_state), critic=critic)


def make_optimizer(config) -> optax.GradientTransformation:
    """The optimizer of the policy."""
    return build_optimizer(specs.optimizer_spec(config))


def sized_batch(config, net: ModelConfig, room: float | None, mesh: Mesh, width: int) -> BatchSpec:
    """The rows of a step, of `width` tokens, in micro-batches that `room` bytes of a device hold where no key says
    their rows; a pass without gradients takes as many at a time."""
    batch = specs.batch_spec(config)
    if batch.microbatch_rows:
        return batch
    minibatch = batch_rows(config) // batch.minibatches
    multiple = rows_of_shards(config, mesh)
    room = room and room * mesh.shape["context"]  # devices that have a part of each row
    return replace(batch, microbatch_rows=fitting_rows(room, net, minibatch, width, multiple, row_shards(mesh)))


def sized_critic_updates(config, updates: UpdateSpec) -> UpdateSpec:
    """The updates of a critic of its own, in micro-batches of `updates`, the policy's, where no key says their rows."""
    own, rows = specs.critic_update_spec(config), batch_rows(config)
    rows //= config.critic.minibatches or config.batch.minibatches
    return replace(own, microbatch_rows=own.microbatch_rows or math.gcd(updates.microbatch_rows, rows))


def finished_models(run: Run, state: State) -> tuple[Model, Model | None]:
    """The model and the critic, or None without one, with the parameters of `state`, to be exported."""
    state = merge_frozen(state, run.frozen)
    model, critic = replace(run.model, params=state.params), None
    if run.critic is not None and state.critic is not None:
        critic = replace(run.critic, params=critic_params(critic_spec(run.config), state))
    return model, critic
