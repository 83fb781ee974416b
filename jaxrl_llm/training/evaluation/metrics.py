"""What came of the completions of each prompt, and the metrics that sum it up."""

from collections.abc import Callable, Hashable, Mapping, Sequence
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
    worst_of_k,
)
from jaxrl_llm.config.resolve import resolve
from jaxrl_llm.rewards.calls import RewardError

SOURCE = "data_source"  # the column that says where a row is from
PRED = "pred"  # the entry of a reward's results that holds the answer it found

Answers = Sequence[Hashable] | None


class PromptResult(NamedTuple):
    """What was found for the n completions of one prompt."""

    scores: np.ndarray  # [n] weighted sums of the rewards, nan where none applies
    correct: np.ndarray  # [n] bool
    answers: Answers = None
    source: str | None = None


@dataclass(frozen=True)
class EvalMetrics:
    """How outcomes become metrics: the settings of `eval` with these names; `answer` finds the answer in a text."""

    correct_at: float = 1.0
    answer: Callable[[str], Any] | None = None
    extremes: bool = False
    interval: float | None = None
    estimate: str = "unbiased"

    def answers(self, texts: Sequence[str]) -> list[str | None]:
        """The answer of each text, None where there is none; raises RewardError when `answer` fails."""
        assert self.answer is not None
        found = []
        for row, text in enumerate(texts):
            try:
                answer = self.answer(text)
            except Exception as error:
                raise RewardError(f"eval.answer raised {type(error).__name__}: {error}, on completion {row}") from error
            found.append(None if answer is None else str(answer))
        return found


def measures_of(config) -> EvalMetrics:
    """The measures that the configuration asks for; raises ConfigError for an answer that cannot be resolved."""
    c = config.eval
    answer = None if c.answer is None else resolve(c.answer, "jaxrl_llm.rewards.answers")
    return EvalMetrics(c.correct_at, answer, c.extremes, c.interval, c.estimate)


def outcomes_of(
    rewards: np.ndarray, weights: np.ndarray, counts: Sequence[int], measures: EvalMetrics, answers: Answers,
    sources: Sequence[Any],
) -> list[PromptResult]:  # fmt: skip
    """The outcome of each prompt, of `counts` adjacent completions.

    `rewards [N, R]` (nan where one does not apply) and `answers` are of the completions, `sources` of the prompts. A
    completion is correct when its first reward is at least `measures.correct_at`.
    """
    scores = np.asarray(combine_rewards(rewards, weights))
    correct, ends = rewards[:, 0] >= measures.correct_at, np.cumsum(counts)
    return [
        PromptResult(
            scores[end - count : end],
            correct[end - count : end],
            None if answers is None else answers[end - count : end],
            None if source is None else str(source),
        )
        for count, end, source in zip(counts, ends, sources, strict=True)
    ]


def by_source(outcomes: Sequence[PromptResult]) -> dict[str, list[int]]:
    """The prompts of each data source, by name; none unless there are two or more."""
    found: dict[str, list[int]] = {}
    for index, outcome in enumerate(outcomes):
        if outcome.source is not None:
            found.setdefault(outcome.source, []).append(index)
    return found if len(found) > 1 else {}


def summary(
    outcomes: Sequence[PromptResult], measures: EvalMetrics, greedy: Sequence[PromptResult] | None = None
) -> dict[str, float]:
    """`reward`, `accuracy`, `greedy_accuracy`, `pass@k`, and what `measures` add: means over prompts.

    k is every power of two up to the number of samples (the fewest that a prompt has), and that number; from 2 on for
    `maj@k`, `best@k` and `worst@k`. With an interval `reward`, the accuracies, and `pass@k` and `maj@k` of the largest
    k have `_low` and `_high` too.
    """
    scores, correct = [outcome.scores for outcome in outcomes], [outcome.correct for outcome in outcomes]
    ks, estimate = counts_of_k(min(map(len, correct))), measures.estimate
    each: dict[str, Any] = {"reward": [mean_of(row) for row in scores], "accuracy": [row.mean() for row in correct]}
    if greedy is not None:
        each["greedy_accuracy"] = [outcome.correct.mean() for outcome in greedy]
    each |= {f"pass@{k}": passes_at_k(correct, k, estimate) for k in ks}
    answers = [outcome.answers for outcome in outcomes if outcome.answers is not None]
    if len(answers) == len(outcomes):
        each |= {f"maj@{k}": majority_of_k(answers, correct, k, estimate) for k in ks if k > 1}
    if measures.extremes:
        each |= {f"best@{k}": best_of_k(scores, k, estimate) for k in ks if k > 1}
        each |= {f"worst@{k}": worst_of_k(scores, k, estimate) for k in ks if k > 1}
    metrics = {name: mean_of(values) for name, values in each.items()}
    return metrics if measures.interval is None else metrics | _intervals(each, ks[-1], measures.interval)


def _intervals(each: Mapping[str, Any], largest: int, level: float) -> dict[str, float]:
    names = ("reward", "accuracy", "greedy_accuracy", f"pass@{largest}", f"maj@{largest}")
    found = {name: bootstrap_interval(each[name], level) for name in names if name in each}
    return {f"{name}_{end}": x for name, ends in found.items() for end, x in zip(("low", "high"), ends, strict=True)}
