"""The parameters of a model that are trained, chosen by the names that they have in transformers' class.

Layers that are stacked are trained alike. Where names tell some layers from others, those are stacks of their own
(`ModelConfig.layer_groups`), so that what is frozen has neither gradients nor moments.
"""

import dataclasses
import re
from collections.abc import Iterable
from typing import NamedTuple

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.resolve import closest
from jaxrl_llm.models.adapters.lora import LoraConfig
from jaxrl_llm.models.adapters.peft_patterns import ALIKE, AdapterPatterns, with_patterns
from jaxrl_llm.models.files.safetensors import named_as_modules, some
from jaxrl_llm.models.moe import ROUTER
from jaxrl_llm.models.net import Net

ROWS = re.compile(r"\[\d*:\d*\]$|\$\[\d+\]$")  # what axolotl writes behind a name to train some rows of a matrix


class Trained(NamedTuple):
    """The part of a model that a run trains: the parameters that patterns name, or new adapters where `lora` says their
    shape.

    A pattern is a regular expression for the beginning of a name, in which a dot that no `+`, `*` or `?` follows is a
    dot, as in axolotl.
    """

    trainable: tuple[str, ...] = ()  # model.trainable; (): all
    frozen: tuple[str, ...] = ()  # model.frozen, which are not, whatever `trainable` says
    lora: LoraConfig | None = None
    patterns: AdapterPatterns = ALIKE

    def grouped(self, net: Net, family) -> Net:
        """The net with its layers in the groups that this needs, and the parameters that stay as they are.

        A score head is trained unless `frozen` names it. Raises ConfigError for patterns that name nothing, or a part
        of what is trained as one; for those that leave nothing to train; and as `with_patterns`.
        """
        if self.lora is not None:
            adapted = with_patterns(net.with_lora(self.lora), family, self.patterns).config
            return Net(dataclasses.replace(net.config, layer_groups=adapted.layer_groups))
        if not (self.trainable or self.frozen):
            return net
        config, tensors = net.config, named_as_modules(net, family)
        if config.vision_training == "frozen":
            tensors = [tensor for tensor in tensors if not tensor.leaf.startswith("vision/")]
        names = {tensor.name for tensor in tensors}
        head = {tensor.name for tensor in tensors if tensor.leaf.startswith("score/")}
        trained = _named("model.trainable", self.trainable, names) | head if self.trainable else names
        trained = trained - _named("model.frozen", self.frozen, names)
        if not trained:
            raise ConfigError(
                f"model.trainable is {', '.join(self.trainable) or 'all'} and model.frozen {', '.join(self.frozen)}: "
                "nothing is left to train"
            )
        if config.freeze_router and all(tensor.leaf.endswith(ROUTER) for tensor in tensors if tensor.name in trained):
            raise ConfigError(
                f"model.trainable is {', '.join(self.trainable)}, and model.freeze_router is true: nothing is left to "
                "train, as these are routers; set it to false, or name others"
            )
        # Of each parameter, of each layer where layers are stacked, whether training leaves its tensors.
        found: dict[tuple[str, int | None], set[bool]] = {}
        for tensor in tensors:
            layers = config.stacks.get(tensor.leaf.partition("/")[0])
            layer = layers[tensor.layer] if layers is not None and tensor.layer is not None else None
            found.setdefault((tensor.leaf, layer), set()).add(tensor.name not in trained)
        if mixed := {leaf for (leaf, _), frozen in found.items() if len(frozen) > 1}:
            parts = [x.name for x in tensors if x.leaf in mixed and (x.name in trained) == bool(self.trainable)]
            raise ConfigError(
                f"model.trainable and model.frozen tell {some(parts)} from others that are trained together with them, "
                "as the experts of a layer are, and the layers of an encoder: name all of these, or none"
            )
        whole = [leaf for (leaf, layer), frozen in found.items() if layer is None and frozen == {True}]
        of_layers: list[set[str]] = [set() for _ in range(config.layers)]
        for (leaf, layer), frozen in found.items():
            if layer is not None and frozen == {True}:
                of_layers[layer].add(leaf.partition("/")[2])
        config = config.grouped(map(frozenset, of_layers))
        in_stacks = (f"{stack}/{leaf}" for stack, layers in config.stacks.items() for leaf in of_layers[layers[0]])
        return Net(dataclasses.replace(config, frozen_leaves=tuple(sorted([*whole, *in_stacks]))))


EVERYTHING = Trained()


def regular_expression(key: str, pattern: str) -> re.Pattern[str]:
    """The compiled pattern of a setting `key`, in which a dot that no `+`, `*` or `?` follows is a dot.

    Raises ConfigError for what is no regular expression.
    """
    try:
        return re.compile(re.sub(r"(?<!\\)\.(?![+*?])", r"\\.", pattern))
    except re.error as error:
        raise ConfigError(f"{key} names {pattern!r}, which is no regular expression: {error}") from error


def _named(key: str, patterns: Iterable[str], names: set[str]) -> set[str]:
    """The names that the patterns of a setting match; raises ConfigError for one that matches none."""
    found = set[str]()
    for pattern in patterns:
        if ROWS.search(pattern):
            raise ConfigError(
                f"{key} names {pattern!r}, some rows of a matrix, but matrices are trained whole: leave the range out, "
                "or the pattern"
            )
        matching = regular_expression(key, pattern)
        matched = {name for name in names if matching.match(name)}
        if not matched:
            raise ConfigError(
                f"{key} names {pattern!r}, with which no parameter of this model begins (a head that is the embedding "
                f"has its name, and a frozen vision part none); the closest is {closest(pattern, names)}"
            )
        found |= matched
    return found
