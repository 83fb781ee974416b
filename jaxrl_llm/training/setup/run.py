"""From a configuration to a `Run`: the one place where model, data, rewards, rollouts and updates meet."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxrl_llm.algorithms.random_streams import ADAPTERS, VALUE_HEAD
from jaxrl_llm.config import ConfigDict, ConfigError, batch_rows, with_correction
from jaxrl_llm.config.resolve import split_options
from jaxrl_llm.config.schema import OFFLINE
from jaxrl_llm.config.unread import unread
from jaxrl_llm.data import loading
from jaxrl_llm.data.curriculum import Curriculum
from jaxrl_llm.data.loading import DataSource, Tokenized
from jaxrl_llm.data.pipeline import Pipeline
from jaxrl_llm.data.templates import called_turn
from jaxrl_llm.data.tokenize import PIXELS
from jaxrl_llm.distributed import processes
from jaxrl_llm.distributed.sharding import has_host_memory, make_mesh, on_host, path_name, rollout_mesh, row_shards
from jaxrl_llm.environments.agents import Agents
from jaxrl_llm.environments.factory import Environments, load_environments
from jaxrl_llm.environments.tool_calls import PROBE_CALL, PROBE_TOOL, ToolCall, parse_tool_calls
from jaxrl_llm.models.families import rotary
from jaxrl_llm.models.lora import LoraConfig, has_adapters, parse_targets, split
from jaxrl_llm.models.model import Model, add_adapters, check_positions, check_same_vocabulary, copied_model, load_model
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.peft import read_config
from jaxrl_llm.models.quantize import BYTES
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.models.vision.row_images import count_tiles
from jaxrl_llm.rewards.functions import environment as environment_reward
from jaxrl_llm.rewards.runner import Rewards, load_rewards
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.training import offline
from jaxrl_llm.training.advantages import advantage_step
from jaxrl_llm.training.algorithm import Algorithm, BatchSpec
from jaxrl_llm.training.arrivals import RECORD, Arrivals
from jaxrl_llm.training.evaluation.run import Evaluations
from jaxrl_llm.training.images import check_kept
from jaxrl_llm.training.logging.stopwatch import Stopwatch
from jaxrl_llm.training.mixed import MixedSource
from jaxrl_llm.training.moments import schedules_further
from jaxrl_llm.training.objectives.objective import Positions
from jaxrl_llm.training.objectives.value import critic_params, shared_critic, value_regression
from jaxrl_llm.training.offline import OfflineSource
from jaxrl_llm.training.online import Critic, Learner, OnlineSource, Producer, RolloutWorker
from jaxrl_llm.training.optimizers import build_optimizer, learning_rate_schedule, own_optimizer
from jaxrl_llm.training.packing.documents import first_fit
from jaxrl_llm.training.packing.planner import Packer, TypicalRows, make_packer, typical_rollouts
from jaxrl_llm.training.partial_rollouts import PartialRollouts
from jaxrl_llm.training.reference import Reference, start_reference
from jaxrl_llm.training.replay import empty_replay
from jaxrl_llm.training.reward_models import with_reward_models
from jaxrl_llm.training.rollout_files import FOLDER, FileQueue, Rendezvous
from jaxrl_llm.training.rollout_queue import RolloutQueue
from jaxrl_llm.training.served_teacher import ServedTeacher, Server
from jaxrl_llm.training.setup import specs
from jaxrl_llm.training.setup.data import model_entries, read_data, tokenizer_of
from jaxrl_llm.training.setup.evaluation import build_evaluate
from jaxrl_llm.training.setup.learning_rate import with_learning_rate
from jaxrl_llm.training.setup.memory import fitting_rows, microbatch_room
from jaxrl_llm.training.setup.objectives import critic_spec, needs_reference, objective_of, preference_spec
from jaxrl_llm.training.teacher import SelfTeacher, Teacher
from jaxrl_llm.training.teacher_context import TeacherContext
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
    unchanged,
)

SMALL_RATE = 5e-6  # the smallest at which 16-bit parameters were seen to follow float32 ones (docs/scaling.md)


class CriticAlone(NamedTuple):
    """The critic's own training: passes before those of the policy, and the first steps of a run."""

    update: Update
    minibatches: int
    passes: int  # over a batch, before the policy's: those that it makes besides them or, `apart`, all
    apart: bool  # the policy's updates leave the critic as it is


