"""From a configuration to what samples completions: an engine, how it draws, what answers it and what grades it."""

from dataclasses import replace
from functools import partial
from typing import Any

from jax.sharding import Mesh

from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.resolve import split_options
from jaxrl_llm.data.observations import TurnTokenizer
from jaxrl_llm.distributed.sharding import rollout_mesh, row_shards
from jaxrl_llm.environments.batch import EpisodeBatch
from jaxrl_llm.environments.factory import Environments
from jaxrl_llm.models.cast import draws_from_another
from jaxrl_llm.models.model import Model
from jaxrl_llm.rewards.runner import Rewards
from jaxrl_llm.rollout.engine import Engine, RolloutSpec
from jaxrl_llm.rollout.resharded import ReshardedEngine
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.training.external_rollout import ExternalRollout, load_rollout_function
from jaxrl_llm.training.logging.stopwatch import Stopwatch
from jaxrl_llm.training.online import Row, Sampler, scored_logps

WIDTH_MULTIPLE = 8  # rows are padded to a multiple, so that similar data compiles to the same shapes


def build_sampler(model: Model, grader: Rewards, mesh: Mesh, sampling: SamplingParams, examples: list[Row] | None,
                  group_size: int, config, watch: Stopwatch,
                  environments: Environments | None = None) -> Sampler:  # fmt: skip
    """A sampler wide enough for the prompts of `examples` or, where they are not known before, for any."""
    eos = eos_ids(model)
    open_episodes = None
    if environments is not None:
        options = split_options(f"_({config.data.chat_template_kwargs})")[1]
        turns = TurnTokenizer(model.tokenizer, eos, config.rollout.max_prompt_length, options)
        open_episodes = partial(EpisodeBatch.open, environments, turns)
        examples = None  # environments and tools may lengthen prompts
    spec = replace(rollout_spec(config), sampling=sampling, group_size=group_size)
    engine = Engine.of(spec, model.net, eos)
    sampling_mesh = rollout_mesh(mesh, config.rollout.mesh)
    if sampling_mesh != mesh:
        engine = ReshardedEngine(**vars(engine), mesh=sampling_mesh, train_mesh=mesh, watch=watch)
    limit = config.rollout.max_prompt_length
    width = limit if examples is None else padded_width(max(len(example["prompt_ids"]) for example in examples), limit)
    function, external = load_rollout_function(config.environment.rollout_func), None
    if function is not None:
        width = limit  # what a function returns as prompts is its own

        def policy_logps(params: Any, inputs: Inputs):
            rows, temperature = len(inputs.tokens), config.rollout.temperature
            return scored_logps(engine.net, params, inputs, temperature, rows, row_shards(mesh))

        external = ExternalRollout(function, engine, model.tokenizer, mesh, width, policy_logps)
    return Sampler(engine, grader, model.tokenizer, mesh, width, watch, open_episodes, external)


def rollout_spec(config) -> RolloutSpec:
    """The settings of the engine that samples for training."""
    c = config.rollout
    return RolloutSpec(
        sampling=training_sampling(config),
        group_size=c.group_size,
        max_completion_length=c.max_completion_length,
        chunk=c.chunk,
        slots=c.slots,
        cache_dtype=None if c.cache_dtype == "auto" else c.cache_dtype,
        shrink=c.shrink,
        weights_dtype=None if c.weights_dtype == "auto" else c.weights_dtype,
        speculative_tokens=c.draft_tokens,
    )


def check_correction(config, engine: Engine) -> None:
    """Raises ConfigError where the engine samples in fewer bits than are trained, and nothing corrects for it."""
    named = []
    if draws_from_another(engine.decoder, engine.net):
        named.append(f"rollout.weights_dtype is {engine.weights_dtype}")
    if engine.cache_dtype == "fp8":
        named.append("rollout.cache_dtype is fp8")
    if named and config.algorithm.importance_correction == "none":
        raise ConfigError(
            f"{named[0]}, so completions are not drawn from the policy that is trained, but algorithm."
            "importance_correction is none: set token_truncate, which weighs each token by the ratio of the two"
        )


def training_sampling(config) -> SamplingParams:
    """How the run samples."""
    c = config.rollout
    return SamplingParams(c.temperature, c.top_p, c.top_k, c.min_p)


def eval_sampling(config) -> SamplingParams:
    """How an evaluation samples: as the run does, save what `eval` sets itself."""
    c, run = config.eval, training_sampling(config)
    return SamplingParams(
        run.temperature if c.temperature is None else c.temperature,
        run.top_p if c.top_p is None else c.top_p,
        run.top_k if c.top_k is None else c.top_k,
        run.min_p,
    )


def eos_ids(model: Model) -> tuple[int, ...]:
    """The tokens that end a completion: generation_config.json's, and the tokenizer's."""
    named = (model.generation or {}).get("eos_token_id", ())
    ids = {model.tokenizer.eos_token_id, *(named if isinstance(named, list | tuple) else [named])} - {None}
    if not ids:
        raise ConfigError(f"{model.path} names no end-of-text token; set eos_token in its tokenizer_config.json")
    return tuple(sorted(ids))


def padded_width(longest: int, limit: int) -> int:
    """The width of rows of which the longest has so many tokens."""
    return min(-(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE, limit)
