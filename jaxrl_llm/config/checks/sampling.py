"""Contradictions of online algorithms: what is sampled, how, and what the policy is compared with."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl_llm.config.checks.values import (
    CURRICULUM,
    ENVIRONMENTS,
    advantages_of,
    changed,
    check_preference_losses,
    compares_with_reference,
    how_quantized,
    in_use,
    looks,
    met,
    named_policy_loss,
    own_function,
    takes,
    value_of,
)
from jaxrl_llm.config.entries import environment_options, logit_bias
from jaxrl_llm.config.resolve import ConfigError, is_own, split_options
from jaxrl_llm.config.schema import BY_NAME, ONLINE_PREFERENCE, ConfigDict
from jaxrl_llm.config.wording import amount

# Settings of a critic that is a network of its own, with updates of its own.
OF_OWN_CRITIC = (
    "critic.path", "critic.warmup_steps", "critic.num_iterations", "critic.minibatches", "critic.microbatch_rows",
    "critic.lora_rank", "critic.lora_alpha", "critic.lora_targets", "critic.offload", "critic.offload_optimizer",
)  # fmt: skip
# What losses of advantages have, and those of pairs have not.
OF_ADVANTAGES = (
    "algorithm.advantage", "algorithm.kl_in_reward", "algorithm.reward_beta", "algorithm.kl_controller",
    "algorithm.kl_bias_correction", "algorithm.entropy_coef", "algorithm.entropy_controller",
    "algorithm.observation_coef", "algorithm.positive_nll_coef", "algorithm.old_logps",
    "algorithm.importance_correction", "algorithm.rejection", "algorithm.off_policy_mask_threshold",
    "algorithm.top_entropy_quantile", "algorithm.filter_zero_advantages", "algorithm.replay_groups",
    "environment.options", "teacher.path",
)  # fmt: skip
# Ways to sample: each with the reason why some settings do not go with it, and these.
WAYS_TO_SAMPLE = (
    ("rollout.staleness", "which needs batches that are sampled and trained on in turn",
     (*CURRICULUM, "teacher.others", "teacher.on_policy", "teacher.context")),
    ("rollout.processes", "for which the process that samples a batch would need what is known after those of others",
     (*CURRICULUM, "data.streaming", "teacher.others", "teacher.on_policy", "teacher.context", *ENVIRONMENTS[2:],
      "algorithm.dynamic_sampling", "rollout.devices", "rollout.partial_prompts")),
    ("rollout.partial_prompts", "which needs completions that are sampled to their end at once",
     (*CURRICULUM, "data.streaming", "teacher.on_policy", *ENVIRONMENTS, "rollout.router_replay",
      "rollout.structured_grammar")),
    ("rollout.update_in_flight", "whose rollouts have no borders that the learner's next policy could be taken at",
     (*ENVIRONMENTS, "rollout.processes")),
    ("rollout.router_replay", "whose rows have no experts recorded", ("algorithm.replay_groups", *ENVIRONMENTS[2:])),
)  # fmt: skip


def check_structured(settings: Mapping[str, Any] | ConfigDict, prefix: str, shortest: str) -> None:
    """Raises ConfigError for two structured_ settings, and beside one for what may forbid every token that it allows.

    `prefix` begins the settings' names, and `shortest` is that of the shortest completion.
    """
    names = ("structured_regex", "structured_choice", "structured_json", "structured_grammar")
    guides = [name for name in names if settings[name]]
    if len(guides) > 1:
        names = " and ".join(f"{prefix}{name}" for name in guides)
        raise ConfigError(f"{names} are set, and a completion follows one of them: set one")
    for name in ("ignore_eos", "bad_words", shortest) if guides else ():
        if settings[name]:
            raise ConfigError(
                f"{prefix}{guides[0]} is {settings[guides[0]]!r}, and {prefix}{name} = {settings[name]!r} may forbid "
                "all that it allows: say it in the former, and leave the latter out"
            )


def check_online(config: ConfigDict) -> Iterator[str]:
    """Messages for the terms of the loss, the samples and the rewards of an algorithm that samples."""
    of_environments = environment_options(config.environment.options)
    betas = {name: options["beta"] for name, options in of_environments.items() if "beta" in options}
    if config.algorithm.name == ONLINE_PREFERENCE:
        yield from _of_pairs(config)
    yield from _of_loss(config, betas)
    yield from _of_terms(config, betas)
    yield from _of_corrections(config)
    yield from _of_completions(config)
    yield from _of_critic(config)
    yield from _of_groups(config)


def _of_terms(config: ConfigDict, betas: Mapping[str, float]) -> Iterator[str]:
    """Messages for the terms beside the policy loss: KL, entropy, observation tokens; `betas` are those of
    environments."""
    algorithm = config.algorithm
    of_all = {
        "kl_in_reward is true, which has": algorithm.kl_in_reward,
        "kl_controller is adaptive, which moves": algorithm.kl_controller == "adaptive" and not algorithm.reward_beta,
    }
    for cause in (cause for cause, on in of_all.items() if on and betas):
        yield (
            f"environment.options has a beta of {next(iter(betas))}, the weight of the KL term in the loss, but "
            f"algorithm.{cause} one weight for all rows: leave one of the two out"
        )
    if algorithm.beta == 0 and not any(betas.values()):
        off = {"kl_in_reward": False, "kl_bias_correction": False, "kl_controller": "fixed", "ref_sync_steps": 0}
        for key, value in off.items():
            if algorithm[key] != value:
                yield (
                    f"algorithm.{key} is {algorithm[key]}, but algorithm.beta is 0 and there is no KL term: set beta, "
                    f"or {key} to {value}"
                )
    if algorithm.reward_beta and (algorithm.beta == 0 or algorithm.kl_in_reward):
        yield (
            f"algorithm.reward_beta is {algorithm.reward_beta}, for a KL in the reward besides that in the loss, but "
            f"beta is {algorithm.beta} and kl_in_reward {algorithm.kl_in_reward}: set beta and not kl_in_reward for "
            "both, or beta and kl_in_reward without reward_beta for the reward alone"
        )
    if algorithm.kl == "full":
        estimates = {
            "kl_in_reward": algorithm.kl_in_reward,
            "kl_bias_correction": algorithm.kl_bias_correction,
            "kl_controller='adaptive'": algorithm.kl_controller == "adaptive" and not algorithm.reward_beta,
        }
        for name in (name for name, on in estimates.items() if on):
            yield (
                f"algorithm.kl is 'full', but algorithm.{name} reads an estimate from sampled tokens: set kl to k1 or "
                "k3"
            )
    if algorithm.kl_bias_correction and algorithm.kl_in_reward:
        yield "algorithm.kl_bias_correction is for a KL term in the loss: set it or algorithm.kl_in_reward to false"
    low, coef, high = algorithm.entropy_coef_min, algorithm.entropy_coef, algorithm.entropy_coef_max
    if algorithm.entropy_controller == "adaptive" and not low <= coef <= high:
        yield f"algorithm.entropy_coef is {coef}, outside entropy_coef_min = {low} to entropy_coef_max = {high}"
    if algorithm.observation_coef:
        others = {
            "algorithm.replay_groups": algorithm.replay_groups,
            "teacher.form": config.teacher.path is not None and config.teacher.form != "advantage",
        }
        for key, value in met(config, others):
            yield (
                f"algorithm.observation_coef is {algorithm.observation_coef}, but {key} is {value!r}, which knows no "
                "observation tokens: set the one to 0, or leave out the other"
            )

    if algorithm.filter_zero_advantages:
        others = {
            "algorithm.name": algorithm.name == "ppo",
            "algorithm.loss": compares_with_reference(config),
            "teacher.form": config.teacher.path is not None and config.teacher.form != "advantage",
        }
        for key, value in met(config, others):
            yield (
                f"algorithm.filter_zero_advantages is true, but {key} is {value!r}, with which tokens are learned from "
                "whose advantage is 0: set it to false, or leave out the other"
            )


def _of_corrections(config: ConfigDict) -> Iterator[str]:
    """Messages for the weights of tokens that another policy has sampled."""
    algorithm = config.algorithm
    if algorithm.importance_min is not None and algorithm.importance_min >= algorithm.importance_max:
        yield (
            f"algorithm.importance_min is {algorithm.importance_min}, but importance_max = {algorithm.importance_max} "
            "must be larger"
        )
    if algorithm.importance_normalize and algorithm.importance_correction == "none":
        yield "algorithm.importance_normalize is true, but importance_correction is none: there are no weights; set one"
    if algorithm.importance_correction.startswith(("sequence", "geometric")):
        loss = named_policy_loss(config)
        if callable(loss) and "importance_weights" in inspect.signature(loss).parameters:
            yield (
                f"algorithm.importance_correction is {algorithm.importance_correction}, but "
                f"{split_options(algorithm.loss)[0]} takes the weights of tokens into its own ratio, as in TRL: set "
                "token_truncate or token_mask"
            )
    if (algorithm.rejection is None) != (algorithm.rejection_bounds is None):
        yield (
            f"algorithm.rejection is {algorithm.rejection} and rejection_bounds is {algorithm.rejection_bounds}: set "
            "both, or neither"
        )


def _of_completions(config: ConfigDict) -> Iterator[str]:
    """Messages for how completions are sampled, how long they are, and how they end."""
    algorithm, rollout = config.algorithm, config.rollout
    if algorithm.overlong_buffer > rollout.max_completion_length:
        yield (
            f"algorithm.overlong_buffer is {algorithm.overlong_buffer}, longer than rollout.max_completion_length = "
            f"{rollout.max_completion_length}"
        )
    if rollout.min_completion_length > rollout.max_completion_length:
        yield (
            f"rollout.min_completion_length is {rollout.min_completion_length}, more than "
            f"rollout.max_completion_length = {rollout.max_completion_length}"
        )
    logit_bias("rollout.logit_bias", rollout.logit_bias)  # refuses what cannot be read
    if rollout.temperature == 0 and algorithm.dynamic_sampling:
        yield (
            "rollout.temperature is 0, with which the completions of a prompt are the same and score alike, but "
            "algorithm.dynamic_sampling samples until they do not: set one of the two"
        )
    check_structured(rollout, "rollout.", "min_completion_length")
    if rollout.structured_grammar:
        for key, value in in_use(config, ("rollout.speculative_tokens", "environment.name", "environment.tools")):
            yield (
                f"rollout.structured_grammar is set, which the host follows by tokens, but {key} is {value!r}: leave "
                "one of them out, or write the grammar as a pattern (structured_regex)"
            )
    if rollout.ignore_eos and not (rollout.stop or rollout.stop_token_ids):
        for key, value in in_use(config, ("algorithm.mask_truncated", "algorithm.missing_eos_penalty", *ENVIRONMENTS)):
            yield (
                f"rollout.ignore_eos is true, so that no completion ends by itself, but {key} is {value!r}: set one of "
                "the two"
            )


def _of_critic(config: ConfigDict) -> Iterator[str]:
    """Messages for a critic that is a network of its own."""
    algorithm, critic = config.algorithm, config.critic
    for key, value in changed(config, OF_OWN_CRITIC if critic.shared else ()):
        default = BY_NAME[key].default
        yield (
            f"{key} is {value}, but critic.shared is true: the critic is a head of the policy's own network, and both "
            f"learn in one update; set it to {'none' if default is None else default}"
        )
    if not critic.lora_rank and (critic.lora_alpha or critic.lora_targets):
        name = "lora_alpha" if critic.lora_alpha else "lora_targets"
        yield f"critic.{name} is {critic[name]}, but the critic has no adapters of its own: set critic.lora_rank"
    # Where experts alone are quantised, the model of critic.path, once it is read, says whether it has any.
    unknown = critic.path is not None and config.model.quantize == "none"
    if critic.lora_rank == 0 and not unknown and (quantized := how_quantized(config)) and algorithm.name == "ppo":
        yield (
            f"critic.lora_rank is 0, but {quantized}, and quantised matrices are not trained: give the critic adapters "
            "(critic.lora_rank)"
        )
    if algorithm.replay_groups and algorithm.name == "ppo":
        yield (
            f"algorithm.replay_groups is {algorithm.replay_groups}, but ppo's critic gives values for this step's rows "
            "only: set it to 0"
        )


def _of_groups(config: ConfigDict) -> Iterator[str]:
    """Messages for rewards, and for what compares those of a prompt's completions."""
    algorithm, rollout = config.algorithm, config.rollout
    clip = algorithm.reward_clip
    if clip and not (len(clip) == 2 and clip[0] < clip[1]):
        yield f"algorithm.reward_clip is {tuple(clip)}: give the smallest and the largest score, or nothing"
    if (algorithm.dynamic_sampling or algorithm.replay_groups) and rollout.group_size < 2:
        yield (
            f"rollout.group_size is {rollout.group_size}, and a single completion always scores like itself: "
            "algorithm.dynamic_sampling and replay_groups need 2 or more"
        )
    if algorithm.dynamic_sampling_metric is not None and not algorithm.dynamic_sampling:
        yield (
            f"algorithm.dynamic_sampling_metric is {algorithm.dynamic_sampling_metric!r}, which is read with "
            "algorithm.dynamic_sampling alone: set that to true, or leave the metric out"
        )
    rules = advantages_of(config)
    yield from _reference_scores(config, rules)
    for setting, written in rules.items():
        rule, _ = split_options(written)  # refuses options that cannot be read
        if rollout.group_size < 2 and takes(rule, "group_size"):
            of_critic = "algorithm.advantage to ppo, which reads the critic" if algorithm.name == "ppo" else ""
            yield (
                f"rollout.group_size is {rollout.group_size}, but {setting} = {written!r} compares the completions of "
                f"a prompt with each other: set {of_critic or 'rollout.group_size to 2 or more'}"
            )