class Run(NamedTuple):
    """Everything that `train` drives."""

    algorithm: Algorithm
    batch: BatchSpec
    model: Model
    critic: Model | None
    mesh: Mesh
    source: OnlineSource | OfflineSource | MixedSource
    frozen: Frozen
    update: Update
    critic_alone: CriticAlone | None
    warmup_steps: int  # training steps in which only the critic is trained
    evaluation: Evaluations | None
    state: State
    begin: Callable[[Params, Params | None, int], State]  # the state at a step, of parameters that were trained before
    stopwatch: Stopwatch
    rewards: Rewards
    environments: Environments | Agents | None
    pack: Packer
    config: ConfigDict  # with the number of steps, where num_epochs says it, and the learning rate
    notes: list[str]  # lines on the data and the learning rate
    warnings: list[str]

    def close(self) -> None:
        """Closes the environments and the rewards: both, also where one fails."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.rewards.close)
            if self.environments is not None:
                stack.callback(self.environments.close)


def build_mesh(config) -> Mesh:
    """The mesh of the configuration, over the devices that do not only sample. Raises ConfigError without one."""
    c, devices = config.mesh, jax.devices()
    if count := sampling_devices(config):
        if jax.process_count() > 1 or count >= len(devices):
            raise ConfigError(
                f"rollout.devices is {count}, of {len(devices)} devices in {jax.process_count()} processes, but it "
                "takes fewer than there are, of one process: set it to 0, and all devices sample and train"
            )
        devices = devices[:-count]
    return make_mesh(c.data, c.fsdp, c.tensor, c.context, c.expert, devices)


def sampling_mesh(config, mesh: Mesh, kv_heads: int) -> Mesh:
    """The mesh of the devices that only sample; `mesh`, that of training, where there are none."""
    count = sampling_devices(config)
    if not count:
        return mesh
    return rollout_mesh(make_mesh(devices=jax.devices()[-count:]), config.rollout.mesh, kv_heads)


def sampling_devices(config) -> int:
    """The number of devices that only sample."""
    return 0 if config.algorithm.name in OFFLINE else config.rollout.devices


def build(
    config,
    mesh: Mesh,
    train_dataset=None,
    eval_dataset=None,
    rewards=None,
    environment=None,
    tools=(),
    model: Model | None = None,
    tokenizer=None,
    optimizer: optax.GradientTransformation | None = None,
    schedule: Callable[[Any], Any] | None = None,
    compute_metrics: Callable[..., Any] | None = None,
) -> Run:
    """The run of a configuration, on `mesh` (which must be set), with the objects of `given.Given` in place of names.

    Data is read before weights. Raises ConfigError for anything the user can fix.
    """
    config = with_correction(config)
    check_rows(config, batch_rows(config), mesh)
    given_model, stopwatch = model, Stopwatch()
    spec = specs.environment_spec(config, environment, tools)  # refused before anything is read
    rows = read_data(config, train_dataset, eval_dataset, tokenizer, given_model)
    config, data = rows.config, rows.sources
    algorithm = specs.algorithm_of(config)
    if algorithm.online and rows.tokens is not None and any(count_tiles([x.get(PIXELS) for x in rows.tokens.rows])):
        check_kept(config.algorithm.replay_groups > 0, config.teacher.path is not None)
    model, graders = build_model(config, mesh, None, rows.tokenizer, given_model), build_rewards(config, rewards)
    environments = load_environments(spec)
    if environment_reward in graders.functions and environments is None and config.environment.rollout_func is None:
        raise ConfigError("rewards.functions names environment, but there is none: set environment.name or agent")
    if given_model is None:
        _check_trainable(config, model)
    critic = build_critic(config, model, mesh, given_model) if algorithm.has_critic else None
    model_type = (model.hf_config or {}).get("model_type", "model without config.json")
    config, told = with_learning_rate(config, model_type, model.net.config.width, has_adapters(model.params))
    for name, offload in (("model", config.model.offload), ("critic", critic and config.critic.offload)):
        if offload and not has_host_memory():
            raise ConfigError(
                f"{name}.offload is true, but the memory of a {jax.default_backend()} here has no part in the host's "
                "(pinned_host): set it to false, and shard the parameters over more devices (mesh.fsdp)"
            )
    if config.model.offload:
        model = replace(model, params=on_host(model.params))
    if critic is not None and specs.critic_update_spec(config).offload_params:
        critic = replace(critic, params=on_host(critic.params))
    objective = objective_of(config, model.net)

    net, room = model.net.config, microbatch_room(config, model, critic)

    def packer(sample: TypicalRows | None) -> Packer:
        return make_packer(specs.packing_spec(config), net, mesh, objective.positions, sample, room=room)

    if algorithm.online:
        source = _online(config, model, critic, data, rows.tokens, graders, mesh, stopwatch, environments, packer)
        pack, width = source.learner.pack, source.learner.prompt_width + config.rollout.max_completion_length
    else:
        source = _offline(config, algorithm, model, data, rows.tokens, mesh, stopwatch, packer)
        pack, width = source.pack, source.spec.width
    updates = sized_updates(config, net, room, width, mesh)
    evaluation = None
    if rows.held_out:
        evaluation = build_evaluate(
            config, model, graders, objective, source, rows.held_out, mesh, environments, stopwatch, compute_metrics
        )
    elif compute_metrics is not None:
        raise ConfigError(
            "compute_metrics is given, but nothing is evaluated: give eval_dataset, or set eval.fraction or eval.every"
        )
    update_critic, critic_optimizer, rate = None, None, schedule
    if optimizer is not None:
        optimizer = own_optimizer(specs.optimizer_spec(config), optimizer)
    else:
        optimizer = build_optimizer(specs.optimizer_spec(config), schedule)
        rate = schedule or learning_rate_schedule(specs.optimizer_spec(config))
    frozen, trainable = split(model.params, model.net.config.frozen)
    frozen_critic, of_critic = {}, None if critic is None else critic.params
    if critic is not None and not config.critic.shared:
        critic_optimizer = build_optimizer(specs.critic_optimizer_spec(config))
        frozen_critic, of_critic = split(critic.params, critic.net.config.frozen)
        regression = value_regression(critic_spec(config), critic.net)
        update_critic = optimizer_step(regression, critic_optimizer, sized_critic_updates(config, updates), mesh)
    begin = partial(begin_state, config, mesh, optimizer, critic_optimizer)
    updates, alone = replace(updates, schedule=rate), critic_alone(config, update_critic)
    update_critic = unchanged if alone is not None and alone.apart else update_critic
    update = make_update(objective, optimizer, updates, mesh, update_critic, algorithm.has_critic)
    return Run(
        algorithm=algorithm,
        batch=specs.batch_spec(config),
        model=model if has_adapters(model.params) else replace(model, changed=True),
        critic=critic,
        mesh=mesh,
        source=_mixed(config, source, model, train_dataset) if isinstance(source, OnlineSource) else source,
        frozen=Frozen(frozen, frozen_critic),
        update=update,
        critic_alone=alone,
        warmup_steps=config.critic.warmup_steps,
        evaluation=evaluation,
        state=begin(trainable, of_critic, 0),
        begin=begin,
        stopwatch=stopwatch,
        rewards=graders,
        environments=environments,
        pack=pack,
        config=config,
        notes=[*rows.notes, *told],
        warnings=[
            *unread(config),
            *rotary.unread(model.hf_config or {}),
            *narrow_updates(config, model),
            *unread_calls(config, model, environments),
            *experts_left_out(config, model),
        ],
    )


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


def critic_alone(config, update_critic: Update | None) -> CriticAlone | None:
    """What a critic of its own is trained on besides the policy's updates; None: nothing."""
    c, passes = config.critic, config.critic.num_iterations or config.algorithm.num_iterations
    more = passes - config.algorithm.num_iterations
    apart = more < 0 or c.minibatches not in (0, config.batch.minibatches)
    if update_critic is None or not (apart or more or c.warmup_steps):
        return None
    minibatches = c.minibatches or config.batch.minibatches
    return CriticAlone(make_critic_update(update_critic), minibatches, passes if apart else more, apart)


