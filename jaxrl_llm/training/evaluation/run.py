"""Measuring a policy on held-out prompts by sampling it."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_llm.algorithms.random_streams import EVALUATION
from jaxrl_llm.algorithms.sample_statistics import pass_at_k as pass_at_k
from jaxrl_llm.config.resolve import ConfigError, closest
from jaxrl_llm.distributed.processes import all_or_none, gather
from jaxrl_llm.distributed.sharding import row_shards
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.rewards.calls import text_of
from jaxrl_llm.rewards.grader import NOTHING_LOGGED, Logged
from jaxrl_llm.training.evaluation.metrics import (
    PRED,
    SOURCE,
    EvalMetrics,
    PromptResult,
    by_source,
    outcomes_of,
    summary,
)
from jaxrl_llm.training.logging.reward_metrics import add_totals, over_processes
from jaxrl_llm.training.online import Row, Sampled, Sampler


class Found(NamedTuple):
    """The outcome of each prompt, and of each completion its length in tokens and whether it ended by itself; and what
    the reward functions have counted on the way."""

    outcomes: list[PromptResult]
    lengths: np.ndarray
    ended: np.ndarray
    totals: Logged


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """`eval/*` metrics of a policy on fixed examples, from samples and, with `greedy`, from its greedy completions.

    Those of a named set are `eval/<name>/*`. Where the examples come from several data sources (their column
    data_source), each has its own besides: `eval/<source>/*` or `eval/<name>/<source>/*`.

    Every evaluation draws the same random numbers, so that two of them differ by the policy only, and so that a set
    has the same samples alone and among others. Processes share the examples and get the same metrics.
    """

    sampled: Sampler
    greedy: Sampler | None
    examples: list[Row]
    prompts_at_once: int
    measures: EvalMetrics
    name: str = ""

    def __call__(self, params: Params, key) -> dict[str, float]:
        """The metrics of `outcomes.summary`, `mean_length` (tokens) and `clipped_ratio` of the samples, and the totals
        that reward functions log (a judge's requests and tokens), of greedy completions too."""
        key = jax.random.fold_in(key, EVALUATION)
        found = self._run(self.sampled, params, key)
        first_choice = None if self.greedy is None else self._run(self.greedy, params, key)
        greedy = None if first_choice is None else first_choice.outcomes
        spent = found.totals if first_choice is None else add_totals(found.totals, first_choice.totals)
        samples, start = self.sampled.engine.group_size, f"eval/{self.name}/" if self.name else "eval/"
        metrics: dict[str, float] = {}
        for source, prompts in {"": range(len(self.examples)), **by_source(found.outcomes)}.items():
            first = None if greedy is None else [greedy[index] for index in prompts]
            own = summary([found.outcomes[index] for index in prompts], self.measures, first)
            own["mean_length"] = float(found.lengths.reshape(-1, samples)[list(prompts)].mean())
            own["clipped_ratio"] = float(1.0 - found.ended.reshape(-1, samples)[list(prompts)].mean())
            metrics |= {f"{start}{source}/{name}" if source else start + name: x for name, x in own.items()}
        return {start + name: float(total) for name, total in over_processes(spent).items()} | metrics

    def _run(self, sampler: Sampler, params: Params, key) -> Found:
        """What comes of all examples, some at a time."""
        parts, answers, totals = [], [], NOTHING_LOGGED
        for start, count, own in full_batches(self.examples, self.prompts_at_once, row_shards(sampler.mesh)):
            out = sampler(params, own, jax.random.fold_in(key, start))
            found = (out.rewards, out.rollout.lengths, out.rollout.finished)
            rows = count * sampler.engine.group_size
            parts.append(tuple(x[:rows] for x in multihost_utils.process_allgather(found, tiled=True)))
            totals = add_totals(totals, out.logged)
            given = gather(self._answers(sampler, out))
            answers.append(None if None in given else [answer for part in given for answer in part][:rows])
        rewards, lengths, ended = (np.concatenate(part) for part in zip(*parts, strict=True))
        known = None if None in answers else [answer for part in answers for answer in part]
        counts = [sampler.engine.group_size] * len(self.examples)
        sources = [example.get(SOURCE) for example in self.examples]
        return Found(outcomes_of(rewards, sampler.rewards.weights, counts, self.measures, known, sources),
                     lengths, ended, totals)  # fmt: skip

    def _answers(self, sampler: Sampler, out: Sampled) -> list[str | None] | None:
        """The answers that this process's completions give, None where nothing says what they are."""
        with all_or_none():
            if self.measures.answer is not None:
                return self.measures.answers([text_of(completion) for completion in out.completions])
            found = out.logged.columns.get(f"{sampler.rewards.names[0]}/{PRED}")
            return None if found is None else [None if answer is None else str(answer) for answer in found]


def completions_of(evaluation: Evaluation, params: Params, key) -> list[list[Any]]:
    """What the policy writes for each example: texts, or lists of messages; the samples that it is measured by.

    Every process gets those of all.
    """
    key, sampler = jax.random.fold_in(key, EVALUATION), evaluation.sampled
    samples, found = sampler.engine.group_size, []
    for start, count, own in full_batches(evaluation.examples, evaluation.prompts_at_once, row_shards(sampler.mesh)):
        out = sampler(params, own, jax.random.fold_in(key, start))
        found += [completion for part in gather(out.completions) for completion in part][: count * samples]
    return [found[row : row + samples] for row in range(0, len(found), samples)]


@dataclasses.dataclass(frozen=True)
class Evaluations:
    """The metrics of several sets."""

    sets: tuple[Evaluation, ...]

    def __call__(self, params: Params, key) -> dict[str, float]:
        """The metrics of all sets, by their full names."""
        return {name: value for one in self.sets for name, value in one(params, key).items()}


def check_best(best: str | None, metrics: Mapping[str, float]) -> None:
    """Raises ConfigError when `checkpoint.best` names a metric of evaluations that the first of them does not have."""
    if best and best.startswith("eval/") and best not in metrics:
        raise ConfigError(
            f"checkpoint.best is {best!r}, but an evaluation has no such metric; the closest is "
            f"{closest(best, metrics)!r}, and all are {', '.join(sorted(metrics))}"
        )


class Share(NamedTuple):
    """This process's part of one batch."""

    start: int  # position of the batch's first example among all
    count: int  # examples in the batch, without those that fill it up
    own: list[Any]


def full_batches(examples: Sequence[Any], at_once: int, multiple: int) -> Iterator[Share]:
    """This process's part of each batch of about `at_once` examples.

    All batches have the same size, which the row shards of the mesh (`multiple`) and the processes divide; the last one
    is filled up by repeating its last example.
    """
    processes, process = jax.process_count(), jax.process_index()
    multiple = math.lcm(multiple, processes)
    size = -(-max(min(at_once, len(examples)), 1) // multiple) * multiple
    part = size // processes
    for start in range(0, len(examples), size):
        batch = list(examples[start : start + size])
        filled = batch + [batch[-1]] * (size - len(batch))
        yield Share(start, len(batch), filled[process * part : (process + 1) * part])
