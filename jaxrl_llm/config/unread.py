"""Settings that differ from their default but that a run does not read: it names them as it starts."""

import inspect

from jaxrl_llm.config.checks.values import (
    advantages_of,
    changed,
    compares_with_reference,
    named_policy_loss,
    reference_adapters,
    takes,
    value_of,
)
from jaxrl_llm.config.entries import environment_options
from jaxrl_llm.config.resolve import is_own, split_losses, split_options
from jaxrl_llm.config.schema import BY_NAME, KEYS, OFFLINE, ONLINE_PREFERENCE, SCHEDULES, ConfigDict

OF_ADAPTERS = ("lora.alpha", "lora.rslora", "lora.init", "lora.dropout", "lora.targets", "lora.reference")
OF_NEW_ADAPTERS = ("lora.alpha", "lora.rslora", "lora.init", "lora.targets")
OF_GIVEN_ROWS = ("data.loss_on", "data.precompute_reference")
OF_CURRICULA = ("data.curriculum_revisit", "data.curriculum_visits", "data.curriculum_decay")
OF_REFERENCES = ("algorithm.offload_reference", "algorithm.ref_mixup_alpha")
REFERENCE_FREE = "algorithm.reference_free"
OF_PREFERENCES = (
    "algorithm.loss_weights", REFERENCE_FREE, "algorithm.ld_alpha", "algorithm.use_weighting",
)  # fmt: skip
OF_PAIRS = ("algorithm.pairs",)  # of samples
OF_ROLLOUTS = (  # of training; evaluations sample too
    "rollout.devices", "rollout.processes", "rollout.staleness", "rollout.partial_prompts", "rollout.partial_tokens",
    "rollout.update_in_flight", "rollout.max_wait", "rollout.arrivals",
)  # fmt: skip
OF_EPISODES = (
    "environment.max_turns", "environment.max_tool_calls", "environment.timeout", "environment.workers",
    "environment.on_error",
)  # fmt: skip
OF_AGENTS = ("environment.agent_timeout", "environment.agent_tokens", "environment.agent_branches")
# Of algorithms that sample: what ranks completions, beside what losses of pairs read.
OF_RANKS = (
    "algorithm.beta", "algorithm.mask_truncated", "algorithm.reward_clip", "algorithm.overlong_buffer",
    "algorithm.overlong_penalty", "algorithm.missing_eos_penalty", "algorithm.dynamic_sampling",
    "algorithm.dynamic_sampling_metric", "algorithm.max_sampling_rounds",
)  # fmt: skip
OF_OPTIMIZERS = (
    "optimizer.b1", "optimizer.b2", "optimizer.eps", "optimizer.weight_decay", "optimizer.weight_decay_end",
    "optimizer.weight_decay_shape", "optimizer.no_decay",
)  # fmt: skip
OF_SOME_OPTIMIZERS = (
    (("ademamix", "came"), ("optimizer.b3",)),
    (("ademamix",), ("optimizer.mixing", "optimizer.mixing_steps")),
    (("prodigy",), ("optimizer.d_coef",)),
    (("galore_adamw",), ("optimizer.galore_rank", "optimizer.galore_every", "optimizer.galore_scale")),
)
NOT_OF = {  # an optimizer, what its formula has not
    "adafactor": ("optimizer.b1", "optimizer.b2", "optimizer.eps"), "came": ("optimizer.eps",),
    "lion": ("optimizer.eps",), "sgd": ("optimizer.b2", "optimizer.eps"),
}  # fmt: skip
OF_SCHEDULES = {  # a setting, and the schedules that read it
    "optimizer.min_lr_ratio": {*SCHEDULES} - {"constant"},
    "optimizer.cycles": {"cosine", "cosine_with_restarts"},
    "optimizer.decay_shape": {"wsd"},
}
OF_CRITICS = ("critic.b1", "critic.b2", "critic.weight_decay")
OF_SHARED_CRITICS = ("critic.shared", "critic.coef", "critic.epsilon")
OF_RATIOS = ("algorithm.epsilon_low", "algorithm.epsilon_high")
# A setting, the value with which others have no effect, and these.
OF_OTHERS = (
    ("optimizer.weight_decay_end", None, ("optimizer.weight_decay_shape",)),
    ("optimizer.lisa_layers", 0, ("optimizer.lisa_every",)),
    ("batch.packing", "false", ("batch.pack_length", "batch.microbatch_tokens", "batch.logps_microbatch_tokens")),
    ("checkpoint.best", None, ("checkpoint.best_mode",)),
    ("logging.profile_steps", None, ("logging.profile_process",)),
    ("environment.agent", None, OF_AGENTS),
)
# The same, of algorithms that sample.
OF_SAMPLES = (
    ("algorithm.kl_controller", "fixed", ("algorithm.kl_target", "algorithm.kl_horizon")),
    ("algorithm.entropy_controller", "fixed",
     ("algorithm.entropy_target", "algorithm.entropy_delta", "algorithm.entropy_coef_min",
      "algorithm.entropy_coef_max")),
    ("algorithm.importance_correction", "none", ("algorithm.importance_max", "algorithm.importance_min")),
    ("algorithm.reward_beta", 0.0, ("algorithm.reward_kl",)),
    ("algorithm.overlong_buffer", 0, ("algorithm.overlong_penalty",)),
    ("algorithm.dynamic_sampling", False, ("algorithm.max_sampling_rounds",)),
)  # fmt: skip
# What every algorithm reads, or the checks refuse where it does not fit.
OF_ALL = (
    "algorithm.name", "algorithm.loss", "algorithm.neftune_alpha", "algorithm.label_smoothing",
    "algorithm.num_iterations", "algorithm.ref_sync_steps", "algorithm.ref_sync_to", "algorithm.ref_sync_after",
)  # fmt: skip


