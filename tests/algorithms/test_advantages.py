import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms import advantages

# The functions under test, compiled as a training step compiles them.
combine_rewards = jax.jit(advantages.combine_rewards)
discounted_returns = jax.jit(advantages.discounted_returns)
flat_groups = jax.jit(advantages.flat_groups, static_argnames="group_size")
frac_zero_std = jax.jit(advantages.frac_zero_std, static_argnames="group_size")
gae = jax.jit(advantages.gae)
gdpo_advantages = jax.jit(advantages.gdpo_advantages, static_argnames=("group_size", "batch_normalize"))
gpg_advantages = jax.jit(advantages.gpg_advantages, static_argnames="group_size")
group_advantages = jax.jit(advantages.group_advantages, static_argnames=("group_size", "scale"))
missing_eos_penalty = jax.jit(advantages.missing_eos_penalty)
opo_advantages = jax.jit(advantages.opo_advantages, static_argnames="group_size")
otb_advantages = jax.jit(advantages.otb_advantages, static_argnames="group_size")
passk_advantages = jax.jit(advantages.passk_advantages, static_argnames=("group_size", "normalize"))
reinforce_plus_plus_advantages = jax.jit(advantages.reinforce_plus_plus_advantages)
reinforce_plus_plus_baseline_advantages = jax.jit(
    advantages.reinforce_plus_plus_baseline_advantages, static_argnames="group_size"
)
remax_advantages = jax.jit(advantages.remax_advantages)
optimal_values = jax.jit(advantages.optimal_values, static_argnums=1)
a2po_advantages = jax.jit(advantages.a2po_advantages, static_argnames="beta1")
rloo_advantages = jax.jit(advantages.rloo_advantages, static_argnames=("group_size", "normalize"))
soft_overlong_punishment = jax.jit(advantages.soft_overlong_punishment, static_argnames=("max_length", "cache"))
token_rewards = jax.jit(advantages.token_rewards)
unscorable_rows = jax.jit(advantages.unscorable_rows)

NAN = np.nan
# two prompts of four completions with two rewards each
REWARDS = np.array([[0, 3], [1, 2], [2, 1], [3, 0], [1, 1], [1, 1], [0, 1], [1, 0]], float)
SCORES = REWARDS @ [1.0, 2.0]


def group_loop(scores, size, scale="group", eps=1e-4):
    """Group advantages row by row in plain Python."""
    scores, result = np.asarray(scores, float), np.zeros(len(scores))
    everything = scores[~np.isnan(scores)]
    for start in range(0, len(scores), size):
        group = scores[start : start + size]
        valid = group[~np.isnan(group)]
        for i, score in enumerate(group):
            if np.isnan(score) or len(valid) < 2:
                continue
            divisor = {"group": valid.std(ddof=1) + eps, "batch": everything.std(ddof=1) + eps, "none": 1.0}[scale]
            result[start + i] = (score - valid.mean()) / divisor
    return result


# -- rewards -----------------------------------------------------------------------------------------------------------


def test_combine_rewards_is_a_weighted_sum_of_what_applies():
    rewards = [[1.0, 2.0], [NAN, 3.0], [NAN, NAN]]
    np.testing.assert_array_equal(combine_rewards(rewards, [0.5, 10.0]), [20.5, 30.0, NAN])
    np.testing.assert_array_equal(unscorable_rows(rewards), [False, False, True])


def test_a_zero_weight_does_not_hide_an_unscorable_row():
    np.testing.assert_array_equal(combine_rewards([[NAN, 3.0], [NAN, NAN]], [1.0, 0.0]), [0.0, NAN])


def test_combine_rewards_names_a_wrong_number_of_weights():
    with pytest.raises(ValueError, match="reward weights for 2 reward functions"):
        combine_rewards(np.zeros((4, 2)), [1.0])


def test_fractional_rewards_survive_integer_arrays():
    # a buffer of token ids' type must not truncate 0.7 to 0 or 1.9 to 1
    mask = np.ones((2, 3), np.int32)
    rewards = token_rewards(np.array([0.7, 1.9]), mask)
    np.testing.assert_allclose(rewards, [[0, 0, 0.7], [0, 0, 1.9]], rtol=1e-6)
    assert rewards.dtype == jnp.float32
    assert token_rewards(np.array([1, 0], np.int32), mask).dtype == jnp.float32
    np.testing.assert_allclose(token_rewards(jnp.array([0.7], jnp.bfloat16), mask[:1])[0, 2], 0.7, rtol=4e-3)


def test_the_score_is_on_the_last_masked_token():
    mask = [[1, 1, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0], [0, 0, 0, 0]]
    expected = [[0, 0, 5, 0], [0, 0, 0, 6], [0, 0, 7, 0], [0, 0, 0, 0]]
    np.testing.assert_array_equal(token_rewards([5.0, 6.0, 7.0, NAN], mask), expected)


