"""Statistics of n samples: against all subsets, by hand, and against verl's procedure written out again."""

import itertools
from collections import defaultdict
from functools import partial

import numpy as np
import pytest

from jaxrl_llm.algorithms.sample_statistics import (
    best_of_k,
    bootstrap_interval,
    counts_of_k,
    majority_of_k,
    passes_at_k,
    worst_of_k,
)


def verl_bootstrap(data, size, reduce):
    """The mean over 1000 draws, as verl draws them: NumPy's old generator, seeded anew."""
    generator = np.random.RandomState(42)
    found = []
    for _ in range(1000):
        drawn = [data[i] for i in generator.choice(len(data), size=size, replace=True)]
        found.append(reduce(drawn))
    return np.mean(found)


def verl_vote(data):
    votes = defaultdict(list)
    for answer, value in data:
        votes[answer].append(value)
    counts = {answer: len(values) for answer, values in votes.items()}
    return votes[max(counts, key=partial(dict.get, counts))][0]


def best_vote(answers, values):
    """The value of the most common answer, the mean over answers that share the first place."""
    known = {answer for answer in answers if answer is not None}
    if not known:
        return 0.0
    worth = {a: [v for other, v in zip(answers, values, strict=True) if other == a] for a in known}
    most = max(map(len, worth.values()))
    return np.mean([np.mean(v) for v in worth.values() if len(v) == most])


def test_counts_of_k():
    assert [counts_of_k(n) for n in (1, 2, 3, 6, 8)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 6], [1, 2, 4, 8]]


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_best_and_worst_are_means_over_all_subsets(k):
    values = np.random.default_rng(0).normal(size=(3, 5))
    subsets = list(itertools.combinations(range(5), k))
    for function, extreme in ((best_of_k, np.max), (worst_of_k, np.min)):
        expected = [np.mean([extreme(row[list(subset)]) for subset in subsets]) for row in values]
        np.testing.assert_allclose(function(values, k), expected, rtol=1e-12)


def test_best_of_booleans_is_pass_at_k():
    correct = np.random.default_rng(1).random((20, 6)) < 0.3
    for k in counts_of_k(6):
        np.testing.assert_allclose(best_of_k(correct, k), passes_at_k(correct, k), atol=1e-12)


def test_rows_may_differ_in_length_and_lack_numbers():
    values = [np.array([1.0, 3.0]), np.array([np.nan, 2.0, 4.0]), np.array([np.nan, 5.0])]
    np.testing.assert_allclose(best_of_k(values, 2), [3.0, 4.0, np.nan])
    np.testing.assert_allclose(worst_of_k(values, 1), [2.0, 3.0, 5.0])
    assert np.isnan(passes_at_k([np.array([True])], 2)[0])


def test_majority_by_hand():
    answers, correct = ["7", "3", "3", "7", "3"], np.array([1, 0, 0, 1, 0], bool)
    assert majority_of_k([answers], [correct], 5)[0] == 0.0  # three votes for 3
    assert majority_of_k([["7", "3"]], [np.array([1, 0])], 2)[0] == 0.5  # a tie
    assert majority_of_k([["7", "3", None, None]], [np.array([1, 0, 1, 1])], 4)[0] == 0.5  # None has no vote
    assert majority_of_k([[None, None]], [np.array([1, 1])], 2)[0] == 0.0
    # One answer, graded differently: it is worth the mean.
    assert majority_of_k([["a", "a", "b"]], [np.array([1, 0, 0])], 3)[0] == 0.5


@pytest.mark.parametrize("k", [1, 2, 3, 4, 6])
def test_majority_is_the_mean_over_all_subsets(k):
    random = np.random.default_rng(k)
    for _ in range(10):
        answers = [None if x == 0 else str(x) for x in random.integers(0, 4, size=6)]
        values = random.random(6)
        subsets = itertools.combinations(range(6), k)
        expected = np.mean([best_vote([answers[i] for i in s], values[list(s)]) for s in subsets])
        assert majority_of_k([answers], [values], k)[0] == pytest.approx(expected, abs=1e-12)


def test_majority_of_many_samples_is_near_what_all_subsets_give():
    """20 samples have 184756 subsets of 10: 1000 are drawn. With 12 votes of 20 the chance is a hypergeometric sum."""
    answers, values = ["r"] * 12 + ["w"] * 8, np.array([1.0] * 12 + [0.0] * 8)
    total = sum(_hypergeometric(i) * (1.0 if i > 5 else 0.5 if i == 5 else 0.0) for i in range(2, 11))
    found = majority_of_k([answers], [values], 10)[0]
    assert found == pytest.approx(total, abs=0.04)
    assert found == majority_of_k([answers], [values], 10)[0]


def _hypergeometric(i: int) -> float:
    from math import comb

    return comb(12, i) * comb(8, 10 - i) / comb(20, 10) if 10 - i <= 8 else 0.0


@pytest.mark.parametrize(("n", "k"), [(4, 2), (4, 4), (7, 4)])
def test_verls_estimates_to_the_last_digit(n, k):
    random = np.random.default_rng(n)
    values, answers = random.random(n), [None if x == 0 else str(x) for x in random.integers(0, 4, size=n)]
    assert best_of_k([values], k, "verl")[0] == verl_bootstrap(values, k, np.max)
    assert worst_of_k([values], k, "verl")[0] == verl_bootstrap(values, k, np.min)
    expected = verl_bootstrap(list(zip(answers, values, strict=True)), k, verl_vote)
    assert majority_of_k([answers], [values], k, "verl")[0] == expected
    correct = values > 0.5
    assert passes_at_k([correct], k, "verl")[0] == verl_bootstrap(correct.astype(float), k, np.max)


def test_intervals():
    """Of 0 and 1 the percentile interval is near the normal one; it is repeatable and leaves nan out."""
    values = np.array([0.0, 1.0] * 200)
    low, high = bootstrap_interval(values, 0.95)
    half = 1.96 * 0.5 / np.sqrt(400)
    assert (low, high) == pytest.approx((0.5 - half, 0.5 + half), abs=0.006)
    assert (low, high) == bootstrap_interval(np.append(values, np.nan), 0.95)
    narrow = bootstrap_interval(values, 0.5)
    assert low < narrow[0] < 0.5 < narrow[1] < high
    assert bootstrap_interval([2.0, 2.0], 0.9) == (2.0, 2.0)
    assert np.isnan(bootstrap_interval([np.nan], 0.9)).all()


def test_an_interval_covers_the_truth_as_often_as_it_says():
    random = np.random.default_rng(0)
    draws = (random.random((150, 60)) < 0.6).astype(float)
    found = [bootstrap_interval(row, 0.9, seed=index) for index, row in enumerate(draws)]
    covered = [low <= 0.6 <= high for low, high in found]
    assert 0.82 < np.mean(covered) < 0.97
