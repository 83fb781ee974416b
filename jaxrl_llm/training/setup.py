"""From a configuration to the parts of a run: the one place where model, data, rewards, sampler and update meet."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.algorithms.random_streams import ADAPTERS, VALUE_HEAD
from jaxrl_llm.config import ConfigError, batch_rows
from jaxrl_llm.config.schema import OFFLINE
from jaxrl_llm.data import loading
from jaxrl_llm.data.loading import Part
from jaxrl_llm.data.pipeline import Pipeline
from jaxrl_llm.data.streaming import Stream
from jaxrl_llm.distributed.sharding import make_mesh, row_shards
from jaxrl_llm.environments.factory import Environments, EnvironmentSpec, load_environments
from jaxrl_llm.environments.protocol import EpisodeError
from jaxrl_llm.models.lora import LoraConfig, has_adapters, parse_targets, split
from jaxrl_llm.models.model import Model, add_adapters, load_model
from jaxrl_llm.models.peft import read_config
from jaxrl_llm.rewards.functions import environment as environment_reward
from jaxrl_llm.rewards.runner import Rewards, load_rewards
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.training import offline
from jaxrl_llm.training.advantages import make_scorer
from jaxrl_llm.training.evaluation.run import Evaluate
from jaxrl_llm.training.evaluation_setup import build_evaluate
from jaxrl_llm.training.logging.stopwatch import Stopwatch
from jaxrl_llm.training.objective_specs import critic_spec, needs_reference, objective_of
from jaxrl_llm.training.objectives.value import critic_params, shared_critic, value_regression
from jaxrl_llm.training.offline import Offline
from jaxrl_llm.training.online import Online, Row, Sampler, check_rows
from jaxrl_llm.training.optimizers import learning_rate_schedule, make_optimizer
from jaxrl_llm.training.packing.documents import first_fit
from jaxrl_llm.training.packing.planner import Packer, Sample, make_packer, sampled_rows
from jaxrl_llm.training.reference import make_memory, start_reference
from jaxrl_llm.training.reward_models import with_reward_models
from jaxrl_llm.training.samplers import WIDTH_MULTIPLE as WIDTH_MULTIPLE
from jaxrl_llm.training.samplers import build_sampler, check_correction, padded_width, training_sampling
from jaxrl_llm.training.samplers import eos_ids as eos_ids
from jaxrl_llm.training.samplers import rollout_spec as rollout_spec
from jaxrl_llm.training.update import (
    Frozen,
    State,
    Update,
    UpdateSpec,
    init_state,
    make_update,
    merge_frozen,
    optimizer_step,
    split_critic,
)


class Run(NamedTuple):
    """Everything `train` drives."""

    model: Model
    critic: Model | None
    mesh: Mesh
    source: Online | Offline
    frozen: Frozen
    update: Update
    evaluation: Evaluate | None
    state: State
    watch: Stopwatch
    rewards: Rewards
    environments: Environments | None
    pack: Packer


def build_mesh(config) -> Mesh:
    """The mesh of the configuration."""
    c = config.mesh
    return make_mesh(c.data, c.fsdp, c.tensor, c.context, c.expert)


def build(config, mesh: Mesh, train_dataset=None, eval_dataset=None, rewards=None, environment=None, tools=()) -> Run:
    """The parts of a run, on `mesh` (which must be set). Raises ConfigError for anything the user can mend."""
    check_rows(config, batch_rows(config), mesh)
    watch = Stopwatch()
    model, grader = build_model(config, mesh), build_rewards(config, rewards)
    environments = load_environments(environment_spec(config, environment, tools))
    if environment_reward in grader.functions and environments is None and config.environment.rollout_func is None:
        raise ConfigError("rewards.functions names environment, but there is none: set environment.name")
    _check_trainable(config, model)
    critic = build_critic(config, model, mesh) if config.algorithm.name == "ppo" else None
    parts = loading.open_parts(config, model.tokenizer, train_dataset)
    if config.algorithm.name in OFFLINE:
        source, sample = _offline(config, model, parts, mesh, watch)
    else:
        source = _online(config, model, critic, parts, grader, mesh, watch, environments)
        group, width = config.rollout.group_size, source.sampler.prompt_width
        sample = sampled_rows(shard_rows(config, mesh), group, width, config.rollout.max_completion_length)
    objective = objective_of(config, model.net)
    pack = make_packer(config, model.net.config, mesh, objective, sample)
    source = replace(source, pack=pack)
    evaluation = None
    if config.eval.every >= 0 and not (
        train_dataset is not None and eval_dataset is None and config.data.eval_path is None and not config.eval.sets
    ):
        evaluation = build_evaluate(config, model, grader, objective, source, eval_dataset, mesh, environments, watch)
    optimizer, learn_critic = make_optimizer(config), None
    frozen, trainable = split(model.params)
    state, frozen_critic = init_state(trainable, optimizer, mesh, config.optimizer.offload), {}
    if critic is not None and config.critic.shared:
        joint = init_state({**trainable, **critic.params}, optimizer, mesh, config.optimizer.offload)
        state = split_critic(joint, State(jnp.zeros_like(joint.step), critic.params, ()))
    elif critic is not None:
        own = critic_config(config)
        critic_optimizer = make_optimizer(own)
        frozen_critic, trainable = split(critic.params)
        state = replace(state, critic=init_state(trainable, critic_optimizer, mesh, config.optimizer.offload))
        regression = value_regression(critic_spec(config), critic.net)
        learn_critic = optimizer_step(regression, critic_optimizer, update_spec(own), mesh)
    update = make_update(objective, optimizer, update_spec(config), mesh, learn_critic, critic is not None)
    frozen_parts = Frozen(frozen, frozen_critic)
    return Run(model, critic, mesh, source, frozen_parts, update, evaluation, state, watch, grader, environments, pack)


def shard_rows(config, mesh: Mesh) -> int:
    """Rows of a minibatch in each row shard of the mesh."""
    return batch_rows(config) // config.batch.minibatches // row_shards(mesh)


def build_model(config, mesh: Mesh, head: str | None = None) -> Model:
    """The model of the configuration, cut over `mesh`; raises ConfigError when it has no tokenizer."""
    c = config.model
    init_key = jax.random.key(config.seed) if c.random_init else None
    model = load_model(
        c.path, c.dtype, c.param_dtype, mesh, init_key, config.lora.path, c.allow_pickle, c.trust_remote_code,
        **net_options(config, head),
    )  # fmt: skip
    if config.lora.rank:
        model = add_adapters(model, build_lora(config), jax.random.fold_in(jax.random.key(config.seed), ADAPTERS))
    elif config.lora.path is not None and model.net.config.lora is not None:
        model = replace(model, net=model.net.with_lora(replace(model.net.config.lora, dropout=config.lora.dropout)))
    if model.tokenizer is None:
        raise ConfigError(f"model.path = {config.model.path!r} has no tokenizer files; add them to the folder")
    return model


def net_options(config, head: str | None = None) -> dict[str, Any]:
    """The fields of ModelConfig that the configuration sets, besides the types."""
    c = config.model
    scan = jax.default_backend() != "cpu" if c.scan_layers == "auto" else c.scan_layers == "true"
    head = head or ("score" if config.algorithm.name == "reward_model" else "lm")
    options = {
        "remat": c.remat, "scan_layers": scan, "head": head, "quantize": c.quantize, "fp32_head": c.fp32_head,
        "freeze_router": c.freeze_router, "attention": c.attention,
    }  # fmt: skip
    return options if c.router_aux_loss_coef is None else options | {"router_aux_loss_coef": c.router_aux_loss_coef}


def build_lora(config) -> LoraConfig:
    """The adapters that the configuration asks for; raises ConfigError for an unknown target."""
    c = config.lora
    return LoraConfig(c.rank, c.alpha, c.dropout, parse_targets(c.targets), c.rslora)


def _check_trainable(config, model: Model) -> None:
    """Raises ConfigError for a model that cannot be trained as the configuration says."""
    lora = config.lora
    if has_adapters(model.params) and not (lora.rank or lora.path):
        raise ConfigError(
            f"model.path = {config.model.path!r} is an adapter. Set lora.path to it and model.path to {model.path!r} "
            "to train it on; or merge it first, with jaxrl_llm.save_hf(jaxrl_llm.load_model(path), folder)"
        )
    if config.model.quantize != "none" and not has_adapters(model.params):
        raise ConfigError(
            f"model.quantize is {config.model.quantize}, and quantised matrices are not trained: set lora.rank, 16 for "
            "example, to train adapters beside them"
        )


def update_spec(config) -> UpdateSpec:
    """What an update reads of the configuration."""
    return UpdateSpec(
        microbatch_rows=config.batch.microbatch_rows,
        schedule=learning_rate_schedule(config),
        offload=config.optimizer.offload,
        dropout=config.lora.dropout,
        seed=config.seed,
        critic_warmup_steps=config.critic.warmup_steps,
    )


def critic_config(config):
    """The configuration as the critic's optimizer reads it: what `critic` sets in place of `optimizer`."""
    own = config.copy_and_resolve_references()
    own.optimizer.learning_rate = config.critic.learning_rate
    own.optimizer.max_grad_norm = config.critic.max_grad_norm
    own.optimizer.schedule = config.critic.schedule
    own.optimizer.warmup_steps, own.optimizer.warmup_ratio = 0, 0.0
    return own


