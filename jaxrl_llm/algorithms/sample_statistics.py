"""Statistics of n samples per prompt: pass@k, best and worst of k, majority@k; and bootstrap intervals over prompts.

Every statistic gives one number for each prompt; prompts may have different numbers of samples. The result of k samples
is estimated from n in one of two ways:

- "unbiased": the mean over all subsets of k different samples (over 1000 drawn subsets where there are more);
- "verl": the mean over 1000 draws of k of the n samples with replacement, from NumPy's `RandomState(42)`: the numbers
  of verl's `process_validation_metrics`, digit for digit.
"""

import functools
import itertools
import math
from collections.abc import Hashable, Sequence

import numpy as np

DRAWS, VERL_SEED = 1000, 42
INTERVAL_DRAWS = 2000


def counts_of_k(n: int) -> list[int]:
    """The numbers k for which statistics of n samples are given: every power of two up to n, and n."""
    return [k for k in range(1, n + 1) if k & (k - 1) == 0 or k == n]


def pass_at_k(correct: Sequence[np.ndarray] | np.ndarray, k: int) -> float:
    """The probability that one of k completions of a prompt is correct, averaged over prompts `correct [B, n]`.

    Unbiased from n >= k samples of which c are correct: 1 - C(n-c, k) / C(n, k). Source: arXiv 2107.03374.
    """
    return float(passes_at_k(correct, k).mean())


def passes_at_k(correct: Sequence[np.ndarray] | np.ndarray, k: int, estimate: str = "unbiased") -> np.ndarray:
    """The probability `[B]` that one of k completions of each prompt is correct, nan with fewer; see `pass_at_k`."""
    if estimate == "verl":
        return best_of_k([np.asarray(row, np.float64) for row in correct], k, estimate)
    return np.array([_passes(len(row), int(np.sum(row)), k) for row in correct])


@functools.cache
def _passes(n: int, c: int, k: int) -> float:
    return 1 - math.comb(n - c, k) / math.comb(n, k) if n >= k else math.nan


def best_of_k(values: Sequence[np.ndarray], k: int, estimate: str = "unbiased") -> np.ndarray:
    """The expected greatest of k of each prompt's values `[B]`; nan where fewer than k are numbers.

    Unbiased, of n values in ascending order: sum_i C(i-1, k-1) / C(n, k) x_i.
    """
    return np.array([_extreme(_numbers(row), k, estimate, best=True) for row in values])


def worst_of_k(values: Sequence[np.ndarray], k: int, estimate: str = "unbiased") -> np.ndarray:
    """The expected smallest of k of each prompt's values `[B]`; otherwise like `best_of_k`."""
    return np.array([_extreme(_numbers(row), k, estimate, best=False) for row in values])


def success_rates(rewards: np.ndarray, prompts: int, correct_at: float) -> list[float]:
    """The share of each prompt's completions whose first reward is at least `correct_at`, of rewards `[N, F]`; nan
    where it has none."""
    first = rewards[:, 0].reshape(prompts, -1)
    scored = ~np.isnan(first)
    solved = (first >= correct_at).sum(axis=1)
    return [float(x) / int(n) if n else math.nan for x, n in zip(solved, scored.sum(axis=1), strict=True)]


def _numbers(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, np.float64)
    return values[np.isfinite(values)]


def _extreme(values: np.ndarray, k: int, estimate: str, best: bool) -> float:
    n = len(values)
    if n < k:
        return math.nan
    if estimate == "verl":
        drawn = values[_verl_draws(n, k)]
        return float((drawn.max(axis=1) if best else drawn.min(axis=1)).mean())
    ordered = np.sort(values) if best else np.sort(values)[::-1]
    return float(ordered @ np.array([math.comb(i, k - 1) / math.comb(n, k) for i in range(n)]))


