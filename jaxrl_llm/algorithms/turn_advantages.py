"""Credit for turns: advantages of episodes whose turns have rewards and states of their own, `[N, T]` by turn.

A row is an episode of up to M turns. `Turns` holds them in tables, which `turn_table` makes of the records of
environments and agents. Rows of a prompt are adjacent, as everywhere; NaN marks columns past a row's last turn, and
missing rewards.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms import advantages
from jaxrl_llm.algorithms.advantages import group_advantages
from jaxrl_llm.algorithms.aggregation import as_float, masked_var

Array = jax.Array

BEYOND = np.iinfo(np.int32).max  # the end of turns that a row does not have


class Turn(NamedTuple):
    """A turn of an episode: the tokens of its completion up to the turn's end, its reward, and the state it answered.

    States are the same where `state_key` is; None is the prompt.
    """

    end: int
    reward: float
    state: Any = None


class Turns(NamedTuple):
    """The turns of N rows in tables of M columns; numpy on the host, jax on the device.

    A state is a number, the index among the K*M turns of its group (row by row) of the first that answered it.
    """

    rewards: Any  # [N,M] float32; NaN past a row's last turn
    states: Any  # [N,M] int32; 0 past the last
    ends: Any  # [N,M] int32 the column behind the turn's last token; BEYOND past the last


def turn_table(rows: Sequence[Sequence[Turn]], width: int, group_size: int, first_column: int) -> Turns:
    """The turns of rows, of which each has at most `width`, completions beginning at `first_column`."""
    shape = len(rows), width
    table = Turns(np.full(shape, np.nan, np.float32), np.zeros(shape, np.int32), np.full(shape, BEYOND, np.int32))
    first: dict[str, int] = {}  # of the states of a group
    for row, turns in enumerate(rows):
        member = row % group_size
        if member == 0:
            first = {}
        for number, turn in enumerate(turns):
            key = state_key(turn.state)
            table.states[row, number] = first.setdefault(key, member * width + number)
            table.rewards[row, number], table.ends[row, number] = turn.reward, first_column + turn.end
    return table


def state_key(state: Any) -> str:
    """The key of a state, equal for equal states: its JSON, with the `repr` of values that JSON lacks."""
    return json.dumps(state, sort_keys=True, default=lambda x: x.tolist() if hasattr(x, "tolist") else repr(x))


def with_outcome(turns: Turns, scores, weight=1.0) -> Turns:
    """The turns with rewards that sum to the row's score: `weight` times their own, and the rest on the last turn.

    Shapes: `scores [N]`; a NaN score makes the row's rewards NaN. The rest is what other reward functions, shaping and
    penalties add, and all of the score where turns have no rewards.
    """
    rewards, scores = weight * turns.rewards, as_float(scores)[:, None]
    rest = scores - jnp.nansum(rewards, axis=1, keepdims=True)
    number = jnp.arange(rewards.shape[1])
    last = number == jnp.sum(~jnp.isnan(turns.rewards), axis=1, keepdims=True) - 1
    return turns._replace(rewards=jnp.where(jnp.isnan(scores), jnp.nan, rewards + jnp.where(last, rest, 0.0)))


def turn_returns(rewards, gamma=1.0) -> Array:
    """Returns discounted returns `[N, M]`, `G_k = r_k + gamma G_(k+1)` over the turns of a row; NaN where r is NaN."""
    rewards = as_float(rewards)

    def step(carry, reward):
        carry = jnp.nan_to_num(reward) + gamma * carry
        return carry, jnp.where(jnp.isnan(reward), jnp.nan, carry)

    return jax.lax.scan(step, jnp.zeros_like(rewards[:, 0]), rewards.T, reverse=True)[1].T


def compared_in_state(returns, states, group_size: int, scale: str = "group", eps: float = 1e-6) -> Array:
    """Returns each turn's return minus the mean return of its group's turns in the same state, `[N, M]`.

    Shapes: `returns [N, M]` with NaN where there is none (the result is 0 there), `states [N, M]` as in `Turns`.
    Divided by their unbiased standard deviation + eps (`scale="group"`), by that of all returns (`"batch"`), or not
    (`"none"`). A turn alone in its state gets 0.
    """
    shape = returns.shape
    valid = ~jnp.isnan(returns).reshape(-1)
    group = jnp.arange(shape[0])[:, None] // group_size
    index = (group * group_size * shape[1] + states).reshape(-1)

    def over_state(values):
        return jax.ops.segment_sum(jnp.where(valid, values, 0.0), index, valid.size)[index]

    returns, count = returns.reshape(-1), over_state(jnp.ones(valid.size))
    # Subtracting the first return of its state makes equal returns exact zeros.
    shifted = returns - jnp.nan_to_num(returns)[index]
    centered = shifted - over_state(shifted) / jnp.maximum(count, 1)
    if scale == "group":
        centered = centered / (jnp.sqrt(over_state(centered**2) / jnp.maximum(count - 1, 1)) + eps)
    elif scale == "batch":
        centered = centered / (jnp.sqrt(masked_var(returns, valid, ddof=1)) + eps)
    return jnp.nan_to_num(centered).reshape(shape)


def turn_advantages(turns: Turns, mask, group_size: int, scale: str = "group", gamma=1.0, eps: float = 1e-4) -> Array:
    """Returns advantages `[N, T]`: the return from each turn on, against those of its group's turns of the same number.

    Shapes: `turns` as `with_outcome` returns them, `mask [N, T]`. Formula: `A_k = (G_k - mean) / (std + eps)`, mean and
    unbiased std over the rows of the group that have a turn k; GRPO with one turn per row. A turn that no other row
    reached gets 0.
    """
    returns = turn_returns(turns.rewards, gamma)
    return by_turn(_of_each_number(returns, group_size, scale, eps), turns, mask)


def process_advantages(turns: Turns, mask, group_size: int, scale: str = "group", eps: float = 1e-4) -> Array:
    """Returns advantages `[N, T]`: the sum of the normalised rewards of a token's own step and of those behind it.

    Shapes: `turns` as `with_outcome` returns them, of which each is a step, `mask [N, T]`. Formula: `z = (r - mean) /
    (std + eps)` with the mean and the unbiased std of all steps of the rows of a prompt, and `A = sum of z` from the
    token's step on. Source: GRPO with process supervision, arXiv 2402.03300, section 4.1.3.
    """
    normalized = compared_in_state(turns.rewards, jnp.zeros_like(turns.states), group_size, scale, eps)
    return by_turn(turn_returns(normalized), turns, mask)


def turn_ppo_advantages(
    token_rewards, values, turns: Turns, mask, gamma=1.0, lam=0.95, whiten_rewards=False, whiten_advantages=True
) -> tuple[Array, Array]:
    """Returns PPO's advantages and value targets `[N, T]` of rewards that stand where turns or steps end.

    Shapes: `token_rewards, values, mask [N, T]`, `turns` as `with_outcome` returns them. The reward of a turn before a
    row's last is moved from the row's last token to its own, so that the critic learns the value of what is still to
    come; the rest is `ppo_advantages`. Source: step-by-step PPO, Math-Shepherd, arXiv 2312.08935, section 3.4.
    """
    live = jnp.asarray(turns.ends) != BEYOND
    before_last = jnp.arange(live.shape[1]) < live.sum(axis=1, keepdims=True) - 1
    earned = jnp.where(before_last, jnp.nan_to_num(turns.rewards), 0.0)
    rows = jnp.arange(live.shape[0])[:, None]
    moved = jnp.zeros(mask.shape).at[rows, jnp.asarray(turns.ends) - 1].add(earned, mode="drop") * (mask > 0)
    rewards = token_rewards + moved + advantages.token_rewards(-moved.sum(axis=1), mask)
    return advantages.ppo_advantages(rewards, values, mask, gamma, lam, whiten_rewards, whiten_advantages)


def mt_grpo_advantages(turns: Turns, mask, group_size: int, scale: str = "group", coef=1.0, eps: float = 1e-4) -> Array:
    """Returns advantages `[N, T]`: the outcome's on every turn, and `coef` times the turn's on all but a row's last.

    Shapes: `turns` as `with_outcome` returns them, `mask [N, T]`. Formula: with `A_out` the normalised reward of a
    row's last turn and `A_k` that of turn k among the group's rows that go on after it, `A = A_out + coef A_k` before
    the last turn and `A = A_out` on it. Source: MT-GRPO, arXiv 2505.11821 (two turns; `turn_advantage_coef` of its
    code).
    """
    rewards = turns.rewards
    count = jnp.sum(turns.ends != BEYOND, axis=1, keepdims=True)
    outcome = jnp.take_along_axis(rewards, jnp.maximum(count - 1, 0), axis=1)[:, 0]
    before_last = jnp.arange(rewards.shape[1]) < count - 1
    own = _of_each_number(jnp.where(before_last, rewards, jnp.nan), group_size, scale, eps)
    return by_turn(group_advantages(outcome, group_size, scale, eps)[:, None] + coef * own, turns, mask)


def gigpo_advantages(
    scores, turns: Turns, mask, group_size: int, scale: str = "group", omega=1.0, gamma=0.95, eps: float = 1e-6
) -> Array:
    """Returns advantages `[N, T]`: GRPO's of the episode plus `omega` times those of its turns in their states.

    Shapes: `scores [N]`, `turns` as `with_outcome` returns them, `mask [N, T]`. Formula: `A = A_E + omega A_S`, with
    `A_E = (R - mean) / (std + eps)` over the episodes of a prompt, and `A_S` the same of the returns discounted by
    gamma over all turns of these episodes that answered the same (anchor) state; `scale="none"` leaves the divisions
    out. Source: GiGPO, arXiv 2505.10978.
    """
    episodes = group_advantages(scores, group_size, scale, eps)[:, None]
    steps = compared_in_state(turn_returns(turns.rewards, gamma), turns.states, group_size, scale, eps)
    return by_turn(episodes + omega * steps, turns, mask)


def rae_advantages(scores, parts: Turns, roles, baselines, mask, decay=0.95) -> tuple[Array, Array]:
    """Returns advantages `[N, T]` of rows in which several roles played, and the baselines `[R]` of roles behind them.

    Shapes: `scores [N]`; `parts` with rewards of their own, NaN where they have the row's score; `roles [N, M]`
    says which of the R roles a part is; `baselines [R]`; `mask [N, T]`. Formula, from part to part and row to row:
    `A = r - b_role`, then `b_role = decay b_role + (1 - decay) r`, so that no reward is compared with itself. Rows with
    a NaN score get 0 and leave the baselines as they are. Source: role-conditioned advantage estimation, SPIRAL, arXiv
    2506.24119.
    """
    scores = as_float(scores)[:, None]
    rewards = jnp.where(jnp.isnan(parts.rewards), scores, parts.rewards)
    live = (jnp.asarray(parts.ends) != BEYOND) & ~jnp.isnan(scores)

    def step(baselines, part):
        reward, role, is_live = part
        advantage = jnp.where(is_live, reward - baselines[role], 0.0)
        return baselines.at[role].add((1.0 - decay) * advantage), advantage

    flat = (rewards.reshape(-1), jnp.asarray(roles).reshape(-1), live.reshape(-1))
    baselines, advantages = jax.lax.scan(step, as_float(baselines), flat)
    return by_turn(advantages.reshape(live.shape), parts, mask), baselines


def _of_each_number(values, group_size: int, scale: str, eps: float) -> Array:
    """`group_advantages` of each column of `values [N, M]`."""
    return jax.vmap(lambda column: group_advantages(column, group_size, scale, eps), 1, 1)(values)


def by_turn(values, turns: Turns, mask) -> Array:
    """Returns `values [N, M]` on the tokens `[N, T]` of their turns, 0 outside the mask and where they are NaN."""
    columns = jnp.arange(mask.shape[1])
    turn = jax.vmap(lambda ends: jnp.searchsorted(ends, columns, side="right"))(jnp.asarray(turns.ends))
    tokens = jnp.take_along_axis(jnp.nan_to_num(values), jnp.minimum(turn, values.shape[1] - 1), axis=1)
    return jnp.where(mask > 0, tokens, 0.0)


def shared_states(turns: Turns, group_size: int) -> Array:
    """Returns the share of turns whose state another turn of their group was in, a scalar."""
    live, width = turns.ends != BEYOND, turns.ends.shape[1]
    index = (jnp.arange(live.shape[0])[:, None] // group_size * group_size * width + turns.states).reshape(-1)
    count = jax.ops.segment_sum(live.reshape(-1).astype(jnp.int32), index, index.size)[index].reshape(live.shape)
    return jnp.sum(live & (count > 1)) / jnp.maximum(live.sum(), 1)
