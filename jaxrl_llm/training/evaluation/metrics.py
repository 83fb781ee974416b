"""The results of each prompt's completions, and the metrics that sum them up: pass@k, majority@k, best@k, intervals."""

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.algorithms.advantages import combine_rewards
from jaxrl_llm.algorithms.sample_statistics import (
    best_of_k,
    bootstrap_interval,
    counts_of_k,
    majority_of_k,
    mean_of,
    passes_at_k,
    std_of,
    worst_of_k,
)
from jaxrl_llm.config.user_code import contained, error_text
from jaxrl_llm.rewards.runner import Logged
from jaxrl_llm.rewards.signatures import RewardError, text_of
from jaxrl_llm.training.logging.reward_metrics import over_processes

SOURCE = "data_source"  # the column that names the source of a row
PRED = "pred"  # the entry of a reward's results that holds the answer it extracted

Answers = Sequence[Hashable] | None
Numbers = dict[str, float]  # of one completion, by the name of their mean


class PromptResult(NamedTuple):
    """The grades of the n completions of one prompt."""

    rewards: np.ndarray  # [n] weighted sums over the reward functions, nan where none applies
    correct: np.ndarray  # [n] bool
    answers: Answers = None  # n
    source: str | None = None
    graded: bool = True  # the first reward applies to one of them at least
    numbers: Sequence[Numbers] = ()  # n


@dataclass(frozen=True)
class EvalMetrics:
    """The metrics to compute of prompt results: the settings of `eval` with these names."""

    correct_at: float = 1.0  # the first reward from which on a completion is correct
    answer: Callable[[str], Any] | None = None  # extracts the answer from a text, None where there is none
    extremes: bool = False  # best@k and worst@k
    interval: float | None = None  # level of bootstrap intervals
    estimate: str = "unbiased"  # or verl

    def answers_of(self, completions: Sequence[Any], reward: str, logged: Logged) -> list[str | None] | None:
        """The answer in each completion, None where it has none: what `answer` extracts of its text, or else what the
        function `reward` logged. It is None where that logged none; raises RewardError when `answer` fails.
        """
        if self.answer is None:
            column = logged.columns.get(f"{reward}/{PRED}", None if completions else [])
            return None if column is None else [None if x is None else str(x) for x in column[: len(completions)]]
        answers: list[str | None] = []
        for row, text in enumerate(map(text_of, completions)):
            try:
                with contained():
                    answer = self.answer(text)
            except Exception as error:
                raise RewardError(f"eval.answer raised {error_text(error)}, on completion {row}") from error
            answers.append(None if answer is None else str(answer))
        return answers


def by_row(names: Sequence[str], rewards: np.ndarray, logged: Logged) -> tuple[list[Numbers], Logged]:
    """The numbers that the functions with these names gave for each completion of a batch, and the rest of what they
    logged.

    Of a completion that is `rewards/<function>/mean`, nan where it does not apply, and `rewards/<function>/<entry>` for
    the numbers beside a score; `rewards [N, F]` may be of fewer completions than were sampled. In the rest each metric
    stands N times, as the mean over the batch, so that batches count by their completions.
    """
    means, beside = [f"rewards/{name}/mean" for name in names], tuple(f"{name}/" for name in names)
    rows = [dict(zip(means, map(float, row), strict=True)) for row in rewards]
    entries = {
        name: values
        for column, values in logged.columns.items()
        if column.startswith(beside) and (name := f"rewards/{column}") in logged.metrics and name not in means
    }
    for name, values in entries.items():
        for row, value in zip(rows, values, strict=False):
            if value is not None:
                row[name] = float(value)
    rest = {
        name: [float(np.mean(values))] * len(rows)
        for name, values in logged.metrics.items()
        if values and name not in entries
    }
    return rows, Logged(rest, logged.totals, {})


def prompt_results(
    rewards: np.ndarray,
    weights: np.ndarray,
    counts: Sequence[int],
    correct_at: float,
    answers: Sequence[Answers],
    sources: Sequence[Any],
    numbers: Sequence[Numbers],
) -> list[PromptResult]:
    """The result of each prompt, whose `counts` completions are adjacent rows.

    `rewards [N, F]` (nan where one does not apply), `answers`, in parts, and `numbers` are of the completions,
    `sources` of the prompts. Where the answers of one part are not known, none are. A completion is correct when its
    first reward is at least `correct_at`; a prompt to whose completions it never applies has no accuracy.
    """
    combined = np.asarray(combine_rewards(rewards, weights))
    known = None if None in answers else [answer for part in answers for answer in part or ()]
    correct, ends = rewards[:, 0] >= correct_at, np.cumsum(counts)
    return [
        PromptResult(
            combined[end - count : end],
            correct[end - count : end],
            None if known is None else known[end - count : end],
            None if source is None else str(source),
            not np.isnan(rewards[end - count : end, 0]).all(),
            numbers[end - count : end],
        )
        for count, end, source in zip(counts, ends, sources, strict=True)
    ]


