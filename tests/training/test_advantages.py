"""From rewards to advantages inside a run: shaping, KL in the reward, rules and their options, by hand."""

import inspect
import math

import numpy as np
import pytest

from jaxrl_llm.algorithms import advantages as rules
from jaxrl_llm.algorithms import turn_advantages
from jaxrl_llm.algorithms.turn_advantages import Turn, Turns, rae_advantages, turn_table
from jaxrl_llm.config import ConfigError, default, validate
from jaxrl_llm.rollout.slots import Rollout
from jaxrl_llm.training.advantages import AdvantageStep, advantage_step
from jaxrl_llm.training.setup.objectives import needs_reference, policy_spec
from jaxrl_llm.training.setup.specs import advantage_spec, controllers_of, learner_spec, old_logps_of

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


def step_of(config, names=("r",)) -> AdvantageStep:
    return advantage_step(advantage_spec(config), names)


def advantages_of(
    rewards, weights=(1.0,), mask=MASK, logps=None, ref_logps=None, greedy=None, teacher_logps=None, **settings
):
    config = configured(**settings)
    rewards = np.array(rewards, np.float32)
    rewards = rewards[:, None] if rewards.ndim == 1 else rewards
    step, coef = step_of(config, tuple(f"r{i}" for i in range(rewards.shape[1]))), config.algorithm.beta
    terms = {"logps": logps, "ref_logps": ref_logps, "teacher_logps": teacher_logps, "greedy_rewards": greedy}
    return step(rollout(), mask, rewards, np.array(weights, np.float32), kl_coef=coef, **terms)


def rows_of(result):
    """The advantage of each row, the same on all of its tokens and 0 elsewhere."""
    values = np.asarray(result.advantages)
    rows = values.max(1) + values.min(1)
    np.testing.assert_allclose(values, rows[:, None] * MASK, atol=1e-6)
    return rows


def test_unscorable_rows_move_no_baseline():
    result = advantages_of([[1.0, NAN], [NAN, NAN], [3.0, 1.0], [NAN, 2.0]], weights=(1.0, 0.5), scale_rewards="none")
    np.testing.assert_allclose(rows_of(result), [0, 0, 1.25, -1.25], atol=1e-6)  # 3.5 and 1 around 2.25
    assert int(result.metrics["unscorable_rows"]) == 1
    np.testing.assert_allclose(result.metrics["reward"], (1.0 + 3.5 + 1.0) / 3, rtol=1e-6)
    np.testing.assert_allclose(result.metrics["rewards/r1/mean"], 1.5)
    np.testing.assert_allclose(result.metrics["frac_reward_zero_std"], 0.5)
    np.testing.assert_allclose(result.priority, [0.0, np.std([3.5, 1.0], ddof=1) * 1.25], rtol=1e-5)


def test_tokens_without_an_advantage_are_left_out():
    result = advantages_of([1.0, 1.0, 3.0, 1.0], filter_zero_advantages=True)
    np.testing.assert_array_equal(result.mask, MASK * [[0], [0], [1], [1]])
    assert result.priority[0] == 0 < result.priority[1]
    np.testing.assert_array_equal(advantages_of([1.0, 1.0, 3.0, 1.0]).mask, MASK)
    for settings in ({"name": "ppo", "advantage": "ppo"}, {"loss": "a2po", "advantage": "a2po"}):
        with pytest.raises(
            ConfigError, match=r"filter_zero_advantages is true, but algorithm\.(name|loss) is '(ppo|a2po)'"
        ):
            validate(configured(filter_zero_advantages=True, **settings))


def test_means_over_no_rows_are_nan():
    metrics = advantages_of([[NAN, 1.0]] * 2 + [[NAN, 3.0]] * 2, weights=(1.0, 1.0)).metrics
    assert np.isnan(metrics["rewards/r0/mean"]) and np.isnan(metrics["rewards/r0/std"])
    assert metrics["rewards/r1/mean"] == metrics["reward"] == 2.0
    metrics = advantages_of([NAN] * 4).metrics
    assert all(np.isnan(metrics[name]) for name in ("reward", "reward_std", "reward_max", "reward_min"))
    assert metrics["unscorable_rows"] == 4 and metrics["advantages/mean"] == 0


