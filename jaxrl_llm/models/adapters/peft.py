"""Adapters as files: the folders of Hugging Face PEFT, `adapter_config.json` and `adapter_model.safetensors`."""

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.files import read_json, write_json
from jaxrl_llm.distributed.sharding import gathered, path_name, shardings
from jaxrl_llm.models.adapters import peft_experts
from jaxrl_llm.models.adapters.lora import (
    EXPERTS,
    MODULES,
    SAVED,
    TARGETS,
    WITHIN,
    LoraConfig,
    Params,
    adapters_of,
    parse_targets,
    plain_adapters,
    split,
)
from jaxrl_llm.models.adapters.peft_modules import (
    BIAS,
    HEADS,
    LM_HEAD,
    embedding_of,
    is_tied,
    modules_of,
    saved_modules,
    with_modules,
)
from jaxrl_llm.models.adapters.peft_patterns import fitting, with_adapters
from jaxrl_llm.models.files import remote, safetensors
from jaxrl_llm.models.files.safetensors import by_the_first
from jaxrl_llm.models.net import Net

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
PREFIX, FACTOR_A = "base_model.model.", ".lora_A.weight"
# In the names of modules of a vision part.
VISION = re.compile(r"\.(vision_model|vision_tower|vision_encoder|visual|embed_vision)\.")
TIES = "ensure_weight_tying"
OF_ADAPTED = ".base_layer.bias"  # the end of the name of a bias beside an adapter
# PEFT reads names of factors as transformers reads those of files, which makes none of some that the class has.
# Those of these families are in the folder as in files: a pattern, and what takes its place, on the way there and back.
AS_IN_FILES = {
    "laguna": ((r"(\.mlp\.shared_expert)s\.", r"\1."), (r"(\.mlp\.shared_expert)\.", r"\1s.")),
    "mistral_large4": (
        (r"(\.layers\.\d+)\.mlp(\.(shared_)?experts\.)", r"\1\2"),
        (r"(\.layers\.\d+)(\.(shared_)?experts\.)", r"\1.mlp\2"),
    ),
}
TASKS = {"lm": "CAUSAL_LM", "score": "SEQ_CLS", "step": "TOKEN_CLS"}
# Entries of adapter_config.json, and the values with which the adapter is what `lora.delta` computes.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none", "all", "lora_only"),
    "use_qalora": (None, False),
    "use_bdlora": (None, False),
    **dict.fromkeys(("arrow_config", "kasa_config", "monteclora_config", "velora_config"), (None,)),
    "alora_invocation_tokens": (None, []),
    "trainable_token_indices": (None, []),
    # Others (pissa, olora, loftq, ...) change the base model too, unless PEFT converted them as it saved them.
    "init_lora_weights": (None, False, "gaussian", "orthogonal", "eva", True),
    "fan_in_fan_out": (None, True, False),  # how the base's file has a matrix, which PEFT knows without it
    "lora_bias": (None, False),
    "layer_replication": (None, []),
}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _are_patterns(given: Any, is_valid: Callable[[Any], bool]) -> bool:
    """True for an object of regular expressions, each with a valid number."""
    with contextlib.suppress(re.error):
        return isinstance(given, dict) and all(re.compile(name) and is_valid(x) for name, x in given.items())
    return False


def _are_texts(given: Any) -> bool:
    return isinstance(given, list) and all(isinstance(name, str) for name in given)


# Entries that are left out, null, or what is said here.
KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lora_alpha": (_is_number, "a number"),
    "lora_dropout": (_is_number, "a number"),
    "rank_pattern": (lambda given: _are_patterns(given, lambda rank: type(rank) is int and rank > 0), "ranks by names"),
    "alpha_pattern": (lambda given: _are_patterns(given, _is_number), "numbers by names"),
    "modules_to_save": (_are_texts, "a list of names"),
    "target_parameters": (_are_texts, "a list of names"),
    "revision": (lambda given: isinstance(given, str), "a branch, tag or commit of the base model"),
}