def test_the_kl_penalty_is_on_every_masked_token_and_nowhere_else():
    kl = np.array([[0.1, 9.0, 0.3, 9.0]])
    rewards = token_rewards([1.0], [[1, 0, 1, 0]], kl, beta=0.5)
    np.testing.assert_allclose(rewards, [[-0.05, 0, 1 - 0.15, 0]], rtol=1e-6)


def test_soft_overlong_by_hand():
    np.testing.assert_allclose(
        soft_overlong_punishment(np.array([1, 80, 90, 100, 101]), 100, 20), [0, 0, -0.5, -1, -1], atol=1e-7
    )
    np.testing.assert_array_equal(soft_overlong_punishment(np.array([100, 101]), 100, 0), [0, -1])
    with pytest.raises(ValueError, match="between 0 and max_length 10; got 11"):
        soft_overlong_punishment(np.array([1]), 10, 11)


def test_missing_eos_penalty():
    np.testing.assert_array_equal(missing_eos_penalty([1.0, 1.0], [True, False], 0.25), [1.0, 0.75])


# -- group advantages --------------------------------------------------------------------------------------------------


def test_group_advantages_by_hand(x64):
    # mean 1, unbiased std sqrt((1 + 0 + 1) / 2) = 1
    np.testing.assert_allclose(group_advantages([0.0, 1, 2], 3), np.array([-1, 0, 1]) / 1.0001, rtol=1e-12)
    np.testing.assert_allclose(group_advantages([0.0, 1, 2], 3, eps=1e-6), np.array([-1, 0, 1]) / 1.000001, rtol=1e-12)
    np.testing.assert_allclose(group_advantages([0.0, 1, 2], 3, "none"), [-1, 0, 1], rtol=1e-12)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_advantages_equal_a_plain_loop(x64, scale):
    np.testing.assert_allclose(group_advantages(SCORES, 4, scale), group_loop(SCORES, 4, scale), rtol=1e-10, atol=1e-12)
    rng = np.random.default_rng(0)
    scores = rng.normal(size=24)
    scores[rng.random(24) < 0.3] = NAN
    np.testing.assert_allclose(group_advantages(scores, 4, scale), group_loop(scores, 4, scale), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("eps", [1e-6, 0.3])
def test_leave_one_out_equals_a_plain_loop(x64, eps):
    """As NeMo-RL: mean and unbiased standard deviation of the others, without division where that is 0."""
    rng = np.random.default_rng(3)
    scores = rng.normal(size=(5, 4)).round(1)
    scores[0] = [0.1, 0.1, 0.7, 0.1]  # before the third the others are equal
    scores[1, :2] = np.nan  # two are left, each with one other
    scores[2, 1:] = np.nan  # one is left
    expected = np.zeros_like(scores)
    for b, i in np.ndindex(scores.shape):
        others = np.delete(scores[b], i)
        others = others[~np.isnan(others)]
        if np.isnan(scores[b, i]) or not len(others):
            continue
        std = np.std(others, ddof=1) if len(others) > 1 and np.ptp(others) else 0.0
        expected[b, i] = (scores[b, i] - others.mean()) / (std + eps if std else 1.0)
    found = advantages.group_advantages(scores.reshape(-1), 4, eps=eps, leave_one_out=True)
    np.testing.assert_allclose(found.reshape(5, 4), expected, rtol=1e-9, atol=1e-12)
    both = np.stack([scores.reshape(-1), rng.normal(size=20)], 1)
    found = advantages.gdpo_advantages(both, [2.0, 0.0], 4, batch_normalize=False, eps=eps, leave_one_out=True)
    np.testing.assert_allclose(found.reshape(5, 4), 2 * expected, rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match="rloo has the same baseline"):
        advantages.group_advantages(scores.reshape(-1), 4, "none", leave_one_out=True)


def test_leave_one_out_of_equal_others_in_float32():
    """The rounding of their mean is no standard deviation: as one it would make the advantage of 0.6 one of 1e5."""
    scores = np.array([0.1, 0.1, 0.7, 0.1, 0.1, 0.1], np.float32)
    found = advantages.group_advantages(scores, 6, eps=1e-6, leave_one_out=True)
    np.testing.assert_allclose(found[2], 0.6, rtol=1e-6)
    assert not advantages.group_advantages(np.full(6, 0.1, np.float32), 6, leave_one_out=True).any()


def test_raw_rewards_are_the_advantages():
    np.testing.assert_array_equal(advantages.raw_reward_advantages([0.5, np.nan, -1.0]), [0.5, 0.0, -1.0])


def test_batch_scale_still_subtracts_the_group_mean(x64):
    result = np.asarray(group_advantages([0.0, 1, 10, 11], 2, "batch"))
    np.testing.assert_allclose(result.reshape(2, 2).sum(1), 0, atol=1e-12)
    np.testing.assert_allclose(result[1], 0.5 / (np.std([0, 1, 10, 11], ddof=1) + 1e-4), rtol=1e-12)


def test_single_reward_grpo_and_gdpo_differ_in_scale(x64):
    one = np.array([0, 1, 0, 1, 1, 1, 1, 1.0])
    expected = np.array([-1, 1, -1, 1, 0, 0, 0, 0])
    np.testing.assert_allclose(group_advantages(one, 4), 0.865875 * expected, atol=1e-6)
    np.testing.assert_allclose(gdpo_advantages(one[:, None], [1.0], 4), 1.322674 * expected, atol=1e-6)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.7, 1e4 + 0.1])
