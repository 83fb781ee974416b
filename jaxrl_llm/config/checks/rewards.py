"""Contradictions of rewards, environments and agents."""

import math
from collections.abc import Iterator

from jaxrl_llm.config.checks.values import ENVIRONMENTS, in_use, met
from jaxrl_llm.config.entries import environment_options, logit_bias, reward_scales
from jaxrl_llm.config.resolve import split_options
from jaxrl_llm.config.schema import EPISODES, OFFLINE, ConfigDict

LARGEST_SERVED_BIAS = 100  # of a token, in OpenAI's API


def check_rewards(config: ConfigDict, online: bool) -> Iterator[str]:
    """Messages for the functions that reward completions."""
    rewards = config.rewards
    if rewards.weights and len(rewards.weights) != len(rewards.functions):
        yield (
            f"rewards.weights has {len(rewards.weights)} numbers for {len(rewards.functions)} rewards.functions: "
            "give one each, or none"
        )
    if rewards.on_timeout != "stop":
        if rewards.timeout is None:
            yield f"rewards.on_timeout is {rewards.on_timeout!r}, but nothing is late: set rewards.timeout"
        try:
            valid = rewards.on_timeout == "none" or math.isfinite(float(rewards.on_timeout))
        except ValueError:
            valid = False
        if not valid:
            yield f"rewards.on_timeout is {rewards.on_timeout!r}, but it takes stop, none or a number"
    if not online or rewards.functions:
        return
    algorithm = config.algorithm
    if config.teacher.path is None:  # which alone can take the place of a reward function
        yield (
            f"rewards.functions is empty, but algorithm.name = {algorithm.name!r} needs one or more, or a teacher "
            "(teacher.path)"
        )
    names = "dynamic_sampling", "replay_groups", "kl_in_reward", "reward_beta", "reference_samples"
    readers = (f"algorithm.{name}" for name in names)
    for key, value in (*met(config, {"algorithm.name": algorithm.name == "ppo"}), *in_use(config, readers)):
        yield (
            f"rewards.functions is empty, so that the policy learns from teacher.path alone, but {key} is {value!r}, "
            f"which reads rewards: name a function, or change {key}"
        )
    if config.eval.every >= 0:
        yield (
            f"rewards.functions is empty, so that samples cannot be graded, but eval.every is {config.eval.every}: set "
            "it to -1; or name a function, and set algorithm.advantage to zero, with which it is measured and not "
            "learned from"
        )


def check_environment(config: ConfigDict) -> Iterator[str]:
    """Messages for what samples or answers in place of the engine alone."""
    c, algorithm = config.environment, config.algorithm
    reward_scales(c.reward_scale)  # refuses what cannot be read
    environment_options(c.options)
    if c.options and algorithm.name in OFFLINE:
        yield (
            f"environment.options is {tuple(c.options)}, but algorithm.name = {algorithm.name!r} samples nothing: "
            "leave it out"
        )
    named = [key for key, _ in in_use(config, ENVIRONMENTS)]
    if named and algorithm.name in OFFLINE:
        yield f"{named[0]} is set, but algorithm.name = {algorithm.name!r} samples nothing: leave it out"
    if c.agent is not None:
        played = ("environment.name", "environment.tools")
        for key in (key for key in named[:-1] if c.agent != EPISODES or key not in played):
            yield (
                f"environment.agent and {key} are both set, but an agent holds its own conversations: set one"
                + (f", or environment.agent={EPISODES!r}, which plays environments" if key in played else "")
            )
        refused = ("logit_bias", "bad_words", "min_completion_length")
        asked = ("stop", "stop_token_ids", *(f"structured_{form}" for form in ("regex", "choice", "json", "grammar")))
        for key in (*refused, *asked):
            if config.rollout[key]:
                yield (
                    f"rollout.{key} is {config.rollout[key]!r}, which the endpoint of environment.agent has not: leave "
                    f"it out{', or let the agent ask for it' if key in asked else ''}"
                )
    values = set()
    for entry in c.agents:
        value, _, agent = entry.partition("=")
        if not value or not agent:
            yield f"environment.agents has {entry!r}, but it takes VALUE=AGENT, `coder=agents.py:code`"
        if value in values:
            yield f"environment.agents has {value!r} twice: give each agent a value of its own"
        values.add(value)
    if c.agents and c.agent is None:
        yield f"environment.agents is {tuple(c.agents)}, but environment.agent, of the other rows, is none: set it"
    if c.rollout_func is None or c.agent is not None:
        return
    if len(named) > 1:
        yield (
            f"environment.rollout_func and {named[0]} are both set, but a rollout function holds its own "
            "conversations: set one"
        )
    if split_options(c.rollout_func)[0] == "server":
        for token, bias in logit_bias("rollout.logit_bias", config.rollout.logit_bias):
            if abs(bias) > LARGEST_SERVED_BIAS:
                yield (
                    f"rollout.logit_bias adds {bias:g} to token {token}, but the server of environment.rollout_func "
                    f"takes -{LARGEST_SERVED_BIAS} to {LARGEST_SERVED_BIAS}: bring it into these bounds"
                )
    if algorithm.importance_correction == "none" and algorithm.old_logps != "sampler":
        yield (
            "algorithm.importance_correction is none, but environment.rollout_func may sample with another policy than "
            "the one that is trained: set token_truncate"
        )