def narrow_updates(config, model: Model) -> list[str]:
    """A warning where updates are far smaller than the spacing of the numbers that they are added to."""
    dtype, rate = config.model.param_dtype, config.optimizer.learning_rate
    if dtype == "float32" or has_adapters(model.params) or rate >= SMALL_RATE:
        return []
    return [
        f"model.param_dtype is {dtype} and optimizer.learning_rate {rate:g}: an update is far smaller than the spacing "
        f"of {dtype}, so that most parameters stay and some, drawn at random, move a whole spacing: right on average, "
        "and noisy. float32 is exact (docs/scaling.md)"
    ]


def experts_left_out(config, model: Model) -> list[str]:
    """Warnings where experts, most of a mixture of them, stay as they are beside fewer bits or adapters."""
    leaves, net = jax.tree_util.tree_leaves_with_path(model.params), model.net.config
    experts = [x for path, x in leaves if "/experts/" in path_name(path)]
    if not experts:
        return []
    held = f"{sum(x.nbytes for x in experts) / 1e9:.3g} of {sum(x.nbytes for _, x in leaves) / 1e9:.3g} GB"
    found = []
    if net.quantize != "none":
        smaller = ", model.param_dtype=bfloat16 halves them" if experts[0].dtype == jnp.float32 else ""
        found.append(f"model.quantize = {net.quantize!r} leaves the experts as they are: {held}{smaller}")
    if net.lora is not None and {"gate", "up", "down"} & set(net.lora.targets):
        found.append(f"lora.targets: experts have no adapters and are not trained: {held}")
    if config.algorithm.name not in OFFLINE and config.rollout.weights_dtype in BYTES:
        sampled = sum(x.size for x in experts) * jnp.dtype(net.dtype).itemsize
        found.append(
            f"rollout.weights_dtype = {config.rollout.weights_dtype!r} leaves the experts in {net.dtype}: "
            f"{sampled / 1e9:.3g} GB of the sampler's parameters"
        )
    return found


def unread_calls(config, model: Model, environments: Environments | Agents | None) -> list[str]:
    """A warning where there are tools, and the chat template writes calls of them in a form that is not read."""
    played, tokenizer = specs.played_environments(environments), model.tokenizer
    if played is None or not any(played.schemas.values()) or not getattr(tokenizer, "chat_template", None):
        return []
    turn = called_turn(tokenizer, [PROBE_CALL], [PROBE_TOOL], specs.data_spec(config).template_kwargs)
    if turn is None or parse_tool_calls(turn, [PROBE_TOOL]) == [ToolCall(**PROBE_CALL)]:
        return []
    return [
        f"the chat template writes calls of tools as {turn.strip()!r:.200}, a form that is not read: no tool will be "
        "called. docs/environments.md has the forms that are"
    ]


def make_optimizer(config) -> optax.GradientTransformation:
    """The optimizer of the policy, or of the model that is trained."""
    return build_optimizer(specs.optimizer_spec(config))


def shard_rows(config, mesh: Mesh) -> int:
    """Rows of a minibatch in each row shard of the mesh."""
    return batch_rows(config) // config.batch.minibatches // row_shards(mesh)


