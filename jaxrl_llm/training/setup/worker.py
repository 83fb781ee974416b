"""What samples, built from a configuration and a model: the rollout worker, and the environments that it plays."""

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.config import ConfigDict, ConfigError
from jaxrl_llm.config.entries import environment_options, reward_scales
from jaxrl_llm.config.schema import EPISODES, OFFLINE, ONLINE_PREFERENCE
from jaxrl_llm.config.tree import spec_of
from jaxrl_llm.config.wording import amount
from jaxrl_llm.data import Row
from jaxrl_llm.data.observations import TurnTokenizer
from jaxrl_llm.distributed.own_part import OwnPart
from jaxrl_llm.distributed.row_groups import RowGroup
from jaxrl_llm.distributed.sharding import on_device, rollout_mesh, row_groups, row_shards
from jaxrl_llm.environments.agents import Agents, AgentSpec
from jaxrl_llm.environments.batch import EpisodeBatch
from jaxrl_llm.environments.factory import Environments, EnvironmentSpec
from jaxrl_llm.environments.protocol import EpisodeError
from jaxrl_llm.models.cast import draws_from_another
from jaxrl_llm.models.files.remote import is_url
from jaxrl_llm.models.files.weight_versions import Publisher, publisher
from jaxrl_llm.models.model import Model, check_positions, save_hf
from jaxrl_llm.models.net import Params
from jaxrl_llm.rewards.runner import Rewards
from jaxrl_llm.rollout.constraints import Guide, bad_word_ids, build_automata, check_tokens, setting_text
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.grammar import build_grammar
from jaxrl_llm.rollout.resharded import ReshardedEngine
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.training.logging.stopwatch import Stopwatch
from jaxrl_llm.training.passes import scored_logps
from jaxrl_llm.training.rollouts.agent_rollout import AgentRollout
from jaxrl_llm.training.rollouts.episode_agent import EpisodeAgent
from jaxrl_llm.training.rollouts.external_rollout import ExternalRollout, load_rollout_function, returns_texts
from jaxrl_llm.training.rollouts.worker import RolloutWorker
from jaxrl_llm.training.setup import specs
from jaxrl_llm.training.setup.memory import check_memory, device_memory, with_fitting_slots


class Setup(NamedTuple):
    """The objects that are read and opened before a run is built, and of which all else is built."""

    config: ConfigDict
    mesh: Mesh
    model: Model
    rewards: Rewards
    environments: Environments | Agents | None
    stopwatch: Stopwatch

    @property
    def reads_prompts_as_they_are(self) -> bool:
        """True where prompts are sampled from as the data has them; environments, tools, agents and rollout functions
        may lengthen them, and give rows other columns."""
        return self.environments is None and self.config.environment.rollout_func is None


