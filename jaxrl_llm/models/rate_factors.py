"""Factors of the learning rates of single parameters, by their names in transformers' class and in PEFT."""

from collections.abc import Sequence

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.resolve import closest
from jaxrl_llm.models.adapters import peft
from jaxrl_llm.models.net import Net
from jaxrl_llm.models.trained import regular_expression

KEY = "optimizer.rate_factors"


def rate_factors(net: Net, family, entries: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """The factors of the trained parameters that `entries`, each PATTERN=FACTOR, name, by the paths of the parameters.

    They are one number, or one for each layer of a stack. A pattern is a regular expression for any part of a name, in
    which a dot that no `+`, `*` or `?` follows is a dot; of several that fit the first counts. Raises ConfigError: a
    pattern that fits no trained parameter, or some of what is one array, as the experts of a layer are.
    """
    tensors = peft.trained_tensors(net, family)
    trained = {path: list(zip(own.names, own.layers, strict=True)) for path, own in tensors.items()}
    every = sorted({x for found in trained.values() for x, _ in found})
    rules = []
    for entry in entries:
        pattern, _, factor = entry.rpartition("=")
        rules.append((regular_expression(KEY, pattern).search, float(factor)))
        if not any(map(rules[-1][0], every)):
            raise ConfigError(
                f"{KEY} names {pattern!r}, which is in the name of no parameter that is trained; the closest is "
                f"{closest(pattern, every)}"
            )
    factors = {}
    for path, found in trained.items():
        of_layers: dict[int | None, set[float]] = {}
        for name, layer in found:
            fitting = (factor for fits, factor in rules if fits(name))
            of_layers.setdefault(layer, set()).add(next(fitting, 1.0))
        if any(len(values) > 1 for values in of_layers.values()):
            parts = ", ".join(sorted(x for x, _ in found)[:3])
            raise ConfigError(
                f"{KEY} has several factors for {parts} and others, which are one array: name all of these alike"
            )
        numbers = [values.pop() for _, values in sorted(of_layers.items(), key=lambda each: each[0] or 0)]
        if set(numbers) != {1.0}:
            factors[path] = tuple(numbers) if len(set(numbers)) > 1 else (numbers[0],)
    return factors