@pytest.mark.parametrize("size", [3, 7, 8])
def test_a_flat_group_gives_exact_zeros_in_float32(value, size):
    scores = np.full(size, value, np.float32)
    for result in (group_advantages(scores, size), rloo_advantages(scores, size)):
        np.testing.assert_array_equal(result, 0.0)


def test_integer_rewards_are_not_truncated_anywhere():
    scores = np.array([0, 1, 1, 1], np.int32)
    for function in (group_advantages, rloo_advantages, opo_like, passk_advantages):
        result = function(scores, 4)
        np.testing.assert_allclose(result, function(scores.astype(np.float32), 4))
        assert result.dtype == jnp.float32


def opo_like(scores, size):
    return opo_advantages(scores, np.ones(len(scores), np.int32), size)


def test_unscorable_rows_get_zero_and_do_not_move_the_baseline(x64):
    scores = [0.0, 1.0, 2.0, NAN, NAN, NAN, NAN, NAN, 5.0, NAN, NAN, NAN]
    expected = np.zeros(12)
    expected[:3] = np.array([-1, 0, 1]) / 1.0001
    np.testing.assert_allclose(group_advantages(scores, 4), expected, rtol=1e-12)
    assert np.isfinite(rloo_advantages(scores, 4, normalize=True)).all()
    np.testing.assert_allclose(rloo_advantages(scores, 4)[:4], [-1.5, 0, 1.5, 0], rtol=1e-12)


def test_a_batch_where_no_reward_applies_is_all_zeros():
    rewards = np.full((8, 2), NAN)
    scores = combine_rewards(rewards, [1.0, 1.0])
    for result in (
        group_advantages(scores, 4),
        group_advantages(scores, 4, "batch"),
        rloo_advantages(scores, 4, normalize=True),
        gdpo_advantages(rewards, [1.0, 1.0], 4),
        passk_advantages(scores, 4),
        opo_advantages(scores, np.ones(8), 4),
        remax_advantages(scores, np.zeros(2)),
        reinforce_plus_plus_baseline_advantages(scores, np.ones((8, 3)), 4),
    ):
        np.testing.assert_array_equal(result, 0.0)


@pytest.mark.parametrize("function", [group_advantages, rloo_advantages])
def test_a_group_of_one_has_no_baseline_and_gets_zero(function):
    np.testing.assert_array_equal(function([3.0, 5.0], 1), 0.0)


def test_order_within_groups_and_of_groups_does_not_matter(x64):
    rng = np.random.default_rng(3)
    rewards = rng.normal(size=(24, 2))
    inner = np.concatenate([start + rng.permutation(4) for start in range(0, 24, 4)])
    outer = (rng.permutation(6)[:, None] * 4 + np.arange(4)).reshape(-1)
    lengths = rng.integers(1, 9, 24)
    functions = (
        lambda r, n: group_advantages(r.sum(1), 4),
        lambda r, n: group_advantages(r.sum(1), 4, "batch"),
        lambda r, n: rloo_advantages(r.sum(1), 4, normalize=True),
        lambda r, n: gdpo_advantages(r, [1.0, 2.0], 4),
        lambda r, n: passk_advantages(r.sum(1), 4),
        lambda r, n: opo_advantages(r.sum(1), n, 4),
    )
    for function in functions:
        whole = np.asarray(function(rewards, lengths))
        for order in (inner, outer):
            np.testing.assert_allclose(function(rewards[order], lengths[order]), whole[order], rtol=1e-9, atol=1e-12)


def test_rows_that_do_not_form_groups():
    with pytest.raises(ValueError, match="7 rows do not divide into groups of 4"):
        group_advantages(np.zeros(7), 4)


def test_unknown_scale():
    with pytest.raises(ValueError, match="unknown advantage scale 'std'; choose one of group, batch, none"):
        group_advantages(np.zeros(4), 4, "std")