def test_unscorable_rows_stay_out_of_whitening():
    result = advantages_of([1.0, NAN, 3.0, 0.0], advantage="reinforce_plus_plus")
    values = np.asarray(result.advantages)
    tokens = np.array([1.0] * 3 + [3.0] * 4 + [0.0])
    np.testing.assert_allclose(values[0, 2], (1.0 - tokens.mean()) / tokens.std(ddof=1), rtol=1e-4)
    np.testing.assert_array_equal(values[1], 0)


def test_shaping_of_scores():
    # Of at most 4 tokens, the last 2 cost: 3 tokens -0.5, 4 tokens -1. Row 2 did not end.
    result = advantages_of([1, 1, 1, 0], overlong_buffer=2, missing_eos_penalty=0.25, scale_rewards="none")
    shaped = np.array([0.5, 1.0, -0.25, 0.0])
    np.testing.assert_allclose(rows_of(result), shaped - np.repeat(shaped.reshape(2, 2).mean(1), 2), atol=1e-6)
    np.testing.assert_allclose(result.metrics["reward_shaping"], (-0.5 - 1.25) / 4, rtol=1e-6)
    np.testing.assert_allclose(result.metrics["reward"], 0.75)
    assert result.metrics["frac_reward_zero_std"] == 0  # rows 0 and 1 differ in length
    clipped = advantages_of([1, 0.5, 0, 1], reward_clip=(0.0, 0.5))
    assert clipped.metrics["frac_reward_zero_std"] == 0.5 and not rows_of(clipped)[:2].any()
    half = advantages_of([1, 1, 1, 0], overlong_buffer=2, overlong_penalty=0.5, scale_rewards="none")
    shaped = np.array([0.75, 1.0, 0.5, 0.0])
    np.testing.assert_allclose(rows_of(half), shaped - np.repeat(shaped.reshape(2, 2).mean(1), 2), atol=1e-6)


def test_kl_in_the_reward_is_summed_into_scores():
    result = advantages_of(
        [1, 0, 2, 1], logps=KL, ref_logps=np.zeros_like(KL), advantage="rloo", kl_in_reward=True, beta=0.5
    )  # fmt: skip
    sums = (KL * MASK).sum(1)
    scores = np.array([1, 0, 2, 1]) - 0.5 * sums
    np.testing.assert_allclose(rows_of(result), scores - scores.reshape(2, 2)[:, ::-1].reshape(-1), rtol=1e-5)
    np.testing.assert_allclose(result.kl, (sums / LENGTHS).mean(), rtol=1e-6)
    np.testing.assert_allclose(result.metrics["kl"], sums.sum() / MASK.sum(), rtol=1e-6)


def test_kl_in_the_reward_of_each_token():
    settings = {"logps": KL, "ref_logps": np.zeros_like(KL), "kl_in_reward": True, "beta": 0.5, "kl": "k2"}
    result = advantages_of([1, 0, 2, 1], advantage="reinforce_plus_plus(gamma=0.5)", **settings)
    returns = np.zeros_like(KL)
    for row, total in enumerate([1, 0, 2, 1]):
        carry = 0.0
        for t in reversed(np.flatnonzero(MASK[row])):
            carry = 0.5 * carry - 0.5 * KL[row, t] ** 2 / 2 + (total if t == np.flatnonzero(MASK[row])[-1] else 0)
            returns[row, t] = carry
    live = returns[MASK > 0]
    np.testing.assert_allclose(
        result.advantages, (returns - live.mean()) / live.std(ddof=1) * MASK, rtol=1e-4, atol=1e-5
    )


def test_kl_in_the_reward_besides_the_loss():
    config = configured(advantage="rloo", beta=0.01, reward_beta=0.5, reward_kl="k2")
    coef = controllers_of(config).kl.coef
    step, spec = step_of(config), learner_spec(config)
    assert (coef, spec.kl_in_reward, spec.reward_beta) == (0.5, False, 0.5)
    assert policy_spec(config).beta == 0.01 and policy_spec(config).kl == "k3" and needs_reference(config)
    assert old_logps_of(config) == "trainer"  # which the penalty is measured by
    rewards = np.array([[1], [0], [2], [1]], np.float32)
    zeros = np.zeros_like(KL)
    result = step(rollout(), MASK, rewards, np.ones(1, np.float32), logps=KL, ref_logps=zeros, kl_coef=coef)
    scores = rewards[:, 0] - 0.5 * (0.5 * KL**2 * MASK).sum(1)
    np.testing.assert_allclose(rows_of(result), scores - scores.reshape(2, 2)[:, ::-1].reshape(-1), rtol=1e-5)
    np.testing.assert_allclose(result.metrics["reward_kl"], (0.5 * KL**2 * MASK).sum() / MASK.sum(), rtol=1e-6)
    assert "kl" not in result.metrics  # the objective's