def _of_pairs(config: ConfigDict) -> Iterator[str]:
    """Messages for a loss of pairs of samples."""
    algorithm, size = config.algorithm, config.rollout.group_size
    if size % 2:
        yield (
            f"rollout.group_size is {size}, but {algorithm.name} compares the completions of a prompt in pairs: set it "
            "to 2, or another even number"
        )
    if algorithm.pairs > size // 2:
        yield (
            f"algorithm.pairs is {algorithm.pairs}, but rollout.group_size = {size} makes "
            f"{amount(size // 2, 'pair')} of a prompt: set it to that at most"
        )
    if config.batch.microbatch_rows % 2:
        yield (
            f"batch.microbatch_rows is {config.batch.microbatch_rows}, but the rows of a pair stay together: make it a "
            "multiple of 2"
        )
    yield from check_preference_losses(config)
    for key, value in changed(config, OF_ADVANTAGES):
        yield (
            f"{key} is {value!r}, but algorithm.name = {algorithm.name!r} learns which completion of a pair is better "
            "and has no such term: leave it out, or take grpo"
        )


def check_ways_to_sample(config: ConfigDict) -> Iterator[str]:
    """Messages for settings that do not go with a way to sample."""
    for cause, reason, without in WAYS_TO_SAMPLE:
        setting, value = BY_NAME[cause], value_of(config, cause)
        for key, other in changed(config, without if value else ()):
            yield (
                f"{cause} is {setting.show(value)}, but {key} is {other!r}, {reason}: set the one to "
                f"{setting.show(setting.default)}, or leave out the other"
            )


