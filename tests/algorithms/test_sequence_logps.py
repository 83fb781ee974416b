import jax
import numpy as np
import pytest

from jaxrl_llm.algorithms.sequence_logps import length_desensitized_logps, sequence_logps, split_pairs, wpo_weights

LOGPS = -np.arange(1.0, 11.0).reshape(2, 5)  # -1..-5 and -6..-10
MASK = np.array([[0, 1, 1, 0, 1], [0, 1, 1, 0, 0]])


def test_sums_and_lengths():
    sums, lengths = sequence_logps(np.where(MASK, LOGPS, np.nan), MASK)
    np.testing.assert_array_equal(sums, [-10, -15])
    np.testing.assert_array_equal(lengths, [3, 2])


def test_split_pairs():
    chosen, rejected = split_pairs(np.arange(6))
    np.testing.assert_array_equal(chosen, [0, 2, 4])
    np.testing.assert_array_equal(rejected, [1, 3, 5])
    with pytest.raises(ValueError, match="3 rows do not form pairs"):
        split_pairs(np.arange(3))


def test_tokens_past_the_shorter_completion_weigh_less():
    # the chosen row has one token beyond the two of the rejected row
    np.testing.assert_allclose(length_desensitized_logps(LOGPS, MASK, 0.5), [-2 - 3 - 0.5 * 5, -15])
    np.testing.assert_allclose(length_desensitized_logps(LOGPS, MASK, 1.0), [-10, -15])
    np.testing.assert_allclose(length_desensitized_logps(LOGPS, MASK, 0.0), [-5, -15])
    junk = np.where(MASK, LOGPS, np.nan)
    np.testing.assert_allclose(length_desensitized_logps(junk, MASK, 0.5), [-7.5, -15])


def test_wpo_weights_by_hand():
    squares = np.zeros_like(LOGPS)
    expected = np.exp((-2 - 3 - 5) / 3) * np.exp((-7 - 8) / 2)
    np.testing.assert_allclose(wpo_weights(LOGPS, squares, MASK), [expected], rtol=1e-6)
    np.testing.assert_allclose(wpo_weights(LOGPS, squares - 0.5, MASK), [expected * np.e], rtol=1e-6)
    gradient = jax.grad(lambda x: wpo_weights(x, squares, MASK).sum())(LOGPS)
    np.testing.assert_array_equal(gradient, 0.0)


def test_pairs_with_a_gold_completion_behind_them():
    draw = np.random.default_rng(0)
    logps, mask = -draw.exponential(1.0, (6, 5)), np.arange(5) < np.array([5, 2, 4, 3, 4, 1])[:, None]
    pairs = [0, 1, 3, 4]
    np.testing.assert_array_equal(split_pairs(np.arange(6), 3), [[0, 3], [1, 4]])
    for ld_alpha in (None, 0.3):
        sums, lengths = sequence_logps(logps, mask, ld_alpha, 3)
        expected = sequence_logps(logps[pairs], mask[pairs], ld_alpha)
        np.testing.assert_allclose((sums[np.array(pairs)], lengths[np.array(pairs)]), expected, rtol=1e-6)
    squares = -draw.exponential(1.0, (6, 5))
    expected = wpo_weights(logps[pairs], squares[pairs], mask[pairs])
    np.testing.assert_allclose(wpo_weights(logps, squares, mask, 3), expected, rtol=1e-6)
    with pytest.raises(ValueError, match="4 rows do not form pairs; a pair is 3 adjacent rows"):
        split_pairs(np.arange(4), 3)
