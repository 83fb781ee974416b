import jax
import numpy as np
import pytest

from jaxrl_llm.algorithms.off_policy import (
    CRITERIA,
    MODES,
    importance_correction,
    interpolated_logps,
    mean_weight,
    mismatch_kl,
    off_policy_sequence_mask,
    proximal_share,
    rejection_criteria,
    rejection_mask,
)

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
    expected = {"token": 1.0, "sequence": 0.25, "geometric": 0.25 ** (1 / 3)}[mode.split("_")[0]]
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


def test_geometric_modes_use_the_mean_of_the_row(x64):
    old = OLD + np.log(2)
    _, ratio = importance_correction(old, SAMPLE, MASK, "geometric_mask", None)
    np.testing.assert_allclose(ratio, [[2, 2, 2], [2, 2, 2]], rtol=1e-12)  # (8 0.5 2)^(1/3), (2 2)^(1/2)
    weights, _ = importance_correction(OLD, SAMPLE, [[1, 0, 1], [1, 1, 0]], "geometric_mask", 1.5)
    np.testing.assert_allclose(weights, [[0, 0, 0], [1, 1, 1]], rtol=1e-12)  # 4^(1/2) = 2
    weights, _ = importance_correction(OLD, SAMPLE, [[1, 0, 1], [1, 1, 0]], "geometric_truncate", 1.5)
    np.testing.assert_allclose(weights, [[1.5, 1.5, 1.5], [1, 1, 1]], rtol=1e-12)


def test_mean_weight_is_of_tokens_or_of_rows(x64):
    weights = np.array([[3, 0.25, 1], [1, 1, 9.0]])
    assert float(mean_weight(weights, MASK, "token_truncate")) == pytest.approx(6.25 / 5)
    rows = np.array([[4.0, 4, 4], [1, 1, 1], [7, 7, 7]])
    mask = np.array([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    for mode in ("sequence_truncate", "geometric_mask"):
        assert float(mean_weight(rows, mask, mode)) == pytest.approx(2.5)
    assert float(mean_weight(np.zeros((2, 3)), MASK, "token_mask")) == 1


@pytest.mark.parametrize(
    ("names", "bounds", "expected"),
    [
        ("token_k1", "0.5_5", [[0, 1, 1], [1, 1, 1]]),  # sampler over trainer: 1/4, 4, 1
        ("token_k1", "3.9", [[0, 0, 1], [1, 1, 1]]),
        ("token_k2", "0.9", [[0, 0, 1], [1, 1, 1]]),  # log(4)^2 / 2 = 0.961
        ("token_k3", "1", [[0, 1, 1], [1, 1, 1]]),  # 3 - log 4 = 1.61, log 4 - 0.75 = 0.636
        ("seq_sum_k1", "1.1", [[1, 1, 1], [1, 1, 1]]),
        ("seq_mean_k3", "0.74", [[0, 0, 0], [1, 1, 1]]),  # (1.61 + 0.64) / 3 = 0.75
        ("seq_max_k2", "0.97", [[1, 1, 1], [1, 1, 1]]),
        ("token_k3,seq_mean_k3", "1,0.74", [[0, 0, 0], [1, 1, 1]]),
    ],
)
def test_rejection_by_hand(x64, names, bounds, expected):
    keep = rejection_mask(OLD, SAMPLE, MASK, rejection_criteria(names, bounds))
    np.testing.assert_array_equal(keep, expected)


@pytest.mark.parametrize("gate", ["kl", "tv"])
@pytest.mark.parametrize("level", ["token", "seq_mean"])
def test_rejection_keeps_what_openrlhf_keeps(x64, level, gate):
    """PolicyLoss of OpenRLHF 0.11.2 with is_correction_gating binary_kl and tv, in numpy."""
    rng = np.random.default_rng(1)
    mask = np.arange(9) < rng.integers(1, 10, (40, 1))
    old = np.log(rng.uniform(0.0, 1, (40, 9)))
    sample = np.minimum(old + rng.normal(0, 0.3, old.shape), 0.0)
    old[0, 0], sample[0, 0] = -40.0, 0.0  # both ends, where logs are bounded
    p, q = (np.clip(np.exp(scores), 1e-6, 1 - 1e-6) for scores in (sample, old))
    value = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)) if gate == "kl" else np.abs(p - q)
    if level == "seq_mean":
        value = (value * mask).sum(1, keepdims=True) / mask.sum(1, keepdims=True)
    keep = rejection_mask(old, sample, mask, rejection_criteria(f"{level}_{gate}", "0.03"))
    np.testing.assert_array_equal(keep, np.where(mask, value <= 0.03, 1))
    assert 0 < (np.asarray(keep)[mask] == 0).mean() < 1 and not np.asarray(keep)[0, 0]