def rows_of_shards(algorithm: Algorithm, mesh: Mesh) -> int:
    """The fewest rows that every row shard of the mesh has a part of: one each, or the two rows of a pair."""
    return row_shards(mesh) * (2 if not algorithm.online and algorithm.group_size == 2 else 1)


def sized_updates(config, net: ModelConfig, room: float | None, width: int, mesh: Mesh) -> UpdateSpec:
    """The updates of the policy, in micro-batches that `room` bytes of a device hold where no key says their rows."""
    updates = specs.update_spec(config)
    if updates.microbatch_rows:
        return updates
    minibatch = batch_rows(config) // config.batch.minibatches
    multiple = rows_of_shards(specs.algorithm_of(config), mesh)
    room = room and room * mesh.shape["context"]  # devices that have a part of each row
    return replace(updates, microbatch_rows=fitting_rows(room, net, minibatch, width, multiple, row_shards(mesh)))


def sized_critic_updates(config, updates: UpdateSpec) -> UpdateSpec:
    """The updates of a critic of its own, in micro-batches of `updates`, the policy's, where no key says their rows."""
    own, rows = specs.critic_update_spec(config), batch_rows(config)
    rows //= config.critic.minibatches or config.batch.minibatches
    return replace(own, microbatch_rows=own.microbatch_rows or math.gcd(updates.microbatch_rows, rows))