@pytest.mark.parametrize("settings", [{"beta": 0.0}, {"beta": 0.1, "kl_in_reward": True}])
def test_a_second_kl_needs_one_in_the_loss(settings):
    with pytest.raises(ConfigError, match=r"algorithm\.reward_beta is 0\.1, .* set beta and not kl_in_reward"):
        validate(configured(reward_beta=0.1, **settings))


def test_std_within_groups():
    result = advantages_of([1.0, 4.0, 2.0, NAN])
    np.testing.assert_allclose(result.metrics["reward_group_std"], np.std([1, 4], ddof=1), rtol=1e-6)
    result = advantages_of([1.0, 4.0, 2.0, 3.0])
    expected = (np.std([1, 4], ddof=1) + np.std([2, 3], ddof=1)) / 2
    np.testing.assert_allclose(result.metrics["reward_group_std"], expected, rtol=1e-6)
    np.testing.assert_allclose(result.metrics["reward_std"], np.std([1, 4, 2, 3], ddof=1), rtol=1e-6)


def test_opo_weighs_by_sampled_tokens_and_not_by_observations():
    # Two rows of 4 sampled tokens; the first has 6 more that a tool wrote.
    mask = np.zeros((2, 12), np.float32)
    mask[0, [2, 3, 10, 11]] = mask[1, 2:6] = 1
    segments = np.ones((2, 12), np.int32)
    segments[1, 6:] = 0
    lengths = np.array([10, 4], np.int32)
    rows = Rollout(
        np.zeros((2, 12), np.int32), segments, mask, np.zeros_like(mask), lengths, np.ones(2, bool), lengths * 1.0
    )
    rewards = np.array([[1], [0]], np.float32)
    result = step_of(configured(advantage="opo"))(rows, mask, rewards, np.ones(1, np.float32))
    np.testing.assert_allclose(result.advantages, mask * np.array([[0.5], [-0.5]]), rtol=1e-6)


def test_kl_in_the_loss_changes_no_advantage():
    without = advantages_of([1, 0, 2, 1])
    measured = advantages_of([1, 0, 2, 1], logps=KL, ref_logps=np.zeros_like(KL), beta=0.5, kl="k1")
    np.testing.assert_array_equal(without.advantages, measured.advantages)
    assert without.kl is None
    rows = (KL * MASK).sum(1) / LENGTHS
    np.testing.assert_allclose(measured.kl, rows.mean(), rtol=1e-6)
    half = advantages_of(
        [1, 0, 2, 1], mask=MASK * FINISHED[:, None], logps=KL, ref_logps=np.zeros_like(KL), beta=0.5, kl="k1"
    )  # fmt: skip
    np.testing.assert_allclose(half.kl, rows[FINISHED].mean(), rtol=1e-6)  # a row that is left out is not a KL of 0
    assert "kl" not in measured.metrics  # the objective measures it


# Sub-agents a and b, then the session; b has no reward of its own in the last row.
PARTS = [
    [Turn(2, 3.0, "a"), Turn(4, 1.0, "b"), Turn(6, math.nan)],
    [Turn(1, 1.0, "a"), Turn(6, math.nan)],
    [Turn(2, 5.0, "a"), Turn(3, 4.0, "b"), Turn(6, math.nan)],
    [Turn(2, 5.0, "a"), Turn(4, math.nan, "b"), Turn(6, math.nan)],
]


