"""From rewards to advantages inside a run: shaping, KL in the reward, rules and their options, by hand."""

import numpy as np
import pytest

from jaxrl_llm.config import ConfigError, default, validate
from jaxrl_llm.rollout.engine import Rollout
from jaxrl_llm.training.advantages import make_scorer

# Four rows, two groups of two; prompts of 2 tokens, completions of 3, 2, 4 and 1 (row 2 did not end).
MASK = np.array([[0, 0, 1, 1, 1, 0], [0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0]], np.float32)
LENGTHS = MASK.sum(1).astype(np.int32)
FINISHED = np.array([True, True, False, True])
KL = np.arange(24).reshape(4, 6) / 10  # k1 outside the mask must not count
NAN = np.nan


def rollout() -> Rollout:
    segments = np.maximum(MASK, np.arange(6) < 2).astype(np.int32)
    return Rollout(
        np.zeros((4, 6), np.int32), segments, MASK, np.zeros_like(MASK), LENGTHS, FINISHED, LENGTHS.astype(np.float32)
    )


def configured(**settings):
    config = default()
    config.rollout.group_size, config.rollout.max_completion_length = 2, 4
    for name, value in settings.items():
        config.algorithm[name] = value
    return config


def score(rewards, weights=(1.0,), mask=MASK, logps=None, ref_logps=None, greedy=None, **settings):
    config = configured(**settings)
    rewards = np.array(rewards, np.float32)
    rewards = rewards[:, None] if rewards.ndim == 1 else rewards
    scorer = make_scorer(config, tuple(f"r{i}" for i in range(rewards.shape[1])))
    weights = np.array(weights, np.float32)
    return scorer(rollout(), mask, rewards, weights, logps, ref_logps, config.algorithm.beta, greedy)


def rows_of(scored):
    """The advantage of each row, the same on all of its tokens and 0 elsewhere."""
    values = np.asarray(scored.values)
    rows = values.max(1) + values.min(1)
    np.testing.assert_allclose(values, rows[:, None] * MASK, atol=1e-6)
    return rows


def test_unscorable_rows_get_nothing_and_do_not_move_the_baseline():
    scored = score([[1.0, NAN], [NAN, NAN], [3.0, 1.0], [NAN, 2.0]], weights=(1.0, 0.5), scale_rewards="none")
    np.testing.assert_allclose(rows_of(scored), [0, 0, 1.25, -1.25], atol=1e-6)  # 3.5 and 1 around 2.25
    assert int(scored.metrics["unscorable_rows"]) == 1
    np.testing.assert_allclose(scored.metrics["reward"], (1.0 + 3.5 + 1.0) / 3, rtol=1e-6)
    np.testing.assert_allclose(scored.metrics["rewards/r1/mean"], 1.5)
    np.testing.assert_allclose(scored.metrics["frac_reward_zero_std"], 0.5)
    np.testing.assert_allclose(scored.priority, [0.0, np.std([3.5, 1.0], ddof=1) * 1.25], rtol=1e-5)


def test_unscorable_rows_stay_out_of_whitening():
    scored = score([1.0, NAN, 3.0, 0.0], advantage="reinforce_plus_plus")
    values = np.asarray(scored.values)
    tokens = np.array([1.0] * 3 + [3.0] * 4 + [0.0])
    np.testing.assert_allclose(values[0, 2], (1.0 - tokens.mean()) / tokens.std(ddof=1), rtol=1e-4)
    np.testing.assert_array_equal(values[1], 0)


def test_shaping_of_scores():
    # Of at most 4 tokens, the last 2 cost: 3 tokens -0.5, 4 tokens -1. Row 2 did not end.
    scored = score([1, 1, 1, 0], overlong_buffer=2, missing_eos_penalty=0.25, scale_rewards="none")
    shaped = np.array([0.5, 1.0, -0.25, 0.0])
    np.testing.assert_allclose(rows_of(scored), shaped - np.repeat(shaped.reshape(2, 2).mean(1), 2), atol=1e-6)
    np.testing.assert_allclose(scored.metrics["reward_shaping"], (-0.5 - 1.25) / 4, rtol=1e-6)
    np.testing.assert_allclose(scored.metrics["reward"], 0.75)


def test_kl_in_the_reward_is_summed_into_scores():
    scored = score(
        [1, 0, 2, 1], logps=KL, ref_logps=np.zeros_like(KL), advantage="rloo", kl_in_reward=True, beta=0.5
    )  # fmt: skip
    sums = (KL * MASK).sum(1)
    scores = np.array([1, 0, 2, 1]) - 0.5 * sums
    np.testing.assert_allclose(rows_of(scored), scores - scores.reshape(2, 2)[:, ::-1].reshape(-1), rtol=1e-5)
    np.testing.assert_allclose(scored.kl, (sums / LENGTHS).mean(), rtol=1e-6)
    np.testing.assert_allclose(scored.metrics["kl"], sums.sum() / MASK.sum(), rtol=1e-6)


