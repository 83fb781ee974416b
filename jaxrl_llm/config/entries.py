"""Settings whose entries are texts with a form of their own: each is read here, for the checks and for the run."""

import math
import re
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.config.resolve import ConfigError, closest, split_options
from jaxrl_llm.config.setting import LARGEST

# The starts of adapters that `lora.init` takes.
LORA_INIT = re.compile(r"kaiming|gaussian|orthogonal|random|olora|(pissa|loftq)(_niter_\d+)?")
# The ends of names of metrics that are best when they are small.
SMALL = ("loss", "nll", "perplexity", "divergence")


def best_mode(metric: str, mode: str) -> str:
    """Whether the best value of a metric is the largest, max, or the smallest, min: `mode` or, where that is auto, what
    the end of its name says."""
    return mode if mode != "auto" else "min" if metric.endswith(SMALL) else "max"


def starts_from_matrices(init: str) -> bool:
    """True for a `lora.init` with which adapters start from the matrices that they are beside."""
    return init == "olora" or init.startswith("pissa")


def makes_up(init: str) -> bool:
    """True for a `lora.init` with which adapters start from what the matrices beside them lost in few bits."""
    return init.startswith("loftq")


def lora_init(name: bool | str) -> str:
    """The `lora.init` that PEFT's `init_lora_weights` stands for, or its name where there is none."""
    return ("kaiming" if name else "random") if isinstance(name, bool) else name.lower()


def logit_bias(name: str, entries: Sequence[str]) -> tuple[tuple[int, float], ...]:
    """The pairs (token id, number added to its logit) of the setting `name`, whose entries are `ID=BIAS`.

    Raises ConfigError for an entry of another form, and for a token that has two.
    """
    pairs = []
    for entry in entries:
        token, _, bias = entry.partition("=")
        try:
            pairs.append((int(token), float(bias)))
        except ValueError:
            pairs.append((-1, math.nan))
        if pairs[-1][0] < 0 or not abs(pairs[-1][1]) <= LARGEST:
            raise ConfigError(
                f"{name} has {entry!r}, but it takes ID=BIAS, a token id and a number from -{LARGEST:g} to "
                f"{LARGEST:g}; bad_words forbids tokens"
            )
    if len(ids := [token for token, _ in pairs]) > len(set(ids)):
        twice = next(token for token in ids if ids.count(token) > 1)
        raise ConfigError(f"{name} has token {twice} twice: give each token one bias")
    return tuple(pairs)


def reward_scales(entries: Sequence[str]) -> dict[str, float]:
    """The number of each environment of `environment.reward_scale`, whose entries are `NAME=NUMBER`.

    Raises ConfigError for an entry of another form, and for an environment that has two.
    """
    scales: dict[str, float] = {}
    for entry in entries:
        name, _, number = entry.rpartition("=")
        try:
            scale = float(number)
        except ValueError:
            scale = math.nan
        if not (name and 0 < scale < math.inf):
            raise ConfigError(
                f"environment.reward_scale has {entry!r}, but it takes NAME=NUMBER, an environment and a number above 0"
            )
        if name in scales:
            raise ConfigError(f"environment.reward_scale has {name!r} twice: give each environment one number")
        scales[name] = scale
    return scales


def environment_options(entries: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The options of each environment of `environment.options`: `advantage`, a name, `beta` and `weight`, numbers.

    Entries are `NAME(advantage='rloo', beta=0.02, weight=0.5)`, each with one or more of these. Raises ConfigError for
    an entry of another form, an unknown option, a value out of range, and an environment that is named twice.
    """
    known, found = ("advantage", "beta", "weight"), {}
    for entry in entries:
        name, options = split_options(entry)
        if not (name and options):
            raise ConfigError(
                f"environment.options has {entry!r}, but it takes NAME(advantage='rloo', beta=0.02, weight=0.5), an "
                "environment and one or more of these"
            )
        for option, value in options.items():
            if option not in known:
                raise ConfigError(
                    f"environment.options: {name} has {option!r}, but its options are {', '.join(known)}; the closest "
                    f"is {closest(option, known)}"
                )
            if option == "advantage":
                if not isinstance(value, str):
                    raise ConfigError(f"environment.options: advantage of {name} is {value!r}, but it takes a name")
                split_options(value)  # refuses options that cannot be read
            elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ConfigError(
                    f"environment.options: {option} of {name} is {value!r}, but it takes a number of 0 or more"
                )
        if name in found:
            raise ConfigError(f"environment.options has {name!r} twice: give each environment one entry")
        found[name] = options
    return found


def eval_set(entry: Any) -> tuple[str, dict[str, int], dict[str, Any]]:
    """One entry of `eval.sets`: the name of its set, its own `prompts` and `samples`, and the options of its source.

    A text is `name=path` or `name=path(split='test', samples=16)`; a dictionary names its set with `set`. Raises
    ConfigError for an entry without a name, or with a number out of range.
    """
    if isinstance(entry, str):
        name, _, source = entry.partition("=")
        path, options = split_options(source)
        entry = {"set": name.strip(), "path": path, **options}
    options = dict(entry)
    name = options.pop("set", None)
    has_rows = options.get("path") or options.get("data_files")
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name) or not has_rows:
        raise ConfigError(
            f"eval.sets has {entry!r}, but it takes name=path, where the name is of letters, digits, _, - and ., or a "
            "dictionary with set (the name) and path"
        )
    sizes = {key: options.pop(key) for key in ("prompts", "samples") if key in options}
    for key, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"eval.sets: {key} of {name} is {value!r}, but it takes an integer of 1 or more")
    if "split" in options:
        options.setdefault("eval_split", options["split"])
    return name, sizes, options
