"""The tokens of high entropy. Those that losses choose are tested with them, in test_policy_losses.py."""

import numpy as np
import pytest

from jaxrl_llm.algorithms.token_selection import top_entropy_mask


def test_top_fifth_by_hand():
    entropy = np.arange(12.0).reshape(3, 4)[:, ::-1]
    mask = np.ones((3, 4))
    mask[0, 3] = 0  # leaves out the 0
    # eleven values 1..11; the 0.8 quantile is 9
    np.testing.assert_array_equal(top_entropy_mask(entropy, mask, 0.2), entropy >= 9)


@pytest.mark.parametrize("quantile", [0.05, 0.2, 0.5, 0.77, 1.0])
def test_the_threshold_is_numpys_quantile(quantile):
    rng = np.random.default_rng(0)
    entropy = rng.exponential(1.0, (7, 13)).astype(np.float32)
    mask = rng.random((7, 13)) < 0.6
    expected = mask & (entropy >= np.quantile(entropy[mask], 1 - quantile))
    np.testing.assert_array_equal(top_entropy_mask(entropy, mask, quantile), expected)
    if quantile == 1.0:
        np.testing.assert_array_equal(expected, mask)


def test_ties_and_empty_masks():
    np.testing.assert_array_equal(top_entropy_mask([[0.3, 0.3, 0.3]], [[1, 1, 0]], 0.2), [[True, True, False]])
    np.testing.assert_array_equal(top_entropy_mask([[0.3, 0.1]], [[0, 0]], 0.2), [[False, False]])


def test_padding_with_high_entropy_does_not_move_the_threshold():
    mask = [[1, 1, 0]]
    for padding in (0.0, 99.0, np.nan):
        np.testing.assert_array_equal(top_entropy_mask([[0.1, 0.2, padding]], mask, 0.5), [[False, True, False]])
