"""Contradictions between settings that are valid alone, and the row counts that follow from several settings."""

import inspect
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import PurePath
from string import Formatter
from typing import Any

from jaxrl_llm.config.entries import (
    LORA_INIT,
    environment_options,
    eval_set,
    logit_bias,
    reward_scales,
    starts_from_matrices,
)
from jaxrl_llm.config.resolve import ConfigError, closest, is_own, resolve, split_losses, split_options
from jaxrl_llm.config.schema import (
    BY_NAME,
    EPISODES,
    IDENTITY,
    LARGEST,
    NEW,
    OFFLINE,
    OPTIMIZERS,
    SCHEDULE_FREE,
    ConfigDict,
)

# Settings of a critic that is a network of its own, with updates of its own.
OF_OWN_CRITIC = (
    "critic.path", "critic.warmup_steps", "critic.num_iterations", "critic.minibatches", "critic.microbatch_rows",
    "critic.lora_rank", "critic.lora_alpha", "critic.lora_targets", "critic.offload", "critic.offload_optimizer",
)  # fmt: skip
# Settings of which each says how completions are made, in place of plain sampling.
ENVIRONMENTS = ("environment.name", "environment.tools", "environment.rollout_func", "environment.agent")
LEAST_PRODIGY_RATE = 0.01  # below it is a rate of another optimizer
LARGEST_SERVED_BIAS = 100  # of a token, in OpenAI's API
CURRICULUM = ("data.curriculum_easy", "data.curriculum_hard")
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


# True in a look at a configuration, which runs no code of the user's.
_looks = ContextVar("looks", default=False)


def check_own_functions(config: ConfigDict) -> None:
    """Raises ConfigError for a loss or advantage of the user's own that is not found, or contradicts other settings.

    It is for when a run is built: `contradictions_at_a_look` runs no code of the user's.
    """
    written = [*split_losses(config.algorithm.loss), *advantages_of(config).values()]
    if any(is_own(split_options(name)[0]) for name in written):
        for message in contradictions(config):
            raise ConfigError(message)


def contradictions_at_a_look(config: ConfigDict) -> list[str]:
    """The first message of `contradictions` that no code of the user's decides, if there is one."""
    token = _looks.set(True)
    try:
        return list(itertools.islice(contradictions(config), 1))
    finally:
        _looks.reset(token)


def _own_function(setting: str, name: str) -> Any:
    """The user's own function that a setting names; None for another name, and in a look at the configuration."""
    if not is_own(name) or _looks.get():
        return None
    try:
        return resolve(name, {})
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from error


def preference_losses(config: ConfigDict) -> dict[str, str | None]:
    """The losses of `algorithm.loss`, which are joined by +, with the rows that each declares to read.

    None are those of the user's own loss in a look at the configuration.
    """
    from jaxrl_llm.algorithms.preference_losses import LOSSES  # which imports jax: only where a preference is learned

    rows: dict[str, str | None] = {}
    for written in split_losses(config.algorithm.loss):
        name = split_options(written)[0]
        loss = LOSSES.get(name) or _own_function("algorithm.loss", name)  # an unknown name is refused later
        rows[name] = None if loss is None and is_own(name) else getattr(loss, "rows", "pair")
    return rows


def rows_together(config: ConfigDict) -> int:
    """Adjacent rows that stay together: completions of a prompt, a pair (with its gold completion), kto's row and its
    mismatch."""
    name = config.algorithm.name
    if name not in OFFLINE:
        return config.rollout.group_size
    if name != "preference":
        return 2 if name == "reward_model" else 1
    rows = set(preference_losses(config).values())
    return 1 if rows == {"label"} or None in rows else 3 if "triple" in rows else 2


def batch_rows(config: ConfigDict) -> int:
    """Rows N of one step: batch.prompts x rollout.group_size, or x rows per data row for offline algorithms."""
    return config.batch.prompts * rows_together(config)


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


def _value(config: ConfigDict, key: str) -> Any:
    """The value of the setting with the full name `key`, in a section."""
    section, name = key.split(".")
    return config[section][name]


