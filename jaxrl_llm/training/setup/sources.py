"""The batches of a run, from its configuration: those of samples, of given rows, and of both in turn."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax

from jaxrl_llm.config import ConfigError, batch_rows, with_correction
from jaxrl_llm.data import loading, opening
from jaxrl_llm.data.curriculum import Curriculum
from jaxrl_llm.data.loading import Tokenized
from jaxrl_llm.data.opening import DataSource
from jaxrl_llm.data.pipeline import Pipeline
from jaxrl_llm.data.scored_prompts import SCORES, ScoredPrompts
from jaxrl_llm.data.tokenize import PIXELS
from jaxrl_llm.distributed import processes
from jaxrl_llm.distributed.own_part import OwnPart
from jaxrl_llm.distributed.row_groups import RowGroup
from jaxrl_llm.distributed.sharding import make_mesh, rollout_mesh, row_shards
from jaxrl_llm.environments.agents import Agents
from jaxrl_llm.environments.factory import load_environments
from jaxrl_llm.models.model import Model, check_positions
from jaxrl_llm.rewards.runner import Rewards, load_rewards
from jaxrl_llm.rollout.constraints import token_bytes
from jaxrl_llm.training import offline
from jaxrl_llm.training.advantages import AdvantageStep, advantage_step
from jaxrl_llm.training.average import Average
from jaxrl_llm.training.learner import Critic, Learner
from jaxrl_llm.training.local_judge import with_local_model
from jaxrl_llm.training.logging.stopwatch import Stopwatch
from jaxrl_llm.training.microbatch import BatchSpec
from jaxrl_llm.training.mixed import MixedSource
from jaxrl_llm.training.objectives.value import critic_params
from jaxrl_llm.training.offline import OfflineSource
from jaxrl_llm.training.online import OnlineSource, Producer, PromptStream
from jaxrl_llm.training.packing.documents import packed_rows
from jaxrl_llm.training.packing.planner import Packer, TypicalRows, typical_rollouts
from jaxrl_llm.training.reference import Reference, start_reference
from jaxrl_llm.training.reference_scores import FirstStage
from jaxrl_llm.training.reward_models import ProcessRewardModel, with_reward_models
from jaxrl_llm.training.rollouts.arrivals import RECORD, Arrivals
from jaxrl_llm.training.rollouts.file_queue import FileQueue
from jaxrl_llm.training.rollouts.partial_rollouts import PartialRollouts
from jaxrl_llm.training.rollouts.replay import empty_replay
from jaxrl_llm.training.rollouts.rollout_files import FOLDER, Rendezvous
from jaxrl_llm.training.rollouts.rollout_queue import RolloutQueue
from jaxrl_llm.training.setup import specs
from jaxrl_llm.training.setup.data import read_data
from jaxrl_llm.training.setup.mesh import samples_apart, sampling_devices, sampling_part, shard_rows
from jaxrl_llm.training.setup.models import build_model
from jaxrl_llm.training.setup.objectives import critic_spec, needs_reference, preference_spec
from jaxrl_llm.training.setup.teachers import build_teacher, cross_tokenizer, online_teacher
from jaxrl_llm.training.setup.worker import Setup, build_worker, check_correction, environment_spec, played_environments
from jaxrl_llm.training.step_credit import MOST_STEPS, StepCredit
from jaxrl_llm.training.teachers.cross_tokenizer import CrossTokenizer
from jaxrl_llm.training.teachers.teacher import SelfTeacher


def build_rewards(config, rewards=None) -> Rewards:
    """The graders of `rewards` (a function, a name, or a list of them), or else of the configuration.

    There may be none where a teacher is learned from.
    """
    c = config.rewards
    functions = with_reward_models(c.functions if rewards is None else rewards)
    made = load_rewards(
        functions, c.weights, c.timeout, partial(with_local_model, loaded={}), on_timeout=c.on_timeout,
        on_error=c.on_error, workers=c.workers, required=config.teacher.path is None,
    )  # fmt: skip
    for function, name in zip(made.functions, made.names, strict=True):
        if isinstance(function, ProcessRewardModel):
            function.name = name  # also of the column of its steps, which another of the same path has too
    return made


def online_source(
    setup: Setup,
    critic: Model | None,
    data: list[DataSource],
    tokens: Tokenized | None,
    batch_of: Callable[[int], BatchSpec],
    packer: Callable[[TypicalRows | None], Packer],
    average: Average | None,
) -> OnlineSource:
    """The producer and the learner of an online algorithm, whose reference may follow the policy's `average`.

    `batch_of` gives the rows of a step, and of passes, by their width.
    """
    config, mesh, model, rewards, environments, stopwatch = setup
    advantages = _advantages(setup)
    _check_online(setup, advantages)
    spec, rollout = specs.learner_spec(config), config.rollout
    watch = Stopwatch(within=stopwatch) if rollout.staleness and not rollout.processes else stopwatch
    own = sampling_part(config, mesh, model.net.config.kv_heads)
    of_producer = setup._replace(mesh=own.mesh, stopwatch=watch)
    producer = _producer(of_producer, data, tokens, advantages, RowGroup.of(mesh))
    worker = producer.worker
    reference = replay = None
    played = played_environments(environments)
    if needs_reference(config, [str(name) for name in played.factories] if played is not None else ()):
        settings, lora = specs.reference_spec(config), model.net.config.lora
        reference = Reference(start_reference(settings, model.params, lora), settings, lora, average)
    width, longest = worker.prompt_width, rollout.max_completion_length
    if critic is not None:
        known = tokens if setup.reads_prompts_as_they_are else None
        prompts = rollout.max_prompt_length if known is None else max(len(row["prompt_ids"]) for row in known.rows)
        cause = f"{prompts} of prompts, and rollout.max_completion_length = {longest}, which the critic reads"
        check_positions(critic, prompts + longest, cause)
    if config.algorithm.replay_groups:
        of_rows = {
            "kl_weight": spec.kl_weights and reference is not None,
            "loss_weight": spec.loss_weights,
            "positive": spec.correct_at is not None,
        }
        per_row = [field for field, kept in of_rows.items() if kept]
        replay = empty_replay(config.algorithm.replay_groups, rollout.group_size, width + longest, width, mesh, per_row)
    sample_of = partial(typical_rollouts, shard_rows(config, mesh), rollout.group_size)
    teacher, context, others = online_teacher(config, model, mesh, width, sample_of)
    return OnlineSource(
        producer,
        Learner(
            spec=spec,
            batch=batch_of(width + longest),
            net=model.net,
            mesh=mesh,
            prompt_width=width,
            reward_weights=rewards.weights,
            advantages=advantages,
            pack=packer(sample_of(width, longest)),
            stopwatch=stopwatch,
            reference=reference,
            controllers=specs.controllers_of(config),
            replay=replay,
            critic=None if critic is None else Critic(critic.net, partial(critic_params, critic_spec(config))),
            teacher=teacher,
            context=context,
            other_teachers=others,
        ),
        _queue(setup, producer, own),
        first_stage=_first_stage(setup, producer.pipeline, advantages, reference),
    )


def _queue(setup: Setup, producer: Producer, own: OwnPart) -> RolloutQueue | FileQueue:
    """The queue between the producer, on its `own` part of the devices, and the learner, on the mesh of the run."""
    config, mesh, worker, rollout = setup.config, setup.mesh, producer.worker, setup.config.rollout
    if rollout.processes:
        return FileQueue(
            rendezvous_of(config),
            rollout.staleness,
            config.total_steps,
            publish=worker.copy_policy,
            frozen=worker.engine.net.config.frozen,
            pipeline=cast(Pipeline, producer.pipeline),  # see config/checks/
            facts=processes.agreed_facts(config),
            mesh=mesh,
            watch=setup.stopwatch,
        )
    return RolloutQueue(
        producer.produce,
        rollout.staleness,
        config.total_steps,
        # Made where it is called: under the mesh that is set here, the key would be on the devices of all processes.
        key_of=lambda step: jax.random.fold_in(jax.random.key(config.seed), step),
        publish=worker.copy_policy,
        mesh=worker.mesh,
        train_mesh=mesh,
        watch=setup.stopwatch,
        own_watch=worker.stopwatch,
        arrivals=worker.arrivals if producer.partial is None else producer.partial.arrivals,
        own_params=own.params if samples_apart(config) else None,
    )


def _first_stage(
    setup: Setup, prompts: PromptStream, advantages: AdvantageStep, reference: Reference | None
) -> FirstStage | None:
    """The stage that samples the reference's scores of the prompts before the first step; None where nothing asks for
    them or the rows have them."""
    config, folder = setup.config, Path(setup.config.output_dir)
    samples = config.algorithm.reference_samples
    if not isinstance(prompts, ScoredPrompts):
        return None
    if prompts.known and samples:
        raise ConfigError(
            f"rows have a column {SCORES}, but algorithm.reference_samples is {samples}, which would sample them: set "
            "it to 0 to use the column, or leave the column out"
        )
    if prompts.known:
        return None
    if not samples:
        raise ConfigError(
            f"algorithm.reference_samples is 0, but rows have no column {SCORES}, of the reference's completions of "
            "each prompt: set it to the completions that the run samples before its first step, 8, or give the column"
        )
    at_once, examples = max(batch_rows(config) // samples, 1), list(prompts.examples)
    worker = build_worker(
        setup._replace(stopwatch=Stopwatch(within=setup.stopwatch)),
        specs.training_sampling(config),
        samples,
        examples,
        min(at_once, len(examples)),
    )
    return FirstStage(worker, prompts, advantages, reference, at_once, config.seed, folder)


def _advantages(setup: Setup) -> AdvantageStep:
    """The advantages of an online algorithm; without episodes turns may be the steps that a reward function gives.

    Raises ConfigError where a rule reads steps, and several functions that count have some.
    """
    rewards = setup.rewards
    step = advantage_step(specs.advantage_spec(setup.config), rewards.names)
    declared = [function.func if isinstance(function, partial) else function for function in rewards.functions]
    of_steps = [
        name
        for name, function, weight in zip(rewards.names, declared, rewards.weights, strict=True)
        if weight and getattr(function, "gives_steps", False)
    ]
    if setup.environments is not None or not of_steps:
        return step
    if (rule := step.asking("turns")) and len(of_steps) > 1:
        raise ConfigError(
            f"{rule.setting} is {rule.name!r}, which reads the steps of one reward, but {' and '.join(of_steps)} have "
            "their own: leave one, or give the others the weight 0 or, of a prm, aggregation='min'"
        )
    return replace(step, of_turns=of_steps[0])


def _check_online(setup: Setup, advantages: AdvantageStep) -> None:
    """Raises ConfigError for an online run whose rows, processes or devices are not what its settings ask of them."""
    config, mesh, environments, rollout = setup.config, setup.mesh, setup.environments, setup.config.rollout
    if (rule := advantages.asking("turns")) and environments is None and advantages.of_turns == "environment":
        raise ConfigError(
            f"{rule.setting} is {rule.name!r}, which gives credit to turns or steps, but rows have one turn: set "
            "environment.name, tools or agent, name a reward of steps that counts, prm:PATH(aggregation='sum'), or set "
            "another advantage"
        )
    if (rule := advantages.asking("parts")) and not isinstance(environments, Agents):
        raise ConfigError(
            f"{rule.setting} is {rule.name!r}, which reads the roles of an agent's sessions, but rows have none: set "
            "environment.agent (docs/agents.md), or another advantage"
        )
    if config.algorithm.observation_coef > 0 and environments is None and config.environment.rollout_func is None:
        raise ConfigError(
            f"algorithm.observation_coef is {config.algorithm.observation_coef}, but completions have no observation "
            "tokens: set environment.name, tools, agent or rollout_func, or observation_coef to 0"
        )
    if config.algorithm.positive_nll_coef > 0 and not advantages.reward_names:
        raise ConfigError(
            f"algorithm.positive_nll_coef is {config.algorithm.positive_nll_coef}, but no reward says which "
            "completions are correct: set rewards.functions, or positive_nll_coef to 0"
        )
    if rollout.processes and not processes.is_split():
        raise ConfigError(
            f"rollout.processes is {rollout.processes}, but this process has not joined others: start each with python "
            "-m jaxrl_llm.train (docs/asynchronous.md), or set it to 0"
        )
    if samples_apart(config):
        others = {
            "mesh.context x mesh.tensor spans several of them": RowGroup.of(mesh).size > 1,
            "environment.rollout_func is set": config.environment.rollout_func is not None,
            "rollout.update_in_flight is true": rollout.update_in_flight,
        }
        for name in (name for name, is_on in others.items() if is_on):
            raise ConfigError(
                f"rollout.staleness is {rollout.staleness}, with which each of the {jax.process_count()} processes "
                f"samples by itself, but {name}: change that, set staleness to 0, or let some of the processes only "
                "sample (rollout.processes)"
            )
    if rollout.partial_prompts and jax.process_count() > 1:
        raise ConfigError(
            f"rollout.partial_prompts is {rollout.partial_prompts}, but the run has {jax.process_count()} processes, "
            "each of which would be done with other prompts: set it to 0"
        )
    if rollout.update_in_flight and not sampling_devices(config) and mesh.size > 1:
        raise ConfigError(
            f"rollout.update_in_flight is true, but {mesh.size} devices sample and train in turn, so that no policy is "
            "new while they sample: give sampling devices of its own (rollout.devices), or set it to false"
        )


def _producer(
    setup: Setup, data: list[DataSource], tokens: Tokenized | None, advantages: AdvantageStep, group: RowGroup
) -> Producer:
    """The producer, which samples and grades the rows of this process's `group` on the mesh of its setup."""
    config, mesh, model, rewards, _, watch = setup
    rollout, examples = config.rollout, None if tokens is None else tokens.rows
    if examples is not None and config.total_steps and setup.reads_prompts_as_they_are:
        columns = set().union(*examples)  # of sources that have others each, all: a row has None for what it lacks
        if PIXELS not in columns:
            rewards.check_columns(sorted(columns - {"prompt_ids"}))
    pipeline = _prompts(setup, data, tokens, advantages, group)
    worker = build_worker(setup, specs.training_sampling(config), rollout.group_size, examples)
    check_correction(config, worker.engine)
    if advantages.of_turns != "environment" and (rule := advantages.asking("turns")):
        texts = token_bytes(
            model.tokenizer, model.net.config.vocab_size, f"{rule.setting} = {rule.name!r}, of steps, needs",
            "set another advantage",
        )  # fmt: skip
        longest = min(rollout.max_completion_length, MOST_STEPS)
        worker = replace(worker, steps=StepCredit(advantages.of_turns, texts, longest))
    compares = advantages.asking("greedy_scores")
    greedy = None if compares is None else build_worker(setup, specs.training_sampling(config).greedy, 1, examples)
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
        settings, shards = specs.partial_spec(config), row_shards(mesh)
        if settings.in_flight % shards:
            raise ConfigError(
                f"batch.prompts + rollout.partial_prompts is {settings.in_flight}, which does not divide into the "
                f"{shards} shards of rows of the mesh that samples: set rollout.partial_prompts to another number"
            )
        assert isinstance(pipeline, Pipeline)  # neither streams nor a curriculum: see config/checks/
        partial_rollouts = PartialRollouts(
            settings, worker.engine, pipeline, key, mesh, worker.prompt_width, watch, arrivals
        )
    spec = specs.producer_spec(config)
    return Producer(spec, worker, greedy, pipeline, group, advantages.flat_groups, partial_rollouts)