class AdapterConfig(NamedTuple):
    """The contents of adapter_config.json: the shape, the base model's name or path (None: not named) and revision, the
    head, the modules besides the head that are trained whole, and whether there are adapters on a vision part."""

    lora: LoraConfig
    base: str | None
    head: str
    modules_to_save: tuple[str, ...] = ()
    ties: bool = False  # a module that the model ties to another stays so
    vision: bool = False
    modules: tuple[str, ...] = ()  # those with an adapter, experts aside, as the folder names them
    ranks: Mapping[str, int] = {}  # rank_pattern
    alphas: Mapping[str, float] = {}  # alpha_pattern
    revision: str | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a ModelConfig that say which adapters a net has."""
        return {"lora": self.lora} | ({"vision_training": "lora"} if self.vision else {})


class Tensors(NamedTuple):
    """The tensors of one parameter in the file, and their arrangement in it."""

    names: list[str]  # one per layer where it is stacked
    transpose: bool
    layers: list[int | None]  # the index of each where it is stacked
    experts: peft_experts.Layout | None = None  # of a factor of stacked experts

    @property
    def stacked(self) -> bool:
        """True for a parameter of several layers."""
        return self.layers[0] is not None

    def in_file(self, x: np.ndarray) -> np.ndarray:
        """A layer's numbers as the file has them."""
        return self.experts.in_file(x) if self.experts is not None else x.T if self.transpose else x

    def in_parameters(self, x: np.ndarray) -> np.ndarray:
        """A tensor of the file as the parameters have it: the inverse of `in_file`."""
        return self.experts.in_parameters(x) if self.experts is not None else x.T if self.transpose else x


def is_adapter(folder: str | os.PathLike[str]) -> bool:
    """True when the folder, here or behind a URL, is that of an adapter."""
    return (_located(folder, (CONFIG,), "model path") / CONFIG).is_file()


def _located(folder: str | os.PathLike[str], files: Iterable[str] = (CONFIG, TENSORS), name: str = "adapter") -> Path:
    """The folder on this machine; of one behind a URL a copy with these files, and `name` is what messages call it."""
    return remote.fetch(os.fspath(folder), files, name) if remote.is_url(folder) else Path(folder).expanduser()


def read_config(folder: str | os.PathLike[str]) -> AdapterConfig:
    """The configuration of the adapter in a PEFT folder, here or behind a URL.

    Which linear maps have one is read from the names of its tensors. Raises ConfigError for a folder without adapter,
    and for one that is more than a LoRA on linear maps of the layers and on experts.
    """
    folder = _located(folder)
    entries = read_json(folder / CONFIG)
    if entries is None:
        raise ConfigError(f"{folder} has no {CONFIG}: it is not the folder of a PEFT adapter")
    for name, plain in PLAIN.items():
        if entries.get(name) not in plain:
            raise ConfigError(
                f"{folder / CONFIG}: {name} = {entries.get(name)!r} is not supported; supported: {plain[-1]!r}. Merge "
                "the adapter with PEFT's merge_and_unload and load the result as a model"
            )
    entries = {name: value for name, value in entries.items() if value is not None}
    for name, (is_valid, words) in KINDS.items():
        if name in entries and not is_valid(entries[name]):
            raise ConfigError(f"{folder / CONFIG}: {name} = {entries[name]!r} is not {words}")
    if not isinstance(entries.get("r"), int) or entries["r"] < 1:
        raise ConfigError(f"{folder / CONFIG}: r = {entries.get('r')!r} is not the rank of an adapter")
    with contextlib.ExitStack() as stack:
        tensors = list(_open(folder, stack).keys())
    names = [name for name in tensors if name.endswith(FACTOR_A)]
    experts = peft_experts.targets_of(entries, folder / CONFIG)
    linear = [_module(name) for name in names if not (experts and peft_experts.FACTOR.search(name))]
    modules = {_word(name) for name in linear}
    unknown = sorted(modules - set(MODULES))
    if unknown or not names:
        raise ConfigError(
            f"{folder / TENSORS} has adapters of {', '.join(unknown) or 'nothing'}; there can be adapters of "
            f"{', '.join((*MODULES, *EXPERTS))}"
        )
    lora = LoraConfig(
        rank=entries["r"],
        alpha=float(entries.get("lora_alpha", 8)),
        dropout=float(entries.get("lora_dropout", 0.0)),
        targets=parse_targets([*modules, *experts]),
        rslora=bool(entries.get("use_rslora")),
        dora=bool(entries.get("use_dora")),
        # PEFT 0.7 to 0.17 trained those of lora_only and left them out of the file; others have none to train.
        bias=entries.get("bias", "none") if any(name.endswith(BIAS) for name in tensors) else "none",
    )
    head = next((head for head, task in TASKS.items() if entries.get("task_type") == task), "lm")
    saved = tuple(name for name in entries.get("modules_to_save", ()) if name not in HEADS)
    return AdapterConfig(
        lora, entries.get("base_model_name_or_path"), head, saved, bool(entries.get(TIES)),
        vision=any(VISION.search(name) for name in names),
        modules=tuple(linear), ranks=entries.get("rank_pattern", {}), alphas=entries.get("alpha_pattern", {}),
        revision=entries.get("revision"),
    )  # fmt: skip