def _used(config: ConfigDict, keys: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """The full name and the value of each of the settings that is neither 0, false, none nor empty."""
    return ((key, value) for key in keys if (value := _value(config, key)))


def _met(config: ConfigDict, conditions: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The full name and the value of each of the settings whose condition holds."""
    return ((key, _value(config, key)) for key, holds in conditions.items() if holds)


def changed(config: ConfigDict, keys: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """The full name and the value of each of the settings that is not at its default."""
    values = ((key, _value(config, key)) for key in keys)
    return ((key, value) for key, value in values if value != BY_NAME[key].default)


def contradictions(config: ConfigDict) -> Iterator[str]:
    """A message for each contradiction between keys, computed on demand: `validate` raises the first one.

    Later checks may assume that the earlier ones passed. A text that cannot be read raises ConfigError itself.
    """
    algorithm = config.algorithm
    online = algorithm.name not in OFFLINE
    if online:
        yield from _online(config)
    else:
        yield from _offline(config)
    yield from _batch(config, online)
    yield from _rewards(config, online)
    yield from _teacher(config, online)
    if online:
        yield from _ways_to_sample(config)
        yield from _partial(config)
        yield from _arrivals(config)
    yield from _environment(config)
    yield from _data(config)
    yield from _eval(config, online)
    yield from _optimizer(config)
    yield from _lora(config)
    yield from _average(config)
    yield from _checkpoint(config)
    yield from _export(config.export, config.checkpoint)
    if algorithm.label_smoothing and algorithm.name != "sft":
        yield (
            f"algorithm.label_smoothing is {algorithm.label_smoothing}, but only sft reads it, and algorithm.name is "
            f"{algorithm.name!r}: set it to 0; a preference loss takes it in brackets, "
            f"algorithm.loss='dpo(label_smoothing={algorithm.label_smoothing})'"
        )
    for axis, size in config.mesh.items():
        if size == 0:
            yield f"mesh.{axis} is 0, but it takes 1 or more, or -1 for the devices that the others leave"


def _online(config: ConfigDict) -> Iterator[str]:
    algorithm, rollout, critic = config.algorithm, config.rollout, config.critic
    of_environments = environment_options(config.environment.options)
    betas = {name: options["beta"] for name, options in of_environments.items() if "beta" in options}
    yield from _of_loss(config, betas)
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
    low, coef, high = algorithm.entropy_coef_min, algorithm.entropy_coef, algorithm.entropy_coef_max
    if algorithm.entropy_controller == "adaptive" and not low <= coef <= high:
        yield f"algorithm.entropy_coef is {coef}, outside entropy_coef_min = {low} to entropy_coef_max = {high}"
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
        for key, value in _used(config, ("rollout.speculative_tokens", "environment.name", "environment.tools")):
            yield (
                f"rollout.structured_grammar is set, which the host follows by tokens, but {key} is {value!r}: leave "
                "one of them out, or write the grammar as a pattern (structured_regex)"
            )
    if rollout.ignore_eos and not (rollout.stop or rollout.stop_token_ids):
        for key, value in _used(config, ("algorithm.mask_truncated", "algorithm.missing_eos_penalty", *ENVIRONMENTS)):
            yield (
                f"rollout.ignore_eos is true, so that no completion ends by itself, but {key} is {value!r}: set one of "
                "the two"
            )
    clip = algorithm.reward_clip
    if clip and not (len(clip) == 2 and clip[0] < clip[1]):
        yield f"algorithm.reward_clip is {tuple(clip)}: give the smallest and the largest score, or nothing"
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
    if critic.lora_rank == 0 and not unknown and (quantized := _quantized(config)) and algorithm.name == "ppo":
        yield (
            f"critic.lora_rank is 0, but {quantized}, and quantised matrices are not trained: give the critic adapters "
            "(critic.lora_rank)"
        )
    if algorithm.replay_groups and algorithm.name == "ppo":
        yield (
            f"algorithm.replay_groups is {algorithm.replay_groups}, but ppo's critic gives values for this step's rows "
            "only: set it to 0"
        )
    if algorithm.observation_coef:
        others = {
            "algorithm.replay_groups": algorithm.replay_groups,
            "teacher.form": config.teacher.path is not None and config.teacher.form != "advantage",
        }
        for key, value in _met(config, others):
            yield (
                f"algorithm.observation_coef is {algorithm.observation_coef}, but {key} is {value!r}, which knows no "
                "observation tokens: set the one to 0, or leave out the other"
            )
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
            yield (
                f"rollout.group_size is {rollout.group_size}, but {setting} = {written!r} compares the completions of "
                "a prompt with each other: set rollout.group_size to 2 or more"
            )


def _offline(config: ConfigDict) -> Iterator[str]:
    algorithm, batch, data = config.algorithm, config.batch, config.data
    if batch.microbatch_rows % (together := rows_together(config)):
        yield (
            f"batch.microbatch_rows is {batch.microbatch_rows}, but the rows of a pair stay together, with its gold "
            f"completion where there is one (as do kto's row and its mismatch): make it a multiple of {together}"
        )
    if algorithm.ref_sync_steps and (algorithm.name != "preference" or data.precompute_reference):
        still = "data.precompute_reference reads the reference once, as it starts"
        yield (
            f"algorithm.ref_sync_steps is {algorithm.ref_sync_steps}, but "
            + (still if algorithm.name == "preference" else f"algorithm.name = {algorithm.name!r} has no reference")
            + ": set it to 0"
        )
    if algorithm.name != "preference":
        return
    losses = preference_losses(config)
    if algorithm.beta == 0:
        yield "algorithm.beta is 0, but preference losses need one above 0: 0.1 is usual, 2 for simpo"
    if algorithm.loss_weights and len(algorithm.loss_weights) != len(losses):
        yield (
            f"algorithm.loss_weights has {len(algorithm.loss_weights)} numbers for the {len(losses)} losses of "
            f"algorithm.loss = {algorithm.loss!r}: give one each, or none"
        )
    alone = [name for name, rows in losses.items() if rows not in ("pair", "triple", None)]
    if len(losses) > 1 and alone:
        yield f"algorithm.loss is {algorithm.loss!r}, but {alone[0]} stands alone: it reads other rows"
    if set(losses.values()) == {"label_and_mismatch"} and batch.prompts < 2 * batch.minibatches:
        yield f"batch.prompts is {batch.prompts}, but kto compares the rows of a minibatch: give each at least 2"
    if set(losses.values()) == {"label_and_mismatch"} and data.precompute_reference:
        yield (
            "data.precompute_reference is true, but kto pairs each prompt with the completion of another row of its "
            "batch, which is not known before: set it to false"
        )


def _batch(config: ConfigDict, online: bool) -> Iterator[str]:
    batch, rows = config.batch, batch_rows(config)
    formula, critic_rows = "batch.prompts", config.critic.microbatch_rows
    if online:
        formula += f" x rollout.group_size = {batch.prompts} x {config.rollout.group_size}"
    elif rows_together(config) > 1:
        formula += f" x {rows_together(config)}"
    # The rows of a prompt go into one minibatch: a loss compares those of a pair, and packed rows share their prompt.
    for name, minibatches in (("batch", batch.minibatches), ("critic", config.critic.minibatches or 1)):
        if batch.prompts % minibatches:
            together = f", as the {rows_together(config)} rows of each stay together" if rows > batch.prompts else ""
            yield (
                f"{name}.minibatches is {minibatches}, but it must divide batch.prompts = {batch.prompts}{together}: "
                f"set it to a divisor, or batch.prompts to a multiple of {minibatches}"
            )
    if config.algorithm.name == "preference" and None in preference_losses(config).values():
        return
    minibatch, critics = rows // batch.minibatches, config.critic.minibatches or batch.minibatches
    if critic_rows and batch.prompts % critics == 0 and rows // critics % critic_rows:
        yield f"critic.microbatch_rows is {critic_rows}, but it must divide the {rows // critics} rows of a minibatch"
    for name in ("microbatch_rows", "logps_microbatch_rows"):
        if batch[name] and minibatch % batch[name]:
            yield (
                f"batch.{name} is {batch[name]}, but it must divide the {minibatch} rows of a minibatch "
                f"({formula}, divided by batch.minibatches = {batch.minibatches})"
            )


def _rewards(config: ConfigDict, online: bool) -> Iterator[str]:
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
    if online and not rewards.functions:
        yield from _without_rewards(config)


def _without_rewards(config: ConfigDict) -> Iterator[str]:
    """Messages for an online algorithm without a reward function; only a teacher can take the place of one."""
    algorithm = config.algorithm
    if config.teacher.path is None:
        yield (
            f"rewards.functions is empty, but algorithm.name = {algorithm.name!r} needs one or more, or a teacher "
            "(teacher.path)"
        )
    names = "dynamic_sampling", "replay_groups", "kl_in_reward", "reward_beta", "reference_samples"
    readers = (f"algorithm.{name}" for name in names)
    for key, value in (*_met(config, {"algorithm.name": algorithm.name == "ppo"}), *_used(config, readers)):
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


def _ways_to_sample(config: ConfigDict) -> Iterator[str]:
    """Messages for settings that do not go with a way to sample."""
    for cause, reason, without in WAYS_TO_SAMPLE:
        setting, value = BY_NAME[cause], _value(config, cause)
        for key, other in changed(config, without if value else ()):
            yield (
                f"{cause} is {setting.show(value)}, but {key} is {other!r}, {reason}: set the one to "
                f"{setting.show(setting.default)}, or leave out the other"
            )


def _partial(config: ConfigDict) -> Iterator[str]:
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


def _arrivals(config: ConfigDict) -> Iterator[str]:
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


def _teacher(config: ConfigDict, online: bool) -> Iterator[str]:
    teacher = config.teacher
    if teacher.path is None:
        for key, value in changed(config, (f"teacher.{name}" for name in teacher)):
            yield f"{key} is {value!r}, but there is no teacher: set teacher.path, or leave it out"
        if config.algorithm.advantage == "zero":
            yield (
                "algorithm.advantage is 'zero', which learns from no reward, and there is no teacher: set another "
                "rule, or teacher.path"
            )
        return
    name = config.algorithm.name
    if not online and (name != "sft" or teacher.form == "advantage"):
        yield (
            f"teacher.path is {teacher.path!r}, but algorithm.name = {name!r} samples nothing that a teacher could "
            "rate: use grpo or ppo; or sft with teacher.form = divergence, to learn its distributions of given rows"
        )
    if not online and config.algorithm.loss not in ("auto", "nll"):
        yield (
            f"algorithm.loss is {config.algorithm.loss!r}, but with a teacher sft learns its distributions in place of "
            "the rows' tokens: set it to auto"
        )
    if not online and config.algorithm.label_smoothing:
        yield (
            f"algorithm.label_smoothing is {config.algorithm.label_smoothing}, but with a teacher sft learns its "
            "distributions in place of the rows' tokens: set it to 0"
        )
    yield from _uld(config, online)
    if teacher.form == "advantage":
        of_divergence = ("beta", "top_k", "top_of", "tail", "least_logp", "temperature", "on_policy", "importance_max")
        for key, value in changed(config, (f"teacher.{name}" for name in of_divergence)):
            yield (
                f"{key} is {value}, which is of teacher.form = divergence, and teacher.form is {teacher.form}: set the "
                "one, or leave out the other"
            )
    elif teacher.position_gamma:
        yield (
            f"teacher.position_gamma is {teacher.position_gamma:g}, which weighs the signal of sampled tokens, and "
            f"teacher.form is {teacher.form}: set form to advantage, or position_gamma to 0"
        )
    elif not teacher.top_k:
        for key, value in changed(config, ("teacher.top_of", "teacher.tail", "teacher.least_logp")):
            yield f"{key} is {value}, but teacher.top_k is 0, all tokens: set it, or leave it out"
    paths = {"teacher.path": teacher.path}
    for entry in teacher.others:
        value, _, path = entry.partition("=")
        if not value or not path:
            yield f"teacher.others has {entry!r}, but it takes VALUE=PATH, `math=runs/math/hf`"
        if (key := f"teacher.others, {value}") in paths:
            yield f"teacher.others has {value!r} twice: give each teacher a value of its own"
        paths[key] = path
        if split_options(path)[0] == "self":
            yield f"teacher.others has {entry!r}, but the policy as its own teacher is teacher.path alone: name a model"
    if teacher.others and teacher.form != "advantage":
        yield (
            f"teacher.others is {tuple(teacher.others)}, but teacher.form = {teacher.form} reads the distributions of "
            "one teacher: set form to advantage, or leave others out"
        )
    yield from _teacher_context(config)
    if split_options(teacher.path)[0] == "server":
        unfit = {
            "teacher.dtype": teacher.dtype != "auto",
            "teacher.quantize": teacher.quantize != "none",
            "teacher.offload": teacher.offload,
            "teacher.revision": teacher.revision is not None,
            "teacher.form": teacher.form == "uld",
            "teacher.top_k": teacher.form == "divergence" and not teacher.top_k,
            "teacher.top_of": teacher.top_of != "teacher",
        }
        for key, value in _met(config, unfit):
            yield (
                f"{key} is {value!r}, but teacher.path is a server, which holds the model itself and gives log-probs "
                "of likeliest tokens at most: leave it out, or set teacher.top_k (up to 128)"
            )
    sampling = teacher.temperature or config.rollout.temperature or 1.0
    served = [key for key, path in paths.items() if split_options(path)[0] == "server"]
    if served and sampling != 1.0:
        yield (
            f"rollout.temperature (or teacher.temperature) is {sampling:g}, but the server of {served[0]} gives "
            "log-probs at temperature 1: set it to 1, or name a folder"
        )
    if teacher.on_policy < 1:
        c = config.algorithm
        others = {
            "algorithm.name": not online or name == "ppo",
            "algorithm.advantage": bool(config.rewards.functions) and c.advantage != "zero",
            "algorithm.beta": c.beta,
            "algorithm.entropy_coef": c.entropy_coef,
            "algorithm.entropy_controller": c.entropy_controller != "fixed",
            "algorithm.aggregation": c.aggregation == "rollout_token",
            "environment.options": bool(config.environment.options),
        }
        for key, value in _met(config, others):
            yield (
                f"teacher.on_policy is {teacher.on_policy:g}, but steps that take given rows have the teacher's "
                f"divergence alone, and {key} is {value!r}: use grpo with advantage = zero, without beta and "
                "entropy_coef, and aggregation = token; or set on_policy to 1"
            )


def _uld(config: ConfigDict, online: bool) -> Iterator[str]:
    """Messages for a teacher with another tokenizer, and for its settings with another form."""
    teacher, c = config.teacher, config.algorithm
    weights = "teacher.uld_matched_weight", "teacher.uld_unmatched_weight"
    if teacher.form != "uld":
        of_uld = (
            "uld_align", "uld_skip_eos", "uld_hybrid", "policy_temperature", "nll_coef", "max_completion_length",
        )  # fmt: skip
        for key, value in changed(config, (*(f"teacher.{name}" for name in of_uld), *weights)):
            yield (
                f"{key} is {value!r}, which is of teacher.form = uld, and teacher.form is {teacher.form}: set the one, "
                "or leave out the other"
            )
        return
    of_divergence = (f"teacher.{name}" for name in ("top_k", "top_of", "tail", "least_logp", "importance_max", "limit"))
    for key, value in changed(config, of_divergence):
        yield (
            f"{key} is {value}, which is of teacher.form = divergence, and teacher.form is uld, which compares the "
            "whole distributions of two vocabularies: leave it out, or set form to divergence"
        )
    if not teacher.uld_hybrid:
        for key, value in changed(config, ("teacher.beta", *weights)):
            yield (
                f"{key} is {value}, but teacher.uld_hybrid is false, so that no token is compared with itself: set it "
                "to true, or leave the former out"
            )
    elif (teacher.uld_matched_weight is None) != (teacher.uld_unmatched_weight is None):
        yield (
            f"{weights[0]} is {teacher.uld_matched_weight} and {weights[1]} is {teacher.uld_unmatched_weight}: set "
            "both, or neither for the share of the teacher's vocabulary that is in both"
        )
    elsewhere = {
        "teacher.context": teacher.context != "none",
        "algorithm.replay_groups": c.replay_groups,
        "algorithm.aggregation": online and c.aggregation == "rollout_token",
        "data.packing": not online and config.data.packing,
        "data.loss_on": (not online or teacher.on_policy < 1) and config.data.loss_on == "all",
        "rollout.staleness": online and config.rollout.staleness,
        "rollout.processes": online and config.rollout.processes,
    }
    for key, value in (*_met(config, elsewhere), *(changed(config, ENVIRONMENTS) if online else ())):
        yield (
            f"teacher.form is uld, but {key} is {value!r}: a teacher with another tokenizer reads the text of one "
            "sampled or given answer behind a prompt, in this step, and its spans are counted anew; leave out one of "
            "the two"
        )
    if teacher.nll_coef:
        others = {
            "algorithm.name": c.name == "ppo",
            "rewards.functions": online and bool(config.rewards.functions) and c.advantage != "zero",
            "algorithm.loss": online and c.loss not in ("auto", "ppo_clip"),
            "algorithm.beta": online and c.beta,
            "algorithm.entropy_coef": online and c.entropy_coef,
            "algorithm.entropy_controller": online and c.entropy_controller != "fixed",
        }
        for key, value in _met(config, others):
            yield (
                f"teacher.nll_coef is {teacher.nll_coef:g}, but {key} is {value!r}, so that the loss has a term of the "
                "policy gradient: set advantage to zero and leave out beta and entropy_coef, or set nll_coef to 0"
            )


def _teacher_context(config: ConfigDict) -> Iterator[str]:
    """Messages for a teacher that is the policy itself, and for what a teacher is shown besides the prompt."""
    teacher, context = config.teacher, config.teacher.context
    name, options = split_options(teacher.path)
    if name == "self":
        rate, every = options.get("rate", 1.0), options.get("every", 1)
        valid = set(options) <= {"rate", "every"} and isinstance(rate, int | float) and isinstance(every, int)
        if not valid or not 0 <= rate <= 1 or every < 1:
            yield (
                f"teacher.path is {teacher.path!r}, but the policy as its own teacher is self(rate=0.05, every=1), "
                "with a rate from 0 (as it started) to 1 (as it is) and every 1 or more steps"
            )
        if (quantized := _quantized(config)) and rate not in (0, 1):
            yield (
                f"teacher.path is {teacher.path!r}, a mean of whole models, but the matrices are quantised "
                f"({quantized}) and adapters are not merged into them: set rate to 0, or to 1"
            )
        if context == "none":
            yield (
                f"teacher.path is {teacher.path!r}, and teacher.context is none, so that the policy would learn from "
                "itself what it knows: set teacher.context, success or privileged, or another path"
            )
        of_a_model = {
            "teacher.dtype": teacher.dtype != "auto",
            "teacher.quantize": teacher.quantize != "none",
            "teacher.revision": teacher.revision is not None,
            "teacher.offload": teacher.offload and (rate, every) == (1, 1),
        }
        for key, value in _met(config, of_a_model):
            yield (
                f"{key} is {value!r}, but teacher.path is {teacher.path!r}, which has the policy's own parameters: "
                "leave it out"
            )
    if context == "none":
        of_context = (
            "success_threshold", "exclude_own", "remove_thinking", "privileged_column", "template",
            "solution_template", "privileged_template", *(() if teacher.form == "uld" else ("max_prompt_length",)),
        )  # fmt: skip
        for key, value in changed(config, (f"teacher.{name}" for name in of_context)):
            yield (
                f"{key} is {value!r}, but teacher.context is none, so that the teacher is shown the prompt alone: set "
                "teacher.context, or leave it out"
            )
        return
    elsewhere = {
        "algorithm.name": config.algorithm.name in OFFLINE,
        "algorithm.replay_groups": bool(config.algorithm.replay_groups) and teacher.form == "divergence",
        "teacher.others": bool(teacher.others),
        "teacher.on_policy": teacher.on_policy < 1,
    }
    for key, value in (*_met(config, elsewhere), *changed(config, ENVIRONMENTS)):
        yield (
            f"teacher.context is {context}, but {key} is {value!r}: a context is of one sampled answer to a prompt of "
            "this step, and of one teacher; leave out one of the two"
        )
    if "success" in context and not config.rewards.functions:
        yield (
            f"teacher.context is {context}, but rewards.functions is empty, so that no completion is a success: name "
            "one, or set teacher.context to privileged"
        )
    if "success" in context and teacher.exclude_own and config.rollout.group_size < 2:
        yield (
            f"teacher.context is {context}, but rollout.group_size is {config.rollout.group_size}, so that there is no "
            "other completion of a prompt: set it to 2 or more"
        )
    if "privileged" in context and teacher.max_prompt_length is None:
        yield (
            f"teacher.context is {context}, and teacher.max_prompt_length is none: privileged texts may have any "
            "length, so set it to the tokens of the longest prompt with its text"
        )
    parts = {
        "solution": ("success", ("solution_template", "success_threshold", "exclude_own", "remove_thinking")),
        "privileged": ("privileged", ("privileged_template", "privileged_column")),
    }
    shown = {part for part, (word, _) in parts.items() if word in context}
    unread = (f"teacher.{name}" for part in parts.keys() - shown for name in parts[part][1])
    for key, value in changed(config, unread):
        yield (
            f"{key} is {value!r}, which teacher.context = {context} does not read: leave it out, or set another context"
        )
    templates = {"template": {"prompt", *shown}} | {f"{part}_template": {part} for part in shown}
    for key, needed in templates.items():
        text, allowed = teacher[key], needed | (parts.keys() if key == "template" else set())
        try:
            fields = None if text is None else {field for _, field, _, _ in Formatter().parse(text)} - {None}
        except ValueError:
            fields = set()
        if fields is not None and not needed <= fields <= allowed:
            yield (
                f"teacher.{key} is {text!r}, but it takes a text with "
                f"{' and '.join(f'{{{field}}}' for field in sorted(needed))}, and other braces doubled"
            )


def _environment(config: ConfigDict) -> Iterator[str]:
    c, algorithm = config.environment, config.algorithm
    reward_scales(c.reward_scale)  # refuses what cannot be read
    environment_options(c.options)
    if c.options and algorithm.name in OFFLINE:
        yield (
            f"environment.options is {tuple(c.options)}, but algorithm.name = {algorithm.name!r} samples nothing: "
            "leave it out"
        )
    named = [key for key, _ in _used(config, ENVIRONMENTS)]
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


def _data(config: ConfigDict) -> Iterator[str]:
    data, model, name = config.data, config.model, config.algorithm.name
    if data.packing and name != "sft":
        other = "set it to false" if name in OFFLINE else "set it to false (batch.packing packs what is sampled)"
        yield f"data.packing is for sft only, and algorithm.name is {name!r}: {other}"
    steps = name == "process_reward_model"
    allowed = ("completion", "last_step") if steps else ("completion", "last_turn", "all")
    if data.loss_on not in allowed:
        yield f"data.loss_on is {data.loss_on}, and algorithm.name {name!r}: set it to one of {', '.join(allowed)}"
    if data.step_separator == "":
        yield "data.step_separator is empty, but it takes the text that ends a step, or none for a line break"
    elif re.fullmatch(r"(\\[nrt])+", data.step_separator or ""):
        yield (
            f"data.step_separator is {data.step_separator}, backslashes and letters: for a line break write '\\n' on a "
            "command line or, without r before it, in Python"
        )
    easy, hard = data.curriculum_easy, data.curriculum_hard
    for key in (key for key in ("easy", "hard") if data[f"curriculum_{key}"] is not None):
        if data.streaming or name in OFFLINE:
            reason = (
                "streams rows, which come once" if data.streaming else "samples nothing, so that no prompt is solved"
            )
            yield f"data.curriculum_{key} is {data[f'curriculum_{key}']:g}, but this run {reason}: set it to none"
    if easy is not None and hard is not None and hard >= easy:
        yield f"data.curriculum_hard is {hard:g}, but it must be below data.curriculum_easy = {easy:g}"
    split_options(f"model.overrides({model.overrides})")
    split_options(f"data.chat_template_kwargs({data.chat_template_kwargs})")  # raises for options it cannot read
    split_options(f"data.image_processor({data.image_processor})")
    if data.streaming and config.num_epochs is not None:
        yield (
            f"num_epochs is {config.num_epochs}, but data.streaming is true, and streamed rows are not counted: set "
            "total_steps, or data.streaming to false"
        )
    named = (key for key in ("streaming", "eval_path", "eval_split") if data[key])
    if config.eval.fraction and (other := next(named, None)):
        yield (
            f"eval.fraction is {config.eval.fraction}, to hold training rows out, but data.{other} is {data[other]!r}: "
            f"set data.{other} to {'false' if other == 'streaming' else 'none'}, or eval.fraction to 0"
        )
    if config.eval.fraction and config.eval.sets:
        yield f"eval.fraction is {config.eval.fraction}, but eval.sets names what is evaluated on: set one of the two"
    if data.group_by_length:
        others = {
            f"algorithm.name is {name}, which samples its rows": name not in OFFLINE,
            "data.packing is true": data.packing,
            "batch.packing is true": config.batch.packing == "true" or config.batch.microbatch_tokens,
        }
        for reason in (reason for reason, holds in others.items() if holds):
            yield f"data.group_by_length is true, to pad rows less, but {reason}: set it to false"
    for key in ("precompute_reference", "group_by_length", "deduplicate"):
        if data.streaming and data[key]:
            yield f"data.{key} needs all rows before training, and data.streaming is true: set one to false"
    for source in data.sources:
        options = source if isinstance(source, Mapping) else split_options(source)[1]
        yield from _unwritable(f"data.sources has {source!r}", options)
        if data.packing and not data.streaming and options.get("weight") is not None:
            yield (
                "data.sources are mixed by weight, which data.packing would undo: leave the weights out, or set "
                "data.packing to false, or data.streaming to true, which packs blocks of mixed rows"
            )


def named_policy_loss(config: ConfigDict) -> Any:
    """The policy loss that `algorithm.loss` names, built-in or the user's own; None for auto and an unknown name.

    None is the user's own too in a look at the configuration.
    """
    if config.algorithm.loss == "auto":
        return None
    from jaxrl_llm.algorithms import policy_losses  # which imports jax: only for a loss that is named

    name = split_options(config.algorithm.loss)[0]
    return getattr(policy_losses, name, None) or _own_function("algorithm.loss", name)


def compares_with_reference(config: ConfigDict) -> bool:
    """True where the ratio of the policy loss is that of the policy and the reference."""
    return config.algorithm.old_logps == "auto" and getattr(named_policy_loss(config), "old_logps", None) == "reference"


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
        for key, value in _met(config, others):
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
            "teacher.limit": teacher.limit is not None,
        }
        for key, value in _met(config, unfit):
            yield (
                f"algorithm.loss is {algorithm.loss!r}, whose signal is a teacher's log-prob minus that of the policy "
                f"as it is in each update, but {key} is {value!r}: set teacher.path with form = advantage, coef = 1, "
                "position_gamma = 0 and limit = none, or another loss"
            )


def advantages_of(config: ConfigDict) -> dict[str, str]:
    """The advantage estimates by the settings that name them."""
    rules = {"algorithm.advantage": config.algorithm.advantage}
    for name, options in environment_options(config.environment.options).items():
        if "advantage" in options:
            rules[f"environment.options: advantage of {name}"] = options["advantage"]
    return rules


def _reference_scores(config: ConfigDict, rules: Mapping[str, str]) -> Iterator[str]:
    """Messages for scores of the reference that are read and cannot be had, or are sampled and not read.

    `rules` are the advantage estimates by the settings that name them.
    """

    def reads(setting: str, rule: str) -> bool:
        own = _own_function(setting, rule)
        return rule == "a2po" or (own is not None and "reference_scores" in inspect.signature(own).parameters)

    readers = {setting: written for setting, written in rules.items() if reads(setting, split_options(written)[0])}
    if not readers and not (_looks.get() and any(is_own(split_options(written)[0]) for written in rules.values())):
        for key, value in changed(config, ("algorithm.reference_samples", "algorithm.drop_unsolved")):
            yield (
                f"{key} is {str(value).lower()}, but algorithm.advantage = {config.algorithm.advantage!r} reads no "
                "scores of a reference: set it to a2po, or leave the other out"
            )
    every = ("data.streaming", "rollout.partial_prompts", "rollout.processes")
    for setting, written in readers.items():
        for key, value in (*_used(config, every), *changed(config, CURRICULUM)):
            yield (
                f"{setting} is {written!r}, for which the scores of every prompt are known before the first step, in "
                f"the process that samples, but {key} is {str(value).lower()}: leave that out, or take another rule"
            )


def takes(rule: str, argument: str, otherwise: bool = False) -> bool:
    """True for a built-in advantage rule with this argument: one that takes the completions of a prompt together has
    `group_size`. Any other rule gives `otherwise`."""
    from jaxrl_llm.algorithms import advantages, turn_advantages  # which import jax: only where it is asked

    function = {**vars(advantages), **vars(turn_advantages)}.get(f"{rule}_advantages")
    return otherwise if function is None else argument in inspect.signature(function).parameters


def _unwritable(source: str, options: Mapping[str, Any]) -> Iterator[str]:
    """A message for the options of a source that config.json cannot hold."""
    try:
        json.dumps(dict(options))
    except TypeError as error:
        yield (
            f"{source}, which cannot be written to a file ({error}): name functions by their file, "
            "path/to/file.py:function, and give data in memory to train(config, train_dataset=...)"
        )


def _eval(config: ConfigDict, online: bool) -> Iterator[str]:
    measure = config.eval.measure
    if online and measure in ("loss", "both"):
        yield f"eval.measure is {measure}, but {config.algorithm.name} learns from samples: set auto"
    if config.algorithm.name in ("reward_model", "process_reward_model") and measure in ("samples", "both"):
        yield f"eval.measure is {measure}, but a reward model writes nothing: set auto or loss"
    if config.num_epochs is None and config.eval.start > config.total_steps:
        yield (
            f"eval.start is {config.eval.start}, but the run has total_steps = {config.total_steps}: give a smaller "
            "one, or set eval.every to -1"
        )
    for entry in config.eval.sets:
        name, _, options = eval_set(entry)
        yield from _unwritable(f"eval.sets, {name}", options)


def _optimizer(config: ConfigDict) -> Iterator[str]:
    c, steps = config.optimizer, config.total_steps
    if c.name not in OPTIMIZERS:
        try:
            if not is_own(split_options(c.name)[0]):  # the function itself is found when a run starts
                raise ConfigError(f"it takes {', '.join(OPTIMIZERS)}, or your own function, path/to/file.py:function")
        except ConfigError as error:
            yield f"optimizer.name is {c.name!r}: {error}"
    for entry in c.rate_factors:
        pattern, _, factor = entry.rpartition("=")
        try:
            right = pattern and 0 < float(factor) <= LARGEST
        except ValueError:
            right = False
        if not right:
            yield (
                f"optimizer.rate_factors has {entry!r}, but it takes PATTERN=FACTOR, lora_B=16, with a number above 0; "
                "what is not to be trained is named by model.frozen"
            )
    if c.warmup_steps and c.warmup_ratio:
        yield f"optimizer.warmup_steps is {c.warmup_steps} and warmup_ratio {c.warmup_ratio}: set one of the two"
    if c.warmup_init and not (c.warmup_steps or c.warmup_ratio):
        yield f"optimizer.warmup_init is {c.warmup_init:g}, but there is no warm-up: set warmup_steps, or it to 0"
    if c.learning_rate == "auto":
        if config.algorithm.name in ("preference", "reward_model", "process_reward_model"):
            yield (
                "optimizer.learning_rate is auto, a rule for sft and for algorithms that sample, but algorithm.name is "
                f"{config.algorithm.name}: set a number, 1e-6 for example, or 1e-5 for adapters"
            )
        if c.warmup_init:
            yield f"optimizer.warmup_init is {c.warmup_init:g}, and learning_rate auto: give a number for both"
    elif c.warmup_init > c.learning_rate:
        yield (
            f"optimizer.warmup_init is {c.warmup_init:g}, but warm-up rises to learning_rate = {c.learning_rate:g}: "
            "give a smaller one"
        )
    known = config.num_epochs is None  # else they are counted with the rows, and this is checked again
    warmup = c.warmup_steps or (math.ceil(c.warmup_ratio * steps) if known else 0)
    schedules = {"optimizer.schedule": c.schedule}
    if config.algorithm.name == "ppo" and not config.critic.shared:
        schedules["critic.schedule"] = config.critic.schedule
        warmup = max(warmup, config.critic.lr_warmup_steps)
    named = " and ".join(f"{key} {schedule}" for key, schedule in schedules.items())
    end, of_end = (c.schedule_steps, "schedule_steps") if c.schedule_steps else (steps, "total_steps")
    decays = "wsd" in schedules.values()
    if decays != (c.decay_steps > 0) or ((known or c.schedule_steps) and c.decay_steps > end):
        yield f"optimizer.decay_steps is {c.decay_steps} with {named}: wsd takes 1 to {of_end} = {end}, the others 0"
    if c.schedule_steps and not set(schedules.values()) - {"constant", "inverse_sqrt"}:
        yield f"optimizer.schedule_steps is {c.schedule_steps}, but {named} has no end: set it to 0"
    if 0 < c.schedule_steps <= warmup:
        yield (
            f"optimizer.schedule_steps is {c.schedule_steps}, but warm-up alone takes {warmup} steps: set it to more "
            "(it counts them too), or to 0 for total_steps"
        )
    if c.power != 1 and "polynomial" not in schedules.values():
        yield f"optimizer.power is {c.power:g}, but it is that of polynomial, with {named}: set it to 1"
    if c.rate_factors and c.name in (SCHEDULE_FREE, "prodigy"):
        reason = "estimates one rate" if c.name == "prodigy" else "averages with weights of one rate"
        yield (
            f"optimizer.rate_factors is set, but {c.name} {reason} for all parameters: leave the factors out, or take "
            "another optimizer.name, adamw"
        )
    trained_apart = config.algorithm.name == "ppo" and not config.critic.shared
    if c.name == "came" and 0 in (c.b1, config.critic.b1 if trained_apart else None):
        yield (
            f"{'critic' if c.b1 else 'optimizer'}.b1 is 0, but came divides by how far updates are from their mean, of "
            "which nothing is left then: set it to 0.9"
        )
    if c.name == "prodigy":
        rates = {"optimizer": c.learning_rate} | ({"critic": config.critic.learning_rate} if trained_apart else {})
        for section, rate in rates.items():
            if isinstance(rate, str) or rate < LEAST_PRODIGY_RATE:
                yield (
                    f"{section}.learning_rate is {rate}, but prodigy finds the rate itself, and multiplies it by that: "
                    "set it to 1, and where that is too fast optimizer.d_coef to 0.5"
                )
    if c.lisa_layers and (c.name in (SCHEDULE_FREE, "prodigy") or c.name not in OPTIMIZERS):
        yield (
            f"optimizer.lisa_layers is {c.lisa_layers}, whose layers change while {c.name} follows all of them: set it "
            "to 0, or take another optimizer.name, adamw"
        )
    whole = not (config.lora.rank or config.lora.path)
    if c.name == "galore_adamw" and not whole:
        yield (
            "optimizer.name is galore_adamw, which projects the gradients of whole matrices, but adapters are trained, "
            "whose rank is low already: take adamw, or set lora.rank to 0 and lora.path to none"
        )
    if c.name == SCHEDULE_FREE and whole and config.model.param_dtype != "float32":
        yield (
            f"model.param_dtype is {config.model.param_dtype}, but the average of {SCHEDULE_FREE} moves in ever "
            "smaller steps, which so few bits do not hold: set it to float32, or train adapters (lora.rank)"
        )
    if c.moment_dtype == "float8" and c.name == "adafactor":
        yield (
            "optimizer.moment_dtype is float8, but adafactor has statistics of rows and columns, small already: set "
            "float32, or optimizer.name to adamw, lion, sgd, muon, ademamix, adopt or came"
        )
    if "cosine_with_restarts" in schedules.values() and (c.cycles < 1 or c.cycles % 1):
        yield (
            f"optimizer.cycles is {c.cycles:g} with {named}: cosine_with_restarts takes a whole number of decays, 2 "
            "for one restart"
        )


def _quantized(config: ConfigDict) -> str:
    """The setting that stores matrices, of experts at least, in fewer bits, with its value; empty without one."""
    for name, unset in (("quantize", ("none",)), ("quantize_experts", ("none", "same"))):
        if (value := config.model[name]) not in unset:
            return f"model.{name} = {value!r}"
    return ""


def _lora(config: ConfigDict) -> Iterator[str]:
    lora, algorithm = config.lora, config.algorithm
    if lora.path is not None and lora.rank:
        yield f"lora.rank is {lora.rank}, but the adapter of lora.path has a rank already: set rank to 0"
    if lora.dora and lora.path is not None:
        yield "lora.dora is true, but the adapter of lora.path has its own form, DoRA or not: set it to false"
    if lora.dora and config.model.quantize != "none":
        yield (
            f"lora.dora is true, and model.quantize {config.model.quantize}, but DoRA measures the matrices in every "
            "forward pass, and none are kept as numbers: set one of the two off"
        )
    if not LORA_INIT.fullmatch(lora.init):
        known = "kaiming, gaussian, orthogonal, random, pissa, pissa_niter_N (N iterations, 16 for example) and olora"
        yield f"lora.init is {lora.init!r}, but there are {known}"
    elif lora.init != "kaiming" and lora.path is not None:
        yield f"lora.init is {lora.init}, but the adapter of lora.path has its numbers already: set it to kaiming"
    elif lora.dora and (lora.init == "random" or starts_from_matrices(lora.init)):
        yield (
            f"lora.init is {lora.init}, and lora.dora true, but DoRA learns the lengths of columns to which the "
            "adapters have added nothing yet: set init to kaiming, gaussian or orthogonal, or dora to false"
        )
    elif lora.init == "orthogonal" and lora.rank % 2:
        yield f"lora.init is orthogonal, which takes an even rank, but lora.rank is {lora.rank}"
    if config.model.vision == "trained" and (lora.rank or lora.path):
        yield (
            "model.vision is trained, but beside adapters nothing is trained whole: set it to lora, for adapters on "
            "the vision part too, or frozen; or name its modules in lora.modules_to_save"
        )
    for key, value in changed(config, ("model.trainable", "model.frozen")):
        if lora.rank or lora.path:
            yield (
                f"{key} is {', '.join(value)}, but adapters are trained, and nothing beside them but what "
                f"lora.modules_to_save names: leave {key} empty, or lora out"
            )
    qat, others = config.model.qat, {"lora.rank": lora.rank, "lora.path": lora.path}
    others["model.quantize"] = None if config.model.quantize == "none" else config.model.quantize
    of_experts = config.model.quantize_experts
    others["model.quantize_experts"] = None if of_experts in ("same", "none") else of_experts
    for key, value in ((key, value) for key, value in others.items() if value and qat != "none"):
        yield (
            f"model.qat is {qat}, for which the matrices are trained as numbers, but {key} is {value}, with which they "
            f"are frozen: set model.qat to none, or leave {key} out"
        )
    of_modules = ("lora.layers_to_transform", "lora.exclude_modules", "lora.rank_pattern", "lora.alpha_pattern")
    for key, value in changed(config, of_modules):
        shown = ", ".join(map(str, value))
        if lora.path is not None:
            yield f"{key} is {shown}, but the adapter of lora.path says this itself: leave it empty"
        elif not lora.rank:
            yield f"{key} is {shown}, but there are no adapters: set lora.rank, 16 for example, or leave it empty"
    if not (lora.rank or lora.path):
        if config.model.vision == "lora":
            yield "model.vision is lora, but there are no adapters: set lora.rank, 16 for example, or it to trained"
        if lora.dora:
            yield "lora.dora is true, but there are no adapters: set lora.rank, 16 for example, or it to false"
        if lora.modules_to_save:
            yield (
                f"lora.modules_to_save is {', '.join(lora.modules_to_save)}, but there are no adapters, and all of the "
                "model is trained: set lora.rank, 16 for example, or leave it empty"
            )
        return
    if lora.modules_to_save and lora.path is not None:
        yield (
            f"lora.modules_to_save is {', '.join(lora.modules_to_save)}, but the adapter of lora.path names its own: "
            "leave it empty"
        )
    experts = [name for name in lora.targets if "experts" in name.split(".")]
    for setting, off in (("dora", "false"), ("dropout", "0")):
        if lora.rank and experts and lora[setting]:
            yield (
                f"lora.{setting} is {str(lora[setting]).lower()}, but lora.targets names {experts[0]}, and adapters of "
                f"experts have no {setting}, as in PEFT: set it to {off}, or leave experts out of the targets"
            )
    if lora.rank and experts and starts_from_matrices(lora.init):
        yield (
            f"lora.init is {lora.init}, but lora.targets names {experts[0]}, and adapters of experts do not start from "
            "the matrices beside them: set it to kaiming, or leave experts out of the targets"
        )
    if algorithm.ref_sync_steps and lora.reference == "base":
        yield (
            f"algorithm.ref_sync_steps is {algorithm.ref_sync_steps}, but lora.reference = 'base' never moves: set "
            "start (with ref_mixup_alpha 1) or copy"
        )
    if algorithm.ref_sync_steps and lora.reference == "start" and algorithm.ref_mixup_alpha < 1:
        yield (
            f"algorithm.ref_mixup_alpha is {algorithm.ref_mixup_alpha}, but a mean of adapters is no mean of what they "
            "compute: set lora.reference to copy, or ref_mixup_alpha to 1"
        )
    if lora.reference == "copy" and (quantized := _quantized(config)):
        yield (
            f"lora.reference is copy, but the matrices are quantised ({quantized}) and adapters are not merged into "
            "them: set base or start"
        )


def _average(config: ConfigDict) -> Iterator[str]:
    """Messages for the moving average of the policy, and for a reference that follows it or starts to move late."""
    c, algorithm = config.average, config.algorithm
    for key, value in changed(config, ("algorithm.ref_sync_to", "algorithm.ref_sync_after")):
        if not algorithm.ref_sync_steps:
            yield f"{key} is {value!r}, but algorithm.ref_sync_steps is 0, so that the reference never moves: set both"
    if algorithm.ref_sync_to == "average" and not c.every:
        yield (
            "algorithm.ref_sync_to is average, but average.every is 0, so that there is none: set it, 400 for example, "
            "or ref_sync_to to policy"
        )
    if not c.every:
        for key, value in changed(config, (f"average.{name}" for name in c)):
            yield f"{key} is {value!r}, but average.every is 0, so that nothing is averaged: set it, or leave this out"
        return
    first = c.start + c.every
    if config.num_epochs is None and first > config.total_steps:
        yield (
            f"average.start + average.every is {first}, the step of the first update, but total_steps is "
            f"{config.total_steps}: make them smaller"
        )
    if c.lag + c.multiplier * first < 1:
        yield (
            f"average.lag is {c.lag:g} and multiplier {c.multiplier:g}, which make an age of "
            f"{c.lag + c.multiplier * first:g} at the first update, but from 1 on the weights are at most 1: raise one"
        )
    if c.evaluate and config.eval.every < 0:
        yield "average.evaluate is true, but eval.every is -1, and nothing is evaluated: set one of the two"
    if quantized := _quantized(config):
        yield (
            f"average.every is {c.every}, but the matrices are quantised ({quantized}), and a mean of adapters is no "
            "mean of what they compute: set one of the two off"
        )
    adapted = config.lora.rank or config.lora.path
    if algorithm.ref_sync_to == "average" and adapted and config.lora.reference != "copy":
        yield (
            f"algorithm.ref_sync_to is average, of the whole model, but lora.reference is {config.lora.reference!r}: "
            "set it to copy"
        )


def _checkpoint(config: ConfigDict) -> Iterator[str]:
    checkpoint, best, every = config.checkpoint, config.checkpoint.best, config.eval.every
    if not config.output_dir.strip():
        yield (
            "output_dir is empty (is it an unset variable of the shell?), but it takes a folder; the current one is "
            "written '.'"
        )
    for name in checkpoint.accept_changes:
        if name not in IDENTITY:
            near = closest(name, IDENTITY)
            yield (
                f"checkpoint.accept_changes names {name!r}, which "
                + (
                    "may change without it: leave it out"
                    if name in BY_NAME
                    else f"is no setting; the closest is {near}"
                )
            )
    if NEW in config.output_dir:
        if config.output_dir.count(NEW) > 1 or NEW not in PurePath(config.output_dir).name:
            yield f"output_dir is {config.output_dir!r}, but it takes {NEW} once, in its last part: runs/grpo-{NEW}"
        for key, shared in (("checkpoint.folder", checkpoint.folder), ("rollout.processes", config.rollout.processes)):
            if shared:
                yield f"output_dir is {config.output_dir!r}, but {key} = {shared} needs a folder that is known: name it"
    if "://" in config.output_dir:
        yield (
            f"output_dir is {config.output_dir!r}, but it is a local folder; checkpoints alone go to an object store: "
            "set checkpoint.folder"
        )
    if not checkpoint.contents:
        yield "checkpoint.contents is empty, but it takes state, hf, or both"
    load = {*checkpoint.load}
    if load not in ({"model", "optimizer", "extra"}, {"model", "extra"}, {"model"}):
        yield (
            f"checkpoint.load is {','.join(checkpoint.load)!r}, but it takes model,optimizer,extra (all of a "
            "checkpoint), model,extra (with a new optimizer) or model (the weights alone, at step 0)"
        )
    elif (checkpoint.resume == "never" and len(load) < 3) or (checkpoint.resume == "auto" and len(load) == 1):
        yield (
            f"checkpoint.load is {','.join(checkpoint.load)}, but checkpoint.resume is {checkpoint.resume}, which "
            "names no checkpoint to load from: set it to RUN/checkpoints/STEP"
        )
    if best and "state" not in checkpoint.contents:
        yield (
            f"checkpoint.best is {best!r}, but checkpoint.contents is {','.join(checkpoint.contents)}, and the best of "
            "the states is kept: add state"
        )
    if config.export.best and not best:
        yield "export.best is true, but no metric says which checkpoint is best: set checkpoint.best"
    if best and checkpoint.every == 0:
        yield f"checkpoint.best is {best!r}, but only the last step is saved: set checkpoint.every"
    if best and best.startswith("eval/") and (every <= 0 or checkpoint.every % every):
        yield (
            f"checkpoint.best is {best!r}, but the steps that are saved (checkpoint.every = {checkpoint.every}) are "
            f"not those that are evaluated (eval.every = {every}): make eval.every divide it"
        )
    for spec in config.callbacks:
        name, options = split_options(spec)
        if name == "early_stopping" and str(options.get("metric", "")).startswith("eval/") and every <= 0:
            yield (
                f"callbacks has {spec!r}, but nothing is evaluated while it trains (eval.every = {every}): set "
                "eval.every, or name a metric of every step"
            )


def _export(export: ConfigDict, checkpoint: ConfigDict) -> Iterator[str]:
    repo = export.push_to_hub
    if repo is None and export.private:
        yield "export.private is true, but nothing is pushed: set export.push_to_hub, or it to false"
    if repo is None and export.copy_to is None and export.overwrite:
        yield (
            "export.overwrite is true, but nothing is pushed or copied: set export.push_to_hub or export.copy_to, or "
            "it to false"
        )
    if export.copy_to is not None and not re.match(r"\w[\w+.-]*://.", export.copy_to):
        yield (
            f"export.copy_to is {export.copy_to!r}, but it takes the URL of a folder, gs://bucket/model; a folder of "
            "this machine is written by jaxrl-llm export --output"
        )
    if export.strategy == "every_save":
        needed = {
            "export.push_to_hub": (repo is not None, "name a repository"),
            "checkpoint.contents": ("hf" in checkpoint.contents, "let it have hf, the model that is pushed"),
            "export.overwrite": (export.overwrite, "set it to true, as each push replaces the one before"),
        }
        for key, (is_set, way_out) in needed.items():
            if not is_set:
                yield f"export.strategy is every_save, but {key} does not go with it: {way_out}, or set strategy to end"
    if export.title is not None and not export.title.strip():
        yield "export.title is empty, but it takes the title of the model card, or none"
    if not all(tag.strip() for tag in export.tags):
        yield f"export.tags has an empty tag: {tuple(export.tags)}"
    if repo is not None and not re.fullmatch(r"([A-Za-z0-9][\w.-]*/)?[\w.-]+", repo):
        yield (
            f"export.push_to_hub is {repo!r}, but it takes a repository of the hub: OWNER/NAME, or NAME of the token's "
            "account"
        )