def check_partial(config: ConfigDict) -> Iterator[str]:
    """Messages for completions that are sampled over several steps."""
    c, key = config.rollout, "rollout.partial_prompts"
    if not c.partial_prompts:
        if c.partial_tokens:
            yield (
                f"rollout.partial_tokens is {c.partial_tokens}, but {key} is 0, so that every completion is sampled to "
                "its end: set both, or neither"
            )
        return
    if c.partial_tokens >= c.max_completion_length:
        yield (
            f"rollout.partial_tokens is {c.partial_tokens}, but rollout.max_completion_length is "
            f"{c.max_completion_length}, so that no completion would wait: set it lower, or {key} to 0"
        )


def check_arrivals(config: ConfigDict) -> Iterator[str]:
    """Messages for what comes to rollouts that are under way."""
    c = config.rollout
    if c.max_wait is not None and not c.partial_prompts:
        yield (
            f"rollout.max_wait is {c.max_wait}, but rollout.partial_prompts is 0, so that a step has no other prompts "
            "to leave half sampled: set both, or max_wait to none"
        )
    if c.arrivals is not None and not c.update_in_flight and c.max_wait is None:
        yield (
            f"rollout.arrivals is {c.arrivals!r}, but rollout.update_in_flight is false and rollout.max_wait none, so "
            "that nothing arrives: set them as in the run that wrote it, or leave it out"
        )
    if c.update_in_flight and not c.staleness:
        yield (
            "rollout.update_in_flight is true, but rollout.staleness is 0, so that no policy is new while a batch is "
            "sampled: set staleness to 1 or more, or update_in_flight to false"
        )


