"""Adapters as files: the folders of Hugging Face PEFT, `adapter_config.json` and `adapter_model.safetensors`."""

import contextlib
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.sharding import path_name, shardings
from jaxrl_llm.models import safetensors
from jaxrl_llm.models.lora import HF_NAMES, LoraConfig, Params, adapters_of, parse_targets, split
from jaxrl_llm.models.transformer import Net

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
PREFIX = "base_model.model."
TASKS = {"lm": "CAUSAL_LM", "score": "SEQ_CLS"}
# Entries of adapter_config.json, and the values with which the adapter is what `lora.delta` computes.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "use_qalora": (None, False),
    "use_bdlora": (None, False),
    "alora_invocation_tokens": (None, []),
    "trainable_token_indices": (None, []),
    # Others (pissa, olora, loftq, ...) change the base model too.
    "init_lora_weights": (None, False, "gaussian", "orthogonal", "eva", True),
    "fan_in_fan_out": (None, False),
    "lora_bias": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layers_to_transform": (None, []),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "modules_to_save": (None, [], ["score"], ["classifier", "score"], ["score", "classifier"]),
}


class AdapterConfig(NamedTuple):
    """The contents of adapter_config.json: the shape, the base model's name or path (None: not named), the head."""

    lora: LoraConfig
    base: str | None
    head: str


def is_adapter(folder: str | os.PathLike[str]) -> bool:
    """True when the folder is that of an adapter."""
    return (Path(folder) / CONFIG).is_file()


def read_config(folder: str | os.PathLike[str]) -> AdapterConfig:
    """The configuration of the adapter in a PEFT folder.

    Which linear maps have one is read from the names of its tensors. Raises ConfigError for a folder without adapter,
    and for one that is more than a LoRA of equal rank on linear maps of the layers.
    """
    folder = Path(folder).expanduser()
    entries = safetensors.read_json(folder / CONFIG)
    if entries is None:
        raise ConfigError(f"{folder} has no {CONFIG}: it is not the folder of a PEFT adapter")
    for name, plain in PLAIN.items():
        if entries.get(name) not in plain:
            raise ConfigError(
                f"{folder / CONFIG}: {name} = {entries.get(name)!r} is not supported; supported: {plain[-1]!r}. Merge "
                "the adapter with PEFT's merge_and_unload and load the result as a model"
            )
    if not isinstance(entries.get("r"), int) or entries["r"] < 1:
        raise ConfigError(f"{folder / CONFIG}: r = {entries.get('r')!r} is not the rank of an adapter")
    with contextlib.ExitStack() as stack:
        names = _open(folder, stack).keys()
        modules = {name.split(".")[-3] for name in names if name.endswith(".lora_A.weight")}
    unknown = sorted(modules - set(HF_NAMES.values()))
    if unknown or not modules:
        raise ConfigError(
            f"{folder / TENSORS} has adapters of {', '.join(unknown) or 'nothing'}; there can be adapters of "
            f"{', '.join(HF_NAMES.values())}"
        )
    lora = LoraConfig(
        rank=entries["r"],
        alpha=float(entries.get("lora_alpha", 8)),
        dropout=float(entries.get("lora_dropout", 0.0)),
        targets=parse_targets(modules),
        rslora=bool(entries.get("use_rslora")),
        dora=bool(entries.get("use_dora")),
    )
    head = "score" if entries.get("task_type") == TASKS["score"] else "lm"
    return AdapterConfig(lora, entries.get("base_model_name_or_path"), head)


def read(folder: str | os.PathLike[str], net: Net, family, mesh: Mesh | None) -> Params:
    """The adapters in a PEFT folder, and its score head if it has one, as parameters of `net` sharded over `mesh`.

    Raises ConfigError for tensors that are missing, unexpected, of another shape than the net's, or not finite.
    """
    folder = Path(folder).expanduser()
    shapes = split(net.shapes())[1]
    with contextlib.ExitStack() as stack:
        file = _open(folder, stack)
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    wanted = _tensors(net, family)
    if "score" in shapes and f"{PREFIX}score.weight" not in found:  # a language model's adapter under a new head
        shapes = {name: tree for name, tree in shapes.items() if name != "score"}
        wanted.pop("score/kernel")
    _check(folder, found, [name for names in wanted.values() for name in names])

    def leaf(path, x):
        layers = [found[name].T for name in wanted[path_name(path)]]
        stacked = x.ndim == 3 or path[-1].key == "lora_m"
        value = (np.stack(layers) if stacked else layers[0]).astype(x.dtype)
        for name, layer in zip(wanted[path_name(path)], layers, strict=True):
            safetensors.check_finite(layer, folder, name)
        if value.shape != x.shape:
            raise ConfigError(
                f"{folder / TENSORS}: {wanted[path_name(path)][0]} has shape {layers[0].shape[::-1]}, but this model "
                f"and r = {net.config.lora and net.config.lora.rank} need {x.shape[1 if stacked else 0 :][::-1]}"
            )
        return value

    values = jax.tree_util.tree_map_with_path(leaf, shapes)
    return jax.device_put(values, None if mesh is None else shardings(values, mesh))


