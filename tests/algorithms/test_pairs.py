"""Pairs of scored completions, by hand and by TRL's choice of the better of two."""

import numpy as np
import pytest

from jaxrl_llm.algorithms.pairs import ranked_pairs

NONE = np.nan


def test_best_and_worst_then_second_best_and_second_worst():
    order, used = ranked_pairs(np.array([2.0, 5.0, 1.0, 3.0, 0.0, 0.0, 4.0, 4.0]), 4, pairs=2)
    np.testing.assert_array_equal(order, [1, 2, 3, 0, 6, 5, 7, 4])
    assert used.all()
    order, used = ranked_pairs(np.array([2.0, 5.0, 1.0, 3.0, 0.0, 0.0, 4.0, 4.0]), 4)
    np.testing.assert_array_equal(used, [True, False, True, False])
    np.testing.assert_array_equal(np.asarray(order).reshape(-1, 2)[np.asarray(used)], [[1, 2], [6, 5]])


def test_equal_scores_prefer_nothing_and_rows_without_one_are_in_no_pair():
    scores = [1.0, 1.0, 1.0, 1.0, NONE, 3.0, NONE, 2.0, NONE, NONE, 7.0, NONE, 2.0, NONE, 2.0, 5.0]
    order, used = ranked_pairs(np.array(scores), 4, pairs=2)
    np.testing.assert_array_equal(used, [False, False, True, False, False, False, True, False])
    pairs = np.asarray(order).reshape(-1, 2)
    np.testing.assert_array_equal(pairs[[2, 6]], [[5, 7], [15, 14]])
    np.testing.assert_array_equal(np.asarray(order).reshape(4, 4) // 4, np.arange(4)[:, None].repeat(4, axis=1))


@pytest.mark.parametrize("seed", range(3))
def test_of_two_as_trl(seed):
    """Formula of TRL 1.16 (OnlineDPOTrainer.training_step), whose rows are all first completions, then all second."""
    scores = np.random.default_rng(seed).integers(0, 3, (16, 2)).astype(np.float32)
    first, second = scores.T
    chosen = np.arange(16) + ~(first >= second) * 16
    rejected = np.arange(16) + (first >= second) * 16
    order, used = ranked_pairs(scores.reshape(-1), 2)
    ours = np.asarray(order).reshape(-1, 2)
    np.testing.assert_array_equal(ours % 2 * 16 + ours // 2, np.stack([chosen, rejected], axis=1))
    np.testing.assert_array_equal(used, first != second)


def test_groups_of_odd_size_are_refused():
    with pytest.raises(ValueError, match="groups of 3 completions do not form pairs"):
        ranked_pairs(np.zeros(6), 3)
