"""Losses with their options, as `algorithm.loss` has them: `dpo(divergence='js_divergence')+sft`."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.algorithms import policy_losses, preference_losses
from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.tools.migrate import shared
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


def set_correction(draft: Draft, kind: str | None, bounds: Sequence[Any], *theirs: str, level: str = "token"):
    """Set the weights for the difference between sampler and trainer, by OpenRLHF's and NeMo-RL's names for them.

    tis cuts the ratio of each token, or of whole rows at the level sequence, to `bounds`; icepop leaves out those that
    are not within; seq-mask-tis leaves out rows by its geometric mean; None keeps the whole ratio. `theirs` are the
    keys that chose it, first that of the kind.
    """
    if kind is not None:
        shared.check_known(draft.named(theirs[0]), kind, ("tis", "icepop", "seq-mask-tis"))
    draft.set("algorithm.importance_correction", f"{level}_{'mask' if kind == 'icepop' else 'truncate'}", *theirs)
    low, high = (None if bound is None else float(bound) for bound in bounds)
    if kind == "seq-mask-tis":  # of the trainer's ratio; rejection has the sampler's
        draft.set("algorithm.rejection", "seq_mean_k1", *theirs)
        draft.set("algorithm.rejection_bounds", f"{1 / (high or 1e9)!r}_{1 / (low or 1e-9)!r}", *theirs)
    whole = kind in (None, "seq-mask-tis")
    draft.set("algorithm.importance_max", 1e9 if whole else high, *theirs)
    draft.set("algorithm.importance_min", None if whole else low, *theirs)