@pytest.mark.parametrize("name", [name for name in CRITERIA if name[-2:] in ("k1", "k2", "k3")])
def test_rejection_keeps_what_verl_keeps(x64, name):
    rng = np.random.default_rng(0)
    mask = np.arange(9) < rng.integers(1, 10, (40, 1))
    old = np.log(rng.uniform(0.1, 1, (40, 9)))
    sample = old + rng.normal(0, 0.2, old.shape) * mask
    low, high = {"token": (0.9, 0.05), "seq_sum": (0.8, 0.1), "seq_mean": (0.95, 0.02), "seq_max": (0.9, 0.05)}[
        name[:-3]
    ]
    # verl 0.9, compute_rollout_rejection_mask, in numpy
    x = old - sample
    token = {"k1": -x, "k2": x**2 / 2, "k3": np.exp(x) - 1 - x}[name[-2:]]
    total = (token * mask).sum(1, keepdims=True)
    value = {
        "token": token, "seq_sum": total, "seq_mean": total / mask.sum(1, keepdims=True),
        "seq_max": np.where(mask, token, -np.inf).max(1, keepdims=True),
    }[name[:-3]]  # fmt: skip
    inside = (value >= np.log(low)) & (value <= -np.log(low)) if name.endswith("k1") else value <= high
    bounds = f"{low}_{1 / low}" if name.endswith("k1") else str(high)
    keep = rejection_mask(old, sample, mask, rejection_criteria(name, bounds))
    np.testing.assert_array_equal(keep, np.where(mask, inside, 1))
    assert 0 < (np.asarray(keep)[mask] == 0).mean() < 1


def test_rejection_bounds_are_read_and_unscored_tokens_kept():
    read = rejection_criteria("token_k2, seq_mean_k1", "0.5,0.999_1.001")
    assert [(c.name, c.low, c.high) for c in read] == [
        ("token_k2", 0.0, 0.5), ("seq_mean_k1", np.log(0.999), np.log(1.001)),
    ]  # fmt: skip
    assert rejection_criteria("token_k1", "4")[0].low == -rejection_criteria("token_k1", "4")[0].high
    assert len(rejection_criteria("token_k2,token_k3", "0.5")) == 2
    keep = rejection_mask(OLD, np.full_like(SAMPLE, np.nan), MASK, read)
    np.testing.assert_array_equal(keep, 1.0)


@pytest.mark.parametrize(
    ("names", "bounds", "message"),
    [
        ("token_k4", "1", "'token_k4' is unknown"),
        ("token_k2,token_k2", "1", "named twice"),
        ("token_k2", "0.5_1", "takes one positive number"),
        ("token_k1", "0.5_x", "takes low_high"),
        ("token_k1", "2_0.5", "the first number is the smaller"),
        ("token_k3", "-1", "takes one positive number"),
        ("token_k1,token_k2,token_k3", "1,2", "2 bounds for 3 criteria"),
    ],
)
def test_wrong_rejection_says_so(names, bounds, message):
    with pytest.raises(ValueError, match=message):
        rejection_criteria(names, bounds)


def test_interpolated_log_probs_by_hand(x64):
    """Sampled 0, 1 and 3 updates before the step: 0, 1/2 and 3/4 of the way to the policy that is updated."""
    share = proximal_share(np.array([[7, 6, 4]]), 7)
    np.testing.assert_allclose(share, [[0.0, 0.5, 0.75]], rtol=1e-6)
    found = interpolated_logps([[-1.0, -2.0, -3.0]], [[-5.0, -1.0, -1.0]], share)
    np.testing.assert_allclose(found, [[-1.0, -1.5, -1.5]], rtol=1e-6)


def test_interpolation_is_that_of_areal(x64):
    """AReaL 1.0, compute_prox_logp_approximations, in numpy; its current version is ours of after the step."""
    rng = np.random.default_rng(0)
    old, policy = rng.normal(-2, 1, (2, 4, 9))
    versions = rng.integers(-1, 9, (4, 9))
    v_theta, v_proximal = 9, 8
    gap, difference = v_proximal - versions, v_theta - versions
    alpha = np.where((difference > 0) & (versions >= 0), gap / difference, 0.0).clip(0, 1)
    found = interpolated_logps(old, policy, proximal_share(versions, v_proximal))
    np.testing.assert_allclose(found, old + alpha * (policy - old), rtol=1e-6)
    assert (alpha[versions < 0] == 0).all() and (versions < 0).any()


def test_interpolation_has_no_gradient_and_stays_between():
    share = proximal_share(np.arange(-1, 6), 3)  # 4 and 5 are of policies that are not there yet
    np.testing.assert_array_equal(share[5:], 0.0)
    assert ((share >= 0) & (share < 1)).all()
    gradient = jax.grad(lambda x: interpolated_logps(OLD, x, 0.5).sum())(SAMPLE)
    np.testing.assert_array_equal(gradient, 0.0)
    unscored = interpolated_logps(np.full_like(OLD, np.nan), OLD, 0.5)
    np.testing.assert_allclose(unscored, OLD, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_far_apart_log_probs_have_finite_ratios(mode):
    """float32 has no exp(100), nor exp(50) three times over: a metric of one such token would be that of no other."""
    sample = np.array([[-101.0, -2.0, -1.0], [-52.0, -51.0, -51.0]], np.float32)
    old = np.full((2, 3), -1.0, np.float32)
    weights, ratio = importance_correction(old, sample, MASK, mode, 3.0)
    far = {"token": (0, 0), "sequence": (1, 1), "geometric": (1, 1)}[mode.split("_")[0]]
    np.testing.assert_allclose(ratio[far], np.exp(20.0), rtol=1e-6)
    assert weights[far] == (3.0 if mode.endswith("truncate") else 0.0)
    assert np.isfinite(ratio).all()
    np.testing.assert_allclose(
        mismatch_kl(old, sample, MASK), (3 * np.expm1(20.0) - 60 + np.expm1(1.0) - 1) / 5, rtol=1e-5
    )