def with_adapter_modules(net: Net, family, folder: str | os.PathLike[str]) -> Net:
    """The net with adapters on the modules that the PEFT folder of its adapter names, and those that it trains whole.

    Raises ConfigError as `with_modules` and `peft_patterns.with_adapters`, and where embedding and head, which the
    model has as one, were trained apart.
    """
    described = read_config(folder)
    lora, modules = described.lora, {_in_class(family, name) for name in described.modules}

    def shape(module: str) -> tuple[int, float] | None:
        if module not in modules:
            return None
        return fitting(described.ranks, module, lora.rank), float(fitting(described.alphas, module, lora.alpha))

    net = with_adapters(net, family, shape) if modules else net
    net = with_modules(net, family, described.modules_to_save, f"{folder}/{CONFIG}: modules_to_save")
    if is_tied(net) and not described.ties:
        raise _apart(f"{folder}/{CONFIG}: modules_to_save = {list(described.modules_to_save)} without {TIES}")
    return net


def _apart(found: str) -> ConfigError:
    return ConfigError(
        f"{found} trained an embedding apart from the head, and this model has one matrix for both "
        "(tie_word_embeddings): merge the adapter with PEFT's merge_and_unload into a model without tied weights"
    )


def read(folder: str | os.PathLike[str], net: Net, family, mesh: Mesh | None) -> Params:
    """The adapters in a PEFT folder, and its score head if it has one, as parameters of `net` sharded over `mesh`.

    Raises ConfigError for tensors that are missing, unexpected, of another shape than the net's, or not finite.
    """
    folder = _located(folder)
    shapes = split(net.shapes())[1]
    with contextlib.ExitStack() as stack:
        file = _open(folder, stack)
        found = {_in_class(family, name): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    wanted = _tensors(net, family)
    # A language model's adapter may be under a new head.
    if "score" in shapes and not any(name.startswith(f"{PREFIX}score.") for name in found):
        shapes = {name: tree for name, tree in shapes.items() if name != "score"}
        wanted = {path: tensors for path, tensors in wanted.items() if not path.startswith("score/")}
    if is_tied(net):
        head = found.pop(f"{PREFIX}{LM_HEAD}.weight", None)
        embedding = found.get(f"{PREFIX}{embedding_of(modules_of(net, family))}.weight")
        if embedding is not None and (head is None or not np.array_equal(head, embedding)):
            # PEFT ties nothing where modules_to_save has neither of the names that it knows.
            raise _apart(f"{folder / TENSORS} holds no {LM_HEAD} that is its embedding: PEFT, with {TIES} too,")
    names = [name for tensors in wanted.values() for name in tensors.names]
    for name in names:  # before version 0.7 PEFT had no other names for the biases of adapted modules
        if name.endswith(OF_ADAPTED) and (older := name.removesuffix(OF_ADAPTED) + BIAS) in found:
            found[name] = found.pop(older)
    if missing := [name for name in names if name not in found]:
        raise ConfigError(f"{folder / TENSORS} lacks tensors that the model needs: {safetensors.some(missing)}")
    if spare := sorted(set(found) - set(names)):
        raise ConfigError(
            f"{folder / TENSORS} holds tensors that the model has no place for: {safetensors.some(spare)}"
        )

    def leaf(path, x):
        tensors = wanted[path_name(path)]
        shape = tensors.in_file(np.broadcast_to(np.bool_(False), x.shape[1 if tensors.stacked else 0 :])).shape
        for name in tensors.names:
            safetensors.check_finite(found[name], folder, name)
            if found[name].shape != shape:
                raise ConfigError(
                    f"{folder / TENSORS}: {name} has shape {found[name].shape}, but this model and "
                    f"r = {net.config.lora and net.config.lora.rank} need {shape}"
                )
        layers = [tensors.in_parameters(found[name]) for name in tensors.names]
        return (np.stack(layers) if tensors.stacked else layers[0]).astype(x.dtype)

    values = jax.tree_util.tree_map_with_path(leaf, shapes)
    return jax.device_put(values, None if mesh is None else shardings(values, mesh))


def fused(net: Net, family) -> str | None:
    """A tensor in which the family keeps a linear map that has an adapter together with others, None without one.

    PEFT has one adapter for such a tensor and not one for each map. A name that is not in MODULES is taken for one.
    """
    stored = {tensor.leaf: tensor for tensor in safetensors.named_as_modules(net, family)}
    for path, _ in jax.tree_util.tree_leaves_with_path(adapters_of(net.shapes())):
        module = path_name(path).rpartition("/")[0]
        if "/experts/" in module:  # PEFT adapts them where transformers has them stacked
            if peft_experts.stacked_key(family) is None:
                return module
            continue
        tensor = stored[f"{module}/kernel"]
        name = tensor.name.removesuffix(".weight")
        if tensor.full_shape != tensor.shape or _word(name) not in MODULES:
            return name
    return None


def write(folder: Path, net: Net, family, params: Params, base: str | None, revision: str | None = None) -> None:
    """Writes `adapter_config.json` and `adapter_model.safetensors` of the model's adapters and its score head, in fp32.

    Adapters whose start is subtracted are written as `lora.plain_adapters` has them, for the same base model.
    `base` is the name or path of the model they belong to, and `revision` that of a hub id. With many
    processes all must call; the first one writes.
    """
    assert net.config.lora is not None
    params, lora = plain_adapters(params, net.config.lora)
    net = net.with_lora(lora)
    leaves = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(split(params)[1])}
    arrays: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for path, tensors in _tensors(net, family).items():
        value = gathered(leaves[path]).astype(np.float32)
        if lora.groups and path.endswith("/lora_a") and (own := lora.at(path.split("/")[:-1])):
            modules = [_module(name) for name in tensors.names]
            ranks |= dict.fromkeys(modules, own.rank) if own.rank != lora.rank else {}
            alphas |= dict.fromkeys(modules, own.alpha) if own.alpha != lora.alpha else {}
        layers = zip(tensors.names, value if tensors.stacked else value[None], strict=True)
        arrays |= {name: np.ascontiguousarray(tensors.in_file(x)) for name, x in layers}
    modules = modules_of(net, family)
    tied = {}
    if is_tied(net):  # PEFT reads the head beside the embedding that it is
        arrays[f"{PREFIX}{LM_HEAD}.weight"] = arrays[f"{PREFIX}{embedding_of(modules)}.weight"].copy()
        tied = {TIES: True}
    factors = {name for name in arrays if name.endswith(FACTOR_A) and not peft_experts.FACTOR.search(name)}
    saved = saved_modules(modules, lora)
    if tied and "embed_tokens" not in saved:  # PEFT ties modules of these two names alone
        saved = [LM_HEAD, *saved]
    parameters = list(lora.experts)
    if family.MODEL_TYPE in peft_experts.MISREAD and not (lora.dropout or lora.dora or ranks or alphas):
        # By their weights PEFT finds them, with an adapter of the same shape; it has the others for modules alone.
        misread = {name for name in factors if MODULES[_module(name).split(".")[-1]] in ("gate", "up", "down")}
        named = _target_modules(net, misread, modules)
        parameters += [f"{x}.weight" for x in (sorted(map(_module, misread)) if isinstance(named, str) else named)]
        factors -= misread
    entries = {
        "peft_type": "LORA",
        "task_type": TASKS[net.config.head],
        "base_model_name_or_path": base,
        "revision": revision,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "lora_dropout": lora.dropout,
        "target_modules": _target_modules(net, factors, modules),
        "target_parameters": parameters or None,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "bias": lora.bias,
        "fan_in_fan_out": any(not modules[_module(name)][0].transpose for name in factors),
        "modules_to_save": saved or None,
        "inference_mode": True,
        **tied,
    }
    with by_the_first():
        if jax.process_index() == 0:
            written = {_in_folder(family, name): x for name, x in arrays.items()}
            save_file(written, folder / TENSORS, metadata={"format": "pt"})
            write_json(folder / CONFIG, entries)