def build_critic(config, policy: Model, mesh: Mesh) -> Model:
    """PPO's critic: the model of critic.path (or model.path) with a score head, and new adapters where the policy has
    adapters; or, with critic.shared, a score head on the policy's own network."""
    if config.critic.shared:
        return shared_critic(policy, jax.random.fold_in(jax.random.key(config.seed), VALUE_HEAD), mesh)
    own = config.copy_and_resolve_references()
    own.model.path = config.critic.path or config.model.path
    if config.lora.path is not None:
        shape = read_config(config.lora.path).lora
        own.lora.path = None
        own.lora.rank, own.lora.alpha, own.lora.rslora, own.lora.targets = (
            shape.rank, shape.alpha, shape.rslora, shape.targets
        )  # fmt: skip
    return build_model(own, mesh, head="score")


def build_rewards(config, rewards=None) -> Rewards:
    """The grader of the given rewards (a function, a name, or a list of them), or else of the configuration's."""
    c = config.rewards
    functions = with_reward_models(c.functions if rewards is None else rewards)
    return load_rewards(
        functions, c.weights, c.timeout, on_timeout=c.on_timeout, on_error=c.on_error, workers=c.workers
    )


def _online(config, model: Model, critic: Model | None, parts: list[Part], grader: Rewards, mesh: Mesh,
            watch: Stopwatch, environments: Environments | None) -> Online:  # fmt: skip
    scorer = make_scorer(config, grader.names)
    examples, pipeline = _prompts(config, model, parts)

    def sampler_of(sampling: SamplingParams, group_size: int) -> Sampler:
        return build_sampler(model, grader, mesh, sampling, examples, group_size, config, watch, environments)

    sampler = sampler_of(training_sampling(config), config.rollout.group_size)
    check_correction(config, sampler.engine)
    greedy = sampler_of(SamplingParams(temperature=0.0), 1) if scorer.asks_for("greedy_scores") else None
    memory = make_memory(config, model.params, sampler.prompt_width, mesh, model.net.config.lora)
    critic_net = None if critic is None else critic.net
    return Online(config, model.net, critic_net, sampler, greedy, pipeline, scorer, memory)