def prompts_by_source(results: Sequence[PromptResult]) -> dict[str, list[int]]:
    """The indices of all prompts under "" and, with two data sources or more, those of each source under its name."""
    sources: dict[str, list[int]] = {}
    for index, result in enumerate(results):
        if result.source is not None:
            sources.setdefault(result.source, []).append(index)
    return {"": list(range(len(results))), **(sources if len(sources) > 1 else {})}


def summary(
    results: Sequence[PromptResult], metrics: EvalMetrics, greedy: Sequence[PromptResult] | None = None
) -> dict[str, float]:
    """`reward`, `accuracy`, `greedy_accuracy`, `pass@k`, and the optional ones of `metrics`: means over prompts.

    With verl's estimates there are also the standard deviations of a prompt's samples, `reward_std` and `accuracy_std`.
    A mean over no prompt, where the first reward applies to none or no reward does, is nan. k is every power of two up
    to the number of samples (the fewest of any prompt), and that number; from 2 on for `maj@k`, `best@k` and `worst@k`.
    With an interval `reward`, the accuracies, and `pass@k` and `maj@k` of the largest k have `_low` and `_high` too.
    Last come the means of the results' `numbers`, over the completions that have them.
    """
    rewards, correct = [result.rewards for result in results], [result.correct for result in results]
    ks, estimate = counts_of_k(min(map(len, correct))), metrics.estimate
    by_prompt: dict[str, Any] = {
        "reward": [mean_of(row) for row in rewards],
        "accuracy": _of_graded([row.mean() for row in correct], results),
    }
    if estimate == "verl":  # which has the spread of a prompt's samples beside their mean
        by_prompt["reward_std"] = [std_of(row) for row in rewards]
        by_prompt["accuracy_std"] = _of_graded([row.std() for row in correct], results)
    if greedy is not None:
        by_prompt["greedy_accuracy"] = _of_graded([result.correct.mean() for result in greedy], greedy)
    by_prompt |= {f"pass@{k}": _of_graded(passes_at_k(correct, k, estimate), results) for k in ks}
    answers = [result.answers for result in results if result.answers is not None]
    if len(answers) == len(results):
        by_prompt |= {
            f"maj@{k}": _of_graded(majority_of_k(answers, correct, k, estimate), results) for k in ks if k > 1
        }
    if metrics.extremes:
        by_prompt |= {f"best@{k}": best_of_k(rewards, k, estimate) for k in ks if k > 1}
        by_prompt |= {f"worst@{k}": worst_of_k(rewards, k, estimate) for k in ks if k > 1}
    values = {name: mean_of(prompts) for name, prompts in by_prompt.items()}
    if metrics.interval is not None:
        for name in ("reward", "accuracy", "greedy_accuracy", f"pass@{ks[-1]}", f"maj@{ks[-1]}"):
            if name in by_prompt:
                interval = bootstrap_interval(by_prompt[name], metrics.interval)
                values[f"{name}_low"], values[f"{name}_high"] = interval
    rows = [row for result in results for row in result.numbers]
    names = dict.fromkeys(name for row in rows for name in row)
    return values | {name: mean_of([row[name] for row in rows if name in row]) for name in names}


def with_logged(metrics: dict[str, float], logged: Logged) -> dict[str, float]:
    """The metrics of an evaluation, after what reward functions logged besides, over all processes.

    Warns of a name that both have: the evaluation's own stays.
    """
    found = {name: float(value) for name, value in over_processes(logged).items()}
    if taken := sorted(found.keys() & metrics.keys()):
        warnings.warn(
            f"a reward function logs {taken[0]!r}, and eval/{taken[0]} is the evaluation's own metric: log it under "
            "another name to see it there",
            stacklevel=2,
        )
    return found | metrics


def _of_graded(values: Any, results: Sequence[PromptResult]) -> np.ndarray:
    """The values of prompts `[B]`, nan for those that are not graded."""
    return np.where([result.graded for result in results], values, np.nan)