def unread(config: ConfigDict, adapted: bool, plays: bool) -> list[str]:
    """A sentence for each reason for which settings have no effect in this run, with their names.

    `adapted` is true where the model has adapters, and `plays` where there are environments, tools or agents: either
    may be given in memory.
    """
    reasons = _of_algorithm(config) | _of_adapters(config, adapted) | _of_data(config) | _of_loss(config)
    reasons |= _of_optimizer(config) | _of_critic(config) | _of_reference(config, adapted)
    reasons["there is no environment, tool or agent"] = () if plays else OF_EPISODES
    for key, value, others in (*OF_OTHERS, *(OF_SAMPLES if config.algorithm.name not in OFFLINE else ())):
        if value_of(config, key) == value:
            reasons[f"{key} is {BY_NAME[key].show(value)}"] = others
    found = {reason: ", ".join(key for key, _ in changed(config, keys)) for reason, keys in reasons.items()}
    return [f"{reason}: {keys} has no effect" for reason, keys in found.items() if keys]


Reasons = dict[str, tuple[str, ...]]  # with the settings that each leaves without effect, where it holds


def _of_algorithm(config: ConfigDict) -> Reasons:
    """Settings that the algorithm has no part for."""
    name, online = config.algorithm.name, config.algorithm.name not in OFFLINE
    compares_pairs, of_samples = name in ("preference", ONLINE_PREFERENCE), name == ONLINE_PREFERENCE
    of_losses = (*OF_ALL, *OF_REFERENCES, *OF_PREFERENCES, *OF_PAIRS)
    of_policies = tuple(key for key in _keys("algorithm.") if key not in of_losses)
    unsampled = (*of_policies, *OF_REFERENCES, *_named_reference(config))
    if name == "preference":
        unsampled = tuple(key for key in of_policies if key != "algorithm.beta")
    unranked = tuple(key for key in of_policies if key not in OF_RANKS)
    named = f"algorithm.name is {name}, which"
    return {
        f"{named} has no critic": () if name == "ppo" else _keys("critic."),
        f"{named} samples its rows": OF_GIVEN_ROWS if online and config.teacher.on_policy == 1 else (),
        f"{named} compares no pairs": () if compares_pairs else OF_PREFERENCES,
        f"{named} makes no pairs": () if of_samples else OF_PAIRS,
        f"{named} reads the ranks of completions and no advantages": unranked if of_samples else (),
        f"{named} has no reference": () if online or name == "preference" else ("data.precompute_reference",),
        f"{named} reads whole completions": ("data.loss_on",) if name in ("preference", "reward_model") else (),
        f"{named} reads no steps": () if name == "process_reward_model" else ("data.step_separator",),
        f"{named} samples no completions to learn from": () if online else (*unsampled, *OF_ROLLOUTS),
    }


