import jax
import numpy as np
import pytest

from jaxrl_llm.algorithms.off_policy import MODES, importance_correction, mismatch_kl, off_policy_sequence_mask

OLD = np.log(np.array([[0.8, 0.1, 0.5], [0.5, 0.5, 0.9]]))
SAMPLE = np.log(np.array([[0.2, 0.4, 0.5], [0.5, 0.5, 0.1]]))  # ratios 4, 1/4, 1 and 1, 1, 9
MASK = np.array([[1, 1, 1], [1, 1, 0]])


def test_token_modes_by_hand(x64):
    weights, ratio = importance_correction(OLD, SAMPLE, MASK, "token_truncate", 3.0)
    np.testing.assert_allclose(ratio, [[4, 0.25, 1], [1, 1, 1]], rtol=1e-12)
    np.testing.assert_allclose(weights, [[3, 0.25, 1], [1, 1, 1]], rtol=1e-12)
    weights, _ = importance_correction(OLD, SAMPLE, MASK, "token_truncate", 3.0, 0.5)
    np.testing.assert_allclose(weights, [[3, 0.5, 1], [1, 1, 1]], rtol=1e-12)
    weights, _ = importance_correction(OLD, SAMPLE, MASK, "token_mask", 3.0, 0.5)
    np.testing.assert_allclose(weights, [[0, 0, 1], [1, 1, 1]], rtol=1e-12)


def test_sequence_modes_use_the_product_of_the_row(x64):
    old = OLD + np.log(2)
    _, ratio = importance_correction(old, SAMPLE, MASK, "sequence_mask", None)
    np.testing.assert_allclose(ratio, [[8, 8, 8], [4, 4, 4]], rtol=1e-12)
    weights, _ = importance_correction(old, SAMPLE, MASK, "sequence_mask", 5.0)
    np.testing.assert_allclose(weights, [[0, 0, 0], [4, 4, 4]], rtol=1e-12)
    weights, _ = importance_correction(old, SAMPLE, MASK, "sequence_truncate", 5.0)
    np.testing.assert_allclose(weights, [[5, 5, 5], [4, 4, 4]], rtol=1e-12)
    weights, _ = importance_correction(old, SAMPLE, MASK, "sequence_mask", None, 5.0)
    np.testing.assert_allclose(weights, [[8, 8, 8], [0, 0, 0]], rtol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_unscored_tokens_and_padding_count_as_ratio_one(mode):
    sample = SAMPLE.copy()
    sample[0, 0], sample[1, 2] = np.nan, np.nan
    weights, ratio = importance_correction(OLD, sample, MASK, mode, 100.0)
    expected = 0.25 if mode.startswith("sequence") else 1.0
    np.testing.assert_allclose([ratio[0, 0], ratio[1, 2]], [expected, 1.0], rtol=1e-6)
    assert np.isfinite(weights).all()


@pytest.mark.parametrize("mode", MODES)
def test_agreeing_policies_get_weight_one_and_no_gradient(mode):
    weights, _ = importance_correction(OLD, OLD, MASK, mode)
    np.testing.assert_array_equal(weights, 1.0)
    gradient = jax.grad(lambda x: importance_correction(x, SAMPLE, MASK, mode)[0].sum())(OLD)
    np.testing.assert_array_equal(gradient, 0.0)


def test_unknown_mode():
    with pytest.raises(ValueError, match="unknown importance correction 'tis'"):
        importance_correction(OLD, SAMPLE, MASK, "tis")


def test_bad_rows_the_policy_left_are_dropped():
    logps = np.zeros((4, 2))
    drift = np.array([[0.4, 0.8], [0.4, 0.8], [0.1, 0.2], [0.4, np.nan]])  # means 0.6, 0.6, 0.15, 0.2
    keep = off_policy_sequence_mask([-1.0, 1.0, -1.0, -1.0], logps + drift, logps, np.ones((4, 2)), 0.5)
    np.testing.assert_array_equal(keep, [[0, 0], [1, 1], [1, 1], [1, 1]])
    shorter = off_policy_sequence_mask([-1.0], logps[:1] + drift[:1], logps[:1], [[1, 0]], 0.5)
    np.testing.assert_array_equal(shorter, [[1, 1]])


def test_bad_tokens_by_token_advantages():
    keep = off_policy_sequence_mask([[-1.0, 0.0]], [[1.0, 1.0]], [[0.0, 0.0]], [[1, 1]], 0.5)
    np.testing.assert_array_equal(keep, [[0, 1]])


def test_mismatch_kl():
    assert float(mismatch_kl(OLD, OLD, MASK)) == 0
    ratios = np.array([4, 0.25, 1, 1, 1])
    assert float(mismatch_kl(OLD, SAMPLE, MASK)) == pytest.approx(np.mean(ratios - 1 - np.log(ratios)), rel=1e-5)