def test_kl_in_the_reward_is_spread_over_token_rewards():
    settings = {"logps": KL, "ref_logps": np.zeros_like(KL), "kl_in_reward": True, "beta": 0.5, "kl": "k2"}
    scored = score([1, 0, 2, 1], advantage="reinforce_plus_plus(gamma=0.5)", **settings)
    returns = np.zeros_like(KL)
    for row, total in enumerate([1, 0, 2, 1]):
        carry = 0.0
        for t in reversed(np.flatnonzero(MASK[row])):
            carry = 0.5 * carry - 0.5 * KL[row, t] ** 2 / 2 + (total if t == np.flatnonzero(MASK[row])[-1] else 0)
            returns[row, t] = carry
    live = returns[MASK > 0]
    np.testing.assert_allclose(scored.values, (returns - live.mean()) / live.std(ddof=1) * MASK, rtol=1e-4, atol=1e-5)


def test_kl_in_the_loss_is_measured_and_changes_no_score():
    without = score([1, 0, 2, 1])
    measured = score([1, 0, 2, 1], logps=KL, ref_logps=np.zeros_like(KL), beta=0.5, kl="k1")
    np.testing.assert_array_equal(without.values, measured.values)
    assert without.kl is None
    rows = (KL * MASK).sum(1) / LENGTHS
    np.testing.assert_allclose(measured.kl, rows.mean(), rtol=1e-6)
    half = score(
        [1, 0, 2, 1], mask=MASK * FINISHED[:, None], logps=KL, ref_logps=np.zeros_like(KL), beta=0.5, kl="k1"
    )  # fmt: skip
    np.testing.assert_allclose(half.kl, rows[FINISHED].mean(), rtol=1e-6)  # a row that is left out is not a KL of 0
    assert "kl" not in measured.metrics  # the objective measures it


def test_remax_compares_with_the_greedy_completion():
    scored = score([1, 0, 2, 1], advantage="remax", greedy=np.array([[0.5], [2.0]], np.float32))
    np.testing.assert_allclose(rows_of(scored), [0.5, -0.5, 0, -1])
    assert make_scorer(configured(advantage="remax"), ("r",)).asks_for("greedy_scores")
    assert not make_scorer(configured(), ("r",)).asks_for("greedy_scores")


def test_remax_shapes_the_greedy_completion_too():
    config = configured(advantage="remax", missing_eos_penalty=1.0)
    greedy = rollout()._replace(lengths=LENGTHS[:2], finished=np.array([False, True]))
    rewards, weights = np.array([[1.0], [1.0], [1.0], [0.0]], np.float32), np.ones(1, np.float32)
    scored = make_scorer(config, ("r",))(
        rollout(), MASK, rewards, weights, greedy_rewards=np.array([[0.5], [0.25]], np.float32), greedy_rollout=greedy
    )
    np.testing.assert_allclose(rows_of(scored), [1.5, 1.5, -0.25, -0.25], atol=1e-6)  # around -0.5 and 0.25


