"""Adapters of some modules alone, and of ranks of their own: what PEFT's LoraConfig says of modules by their names.

Layers whose adapters differ are stacks of their own (`ModelConfig.layer_groups`).
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.resolve import closest
from jaxrl_llm.distributed.sharding import path_name
from jaxrl_llm.models.adapters.lora import MODULES, Adapted, adapters_of
from jaxrl_llm.models.files.safetensors import named_as_modules
from jaxrl_llm.models.net import Net


class AdapterPatterns(NamedTuple):
    """The settings of `lora` that speak of single modules, by their names in transformers' class.

    A name is the end of a module's, a pattern a regular expression for such an end; the first one that fits counts.
    """

    layers_to_transform: tuple[int, ...] = ()  # layers with adapters; (): all
    exclude_modules: tuple[str, ...] = ()  # names of modules without one
    rank_pattern: tuple[str, ...] = ()  # PATTERN=RANK
    alpha_pattern: tuple[str, ...] = ()  # PATTERN=ALPHA


ALIKE = AdapterPatterns()


class _Map(NamedTuple):
    """A linear map of a layer that has an adapter."""

    module: str  # which may be that of several maps, as phi3's qkv_proj
    layer: int
    path: str  # in the layer's parameters


def with_patterns(net: Net, family, patterns: AdapterPatterns) -> Net:
    """The net, which has adapters of one shape on all its targets, with those that `patterns` say.

    Raises ConfigError for a name that fits no module, a pattern that fits none with an adapter, a layer that is not
    there, patterns beside adapters of experts alone, for experts that the model does not have or that have no gate, and
    as `with_adapters`.
    """
    lora = net.config.lora
    assert lora is not None
    if lora.experts and not net.config.experts:
        raise ConfigError("lora.targets names experts, but this model is no mixture of experts: leave them out")
    if lora.experts and not net.config.ffn_gate:
        raise ConfigError("lora.targets names experts, but this model's have no gate, as adapters need: leave them out")
    if not any(patterns):
        return net
    modules = {each.module: each.layer for each in _maps(net, family)}
    if not modules:
        key, value = next((key, value) for key, value in patterns._asdict().items() if value)
        raise ConfigError(
            f"lora.{key} is {', '.join(map(str, value))}, but lora.targets = {', '.join(lora.targets)} are experts or "
            "of a vision part, whose adapters are of all layers, and of one rank and alpha: leave it empty"
        )

    def fits(key: str, pattern: str, known: Iterable[str] = modules) -> set[str]:
        try:
            found = {module for module in known if _match(pattern, module)}
        except re.error as error:
            raise ConfigError(f"lora.{key} has {pattern!r}, which is no regular expression: {error}") from error
        if not found:
            which = "no module with an adapter" if known is modules else "no module"
            raise ConfigError(
                f"lora.{key} has {pattern!r}, but the name of {which} ends so; the closest is {closest(pattern, known)}"
            )
        return found

    def numbers(key: str, kind: Callable[[str], Any]) -> dict[str, Any]:
        table = {}
        for entry in getattr(patterns, key):
            pattern, _, number = entry.rpartition("=")
            form = f"lora.{key} has {entry!r}, but it takes NAME=NUMBER, q_proj=8, with a number above 0"
            try:
                value = kind(number)
            except ValueError as error:
                raise ConfigError(form) from error
            if not pattern or not 0 < value < math.inf:
                raise ConfigError(form)
            fits(key, pattern)
            table.setdefault(pattern, value)
        return table

    ranks, alphas = numbers("rank_pattern", int), numbers("alpha_pattern", float)
    every = {tensor.name.rpartition(".")[0] for tensor in named_as_modules(net, family)}
    excluded = set().union(*(fits("exclude_modules", re.escape(name), every) for name in patterns.exclude_modules))
    if beyond := [layer for layer in patterns.layers_to_transform if layer >= net.config.layers]:
        raise ConfigError(
            f"lora.layers_to_transform has {beyond[0]}, but the layers of this model are 0 to {net.config.layers - 1}"
        )

    def choose(module: str) -> tuple[int, float] | None:
        if module in excluded or modules[module] not in (patterns.layers_to_transform or modules.values()):
            return None
        return fitting(ranks, module, lora.rank), fitting(alphas, module, lora.alpha)

    return with_adapters(net, family, choose)


def fitting(patterns: Mapping[str, Any], module: str, usual: Any) -> Any:
    """The value of the first pattern that fits the end of the module's name, as PEFT finds it; else the usual one."""
    return next((value for pattern, value in patterns.items() if _match(pattern, module)), usual)


def with_adapters(net: Net, family, choose: Callable[[str], tuple[int, float] | None]) -> Net:
    """The net, which has adapters of one shape on all its targets, with those of the modules for whose names `choose`
    gives a rank and an alpha.

    Raises ConfigError where no module is left, and where adapters of experts or of a vision part are beside such ones.
    """
    lora, maps = net.config.lora, _maps(net, family)
    assert lora is not None
    if not maps:  # of experts alone, or of a vision part
        return net
    targets = {each: MODULES.get(each.module.rpartition(".")[2], each.path.rpartition("/")[2]) for each in maps}
    chosen = {each: shape for each in maps if (shape := choose(each.module)) is not None}
    left = {targets[each] for each in chosen}
    if not left:
        raise ConfigError(f"no module is left of lora.targets, {', '.join(lora.targets)}, that has an adapter")
    beside = set(lora.targets) - set(targets.values())  # of a vision part alone
    named = tuple(target for target in lora.targets if target in (*left, *lora.experts, *beside))
    if all(chosen.get(each) == (lora.rank, lora.alpha) for each in maps if targets[each] in left):
        return net.with_lora(dataclasses.replace(lora, targets=named))
    if lora.experts or net.config.vision_training == "lora":
        raise ConfigError(
            "adapters of some layers or of several ranks cannot be beside those of "
            f"{'experts' if lora.experts else 'a vision part (model.vision = lora)'}: leave one of the two out"
        )
    layers: list[list[Adapted]] = [[] for _ in range(net.config.layers)]
    for each, shape in chosen.items():
        layers[each.layer].append(Adapted(targets[each], each.path, *shape))
    kinds = [tuple(layer) for layer in layers]
    lora = dataclasses.replace(lora, targets=named, groups=tuple(dict.fromkeys(kinds)))
    return Net(dataclasses.replace(net.config.grouped(kinds), lora=lora))


def _maps(net: Net, family) -> list[_Map]:
    """The linear maps with an adapter in the layers of the decoder, those of experts left out."""
    adapters = jax.tree_util.tree_leaves_with_path(adapters_of(net.shapes()))
    adapted, stacks = {path_name(path).rpartition("/")[0] for path, _ in adapters}, net.config.stacks
    return [
        _Map(tensor.name.removesuffix(".weight"), stacks[stack][tensor.layer], path.removesuffix("/kernel"))
        for tensor in named_as_modules(net, family)
        for stack, _, path in [tensor.leaf.partition("/")]
        if tensor.leaf.removesuffix("/kernel") in adapted
        and stack in stacks
        and tensor.layer is not None
        and tensor.expert is None
    ]


def _match(pattern: str, module: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", module) is not None