def fused(net: Net, family) -> str | None:
    """A tensor in which the family keeps a linear map that has an adapter together with others, None without one.

    PEFT has one adapter for such a tensor and not one for each map.
    """
    stored = {tensor.leaf: tensor.name.removesuffix(".weight") for tensor in safetensors.stored_tensors(net, family)}
    for path, _ in jax.tree_util.tree_leaves_with_path(adapters_of(net.shapes())):
        module = path_name(path).rpartition("/")[0]
        name = stored[f"{module}/kernel"]
        if name.split(".")[-1] != HF_NAMES[module.split("/")[-1]]:
            return name
    return None


def write(folder: Path, net: Net, family, params: Params, base: str | None) -> None:
    """Writes `adapter_config.json` and `adapter_model.safetensors` of the model's adapters and its score head, in fp32.

    `base` is the name or path of the model they belong to. With many processes all must call; the first one writes.
    """
    lora = net.config.lora
    assert lora is not None
    leaves = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(split(params)[1])}
    present = {path.split("/")[-2] for path in leaves}
    arrays: dict[str, np.ndarray] = {}
    for path, names in _tensors(net, family).items():
        value = safetensors.on_host(leaves[path]).astype(np.float32)
        layers = value if value.ndim == 3 or path.endswith("lora_m") else value[None]
        arrays |= {name: np.ascontiguousarray(x.T) for name, x in zip(names, layers, strict=True)}
    entries = {
        "peft_type": "LORA",
        "task_type": TASKS[net.config.head],
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": [HF_NAMES[name] for name in lora.targets if name in present],
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": ["score"] if net.config.head == "score" else None,
        "inference_mode": True,
    }
    if jax.process_index() == 0:
        save_file(arrays, folder / TENSORS, metadata={"format": "pt"})
        safetensors.write_json(folder / CONFIG, entries)


def _tensors(net: Net, family) -> dict[str, list[str]]:
    """The names in the file of each trainable parameter's tensors, one a layer where it is stacked.

    Raises ConfigError where the family keeps several linear maps in one tensor.
    """
    if (name := fused(net, family)) is not None:
        raise ConfigError(
            f"a {family.MODEL_TYPE} keeps {name} as one tensor of several linear maps, for which PEFT has no adapters "
            "of this shape: train with lora.targets that leave it out, or use the merged model"
        )
    stored: dict[str, list[str]] = {}
    for tensor in safetensors.stored_tensors(net, family):
        stored.setdefault(tensor.leaf, []).append(tensor.name.removesuffix(".weight"))
    found: dict[str, list[str]] = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(split(net.shapes())[1]):
        name = path_name(path)
        module, _, leaf = name.rpartition("/")
        kept = {"lora_a": ".lora_A.weight", "lora_b": ".lora_B.weight", "lora_m": ".lora_magnitude_vector"}
        found[name] = [f"{PREFIX}{tensor}{kept.get(leaf, '.weight')}" for tensor in stored[f"{module}/kernel"]]
    return found


def _check(folder: Path, found: dict[str, np.ndarray], wanted: list[str]) -> None:
    if missing := [name for name in wanted if name not in found]:
        raise ConfigError(f"{folder / TENSORS} lacks tensors that the model needs: {safetensors.some(missing)}")
    if spare := sorted(set(found) - set(wanted)):
        raise ConfigError(
            f"{folder / TENSORS} holds tensors that the model has no place for: {safetensors.some(spare)}"
        )


def _open(folder: Path, stack: contextlib.ExitStack):
    try:
        return stack.enter_context(safe_open(folder / TENSORS, framework="numpy"))
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} has no {TENSORS}; adapter_model.bin is a pickle, which is not read") from error
    except SafetensorError as error:
        raise ConfigError(f"{folder / TENSORS} is truncated or no safetensors file: {error}") from error