def test_options_of_a_rule():
    rewards, weights = [[0, 3], [2, 2], [1, 1], [0, 5]], (1.0, 1.0)
    plain = rows_of(score(rewards, weights, advantage="gdpo(batch_normalize=False)"))
    normal = rows_of(score(rewards, weights, advantage="gdpo"))
    np.testing.assert_allclose(normal, (plain - plain.mean()) / (plain.std(ddof=1) + 1e-4), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(rows_of(score([1, 0, 0, 0], advantage="passk(normalize=False)")), [1, 0, 0, 0])


@pytest.mark.parametrize("rule", ["group", "gdpo", "rloo", "passk", "opo", "reinforce_plus_plus",
                                  "reinforce_plus_plus_baseline"])  # fmt: skip
def test_every_rule_runs_with_integer_rewards_and_masked_rows(rule):
    half = MASK * FINISHED[:, None]
    whole = np.asarray(score([1, 0, 3, 1], advantage=rule).values)
    assert np.isfinite(whole).all()
    assert np.abs(whole).max() > 0
    np.testing.assert_array_equal(np.asarray(score([1, 0, 3, 1], mask=half, advantage=rule).values)[2], 0)
    # Integer and fractional rewards go through the same numbers: nothing is cut to integers on the way.
    fractions = np.asarray(score([0.7, 0, 1.9, 0.7], advantage=rule).values)
    assert np.abs(fractions).max() > 0


def test_flat_groups_are_flat_in_what_the_rule_reads():
    rewards = np.array([[0, 3], [1, 2], [1, 1], [1, 1]], np.float32)
    weights = np.ones(2, np.float32)
    np.testing.assert_array_equal(make_scorer(configured(), ("a", "b")).flat_groups(rewards, weights), [True, True])
    gdpo = make_scorer(configured(advantage="gdpo"), ("a", "b"))
    np.testing.assert_array_equal(gdpo.flat_groups(rewards, weights), [False, True])
    scored = score(rewards, (1.0, 2.0), advantage="gdpo")
    np.testing.assert_array_equal(np.asarray(scored.priority) > 0, [True, False])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"advantage": "groop"}, "the closest is group"),
        ({"advantage": "group(epsilon=1)"}, r"group has no option 'epsilon'; it takes eps$"),
        ({"advantage": "group(scale='none')"}, "group has no option 'scale'"),
        ({"advantage": "gdpo", "kl_in_reward": True, "beta": 0.1}, r"algorithm\.kl_in_reward is True.*gdpo"),
        ({"advantage": "gdpo", "overlong_buffer": 2}, r"algorithm\.overlong_buffer is 2.*soft_overlong"),
        ({"advantage": "gdpo", "missing_eos_penalty": 1.0}, r"algorithm\.missing_eos_penalty is 1\.0"),
    ],
)
def test_wrong_rules_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        make_scorer(configured(**settings), ("r",))


def test_a_rule_of_the_users_own(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def centred(scores, lengths, power=1):\n    return (scores - scores.mean()) / lengths**power\n"
    )
    scored = score([1, 0, 2, 1], advantage=f"{tmp_path}/mine.py:centred(power=2)")
    np.testing.assert_allclose(rows_of(scored), np.array([0, -1, 1, 0]) / LENGTHS**2, rtol=1e-5)


def test_a_critic_does_not_learn_from_unscorable_rows():
    config = configured(name="ppo", advantage="ppo(lam=1.0, whiten_advantages=False)")
    rewards, values = np.array([[1.0], [NAN], [2.0], [0.5]], np.float32), np.full(MASK.shape, 0.25, np.float32)
    scorer = make_scorer(config, ("r",))
    scored = scorer(rollout(), MASK, rewards, np.ones(1, np.float32), values=values)
    scorable = MASK * np.array([[1], [0], [1], [1]])
    np.testing.assert_array_equal(scored.mask, scorable)
    np.testing.assert_allclose(scored.returns, scorable * np.nan_to_num(rewards), atol=1e-6)
    np.testing.assert_allclose(scored.values, scorable * (np.nan_to_num(rewards) - 0.25), atol=1e-6)


def test_scores_are_clipped_before_anything_is_added():
    scored = score([9.0, 1.0, -7.0, 1.0], reward_clip=(-2.0, 3.0), scale_rewards="none", missing_eos_penalty=1.0)
    np.testing.assert_allclose(rows_of(scored), [1.0, -1.0, -2.0, 2.0], atol=1e-6)  # 3 and 1; -2 - 1 and 1
    np.testing.assert_allclose(scored.metrics["reward"], 1.0)  # the score itself is logged
    np.testing.assert_allclose(scored.metrics["reward_max"], 9.0)
    for wrong in ((1.0,), (3.0, 1.0)):
        config = configured(reward_clip=wrong)
        with pytest.raises(ConfigError, match=r"algorithm\.reward_clip is .*the smallest and the largest"):
            validate(config)


def test_what_trl_logs_of_ppo():
    config = configured(name="ppo", advantage="ppo(gamma=1.0, lam=0.95)", kl_in_reward=True, beta=0.5)
    logps = -np.ones_like(MASK)
    scored = make_scorer(config, ("r",))(
        rollout(), MASK, np.array([[1.0], [2.0], [3.0], [4.0]], np.float32), np.ones(1, np.float32), logps,
        logps - KL, 0.5, None, np.zeros_like(MASK),
    )  # fmt: skip
    kl = (KL * MASK).sum(1).mean()
    expected = {
        "objective/kl": kl, "objective/non_score_reward": -0.5 * kl, "objective/rlhf_reward": 2.5 - 0.5 * kl,
        "objective/entropy": LENGTHS.mean(), "val/num_eos_tokens": 3, "values/max": 0.0, "reward": 2.5,
    }  # fmt: skip
    for name, value in expected.items():
        np.testing.assert_allclose(scored.metrics[name], value, rtol=1e-5, err_msg=name)
