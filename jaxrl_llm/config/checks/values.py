"""Values that follow from several settings, for the checks and for code that reads a configuration."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from jaxrl_llm.config.entries import environment_options
from jaxrl_llm.config.resolve import is_own, naming, resolve, split_losses, split_options
from jaxrl_llm.config.schema import BY_NAME, OFFLINE, ONLINE_PREFERENCE, ConfigDict

# Settings of which each says how completions are made, in place of plain sampling.
ENVIRONMENTS = ("environment.name", "environment.tools", "environment.rollout_func", "environment.agent")
CURRICULUM = ("data.curriculum_easy", "data.curriculum_hard")

# True in a look at a configuration, which runs no code of the user's.
looks = ContextVar("looks", default=False)


def own_function(setting: str, name: str) -> Any:
    """The user's own function that a setting names, or None for another name and in a look at the configuration."""
    if not is_own(name) or looks.get():
        return None
    with naming(setting):
        return resolve(name, {})


def preference_losses(config: ConfigDict) -> dict[str, str | None]:
    """The losses of `algorithm.loss`, which are joined by +, with the rows that each declares to read.

    None are those of the user's own loss in a look at the configuration.
    """
    from jaxrl_llm.algorithms.preference_losses import LOSSES  # which imports jax: only where a preference is learned

    rows: dict[str, str | None] = {}
    for written in split_losses(config.algorithm.loss):
        name = split_options(written)[0]
        loss = LOSSES.get(name) or own_function("algorithm.loss", name)  # an unknown name is refused later
        rows[name] = None if loss is None and is_own(name) else getattr(loss, "rows", "pair")
    return rows


def check_preference_losses(config: ConfigDict) -> Iterator[str]:
    """Messages for the weights of a preference loss, of given pairs or of sampled ones."""
    algorithm, losses = config.algorithm, preference_losses(config)
    if algorithm.beta == 0:
        yield "algorithm.beta is 0, but preference losses need one above 0: 0.1 is usual, 2 for simpo"
    if algorithm.loss_weights and len(algorithm.loss_weights) != len(losses):
        yield (
            f"algorithm.loss_weights has {len(algorithm.loss_weights)} numbers for the {len(losses)} losses of "
            f"algorithm.loss = {algorithm.loss!r}: give one each, or none"
        )


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


def value_of(config: ConfigDict, key: str) -> Any:
    """The value of the setting with the full name `key`, in a section."""
    section, name = key.split(".")
    return config[section][name]


def in_use(config: ConfigDict, keys: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """The full name and the value of each of the settings that is neither 0, false, none nor empty."""
    return ((key, value) for key in keys if (value := value_of(config, key)))


def met(config: ConfigDict, conditions: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The full name and the value of each of the settings whose condition holds."""
    return ((key, value_of(config, key)) for key, holds in conditions.items() if holds)


def changed(config: ConfigDict, keys: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """The full name and the value of each of the settings that is not at its default."""
    values = ((key, value_of(config, key)) for key in keys)
    return ((key, value) for key, value in values if value != BY_NAME[key].default)


def named_policy_loss(config: ConfigDict) -> Any:
    """The policy loss that `algorithm.loss` names, built-in or the user's own; None for auto and an unknown name, and
    where it names a loss of pairs.

    None is the user's own too in a look at the configuration.
    """
    if config.algorithm.loss == "auto" or config.algorithm.name == ONLINE_PREFERENCE:
        return None
    from jaxrl_llm.algorithms import policy_losses  # which imports jax: only for a loss that is named

    name = split_options(config.algorithm.loss)[0]
    return getattr(policy_losses, name, None) or own_function("algorithm.loss", name)


def compares_with_reference(config: ConfigDict) -> bool:
    """True where the ratio of the policy loss is that of the policy and the reference."""
    return config.algorithm.old_logps == "auto" and getattr(named_policy_loss(config), "old_logps", None) == "reference"


def advantages_of(config: ConfigDict) -> dict[str, str]:
    """The advantage estimates by the settings that name them."""
    rules = {"algorithm.advantage": config.algorithm.advantage}
    for name, options in environment_options(config.environment.options).items():
        if "advantage" in options:
            rules[f"environment.options: advantage of {name}"] = options["advantage"]
    return rules


def takes(rule: str, argument: str, otherwise: bool = False) -> bool:
    """True for a built-in advantage rule with this argument: one that takes the completions of a prompt together has
    `group_size`. Any other rule gives `otherwise`."""
    from jaxrl_llm.algorithms import advantages, turn_advantages  # which import jax: only where it is asked

    function = {**vars(advantages), **vars(turn_advantages)}.get(f"{rule}_advantages")
    return otherwise if function is None else argument in inspect.signature(function).parameters


def reference_adapters(config: ConfigDict) -> str:
    """`lora.reference`, of which auto is the model as the run starts: with the adapters that it trains on, if any."""
    reference = config.lora.reference
    return reference if reference != "auto" else "base" if config.lora.path is None else "start"


def how_quantized(config: ConfigDict) -> str:
    """The setting that stores matrices, of experts at least, in fewer bits, with its value, or an empty text."""
    for name, unset in (("quantize", ("none",)), ("quantize_experts", ("none", "same"))):
        if (value := config.model[name]) not in unset:
            return f"model.{name} = {value!r}"
    return ""