def check_rows(config, rows: int, mesh: Mesh) -> None:
    """Raises ConfigError unless every micro-batch divides into the mesh's row shards."""
    algorithm = specs.algorithm_of(config)
    if config.algorithm.aggregation == "microbatch_token" and row_shards(mesh) > 1:
        raise ConfigError(
            "algorithm.aggregation = 'microbatch_token' is of adjacent rows, but a micro-batch takes rows of each of "
            f"the {row_shards(mesh)} shards of the mesh; use token, or mesh.data = mesh.fsdp = 1"
        )
    batch, multiple = specs.batch_spec(config), rows_of_shards(algorithm, mesh)
    for name, size in (("microbatch_rows", batch.microbatch_rows or rows // batch.minibatches),
                       ("logps_microbatch_rows", batch.logps_microbatch_rows)):  # fmt: skip
        if size % multiple:
            raise ConfigError(
                f"a micro-batch of {size} rows does not divide into mesh.data x mesh.fsdp x mesh.expert = "
                f"{row_shards(mesh)} parts{' of whole pairs' if multiple > row_shards(mesh) else ''}; change "
                f"batch.prompts, rollout.group_size, batch.minibatches, batch.{name} or the mesh"
            )


def build_model(
    config, mesh: Mesh, head: str | None = None, tokenizer: Any = None, given: Model | None = None
) -> Model:
    """The model of the configuration, sharded over `mesh`, or a copy of one in memory that is `given`.

    A model in memory that has adapters is trained on by them or, where `lora.rank` asks for new ones, with its own
    merged. Raises ConfigError when there is no tokenizer.
    """
    c, options = config.model, net_options(config, head)
    tokenizer = tokenizer_of(config, model=given) if tokenizer is None else tokenizer
    if given is not None:
        merge = bool(config.lora.rank)
        model = copied_model(given, mesh, c.dtype, c.param_dtype, merge, **options)
        model = replace(model, tokenizer=tokenizer, changed=True)
    else:
        init_key = jax.random.key(config.seed) if c.random_init else None
        model = load_model(
            c.path, c.dtype, c.param_dtype, mesh, init_key, config.lora.path, c.allow_pickle, c.trust_remote_code,
            c.revision, tokenizer, model_entries(config), **options,
        )  # fmt: skip
    if config.lora.rank:
        key = jax.random.fold_in(jax.random.key(config.seed), ADAPTERS)
        model = add_adapters(model, build_lora(config), key, config.lora.modules_to_save)
    elif (given is not None or config.lora.path is not None) and model.net.config.lora is not None:
        model = replace(model, net=model.net.with_lora(replace(model.net.config.lora, dropout=config.lora.dropout)))
    return model


def net_options(config, head: str | None = None, on_cpu: bool | None = None) -> dict[str, Any]:
    """The fields of ModelConfig that the configuration sets, besides the types; `on_cpu` None is this process's."""
    c = config.model
    on_cpu = jax.default_backend() == "cpu" if on_cpu is None else on_cpu
    remat = ("dots" if on_cpu else "none") if c.remat == "auto" else c.remat
    head = head or ("score" if config.algorithm.name == "reward_model" else "lm")
    options = {
        "remat": remat, "scan_layers": c.scan_layers, "head": head, "quantize": c.quantize, "fp32_head": c.fp32_head,
        "freeze_router": c.freeze_router, "attention": c.attention, "vision_training": c.vision,
    }  # fmt: skip
    return options if c.router_aux_loss_coef is None else options | {"router_aux_loss_coef": c.router_aux_loss_coef}


def build_lora(config) -> LoraConfig:
    """The adapters that the configuration asks for; raises ConfigError for an unknown target."""
    c = config.lora
    return LoraConfig(c.rank, c.alpha, c.dropout, parse_targets(c.targets), c.rslora, c.dora)


def _check_trainable(config, model: Model) -> None:
    """Raises ConfigError for a model that cannot be trained as the configuration says."""
    lora = config.lora
    if has_adapters(model.params) and not (lora.rank or lora.path):
        raise ConfigError(
            f"model.path = {config.model.path!r} is an adapter. Set lora.path to it and model.path to {model.path!r} "
            "to train it on; or merge it first, with jaxrl_llm.save_hf(jaxrl_llm.load_model(path), folder)"
        )
    if config.model.vision != "frozen" and model.net.config.vision is None:
        raise ConfigError(
            f"model.vision is {config.model.vision}, but {config.model.path} reads text alone: leave it at frozen"
        )
    adapters = model.net.config.lora
    if adapters is not None and adapters.dora and config.model.quantize != "none":
        raise ConfigError(
            "the adapter of lora.path is a DoRA, which measures the matrices in every forward pass, and model.quantize "
            f"= {config.model.quantize!r} keeps none as numbers: set it to none"
        )
    if config.model.quantize != "none" and not has_adapters(model.params):
        raise ConfigError(
            f"model.quantize is {config.model.quantize}, and quantised matrices are not trained: set lora.rank, 16 for "
            "example, to train adapters beside them"
        )


def build_critic(config, policy: Model, mesh: Mesh, given: Model | None = None) -> Model:
    """PPO's critic: the model of critic.path (or model.path, or the one in memory that is `given`) with a score
    head, and new adapters of `critic.lora_rank` or where the policy has adapters; or, with critic.shared, a score head
    on the policy's own network."""
    if config.critic.shared:
        return shared_critic(policy, jax.random.fold_in(jax.random.key(config.seed), VALUE_HEAD), mesh)
    own = critic_config(config)
    elsewhere = config.critic.path is not None
    tokenizer, given = (None, None) if elsewhere else (policy.tokenizer, given)
    critic = build_model(own, mesh, "score", tokenizer, given)
    check_same_vocabulary(policy, critic, f"critic.path = {own.model.path!r}:")
    return critic


def critic_config(config) -> ConfigDict:
    """The configuration whose `model` and `lora` are those of a critic that is a network of its own."""
    own, critic = config.copy_and_resolve_references(), config.critic
    if critic.path is not None:
        own.model.path, own.model.revision, own.model.overrides, own.model.tokenizer = critic.path, None, "", None
        own.model.eos_token = None
        own.data.chat_template = None
    if config.lora.path is not None:
        adapter = read_config(config.lora.path)
        shape, own.lora.path, own.lora.modules_to_save = adapter.lora, None, adapter.modules_to_save
        for name in ("rank", "alpha", "rslora", "dora", "targets"):
            own.lora[name] = getattr(shape, name)
    if critic.lora_rank is not None:
        own.lora.rank, own.lora.alpha = critic.lora_rank, critic.lora_alpha or own.lora.alpha
        own.lora.targets = critic.lora_targets or own.lora.targets
        own.lora.modules_to_save = own.lora.modules_to_save if critic.lora_rank else ()
    return own


def build_teacher(
    config, policy: Model, mesh: Mesh, length: int, cause: str, other: str | None = None
) -> Teacher | ServedTeacher | None:
    """The teacher of the configuration, or of an entry `other` of teacher.others, for rows of up to `length` tokens.

    None without one. Raises ConfigError for a model that has no head for tokens, too few positions for rows of that
    length, which `cause` explains, or another vocabulary, and for more likeliest tokens than it has.
    """
    c, own = config.teacher, config.model
    key, path, revision = "teacher.path", c.path, c.revision
    if other is not None:
        value, _, path = other.partition("=")
        key, revision = f"teacher.others, {value}", None
    if path is None:
        return None
    name, options = split_options(path)
    if name == "server":
        try:
            return ServedTeacher(specs.teacher_spec(config), Server(**options), mesh, key)
        except TypeError as error:
            raise ConfigError(
                f"{key} = {path!r}: {error}; write server(url='http://localhost:8000/v1', model='m'), with "
                "timeout and api_key (a variable's name) where they differ"
            ) from None
    model = load_model(
        path, own.dtype if c.dtype == "auto" else c.dtype, mesh=mesh, allow_pickle=own.allow_pickle,
        trust_remote_code=own.trust_remote_code, revision=revision, head="lm", quantize=c.quantize,
    )  # fmt: skip
    if model.tokenizer is None:
        raise ConfigError(f"{key} = {path!r} has no tokenizer, by which its vocabulary could be compared")
    check_same_vocabulary(policy, model, f"{key} = {path!r}:")
    check_positions(model, length, cause)
    check_top(c.top_k, model, path)
    return Teacher.of(specs.teacher_spec(config), model, mesh, policy.net.config.vocab_size)


def check_top(top_k: int, model: Model, path: str) -> None:
    """Raises ConfigError unless a teacher has more tokens than its likeliest ones that are asked for."""
    if top_k >= model.net.config.vocab_size:
        raise ConfigError(
            f"teacher.top_k is {top_k}, but {path} has {model.net.config.vocab_size} tokens: 0 is all of them"
        )


def build_rewards(config, rewards=None) -> Rewards:
    """The graders of `rewards` (a function, a name, or a list of them), or else of the configuration.

    There may be none where a teacher is learned from.
    """
    c = config.rewards
    functions = with_reward_models(c.functions if rewards is None else rewards)
    return load_rewards(
        functions, c.weights, c.timeout, on_timeout=c.on_timeout, on_error=c.on_error, workers=c.workers,
        required=config.teacher.path is None,
    )  # fmt: skip


def _online(
    config,
    model: Model,
    critic: Model | None,
    data: list[DataSource],
    tokens: Tokenized | None,
    rewards: Rewards,
    mesh: Mesh,
    stopwatch: Stopwatch,
    environments: Environments | Agents | None,
    packer: Callable[[TypicalRows | None], Packer],
) -> OnlineSource:
    """The producer and the learner of an online algorithm."""
    advantages = advantage_step(specs.advantage_spec(config), rewards.names)
    if (rule := advantages.asking("turns")) and environments is None:
        raise ConfigError(
            f"{rule.setting} is {rule.name!r}, which gives credit to the turns of episodes, but rows have one turn: "
            "set environment.name, tools or agent, or another advantage"
        )
    if (rule := advantages.asking("parts")) and not isinstance(environments, Agents):
        raise ConfigError(
            f"{rule.setting} is {rule.name!r}, which reads the roles of an agent's sessions, but rows have none: set "
            "environment.agent (docs/agents.md), or another advantage"
        )
    spec, rows, rollout = specs.learner_spec(config), specs.batch_spec(config), config.rollout
    if spec.observations and environments is None and config.environment.rollout_func is None:
        raise ConfigError(
            f"algorithm.observation_coef is {config.algorithm.observation_coef}, but completions have no observation "
            "tokens: set environment.name, tools, agent or rollout_func, or observation_coef to 0"
        )
    if rollout.processes and not processes.is_split():
        raise ConfigError(
            f"rollout.processes is {rollout.processes}, but this process has not joined others: start each with python "
            "-m jaxrl_llm.train (docs/asynchronous.md), or set it to 0"
        )
    if rollout.staleness and jax.process_count() > 1 and not rollout.processes:
        raise ConfigError(
            f"rollout.staleness is {rollout.staleness}, but the run has {jax.process_count()} processes, whose threads "
            "would meet in another order: set it to 0, or let some of the processes only sample (rollout.processes)"
        )
    if rollout.partial_prompts and jax.process_count() > 1:
        raise ConfigError(
            f"rollout.partial_prompts is {rollout.partial_prompts}, but the run has {jax.process_count()} processes, "
            "each of which would be done with other prompts: set it to 0"
        )
    watch = Stopwatch(within=stopwatch) if rollout.staleness and not rollout.processes else stopwatch
    own_mesh = sampling_mesh(config, mesh, model.net.config.kv_heads)
    if rollout.update_in_flight and own_mesh is mesh and mesh.size > 1:
        raise ConfigError(
            f"rollout.update_in_flight is true, but {mesh.size} devices sample and train in turn, so that no policy is "
            "new while they sample: give sampling devices of its own (rollout.devices), or set it to false"
        )
    producer = _producer(config, model, data, tokens, rewards, own_mesh, watch, environments)
    worker = producer.worker
    reference = replay = None
    played = specs.played_environments(environments)
    if needs_reference(config, [str(name) for name in played.factories] if played is not None else ()):
        settings, lora = specs.reference_spec(config), model.net.config.lora
        reference = Reference(start_reference(settings, model.params, lora), settings, lora)
    width, longest = worker.prompt_width, rollout.max_completion_length
    if config.algorithm.replay_groups:
        by_environment = {"kl_weight": spec.kl_weights and reference is not None, "loss_weight": spec.loss_weights}
        per_row = [field for field, weights in by_environment.items() if weights]
        replay = empty_replay(config.algorithm.replay_groups, rollout.group_size, width + longest, width, mesh, per_row)
    sample_of = partial(typical_rollouts, shard_rows(config, mesh), rollout.group_size)
    sample = sample_of(width, longest)

    context, shown = None, specs.context_spec(config)
    length, cause = width + longest, "the longest prompt and rollout.max_completion_length"
    if shown is not None:
        own_width = specs.context_width(config, width)
        length = own_width + longest
        cause = "the longest prompt of the teacher (teacher.max_prompt_length) and rollout.max_completion_length"
        # Nothing is asked of the packed rows of this pass but to be cheap.
        packed = replace(
            specs.packing_spec(config),
            packing="false" if config.batch.packing == "false" else "auto",
            pack_length=0,
            microbatch_tokens=0,
            group_size=rollout.group_size,
        )
        context = TeacherContext(
            shown, model.tokenizer, specs.data_spec(config).template_kwargs, mesh, own_width, width,
            make_packer(packed, model.net.config, mesh, Positions(), sample_of(own_width, longest)),
        )  # fmt: skip

    def teacher_of(other: str | None = None) -> Any:
        return build_teacher(config, model, mesh, length, cause, other)

    if specs.is_own_teacher(config):
        check_positions(model, length, cause)
        check_top(config.teacher.top_k, model, config.teacher.path)
        settings, lora = specs.self_reference(config), model.net.config.lora
        copy = None if settings is None else Reference(start_reference(settings, model.params, lora), settings, lora)
        teacher = SelfTeacher(specs.teacher_spec(config), model.net, mesh, copy)
    else:
        teacher = teacher_of()

    if rollout.processes:
        queue: RolloutQueue | FileQueue = FileQueue(
            rendezvous_of(config),
            rollout.staleness,
            config.total_steps,
            publish=worker.copy_policy,
            frozen=model.net.config.frozen,
            pipeline=cast(Pipeline, producer.pipeline),  # see config/checks.py
            facts=processes.agreed_facts(config),
            mesh=mesh,
            watch=stopwatch,
        )
    else:
        queue = RolloutQueue(
            rollout.staleness,
            config.total_steps,
            key_of=partial(jax.random.fold_in, jax.random.key(config.seed)),
            publish=worker.copy_policy,
            mesh=own_mesh,
            train_mesh=mesh,
            watch=stopwatch,
            own_watch=watch,
            arrivals=worker.arrivals if producer.partial is None else producer.partial.arrivals,
        )
    return OnlineSource(
        producer,
        Learner(
            spec=spec,
            batch=rows,
            net=model.net,
            mesh=mesh,
            prompt_width=width,
            reward_weights=rewards.weights,
            advantages=advantages,
            pack=packer(sample),
            stopwatch=stopwatch,
            reference=reference,
            controllers=specs.controllers_of(config),
            replay=replay,
            critic=None if critic is None else Critic(critic.net, partial(critic_params, critic_spec(config))),
            teacher=teacher,
            context=context,
            other_teachers={entry.partition("=")[0]: teacher_of(entry) for entry in config.teacher.others},
        ),
        queue,
    )


def _producer(
    config,
    model: Model,
    data: list[DataSource],
    tokens: Tokenized | None,
    rewards: Rewards,
    own_mesh: Mesh,
    watch: Stopwatch,
    environments: Environments | Agents | None,
) -> Producer:
    """The producer, which samples and grades on `own_mesh`."""
    advantages = advantage_step(specs.advantage_spec(config), rewards.names)
    rows, rollout = specs.batch_spec(config), config.rollout
    process = jax.process_index(), jax.process_count()  # which share the prompts
    if tokens is None:
        examples = None
        pipeline = loading.stream(specs.data_spec(config), data, "prompts", model.tokenizer, lambda row: row, *process)
    else:
        examples, curriculum = tokens.rows, specs.curriculum_spec(config)
        order = (config.seed, config.data.shuffle, *process, tokens.shares)
        if curriculum is None:
            pipeline = Pipeline(examples, rows.prompts, *order)
        else:
            pipeline = Curriculum(examples, rows.prompts, curriculum, *order)

    def worker_of(sampling: SamplingParams, group_size: int) -> RolloutWorker:
        return specs.build_worker(config, model, rewards, own_mesh, sampling, group_size, examples, watch, environments)

    worker = worker_of(specs.training_sampling(config), rollout.group_size)
    specs.check_correction(config, worker.engine)
    compares = advantages.asking("greedy_scores")
    greedy = None if compares is None else worker_of(specs.training_sampling(config).greedy, 1)
    key, partial_rollouts, arrivals = jax.random.key(config.seed), None, None
    if rollout.update_in_flight or rollout.max_wait is not None:
        followed = None if rollout.arrivals is None else Path(rollout.arrivals).expanduser()
        record = Path(config.output_dir) / RECORD
        arrivals = Arrivals(record, rollout.staleness, rollout.update_in_flight, rollout.max_wait, followed)
    for name, off in (("update_in_flight", "false"), ("partial_prompts", "0")):
        if compares is not None and rollout[name]:
            raise ConfigError(
                f"rollout.{name} is {str(rollout[name]).lower()}, but {compares.setting} = {compares.name!r} compares "
                f"with a greedy completion of one policy: set the one to {off}, or another advantage"
            )
    if rollout.update_in_flight:
        worker = replace(worker, arrivals=arrivals)
    if rollout.partial_prompts:
        settings, shards = specs.partial_spec(config), row_shards(own_mesh)
        if settings.in_flight % shards:
            raise ConfigError(
                f"batch.prompts + rollout.partial_prompts is {settings.in_flight}, which does not divide into the "
                f"{shards} shards of rows of the mesh that samples: set rollout.partial_prompts to another number"
            )
        assert isinstance(pipeline, Pipeline)  # neither streams nor a curriculum: see config/checks.py
        partial_rollouts = PartialRollouts(
            settings, worker.engine, pipeline, key, own_mesh, worker.prompt_width, watch, arrivals
        )
    return Producer(specs.producer_spec(config), worker, greedy, pipeline, advantages.flat_groups, partial_rollouts)


def rendezvous_of(config) -> Rendezvous:
    """The folder where the processes that only sample meet those that train."""
    folder, c = Path(config.output_dir).absolute() / FOLDER, config.processes
    return Rendezvous(folder, config.rollout.processes, c.rendezvous_seconds, c.heartbeat_seconds)


def build_producer(config) -> tuple[Producer, Model, Stopwatch, Environments | Agents | None]:
    """The part of a run that a process which only samples needs: the producer, on `rollout.mesh` of its devices.

    Raises ConfigError as `build` does.
    """
    config = with_correction(config)
    mesh = rollout_mesh(make_mesh(devices=jax.devices()), config.rollout.mesh)
    with jax.set_mesh(mesh):
        spec = specs.environment_spec(config)
        rows = read_data(config, None, None, None, None)
        model = build_model(rows.config, mesh, None, rows.tokenizer)
        rewards, environments, watch = build_rewards(rows.config), load_environments(spec), Stopwatch()
        producer = _producer(rows.config, model, rows.sources, rows.tokens, rewards, mesh, watch, environments)
    return producer, model, watch, environments


def _mixed(config, online: OnlineSource, model: Model, train_dataset: Any) -> OnlineSource | MixedSource:
    """The source with batches of the data's rows between those of samples, where `teacher.on_policy` asks for them.

    A batch of given rows has as many rows, of the same width, as one of samples.
    """
    if config.teacher.on_policy == 1:
        return online
    learner, given = online.learner, config.copy_and_resolve_references()
    width = learner.prompt_width + config.rollout.max_completion_length
    given.algorithm.name, given.batch.prompts, given.teacher.path = "sft", batch_rows(config), None
    given.data.max_length = width
    spec, tokens = specs.data_spec(given), None
    data = loading.open_sources(spec, model.tokenizer, train_dataset)
    if not spec.streaming:
        tokens = loading.tokenized(spec, data, "completions", model.tokenizer)
    rows = _offline(
        given, specs.algorithm_of(given), model, data, tokens, learner.mesh, learner.stopwatch, lambda _: learner.pack
    )
    assert not isinstance(learner.teacher, SelfTeacher)  # which has a context, and that is of samples alone
    rows = replace(rows, spec=replace(rows.spec, width=width), teacher=learner.teacher)
    return MixedSource(online, rows, config.teacher.on_policy, config.seed)


def _offline(
    config,
    algorithm: Algorithm,
    model: Model,
    data: list[DataSource],
    tokens: Tokenized | None,
    mesh: Mesh,
    stopwatch: Stopwatch,
    packer: Callable[[TypicalRows | None], Packer],
) -> OfflineSource:
    """The batches of an offline algorithm."""
    rows, c = specs.batch_spec(config), config.data
    settings, lora = specs.reference_spec(config), model.net.config.lora
    sample = reference = None
    if algorithm.needs_reference:
        kept = not c.precompute_reference
        reference = Reference(start_reference(settings, model.params, lora, kept), settings, lora)
    elif settings.ref_sync_steps and config.algorithm.name == "preference":
        raise ConfigError(
            f"algorithm.ref_sync_steps is {settings.ref_sync_steps}, but algorithm.loss = {config.algorithm.loss!r} "
            "reads no reference here: set it to 0"
        )
    if tokens is None:
        margins = any("margin" in loading.columns(source) for source in data)
        as_example = partial(offline.as_example, margins=margins)
        pipeline = loading.stream(specs.data_spec(config), data, algorithm.data, model.tokenizer, as_example)
        check_positions(model, c.max_length, "data.max_length, as rows are streamed")
        spec = specs.offline_spec(config, c.max_length)
    else:
        examples: list[Any] = offline.as_examples(tokens.rows)
        if algorithm.data == "labels":
            options = preference_spec(config).losses[0].options
            weights = options.get("desirable_weight", 1.0), options.get("undesirable_weight", 1.0)
            offline.check_balance(examples, *weights)
        longest = offline.longest(examples, algorithm.mismatched)
        check_positions(model, longest, "the longest of the data, up to data.max_length")
        if c.packing:
            check_positions(model, c.max_length, "data.max_length, which data.packing fills")
        width = specs.padded_width(longest, c.max_length)
        spec = specs.offline_spec(config, c.max_length if c.packing else width)
        if reference is not None and c.precompute_reference:
            examples = offline.with_reference(rows, model.net, reference.params, examples, width, mesh)
            reference = None
        if c.packing:
            groups = first_fit([len(row["ids"]) for (row,) in examples], c.max_length)
            examples = [[examples[i][0] for i in group] for group in groups]
        elif not c.group_by_length:
            sample = offline.typical_rows(spec, examples, shard_rows(config, mesh), rows.group_size)
        # Every process reads whole batches: kto pairs the rows of one with each other.
        lengths = [max(len(row["ids"]) for row in example) for example in examples] if c.group_by_length else None
        pipeline = Pipeline(examples, rows.prompts, config.seed, c.shuffle, shares=tokens.shares, lengths=lengths)
    teacher = build_teacher(config, model, mesh, spec.width, "the longest of the data, up to data.max_length")
    return OfflineSource(spec, rows, model.net, pipeline, mesh, packer(sample), stopwatch, reference, teacher=teacher)


def finished_models(config, run: Run, state: State) -> tuple[Model, Model | None]:
    """The model and the critic (None without one) with the parameters of `state`, to be exported."""
    state = merge_frozen(state, run.frozen)
    model, critic = replace(run.model, params=state.params), None
    if run.critic is not None and state.critic is not None:
        critic = replace(run.critic, params=critic_params(critic_spec(config), state))
    return model, critic