def test_roles_are_compared_with_their_averages():
    """By hand, with a decay of a half: each part sees the average before it, and the row without a score moves none."""
    rewards = np.array([[1.0], [NAN], [1.0], [0.0]], np.float32)
    mask = np.ones((4, 6), np.float32)
    mask[0, 2] = 0
    roles = np.array([[0, 1, 2, 0], [0, 2, 0, 0], [0, 1, 2, 0], [0, 1, 2, 0]], np.int32)
    step, baselines = step_of(configured(advantage="rae(decay=0.5)")), np.array([1.0, 0.0, 0.5, 9.0], np.float32)
    parts = turn_table(PARTS, 4, 2, 0)
    known = {"parts": parts, "roles": roles, "baselines": baselines}
    result = step(rollout(), mask, rewards, np.ones(1, np.float32), **known)
    expected = [
        [2, 2, 0, 1, 0.5, 0.5],  # a: 3 against 1, which makes 2; b: 1 against 0; the session: 1 against 0.5
        [0, 0, 0, 0, 0, 0],
        [3, 3, 3.5, 0.25, 0.25, 0.25],  # a: 5 against 2; b: 4 against 0.5; the session: 1 against 0.75
        [1.5, 1.5, -2.25, -2.25, -0.875, -0.875],  # a: 5 against 3.5; b: the session's 0 against 2.25
    ]
    np.testing.assert_allclose(result.advantages, expected, atol=1e-6)
    np.testing.assert_allclose(result.baselines, [4.25, 1.125, 0.4375, 9.0])
    # As many steps of one row each.
    for row in range(4):
        known = {name: x[row : row + 1] for name, x in (("roles", roles), ("scores", rewards[:, 0]), ("mask", mask))}
        one = Turns(*(x[row : row + 1] for x in parts))
        advantages, baselines = rae_advantages(parts=one, baselines=baselines, decay=0.5, **known)
        np.testing.assert_allclose(advantages[0], expected[row], atol=1e-6)
    np.testing.assert_array_equal(baselines, result.baselines)


def test_parts_with_rewards_of_their_own_are_compared_with_their_like():
    """Two groups of two rows."""
    rewards = np.array([[1.0], [0.0], [1.0], [0.0]], np.float32)
    mask = np.ones((4, 6), np.float32)
    mask[0, 2] = 0
    step = step_of(configured(scale_rewards="none"))
    result = step(rollout(), mask, rewards, np.ones(1, np.float32), parts=turn_table(PARTS, 4, 2, 0))
    expected = [
        [1, 1, 0, 0, 0.5, 0.5],  # a: 3 against 1; b by itself; the session
        [-1, -0.5, -0.5, -0.5, -0.5, -0.5],
        [0, 0, 0, 0.5, 0.5, 0.5],
        [0, 0, -0.5, -0.5, -0.5, -0.5],  # b without a reward of its own has the session's
    ]
    np.testing.assert_allclose(result.advantages, expected, atol=1e-6)


@pytest.mark.parametrize("rule", ["turn", pytest.param("mt_grpo", marks=pytest.mark.slow), "process"])
def test_shaping_and_the_kl_are_part_of_the_last_turn(rule):
    """Two turns a row in the first group, one in the second; the row that did not end loses a half."""
    ends = [[1, 3], [1, 2], [4], [1]]
    turns = turn_table([[Turn(end, 0.0) for end in own] for own in ends], 2, 2, 2)
    settings = {"missing_eos_penalty": 0.5, "beta": 0.5, "kl_in_reward": True, "scale_rewards": "none"}
    step = step_of(configured(advantage=rule, **settings))
    rewards, zeros = np.array([[1], [0], [2], [2]], np.float32), np.zeros_like(KL)
    terms = {"logps": KL, "ref_logps": zeros, "kl_coef": 0.5, "turns": turns}
    result = step(rollout(), MASK, rewards, np.ones(1, np.float32), **terms)
    scores = np.array([1, 0, 1.5, 2]) - 0.5 * (KL * MASK).sum(1)
    half = scores.reshape(2, 2).mean(1)[:, None]  # of steps and rewards 0 beside a score, the mean is its half
    of_last = (scores.reshape(2, 2) - (half if rule != "process" else half * [[0.5], [1]])).reshape(-1)
    np.testing.assert_allclose(np.asarray(result.advantages)[np.arange(4), 1 + LENGTHS], of_last, rtol=1e-5)


def test_remax_compares_with_greedy():
    result = advantages_of([1, 0, 2, 1], advantage="remax", greedy=np.array([[0.5], [2.0]], np.float32))
    np.testing.assert_allclose(rows_of(result), [0.5, -0.5, 0, -1])
    assert step_of(configured(advantage="remax")).asks_for("greedy_scores")
    assert not step_of(configured()).asks_for("greedy_scores")


def test_remax_shapes_the_greedy_completion_too():
    config = configured(advantage="remax", missing_eos_penalty=1.0)
    greedy = rollout()._replace(lengths=LENGTHS[:2], finished=np.array([False, True]))
    rewards, weights = np.array([[1.0], [1.0], [1.0], [0.0]], np.float32), np.ones(1, np.float32)
    result = step_of(config)(
        rollout(), MASK, rewards, weights, greedy_rewards=np.array([[0.5], [0.25]], np.float32), greedy_rollout=greedy
    )
    np.testing.assert_allclose(rows_of(result), [1.5, 1.5, -0.25, -0.25], atol=1e-6)  # around -0.5 and 0.25


