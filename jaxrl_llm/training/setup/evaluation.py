"""From the configuration to its evaluations: the sets, their rows, and the loss or the samples that measure them."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxrl_llm.config import ConfigError, eval_set
from jaxrl_llm.config.resolve import naming, resolve
from jaxrl_llm.config.schema import OFFLINE
from jaxrl_llm.data import Row, loading, opening
from jaxrl_llm.data.opening import DataSource
from jaxrl_llm.data.splits import is_splits
from jaxrl_llm.data.tokenize import PIXELS
from jaxrl_llm.environments.agents import Agents
from jaxrl_llm.environments.factory import Environments
from jaxrl_llm.models.model import Model, check_positions
from jaxrl_llm.rewards.runner import Rewards
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.training import offline
from jaxrl_llm.training.evaluation.metrics import EvalMetrics
from jaxrl_llm.training.evaluation.run import Compute, Evaluate, Evaluation, Evaluations
from jaxrl_llm.training.logging.stopwatch import Stopwatch
from jaxrl_llm.training.objectives.objective import Objective
from jaxrl_llm.training.offline import HeldOut, OfflineSource
from jaxrl_llm.training.online import OnlineSource
from jaxrl_llm.training.reference import start_reference
from jaxrl_llm.training.rollouts.worker import RolloutWorker
from jaxrl_llm.training.setup import specs
from jaxrl_llm.training.setup.agreed import check_same_rows
from jaxrl_llm.training.setup.objectives import needs_reference
from jaxrl_llm.training.setup.worker import Setup, build_worker
from jaxrl_llm.training.update import make_measure


class NamedSet(NamedTuple):
    """One set: its name in metrics (empty for the only one), its rows or their sources, and its numbers."""

    name: str
    rows: Any  # in memory, in place of sources
    sources: list[dict[str, Any]] | None  # None: data.eval_path, or the sources that are trained on
    prompts: int  # the first rows that are evaluated on
    samples: int  # completions of each prompt


def eval_sets(config, dataset: Any = None) -> list[NamedSet]:
    """The sets to evaluate on: `dataset` (rows, or a dictionary of rows by set), else those of eval.sets, or the one of
    data.eval_path."""
    c, sets = config.eval, dict[str, NamedSet]()
    if isinstance(dataset, Mapping) and not is_splits(dataset):
        return [NamedSet(str(name), rows, None, c.prompts, c.samples) for name, rows in dataset.items()]
    for entry in c.sets if dataset is None else ():  # entries of one name are sources of one set
        name, numbers, source = eval_set(entry)
        known = sets.get(name, NamedSet(name, None, [], c.prompts, c.samples))
        sets[name] = known._replace(sources=[*(known.sources or []), source], **numbers)
    return [*sets.values()] or [NamedSet("", dataset, None, c.prompts, c.samples)]


def eval_metrics(config) -> EvalMetrics:
    """The metrics of evaluations; raises ConfigError for an `eval.answer` that cannot be resolved."""
    c = config.eval
    with naming("eval.answer"):
        answer = None if c.answer is None else resolve(c.answer, "jaxrl_llm.rewards.answers")
    return EvalMetrics(c.correct_at, answer, c.extremes, c.interval, c.estimate)


def eval_data(config, tokenizer: Any, rows: Any = None) -> list[tuple[NamedSet, list[DataSource]]]:
    """Each set that is evaluated on outside of training, with its first rows by source; `rows` are those in memory."""
    spec, trained_on = specs.data_spec(config), set[bytes]()
    if spec.deduplicate and not spec.eval_fraction:
        opening.open_sources(spec, tokenizer, seen=trained_on)
    return [
        (named, loading.first_rows(open_eval(config, tokenizer, named, trained_on), named.prompts))
        for named in eval_sets(config, rows)
    ]


def open_eval(config, tokenizer: Any, named: NamedSet, trained_on: Iterable[bytes]) -> list[DataSource]:
    """All rows of a set, by source, or none where `opening.open_sources` finds nothing to evaluate on.

    `trained_on` are the digests of rows that data.deduplicate leaves out. Raises ConfigError for a set that cannot be
    opened.
    """
    spec = specs.data_spec(config)
    try:
        return opening.open_sources(spec, tokenizer, named.rows, held_out=True, named=named.sources, seen={*trained_on})
    except ConfigError as error:
        ways = "or evaluate on nothing (eval.every=-1)"
        if named.sources is not None:
            ways = f"see eval.sets, {named.name}; {ways}"
        else:
            ways = f"hold rows out (eval.fraction=0.05, data.eval_split=none), name others (data.eval_path), {ways}"
        reason = str(error).partition("; set the split to train")[0]  # which would evaluate on what is trained on
        raise ConfigError(f"for the evaluation: {reason}: {ways}") from error


def eval_measure(config, sources: list[DataSource]) -> str:
    """The measure of a set with these sources: loss, samples or both (`eval.measure`, with auto resolved)."""
    if config.eval.measure != "auto":
        return config.eval.measure
    learns = config.algorithm.name in OFFLINE and loading.is_learnable(specs.data_kind(config), sources)
    writes = config.algorithm.name not in ("reward_model", "process_reward_model")
    return "samples" if writes and not learns else "loss"


def build_evaluate(
    setup: Setup,
    objective: Objective,
    source: OnlineSource | OfflineSource,
    held_out: list[tuple[NamedSet, list[DataSource]]],
    compute: Compute | None = None,
) -> Evaluations:
    """The evaluation during training: each set by the loss on its rows, by samples for its prompts, or both.

    Raises ConfigError for compute_metrics where completions are not sampled.
    """
    config, mesh, model = setup.config, setup.mesh, setup.model
    by_loss: list[tuple[str, list[DataSource]]] = []
    by_samples: list[tuple[NamedSet, list[DataSource]]] = []
    for named, sources in held_out:
        measure = eval_measure(config, sources)
        if measure in ("loss", "both"):
            by_loss.append((named.name, sources))
        if measure in ("samples", "both"):
            by_samples.append((named, sources))
    if compute is not None and not by_samples:
        raise ConfigError(
            "compute_metrics reads completions, but the evaluation measures the loss alone: set eval.measure to "
            "samples or both"
        )
    evaluations: list[Evaluate] = []
    if by_loss:
        assert isinstance(source, OfflineSource)
        data = specs.data_spec(config)
        data = replace(data, loss_on="completion") if data.loss_on == "last_step" else data  # every step is measured
        sets = [loading.tokenized(data, sources, data.kind, model.tokenizer).rows for _, sources in by_loss]
        check_same_rows("rows to evaluate on", data.kind, [row for rows in sets for row in rows])
        examples = [offline.as_examples(rows) for rows in sets]
        # One width for all sets, so that they share a compiled program.
        longest = max(offline.longest(rows, specs.mismatches(config)) for rows in examples)
        longest = min(longest, config.data.max_length)
        check_positions(model, longest, "the longest row to evaluate on, up to data.max_length")
        # Rows are padded here, where training may pack them: the longest may be far longer than most.
        most = source.pack.passing_tokens or source.batch.forward_rows * source.spec.width
        spec, reference = specs.offline_spec(config, specs.padded_width(longest, config.data.max_length)), None
        if needs_reference(config) and not config.algorithm.ref_sync_steps:  # a moving one is read at each evaluation
            reference = start_reference(specs.reference_spec(config), model.params, kept=False)
        for (name, _), rows in zip(by_loss, examples, strict=True):
            batch, size = offline.held_out_batch(spec, source.batch, rows, model.net, mesh, most)
            if reference is not None:
                batch = offline.reference_logps(model.net, reference, batch, size, mesh)
            if source.teacher is not None:
                filled = rows + rows[-1:] * (batch.rows - len(rows))
                batch, _ = source.with_teacher(batch, filled, size)
            evaluations.append(HeldOut(make_measure(objective, size, mesh), batch, size, source, name))
    if by_samples:
        evaluations += _sampled_evaluations(setup, by_samples, compute)
    return Evaluations(tuple(evaluations))


def kept_prompts(config, tokenizer: Any, eval_dataset: Any) -> list[bool]:
    """For each prompt of each set, True where it is sampled, and False where `data.overlong` leaves it out."""
    spec = specs.data_spec(config)
    return [
        row is not None
        for _, sources in eval_data(config, tokenizer, eval_dataset)
        for source in loading.as_prompts(sources)
        for row in loading.token_rows(
            source, "prompts", loading.limited_tokenizer(spec, "prompts", tokenizer, source.folder), workers=1
        )
    ]


def build_evaluations(
    config, model: Model, grader: Rewards, eval_dataset, mesh: Mesh, environments: Environments | Agents | None = None
) -> tuple[Evaluation, ...]:
    """The evaluation by samples of every set, outside of training."""
    sets = eval_data(config, model.tokenizer, eval_dataset)
    setup = Setup(config, mesh, model, grader, environments, Stopwatch())
    return tuple(_sampled_evaluations(setup, sets))


def _sampled_evaluations(
    setup: Setup, sets: list[tuple[NamedSet, list[DataSource]]], compute: Compute | None = None
) -> list[Evaluation]:
    """The evaluation of each set by samples; the setup's stopwatch sees its phases as signs of life."""
    config, c, tokenizer = setup.config, setup.config.eval, setup.model.tokenizer
    metrics, sampling = eval_metrics(config), specs.eval_sampling(config)
    if not all(sources for _, sources in sets):
        raise ConfigError(
            f"there is nothing to evaluate on: {config.data.path} has no split 'test'; name a split with "
            "data.eval_split, or other data with data.eval_path"
        )
    data = specs.data_spec(config)
    rows = [loading.tokenized(data, loading.as_prompts(own), "prompts", tokenizer).rows for _, own in sets]
    every: list[Row] = [row for examples in rows for row in examples]
    check_same_rows("prompts to evaluate on", "prompts", every)

    if setup.reads_prompts_as_they_are:  # what a reward lacks is told before anything is sampled
        for (named, _), examples in zip(sets, rows, strict=True):
            columns = set().union(*examples)
            if PIXELS not in columns:
                with naming(f"for the evaluation{f' on {named.name}' if named.name else ''}"):
                    setup.rewards.check_columns(sorted(columns - {"prompt_ids"}))
    completions = config.batch.prompts * config.rollout.group_size
    at_once = {count: max(completions // count, 1) for count in {named.samples for named, _ in sets}}

    def sampler(sampling: SamplingParams, group_size: int, prompts: int) -> RolloutWorker:
        own = setup._replace(stopwatch=Stopwatch(within=setup.stopwatch))
        return build_worker(own, sampling, group_size, every, min(prompts, len(every)))

    greedy = sampler(sampling.greedy, 1, max(at_once.values())) if c.greedy else None
    # Sets with as many samples share a sampler, and its compiled program.
    sampled = {count: sampler(sampling, count, prompts) for count, prompts in at_once.items()}
    return [
        Evaluation(sampled[named.samples], greedy, examples, at_once[named.samples], metrics, named.name, compute)
        for (named, _), examples in zip(sets, rows, strict=True)
    ]
