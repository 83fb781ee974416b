"""Reading single entries of config.json, and refusing what the network does not compute."""

import math
from typing import Any, NoReturn

from jaxrl_llm.config import ConfigError


def refuse(feature: str, value: Any, supported: str) -> NoReturn:
    """Raises ConfigError for a checkpoint whose `feature` has a value that the network does not compute."""
    raise ConfigError(f"config.json: {feature} = {value!r} is not supported; supported: {supported}.")


def number(entry: str, value: Any, above: float | None = None) -> float:
    """The value of the entry, a finite number of 0 or more, or `above` that; raises ConfigError for anything else."""
    valid = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not valid or (value < 0 if above is None else value <= above):
        refuse(entry, value, "numbers from 0" if above is None else f"numbers above {above:g}")
    return float(value)


def positive(hf: dict[str, Any], entry: str) -> int:
    """The entry, an integer from 1; raises ConfigError for anything else."""
    if entry not in hf:
        raise ConfigError(f"config.json has no entry {entry}, which the model's shape needs.")
    value = hf[entry]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        refuse(entry, value, "integers from 1")
    return value
