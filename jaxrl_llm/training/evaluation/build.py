"""From the sets that a policy is measured on to what measures it: by samples, or by the loss on held-out rows."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from jaxrl_llm.data import loading
from jaxrl_llm.data.loading import Part
from jaxrl_llm.environments.factory import Environments
from jaxrl_llm.models.model import Model
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.rewards.grader import Rewards
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.training import offline
from jaxrl_llm.training.evaluation.metrics import measures_of
from jaxrl_llm.training.evaluation.run import Evaluation, Evaluations
from jaxrl_llm.training.evaluation.sources import NamedSet, measure_of, named_sets, set_parts
from jaxrl_llm.training.logging.stopwatch import Stopwatch
from jaxrl_llm.training.objectives import preference
from jaxrl_llm.training.objectives.policy_gradient import Objective
from jaxrl_llm.training.offline import HeldOut, Offline
from jaxrl_llm.training.online import Online, Row, Sampler
from jaxrl_llm.training.reference import start_reference
from jaxrl_llm.training.samplers import build_sampler, eval_sampling, padded_width
from jaxrl_llm.training.update import make_measure

Evaluate = Callable[[Params, jax.Array], dict[str, float]]  # metrics named eval/...


@dataclass(frozen=True)
class Joined:
    """The metrics of several evaluations as one."""

    parts: tuple[Evaluate, ...]

    def __call__(self, params: Params, key) -> dict[str, float]:
        """All metrics."""
        return {name: value for part in self.parts for name, value in part(params, key).items()}


def build_evaluate(
    config, model: Model, grader: Rewards, objective: Objective, source: Online | Offline, eval_dataset, mesh: Mesh,
    environments: Environments | None, watch: Stopwatch,
) -> Evaluate:  # fmt: skip
    """What `eval.measure` says of each set: the loss on held-out rows, samples for held-out prompts, or both."""
    sets = named_sets(config, eval_dataset)
    by_loss, by_samples = [], []
    for one in sets:
        parts = set_parts(config, model.tokenizer, one)
        measure = measure_of(config, parts)
        if measure in ("loss", "both"):
            by_loss.append((one.name, parts))
        if measure in ("samples", "both"):
            by_samples.append(one)
    found: list[Evaluate] = []
    if by_loss:
        assert isinstance(source, Offline)
        found += _held_out(config, model, objective, source, by_loss, mesh)
    if by_samples:
        found += _sampled(config, model, grader, by_samples, mesh, environments, watch)
    return Joined(tuple(found))


def build_evaluation(config, model: Model, grader: Rewards, eval_dataset, mesh: Mesh,
                     environments: Environments | None = None,
                     watch: Stopwatch | None = None) -> Evaluations:  # fmt: skip
    """The evaluation by samples of every set; `watch` sees its phases as signs of life."""
    sets = named_sets(config, eval_dataset)
    return Evaluations(tuple(_sampled(config, model, grader, sets, mesh, environments, watch)))


def _held_out(config, model: Model, objective: Objective, source: Offline, sets: list[tuple[str, list[Part]]],
              mesh: Mesh) -> list[HeldOut]:  # fmt: skip
    """The loss on each of the sets, by name and parts, all in rows of one width."""
    kind = loading.kind_of(config)
    rows = [offline.as_examples(loading.tokenized(config, parts, kind, model.tokenizer).rows) for _, parts in sets]
    width = padded_width(max(offline.longest(config, examples) for examples in rows), config.data.max_length)
    reference = start_reference(config, model.params, kept=False) if preference.needs_reference(config) else None
    found = []
    for (name, _), examples in zip(sets, rows, strict=True):
        batch, size = offline.held_out_batch(config, examples, width, mesh)
        if reference is not None:
            batch = offline.reference_logps(model.net, reference, batch, size, mesh)
        found.append(HeldOut(make_measure(objective, size, mesh), batch, source, name))
    return found


def _sampled(config, model: Model, grader: Rewards, sets: list[NamedSet], mesh: Mesh,
             environments: Environments | None, watch: Stopwatch | None) -> list[Evaluation]:  # fmt: skip
    """The evaluation of each set by samples; sets with as many samples share a sampler, and what it compiles."""
    tokenizer, measures, rows = model.tokenizer, measures_of(config), []
    for one in sets:
        parts = set_parts(config, tokenizer, one, prompts=True)
        rows.append(loading.tokenized(config, parts, "prompts", tokenizer).rows)
    every: list[Row] = [row for examples in rows for row in examples]

    def sampler(sampling: SamplingParams, group_size: int) -> Sampler:
        return build_sampler(model, grader, mesh, sampling, every, group_size, config, Stopwatch(within=watch),
                             environments)  # fmt: skip

    greedy = sampler(SamplingParams(temperature=0.0), 1) if config.eval.greedy else None
    sampled = {count: sampler(eval_sampling(config), count) for count in {one.samples for one in sets}}
    return [
        Evaluation(
            sampled[one.samples], greedy, examples,
            max(config.batch.prompts * config.rollout.group_size // one.samples, 1), measures, one.name,
        )
        for one, examples in zip(sets, rows, strict=True)
    ]  # fmt: skip
