"""Advantages of turns against loops over dictionaries, as the papers write them."""

from collections import defaultdict

import numpy as np
import pytest

from jaxrl_llm.algorithms.advantages import token_rewards
from jaxrl_llm.algorithms.turn_advantages import (
    Turn,
    by_turn,
    gigpo_advantages,
    mt_grpo_advantages,
    process_advantages,
    shared_states,
    turn_advantages,
    turn_ppo_advantages,
    turn_returns,
    turn_table,
    with_outcome,
)

NAN = np.nan
GROUP, WIDTH, PROMPT, COLUMNS = 4, 3, 2, 12
# Two groups of four episodes; turns end at these tokens of the completion, an observation token lies between them.
ROWS = [
    [Turn(3, 0.0), Turn(6, 0.5, "door"), Turn(9, 1.0, {"room": 2, "key": [1]})],
    [Turn(2, 0.25), Turn(5, 0.0, "door")],
    [Turn(4, 0.0), Turn(7, 0.0, "wall"), Turn(9, -1.0, {"key": [1], "room": 2})],
    [Turn(1, 0.0)],
    [Turn(3, 1.0), Turn(6, 1.0, "door"), Turn(8, 0.0, "door")],
    [Turn(3, 1.0), Turn(6, 0.0, "door")],
    [],
    [Turn(5, 0.5), Turn(9, 0.5, np.arange(2))],
]
SCORES = np.float32([1.5, 0.25, -1.0, 0.5, 2.0, 1.0, NAN, 3.0])


def mask():
    result = np.zeros((len(ROWS), COLUMNS), np.float32)
    for row, turns in enumerate(ROWS):
        start = PROMPT
        for turn in turns:
            result[row, start : PROMPT + turn.end] = 1
            start = PROMPT + turn.end + 1
    return result


def turns_of(scores=SCORES, weight=1.0):
    return with_outcome(turn_table(ROWS, WIDTH, GROUP, PROMPT), scores, weight)


def normalised(values, scale, eps):
    """Of a list: minus its mean, over its unbiased standard deviation."""
    values = np.array(values, np.float64)
    std = values.std(ddof=1) if len(values) > 1 else 0.0
    return (values - values.mean()) / (std + eps if scale == "group" else 1.0)


def looped_returns(row, gamma):
    rewards = [turn.reward for turn in ROWS[row]]
    rewards[-1] += SCORES[row] - sum(rewards)
    return [sum(gamma ** (j - k) * rewards[j] for j in range(k, len(rewards))) for k in range(len(rewards))]


def spread(values):
    """The values of turns, by (row, turn), on their tokens."""
    result = np.zeros((len(ROWS), COLUMNS))
    for row, turns in enumerate(ROWS):
        start = PROMPT
        for number, turn in enumerate(turns):
            result[row, start : PROMPT + turn.end] = values[row, number]
            start = PROMPT + turn.end + 1
    return result


LIVE = [row for row in range(len(ROWS)) if not np.isnan(SCORES[row])]


