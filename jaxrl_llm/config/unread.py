"""Settings that differ from their default but that a run does not read: it names them as it starts."""

import inspect

from jaxrl_llm.config.checks.values import (
    advantages_of,
    changed,
    compares_with_reference,
    named_policy_loss,
    reference_adapters,
    takes,
)
from jaxrl_llm.config.entries import environment_options
from jaxrl_llm.config.resolve import is_own, split_losses, split_options
from jaxrl_llm.config.schema import BY_NAME, KEYS, OFFLINE, ONLINE_PREFERENCE, ConfigDict

OF_ADAPTERS = ("lora.alpha", "lora.rslora", "lora.init", "lora.dropout", "lora.targets", "lora.reference")
OF_GIVEN_ROWS = ("data.loss_on", "data.precompute_reference")
OF_REFERENCES = ("algorithm.offload_reference", "algorithm.ref_mixup_alpha")
REFERENCE_FREE = "algorithm.reference_free"
OF_PREFERENCES = (
    "algorithm.loss_weights", REFERENCE_FREE, "algorithm.ld_alpha", "algorithm.use_weighting",
)  # fmt: skip
OF_PAIRS = ("algorithm.pairs",)  # of samples
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
OF_CRITICS = ("critic.b1", "critic.b2", "critic.weight_decay")
OF_RATIOS = ("algorithm.epsilon_low", "algorithm.epsilon_high")
# Of algorithms that sample: a setting, the value with which others have no effect, and these.
OF_OTHERS = (
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


def unread(config: ConfigDict) -> list[str]:
    """A sentence for each reason for which settings have no effect in this run, with their names."""
    name, online = config.algorithm.name, config.algorithm.name not in OFFLINE
    adapted = bool(config.lora.rank or config.lora.path)
    of_losses = (*OF_ALL, *OF_REFERENCES, *OF_PREFERENCES, *OF_PAIRS)
    of_policies = tuple(key for key in _keys("algorithm.") if key not in of_losses)
    compares_pairs = name in ("preference", ONLINE_PREFERENCE)
    of_preferences = tuple(key for key in of_policies if key != "algorithm.beta")
    named, optimizer = f"algorithm.name is {name}, ", config.optimizer.name
    of_optimizers = (*OF_OPTIMIZERS, *(OF_CRITICS if name == "ppo" else ()))
    betas = (options.get("beta") for options in environment_options(config.environment.options).values())
    compares = online and compares_with_reference(config)
    compared = compares_pairs and _compares(config.algorithm.loss)
    given = compared and not config.algorithm.reference_free
    refers = given or compares or (online and not compares_pairs and bool(config.algorithm.beta or any(betas)))
    rules = {split_options(rule)[0] for rule in advantages_of(config).values()}
    # With zero all that is set for rewards has no effect, and is meant to have none. An agent's parts are scaled.
    scaled = any(rule == "zero" or takes(rule, "scale", otherwise=True) for rule in rules) or config.environment.agent
    teacher, options = split_options(config.teacher.path or "")
    loss = named_policy_loss(config) if online else None
    read = OF_RATIOS if loss is None else tuple(f"algorithm.{name}" for name in inspect.signature(loss).parameters)
    unread_ratios = {*OF_RATIOS} - {*read} | {f"algorithm.{name}" for name in getattr(loss, "unread", ())}
    reasons = {
        "lora.rank is 0 and lora.path none, so there are no adapters and all of the model is trained": (
            () if adapted else OF_ADAPTERS
        ),
        f"{named}which has no critic": () if name == "ppo" else _keys("critic."),
        f"{named}which samples its rows": OF_GIVEN_ROWS if online and config.teacher.on_policy == 1 else (),
        f"{named}which compares no pairs": () if compares_pairs else OF_PREFERENCES,
        f"{named}which makes no pairs": () if name == ONLINE_PREFERENCE else OF_PAIRS,
        f"{named}which reads the ranks of completions and no advantages": (
            tuple(key for key in of_policies if key not in OF_RANKS) if name == ONLINE_PREFERENCE else ()
        ),
        f"{named}which has no reference": () if online or name == "preference" else ("data.precompute_reference",),
        f"{named}which reads whole completions": ("data.loss_on",) if name in ("preference", "reward_model") else (),
        f"{named}which reads no steps": () if name == "process_reward_model" else ("data.step_separator",),
        f"{named}which samples no completions to learn from": (
            () if online else of_preferences if name == "preference" else (*of_policies, *OF_REFERENCES)
        ),
        f"algorithm.loss is {config.algorithm.loss}, whose formula has no such bound": tuple(sorted(unread_ratios)),
        f"algorithm.loss is {config.algorithm.loss}, which reads no reference": (
            (*OF_REFERENCES, REFERENCE_FREE, "data.precompute_reference") if compares_pairs and not compared else ()
        ),
        "algorithm.reference_free is true, so that no reference is read": (
            (*OF_REFERENCES, "data.precompute_reference") if compared and not given else ()
        ),
        f"optimizer.name is {optimizer}, which takes its options in brackets": (
            of_optimizers if is_own(split_options(optimizer)[0]) else ()
        ),
        **{
            f"optimizer.name is {optimizer}, and not {' or '.join(names)}": () if optimizer in names else keys
            for names, keys in OF_SOME_OPTIMIZERS
        },
        f"optimizer.name is {optimizer}, whose formula has no such number": NOT_OF.get(optimizer, ()),
        "optimizer.lisa_layers is 0, so that all layers are updated": (
            () if config.optimizer.lisa_layers else ("optimizer.lisa_every",)
        ),
        f"algorithm.advantage is {config.algorithm.advantage}, whose formula leaves no choice of a deviation": (
            ("algorithm.scale_rewards",) if online and not scaled and not compares_pairs else ()
        ),
        "algorithm.beta is 0, so that there is no reference": (
            (*OF_REFERENCES, "algorithm.kl") if online and not refers and not compares_pairs else ()
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
    for key, value, others in OF_OTHERS if online else ():
        if config.algorithm[key.partition(".")[2]] == value:
            reasons[f"{key} is {BY_NAME[key].show(value)}"] = others
    found = {reason: ", ".join(key for key, _ in changed(config, keys)) for reason, keys in reasons.items()}
    return [f"{reason}: {keys} has no effect" for reason, keys in found.items() if keys]


def _compares(written: str) -> bool:
    """True where a loss of pairs or labels, of those that are joined by +, reads a reference, or is the user's own."""
    from jaxrl_llm.algorithms.preference_losses import LOSSES  # which imports jax: only where a preference is learned

    names = (split_options(loss)[0] for loss in split_losses(written))
    return any(name not in LOSSES or getattr(LOSSES[name], "reference", False) for name in names)


def _keys(prefix: str) -> tuple[str, ...]:
    return tuple(key.name for key in KEYS if key.name.startswith(prefix))
