"""From rewards to advantages: what `algorithm` adds to the scores, the rule it names, and the metrics of both."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms import advantages as advantage_rules
from jaxrl_llm.algorithms.aggregation import masked_mean, masked_sum, masked_var
from jaxrl_llm.algorithms.kl import kl_estimate
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.resolve import resolve_with_options
from jaxrl_llm.rollout.engine import Rollout
from jaxrl_llm.training.objective_specs import kl_estimator

# What a rule may ask for, by the names of its arguments. It returns advantages [N] or [N,T], and with a critic a pair:
# advantages and the returns [N,T] that its values should have been.
INPUTS = (
    "scores",  # [N] combined rewards, with what `algorithm` adds to them
    "rewards",  # [N,R] as the reward functions gave them, NaN where one does not apply
    "weights",  # [R] of the reward functions
    "token_rewards",  # [N,T] the score on the last token, the KL penalty on each
    "values",  # [N,T] of the critic
    "greedy_scores",  # [B] of one greedy completion of each prompt
    "mask",  # [N,T] tokens the loss reads, without the rows that no reward applies to
    "lengths",  # [N] sampled tokens
    "finished",  # [N] ended with an end-of-text token
    "group_size",
    "scale",  # algorithm.scale_rewards
)


class Advantages(NamedTuple):
    """What scoring gives."""

    values: jax.Array  # [N,T], 0 outside the mask
    priority: jax.Array  # [B] std of a group's scores x mean |advantage|; 0 where all its completions score alike
    returns: jax.Array | None  # [N,T] of a rule with a critic
    mask: jax.Array  # [N,T] tokens the loss reads: with a critic not those of rows that no reward applies to
    kl: jax.Array | None  # mean over rows of their mean KL per token; None without reference log-probs
    metrics: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Scorer:
    """Turns the rewards of a rollout into advantages: shaping, KL penalty, rule. Pure, and jitted with itself fixed."""

    rule: Callable[..., jax.Array]
    options: tuple[tuple[str, Any], ...]
    group_size: int
    scale: str
    reward_names: tuple[str, ...]
    kl: str  # estimator
    kl_in_reward: bool
    max_completion_length: int
    overlong_buffer: int
    missing_eos_penalty: float
    reward_clip: tuple[float, ...] = ()

    def asks_for(self, name: str) -> bool:
        """True when the rule has an argument `name`."""
        return name in inspect.signature(self.rule).parameters

    def flat_groups(self, rewards: np.ndarray, weights) -> np.ndarray:
        """Booleans `[B]`, true where all completions of a prompt score alike, so that nothing can be learned from them.

        Alike is the combined score, or each reward by itself for a rule that takes them apart (gdpo).
        """
        columns = rewards.T if self.asks_for("rewards") else [advantage_rules.combine_rewards(rewards, weights)]
        flat = [np.asarray(advantage_rules.flat_groups(column, self.group_size)) for column in columns]
        return np.all(flat, axis=0)

    @functools.partial(jax.jit, static_argnums=0)
    def __call__(
        self,
        rollout: Rollout,
        mask,
        rewards,
        weights,
        logps=None,
        ref_logps=None,
        kl_coef=0.0,
        greedy_rewards=None,
        values=None,
        greedy_rollout: Rollout | None = None,
    ) -> Advantages:
        """Advantages of `rewards [N,R]` over `mask [N,T]`, and the step's reward and length metrics of all processes.

        `logps` and `ref_logps` `[N,T]` are of the policy and the reference; `greedy_rewards [B,R]` and
        `greedy_rollout` of one greedy completion of each prompt and `values [N,T]` of the critic, for a rule that asks
        for them.
        """
        raw = advantage_rules.combine_rewards(rewards, weights)
        scores = self._shape(raw, rollout)
        scorable = ~jnp.isnan(raw)
        metrics = _reward_metrics(raw, rewards, self.reward_names, self.group_size) | _length_metrics(rollout)
        if self.overlong_buffer or self.missing_eos_penalty or self.reward_clip:
            metrics["reward_shaping"] = masked_mean(scores - raw, scorable)
        kl = penalty = None
        if ref_logps is not None:
            estimate = kl_estimate(logps, ref_logps, self.kl)
            kl = masked_mean(masked_mean(estimate, mask, axis=-1), mask.any(axis=-1))
            if self.kl_in_reward:
                penalty = jnp.where(mask > 0, estimate, 0.0)
                metrics["kl"] = masked_mean(estimate, mask)
        counted = mask * scorable[:, None]
        known = {
            "scores": scores if penalty is None else scores - kl_coef * masked_sum(penalty, mask, axis=-1),
            "rewards": rewards,
            "weights": weights,
            "token_rewards": advantage_rules.token_rewards(scores, counted, penalty, kl_coef),
            "mask": counted,
            "lengths": rollout.lengths,
            "finished": rollout.finished,
            "group_size": self.group_size,
            "scale": self.scale,
        }
        if values is not None:
            known["values"] = values
        if greedy_rewards is not None:
            greedy = advantage_rules.combine_rewards(greedy_rewards, weights)
            known["greedy_scores"] = greedy if greedy_rollout is None else self._shape(greedy, greedy_rollout)
        found = self.rule(**{name: known[name] for name in known if self.asks_for(name)}, **dict(self.options))
        advantages, returns = found if isinstance(found, tuple) else (found, None)
        advantages = mask * (advantages if advantages.ndim == 2 else advantages[:, None])
        metrics |= _spread("advantages", advantages, mask)
        if returns is not None:
            metrics |= _spread("returns", returns, counted) | _spread("values", values, counted)
            metrics |= _objective_metrics(raw, counted, logps, penalty, kl_coef, rollout)
            metrics["critic/explained_variance"] = explained_variance(values, returns, counted)
            mask = counted
        return Advantages(advantages, self._priority(rewards, raw, advantages, mask), returns, mask, kl, metrics)

    def _shape(self, scores, rollout: Rollout):
        if self.reward_clip:
            scores = jnp.clip(scores, *self.reward_clip)
        if self.overlong_buffer:
            scores += advantage_rules.soft_overlong_punishment(
                rollout.lengths, self.max_completion_length, self.overlong_buffer
            )
        return advantage_rules.missing_eos_penalty(scores, rollout.finished, self.missing_eos_penalty)

    def _priority(self, rewards, scores, values, mask):
        columns = rewards if self.asks_for("rewards") else scores[:, None]
        flat = jnp.stack([advantage_rules.flat_groups(x, self.group_size) for x in columns.T]).all(axis=0)
        grouped = columns.reshape(-1, self.group_size, columns.shape[1])
        spread = jnp.sqrt(masked_var(grouped, ~jnp.isnan(grouped), axis=1)).sum(axis=-1)
        size = masked_mean(jnp.abs(values), mask, axis=-1).reshape(-1, self.group_size).mean(axis=1)
        return jnp.where(flat, 0.0, spread * size)


def explained_variance(values, returns, mask) -> jax.Array:
    """`1 - var(returns - values) / var(returns)` over the mask: 1 for a perfect critic, 0 for a constant one."""
    return 1.0 - masked_var(returns - values, mask) / jnp.maximum(masked_var(returns, mask), 1e-8)


def _spread(name: str, x, mask) -> dict[str, jax.Array]:
    """Mean, maximum and minimum over the mask; 0 where it is empty."""
    live = mask > 0
    extremes = {"max": jnp.where(live, x, -jnp.inf).max(), "min": jnp.where(live, x, jnp.inf).min()}
    found = {kind: jnp.where(live.any(), value, 0.0) for kind, value in extremes.items()}
    return {f"{name}/mean": masked_mean(x, mask), **{f"{name}/{kind}": value for kind, value in found.items()}}


def _objective_metrics(scores, mask, logps, penalty, kl_coef, rollout: Rollout) -> dict[str, jax.Array]:
    """What TRL logs of PPO: means over rows of their sums over tokens."""
    scorable = ~jnp.isnan(scores)
    found = {"val/num_eos_tokens": rollout.finished.sum(), "objective/rlhf_reward": masked_mean(scores, scorable)}
    if logps is not None:
        found["objective/entropy"] = masked_mean(masked_sum(-logps, mask, axis=-1), scorable)
    if penalty is not None:
        kl = masked_mean(masked_sum(penalty, mask, axis=-1), scorable)
        found |= {"objective/kl": kl, "objective/non_score_reward": -kl_coef * kl}
        found["objective/rlhf_reward"] -= kl_coef * kl
    return found


def make_scorer(config, reward_names: tuple[str, ...]) -> Scorer:
    """The scorer of a configuration.

    Raises ConfigError: an unknown rule or option, or a rule that does not read what the configuration adds to scores.
    """
    algorithm = config.algorithm
    rule, options = advantage_rule(algorithm.advantage)
    scorer = Scorer(
        rule=rule,
        options=tuple(options.items()),
        group_size=config.rollout.group_size,
        scale=algorithm.scale_rewards,
        reward_names=tuple(reward_names),
        kl=kl_estimator(config),
        kl_in_reward=algorithm.kl_in_reward,
        max_completion_length=config.rollout.max_completion_length,
        overlong_buffer=algorithm.overlong_buffer,
        missing_eos_penalty=algorithm.missing_eos_penalty,
        reward_clip=tuple(algorithm.reward_clip),
    )
    if scorer.asks_for("values") != (algorithm.name == "ppo"):
        raise ConfigError(
            f"algorithm.name is {algorithm.name!r} and algorithm.advantage {algorithm.advantage!r}: a critic and an "
            "advantage rule that reads its values, such as ppo(gamma=1.0, lam=0.95), go together"
        )
    if not (scorer.asks_for("scores") or scorer.asks_for("token_rewards")):
        for key in ("kl_in_reward", "reward_clip", "overlong_buffer", "missing_eos_penalty"):
            if algorithm[key]:
                raise ConfigError(
                    f"algorithm.{key} is {algorithm[key]}, but algorithm.advantage = {algorithm.advantage!r} reads the "
                    "rewards one by one and not their sum; put the KL term in the loss, and punish lengths with a "
                    "reward function such as soft_overlong(max_length=256, cache=64)"
                )
    return scorer


def advantage_rule(name: str) -> tuple[Callable[..., jax.Array], dict[str, Any]]:
    """The advantage function and the options of a name: `group(eps=1e-6)` is `advantages.group_advantages`."""
    rules: Mapping[str, Any] = {
        known.removesuffix("_advantages"): function
        for known, function in vars(advantage_rules).items()
        if known.endswith("_advantages")
    }
    return resolve_with_options(name, rules, reserved=INPUTS)


def _reward_metrics(scores, rewards, names: tuple[str, ...], group_size: int) -> dict[str, jax.Array]:
    metrics = {
        "reward": masked_mean(scores, ~jnp.isnan(scores)),
        "reward_max": _spread("reward", scores, ~jnp.isnan(scores))["reward/max"],
        "reward_min": _spread("reward", scores, ~jnp.isnan(scores))["reward/min"],
        "reward_std": jnp.sqrt(masked_var(scores, ~jnp.isnan(scores))),
        "frac_reward_zero_std": advantage_rules.frac_zero_std(scores, group_size),
        "unscorable_rows": advantage_rules.unscorable_rows(rewards).sum(),
    }
    for i, name in enumerate(names):
        applies = ~jnp.isnan(rewards[:, i])
        metrics[f"rewards/{name}/mean"] = masked_mean(rewards[:, i], applies)
        metrics[f"rewards/{name}/std"] = jnp.sqrt(masked_var(rewards[:, i], applies))
    return metrics


def _length_metrics(rollout: Rollout) -> dict[str, jax.Array]:
    lengths, ended = rollout.lengths, rollout.finished
    prompts = (rollout.segments > 0).sum(axis=1) - lengths
    return {
        "prompts/mean_length": prompts.mean(),
        "prompts/min_length": prompts.min(),
        "prompts/max_length": prompts.max(),
        "completions/mean_length": lengths.mean(),
        "completions/min_length": lengths.min(),
        "completions/max_length": lengths.max(),
        "completions/mean_terminated_length": masked_mean(lengths, ended),
        "completions/min_terminated_length": jnp.where(ended.any(), jnp.where(ended, lengths, lengths.max()).min(), 0),
        "completions/max_terminated_length": jnp.where(ended, lengths, 0).max(),
        "completions/clipped_ratio": 1.0 - ended.mean(),
        "num_tokens": rollout.segments.sum(),
    }
