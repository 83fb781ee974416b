"""Step 5, from rewards to advantages: shaping, KL penalty, the rule of `algorithm.advantage`, teacher, metrics."""

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms import advantages as advantage_rules
from jaxrl_llm.algorithms import turn_advantages as turn_rules
from jaxrl_llm.algorithms.aggregation import masked_mean, masked_sum, masked_var
from jaxrl_llm.algorithms.distillation import distilled_advantages, position_weights
from jaxrl_llm.algorithms.kl import kl_estimate
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.resolve import is_own, naming, resolve_with_options, split_options
from jaxrl_llm.config.user_code import contained, error_text
from jaxrl_llm.rollout.slots import Rollout
from jaxrl_llm.training.rollout_metrics import (
    explained_variance,
    length_metrics,
    mean_metric,
    objective_metrics,
    reward_metrics,
    spread,
)

# What a rule may ask for, by the names of its arguments. It returns advantages [N] or [N,T], and with a critic a pair:
# advantages and the returns [N,T] that its values should have been. With baselines the second are those after the step.
INPUTS = (
    "scores",  # [N] combined rewards, shaped and with the KL penalty
    "rewards",  # [N,F] as the reward functions gave them, NaN where one does not apply
    "weights",  # [F] of the reward functions
    "token_rewards",  # [N,T] the shaped reward on the last token, the KL penalty on each
    "values",  # [N,T] of the critic
    "greedy_scores",  # [B] of one greedy completion of each prompt
    "reference_scores",  # [N,n] of the reference's own completions of each row's prompt, before the first step
    "logit_norms",  # [N,T] squared norm of the gradient of a token's log-prob by the logits; takes a pass of the policy
    "mask",  # [N,T] tokens the loss reads, without the rows that no reward applies to
    "lengths",  # [N] sampled tokens
    "turns",  # of episodes; their rewards [N,M] sum to the scores
    "parts",  # of agents' sessions: sub-agents with rewards of their own [N,M], NaN where they have the session's
    "roles",  # [N,M] which role each of the parts is
    "baselines",  # [R] of the roles, which a run keeps from step to step
    "finished",  # [N] ended with an end-of-text token
    "group_size",
    "scale",  # algorithm.scale_rewards
)