def by_key(gamma, key, scale, eps):
    """Returns of the turns that share a key, normalised; by (row, turn)."""
    groups = defaultdict(list)
    for row in LIVE:
        for number, value in enumerate(looped_returns(row, gamma)):
            groups[row // GROUP, key(row, number)].append((row, number, value))
    result = {}
    for members in groups.values():
        for (row, number, _), value in zip(members, normalised([m[2] for m in members], scale, eps), strict=True):
            result[row, number] = value
    return result


def state_of(row, number):
    state = ROWS[row][number].state
    return repr(sorted(state.items())) if isinstance(state, dict) else repr(state)


@pytest.mark.parametrize("scale", ["group", "none"])
def test_gigpo(scale):
    steps = by_key(0.9, state_of, scale, 1e-6)
    for first in (0, GROUP):
        rows = [row for row in LIVE if first <= row < first + GROUP]
        for row, episode in zip(rows, normalised(SCORES[rows], scale, 1e-6), strict=True):
            for number in range(len(ROWS[row])):
                steps[row, number] = episode + 0.5 * steps[row, number]
    ours = gigpo_advantages(SCORES, turns_of(), mask(), GROUP, scale, omega=0.5, gamma=0.9)
    np.testing.assert_allclose(ours, spread(defaultdict(float, steps)), atol=1e-5)


def test_gigpo_of_the_batch():
    returns = np.array([value for row in LIVE for value in looped_returns(row, 0.95)])
    steps = by_key(0.95, state_of, "none", 0.0)
    expected = {key: value / (returns.std(ddof=1) + 1e-6) for key, value in steps.items()}
    ours = gigpo_advantages(SCORES, turns_of(), mask(), GROUP, "batch") - gigpo_advantages(
        SCORES, turns_of(), mask(), GROUP, "batch", omega=0.0
    )
    np.testing.assert_allclose(ours, spread(defaultdict(float, expected)), atol=1e-5)


@pytest.mark.parametrize("scale", ["group", "none"])
def test_turns_of_the_same_number(scale):
    expected = by_key(0.8, lambda row, number: number, scale, 1e-4)
    ours = turn_advantages(turns_of(), mask(), GROUP, scale, gamma=0.8)
    np.testing.assert_allclose(ours, spread(defaultdict(float, expected)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", ["group", "none"])
def test_steps_of_a_process_reward_model(scale):
    """DeepSeekMath's: rewards of all steps of a group normalised together, and summed from a step on."""
    turns = turns_of()
    expected = {}
    for first in range(0, len(ROWS), GROUP):
        rewards = {row: [float(x) for x in turns.rewards[row] if x == x] for row in range(first, first + GROUP)}
        flat = normalised([x for own in rewards.values() for x in own], scale, 1e-4)
        for row, own in rewards.items():
            z, flat = flat[: len(own)], flat[len(own) :]
            expected |= {(row, number): z[number:].sum() for number in range(len(own))}
    ours = process_advantages(turns, mask(), GROUP, scale)
    np.testing.assert_allclose(ours, spread(defaultdict(float, expected)), rtol=1e-4, atol=1e-5)


def test_ppo_with_the_reward_of_each_turn_at_its_end():
    """Against a loop over a row's sampled tokens: r at the end of each turn, a KL penalty on every token."""
    draw = np.random.default_rng(0)
    values, kl, live = draw.normal(size=mask().shape), draw.random(mask().shape), mask()
    live[np.isnan(SCORES)] = 0
    penalised = SCORES - 0.1 * (kl * live).sum(axis=1)
    ours = turn_ppo_advantages(
        token_rewards(SCORES, live, kl, 0.1), values, turns_of(penalised), live, 0.9, 0.8, whiten_advantages=False
    )
    expected = np.zeros((2, *live.shape))
    for row in range(len(ROWS)):
        columns = np.flatnonzero(live[row])
        rewards = -0.1 * kl[row]
        for turn in ROWS[row][:-1]:
            rewards[PROMPT + turn.end - 1] += turn.reward
        if columns.size:
            rewards[columns[-1]] += SCORES[row] - sum(turn.reward for turn in ROWS[row][:-1])
        advantage = following = 0.0
        for column in columns[::-1]:
            advantage = rewards[column] + 0.9 * following - values[row, column] + 0.9 * 0.8 * advantage
            expected[:, row, column] = advantage, advantage + values[row, column]
            following = values[row, column]
    np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_turns_of_one_turn_are_grpo():
    from jaxrl_llm.algorithms.advantages import group_advantages

    scores = np.float32([1, 0, 0, 1, 2, 2, NAN, 5])
    table = with_outcome(turn_table([[Turn(4, 0.0)]] * 8, 1, GROUP, PROMPT), scores)
    live = np.zeros((8, COLUMNS), np.float32)
    live[:, PROMPT : PROMPT + 4] = 1
    expected = np.asarray(group_advantages(scores, GROUP))[:, None] * live
    np.testing.assert_array_equal(turn_advantages(table, live, GROUP), expected)
    np.testing.assert_array_equal(mt_grpo_advantages(table, live, GROUP), expected)


def test_mt_grpo():
    rewards = {row: np.diff([*[-x for x in looped_returns(row, 1.0)], 0.0]) for row in LIVE}
    expected = defaultdict(float)
    for first in (0, GROUP):
        rows = [row for row in LIVE if first <= row < first + GROUP]
        outcomes = dict(zip(rows, normalised([rewards[row][-1] for row in rows], "group", 1e-4), strict=True))
        for number in range(WIDTH):
            on = [row for row in rows if len(ROWS[row]) > number + 1]
            own = (
                dict(zip(on, normalised([rewards[row][number] for row in on], "group", 1e-4), strict=True))
                if on
                else {}
            )
            for row in rows:
                if len(ROWS[row]) > number:
                    expected[row, number] = outcomes[row] + 2.0 * own.get(row, 0.0)
    ours = mt_grpo_advantages(turns_of(), mask(), GROUP, coef=2.0)
    np.testing.assert_allclose(ours, spread(expected), rtol=1e-4, atol=1e-5)


def test_rewards_sum_to_the_score():
    for weight in (0.0, 1.0, 2.0):
        rewards = np.asarray(turns_of(weight=weight).rewards)
        np.testing.assert_allclose(np.nansum(rewards[LIVE], axis=1), SCORES[LIVE], atol=1e-6)
        assert np.isnan(rewards[6]).all()
    np.testing.assert_allclose(turns_of(weight=2.0).rewards[0], [0.0, 1.0, 0.5], atol=1e-6)
    returns = np.asarray(turn_returns(turns_of().rewards, 0.5))
    np.testing.assert_allclose(returns[0], looped_returns(0, 0.5), atol=1e-6)
    assert np.isnan(returns[1, 2])


def test_equal_returns_teach_nothing():
    rows = [[Turn(2, 0.1), Turn(5, 0.2, "x")]] * 4
    table = with_outcome(turn_table(rows, 2, 4, PROMPT), np.float32([0.3] * 4))
    live = np.ones((4, COLUMNS), np.float32)
    np.testing.assert_array_equal(gigpo_advantages(np.float32([0.3] * 4), table, live, 4), 0.0)


def test_tokens_of_turns():
    table = turn_table(ROWS, WIDTH, GROUP, PROMPT)
    numbers = np.tile(np.arange(1.0, WIDTH + 1), (len(ROWS), 1))
    np.testing.assert_array_equal(
        by_turn(numbers, table, mask()), spread({(r, k): k + 1 for r in range(8) for k in range(len(ROWS[r]))})
    )
    live, alone = sum(map(len, ROWS)), 2  # the wall, and the array
    np.testing.assert_allclose(shared_states(table, GROUP), (live - alone) / live)
