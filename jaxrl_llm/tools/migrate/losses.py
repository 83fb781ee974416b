"""Losses with their options, as `algorithm.loss` has them: `dpo(divergence='js_divergence')+sft`."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.algorithms import policy_losses, preference_losses
from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.tools.migrate.draft import Draft


def with_options(name: str, options: Mapping[str, Any]) -> str:
    """Return `name(option=value, ...)`, or the name alone without options."""
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in options.items())})" if options else name


def set_loss(draft: Draft, losses: Sequence[tuple[str, Mapping[str, str]]], *theirs: str) -> None:
    """Set `algorithm.loss` to the sum of `losses`: names, each with {option: the key of theirs that has its value}.

    A loss gets the options that it takes, without those that it has by default.
    `theirs` are the keys that chose the losses. `bradley_terry`, the one loss of reward_model, is written for an option
    alone. Raises ConfigError for an option that is no number and should be one.
    """
    terms, used = [], []
    for name, options in losses:
        function = getattr(preference_losses, name, None) or getattr(policy_losses, name, None)
        defaults = {}
        if function is not None:  # arguments of the loss, and options that it declares for its caller
            parameters = inspect.signature(function).parameters
            defaults = {option: x.default for option, x in parameters.items()} | getattr(function, "options", {})
        values = {}
        for option, key in options.items():
            value = draft.get(key)
            if option not in defaults or value is None:
                continue
            default = defaults[option]
            if not isinstance(default, str) and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ConfigError(f"{key} is {value!r}, but {option} of {name} takes a number")
            if value != default:
                values[option] = value if isinstance(default, str) else float(value)
            if draft.sets(key) or value != default:
                used.append(key)
        terms.append(with_options(name, values))
    if terms != ["bradley_terry"]:
        draft.set("algorithm.loss", "+".join(terms), *theirs, *dict.fromkeys(used))