def _in_folder(family, name: str) -> str:
    """The name in a folder of a tensor, of which `name` has that of the module in transformers' class."""
    there = AS_IN_FILES.get(family.MODEL_TYPE) if ".lora_" in name else None
    return name if there is None else re.sub(*there[0], name)


def _in_class(family, name: str) -> str:
    """The same with the module's name in the class, which a folder that PEFT wrote has already."""
    back = AS_IN_FILES.get(family.MODEL_TYPE)
    return name if back is None else re.sub(*back[1], name)


def _word(module: str) -> str:
    """The last word of a module's name; of the map within another one that of the other."""
    return module.removesuffix(WITHIN).split(".")[-1]


def _module(name: str) -> str:
    """The module whose factor A a tensor is."""
    return name.removeprefix(PREFIX).removesuffix(FACTOR_A)


def _target_modules(
    net: Net, factors: Iterable[str], every: Mapping[str, Sequence[safetensors.Stored]]
) -> list[str] | str:
    """The modules with these factors A as PEFT finds them among `every` one: by the ends of their names; by the whole
    names where layers differ; or by a pattern where other modules end so, or the vision part of the model may have such
    ones, without adapters of their own."""
    modules = [_module(name) for name in factors]
    if not modules or (net.config.lora is not None and net.config.lora.groups):
        return sorted(modules)
    words = {module.split(".")[-1] for module in modules}
    others = (name for name in every.keys() - modules if every[name][0].expert is None)
    alike = net.config.vision is None or net.config.vision_training == "lora"
    alike = alike and not any(name.split(".")[-1] in words for name in others)
    if alike and not any(module.endswith(WITHIN) for module in modules):
        return sorted(words, key=lambda word: TARGETS.index(MODULES[word]))
    return "|".join(sorted({re.sub(r"\\\.\d+\\\.", r"\\.\\d+\\.", re.escape(module)) for module in modules}))