# -- gdpo --------------------------------------------------------------------------------------------------------------


def gdpo_loop(rewards, weights, size, batch_normalize=True):
    columns = np.stack([group_loop(column, size) for column in rewards.T], axis=1)
    missing = np.isnan(rewards)
    sums = np.where(missing, 0, columns) @ np.asarray(weights)
    valid = ~missing.all(1)
    if batch_normalize:
        sums = (sums - sums[valid].mean()) / (sums[valid].std(ddof=1) + 1e-4)
    return np.where(valid, sums, 0.0)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 2.0)])
@pytest.mark.parametrize("batch_normalize", [True, False])
def test_gdpo_equals_a_plain_loop(x64, weights, batch_normalize):
    expected = gdpo_loop(REWARDS, weights, 4, batch_normalize)
    np.testing.assert_allclose(gdpo_advantages(REWARDS, weights, 4, batch_normalize), expected, rtol=1e-9, atol=1e-10)


def test_mirrored_rewards_cancel_under_equal_weights_and_separate_under_others(x64):
    mirrored = REWARDS[:4]
    np.testing.assert_allclose(gdpo_advantages(mirrored, [1.0, 1.0], 4), 0, atol=1e-9)
    np.testing.assert_array_equal(group_advantages(mirrored.sum(1), 4), 0)
    assert (np.diff(gdpo_advantages(mirrored, [1.0, 2.0], 4)) < -0.1).all()
    assert (np.diff(group_advantages(mirrored @ [1.0, 2.0], 4)) < -0.1).all()


def test_gdpo_survives_rewards_that_apply_to_part_of_the_rows(x64):
    rewards = REWARDS.copy()
    rewards[:4, 0] = NAN  # a whole group without the first reward
    rewards[5, 1] = NAN
    rewards[7] = NAN
    result = gdpo_advantages(rewards, [1.0, 2.0], 4)
    np.testing.assert_allclose(result, gdpo_loop(rewards, [1.0, 2.0], 4), rtol=1e-9, atol=1e-10)
    assert np.isfinite(result).all()
    assert float(result[7]) == 0


# -- other outcome advantages ------------------------------------------------------------------------------------------