def build_worker(
    setup: Setup, sampling: SamplingParams, group_size: int, examples: list[Row] | None, at_once: int | None = None
) -> RolloutWorker:
    """A rollout worker wide enough for the prompts of `examples` or, where they are not known before, for any.

    It samples up to `at_once` prompts in one rollout, or as many as a training step. Raises ConfigError for
    environments or rollout functions where several processes hold the same rows.
    """
    config, mesh, model, rewards, environments, stopwatch = setup
    c, limit = config.rollout, config.rollout.max_prompt_length
    for key in ("rollout_func", "agent"):
        if config.environment[key] and (size := RowGroup.of(mesh).size) > 1:
            raise ConfigError(
                f"environment.{key} is set, but mesh.context x mesh.tensor has {size} processes hold the same rows, "
                "which each would ask it for: make them no larger than the devices of one process"
            )
    if not setup.reads_prompts_as_they_are:
        examples = None
    # Processes that sample by themselves share the prompts of a step, and its slots.
    shares = 1 if mesh.is_multi_process else jax.process_count()
    engine = build_engine(setup, sampling, group_size)
    engine = replace(engine, slots=-(-engine.slots // shares))
    engine_mesh = engine.mesh if isinstance(engine, ReshardedEngine) else mesh
    if environments is not None and row_groups(engine_mesh) != row_groups(mesh):
        raise ConfigError(
            "environments play the rows of their own processes, but these hold the same rows in "
            f"{amount(row_groups(mesh), 'group')} while they train, and in {row_groups(engine_mesh)} while they "
            f"sample: set rollout.mesh to tensor={mesh.size // row_groups(mesh)}, or mesh.context and mesh.tensor "
            "to the devices of one process"
        )
    longest = limit if examples is None else max(len(row["prompt_ids"]) for row in examples)
    cause = "prompts, up to rollout.max_prompt_length" if examples is None else "the longest prompt"
    check_positions(
        model,
        longest + c.max_completion_length,
        f"{longest} of {cause}, and rollout.max_completion_length = {c.max_completion_length}",
    )
    width = limit if examples is None else specs.padded_width(longest, limit)
    check_memory(config, model, engine, width, mesh, shares)
    if c.memory_fraction is not None:
        prompts = (config.batch.prompts + c.partial_prompts) // shares if at_once is None else at_once
        memory = device_memory(engine_mesh)
        engine = with_fitting_slots(engine, model.params, c.memory_fraction, memory, prompts, width, engine_mesh)
    function = load_rollout_function(config.environment.rollout_func)
    options = specs.data_spec(config).template_kwargs
    turns = TurnTokenizer(model.tokenizer, eos_ids(model), limit, options, stops=bool(c.stop or c.stop_token_ids))
    open_episodes = agents = external = None
    if isinstance(environments, Agents):
        agents = agent_rollout(setup, environments, engine, turns, width)
    elif environments is not None:
        open_episodes = partial(EpisodeBatch.open, environments, turns)
    if function is not None:
        external = external_rollout(setup, function, engine, width)
    played = played_environments(environments)
    return RolloutWorker(
        engine,
        rewards,
        model.tokenizer,
        mesh,
        width,
        stopwatch,
        open_episodes,
        external,
        agents,
        as_texts=function is not None and returns_texts(function),
        several_environments=played is not None and played.routed,
        share=jax.process_index() if shares > 1 else 0,
    )


def build_engine(setup: Setup, sampling: SamplingParams, group_size: int) -> Engine:
    """The engine of rollouts, on the mesh that samples.

    Raises ConfigError for tokens that the model has not, and for experts of a model that has none.
    """
    config, mesh, model = setup.config, setup.mesh, setup.model
    c, vocab = config.rollout, model.net.config.vocab_size
    if c.router_replay and not model.net.config.experts:
        raise ConfigError(f"rollout.router_replay is true, but {model.path} has no experts: set it to false")
    check_tokens("rollout.logit_bias", [token for token, _ in sampling.logit_bias], vocab)
    check_tokens("rollout.stop_token_ids", c.stop_token_ids, vocab)
    ends = (*(() if c.ignore_eos else eos_ids(model)), *c.stop_token_ids)
    sampling = replace(sampling, bad_words=bad_word_ids("rollout.bad_words", c.bad_words, model.tokenizer))
    automata = build_automata(tuple(c.stop), guide_of(config), model.tokenizer, vocab, ends)
    spec = replace(specs.rollout_spec(config), sampling=sampling, group_size=group_size)
    grammar = build_grammar(c.structured_grammar, model.tokenizer, vocab, ends, "rollout.structured_grammar")
    engine = Engine(**vars(spec), net=model.net, eos=ends, automata=automata, grammar=grammar)
    # Devices that only sample, and those of one of several processes, are arranged already; where there are of the
    # first, the others evaluate as they are.
    arranged = c.devices or c.processes or (jax.process_count() > 1 and not mesh.is_multi_process)
    engine_mesh = rollout_mesh(mesh, None if arranged else c.mesh, model.net.config.kv_heads)
    if engine_mesh == mesh:
        return engine
    return ReshardedEngine(**vars(engine), mesh=engine_mesh, train_mesh=mesh, watch=setup.stopwatch)


def guide_of(config) -> Guide:
    """The regular expression, choice or JSON schema that completions follow; a grammar is made with the tokenizer."""
    c = config.rollout
    return Guide.of(c.structured_regex, c.structured_choice, c.structured_json)


def external_rollout(setup: Setup, function: Callable[..., Any], engine: Engine, width: int) -> ExternalRollout:
    """The rollout by a function of the user's, after prompts of `width` tokens, by the settings of the run."""
    config, mesh, model, c = setup.config, setup.mesh, setup.model, setup.config.rollout
    published: dict[str, Publisher] = {}  # by their paths; they live as long as what publishes there

    def policy_logps(params: Params, inputs: Inputs):
        params, temperature = on_device(params), specs.training_sampling(config).logps_temperature
        rows = math.gcd(specs.batch_spec(config).forward_rows, len(inputs.tokens))  # of evaluations there are others
        return scored_logps(engine.net, params, inputs, temperature, rows, row_shards(mesh))

    def save(params: Params, path: str, dtype: str = "", full_every: int = 1, full: bool = False) -> str:
        policy = replace(model, params=params)
        if full_every > 1 or is_url(path):
            return published.setdefault(path, publisher(path)).publish(policy, dtype, full_every, full)
        save_hf(policy, path, dtype or None, overwrite=True)
        return path

    def metrics() -> dict[str, float]:
        return {name: x for each in published.values() for name, x in each.metrics.items()}

    grammar = setting_text(c.structured_grammar, ":" in c.structured_grammar, "rollout.structured_grammar")
    guides = {**guide_of(config)._asdict(), "grammar": grammar}
    constraints = {
        "bad_words": tuple(c.bad_words),  # texts, where the engine's are tokens
        "stop": tuple(c.stop),
        "stop_token_ids": tuple(c.stop_token_ids),
        "ignore_eos": c.ignore_eos,
        "structured_outputs": {kind: value for kind, value in guides.items() if value},
    }
    return ExternalRollout(function, engine, model.tokenizer, mesh, width, policy_logps, save, metrics, constraints)


def agent_rollout(setup: Setup, agents: Agents, engine: Engine, turns: TurnTokenizer, width: int) -> AgentRollout:
    """The rollout by programs that talk to an endpoint; raises EpisodeError on a mesh that is not that of training."""
    if isinstance(engine, ReshardedEngine):
        raise EpisodeError(
            "environment.agent is sampled on the mesh of training: set rollout.mesh to none, and mesh.context to 1"
        )
    config, mesh = setup.config, setup.mesh
    own, count = OwnPart.of(mesh, setup.model.net.config.kv_heads), jax.process_count()
    rows, shards = config.batch.prompts * config.rollout.group_size, row_shards(own.mesh)
    slots = -(-engine.slots // (count if mesh.is_multi_process else 1)) or min(agents.spec.workers, -(-rows // count))
    slots = -(-slots // shards) * shards
    return AgentRollout(agents, engine, turns, mesh, width, slots, own, specs.image_limits(config))


def check_correction(config, engine: Engine) -> None:
    """Raises ConfigError where the engine samples from another policy than is trained, and nothing corrects for it."""
    lossy = []
    if config.rollout.staleness:
        lossy.append(f"rollout.staleness is {config.rollout.staleness}")
    if config.rollout.partial_prompts:
        lossy.append(f"rollout.partial_prompts is {config.rollout.partial_prompts}")
    if engine.net.config.matmul_dtype != "auto":
        lossy.append(f"model.matmul_dtype is {engine.net.config.matmul_dtype}, which sampling does without")
    elif draws_from_another(engine.decoder, engine.net):
        lossy.append(f"rollout.weights_dtype is {engine.weights_dtype}")
    if engine.cache_dtype == "fp8":
        lossy.append("rollout.cache_dtype is fp8")
    # A loss that compares with the reference, or pairs, has its minimum at one policy, whichever has sampled.
    corrected = specs.old_logps_of(config) in ("sampler", "reference") or config.algorithm.name == ONLINE_PREFERENCE
    if lossy and config.algorithm.importance_correction == "none" and not corrected:
        raise ConfigError(
            f"{lossy[0]}, so completions are not drawn from the policy that is trained, but algorithm."
            "importance_correction is none: set token_truncate, which weighs each token by the ratio of the two, or "
            "algorithm.old_logps=sampler, whose ratio is clipped"
        )


def eos_ids(model: Model) -> tuple[int, ...]:
    """The tokens that end a completion: generation_config.json's, and the tokenizer's.

    Raises ConfigError for a model that names none.
    """
    named = (model.generation or {}).get("eos_token_id", ())
    ids = {model.tokenizer.eos_token_id, *(named if isinstance(named, list | tuple) else [named])} - {None}
    if not ids:
        raise ConfigError(f"{model.path} names no end-of-text token; set eos_token in its tokenizer_config.json")
    return tuple(sorted(ids))


def environment_spec(config, environment: Any = None, tools: Sequence[Any] = ()) -> EnvironmentSpec | AgentSpec:
    """The environments of the configuration, or of `environment` (a factory, a dictionary of them, or a name); or its
    agents, of which `episodes` has these environments.

    `tools` are added to the configuration's. Raises EpisodeError for an algorithm that samples nothing, and for agents
    together with an environment that is not theirs or without the packages of their endpoint.
    """
    c, name = config.environment, config.algorithm.name
    plays = c.agent in (None, EPISODES)
    others = {value: agent for value, _, agent in (entry.partition("=") for entry in c.agents)}
    agents = partial(
        AgentSpec,
        workers=c.workers,
        timeout=c.agent_timeout,
        calls=c.max_turns,
        tokens=c.agent_tokens,
        on_error=c.on_error,
        others=others,
        branches=c.agent_branches,
    )
    if c.agent is not None:
        if c.reward_scale and not plays:
            raise EpisodeError(
                f"environment.reward_scale is {tuple(c.reward_scale)}, but agents return their rewards as they are to "
                "be: scale them there"
            )
        if c.options and not plays:
            raise EpisodeError(
                f"environment.options is {tuple(c.options)}, but agents are no environments with names: leave it out, "
                f"or set environment.agent={EPISODES!r}, which plays environments"
            )
        if (environment is not None or tools) and not plays:
            raise EpisodeError(
                "environment.agent is set, but an environment or tools are given too: leave one out, or set "
                f"environment.agent={EPISODES!r}"
            )
        missing = [package for package in ("starlette", "uvicorn") if importlib.util.find_spec(package) is None]
        if missing:
            raise EpisodeError(
                f'environment.agent needs {" and ".join(missing)} for its endpoint: pip install "jaxrl_llm[serve]"'
            )
        if not plays:
            return agents(c.agent)
    spec = spec_of(
        EnvironmentSpec,
        c,
        environment=c.name if environment is None else environment,
        tools=(*c.tools, *tools),
        reward_scales=reward_scales(c.reward_scale),
        with_options=tuple(environment_options(c.options)),
    )
    for key in ("reward_scale", "options") if spec.environment is None else ():
        if c[key]:
            raise EpisodeError(
                f"environment.{key} is {tuple(c[key])}, but there is no environment: set environment.name"
            )
    if name in OFFLINE and (spec.environment is not None or spec.tools):
        raise EpisodeError(f"there is an environment or a tool, but algorithm.name = {name!r} samples nothing")
    if c.agent is None:
        return spec
    if spec.environment is None and not spec.tools:
        raise EpisodeError(
            f"environment.agent is {EPISODES!r}, but there is neither an environment nor a tool: set environment.name "
            "or tools, or leave it out"
        )
    return agents(EpisodeAgent(spec, specs.image_limits(config)))


def played_environments(environments: Environments | Agents | None) -> Environments | None:
    """The environments that episodes are of, those of an agent's too, or None without any."""
    if isinstance(environments, Agents):
        agent = environments.spec.agent
        return agent.environments if isinstance(agent, EpisodeAgent) else None
    return environments
