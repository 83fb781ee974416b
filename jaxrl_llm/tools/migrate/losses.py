"""Losses with their options, as `algorithm.loss` has them: `dpo(divergence='js_divergence')+sft`."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.algorithms import policy_losses, preference_losses
from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.tools.migrate.draft import Draft

# Options that brackets do not take: the key that sets each. Without its line here an option is written in brackets.
OPTION_KEYS = {
    "nll_weight": "algorithm.cpo_alpha",
    "nll_on_prompt": "algorithm.orpo_nll_on_prompt",
    "running_mean": "algorithm.bco_running_mean",
    "center_coefficient": "algorithm.center_rewards_coefficient",
}


def with_options(name: str, options: Mapping[str, Any]) -> str:
    """Return `name(option=value, ...)`, or the name alone without options."""
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in options.items())})" if options else name


def loss_with_options(name: str, options: Mapping[str, Any]) -> str:
    """Return a loss with those of the options that brackets take."""
    return with_options(name, {key: value for key, value in options.items() if key not in OPTION_KEYS})


def set_loss(draft: Draft, losses: Sequence[tuple[str, Mapping[str, str]]], *theirs: str) -> None:
    """Set `algorithm.loss` to the sum of `losses`: names, each with {option: the key of theirs that has its value}.

    A loss gets the options that it takes, without those that the file does not set and that it has by default.
    `theirs` are the keys that chose the losses. `bradley_terry`, the one loss of reward_model, is written for an option
    alone. Raises ConfigError for an option that is no number and should be one.
    """
    terms, used = [], []
    for name, options in losses:
        function = getattr(preference_losses, name, None) or getattr(policy_losses, name, None)
        parameters = inspect.signature(function).parameters if function else {}
        values = {}
        for option, key in options.items():
            value = draft.get(key)
            if option in OPTION_KEYS:
                draft.set(OPTION_KEYS[option], value, key)
            elif option in parameters and value is not None:
                default = parameters[option].default
                if not isinstance(default, str) and (isinstance(value, bool) or not isinstance(value, int | float)):
                    raise ConfigError(f"{draft.source.path}: {key} is {value!r}, but {option} of {name} takes a number")
                if draft.sets(key) or value != default:
                    values[option] = value if isinstance(default, str) else float(value)
                    used.append(key)
        terms.append(loss_with_options(name, values))
    if terms != ["bradley_terry"]:
        draft.set("algorithm.loss", "+".join(terms), *theirs, *dict.fromkeys(used))
