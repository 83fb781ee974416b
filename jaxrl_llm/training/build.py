"""From a configuration to the parts of a run: the one place where model, data, rewards, sampler and update meet."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.config import ConfigError, batch_rows
from jaxrl_llm.data import sources
from jaxrl_llm.data.packing import first_fit
from jaxrl_llm.data.pipeline import Pipeline
from jaxrl_llm.data.tokenize import tokenize_prompts
from jaxrl_llm.keys import OFFLINE
from jaxrl_llm.models.model import Model, load_model
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.rewards.grader import Rewards, load_rewards
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.logits import Sampling
from jaxrl_llm.sharding import make_mesh
from jaxrl_llm.training import objectives, offline, preferences
from jaxrl_llm.training.critic import critic_config, value_regression
from jaxrl_llm.training.evaluation import Evaluation
from jaxrl_llm.training.experience import Online, Row, Sampler, check_rows
from jaxrl_llm.training.memory import make_memory
from jaxrl_llm.training.metrics import Stopwatch
from jaxrl_llm.training.offline import HeldOut, Offline
from jaxrl_llm.training.optimizers import make_optimizer
from jaxrl_llm.training.scoring import make_scorer
from jaxrl_llm.training.update import State, Update, init_state, learner, make_measure, make_update

OBJECTIVES = {
    "sft": objectives.sft,
    "preference": preferences.preference,
    "reward_model": preferences.reward_model,
}  # the others are of policy gradients
WIDTH_MULTIPLE = 8  # rows are padded to a multiple, so that similar data compiles to the same shapes


Evaluate = Callable[[Params, jax.Array], dict[str, float]]  # metrics named eval/...


class Run(NamedTuple):
    """Everything `train` drives."""

    model: Model
    critic: Model | None
    mesh: Mesh
    source: Online | Offline
    update: Update
    evaluation: Evaluate | None
    state: State
    watch: Stopwatch


def build_mesh(config) -> Mesh:
    """The mesh of the configuration."""
    return make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)


def build(config, mesh: Mesh, train_dataset=None, eval_dataset=None, rewards=None) -> Run:
    """The parts of a run, on `mesh` (which must be set). Raises ConfigError for anything the user can mend."""
    check_rows(config, batch_rows(config), mesh)
    watch = Stopwatch()
    model, grader = build_model(config, mesh), build_rewards(config, rewards)
    critic = build_critic(config, mesh) if config.algorithm.name == "ppo" else None
    dataset = sources.load(
        config.data.path if train_dataset is None else train_dataset, config.data.split, config.data.name
    )
    if config.algorithm.name in OFFLINE:
        source = _offline(config, model, dataset, mesh, watch)
    else:
        source = _online(config, model, critic, dataset, grader, mesh, watch)
    objective = OBJECTIVES.get(config.algorithm.name, objectives.policy_gradient)(config, model.net)
    evaluation = None
    if config.eval.every >= 0 and not (
        train_dataset is not None and eval_dataset is None and config.data.eval_path is None
    ):
        evaluation = _evaluation(config, model, grader, objective, source, eval_dataset, mesh)
    optimizer, learn_critic = make_optimizer(config), None
    state = init_state(model.params, optimizer, mesh)
    if isinstance(source, Online) and critic is not None:
        own = critic_config(config)
        critic_optimizer = make_optimizer(own)
        state = replace(state, critic=init_state(critic.params, critic_optimizer, mesh))
        learn_critic = learner(value_regression(config, critic.net), critic_optimizer, own, mesh)
    update = make_update(objective, optimizer, config, mesh, learn_critic)
    return Run(model, critic, mesh, source, update, evaluation, state, watch)


def build_model(config, mesh: Mesh, head: str | None = None) -> Model:
    """The model of the configuration, cut over `mesh`; raises ConfigError when it has no tokenizer."""
    c = config.model
    init_key = jax.random.key(config.seed) if c.random_init else None
    scan = jax.default_backend() != "cpu" if c.scan_layers == "auto" else c.scan_layers == "true"
    head = head or ("score" if config.algorithm.name == "reward_model" else "lm")
    model = load_model(c.path, c.dtype, c.param_dtype, mesh, init_key, remat=c.remat, scan_layers=scan, head=head)
    if model.tokenizer is None:
        raise ConfigError(f"model.path = {config.model.path!r} has no tokenizer files; add them to the folder")
    return model


def build_critic(config, mesh: Mesh) -> Model:
    """PPO's critic: the model of critic.path (or model.path) with a score head."""
    own = config.copy_and_resolve_references()
    own.model.path = config.critic.path or config.model.path
    return build_model(own, mesh, head="score")


def build_rewards(config, rewards=None) -> Rewards:
    """The grader of the given rewards (a function, a name, or a list of them), or else of the configuration's."""
    c = config.rewards
    return load_rewards(c.functions if rewards is None else rewards, c.weights, c.timeout)


def build_sampler(model: Model, grader: Rewards, mesh: Mesh, sampling: Sampling, examples: list[Row], group_size: int,
                  config, watch: Stopwatch) -> Sampler:  # fmt: skip
    """A sampler wide enough for the prompts of `examples`."""
    eos = eos_ids(model)
    c, cache_dtype = config.rollout, None if config.rollout.cache_dtype == "auto" else config.rollout.cache_dtype
    engine = Engine(model.net, sampling, group_size, c.max_completion_length, eos, c.chunk, c.slots, cache_dtype)
    width = _width(max(len(example["prompt_ids"]) for example in examples), config.rollout.max_prompt_length)
    return Sampler(engine, grader, model.tokenizer, mesh, width, watch)