def _of_loss(config: ConfigDict, betas: Mapping[str, float]) -> Iterator[str]:
    """Messages for settings that do not go with the policy loss; `betas` are those of environments."""
    algorithm, teacher = config.algorithm, config.teacher
    if compares_with_reference(config):
        others = {
            "algorithm.beta": algorithm.beta,
            "algorithm.ref_sync_steps": algorithm.ref_sync_steps,
            "environment.options": any(betas.values()),
            "teacher.form": teacher.path is not None and teacher.form == "advantage",
        }
        for key, value in met(config, others):
            yield (
                f"algorithm.loss is {algorithm.loss!r}, which compares the policy with the reference that it started "
                f"from and with nothing else, but {key} is {value!r}: leave it out, or take another loss"
            )
    if split_options(algorithm.loss)[0] == "opd":
        unfit = {
            "teacher.path": teacher.path is None,
            "teacher.form": teacher.form != "advantage",
            "teacher.coef": teacher.coef != 1,
            "teacher.position_gamma": teacher.position_gamma,
            "teacher.gamma": teacher.gamma,
            "teacher.limit": teacher.limit is not None,
        }
        for key, value in met(config, unfit):
            yield (
                f"algorithm.loss is {algorithm.loss!r}, whose signal is a teacher's log-prob minus that of the policy "
                f"as it is in each update, but {key} is {value!r}: set teacher.path with form = advantage, coef = 1, "
                "position_gamma = 0, gamma = 0 and limit = none, or another loss"
            )