def majority_of_k(
    answers: Sequence[Sequence[Hashable]], values: Sequence[np.ndarray], k: int, estimate: str = "unbiased"
) -> np.ndarray:
    """The expected value `[B]` of the most common answer among k completions of each prompt; nan with fewer than k.

    `answers` and `values` hold one entry a completion. None is no answer: it has no vote, and k completions without any
    answer are worth 0. Answers with equally many votes share the win; an answer is worth the mean of its values.

    With "verl" None is an answer like others, the first among equals in the order drawn wins, and it is worth the
    value of its first completion. Source: self-consistency, arXiv 2203.11171.
    """
    rule = _verl_majority if estimate == "verl" else _majority
    pairs = zip(answers, values, strict=True)
    return np.array([rule(list(a), np.asarray(v, np.float64), k) if len(a) >= k else math.nan for a, v in pairs])


def _majority(answers: list[Hashable], values: np.ndarray, k: int) -> float:
    known = [answer for answer in dict.fromkeys(answers) if answer is not None]
    if not known:
        return 0.0
    given = np.array([[answer == other for other in known] for answer in answers])  # [n, answers]
    members = _members(len(answers), k)
    votes = members @ given  # [subsets, answers]
    worth = members @ (given * values[:, None]) / np.maximum(votes, 1)
    wins = (votes == votes.max(axis=1, keepdims=True)) & (votes > 0)
    return float(((wins * worth).sum(axis=1) / np.maximum(wins.sum(axis=1), 1)).mean())


def _verl_majority(answers: list[Hashable], values: np.ndarray, k: int) -> float:
    number = {answer: index for index, answer in enumerate(dict.fromkeys(answers))}
    drawn = _verl_draws(len(answers), k)
    ids = np.array([number[answer] for answer in answers])[drawn]
    votes = (ids[:, :, None] == ids[:, None, :]).sum(axis=2)  # [draws, k]
    first = votes.argmax(axis=1)
    return float(values[drawn[np.arange(len(drawn)), first]].mean())


@functools.lru_cache(maxsize=64)
def _members(n: int, k: int) -> np.ndarray:
    """Subsets of k of n as `[subsets, n]`, 1.0 for each member: all of them, or DRAWS random ones."""
    if math.comb(n, k) <= DRAWS:
        subsets = np.array(list(itertools.combinations(range(n), k)))
    else:
        subsets = np.random.default_rng([n, k]).random((DRAWS, n)).argsort(axis=1)[:, :k]
    members = np.zeros((len(subsets), n))
    np.put_along_axis(members, subsets, 1.0, axis=1)
    return members


@functools.lru_cache(maxsize=64)
def _verl_draws(n: int, k: int) -> np.ndarray:
    generator = np.random.RandomState(VERL_SEED)
    return np.stack([generator.choice(n, size=k, replace=True) for _ in range(DRAWS)])


def bootstrap_interval(values, level: float, seed: int = 0) -> tuple[float, float]:
    """The percentile interval (low, high) of the mean of `values [B]`, one of each prompt, by drawing prompts anew.

    2000 draws of B prompts with replacement, always the same for the same `seed`. Values that are no numbers are left
    out; (nan, nan) where none is. Source: Efron, Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
    """
    kept = _numbers(values)
    if not len(kept):
        return math.nan, math.nan
    generator, at_once = np.random.default_rng(seed), max(1_000_000 // len(kept), 1)
    sizes = [min(at_once, INTERVAL_DRAWS - start) for start in range(0, INTERVAL_DRAWS, at_once)]
    drawn = (generator.integers(len(kept), size=(size, len(kept))) for size in sizes)
    means = np.concatenate([kept[index].mean(axis=1) for index in drawn])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def mean_of(values) -> float:
    """The mean of the values that are numbers; nan where none is."""
    kept = _numbers(values)
    return float(kept.mean()) if len(kept) else math.nan


def std_of(values) -> float:
    """The standard deviation (by n, not n - 1) of the values that are numbers; nan where none is."""
    kept = _numbers(values)
    return float(kept.std()) if len(kept) else math.nan