def _of_adapters(config: ConfigDict, adapted: bool) -> Reasons:
    """Settings of adapters, where there are none or the model brings its own."""
    return {
        "lora.rank is 0 and lora.path none, so there are no adapters and all of the model is trained": (
            () if adapted else OF_ADAPTERS
        ),
        "lora.rank is 0, and the adapters that are trained on have such of their own": (
            OF_NEW_ADAPTERS if adapted and not config.lora.rank else ()
        ),
    }


def _of_data(config: ConfigDict) -> Reasons:
    """Settings whose place other data takes, and those of ways to read rows that this run does not take."""
    data, name = config.data, config.algorithm.name
    skips = data.curriculum_easy is not None or data.curriculum_hard is not None
    unskipped = "data.curriculum_easy and curriculum_hard are none, so that no prompt is skipped"
    # The user's own code that makes rows, also of a source, is given the settings.
    own_code = data.sources or ".py:" in data.path or is_own(split_options(data.format)[0])
    return {
        "data.sources is set, which takes its place": ("data.path", "data.name") if data.sources else (),
        "eval.sets is set, which takes its place": ("data.eval_path",) if config.eval.sets else (),
        "data.streaming is false": () if data.streaming else ("data.shuffle_buffer",),
        unskipped: () if skips else OF_CURRICULA,
        f"algorithm.name is {name}, whose rows have rollout.max_prompt_length and max_completion_length": (
            () if name in OFFLINE or own_code else ("data.max_length",)
        ),
    }


def _of_loss(config: ConfigDict) -> Reasons:
    """Settings that the formulas of the loss and of the advantage have no number for."""
    online = config.algorithm.name not in OFFLINE
    loss = named_policy_loss(config) if online else None
    read = OF_RATIOS if loss is None else tuple(f"algorithm.{name}" for name in inspect.signature(loss).parameters)
    unread_ratios = {*OF_RATIOS} - {*read} | {f"algorithm.{name}" for name in getattr(loss, "unread", ())}
    rules = {split_options(rule)[0] for rule in advantages_of(config).values()}
    # With zero all that is set for rewards has no effect, and is meant to have none. An agent's parts are scaled.
    scaled = any(rule == "zero" or takes(rule, "scale", otherwise=True) for rule in rules) or config.environment.agent
    scales = online and config.algorithm.name != ONLINE_PREFERENCE
    return {
        f"algorithm.loss is {config.algorithm.loss}, whose formula has no such bound": tuple(sorted(unread_ratios)),
        f"algorithm.advantage is {config.algorithm.advantage}, whose formula leaves no choice of a deviation": (
            ("algorithm.scale_rewards",) if scales and not scaled else ()
        ),
    }


def _of_optimizer(config: ConfigDict) -> Reasons:
    """Settings that the optimizer's formula has no number for."""
    optimizer = config.optimizer.name
    of_optimizers = (*OF_OPTIMIZERS, *(OF_CRITICS if config.algorithm.name == "ppo" else ()))
    return {
        f"optimizer.name is {optimizer}, which takes its options in brackets": (
            of_optimizers if is_own(split_options(optimizer)[0]) else ()
        ),
        **{
            f"optimizer.name is {optimizer}, and not {' or '.join(names)}": () if optimizer in names else keys
            for names, keys in OF_SOME_OPTIMIZERS
        },
        f"optimizer.name is {optimizer}, whose formula has no such number": NOT_OF.get(optimizer, ()),
    }