def _tensors(net: Net, family) -> dict[str, Tensors]:
    """The tensors in the file of each trainable parameter.

    Raises ConfigError where the family keeps several linear maps in one tensor.
    """
    if (name := fused(net, family)) is not None:
        raise ConfigError(
            f"a {family.MODEL_TYPE} keeps {name} as one tensor of several linear maps, for which PEFT has no adapters "
            "of this shape: train with lora.targets that leave it out, or use the merged model"
        )
    found = trained_tensors(net, family)
    return {path: own._replace(names=[f"{PREFIX}{name}" for name in own.names]) for path, own in found.items()}


def trained_tensors(net: Net, family) -> dict[str, Tensors]:
    """The tensors of each trainable parameter, by its path: their names are those in transformers' class and in PEFT.

    A parameter that neither of them has goes by its path.
    """
    stored: dict[str, list[safetensors.Stored]] = {}
    for tensor in safetensors.named_as_modules(net, family):
        stored.setdefault(tensor.leaf, []).append(tensor)
    ends = {"lora_a": ".lora_A.weight", "lora_b": ".lora_B.weight", "lora_m": ".lora_magnitude_vector"}
    found: dict[str, Tensors] = {}
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(split(net.shapes())[1])]
    for name in paths:
        module, _, leaf = name.removeprefix(f"{SAVED}/").rpartition("/")
        if leaf in ends and "/experts/" in module:
            if peft_experts.stacked_key(family) is None:  # PEFT has none of such
                found[name] = Tensors([f"{module}{ends[leaf]}"], False, [None])
                continue
            names, layout = peft_experts.tensors_of(name, net, family)
            found[name] = Tensors(names, False, list(range(len(names))), layout)
            continue
        parts = stored.get(f"{module}/kernel" if leaf in ends else f"{module}/{leaf}")
        if parts is None:
            found[name] = Tensors([name], False, [None])
            continue
        names = [part.name.removesuffix(".weight") + ends[leaf] if leaf in ends else part.name for part in parts]
        if leaf == "bias" and f"{module}/lora_a" in paths:
            names = [own.removesuffix(BIAS) + OF_ADAPTED for own in names]
        # Factors are of linear maps, also beside a matrix that the files have as it is here.
        found[name] = Tensors(names, leaf in ends or parts[0].transpose, [part.layer for part in parts])
    return found


def _open(folder: Path, stack: contextlib.ExitStack):
    try:
        return stack.enter_context(safe_open(folder / TENSORS, framework="numpy"))
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} has no {TENSORS}; adapter_model.bin is a pickle, which is not read") from error
    except SafetensorError as error:
        raise ConfigError(f"{folder / TENSORS} is truncated or no safetensors file: {error}") from error