def test_rloo_subtracts_the_mean_of_the_others(x64):
    others = np.array([np.delete(SCORES[i // 4 * 4 : i // 4 * 4 + 4], i % 4).mean() for i in range(8)])
    np.testing.assert_allclose(rloo_advantages(SCORES, 4), SCORES - others, rtol=1e-12)
    grouped = SCORES.reshape(2, 4)
    identity = 4 / 3 * (grouped - grouped.mean(1, keepdims=True))
    np.testing.assert_allclose(rloo_advantages(SCORES, 4), identity.reshape(-1), rtol=1e-12)
    normalized = (SCORES - others - (SCORES - others).mean()) / ((SCORES - others).std(ddof=1) + 1e-4)
    np.testing.assert_allclose(rloo_advantages(SCORES, 4, normalize=True), normalized, rtol=1e-10)


def test_passk_rewards_only_the_best(x64):
    scores = [1.0, 4.0, 2.0, 2.0, 3.0, 3.0, NAN, NAN, 5.0]
    np.testing.assert_allclose(passk_advantages(scores, 3, normalize=False), [0, 2, 0, 0, 0, 0, 0, 0, 0])
    std = np.std([1, 4, 2], ddof=1)
    np.testing.assert_allclose(passk_advantages(scores, 3)[1], 2 / (std + 1e-6), rtol=1e-12)
    with pytest.raises(ValueError, match="got group_size 1"):
        passk_advantages(scores, 1)


def test_opo_weighs_the_baseline_by_length(x64):
    result = opo_advantages([0.0, 1.0, 4.0, NAN], [1, 3, 10, 50], 2)
    np.testing.assert_allclose(result, [-0.75, 0.25, 0, 0], rtol=1e-12, atol=1e-12)


def test_gpg_weighs_by_the_scores_that_are_not_zero(x64):
    scores = np.array([1.0, 0.0, 0.0, 0.0, 2.0, 2.0])
    expected = 6 / 3 * np.array([2 / 3, -1 / 3, -1 / 3, -4 / 3, 2 / 3, 2 / 3])
    np.testing.assert_allclose(gpg_advantages(scores, 3), expected)
    np.testing.assert_allclose(gpg_advantages(scores, 3, f_norm=4.0), expected / 4)
    np.testing.assert_allclose(gpg_advantages(np.zeros(2), 2), 0)
    # 4 scores apply, 3 of them are not 0.
    some = np.array([1.0, NAN, 3.0, 1.0, 0.0, NAN])
    np.testing.assert_allclose(gpg_advantages(some, 3), 4 / 3 * np.array([-1, 0, 1, 0.5, -0.5, 0]))


def test_remax_subtracts_the_greedy_score_of_the_prompt():
    np.testing.assert_allclose(remax_advantages([1.0, 2.0, 3.0, NAN], [1.0, 5.0]), [0, 1, -2, 0])
    with pytest.raises(ValueError, match="3 scores do not divide among 2 greedy"):
        remax_advantages([1.0, 2.0, 3.0], [1.0, 5.0])


def test_optimal_values_by_hand(x64):
    """A mean of exponentials, in which scores that are not there do not count."""
    scores = [[0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0], [2.0, NAN, -1.0, NAN], [NAN, NAN, NAN, NAN]]
    expected = [0.5 * np.log((1 + np.exp(2)) / 2), 0.0, 0.5 * np.log((np.exp(4) + np.exp(-2)) / 2), NAN]
    np.testing.assert_allclose(optimal_values(scores, 0.5), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(optimal_values([[3.5], [-2.0]], 0.1), [3.5, -2.0], rtol=1e-12)  # one score is the value
    with pytest.raises(ValueError, match="above 0; got 0"):
        optimal_values(scores, 0.0)


def test_optimal_values_lie_between_the_mean_and_the_largest_score(x64):
    scores = np.random.default_rng(0).normal(size=(5, 6))
    values = np.array([optimal_values(scores, beta) for beta in (1e-3, 0.1, 1.0, 1e6)])
    np.testing.assert_allclose(values[0], scores.max(1), atol=2e-3)
    np.testing.assert_allclose(values[-1], scores.mean(1), atol=1e-5)
    assert (np.diff(values, axis=0) < 0).all()
    assert np.isfinite(optimal_values(1e4 * scores, 0.01)).all(), "the exponentials overflow"
    np.testing.assert_allclose(optimal_values(scores[:, ::-1], 0.1), values[1], rtol=1e-12)


def test_a2po_subtracts_the_optimal_value_of_the_prompt():
    scores, of_reference = [1.0, 0.0, NAN, 1.0], [[0.0, 1.0], [0.0, 1.0], [1.0, 1.0], [NAN, NAN]]
    value = 0.5 * np.log((1 + np.exp(2)) / 2)
    np.testing.assert_allclose(a2po_advantages(scores, of_reference), [1 - value, -value, 0.0, 0.0], atol=1e-6)
    np.testing.assert_allclose(a2po_advantages(scores, of_reference, beta1=1e6)[:2], [0.5, -0.5], atol=0.1)


def test_flat_groups_and_their_fraction():
    scores = [0.1, 0.1, 0.1, 0.2, NAN, 0.3, NAN, NAN]
    np.testing.assert_array_equal(flat_groups(scores, 2), [True, False, True, True])
    assert float(frac_zero_std(scores, 2)) == 0.75
    assert float(frac_zero_std(np.full(21, 0.1), 7)) == 1.0


# -- token-level ------------------------------------------------------------------------------------------------------


def test_credit_is_carried_across_gaps():
    # cutting at the gap would give [0, .5, 1]
    np.testing.assert_allclose(discounted_returns([[0.0, 0.0, 1.0]], [[1, 0, 1]], 0.5), [[0.5, 1.0, 1.0]])


def test_rewards_and_discount_do_not_act_on_observation_tokens():
    returns = discounted_returns([[1.0, 50.0, 2.0, 0.0]], [[1, 0, 1, 0]], 0.1)
    np.testing.assert_allclose(np.asarray(returns)[0, [0, 2]], [1.2, 2.0], rtol=1e-6)


def test_reinforce_plus_plus_is_whitened_over_tokens(x64):
    rewards, mask = np.array([[0, 0, 1.0], [0, 2.0, 0]]), np.array([[1, 0, 1], [1, 1, 0]])
    raw = np.array([0.5, 1.0, 1.0, 2.0])  # [0, 0], [0, 2], [1, 0], [1, 1]
    white = (raw - raw.mean()) / np.sqrt(raw.var(ddof=1) + 1e-8)
    result = np.asarray(reinforce_plus_plus_advantages(rewards, mask, 0.5))
    np.testing.assert_allclose(result[mask > 0], white, rtol=1e-12)
    np.testing.assert_array_equal(result[mask == 0], 0)


def test_reinforce_plus_plus_baseline_weighs_tokens(x64):
    mask = np.array([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]])
    scores = np.array([3.0, 1.0, NAN])
    result = np.asarray(reinforce_plus_plus_baseline_advantages(scores[[0, 1]], mask[:2], 2))
    tokens = np.array([1, 1, 1, 1, -1.0])
    white = (tokens - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(result, [white[[0, 0, 0, 0]], [white[4], 0, 0, 0]], rtol=1e-12)
    three = np.asarray(reinforce_plus_plus_baseline_advantages(scores, mask, 3))
    np.testing.assert_allclose(three[:2], result, rtol=1e-12)
    np.testing.assert_array_equal(three[2], 0)


def gae_loop(rewards, values, mask, gamma, lam):
    """GAE over the masked tokens alone: gaps are removed, not carried."""
    kept = np.flatnonzero(mask)
    result, following = np.zeros(len(rewards)), None
    for t in kept[::-1]:
        next_value, next_advantage = (values[following], result[following]) if following is not None else (0, 0)
        delta = rewards[t] + gamma * next_value - values[t]
        result[t] = delta + gamma * lam * next_advantage
        following = t
    return result


MULTI_TURN = {
    "rewards": np.array([0, 0, 0.1, 0.1, 0.1, 0, 0, 0.1, 1, 0, 0]),
    "values": np.array([9, 9, 4, 5, 6, -50, 3, 7, 9, 0, 0.0]),
    "mask": np.array([0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0.0]),
}


def test_gae_on_a_multi_turn_row(x64):
    rewards, values, mask = MULTI_TURN.values()
    result, returns = gae(rewards[None], values[None], mask[None], 0.99, 0.95)
    expected = gae_loop(rewards, values, mask, 0.99, 0.95)
    np.testing.assert_allclose(result[0], expected, rtol=1e-12)
    np.testing.assert_allclose(returns[0], (expected + values) * mask, rtol=1e-12)


def test_gae_ignores_values_and_rewards_of_observation_tokens(x64):
    rewards, values, mask = MULTI_TURN.values()
    other_values = np.where(mask > 0, values, 1e3)
    other_rewards = np.where(mask > 0, rewards, -7.0)
    for got, expected in zip(
        gae(other_rewards[None], other_values[None], mask[None], 0.99, 0.95),
        gae(rewards[None], values[None], mask[None], 0.99, 0.95),
        strict=True,
    ):
        np.testing.assert_array_equal(got, expected)


def test_gae_by_hand():
    # lambda = 0: A_t = r_t + V_(t+1) - V_t
    result, returns = gae([[0.0, 0.0, 5.0]], [[1.0, 2.0, 3.0]], [[1, 1, 1]], 1.0, 0.0)
    np.testing.assert_allclose(result, [[1, 1, 2]])
    np.testing.assert_allclose(returns, [[2, 3, 5]])


def test_one_gae_reproduces_the_critic_free_advantages(x64):
    mask = np.array([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
    scores = np.array([1.0, 0.0, 2.0, 0.5])
    for outcome in (group_advantages(scores, 2), rloo_advantages(scores, 2)):
        result, _ = gae(token_rewards(outcome, mask), np.zeros(mask.shape), mask)
        np.testing.assert_allclose(result, np.asarray(outcome)[:, None] * mask, rtol=1e-12)
    rewards = token_rewards(scores, mask, np.full(mask.shape, 0.3), 0.1)
    np.testing.assert_allclose(
        gae(rewards, np.zeros(mask.shape), mask, 0.9, 1.0)[0],
        discounted_returns(rewards, mask, 0.9) * mask,
        rtol=1e-12,
    )


def test_the_functions_run_without_jit():
    scores, mask = SCORES.astype(np.float32), np.ones((8, 3), np.float32)
    pairs = (
        (group_advantages(scores, 4, "batch"), advantages.group_advantages(scores, 4, "batch")),
        (token_rewards(scores, mask), advantages.token_rewards(scores, mask)),
        (gae(mask, mask, mask, 0.9, 0.8)[0], advantages.gae(mask, mask, mask, 0.9, 0.8)[0]),
    )
    for jitted, plain in pairs:
        np.testing.assert_allclose(jitted, plain, rtol=1e-5, atol=1e-5)


def test_ppo_advantages_are_gae_whitened_after_the_returns():
    rewards = jnp.array([[0.0, 0.0, 1.0, 0.0], [0.0, -1.0, 0.0, 0.0]])
    values = jnp.array([[0.5, 0.2, 0.1, 9.0], [0.3, 0.4, 9.0, 9.0]])
    mask = jnp.array([[1, 1, 1, 0], [1, 1, 0, 0]])
    # lam = 0.5, gamma = 1: deltas are r + V_next - V.
    plain = np.array([[-0.3 + 0.5 * (-0.1 + 0.45), -0.1 + 0.45, 0.9, 0], [0.1 - 0.7, -1.4, 0, 0]])
    got, returns = advantages.ppo_advantages(rewards, values, mask, gamma=1.0, lam=0.5)
    np.testing.assert_allclose(returns, np.where(mask, plain + values, 0), rtol=1e-6)
    live = plain[np.asarray(mask) > 0]
    expected = (plain - live.mean()) / np.sqrt(live.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(got, np.where(mask, expected, 0), rtol=1e-5, atol=1e-6)
    raw, _ = advantages.ppo_advantages(rewards, values, mask, lam=0.5, whiten_advantages=False)
    np.testing.assert_allclose(raw, plain, rtol=1e-5, atol=1e-7)
    both, returns = advantages.ppo_advantages(rewards, values, mask, lam=0.5, lam_critic=1.0)
    np.testing.assert_array_equal(both, got)
    np.testing.assert_allclose(returns, [[1, 1, 1, 0], [-1, -1, 0, 0]], rtol=1e-6)  # the plain returns


def test_ppo_reward_whitening_keeps_the_mean():
    rewards = jnp.array([[0.0, 2.0, 4.0]])
    mask = jnp.ones((1, 3))
    _, returns = advantages.ppo_advantages(rewards, jnp.zeros((1, 3)), mask, lam=1.0, whiten_rewards=True)
    np.testing.assert_allclose(returns[0], [6.0, 5.0, 3.0], rtol=1e-6)  # rewards became 1, 2, 3


@pytest.mark.parametrize("k", [2, 3, 6])
def test_pkpo_is_the_sum_over_all_sets(x64, k):
    rng = np.random.default_rng(0)
    scores = np.stack([rng.normal(size=6), [0, 0, 1, 1, 0, 1], np.ones(6), [2, np.nan, 1, 3, np.nan, 1]])
    found = np.asarray(advantages.pkpo_advantages(scores.reshape(-1), 6, k)).reshape(4, 6)
    for row, result in zip(scores, found, strict=True):
        live = [i for i in range(6) if not np.isnan(row[i])]
        expected = np.zeros(6)
        for chosen in itertools.combinations(live, k):
            for i in chosen:
                others = [row[j] for j in chosen if j != i]
                expected[i] += max(row[i], *others) - max(others)
        np.testing.assert_allclose(result, expected / max(math.comb(len(live), k), 1), atol=1e-12)
    if k == 6:
        np.testing.assert_allclose(found[:3].reshape(-1), passk_advantages(scores[:3].reshape(-1), 6, normalize=False))
    with pytest.raises(ValueError, match="k is 7, but takes 2 to group_size = 6"):
        advantages.pkpo_advantages(scores.reshape(-1), 6, 7)


@pytest.mark.slow
def test_pkpo_of_large_groups():
    """C(256, 128) has 76 digits; the best row is in half of all sets, and the best of the others is near."""
    scores = np.arange(256, dtype=np.float32)
    found = np.asarray(advantages.pkpo_advantages(scores, 256, 128))
    # The highest is in k/n of the sets; the largest of its companions is 255 - d with probability about 2^-d.
    np.testing.assert_allclose(found[-1], 0.5 * 2.0, rtol=0.02)
    assert np.isfinite(found).all() and (np.diff(found[-8:]) > 0).all()


def test_pkpo_is_the_gradient_of_the_best_of_k(x64):
    """Over all outcomes of three samples of a policy of three actions, of which two count together."""
    rewards, logits = np.array([0.0, 0.3, 1.0]), jnp.array([0.2, -0.4, 0.1])

    def best_of_two(logits):
        p = jax.nn.softmax(logits)
        return sum(p[a] * p[b] * max(rewards[a], rewards[b]) for a in range(3) for b in range(3))

    def surrogate(logits):
        p, logps, total = jax.lax.stop_gradient(jax.nn.softmax(logits)), jax.nn.log_softmax(logits), 0.0
        for outcome in itertools.product(range(3), repeat=3):
            weights = advantages.pkpo_advantages(rewards[list(outcome)], 3, 2)
            total += math.prod(p[a] for a in outcome) * sum(w * logps[a] for w, a in zip(weights, outcome, strict=True))
        return total

    np.testing.assert_allclose(jax.grad(surrogate)(logits), jax.grad(best_of_two)(logits), atol=1e-12)


def test_vapo_has_a_decay_for_each_length(x64):
    rng = np.random.default_rng(0)
    rewards, values, mask = rng.normal(size=(2, 50)), rng.normal(size=(2, 50)), np.ones((2, 50))
    mask[1, 30:] = 0
    found, returns = advantages.vapo_advantages(rewards, values, mask, 0.9, alpha=0.1, whiten_advantages=False)
    for row, length in enumerate((50, 30)):
        expected, _ = gae(
            rewards[row : row + 1], values[row : row + 1], mask[row : row + 1], 0.9, 1 - 1 / (0.1 * length)
        )
        np.testing.assert_allclose(found[row], expected[0], rtol=1e-12)
    np.testing.assert_allclose(returns, gae(rewards, values, mask, 0.9, 1.0)[1], rtol=1e-12)
    # A row of fewer than 1 / alpha tokens has no decay below 0.
    short, _ = advantages.vapo_advantages(
        rewards[:, :5], values[:, :5], mask[:, :5], alpha=0.1, whiten_advantages=False
    )
    np.testing.assert_allclose(short, gae(rewards[:, :5], values[:, :5], mask[:, :5], 1.0, 0.0)[0], rtol=1e-12)


def test_maxrl_divides_by_the_mean_of_the_group():
    scores = [1.0, 0, 0, 0, 1, 1, 0, NAN, 0, 0, 0, 0]
    expected = [3, -1, -1, -1, 0.5, 0.5, -1, 0, 0, 0, 0, 0]
    np.testing.assert_allclose(advantages.maxrl_advantages(scores, 4), expected, rtol=1e-6)
    with pytest.raises(ValueError, match="do not divide into groups"):
        advantages.maxrl_advantages(scores, 5)


# -- the optimal token baseline ----------------------------------------------------------------------------------------


def test_otb_by_hand():
    """W is 0.5, 1, 2 and 1, 1.5: baselines 1/3 and 2/5, and none at the place that one row alone has."""
    rewards, norms = np.array([[0, 0, 1], [0, 0, 0]]), np.array([[0.5, 0.5, 1.0], [1.0, 0.5, 9.0]])
    mask = np.array([[1, 1, 1], [1, 1, 0]])
    found = otb_advantages(rewards, norms, mask, group_size=2)
    np.testing.assert_allclose(found, [[2 / 3, 3 / 5, 1.0], [-1 / 3, -2 / 5, 0.0]], rtol=1e-6)


def verls_otb(rewards, norms, mask, size):
    """verl 0.9, compute_multi_turn_optimal_token_baseline_advantage with its zero tail, a row and a place at a time."""
    result = np.zeros(rewards.shape)
    for start in range(0, len(rewards), size):
        rows = range(start, start + size)
        places = {i: np.flatnonzero(mask[i]) for i in rows}
        for i in rows:
            for t, column in enumerate(places[i]):
                others = [j for j in rows if len(places[j]) > t]
                to_go = {j: rewards[j, places[j][t:]].sum() for j in others}
                energy = {j: norms[j, places[j][: t + 1]].sum() for j in others}
                baseline = sum(to_go[j] * energy[j] for j in others) / (sum(energy.values()) + 1e-8)
                result[i, column] = to_go[i] - (baseline if len(others) > 1 else 0.0)
    return result


def random_tokens(rows=8, tokens=12, seed=0):
    rng = np.random.default_rng(seed)
    mask = rng.random((rows, tokens)) < 0.6
    mask[:, 0] = True
    return rng.normal(size=mask.shape) * mask, rng.uniform(0.01, 2, mask.shape), mask


@pytest.mark.parametrize("seed", range(3))
def test_otb_is_verls(x64, seed):
    rewards, norms, mask = random_tokens(seed=seed)
    mask[5] = False  # a row that no reward applies to has no tokens here
    found = otb_advantages(rewards * mask, norms, mask, group_size=4)
    np.testing.assert_allclose(found, verls_otb(rewards * mask, norms, mask, 4), rtol=1e-6, atol=1e-9)


def test_otb_properties(x64):
    rewards, norms, mask = random_tokens()
    found = np.asarray(otb_advantages(rewards, norms, mask, group_size=4))
    order = np.array([2, 0, 3, 1, 6, 7, 5, 4])
    permuted = otb_advantages(rewards[order], norms[order], mask[order], group_size=4)
    np.testing.assert_allclose(permuted, found[order], rtol=1e-6, atol=1e-7)  # eps counts from the first row
    # what stands between sampled tokens changes nothing
    gaps = np.repeat(mask, 2, axis=1) & (np.arange(24) % 2 == 0)
    spread = [np.where(gaps, np.repeat(x, 2, axis=1), 7.0) for x in (rewards, norms)]
    wide = otb_advantages(*spread, gaps, group_size=4)
    np.testing.assert_allclose(np.asarray(wide)[gaps], found[mask], rtol=1e-9, atol=1e-12)
    # rows of one length that score alike learn nothing, exactly, and each place has a weighted mean of 0
    alike = np.zeros((4, 5))
    alike[:, -1] = 0.1
    ones = np.ones((4, 5), bool)
    np.testing.assert_array_equal(otb_advantages(alike, norms[:4, :5], ones, group_size=4), 0.0)
    full = np.asarray(otb_advantages(rewards[:4, :5], norms[:4, :5], ones, group_size=4))
    np.testing.assert_allclose((full * np.cumsum(norms[:4, :5], axis=1)).sum(axis=0), 0.0, atol=1e-6)