def _of_critic(config: ConfigDict) -> Reasons:
    """Settings of an optimizer of the critic's own, or of its share in the policy's; and of the schedules of both."""
    shared, ppo = config.critic.shared, config.algorithm.name == "ppo"
    schedules = {"optimizer.schedule": config.optimizer.schedule}
    if ppo and not shared:
        schedules["critic.schedule"] = config.critic.schedule
    named = " and ".join(f"{key} is {schedule}" for key, schedule in schedules.items())
    ends = schedules.get("critic.schedule") != "constant"
    of_own = tuple(key for key in _keys("critic.") if key not in OF_SHARED_CRITICS)
    return {
        named: tuple(key for key, readers in OF_SCHEDULES.items() if readers.isdisjoint(schedules.values())),
        "critic.schedule is constant": () if ends else ("critic.min_lr_ratio",),
        "critic.shared is true, so that the policy's optimizer trains it": of_own if ppo and shared else (),
        "critic.shared is false": ("critic.coef",) if ppo and not shared else (),
    }


def _of_reference(config: ConfigDict, adapted: bool) -> Reasons:
    """Settings of a reference or a teacher, where there is none or it shares the policy's parameters."""
    name, online = config.algorithm.name, config.algorithm.name not in OFFLINE
    compares_pairs = name in ("preference", ONLINE_PREFERENCE)
    of_references = (*OF_REFERENCES, *_named_reference(config))
    betas = (options.get("beta") for options in environment_options(config.environment.options).values())
    has_beta = bool(config.algorithm.beta or any(betas))
    compared = compares_pairs and _compares(config.algorithm.loss)
    given = compared and not config.algorithm.reference_free
    refers = given or (online and (compares_with_reference(config) or (not compares_pairs and has_beta)))
    teacher, options = split_options(config.teacher.path or "")
    return {
        f"algorithm.loss is {config.algorithm.loss}, which reads no reference": (
            (*of_references, REFERENCE_FREE, "data.precompute_reference") if compares_pairs and not compared else ()
        ),
        "algorithm.reference_free is true, so that no reference is read": (
            (*of_references, "data.precompute_reference") if compared and not given else ()
        ),
        "algorithm.beta is 0, so that there is no reference": (
            (*of_references, "algorithm.kl") if online and not refers and not compares_pairs else ()
        ),
        "algorithm.ref_sync_steps is 0, so that the reference never moves": (
            ("algorithm.ref_mixup_alpha",) if refers and not config.algorithm.ref_sync_steps else ()
        ),
        "data.precompute_reference is true, so that no reference is kept": (
            ("algorithm.offload_reference",) if given and config.data.precompute_reference else ()
        ),
        f"lora.reference is {reference_adapters(config)}, so that the reference shares what is not trained": (
            ("algorithm.offload_reference",) if refers and adapted and config.lora.reference != "copy" else ()
        ),
        f"teacher.path is {config.teacher.path}, so that the teacher shares what is not trained": (
            ("teacher.offload",) if adapted and teacher == "self" and options.get("rate", 1) in (0, 1) else ()
        ),
    }


def _compares(written: str) -> bool:
    """True where a loss of pairs or labels, of those that are joined by +, reads a reference, or is the user's own."""
    from jaxrl_llm.algorithms.preference_losses import LOSSES  # which imports jax: only where a preference is learned

    names = (split_options(loss)[0] for loss in split_losses(written))
    return any(name not in LOSSES or getattr(LOSSES[name], "reference", False) for name in names)


def _named_reference(config: ConfigDict) -> tuple[str, ...]:
    """The setting of the reference's adapters, where the policy's are named; given ones set it themselves."""
    return ("lora.reference",) if config.lora.rank or config.lora.path else ()


def _keys(prefix: str) -> tuple[str, ...]:
    return tuple(key.name for key in KEYS if key.name.startswith(prefix))