def test_options_of_a_rule():
    rewards, weights = [[0, 3], [2, 2], [1, 1], [0, 5]], (1.0, 1.0)
    plain = rows_of(advantages_of(rewards, weights, advantage="gdpo(batch_normalize=False)"))
    normal = rows_of(advantages_of(rewards, weights, advantage="gdpo"))
    np.testing.assert_allclose(normal, (plain - plain.mean()) / (plain.std(ddof=1) + 1e-4), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(rows_of(advantages_of([1, 0, 0, 0], advantage="passk(normalize=False)")), [1, 0, 0, 0])


@pytest.mark.parametrize("rule", ["group", "gdpo", "rloo", "passk", "opo", "reinforce_plus_plus",
                                  "reinforce_plus_plus_baseline"])  # fmt: skip
def test_rules_take_integers_and_masked_rows(rule):
    half = MASK * FINISHED[:, None]
    whole = np.asarray(advantages_of([1, 0, 3, 1], advantage=rule).advantages)
    assert np.isfinite(whole).all()
    assert np.abs(whole).max() > 0
    np.testing.assert_array_equal(np.asarray(advantages_of([1, 0, 3, 1], mask=half, advantage=rule).advantages)[2], 0)
    # Integer and fractional rewards go through the same numbers: nothing is cut to integers on the way.
    fractions = np.asarray(advantages_of([0.7, 0, 1.9, 0.7], advantage=rule).advantages)
    assert np.abs(fractions).max() > 0


def test_flat_groups_of_each_rule():
    rewards = np.array([[0, 3], [1, 2], [1, 1], [1, 1]], np.float32)
    weights = np.ones(2, np.float32)
    np.testing.assert_array_equal(step_of(configured(), ("a", "b")).flat_groups(rewards, weights), [True, True])
    gdpo = step_of(configured(advantage="gdpo"), ("a", "b"))
    np.testing.assert_array_equal(gdpo.flat_groups(rewards, weights), [False, True])
    result = advantages_of(rewards, (1.0, 2.0), advantage="gdpo")
    np.testing.assert_array_equal(np.asarray(result.priority) > 0, [True, False])
    # A reward of weight 0 is logged alone: a group that differs in nothing else teaches nothing.
    logged = np.array([[1, 3], [1, 2], [0, 1], [1, 1]], np.float32)
    np.testing.assert_array_equal(gdpo.flat_groups(logged, np.array([1.0, 0.0])), [True, False])
    result = advantages_of(logged, (1.0, 0.0), advantage="gdpo")
    np.testing.assert_array_equal(np.asarray(result.priority) > 0, [False, True])


def test_groups_that_score_alike_teach_where_a_rule_compares_with_something_else():
    """The first group scores 1 twice, the second 0 twice; a greedy completion of each scored 0."""
    rewards, greedy = [1.0, 1.0, 0.0, 0.0], np.zeros((2, 1), np.float32)
    useful = {"group": [False] * 2, "rloo": [False] * 2, "remax": [True, False], "reinforce_plus_plus": [True] * 2}
    for rule, expected in useful.items():
        result = advantages_of(rewards, advantage=rule, greedy=greedy if rule == "remax" else None)
        np.testing.assert_array_equal(np.asarray(result.priority) > 0, expected, rule)
        moved = np.abs(np.asarray(result.advantages)).sum(axis=1).reshape(2, 2).sum(axis=1) > 0
        np.testing.assert_array_equal(moved, expected, rule)
    teacher = {"logps": np.zeros((4, 6), np.float32), "teacher_logps": np.full((4, 6), -1.0, np.float32)}
    assert (np.asarray(advantages_of(rewards, advantage="group", **teacher).priority) > 0).all()  # it rates tokens


def with_options(*entries, **settings):
    config = configured(**settings)
    config.environment.options = entries
    return config


def test_an_environment_has_a_rule_of_its_own():
    """The first group is centred; the second is whitened over its own five tokens, of which four have 3 and one 0."""
    step = step_of(with_options("maze(advantage='reinforce_plus_plus')", scale_rewards="none"))
    numbers = step.rule_numbers(["sort", "sort", "maze", "maze"])
    np.testing.assert_array_equal(numbers, [0, 0, 1, 1])
    rewards, weights = np.array([[5], [1], [3], [0]], np.float32), np.ones(1, np.float32)
    result = step(rollout(), MASK, rewards, weights, rule_numbers=numbers)
    # Mean 2.4, unbiased variance (4 * 0.6**2 + 2.4**2) / 4 = 1.8.
    np.testing.assert_allclose(rows_of(result), [2, -2, 0.6 / 1.8**0.5, -2.4 / 1.8**0.5], rtol=1e-5)
    # The std of a group's rewards x mean |advantage|, and the latter alone where rewards are not compared.
    np.testing.assert_allclose(result.priority, [8**0.5 * 2, (0.6 + 2.4) / 1.8**0.5 / 2], rtol=1e-5)


EIGHT = [0, 1, 2, 3, 2, 3, 0, 1]  # rows of `rollout()` that make up four groups
OF_MAZE = np.array([False, False, True, True, False, False, True, True])
OWN_RULES = (
    "group", "gdpo", "rloo(normalize=True)", "gpg", "passk", "pkpo(k=2)", "maxrl", "opo", "remax", "otb",
    "reinforce_plus_plus(gamma=0.9)", "reinforce_plus_plus_baseline", "turn", "mt_grpo", "gigpo", "zero",
)  # fmt: skip
QUICK = ("group", "remax")


@pytest.mark.parametrize(
    ("rule", "scale"),
    [
        *(pytest.param(x, "group", marks=() if x in QUICK else pytest.mark.slow) for x in OWN_RULES),
        *(pytest.param(x, "batch", marks=pytest.mark.slow) for x in OWN_RULES),
    ],
)
def test_a_mixed_batch_has_the_advantages_of_each_environment_alone(rule, scale):
    draw = np.random.default_rng(0)
    rewards, norms = draw.integers(0, 4, (8, 2)).astype(np.float32), draw.random((8, 6)).astype(np.float32)
    greedy, weights = draw.random((4, 2)).astype(np.float32), np.array([1.0, 0.5], np.float32)
    rewards[5] = NAN
    lengths = LENGTHS[EIGHT]
    turns = turn_table([[Turn(1, 0.5), Turn(int(n), 1.0, "a")] if n > 1 else [Turn(1, 0.25)] for n in lengths], 2, 2, 2)

    def result_of(step, rows, **extra):
        given = {"turns": Turns(*(x[rows] for x in turns)), "logit_norms": norms[rows]}
        of_rows = Rollout(*(None if x is None else x[EIGHT][rows] for x in rollout()))
        prompts = np.flatnonzero(rows)[::2] // 2
        result = step(
            of_rows, MASK[EIGHT][rows], rewards[rows], weights, greedy_rewards=greedy[prompts], **given, **extra
        )
        return np.asarray(result.advantages), np.asarray(result.priority)

    names = ("a", "b")
    everything = np.ones(8, bool)
    mixed = step_of(with_options(f"maze(advantage='{rule}')", advantage="gpg", scale_rewards=scale), names)
    advantages, priority = result_of(mixed, everything, rule_numbers=OF_MAZE.astype(np.int32))
    for rows, own in ((OF_MAZE, rule), (~OF_MAZE, "gpg")):
        alone = result_of(step_of(configured(advantage=own, scale_rewards=scale), names), rows)
        np.testing.assert_allclose(advantages[rows], alone[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(priority[rows[::2]], alone[1], rtol=1e-5, atol=1e-6)
    # A batch without rows of one environment, whose others are as they are alone.
    if scale == "batch" or rule in ("group", "gigpo"):
        advantages, _ = result_of(mixed, ~OF_MAZE, rule_numbers=np.zeros(4, np.int32))
        np.testing.assert_allclose(advantages, alone[0], rtol=1e-5, atol=1e-6)


def test_a_critic_learns_from_the_returns_of_each_environment():
    values, weights = np.linspace(-1, 1, 24).reshape(4, 6).astype(np.float32), np.ones(1, np.float32)
    rewards = np.array([[5], [1], [3], [0]], np.float32)
    lam = "ppo(lam=0.5)"
    config = with_options(f"maze(advantage='{lam}')", name="ppo", advantage="ppo(lam=1.0)")
    mixed = step_of(config)(rollout(), MASK, rewards, weights, values=values, rule_numbers=np.array([0, 0, 1, 1]))
    for rows, rule in ((slice(2), "ppo(lam=1.0)"), (slice(2, 4), lam)):
        step = step_of(configured(name="ppo", advantage=rule))
        of_rows = Rollout(*(None if x is None else x[rows] for x in rollout()))
        alone = step(of_rows, MASK[rows], rewards[rows], weights, values=values[rows])
        np.testing.assert_allclose(mixed.advantages[rows], alone.advantages, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(mixed.returns[rows], alone.returns, rtol=1e-5, atol=1e-6)


def test_groups_are_flat_to_the_rule_of_their_environment():
    rewards, weights = np.array([[0, 3], [1, 2], [0, 3], [1, 2]], np.float32), np.ones(2, np.float32)
    step = step_of(with_options("maze(advantage='gdpo')"), ("a", "b"))
    flat = step.flat_groups(rewards, weights, ["sort", "sort", "maze", "maze"])
    np.testing.assert_array_equal(flat, [True, False])


@pytest.mark.parametrize(
    ("options", "settings", "message"),
    [
        ("maze(advantage='groop')", {}, "environment.options: advantage of maze: unknown name 'groop'.*closest is gr"),
        ("maze(advantage='rae')", {}, "advantage of maze is 'rae', which keeps a baseline of each role"),
        ("maze(advantage='vapo')", {}, "algorithm.name is not 'ppo' and environment.options: advantage of maze is"),
        ("maze(advantage='rloo')", {"name": "ppo", "advantage": "ppo"}, "is 'ppo' and environment.options: advantage"),
        ("maze(advantage='gdpo')", {"overlong_buffer": 2}, "overlong_buffer is 2, but environment.options: advantage"),
    ],
)
def test_wrong_rules_of_environments_are_refused(options, settings, message):
    with pytest.raises(ConfigError, match=message):
        step_of(with_options(options, **settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"advantage": "groop"}, "algorithm.advantage: unknown name 'groop'; .* the closest is group"),
        ({"advantage": "gae"}, "algorithm.advantage: 'gae' is verl's name of the rule ppo here"),
        ({"advantage": "group(epsilon=1)"}, r"group has no option 'epsilon'; it takes eps, leave_one_out$"),
        ({"advantage": "group(scale='none')"}, "group has no option 'scale'"),
        ({"advantage": "pkpo(k=3)"}, r"advantage is 'pkpo\(k=3\)': pkpo .*: k is 3, but takes 2 to group_size = 2"),
        ({"advantage": "group(eps='1e-6')"}, "group: eps is '1e-6', a text, but it takes a number"),
        ({"advantage": "gdpo", "kl_in_reward": True, "beta": 0.1}, r"algorithm\.kl_in_reward is True.*gdpo"),
        ({"advantage": "gdpo", "reward_beta": 0.1, "beta": 0.1}, r"algorithm\.reward_beta is 0\.1.*gdpo"),
        ({"advantage": "gdpo", "overlong_buffer": 2}, r"algorithm\.overlong_buffer is 2.*soft_overlong"),
        ({"advantage": "gdpo", "missing_eos_penalty": 1.0}, r"algorithm\.missing_eos_penalty is 1\.0"),
    ],
)
def test_wrong_rules_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        step_of(configured(**settings))


def test_every_rule_takes_its_defaults():
    """They are tried where a run is built; `turn_table` and the like are none of their names."""
    for name, function in {**vars(rules), **vars(turn_advantages)}.items():
        if name.endswith("_advantages"):
            critic = {"name": "ppo"} if "values" in inspect.signature(function).parameters else {}
            config = configured(advantage=name.removesuffix("_advantages"), **critic)
            config.rollout.group_size = 4
            step_of(config)


def test_a_rule_of_the_users_own(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def centred(scores, lengths, power=1):\n    return (scores - scores.mean()) / lengths**power\n"
        "def total(scores):\n    return scores.sum()\n"
        "import numpy\n"
        "def of_numbers(scores):\n    return numpy.exp(scores)\n"
        "def by_case(scores):\n    return scores if scores.max() > 0 else -scores\n"
        "def above(scores):\n    return scores - 1\n"
        "def everywhere(scores, mask):\n    return (scores[:, None] - 1) / mask\n"
        "def failing(scores):\n    raise KeyError('oops')\n"
        "def weighed(scores, factors):\n    return scores * jax.numpy.array(factors)\nimport jax\n"
    )
    with pytest.raises(ConfigError, match=r"mine\.py:total'.* shape \(\), but it must return one number for each of 4"):
        advantages_of([1, 0, 2, 1], advantage=f"{tmp_path}/mine.py:total")
    with pytest.raises(ConfigError, match=r"mine\.py:failing raised KeyError: 'oops' \(.*mine\.py:15\)"):
        advantages_of([1, 0, 2, 1], advantage=f"{tmp_path}/mine.py:failing")
    result = advantages_of([1, 0, 2, 1], advantage=f"{tmp_path}/mine.py:centred(power=2)")
    np.testing.assert_allclose(rows_of(result), np.array([0, -1, 1, 0]) / LENGTHS**2, rtol=1e-5)
    result = advantages_of([1, 0, 2, 1], advantage=f"{tmp_path}/mine.py:weighed(factors=[1, 2, 3, 4])")
    np.testing.assert_array_equal(rows_of(result), [1, 0, 6, 4])
    for name in ("of_numbers", "by_case"):
        with pytest.raises(ConfigError, match=rf"algorithm.advantage is .*mine\.py:{name}'.* compute with jax.numpy"):
            step_of(configured(advantage=f"{tmp_path}/mine.py:{name}"))
    for name in ("above", "everywhere"):  # a row without a reward teaches nothing, nor do tokens outside the mask
        result = advantages_of([1, NAN, 2, 0], advantage=f"{tmp_path}/mine.py:{name}")
        np.testing.assert_array_equal(rows_of(result), [0, 0, 1, -1])


def test_critic_skips_unscorable_rows():
    config = configured(name="ppo", advantage="ppo(lam=1.0, whiten_advantages=False)")
    rewards, values = np.array([[1.0], [NAN], [2.0], [0.5]], np.float32), np.full(MASK.shape, 0.25, np.float32)
    result = step_of(config)(rollout(), MASK, rewards, np.ones(1, np.float32), values=values)
    scorable = MASK * np.array([[1], [0], [1], [1]])
    np.testing.assert_array_equal(result.mask, scorable)
    np.testing.assert_allclose(result.returns, scorable * np.nan_to_num(rewards), atol=1e-6)
    np.testing.assert_allclose(result.advantages, scorable * (np.nan_to_num(rewards) - 0.25), atol=1e-6)


def test_rewards_are_clipped_first():
    result = advantages_of(
        [9.0, 1.0, -7.0, 1.0], reward_clip=(-2.0, 3.0), scale_rewards="none", missing_eos_penalty=1.0
    )
    np.testing.assert_allclose(rows_of(result), [1.0, -1.0, -2.0, 2.0], atol=1e-6)  # 3 and 1; -2 - 1 and 1
    np.testing.assert_allclose(result.metrics["reward"], 1.0)  # the score itself is logged
    np.testing.assert_allclose(result.metrics["reward_max"], 9.0)
    for wrong in ((1.0,), (3.0, 1.0)):
        config = configured(reward_clip=wrong)
        with pytest.raises(ConfigError, match=r"algorithm\.reward_clip is .*the smallest and the largest"):
            validate(config)


def test_what_trl_logs_of_ppo():
    config = configured(name="ppo", advantage="ppo(gamma=1.0, lam=0.95)", kl_in_reward=True, beta=0.5)
    logps = -np.ones_like(MASK)
    rewards = np.array([[1.0], [2.0], [3.0], [4.0]], np.float32)
    terms = {"logps": logps, "ref_logps": logps - KL, "kl_coef": 0.5, "values": np.zeros_like(MASK)}
    result = step_of(config)(rollout(), MASK, rewards, np.ones(1, np.float32), **terms)
    kl = (KL * MASK).sum(1).mean()
    expected = {
        "objective/kl": kl, "objective/non_score_reward": -0.5 * kl, "objective/rlhf_reward": 2.5 - 0.5 * kl,
        "objective/entropy": LENGTHS.mean(), "val/num_eos_tokens": 3, "values/max": 0.0, "reward": 2.5,
    }  # fmt: skip
    for name, value in expected.items():
        np.testing.assert_allclose(result.metrics[name], value, rtol=1e-5, err_msg=name)
    # As in TRL the score is lowered before it is measured: 2 of the row of four that has no end.
    config.algorithm.missing_eos_penalty = 2.0
    result = step_of(config)(rollout(), MASK, rewards, np.ones(1, np.float32), **terms)
    np.testing.assert_allclose(result.metrics["objective/rlhf_reward"], 2.0 - 0.5 * kl, rtol=1e-5)