def _evaluation(config, model: Model, grader: Rewards, objective: objectives.Objective, source: Online | Offline,
                eval_dataset, mesh: Mesh) -> Evaluate:  # fmt: skip
    """What `eval.measure` says: the loss on held-out rows, samples for held-out prompts, or both."""
    data, measure = _held_out_rows(config, eval_dataset), config.eval.measure
    if measure == "auto":
        learns = config.algorithm.name in OFFLINE and offline.is_learnable(config, data.column_names)
        measure = "loss" if learns or config.algorithm.name == "reward_model" else "samples"
    parts: list[Evaluate] = []
    if measure in ("loss", "both"):
        assert isinstance(source, Offline)
        parts.append(_held_out(config, model, objective, source, data, mesh))
    if measure in ("samples", "both"):
        parts.append(build_evaluation(config, model, grader, eval_dataset, mesh))
    return lambda params, key: {name: value for part in parts for name, value in part(params, key).items()}


def _held_out(config, model: Model, objective: objectives.Objective, source: Offline, data, mesh: Mesh) -> HeldOut:
    examples = offline.tokenized(config, data, model.tokenizer)
    width = _width(offline.longest(config, examples), config.data.max_length)
    batch, rows = offline.held_out_batch(config, examples, width, mesh)
    if preferences.needs_reference(config):
        batch = offline.reference_logps(model.net, model.params, batch, rows, mesh)
    return HeldOut(make_measure(objective, rows, mesh), batch, source)


def _held_out_rows(config, eval_dataset):
    """The first `eval.prompts` held-out rows."""
    path = config.data.eval_path or config.data.path
    try:
        data = sources.load(path if eval_dataset is None else eval_dataset, config.data.eval_split, config.data.name)
    except ConfigError as error:
        raise ConfigError(
            f"for the evaluation: {error} (data.eval_split, data.eval_path; eval.every=-1 is no evaluation)"
        ) from error
    return data.select(range(min(config.eval.prompts, len(data))))


def build_evaluation(config, model: Model, grader: Rewards, eval_dataset, mesh: Mesh) -> Evaluation:
    """The evaluation on the first `eval.prompts` held-out prompts."""
    examples = _prompts(config, model, _held_out_rows(config, eval_dataset))

    def sampler(sampling: Sampling, group_size: int) -> Sampler:
        return build_sampler(model, grader, mesh, sampling, examples, group_size, config, Stopwatch())

    return Evaluation(
        sampled=sampler(training_sampling(config), config.eval.samples),
        greedy=sampler(Sampling(temperature=0.0), 1),
        examples=examples,
        prompts_at_once=max(config.batch.prompts * config.rollout.group_size // config.eval.samples, 1),
        correct_at=config.eval.correct_at,
    )


def training_sampling(config) -> Sampling:
    """How the run samples."""
    c = config.rollout
    return Sampling(c.temperature, c.top_p, c.top_k, c.min_p)


def eos_ids(model: Model) -> tuple[int, ...]:
    """The tokens that end a completion: generation_config.json's, and the tokenizer's."""
    named = (model.generation or {}).get("eos_token_id", ())
    ids = {model.tokenizer.eos_token_id, *(named if isinstance(named, list | tuple) else [named])} - {None}
    if not ids:
        raise ConfigError(f"{model.path} names no end-of-text token; set eos_token in its tokenizer_config.json")
    return tuple(sorted(ids))


def _online(
    config, model: Model, critic: Model | None, dataset, grader: Rewards, mesh: Mesh, watch: Stopwatch
) -> Online:
    scorer = make_scorer(config, grader.names)
    examples = _prompts(config, model, dataset)
    sampler = build_sampler(
        model, grader, mesh, training_sampling(config), examples, config.rollout.group_size, config, watch
    )
    greedy = None
    if scorer.asks_for("greedy_scores"):
        greedy = build_sampler(model, grader, mesh, Sampling(temperature=0.0), examples, 1, config, watch)
    memory = make_memory(config, model.params, sampler.prompt_width, mesh)
    critic_net = None if critic is None else critic.net
    return Online(config, model.net, critic_net, sampler, greedy, _pipeline(config, examples), scorer, memory)


def _offline(config, model: Model, dataset, mesh: Mesh, watch: Stopwatch) -> Offline:
    examples: list[Any] = offline.tokenized(config, dataset, model.tokenizer)
    if offline.is_labelled(config):
        offline.check_balance(config, examples)
    width, ref_params = _width(offline.longest(config, examples), config.data.max_length), None
    if preferences.needs_reference(config):
        if config.data.precompute_reference:
            examples = offline.with_reference(config, model.net, model.params, examples, width, mesh)
        else:
            ref_params = jax.tree.map(jnp.copy, model.params)
    if config.data.packing:
        width = config.data.max_length
        groups = first_fit([len(row["ids"]) for (row,) in examples], width)
        examples = [[(examples[i][0]["ids"], examples[i][0]["mask"]) for i in group] for group in groups]
    # Every process reads whole batches: kto pairs the rows of one with each other.
    pipeline = Pipeline(examples, config.batch.prompts, config.seed, config.data.shuffle)
    return Offline(config, model.net, pipeline, mesh, width, ref_params, watch)


def _prompts(config, model: Model, dataset) -> list[Row]:
    return tokenize_prompts(
        dataset, model.tokenizer, config.rollout.max_prompt_length, config.data.overlong, config.data.prompt_key
    )


def _pipeline(config, examples: list[Any]) -> Pipeline:
    return Pipeline(
        examples, config.batch.prompts, config.seed, config.data.shuffle, jax.process_index(), jax.process_count()
    )


def _width(longest: int, limit: int) -> int:
    return min(-(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE, limit)