def _reference_scores(config: ConfigDict, rules: Mapping[str, str]) -> Iterator[str]:
    """Messages for scores of the reference that are read and cannot be had, or are sampled and not read.

    `rules` are the advantage estimates by the settings that name them.
    """

    def reads(setting: str, rule: str) -> bool:
        own = own_function(setting, rule)
        return rule == "a2po" or (own is not None and "reference_scores" in inspect.signature(own).parameters)

    readers = {setting: written for setting, written in rules.items() if reads(setting, split_options(written)[0])}
    if not readers and not (looks.get() and any(is_own(split_options(written)[0]) for written in rules.values())):
        for key, value in changed(config, ("algorithm.reference_samples", "algorithm.drop_unsolved")):
            yield (
                f"{key} is {str(value).lower()}, but algorithm.advantage = {config.algorithm.advantage!r} reads no "
                "scores of a reference: set it to a2po, or leave the other out"
            )
    every = ("data.streaming", "rollout.partial_prompts", "rollout.processes")
    for setting, written in readers.items():
        for key, value in (*in_use(config, every), *changed(config, CURRICULUM)):
            yield (
                f"{setting} is {written!r}, for which the scores of every prompt are known before the first step, in "
                f"the process that samples, but {key} is {str(value).lower()}: leave that out, or take another rule"
            )