def _prompts(
    setup: Setup, data: list[DataSource], tokens: Tokenized | None, advantages: AdvantageStep, group: RowGroup
) -> PromptStream:
    """The prompts of this process's steps, in the order that the settings and the advantage rule ask for."""
    config = setup.config
    share = group[:2]  # of the prompts
    if tokens is None:
        return loading.stream(specs.data_spec(config), data, "prompts", setup.model.tokenizer, lambda row: row, *share)
    size, curriculum = specs.batch_spec(config).prompts, specs.curriculum_spec(config)
    order = (config.seed, config.data.shuffle, *share, tokens.shares)
    if advantages.asks_for("reference_scores"):
        return ScoredPrompts(tokens.rows, size, config.algorithm.drop_unsolved, *order)
    if curriculum is not None:
        return Curriculum(tokens.rows, size, curriculum, *order)
    return Pipeline(tokens.rows, size, *order)


def build_producer(config) -> tuple[Producer, Setup]:
    """The part of a run that a process which only samples needs: the producer, on `rollout.mesh` of its devices, and
    what it is built of.

    Raises ConfigError as `build` does.
    """
    config = with_correction(config)
    mesh = rollout_mesh(make_mesh(devices=jax.devices()), config.rollout.mesh)
    with jax.set_mesh(mesh):
        spec = environment_spec(config)
        rows = read_data(config)
        model = build_model(rows.config, mesh, None, rows.tokenizer)
        with contextlib.ExitStack() as stack:  # what is open is closed where the rest is refused
            rewards = build_rewards(rows.config)
            stack.callback(rewards.close)
            environments = load_environments(spec)
            if environments is not None:
                stack.callback(environments.close)
            setup = Setup(rows.config, mesh, model, rewards, environments, Stopwatch())
            producer = _producer(setup, rows.sources, rows.tokens, _advantages(setup), RowGroup.of(mesh))
            stack.pop_all()
    return producer, setup


