"""Metrics of a step's rollouts: rewards, lengths, and with a critic those of TRL's PPO."""

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import advantages as advantage_rules
from jaxrl_llm.algorithms.aggregation import masked_mean, masked_sum, masked_var
from jaxrl_llm.rollout.slots import Rollout


def reward_metrics(raw, scores, rewards, names: tuple[str, ...], group_size: int) -> dict[str, jax.Array]:
    """The metrics of combined rewards `raw`; groups teach nothing where `scores`, which are shaped, are the same."""
    scorable = ~jnp.isnan(raw)
    combined = spread("reward", raw, scorable)
    metrics = {
        "reward": combined["reward/mean"],
        "reward_max": combined["reward/max"],
        "reward_min": combined["reward/min"],
        "reward_std": _std(raw, scorable),
        "frac_reward_zero_std": advantage_rules.frac_zero_std(scores, group_size),
        "unscorable_rows": advantage_rules.unscorable_rows(rewards).sum(),
    }
    if group_size > 1:
        grouped = raw.reshape(-1, group_size)
        valid = ~jnp.isnan(grouped)
        metrics["reward_group_std"] = masked_mean(jnp.sqrt(masked_var(grouped, valid, axis=1)), valid.sum(axis=1) > 1)
    for i, name in enumerate(names):
        applies = ~jnp.isnan(rewards[:, i])
        metrics[f"rewards/{name}/mean"] = mean_metric(rewards[:, i], applies)
        metrics[f"rewards/{name}/std"] = _std(rewards[:, i], applies)
    return metrics


def length_metrics(rollout: Rollout) -> dict[str, jax.Array]:
    """The metrics of the lengths of prompts and completions, and of how they ended."""
    lengths, ended = rollout.lengths, rollout.finished
    prompts = (rollout.segments > 0).sum(axis=1) - lengths
    terminated = spread("terminated", lengths, ended)
    return {
        "prompts/mean_length": prompts.mean(),
        "prompts/min_length": prompts.min(),
        "prompts/max_length": prompts.max(),
        "completions/mean_length": lengths.mean(),
        "completions/min_length": lengths.min(),
        "completions/max_length": lengths.max(),
        "completions/mean_terminated_length": terminated["terminated/mean"],
        "completions/min_terminated_length": terminated["terminated/min"],
        "completions/max_terminated_length": terminated["terminated/max"],
        "completions/clipped_ratio": 1.0 - ended.mean(),
        # A row's first token comes from the prefill; idle slots give none.
        "rollout/useful_token_fraction": (lengths - 1).sum() / jnp.maximum(rollout.steps.sum(), 1.0),
        "num_tokens": (rollout.segments > 0).sum(),
    }


def objective_metrics(scores, mask, logps, penalty, kl_coef, rollout: Rollout) -> dict[str, jax.Array]:
    """TRL's metrics of PPO: means over rows of their sums over tokens."""
    scorable = ~jnp.isnan(scores)
    metrics = {"val/num_eos_tokens": rollout.finished.sum(), "objective/rlhf_reward": mean_metric(scores, scorable)}
    if logps is not None:
        metrics["objective/entropy"] = mean_metric(masked_sum(-logps, mask, axis=-1), scorable)
    if penalty is not None:
        kl = mean_metric(masked_sum(penalty, mask, axis=-1), scorable)
        metrics |= {"objective/kl": kl, "objective/non_score_reward": -kl_coef * kl}
        metrics["objective/rlhf_reward"] -= kl_coef * kl
    return metrics


def explained_variance(values, returns, mask) -> jax.Array:
    """`1 - var(returns - values) / var(returns)` over the mask: 1 for a perfect critic, 0 for a constant one.

    It is NaN where the mask is empty.
    """
    explained = 1.0 - masked_var(returns - values, mask) / jnp.maximum(masked_var(returns, mask), 1e-8)
    return jnp.where((mask > 0).any(), explained, jnp.nan)


def mean_metric(x, mask) -> jax.Array:
    """The mean over the mask for a metric: NaN, which is written as null, where the mask is empty."""
    return jnp.where((mask > 0).any(), masked_mean(x, mask), jnp.nan)


def _std(x, mask) -> jax.Array:
    return jnp.where((mask > 0).any(), jnp.sqrt(masked_var(x, mask)), jnp.nan)


def spread(name: str, x, mask) -> dict[str, jax.Array]:
    """Mean, maximum and minimum over the mask; NaN where it is empty."""
    live = mask > 0
    extremes = {"max": jnp.where(live, x, -jnp.inf).max(), "min": jnp.where(live, x, jnp.inf).min()}
    extremes = {f"{name}/{kind}": jnp.where(live.any(), value, jnp.nan) for kind, value in extremes.items()}
    return {f"{name}/mean": mean_metric(x, mask), **extremes}