def _offline(config, model: Model, parts: list[Part], mesh: Mesh, watch: Stopwatch) -> tuple[Offline, Sample | None]:
    """The batches, and rows like theirs, where they are known before."""
    kind = loading.kind_of(config)
    if config.data.streaming:
        margins = any("margin" in loading.columns(part) for part in parts)
        stream = loading.stream(config, parts, kind, model.tokenizer, lambda row: offline.as_example(row, margins))
        ref_params = None
        if needs_reference(config):
            ref_params = start_reference(config, model.params, model.net.config.lora)
        return Offline(config, model.net, stream, mesh, config.data.max_length, ref_params, watch), None
    tokens = loading.tokenized(config, parts, kind, model.tokenizer)
    examples: list[Any] = offline.as_examples(tokens.rows)
    if offline.is_labelled(config):
        offline.check_balance(config, examples)
    width, ref_params = padded_width(offline.longest(config, examples), config.data.max_length), None
    if needs_reference(config):
        kept = not config.data.precompute_reference
        ref_params = start_reference(config, model.params, model.net.config.lora, kept)
        if not kept:
            examples = offline.with_reference(config, model.net, ref_params, examples, width, mesh)
            ref_params = None
    sample = None
    if config.data.packing:
        width = config.data.max_length
        groups = first_fit([len(row["ids"]) for (row,) in examples], width)
        examples = [[(examples[i][0]["ids"], examples[i][0]["mask"]) for i in group] for group in groups]
    else:
        sample = offline.sample_rows(config, examples, shard_rows(config, mesh), width)
    # Every process reads whole batches: kto pairs the rows of one with each other.
    pipeline = Pipeline(examples, config.batch.prompts, config.seed, config.data.shuffle, shares=tokens.shares)
    return Offline(config, model.net, pipeline, mesh, width, ref_params, watch), sample


def _prompts(config, model: Model, parts: list[Part]) -> tuple[list[Row] | None, Pipeline | Stream]:
    """All prompts, where they are known before, and the pipeline of this process's part of them."""
    process = jax.process_index(), jax.process_count()
    if config.data.streaming:
        return None, loading.stream(config, parts, "prompts", model.tokenizer, lambda row: row, *process)
    tokens = loading.tokenized(config, parts, "prompts", model.tokenizer)
    batch, seed, shuffle = config.batch.prompts, config.seed, config.data.shuffle
    return tokens.rows, Pipeline(tokens.rows, batch, seed, shuffle, *process, tokens.shares)


def finished_models(config, run: Run, state: State) -> tuple[Model, Model | None]:
    """The model and the critic (None without one) with the parameters of `state`, to be exported."""
    state = merge_frozen(state, run.frozen)
    model, critic = replace(run.model, params=state.params), None
    if run.critic is not None and state.critic is not None:
        critic = replace(run.critic, params=critic_params(critic_spec(config), state))
    return model, critic


def environment_spec(config, environment: Any = None, tools: Sequence[Any] = ()) -> EnvironmentSpec:
    """The environments of the configuration, or of `environment` (a factory, a dictionary of them, or a name).

    `tools` are added to the configuration's. Raises EpisodeError for an algorithm that samples nothing.
    """
    c, name = config.environment, config.algorithm.name
    spec = EnvironmentSpec(
        environment=c.name if environment is None else environment,
        tools=(*c.tools, *tools),
        max_turns=c.max_turns,
        max_tool_calls=c.max_tool_calls,
        workers=c.workers,
        timeout=c.timeout,
        on_error=c.on_error,
    )
    if name in OFFLINE and (spec.environment is not None or spec.tools):
        raise EpisodeError(f"there is an environment or a tool, but algorithm.name = {name!r} samples nothing")
    return spec