def rendezvous_of(config) -> Rendezvous:
    """The folder where the processes that only sample meet those that train."""
    folder, c = Path(config.output_dir).absolute() / FOLDER, config.processes
    return Rendezvous(folder, config.rollout.processes, c.rendezvous_seconds, c.heartbeat_seconds)


def mixed_source(setup: Setup, online: OnlineSource, train_dataset: Any) -> OnlineSource:
    """The source with batches of the data's rows between those of samples, where `teacher.on_policy` asks for them.

    A batch of given rows has as many rows as one of samples, and is no wider.
    """
    config, tokenizer = setup.config, setup.model.tokenizer
    if config.teacher.on_policy == 1:
        return online
    learner, given = online.learner, config.copy_and_resolve_references()
    given.algorithm.name, given.batch.prompts, given.teacher.path = "sft", batch_rows(config), None
    given.data.max_length = learner.prompt_width + config.rollout.max_completion_length
    spec, tokens = specs.data_spec(given), None
    data = opening.open_sources(spec, tokenizer, train_dataset)
    if not spec.streaming:
        tokens = loading.tokenized(spec, data, "completions", tokenizer)
    batch = replace(specs.batch_spec(given), microbatch_rows=learner.batch.microbatch_rows)
    rows = offline_source(setup._replace(config=given), data, tokens, lambda _: batch, lambda _: learner.pack)
    assert not isinstance(learner.teacher, SelfTeacher)  # which has a context, and that is of samples alone
    cross = learner.context if isinstance(learner.context, CrossTokenizer) else None
    rows = replace(rows, teacher=learner.teacher, cross_tokenizer=cross)
    return MixedSource(**vars(online), offline=rows, on_policy=config.teacher.on_policy, seed=config.seed)


