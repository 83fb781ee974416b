"""Evaluation by sampling: the sets of held-out prompts, and their completions, graded and summed up as `eval/*`."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_llm.algorithms.random_streams import EVALUATION
from jaxrl_llm.config.resolve import ConfigError, closest
from jaxrl_llm.config.user_code import contained, error_text
from jaxrl_llm.data import Row
from jaxrl_llm.data.collate import columns_of
from jaxrl_llm.data.tokenize import PIXELS
from jaxrl_llm.distributed.processes import all_or_none, gather
from jaxrl_llm.distributed.row_groups import RowGroup
from jaxrl_llm.distributed.sharding import row_shards, rows_to_global
from jaxrl_llm.models.net import Params
from jaxrl_llm.rewards.runner import NO_STEP, NOTHING_LOGGED, Logged, TrainerState
from jaxrl_llm.training.evaluation.metrics import (
    SOURCE,
    EvalMetrics,
    PromptResult,
    by_row,
    prompt_results,
    prompts_by_source,
    summary,
    with_logged,
)
from jaxrl_llm.training.logging.reward_metrics import add_logs, add_totals
from jaxrl_llm.training.rollouts.worker import RolloutWorker

# (parameters, key[, table[, state]]) -> metrics named eval/...; `table` gets a row for each completion.
Evaluate = Callable[..., dict[str, float]]


class Predictions(NamedTuple):
    """The argument of `compute_metrics`: the completions of an evaluation, one a row, and what is known of them.

    Iterating gives predictions and label_ids, as over transformers' EvalPrediction.
    """

    predictions: list[Any]  # completions, texts or lists of messages
    label_ids: list[Any] | None  # the column answer, ground_truth, solution, completion or label, the first there is
    inputs: list[Any]  # prompts
    rewards: np.ndarray  # [N, F], NaN where a function does not apply
    columns: dict[str, list[Any]]  # the other columns of the data

    def __iter__(self) -> Iterator[Any]:
        return iter((self.predictions, self.label_ids))


LABELS = ("answer", "ground_truth", "solution", "completion", "label")
Compute = Callable[[Predictions], Mapping[str, float]]


class Samples(NamedTuple):
    """The graded completions of all examples."""

    results: list[PromptResult]
    lengths: np.ndarray  # [N] tokens
    ended: np.ndarray  # [N] bool: not clipped at the longest length
    logged: Logged  # metrics, a number for each completion of this process, and totals; no columns


@dataclass(frozen=True)
class Evaluation:
    """`eval/*` metrics of a policy on fixed examples, from samples and, with `greedy`, from its greedy completions.

    Those of a named set are `eval/<name>/*`. With examples of several data sources (their column data_source), each
    source has its metrics besides: `eval/<source>/*` or `eval/<name>/<source>/*`.

    Every evaluation draws the same random numbers, so that two of them differ by the policy only, and so that a set
    has the same samples alone and among others. Processes share the examples and get the same metrics.
    """

    sampled: RolloutWorker
    greedy: RolloutWorker | None
    examples: list[Row]
    prompts_at_once: int
    metrics: EvalMetrics
    name: str = ""
    compute: Compute | None = None  # more metrics, of the samples

    def __call__(
        self,
        params: Params,
        key,
        table: list[Row] | None = None,
        state: TrainerState = NO_STEP,
        between: Callable[[], None] | None = None,
    ) -> dict[str, float]:
        """The metrics of `summary`, `mean_length` (tokens) and `clipped_ratio` of the samples, and those that reward
        functions and environments log; their totals (a judge's requests and tokens) are of greedy completions too.

        `table` gets a row for each completion: prompt, completion, `evaluation` (sampled or greedy), `set` (where sets
        have names), rewards and what reward functions log of it. `state` is for the functions that ask for it.
        `between` is called before each batch of prompts, by all processes, and may raise.
        """
        key = jax.random.fold_in(key, EVALUATION)
        rows: list[Row] | None = None if table is None and self.compute is None else []
        samples = self._sample(self.sampled, params, key, "sampled", rows, state, between)
        computed = {} if self.compute is None or rows is None else self._computed(self.compute, rows)
        greedy = None
        if self.greedy is not None:
            greedy = self._sample(self.greedy, params, key, "greedy", rows, state, between)
        if table is not None and rows is not None:
            table += rows
        group_size, metrics = self.sampled.engine.group_size, dict[str, float]()
        for source, prompts in prompts_by_source(samples.results).items():
            greedy_results = None if greedy is None else [greedy.results[index] for index in prompts]
            values = summary([samples.results[index] for index in prompts], self.metrics, greedy_results)
            values["mean_length"] = float(samples.lengths.reshape(-1, group_size)[prompts].mean())
            values["clipped_ratio"] = float(1.0 - samples.ended.reshape(-1, group_size)[prompts].mean())
            metrics |= {f"{source}/{name}" if source else name: x for name, x in values.items()}
        metrics = with_logged(metrics, samples.logged if greedy is None else add_totals(samples.logged, greedy.logged))
        metrics |= {name.removeprefix("eval_"): value for name, value in computed.items()}
        return {f"eval/{self.name}/{name}" if self.name else f"eval/{name}": x for name, x in metrics.items()}

    def _computed(self, compute: Compute, table: list[Row]) -> dict[str, float]:
        """The metrics that the user's function makes of the samples. It is called in the first process alone, as it may
        draw random numbers or ask a server."""
        group_size, names = self.sampled.engine.group_size, self.sampled.rewards.names
        rows = [example for example in self.examples for _ in range(group_size)]
        columns = columns_of(rows, ("prompt", "prompt_ids", PIXELS))
        label = next((columns[name] for name in LABELS if name in columns), None)
        rewards = np.array([[row[name] for name in names] for row in table], np.float32)
        prompts, completions = ([row[name] for row in table] for name in ("prompt", "completion"))
        found: Any = None
        metrics: dict[str, float] = {}
        with all_or_none():
            try:
                if jax.process_index() == 0:
                    with contained(), jax.set_mesh(None):  # its programs are of this process alone
                        found = compute(Predictions(completions, label, prompts, rewards, columns))
                    metrics = {str(name): float(value) for name, value in found.items()}
            except Exception as error:
                got = f"; it gave {found!r:.80}" if found is not None else ""
                raise ConfigError(
                    f"compute_metrics raised {error_text(error)}{got}; it takes the completions "
                    "(predictions, label_ids, inputs, rewards, columns) and returns numbers by name"
                ) from error
        return gather(metrics)[0]

    def _sample(
        self,
        sampler: RolloutWorker,
        params: Params,
        key,
        decoding: str,
        table: list[Row] | None,
        state: TrainerState,
        between: Callable[[], None] | None,
    ) -> Samples:
        """The graded completions of all examples, `prompts_at_once` prompts at a time."""
        fixed = {"evaluation": decoding} | ({"set": self.name} if self.name else {})
        group_size, logged = sampler.engine.group_size, NOTHING_LOGGED
        batches, answers, numbers = [], [], []
        group, at_once = RowGroup.of(sampler.mesh), self.prompts_at_once
        for start, count, examples, own in full_batches(self.examples, at_once, row_shards(sampler.mesh), group):
            if between is not None:
                between()
            # Keyed by the position in this set alone: other sets, and the training step, change no sample.
            out = sampler(params, examples, jax.random.fold_in(key, start), state=state, counted=own)
            arrays = (rows_to_global(out.rewards, sampler.mesh), out.rollout.lengths, out.rollout.finished)
            rows = count * group_size
            batches.append(tuple(x[:rows] for x in multihost_utils.process_allgather(arrays, tiled=True)))
            own_numbers, rest = by_row(sampler.rewards.names, out.rewards[: own * group_size], out.logged)
            logged = add_logs(logged, rest)
            if table is not None:
                table += out.table(group, sampler.rewards.names, fixed)[:rows]
            own_answers = None
            with all_or_none():
                if group.leads:
                    own_completions = out.completions[: own * group_size]
                    own_answers = self.metrics.answers_of(own_completions, sampler.rewards.names[0], out.logged)
            by_group = group.gather([own_answers, own_numbers])
            answers += [share for share, _ in by_group]
            numbers += [row for _, share in by_group for row in share]
        rewards, lengths, ended = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
        counts = [group_size] * len(self.examples)
        sources = [example.get(SOURCE) for example in self.examples]
        weights, correct_at = sampler.rewards.weights, self.metrics.correct_at
        results = prompt_results(rewards, weights, counts, correct_at, answers, sources, numbers)
        return Samples(results, lengths, ended, logged)


@dataclass(frozen=True)
class Evaluations:
    """The metrics of several evaluations, by their full names."""

    sets: tuple[Evaluate, ...]

    def __call__(
        self,
        params: Params,
        key,
        table: list[Row] | None = None,
        state: TrainerState = NO_STEP,
        between: Callable[[], None] | None = None,
    ) -> dict[str, float]:
        """The metrics of all sets; `table` gets a row for each completion, reward functions that ask get `state`, and
        `between` is called as by `Evaluation`."""
        measured = (evaluate(params, key, table, state, between) for evaluate in self.sets)
        return {name: value for metrics in measured for name, value in metrics.items()}


def completions_of(evaluation: Evaluation, params: Params, key) -> list[list[Any]]:
    """The policy's completions of each example, texts or lists of messages: the samples of its evaluation.

    Every process gets all of them.
    """
    key, sampler = jax.random.fold_in(key, EVALUATION), evaluation.sampled
    group_size, completions = sampler.engine.group_size, []
    group, at_once = RowGroup.of(sampler.mesh), evaluation.prompts_at_once
    for start, count, examples, own in full_batches(evaluation.examples, at_once, row_shards(sampler.mesh), group):
        out = sampler(params, examples, jax.random.fold_in(key, start), counted=own)
        gathered = [completion for share in group.gather(out.completions) for completion in share]
        completions += gathered[: count * group_size]
    return [completions[row : row + group_size] for row in range(0, len(completions), group_size)]


def check_best(best: str | None, metrics: Mapping[str, float]) -> None:
    """Raises ConfigError when `best` (checkpoint.best) names a metric of evaluations that is not in `metrics`."""
    if best and best.startswith("eval/") and best not in metrics:
        raise ConfigError(
            f"checkpoint.best is {best!r}, but an evaluation has no such metric; the closest is "
            f"{closest(best, metrics)!r}, and all are {', '.join(sorted(metrics))}"
        )


def full_batches(
    examples: Sequence[Any], at_once: int, multiple: int, group: RowGroup
) -> Iterator[tuple[int, int, list[Any], int]]:
    """Yield batches of about `at_once` examples, each as four things: the position of its first example among all; the
    number of its examples, without those that fill it up; the examples of this process, which are those of its row
    group; and how many of these do not fill it up. Those that do are neither graded nor paid for.

    All batches have the same size, which the row shards of the mesh (`multiple`) and the groups divide; the last one
    is filled up by repeating its last example.
    """
    multiple = math.lcm(multiple, group.count)
    size = -(-max(min(at_once, len(examples)), 1) // multiple) * multiple
    share = size // group.count
    for start in range(0, len(examples), size):
        batch = list(examples[start : start + size])
        filled = batch + [batch[-1]] * (size - len(batch))
        counted = min(max(len(batch) - group.index * share, 0), share)
        yield start, len(batch), filled[group.index * share : (group.index + 1) * share], counted