VERLS = {"gae": "ppo", "grpo": "group", "grpo_passk": "passk"}  # verl's names of rules that are called otherwise here
UNTRACEABLE = (  # what JAX raises of functions that want the values of arrays while it traces them
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


@dataclass(frozen=True)
class AdvantageSpec:
    """The settings of advantages and of what is added to rewards before them."""

    advantage: str  # name of the rule, with its options
    scale_rewards: str
    group_size: int
    max_completion_length: int
    kl: str  # estimator
    kl_in_reward: bool
    reward_beta: float  # above 0: there is a KL in the reward besides that in the loss
    reward_clip: tuple[float, ...]
    overlong_buffer: int
    overlong_penalty: float
    missing_eos_penalty: float
    filter_zero_advantages: bool
    has_critic: bool
    teacher_coef: float
    position_gamma: float  # of the weights of the teacher's term by position; 0: none
    teacher_limit: float | None  # of the teacher's term, in nats
    teacher_gamma: float  # its discount along a row; 0: each token has its own
    of_environments: tuple[tuple[str, str], ...]  # an environment and its rule, in place of `advantage`


class Advantages(NamedTuple):
    """The result of an `AdvantageStep`."""

    advantages: jax.Array  # [N,T], 0 outside the mask
    # [B] mean |advantage| of a group, of a rule that compares its rewards x their std; 0 where it teaches nothing.
    priority: jax.Array
    returns: jax.Array | None  # [N,T] of a rule with a critic
    # [N,T] tokens the loss reads: with a critic not those of rows that no reward applies to, and with
    # filter_zero_advantages none whose advantage is 0.
    mask: jax.Array
    kl: jax.Array | None  # mean over rows of their mean KL per token; None without reference log-probs
    metrics: dict[str, jax.Array]
    scores: jax.Array  # [N] combined rewards, shaped
    baselines: jax.Array | None = None  # [R] of roles after these rows, of a rule that keeps them


@dataclass(frozen=True)
class Rule:
    """An advantage rule with its options, the name that they have in a configuration, and the setting of that name."""

    setting: str
    name: str
    function: Callable[..., jax.Array]
    options: Mapping[str, Any] = field(compare=False)  # the name says them; lists, which some are, have no hash

    def asks_for(self, name: str) -> bool:
        """True where the rule's function has an argument `name`, so that it must be computed."""
        return name in inspect.signature(self.function).parameters

    @property
    def compares_groups(self) -> bool:
        """True where the rule compares the completions of a prompt by their rewards alone, so that equal rewards give
        no advantage."""
        return self.asks_for("group_size") and not self.asks_for("turns")

    def __call__(self, inputs: Mapping[str, Any]) -> Any:
        """Call the rule with those of the inputs that it asks for; returns its advantages, or a pair of these and
        returns or baselines."""
        return self.function(**{name: inputs[name] for name in inputs if self.asks_for(name)}, **self.options)


@dataclass(frozen=True)
class AdvantageStep:
    """The advantages of a rollout's rewards: shaping, KL penalty, rule. It is pure, and jitted with itself static.

    The first rule is for all rows but those of environments that have one of their own. Each rule sees the rows of the
    others as rows without a reward: none of its means and standard deviations is over rows that it is not for.
    """

    rules: tuple[Rule, ...]
    spec: AdvantageSpec
    reward_names: tuple[str, ...]
    of_turns: str = "environment"  # the reward that those of turns sum to

    def asks_for(self, name: str) -> bool:
        """True where any of the rules has an argument `name`, so that it must be computed."""
        return self.asking(name) is not None

    def asking(self, name: str) -> Rule | None:
        """The first rule that has an argument `name`."""
        return next((rule for rule in self.rules if rule.asks_for(name)), None)

    def rule_numbers(self, environments: Sequence[str]) -> np.ndarray:
        """The number `[N]` of each row's rule, by the names of the rows' environments."""
        own = {name: number for number, (name, _) in enumerate(self.spec.of_environments, 1)}
        return np.array([own.get(name, 0) for name in environments], np.int32)

    def flat_groups(self, rewards: np.ndarray, weights, environments: Sequence[str] | None = None) -> np.ndarray:
        """Booleans `[B]`, true where all completions of a prompt have the same reward, so that none is better.

        The same in the combined reward, or in each of `rewards [N,F]` for a rule that takes them apart (gdpo).
        `environments [N]` are needed where some have rules of their own.
        """

        def flat_to(rule: Rule) -> np.ndarray:
            counted = np.asarray(weights) != 0  # a reward of weight 0 is a metric, and makes no row better
            apart = rule.asks_for("rewards") and counted.any()
            columns = rewards.T[counted] if apart else [advantage_rules.combine_rewards(rewards, weights)]
            flat = [np.asarray(advantage_rules.flat_groups(column, self.spec.group_size)) for column in columns]
            return np.all(flat, axis=0)

        flat = flat_to(self.rules[0])
        if environments is not None:
            numbers = self.rule_numbers(environments)[:: self.spec.group_size]
            for number, rule in enumerate(self.rules[1:], 1):
                flat = np.where(numbers == number, flat_to(rule), flat)
        return flat

    @functools.partial(jax.jit, static_argnums=0)
    def __call__(
        self,
        rollout: Rollout,
        mask,
        rewards,
        weights,
        *,
        logps=None,
        ref_logps=None,
        teacher_logps=None,
        taught=None,
        kl_coef=0.0,
        values=None,
        logit_norms=None,
        reference_scores=None,
        greedy_rewards=None,
        greedy_rollout: Rollout | None = None,
        turns: turn_rules.Turns | None = None,
        parts: turn_rules.Turns | None = None,
        roles=None,
        baselines=None,
        rule_numbers: Any = None,
    ) -> Advantages:
        """The advantages of `rewards [N,F]` over `mask [N,T]`, and the step's reward and length metrics of all
        processes.

        `logps`, `ref_logps` and `teacher_logps` `[N,T]` are of the policy, the reference and the teacher; without
        `logps` the policy is compared with the teacher by the sampler's. On rows that are not `taught` `[N]` it is not.
        For a rule that asks for them, `values [N,T]` are of the critic, `greedy_rewards [B,F]` and `greedy_rollout` of
        one greedy completion of each prompt, `logit_norms [N,T]` of the policy (`passes.scored_norms`),
        `reference_scores [N,n]` of the reference, and `turns` of rows that are episodes. `parts` are rows' parts with a
        reward of their own: unless the rule reads them, with their `roles [N,M]` and `baselines [R]`, the advantage of
        their tokens is what it is above the mean of the group's parts of that name. `rule_numbers [N]` are needed where
        there are several rules.
        """
        spec = self.spec
        raw = advantage_rules.combine_rewards(rewards, weights)
        scores = self.shaped(raw, rollout)
        scorable = ~jnp.isnan(raw)
        metrics = length_metrics(rollout)
        if self.reward_names:
            metrics |= reward_metrics(raw, scores, rewards, self.reward_names, spec.group_size)
        if spec.overlong_buffer or spec.missing_eos_penalty or spec.reward_clip:
            metrics["reward_shaping"] = mean_metric(scores - raw, scorable)
        kl = penalty = None
        if ref_logps is not None:
            estimate = kl_estimate(logps, ref_logps, spec.kl)
            # The controller reads a mean over rows; the metric is a mean over tokens.
            kl = mean_metric(masked_mean(estimate, mask, axis=-1), mask.any(axis=-1))
            if spec.kl_in_reward or spec.reward_beta:
                penalty = jnp.where(mask > 0, estimate, 0.0)
                metrics["reward_kl" if spec.reward_beta else "kl"] = mean_metric(estimate, mask)
        rewarded = mask * scorable[:, None]
        inputs = {
            "scores": scores if penalty is None else scores - kl_coef * masked_sum(penalty, mask, axis=-1),
            "rewards": rewards,
            "weights": weights,
            "token_rewards": advantage_rules.token_rewards(scores, rewarded, penalty, kl_coef),
            "mask": rewarded,
            "lengths": (rollout.mask > 0).sum(axis=1),  # without observation tokens, which rollout.lengths counts
            "finished": rollout.finished,
            "group_size": spec.group_size,
            "scale": spec.scale_rewards,
            "values": values,
            "logit_norms": logit_norms,
            "reference_scores": reference_scores,
            "parts": parts,
            "roles": roles,
            "baselines": baselines,
        }
        if turns is not None:
            # An environment gave these rewards, so they count as what it gave in all, the reward `environment`, does.
            given = self.reward_names.index(self.of_turns) if self.of_turns in self.reward_names else None
            weight = 0.0 if given is None else weights[given]
            inputs["turns"] = turns = turn_rules.with_outcome(turns, inputs["scores"], weight)
            metrics["turns/reward"] = mean_metric(turns.rewards, ~jnp.isnan(turns.rewards))
            metrics["turns/shared_states"] = turn_rules.shared_states(turns, spec.group_size)
        if reference_scores is not None:
            metrics["reward_reference"] = mean_metric(reference_scores, ~jnp.isnan(reference_scores))
        if greedy_rewards is not None:
            greedy = advantage_rules.combine_rewards(greedy_rewards, weights)
            inputs["greedy_scores"] = greedy if greedy_rollout is None else self.shaped(greedy, greedy_rollout)
        advantages, returns, baselines = self._credits(inputs, mask, rule_numbers)
        if teacher_logps is not None:
            own = rollout.sample_logps if logps is None else logps
            advantages, of_teacher = self._with_teacher(advantages, own, teacher_logps, mask, taught)
            metrics |= of_teacher
        metrics |= spread("advantages", advantages, mask)
        if returns is not None:
            metrics |= spread("returns", returns, rewarded) | spread("values", values, rewarded)
            metrics |= objective_metrics(scores, rewarded, logps, penalty, kl_coef, rollout)
            metrics["critic/explained_variance"] = explained_variance(values, returns, rewarded)
            # A critic must not learn from rows without a reward; the KL and entropy terms of others still read them.
            mask = rewarded
        by_reward = parts is None and teacher_logps is None
        columns = raw[:, None], jnp.where(weights != 0, rewards, 0.0)
        priority = self._priority(advantages, mask, *columns, rule_numbers, by_reward)
        if spec.filter_zero_advantages:
            mask = jnp.where(advantages == 0, 0.0, mask)
        return Advantages(advantages, priority, returns, mask, kl, metrics, scores, baselines)

    def _credits(self, inputs: Mapping[str, Any], mask, rule_numbers) -> tuple[jax.Array, jax.Array | None, Any]:
        """The advantages `[N,T]`, returns and baselines of `_credit`, each row's by the rule that it is for."""
        if len(self.rules) == 1:
            return self._credit(self.rules[0], inputs, mask)
        of_rules = [
            self._credit(rule, _without_other_rows(inputs, rule_numbers == number), mask)
            for number, rule in enumerate(self.rules)
        ]
        advantages, returns, baselines = of_rules[0]  # of environments' rules none keeps baselines
        for number, (own, own_returns, _) in enumerate(of_rules[1:], 1):
            mine = (rule_numbers == number)[:, None]
            advantages = jnp.where(mine, own, advantages)
            if returns is not None and own_returns is not None:
                returns = jnp.where(mine, own_returns, returns)
        return advantages, returns, baselines

    def _credit(self, rule: Rule, inputs: Mapping[str, Any], mask) -> tuple[jax.Array, jax.Array | None, Any]:
        """The advantages `[N,T]` of a rule, 0 outside the mask, its returns with a critic, and the baselines of roles.

        Unless the rule reads parts, the tokens of those with a reward of their own are compared with such parts.
        """
        result, baselines = rule(inputs), inputs["baselines"]
        advantages, returns = result if isinstance(result, tuple) else (result, None)
        if rule.asks_for("baselines"):
            baselines, returns = returns, None
        if jnp.shape(advantages) not in (mask.shape[:1], mask.shape):
            raise ConfigError(
                f"{rule.setting} is {rule.name!r}, which returns an array of the shape {jnp.shape(advantages)}, but it "
                f"must return one number for each of {mask.shape[0]} rows, or for each token, {mask.shape}"
            )
        advantages = advantages if advantages.ndim == 2 else advantages[:, None]
        # A rule of the user's may give NaN where the score is NaN, and may not know the mask.
        without = (mask == 0) | (jnp.isnan(advantages) & (inputs["mask"] == 0))
        advantages = jnp.where(without, 0.0, advantages)
        if (parts := inputs["parts"]) is not None and not rule.asks_for("parts"):
            spec, rewarded = self.spec, inputs["mask"]
            apart = turn_rules.by_turn(~jnp.isnan(parts.rewards), parts, rewarded)
            own = turn_rules.compared_in_state(parts.rewards, parts.states, spec.group_size, spec.scale_rewards, 1e-4)
            advantages = jnp.where(apart > 0, turn_rules.by_turn(own, parts, rewarded), advantages)
        return advantages, returns, baselines

    def _with_teacher(self, advantages, logps, teacher_logps, mask, taught) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The advantages with the teacher's term on the rows that are `taught` (None: all), and its metrics."""
        spec, rated = self.spec, mask if taught is None else mask * taught[:, None]
        theirs = jnp.where(rated > 0, teacher_logps, logps)
        settings = spec.teacher_coef, spec.position_gamma, spec.teacher_limit, spec.teacher_gamma
        metrics = {
            "teacher/kl": mean_metric(logps - teacher_logps, rated),
            "teacher/logp": mean_metric(teacher_logps, rated),
        }
        if spec.position_gamma:
            by_position = position_weights(logps - theirs, mask, spec.position_gamma)
            metrics["teacher/position_weight"] = mean_metric(by_position, rated)
        return distilled_advantages(advantages, logps, theirs, mask, *settings), metrics

    def _priority(self, advantages, mask, score, rewards, rule_numbers, by_reward: bool) -> jax.Array:
        """`Advantages.priority [B]`, of combined rewards `score [N,1]` and of `rewards [N,F]` that count; `by_reward`:
        advantages are of these alone."""
        size = self.spec.group_size
        mean = masked_mean(jnp.abs(advantages), mask, axis=-1).reshape(-1, size).mean(axis=1)
        first, *others = (
            mean * _spread_of_groups(rewards if rule.asks_for("rewards") else score, size)
            if rule.compares_groups and by_reward
            else mean
            for rule in self.rules
        )
        for number, own in enumerate(others, 1):
            first = jnp.where(rule_numbers[::size] == number, own, first)
        return first

    def shaped(self, scores, rollout: Rollout) -> jax.Array:
        """Combined rewards `[N]`, clipped, with the penalties for completions that are long or did not end."""
        spec = self.spec
        if spec.reward_clip:
            scores = jnp.clip(scores, *spec.reward_clip)
        if spec.overlong_buffer:
            scores += spec.overlong_penalty * advantage_rules.soft_overlong_punishment(
                rollout.lengths, spec.max_completion_length, spec.overlong_buffer
            )
        return advantage_rules.missing_eos_penalty(scores, rollout.finished, spec.missing_eos_penalty)


def advantage_step(spec: AdvantageSpec, reward_names: tuple[str, ...]) -> AdvantageStep:
    """The step of the rules that `spec` names.

    Raises ConfigError: an unknown rule or option, a value that an option does not take, a rule that does not read what
    the settings add to rewards, or one of an environment that keeps baselines of roles.
    """
    with naming("algorithm.advantage"):
        function, options = advantage_rule(spec.advantage)
    rules = [Rule("algorithm.advantage", spec.advantage, function, options)]
    for environment, name in spec.of_environments:
        setting = f"environment.options: advantage of {environment}"
        with naming(setting):
            function, options = advantage_rule(name)
        rules.append(Rule(setting, name, function, options))
        if rules[-1].asks_for("baselines"):
            raise ConfigError(
                f"{setting} is {name!r}, which keeps a baseline of each role from step to step, whatever environment "
                "it plays in: set algorithm.advantage to it, or another advantage"
            )
    # Rules are tried on the shapes of one prompt, so that a wrong option is found before anything is sampled.
    rows, columns = (spec.group_size,), (spec.group_size, 2)
    table = turn_rules.Turns(*(jax.ShapeDtypeStruct((*rows, 1), x) for x in (jnp.float32, jnp.int32, jnp.int32)))
    sizes = {
        **dict.fromkeys(("scores", "lengths", "finished"), rows),
        **dict.fromkeys(("token_rewards", "values", "logit_norms", "mask", "rewards", "reference_scores"), columns),
        **{"weights": (2,), "greedy_scores": (1,), "baselines": (1,)},
    }
    shapes = {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()}
    shapes |= {"turns": table, "parts": table, "roles": table.states}
    known = {"group_size": spec.group_size, "scale": spec.scale_rewards}
    for rule in rules:
        if rule.asks_for("values") != spec.has_critic:
            raise ConfigError(
                f"algorithm.name is {'' if spec.has_critic else 'not '}'ppo' and {rule.setting} is {rule.name!r}: a "
                "critic and an advantage rule that reads its values, such as ppo(gamma=1.0, lam=0.95), go together"
            )
        if not any(map(rule.asks_for, ("scores", "token_rewards", "turns"))):
            for key in ("kl_in_reward", "reward_beta", "reward_clip", "overlong_buffer", "missing_eos_penalty"):
                if value := getattr(spec, key):
                    raise ConfigError(
                        f"algorithm.{key} is {value}, but {rule.setting} = {rule.name!r} reads the rewards one by one "
                        "and not their sum; put the KL term in the loss, and punish lengths with a reward function "
                        "such as soft_overlong(max_length=256, cache=64)"
                    )
        check_options(rule.setting, rule.name, lambda inputs, rule=rule: rule(inputs | known), shapes)
    return AdvantageStep(tuple(rules), spec, tuple(reward_names))


@functools.cache
def of_users(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself or, for one of the user's own, the same function with its errors raised as ConfigErrors, save
    those of `UNTRACEABLE`.

    The same one for the same function, as programs are compiled once for each.
    """
    if not is_own(split_options(name)[0]) or not inspect.isfunction(function):
        return function

    @functools.wraps(function)
    def called(*args, **kwargs):
        try:
            with contained():
                return function(*args, **kwargs)
        except (ConfigError, *UNTRACEABLE):
            raise
        except Exception as error:
            raise ConfigError(f"{name} raised {error_text(error)}") from error

    return called


def check_options(setting: str, written: str, call: Callable[..., Any], *shapes: Any) -> None:
    """Raises ConfigError where a built-in function, which `call` calls with arrays of these shapes, does not take the
    values of the options that are `written`, and where a user's own cannot be traced by JAX.

    What else is wrong with a user's own it says when it is used: it may fail of these shapes alone.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # which come when it is used
            jax.eval_shape(call, *shapes)
    except UNTRACEABLE as error:
        raise ConfigError(
            f"{setting} is {written!r}, which wants numbers in arrays that JAX traces it with, but these have none: "
            "compute with jax.numpy in place of numpy, and without float(), int() or an if of their values"
        ) from error
    except Exception as error:
        if is_own(split_options(written)[0]):
            return
        if isinstance(error, ValueError):
            raise ConfigError(f"{setting} is {written!r}: {error}") from error
        if isinstance(error, TypeError):
            raise ConfigError(f"{setting} is {written!r}, but an option takes a value of another type") from error
        raise


def advantage_rule(name: str) -> tuple[Callable[..., jax.Array], dict[str, Any]]:
    """The advantage function and the options of a name: `group(eps=1e-6)` is `advantages.group_advantages`.

    Raises ConfigError for an unknown name or option; for one of verl's it names ours.
    """
    rules: Mapping[str, Any] = {
        known.removesuffix("_advantages"): function
        for known, function in {**vars(advantage_rules), **vars(turn_rules)}.items()
        if known.endswith("_advantages")
    }
    if known := VERLS.get(split_options(name)[0]):
        raise ConfigError(f"{name!r} is verl's name of the rule {known} here: write that")
    function, options = resolve_with_options(name, rules, reserved=INPUTS)
    return of_users(name, function), options


def _without_other_rows(inputs: Mapping[str, Any], mine) -> dict[str, Any]:
    """The inputs of a rule for the rows that are `mine [N]`: the others are left without reward and tokens, as rows are
    that no reward applies to."""

    def kept(x, otherwise):
        return jnp.where(mine.reshape(-1, *(1,) * (x.ndim - 1)), x, otherwise)

    own = {**inputs, "mask": kept(inputs["mask"], 0.0), "token_rewards": kept(inputs["token_rewards"], 0.0)}
    for name in ("scores", "rewards"):
        own[name] = kept(inputs[name], jnp.nan)
    for name in ("turns", "parts"):
        if (table := inputs.get(name)) is not None:
            own[name] = table._replace(rewards=kept(table.rewards, jnp.nan))
    return own


def _spread_of_groups(columns, group_size: int) -> jax.Array:
    """The standard deviation `[B]` of each group's rewards, summed over columns `[N,F]`; 0 where it is flat in all."""
    flat = jnp.stack([advantage_rules.flat_groups(x, group_size) for x in columns.T]).all(axis=0)
    grouped = columns.reshape(-1, group_size, columns.shape[1])
    return jnp.where(flat, 0.0, jnp.sqrt(masked_var(grouped, ~jnp.isnan(grouped), axis=1)).sum(axis=-1))
