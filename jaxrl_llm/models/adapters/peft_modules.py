"""Modules that are trained whole beside adapters, and biases: PEFT's `modules_to_save` and `bias`."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import jax

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.resolve import closest
from jaxrl_llm.distributed.sharding import path_name
from jaxrl_llm.models.adapters.lora import MODULES, LoraConfig, adapters_of
from jaxrl_llm.models.files import safetensors
from jaxrl_llm.models.net import Net

LM_HEAD = "lm_head"
BIAS = ".bias"  # the end of such a tensor's name
HEADS = ("score", "classifier")  # PEFT names both for models with a score or step head


def with_modules(net: Net, family, names: Iterable[str], key: str) -> Net:
    """The net, which has adapters, with the modules trained whole that PEFT's `modules_to_save` names, and the biases.

    A name is the end of those of its modules, as in PEFT: `embed_tokens`, `lm_head`, `model.norm`, and `norm` for every
    norm. Where the head is the embedding either name means both; without a language-model head `lm_head` means nothing.
    Raises ConfigError, with `key` for what names them, for modules that have no parameters of their own, that are
    experts or quantised, or that have adapters, and for biases that files have as one with others.
    """
    lora, scores = net.config.lora, net.config.head != "lm"
    assert lora is not None
    modules = modules_of(net, family)
    quantized = safetensors.quantized_kernels(net, None)
    adapted = {word for word, name in MODULES.items() if name in lora.targets}
    barred = {
        module
        for module, tensors in modules.items()
        if module.split(".")[-1] in (*adapted, *HEADS)
        or any(x.expert is not None or x.full_shape != x.shape or x.leaf in quantized for x in tensors)
    }
    found = set[str]()
    for name in names:
        if scores and name in (*HEADS, LM_HEAD):
            continue
        meant = embedding_of(modules) if name == LM_HEAD and net.config.tie_embeddings else name
        matching = {module for module in modules if module.endswith(meant)}
        if not matching or matching & barred:
            known = sorted({module.split(".")[-1] for module in modules.keys() - barred})
            raise ConfigError(
                f"{key} names {name!r}, but the modules of this model that can be trained whole beside its adapters "
                f"are {', '.join(known)}; the closest is {closest(name, known)}"
            )
        found |= {tensor.leaf for module in matching for tensor in modules[module]}
    found |= _biases(net, modules)
    return net.with_lora(dataclasses.replace(lora, saved=tuple(sorted(found))))


def modules_of(net: Net, family) -> dict[str, list[safetensors.Stored]]:
    """The tensors of each module of the family that has parameters, by its name."""
    modules: dict[str, list[safetensors.Stored]] = {}
    for tensor in safetensors.named_as_modules(net, family):
        modules.setdefault(tensor.name.rpartition(".")[0], []).append(tensor)
    return modules


def _biases(net: Net, modules: Mapping[str, list[safetensors.Stored]]) -> set[str]:
    """The paths of the biases that are trained beside the adapters, as PEFT's `bias` says; those of heads aside."""
    kind = net.config.lora.bias if net.config.lora is not None else "none"
    if kind == "none":
        return set()
    adapted = {path_name(path[:-1]) for path, _ in jax.tree_util.tree_leaves_with_path(adapters_of(net.shapes()))}
    biases = {
        x.leaf: x
        for tensors in modules.values()
        for x in tensors
        if x.name.endswith(BIAS) and not x.leaf.startswith("score/") and x.leaf not in net.config.frozen_leaves
    }
    if kind == "lora_only":
        biases = {leaf: x for leaf, x in biases.items() if leaf.rpartition("/")[0] in adapted}
    if not biases:
        such = " of such maps" if kind == "lora_only" else ""
        raise ConfigError(f"lora.bias is {kind}, but this model has no biases{such}: set it to none")
    if joint := [x.name for x in biases.values() if x.full_shape != x.shape]:
        raise ConfigError(
            f"lora.bias is {kind}, but files have {joint[0]} as one with others: set it to none, or name modules in "
            "lora.modules_to_save"
        )
    return set(biases)


def embedding_of(modules: Mapping[str, list[safetensors.Stored]]) -> str:
    """The name of the module that is the embedding."""
    return next(name for name, tensors in modules.items() if tensors[0].leaf == "embed/weight")


def is_tied(net: Net) -> bool:
    """True when a module that is trained whole is the embedding of a model whose head is that too."""
    lora = net.config.lora
    return lora is not None and net.config.tie_embeddings and net.config.head == "lm" and "embed/weight" in lora.saved


def saved_modules(modules: Mapping[str, Sequence[safetensors.Stored]], lora: LoraConfig) -> list[str]:
    """The modules that are trained whole, each by its last word where no other module ends with that."""
    whole = {
        name
        for name, tensors in modules.items()
        if all(x.leaf in lora.saved or x.leaf.startswith("score/") for x in tensors)  # of others, biases alone
    }
    short = {name: HEADS[0] if name.startswith(f"{HEADS[0]}.") else name.split(".")[-1] for name in whole}
    ambiguous = {word for word in short.values() if any(name.endswith(word) for name in modules.keys() - whole)}
    return sorted({name if word in ambiguous else word for name, word in short.items()})