def offline_source(
    setup: Setup,
    data: list[DataSource],
    tokens: Tokenized | None,
    batch_of: Callable[[int], BatchSpec],
    packer: Callable[[TypicalRows | None], Packer],
    average: Average | None = None,
) -> OfflineSource:
    """The batches of an offline algorithm, whose reference may follow the policy's `average`.

    `batch_of` gives the rows of a step, and of passes, by their width. Raises ConfigError for settings of a reference
    that the loss does not read.
    """
    config, mesh, model = setup.config, setup.mesh, setup.model
    c, kind = config.data, specs.data_kind(config)
    settings, lora = specs.reference_spec(config), model.net.config.lora
    sample = reference = None
    if needs_reference(config):
        kept = not c.precompute_reference
        reference = Reference(start_reference(settings, model.params, lora, kept), settings, lora, average)
    elif settings.ref_sync_steps and config.algorithm.name == "preference":
        raise ConfigError(
            f"algorithm.ref_sync_steps is {settings.ref_sync_steps}, but algorithm.loss = {config.algorithm.loss!r} "
            "reads no reference here: set it to 0"
        )

    def packed(examples: list[Any]) -> list[Any]:
        return packed_rows([row for (row,) in examples], c.max_length, c.packing_strategy)

    if tokens is None:
        margins = any("margin" in loading.columns(source) for source in data)
        as_example = partial(offline.as_example, margins=margins)
        pipeline = loading.stream(
            specs.data_spec(config), data, kind, model.tokenizer, as_example,
            pack=packed if c.packing else None,
        )  # fmt: skip
        longest = c.max_length
        check_positions(model, longest, "data.max_length, as rows are streamed")
        spec = specs.offline_spec(config, c.max_length)
        rows = batch_of(spec.width)
    else:
        examples: list[Any] = offline.as_examples(tokens.rows)
        if kind == "labels":
            options = preference_spec(config).losses[0].options
            weights = options.get("desirable_weight", 1.0), options.get("undesirable_weight", 1.0)
            offline.check_balance(examples, *weights)
        longest = min(offline.longest(examples, specs.mismatches(config)), c.max_length)
        check_positions(model, longest, "the longest of the data, up to data.max_length")
        width = specs.padded_width(longest, c.max_length)
        spec = specs.offline_spec(config, c.max_length if c.packing else width)
        rows = batch_of(spec.width)
        if reference is not None and c.precompute_reference:
            examples = offline.with_reference(rows, model.net, reference.params, examples, width, mesh)
            reference = None
        if c.packing:
            examples = packed(examples)
        elif not c.group_by_length:
            sample = offline.typical_rows(spec, examples, shard_rows(config, mesh), rows.group_size)
        # Every process reads whole batches: kto pairs the rows of one with each other.
        lengths = [max(len(row["ids"]) for row in example) for example in examples] if c.group_by_length else None
        pipeline = Pipeline(examples, rows.prompts, config.seed, c.shuffle, shares=tokens.shares, lengths=lengths)
    cross = None
    if config.teacher.form == "uld":
        lengths_of = (spec.width, spec.width) if tokens is None else offline.longest_parts(examples)
        unpacked = replace(specs.packing_spec(config), packing="false")
        teacher, cross = cross_tokenizer(config, model, mesh, *lengths_of, unpacked, lambda *_: None)
    else:
        teacher = build_teacher(config, model, mesh, longest, "the longest of the data, up to data.max_length")
    return OfflineSource(
        spec, rows, model.net, pipeline, mesh, packer(sample), setup.stopwatch, reference,
        teacher=teacher, cross_tokenizer=cross,
    )  # fmt: skip
