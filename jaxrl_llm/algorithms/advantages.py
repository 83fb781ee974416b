"""From rewards to advantages: the rules, each `NAME_advantages`, and the scores and token rewards that they read.

    without a baseline        zero, raw_reward
    from the group's scores   group (GRPO, Dr. GRPO), gdpo, rloo, gpg, passk, pkpo, maxrl, opo
    from other completions    a2po (the reference's), remax (a greedy one)
    of tokens                 reinforce_plus_plus, reinforce_plus_plus_baseline, otb
    with a critic             ppo (by gae), vapo
    of turns and steps        see `turn_advantages`

Rows of one prompt are adjacent, so `[N]` scores reshape to `[B, group_size]`. NaN in a reward means "this reward
function does not apply to this row". A row for which no function applies is unscorable: its score is NaN, it takes no
part in baselines or standard deviations, and its advantage is 0. Outcome advantages are `[N]` (one number per row, to
be broadcast over its tokens); token-level ones are `[N, T]`.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxrl_llm.algorithms.aggregation import as_float, as_mask, masked_mean, masked_var, whiten

Array = jax.Array

SCALES = ("group", "batch", "none")


def combine_rewards(rewards, weights) -> Array:
    """Returns scores `[N]`, the weighted sum over the reward functions that apply to each row.

    Shapes: `rewards [N, R]` with NaN where a function does not apply, `weights [R]`. A row of NaN only gives NaN.
    Raises ValueError when there is not one weight per reward function.
    """
    rewards, weights = as_float(rewards), as_float(weights)
    if weights.shape != rewards.shape[-1:]:
        raise ValueError(f"got {weights.shape} reward weights for {rewards.shape[-1]} reward functions; pass one each")
    total = jnp.sum(jnp.where(jnp.isnan(rewards), 0.0, rewards) * weights, axis=-1)
    return jnp.where(unscorable_rows(rewards), jnp.nan, total)


def unscorable_rows(rewards) -> Array:
    """Returns booleans `[N]`, true where every one of `rewards [N, R]` is NaN."""
    return jnp.all(jnp.isnan(as_float(rewards)), axis=-1)


def _groups(scores, group_size: int) -> Array:
    scores = as_float(scores)
    if group_size < 1 or scores.shape[0] % group_size:
        raise ValueError(
            f"{scores.shape[0]} rows do not divide into groups of {group_size}; the rows of a prompt are adjacent and "
            "every prompt has group_size rows"
        )
    return scores.reshape(-1, group_size, *scores.shape[1:])


def _centered(grouped: Array) -> Array:
    """Returns `grouped [B, K, ...]` minus its mean over K, NaN where it was NaN.

    The first valid value is subtracted before the mean, so a group of equal scores gives exact zeros whatever the
    rounding of the mean.
    """
    valid = ~jnp.isnan(grouped)
    first = jnp.take_along_axis(grouped, jnp.argmax(valid, axis=1, keepdims=True), axis=1)
    shifted = grouped - first
    return shifted - masked_mean(shifted, valid, axis=1, keepdims=True)


def _normalized(grouped: Array, eps: float, leave_one_out: bool = False) -> Array:
    """Returns `grouped [B, K, ...]` centred and divided by its unbiased standard deviation + eps; NaN stays NaN.

    With `leave_one_out` both are of the others: `(r_i - mean_(j != i)) / (std_(j != i) + eps)`, not divided where the
    others are equal or fewer than two.
    """
    centered = _centered(grouped)
    if leave_one_out:
        valid = ~jnp.isnan(centered)
        count = valid.sum(axis=1, keepdims=True)
        # [B, K, K, ...]: before each row those of its group; equal ones have a std of exactly 0, whatever the rounding.
        apart = ~jnp.eye(grouped.shape[1], dtype=bool).reshape(grouped.shape[1], -1, *[1] * (grouped.ndim - 2))
        others = apart & valid[:, None]
        rows = jnp.broadcast_to(centered[:, None], others.shape)
        differ = jnp.where(others, rows, -jnp.inf).max(axis=2) > jnp.where(others, rows, jnp.inf).min(axis=2)
        std = jnp.sqrt(masked_var(rows, others, ddof=1, axis=2))
        baselined = jnp.where(count > 1, count / jnp.maximum(count - 1, 1) * centered, jnp.nan)
        return baselined / jnp.where(differ, std + eps, 1.0)
    std = jnp.sqrt(masked_var(centered, ~jnp.isnan(centered), ddof=1, axis=1, keepdims=True))
    return centered / (std + eps)


def _batch_std(scores: Array) -> Array:
    return jnp.sqrt(masked_var(scores, ~jnp.isnan(scores), ddof=1))


def zero_advantages(scores) -> Array:
    """Returns advantages `[N]` of 0: scores are measured only, and the teacher alone is learned from (distillation)."""
    return jnp.zeros_like(as_float(scores))


def raw_reward_advantages(scores) -> Array:
    """Returns advantages `[N]`, the scores themselves, without a baseline; NaN scores get 0.

    Whitened over tokens they are `reinforce_plus_plus_advantages`. Source: REINFORCE, Williams (1992); `raw_reward` of
    NeMo-RL, `reinforce` of ROLL.
    """
    return jnp.nan_to_num(as_float(scores), nan=0.0)


def group_advantages(
    scores, group_size: int, scale: str = "group", eps: float = 1e-4, leave_one_out: bool = False
) -> Array:
    """Returns advantages `[N]`: each score minus its group's mean, divided by a standard deviation.

    Shapes: `scores [N]`, N = B * group_size with the rows of a prompt adjacent. Formula: `(r - mean) / (std + eps)`
    with the unbiased standard deviation of the group (`scale="group"`), of all scores (`"batch"`, the group mean is
    still what is subtracted), or no division (`"none"`, Dr. GRPO). NaN scores are left out of every mean and standard
    deviation and get 0. A group with one score gets 0 (there is no baseline), as does a group of equal scores.
    `leave_one_out` compares each score with the others of its group, in mean and standard deviation; where these are
    equal, or fewer than two, there is no division. It is for `scale="group"`: undivided it is `rloo_advantages`.
    Raises ValueError for an unknown scale, one without leave_one_out, or when N is not a multiple of group_size.
    Source: GRPO, arXiv 2402.03300; eps 1e-4 as TRL (verl 1e-6); Dr. GRPO, arXiv 2503.20783; `leave_one_out` (with eps
    1e-6) as NeMo-RL's `use_leave_one_out_baseline`.
    """
    grouped = _groups(scores, group_size)
    if leave_one_out and scale != "group":
        raise ValueError(
            f"leave_one_out divides each score by a standard deviation of its own, for which scale is 'group'; got "
            f"{scale!r}: rloo has the same baseline without division"
        )
    if scale == "group":
        advantages = _normalized(grouped, eps, leave_one_out)
    elif scale == "batch":
        advantages = _centered(grouped) / (_batch_std(grouped) + eps)
    elif scale == "none":
        advantages = _centered(grouped)
    else:
        raise ValueError(f"unknown advantage scale {scale!r}; choose one of {', '.join(SCALES)}")
    return jnp.nan_to_num(advantages.reshape(-1), nan=0.0)


def gdpo_advantages(
    rewards, weights, group_size: int, batch_normalize: bool = True, eps: float = 1e-4, leave_one_out: bool = False
) -> Array:
    """Returns advantages `[N]`: each reward normalised in its group by itself, then summed, then normalised again.

    Shapes: `rewards [N, R]` with NaN where a function does not apply, `weights [R]`. Formula:
    `z_k = (r_k - mean_group) / (std_group + eps)`, `s = sum_k w_k z_k` over the functions that apply, and
    `A = (s - mean_batch) / (std_batch + eps)`; `batch_normalize=False` returns s. Standard deviations are unbiased.
    `leave_one_out` compares each reward with the others of its group, as in `group_advantages`.
    With one reward this is not GRPO: the batch normalisation changes the scale.
    Raises ValueError when weights and reward functions differ in number or N is not a multiple of group_size.
    Source: GDPO, arXiv 2601.05242.
    """
    normalized = _normalized(_groups(rewards, group_size), eps, leave_one_out)
    scores = combine_rewards(normalized.reshape(-1, normalized.shape[-1]), weights)
    if batch_normalize:
        scores = (scores - masked_mean(scores, ~jnp.isnan(scores))) / (_batch_std(scores) + eps)
    return jnp.nan_to_num(scores, nan=0.0)


def rloo_advantages(scores, group_size: int, normalize: bool = False, eps: float = 1e-4) -> Array:
    """Returns advantages `[N]`: each score minus the mean of the other scores of its group.

    Shapes: `scores [N]`. Formula: `A = G / (G - 1) * (r - mean_group)` with G the number of scores in the group that
    are not NaN; NaN scores, and a score without siblings, get 0. `normalize=True` then standardises over the batch,
    `(A - mean) / (std + eps)`, over the rows that have siblings. Raises ValueError when N is not a multiple of
    group_size. Source: RLOO, arXiv 2402.14740.
    """
    grouped = _groups(scores, group_size)
    count = jnp.sum(~jnp.isnan(grouped), axis=1, keepdims=True)
    advantages = jnp.where(count > 1, count / jnp.maximum(count - 1, 1) * _centered(grouped), jnp.nan)
    if normalize:
        mean = masked_mean(advantages, ~jnp.isnan(advantages))
        advantages = (advantages - mean) / (_batch_std(advantages) + eps)
    return jnp.nan_to_num(advantages.reshape(-1), nan=0.0)


def gpg_advantages(scores, group_size: int, f_norm=1.0) -> Array:
    """Returns advantages `[N]`: each score minus its group's mean, times the inverse share of scores that are not 0.

    Shapes: `scores [N]`. Formula: `A = alpha (r - mean_group) / f_norm`, `alpha = n / max(count(r != 0), 1)` over the n
    scores of the batch. NaN scores are left out and get 0, as does a group with one score. Raises ValueError when N is
    not a multiple of group_size. Source: GPG, arXiv 2504.02546, with alpha as in verl.
    """
    scores = as_float(scores)
    valid = ~jnp.isnan(scores)
    alpha = valid.sum() / jnp.maximum((valid & (scores != 0)).sum(), 1)
    return alpha / f_norm * group_advantages(scores, group_size, scale="none")


def passk_advantages(scores, group_size: int, normalize: bool = True, eps: float = 1e-6) -> Array:
    """Returns advantages `[N]` that are zero except for the best row of each group: best minus second best.

    Shapes: `scores [N]`. With `normalize` the difference is divided by the group's unbiased standard deviation + eps.
    NaN scores never win; a group with fewer than two scores gets 0. Raises ValueError when group_size < 2 or N is not a
    multiple of it. Source: pass@k training, arXiv 2503.19595.
    """
    if group_size < 2:
        raise ValueError(f"pass@k advantages compare the two best rows of a group; got group_size {group_size}")
    grouped = _groups(scores, group_size)
    valid = ~jnp.isnan(grouped)
    best, second = jnp.moveaxis(jax.lax.top_k(jnp.where(valid, grouped, -jnp.inf), 2)[0], -1, 0)
    gap = jnp.where(valid.sum(axis=1) > 1, best - second, 0.0)
    if normalize:
        gap = gap / (jnp.sqrt(masked_var(grouped, valid, ddof=1, axis=1)) + eps)
    winner = jnp.argmax(jnp.where(valid, grouped, -jnp.inf), axis=1)
    return (jax.nn.one_hot(winner, group_size, dtype=gap.dtype) * gap[:, None]).reshape(-1)


def pkpo_advantages(scores, group_size: int, k: int = 4) -> Array:
    """Returns advantages `[N]`: what each row adds, on average, to the best score of k rows of its group.

    Shapes: `scores [N]`, N = B * group_size with the rows of a prompt adjacent; any numbers. The expected policy
    gradient is that of the expected maximum of k samples. Formula, over all sets I of k of the group's n scores:
    `s_i = sum_(I with i) (max(I) - max(I without i)) / C(n, k)`, summed in closed form over the scores in rising order.
    With k = n it is `passk` without its division. NaN scores are left out and get 0, as do groups of fewer than k
    scores. Raises ValueError where k is not 2 to group_size, or N not a multiple of it.
    Source: PKPO (leave one out minus one), arXiv 2505.15201, eq. 33.
    """
    if not 2 <= k <= group_size:
        raise ValueError(f"pkpo compares sets of k rows of a group: k is {k}, but takes 2 to group_size = {group_size}")
    grouped = _groups(scores, group_size)
    valid = ~jnp.isnan(grouped)
    order = jnp.argsort(jnp.where(valid, grouped, jnp.inf), axis=1)  # rows without a score come last
    count = valid.sum(axis=1, keepdims=True)
    place = jnp.arange(group_size)
    # Subtracting the lowest score changes no difference of two maxima, and makes equal scores exact zeros.
    rising = jnp.nan_to_num(jnp.take_along_axis(grouped - jnp.nanmin(grouped, axis=1, keepdims=True), order, axis=1))
    # The row at place i, from 0, raises the maximum of the C(i, k-1) sets of itself and k - 1 rows below it. The row at
    # place j < i is the largest of those below in C(j, k-2) of these sets. Both are shares of the C(n, k) sets of a
    # group with n scores, divided as integers: those of 256 rows are larger than a float holds.
    places, sizes = range(group_size), range(k, group_size + 1)
    shares = np.zeros((2, group_size + 1, group_size))
    for row, r in enumerate((k - 1, k - 2)):
        shares[row, k:] = [[math.comb(min(i, n), r) / math.comb(n, k) for i in places] for n in sizes]
    own, others = jnp.asarray(shares, rising.dtype)[:, count[:, 0]]
    live = jnp.where(place < count, rising, 0.0)
    below = jnp.cumsum(others * live, axis=1) - others * live
    added = jnp.where(place < count, own * live - below, 0.0)
    return jnp.take_along_axis(added, jnp.argsort(order, axis=1), axis=1).reshape(-1)


def maxrl_advantages(scores, group_size: int) -> Array:
    """Returns advantages `[N]`: `(r - mean) / mean` of the group, 0 where the mean is not above 0.

    Shapes: `scores [N]`, N = B * group_size, 0 or 1 each. NaN scores are left out and get 0. A prompt that is solved
    seldom counts more; the expected gradient is that of the likelihood of success to the order group_size. Raises
    ValueError when N is not a multiple of group_size. Source: MaxRL, arXiv 2602.02710.
    """
    grouped = _groups(scores, group_size)
    mean = masked_mean(grouped, ~jnp.isnan(grouped), axis=1, keepdims=True)
    advantages = jnp.where(mean > 0, _centered(grouped) / jnp.where(mean > 0, mean, 1.0), 0.0)
    return jnp.nan_to_num(advantages.reshape(-1), nan=0.0)


def opo_advantages(scores, lengths, group_size: int) -> Array:
    """Returns advantages `[N]`: each score minus the length-weighted mean score of its group.

    Shapes: `scores [N]`, `lengths [N]` in tokens. Formula: `A_i = r_i - sum_j len_j r_j / sum_j len_j`. NaN scores are
    left out and get 0. Raises ValueError when N is not a multiple of group_size. Source: OPO, arXiv 2505.23585.
    """
    grouped, lengths = _groups(scores, group_size), _groups(lengths, group_size)
    lengths = jnp.where(jnp.isnan(grouped), 0.0, lengths)
    centered = _centered(grouped)
    weighted = jnp.sum(lengths * jnp.nan_to_num(centered), axis=1, keepdims=True)
    baseline = weighted / jnp.maximum(lengths.sum(axis=1, keepdims=True), 1.0)
    return jnp.nan_to_num((centered - baseline).reshape(-1), nan=0.0)


def a2po_advantages(scores, reference_scores, beta1: float = 0.5) -> Array:
    """Returns advantages `[N]`: each score minus the optimal value of its prompt, `r - V*`.

    Shapes: `scores [N]`, `reference_scores [N, n]` of the reference's completions of each row's prompt; `beta1` is the
    beta of `optimal_values`. NaN on either side gives 0. Raises ValueError unless beta1 is above 0.
    Source: A*-PO, arXiv 2505.20686; beta1 0.5 as TRL.
    """
    return jnp.nan_to_num(as_float(scores) - optimal_values(reference_scores, beta1), nan=0.0)


def optimal_values(reference_scores, beta: float) -> Array:
    """Returns `V* = beta log(mean_i exp(r_i / beta))` `[N]`: the value of the policy that is best under a KL penalty.

    Shapes: `reference_scores [N, n]`, scores of n samples of the reference, from which the penalty of weight beta
    counts. It lies between their mean (large beta) and their largest (small beta). NaN scores are left out; a row
    without others gives NaN. Raises ValueError unless beta is above 0. Source: A*-PO, arXiv 2505.20686.
    """
    if beta <= 0:
        raise ValueError(f"the weight of the KL penalty that an optimal value is of must be above 0; got {beta}")
    scores = as_float(reference_scores)
    valid = ~jnp.isnan(scores)
    total = jax.nn.logsumexp(jnp.where(valid, scores / beta, -jnp.inf), axis=-1)
    return beta * (total - jnp.log(valid.sum(axis=-1)))  # of no score -inf - -inf, NaN


def remax_advantages(scores, greedy_scores) -> Array:
    """Returns advantages `[N]`: each score minus the score of the greedy completion of the same prompt.

    Shapes: `scores [N]`, `greedy_scores [B]`, one per prompt, with N a multiple of B. NaN on either side gives 0.
    Raises ValueError when N is not a multiple of B. Source: ReMax, arXiv 2310.10505.
    """
    scores, greedy_scores = as_float(scores), as_float(greedy_scores)
    rows, prompts = scores.shape[0], greedy_scores.shape[0]
    if rows % prompts:
        raise ValueError(f"{rows} scores do not divide among {prompts} greedy scores; pass one greedy score per prompt")
    return jnp.nan_to_num(scores - jnp.repeat(greedy_scores, rows // prompts), nan=0.0)


def reinforce_plus_plus_advantages(token_rewards, mask, gamma=1.0, ddof: int = 1, divide: bool = True) -> Array:
    """Returns advantages `[N, T]`: discounted returns of the token rewards, whitened over all tokens of the batch.

    Shapes: `token_rewards, mask [N, T]`; zero outside the mask. See `discounted_returns` for how gaps are crossed and
    `whiten` for the normalisation, `ddof` and `divide`. Source: REINFORCE++, arXiv 2501.03262; `ddof=0` as OpenRLHF.
    """
    return whiten(discounted_returns(token_rewards, mask, gamma), mask, ddof=ddof, divide=divide)


def reinforce_plus_plus_baseline_advantages(scores, mask, group_size: int, ddof: int = 1, divide: bool = True) -> Array:
    """Returns advantages `[N, T]`: scores minus their group's mean, spread over tokens and whitened token by token.

    Shapes: `scores [N]`, `mask [N, T]`; zero outside the mask. The whitening counts tokens, so a long completion weighs
    more than a short one; `ddof` and `divide` are its. Rows with a NaN score take no part and get 0. Raises ValueError
    when N is not a multiple of group_size. Source: REINFORCE++-baseline, arXiv 2501.03262; `ddof=0` as OpenRLHF.
    """
    advantages = group_advantages(scores, group_size, scale="none")
    mask = as_mask(mask) & ~jnp.isnan(as_float(scores))[:, None]
    return whiten(jnp.broadcast_to(advantages[:, None], mask.shape), mask, ddof=ddof, divide=divide)


def otb_advantages(token_rewards, logit_norms, mask, group_size: int, eps: float = 1e-8) -> Array:
    """Returns advantages `[N, T]`: the reward to go of each token minus the baseline of least variance at its place.

    Shapes: `token_rewards, logit_norms, mask [N, T]`, N = B * group_size with the rows of a prompt adjacent;
    `logit_norms` are squared norms of the gradient of a token's log-prob by the logits, `1 - 2 p + sum_v p_v^2`.
    Formula, with G_t the sum of a row's rewards from its t-th sampled token on and W_t that of its norms up to it, over
    the rows of the group that have a t-th: `A_t = G_t - sum(G_t W_t) / (sum(W_t) + eps)`. Where no other row is as long
    there is no baseline, `A_t = G_t`. Zero outside the mask. Raises ValueError when N is not a multiple of group_size.
    Source: optimal token baseline, arXiv 2602.07078, as verl 0.9 (`tir_optimal_token_baseline` where
    observations stand between tokens).
    """
    returns = discounted_returns(token_rewards, mask)
    mask = as_mask(mask, returns.shape)
    norms = jnp.cumsum(jnp.where(mask, as_float(logit_norms), 0.0), axis=1)
    # Column t becomes a row's t-th sampled token, whatever stands between sampled tokens.
    order, live = jnp.argsort(~mask, axis=1, stable=True), jnp.sort(~mask, axis=1) == 0
    returns, norms = (jnp.where(live, jnp.take_along_axis(x, order, axis=1), 0.0) for x in (returns, norms))
    returns, norms, live = (_groups(x, group_size) for x in (returns, norms, live))
    # Subtracting the first return that there is makes equal returns exact zeros.
    shifted = returns - jnp.take_along_axis(returns, jnp.argmax(live, axis=1, keepdims=True), axis=1)
    baseline = jnp.sum(shifted * norms, axis=1, keepdims=True) / (jnp.sum(norms, axis=1, keepdims=True) + eps)
    advantages = jnp.where(live.sum(axis=1, keepdims=True) > 1, shifted - baseline, returns).reshape(mask.shape)
    place = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
    return jnp.where(mask, jnp.take_along_axis(advantages, place, axis=1), 0.0)


def discounted_returns(token_rewards, mask, gamma=1.0) -> Array:
    """Returns the discounted sum `[N, T]` of the rewards from each token on, carried across gaps of the mask.

    Shapes: `token_rewards, mask [N, T]`. Formula, from the right: `R_t = r_t + gamma * R_(t+1)` on the mask and
    `R_t = R_(t+1)` outside it, so tool outputs between two model turns neither cut nor discount the credit.
    """
    token_rewards = as_float(token_rewards)

    def step(carry, inputs):
        reward, live = inputs
        carry = jnp.where(live, reward + gamma * carry, carry)
        return carry, carry

    inputs = (token_rewards.T, as_mask(mask, token_rewards.shape).T)
    return jax.lax.scan(step, jnp.zeros_like(token_rewards[:, 0]), inputs, reverse=True)[1].T


def gae(token_rewards, values, mask, gamma=1.0, lam: ArrayLike = 1.0) -> tuple[Array, Array]:
    """Returns generalised advantage estimates and value targets, `(advantages [N, T], returns [N, T])`.

    Shapes: `token_rewards, values, mask [N, T]`; both results are zero outside the mask. Formula, from the right and
    over masked tokens only: `delta_t = r_t + gamma * V_next - V_t`, `A_t = delta_t + gamma * lam * A_next` (`lam` a
    number, or one for each row `[N]`), `returns = A + V`; the value after the last token is 0. Outside the mask A_next
    and V_next are carried through, so values and rewards on observation tokens have no effect. The advantages are not
    whitened.
    Source: GAE, arXiv 1506.02438.
    """
    token_rewards, values = as_float(token_rewards), as_float(values)
    mask = as_mask(mask, token_rewards.shape)

    def step(carry, inputs):
        next_advantage, next_value = carry
        reward, value, live = inputs
        advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
        carry = (jnp.where(live, advantage, next_advantage), jnp.where(live, value, next_value))
        return carry, carry[0]

    zeros = jnp.zeros_like(token_rewards[:, 0] + values[:, 0])
    advantages = jax.lax.scan(step, (zeros, zeros), (token_rewards.T, values.T, mask.T), reverse=True)[1].T
    return jnp.where(mask, advantages, 0.0), jnp.where(mask, advantages + values, 0.0)


def ppo_advantages(
    token_rewards, values, mask, gamma=1.0, lam: ArrayLike = 0.95, whiten_rewards=False, whiten_advantages=True,
    ddof: int = 1, divide: bool = True, lam_critic=None,
) -> tuple[Array, Array]:  # fmt: skip
    """Returns PPO's advantages and value targets, `(advantages [N, T], returns [N, T])`: `gae`, then whitened.

    Shapes: `token_rewards, values, mask [N, T]`; zero outside the mask. `whiten_rewards` first scales the token rewards
    to unit variance over the mask and keeps their mean. The returns are taken before the advantages are whitened, by
    `whiten` with `ddof` (0 in OpenRLHF) and `divide`; their decay is `lam_critic`, None: lam. Source: PPO, arXiv
    1707.06347, as for language models in arXiv 1909.08593; lam 0.95 as TRL (verl has 1); decays apart, of which the
    critic's is 1, VC-PPO, arXiv 2503.01491.
    """
    if whiten_rewards:
        token_rewards = whiten(token_rewards, mask, shift_mean=False)
    advantages, returns = gae(token_rewards, values, mask, gamma, lam)
    if lam_critic is not None:
        _, returns = gae(token_rewards, values, mask, gamma, lam_critic)
    if whiten_advantages:
        advantages = whiten(advantages, mask, ddof=ddof, divide=divide)
    return advantages, returns


def vapo_advantages(
    token_rewards, values, mask, gamma=1.0, alpha=0.05, lam_critic=1.0, whiten_advantages=True
) -> tuple[Array, Array]:
    """Returns VAPO's advantages and value targets, `(advantages [N, T], returns [N, T])`, of two decays.

    Shapes: `token_rewards, values, mask [N, T]`; zero outside the mask. The policy's decay grows with the l tokens of a
    row, `lam = 1 - 1 / (alpha l)` and at least 0, so that the reward of the last token reaches the first one of long
    rows too; the critic's targets have `lam_critic`, with 1 the plain returns. Source: VAPO (length-adaptive GAE),
    arXiv 2504.05118; decays apart, VC-PPO, arXiv 2503.01491.
    """
    length = as_mask(mask).sum(axis=1)
    lam = jnp.maximum(1.0 - 1.0 / (alpha * jnp.maximum(length, 1)), 0.0)
    return ppo_advantages(token_rewards, values, mask, gamma, lam, False, whiten_advantages, lam_critic=lam_critic)


def token_rewards(scores, mask, kl=None, beta=0.0) -> Array:
    """Returns rewards `[N, T]`: the score on the last token of the mask (the EOS), minus `beta * kl` on every token.

    Shapes: `scores [N]`, `mask [N, T]`, `kl [N, T]` any per-token KL estimate. Zero outside the mask; the result is
    float32 whatever the type of the scores. A row without tokens gets nothing. A NaN score stays NaN: take the
    unscorable rows out of the mask first (`unscorable_rows`).
    """
    scores = as_float(scores)
    mask = as_mask(mask)
    is_last = mask & (jnp.cumsum(mask[:, ::-1], axis=1)[:, ::-1] == 1)
    rewards = jnp.where(is_last, scores[:, None], 0.0)
    return rewards if kl is None else rewards - jnp.where(mask, beta * as_float(kl), 0.0)


def soft_overlong_punishment(lengths, max_length: int, cache: int) -> Array:
    """Returns penalties `[N]`: 0 up to `max_length - cache` tokens, falling linearly to -1 at `max_length`, then -1.

    Shapes: `lengths [N]` in tokens. Raises ValueError unless 0 <= cache <= max_length; `cache=0` is a step at
    max_length. Source: DAPO eq. 13, arXiv 2503.14476.
    """
    if not 0 <= cache <= max_length:
        raise ValueError(f"soft overlong cache must lie between 0 and max_length {max_length}; got {cache}")
    lengths = as_float(lengths)
    ramp = (max_length - cache - lengths) / max(cache, 1)
    return jnp.where(lengths > max_length, -1.0, jnp.where(lengths <= max_length - cache, 0.0, ramp))


def missing_eos_penalty(scores, finished, penalty) -> Array:
    """Returns scores `[N]` with `penalty` subtracted from the rows that did not end with a stop token.

    Shapes: `scores, finished [N]`. `finished` comes from the sampler, which knows whether the completion stopped; an
    EOS id inside the prompt cannot be mistaken for an ending.
    """
    scores = as_float(scores)
    return jnp.where(jnp.asarray(finished), scores, scores - penalty)


def flat_groups(scores, group_size: int) -> Array:
    """Returns booleans `[B]`, true where all scores of a group are equal (NaN left out), so no gradient comes from it.

    Shapes: `scores [N]`. A group without any score, or with a single one, is flat. Raises ValueError when N is not a
    multiple of group_size.
    """
    grouped = _groups(scores, group_size)
    valid = ~jnp.isnan(grouped)
    highest = jnp.where(valid, grouped, -jnp.inf).max(axis=1)
    return jnp.where(valid, grouped, jnp.inf).min(axis=1) >= highest


def frac_zero_std(scores, group_size: int) -> Array:
    """Returns the fraction of groups whose scores are all equal, a scalar; see `flat_groups`."""
    return jnp.mean(flat_groups(scores, group_size).astype(jnp.float32))
