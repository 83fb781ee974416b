"""The safetensors files of a model folder: which tensors they hold, and reading and writing them part by part."""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.transformer import Net, Params
from jaxrl_llm.sharding import path_name, shardings

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
# Buffers that some checkpoints carry and the network computes itself.
IGNORED = re.compile(r"rotary_emb\.inv_freq$")


def read_json(file: Path) -> dict[str, Any] | None:
    """The JSON object in `file`, None where there is no such file; raises ConfigError for anything but an object."""
    if not file.is_file():
        return None
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} must hold a JSON object, but holds a {type(value).__name__}.")
    return value


def write_json(file: Path, value: dict[str, Any]) -> None:
    """Writes `value` as JSON."""
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


class Stored(NamedTuple):
    """One tensor of the files: its name, shape there, and where it is in the parameters."""

    name: str
    shape: tuple[int, ...]
    transpose: bool
    leaf: str  # path of the parameter
    layer: int | None  # index in a stacked parameter


def stored_tensors(net: Net, family) -> list[Stored]:
    """Every tensor of the net's files, in the order of the network."""
    keys = {key.path: (order, key) for order, key in enumerate(family.KEYS)}
    tensors = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(net.shapes()):
        name = path_name(path)
        order, key = keys[name]
        stacked = "{layer}" in key.tensor
        for layer in range(net.config.layers) if stacked else [None]:
            shape = leaf.shape[1:] if stacked else leaf.shape
            stored_shape = shape[::-1] if key.transpose else shape
            stored = Stored(key.tensor.format(layer=layer), stored_shape, key.transpose, name, layer)
            place = -1 if name == "embed/weight" else net.config.layers if layer is None else layer
            tensors.append((place, order, stored))
    return [stored for *_, stored in sorted(tensors, key=lambda item: item[:2])]


class Files:
    """The open safetensors files of a folder, and which of them holds each tensor."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack):
        self.folder = folder
        index = read_json(folder / INDEX)
        names = sorted(set(index.get("weight_map", {}).values())) if index is not None else [SINGLE]
        if index is None and not (folder / SINGLE).is_file():
            pickles = ", ".join(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in sorted(folder.glob(kind)))
            raise ConfigError(
                f"{folder} has neither {SINGLE} nor {INDEX}"
                + (f"; pickle files ({pickles}) are not read: convert them to safetensors." if pickles else ".")
            )
        self.where: dict[str, Any] = {}
        for name in names:
            handle = stack.enter_context(self._open(folder / name))
            self.where |= dict.fromkeys(handle.keys(), handle)
        if index is not None and (lost := sorted(set(index["weight_map"]) - set(self.where))):
            raise ConfigError(f"{folder / INDEX} names tensors that no file holds: {_some(lost)}.")

    @staticmethod
    def _open(file: Path):
        try:
            return safe_open(file, framework="numpy")
        except FileNotFoundError as error:
            raise ConfigError(f"{file} is missing, though {INDEX} names it.") from error
        except SafetensorError as error:
            raise ConfigError(f"{file} is truncated or no safetensors file: {error}") from error

    def check(self, tensors: list[Stored], ignored: set[str]) -> None:
        """Raises ConfigError unless the files hold exactly these tensors, in these shapes, as floats."""
        wanted = {tensor.name: tensor for tensor in tensors}
        if missing := [name for name in wanted if name not in self.where]:
            raise ConfigError(f"{self.folder} lacks tensors that the model needs: {_some(missing)}.")
        known = {*wanted, *ignored}
        spare = [name for name in self.where if name not in known and not IGNORED.search(name)]
        if spare:
            raise ConfigError(
                f"{self.folder} holds tensors that config.json gives no place to: {_some(sorted(spare))}."
            )
        for name, tensor in wanted.items():
            found = self.where[name].get_slice(name)
            if tuple(found.get_shape()) != tensor.shape:
                raise ConfigError(
                    f"{self.folder}: tensor {name} has shape {tuple(found.get_shape())}, "
                    f"but config.json says {tensor.shape}."
                )
            if found.get_dtype() not in FLOATS:
                raise ConfigError(
                    f"{self.folder}: tensor {name} has dtype {found.get_dtype()}, supported are {', '.join(FLOATS)}."
                )

    def read(self, tensor: Stored, index: tuple[slice, ...], dtype) -> np.ndarray:
        """The part `index` (in the parameter's own orientation) of a tensor, as a fresh array."""
        part = self.where[tensor.name].get_slice(tensor.name)[index[::-1] if tensor.transpose else index]
        return np.array(part.T if tensor.transpose else part, dtype=dtype, order="C")


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def read_params(net: Net, files: Files, tensors: list[Stored], mesh: Mesh | None, seed: int) -> Params:
    parts: dict[str, list[Stored]] = {}
    for tensor in tensors:
        parts.setdefault(tensor.leaf, []).append(tensor)
    shapes = net.shapes()
    placed = shardings(shapes, mesh) if mesh is not None else jax.tree.map(lambda _: None, shapes)

    def leaf(path, x, sharding):
        if (name := path_name(path)) not in parts:
            value = jax.random.normal(jax.random.key(seed), x.shape, x.dtype) * net.config.init_scale
            return value if sharding is None else jax.device_put(value, sharding)
        if sharding is None:
            return jnp.asarray(_read_leaf(files, parts[name], (slice(None),) * x.ndim, x.dtype))
        return jax.make_array_from_callback(x.shape, sharding, lambda i: _read_leaf(files, parts[name], i, x.dtype))

    return jax.tree_util.tree_map_with_path(leaf, shapes, placed)


def _read_leaf(files: Files, tensors: list[Stored], index, dtype) -> np.ndarray:
    """The part `index` of a parameter, whose layers are `tensors` where it is stacked."""
    if tensors[0].layer is None:
        return files.read(tensors[0], index, dtype)
    return np.stack([files.read(tensor, index[1:], dtype) for tensor in tensors[index[0]]])


def write(folder: Path, net: Net, family, params: Params, dtype: str, max_shard_bytes: float) -> None:
    """Writes the parameters in safetensors files up to `max_shard_bytes`; of many processes, the first writes."""
    leaves = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}
    itemsize = jnp.dtype(dtype).itemsize
    shards = list(_shards(stored_tensors(net, family), itemsize, max_shard_bytes))
    for number, shard in enumerate(shards, start=1):
        arrays = {tensor.name: _gather(leaves[tensor.leaf], tensor, dtype) for tensor in shard}
        if jax.process_index() == 0:
            save_file(arrays, folder / _shard_name(number, len(shards)), metadata={"format": "pt"})
    if len(shards) > 1 and jax.process_index() == 0:
        write_json(folder / INDEX, _index(shards, itemsize))


def _gather(leaf: jax.Array, tensor: Stored, dtype: str) -> np.ndarray:
    """One tensor on the host, in the orientation and dtype of the files."""
    x = leaf if tensor.layer is None else leaf[tensor.layer]
    if not x.is_fully_addressable and isinstance(x.sharding, NamedSharding):
        x = jax.jit(lambda x: x, out_shardings=NamedSharding(x.sharding.mesh, PartitionSpec()))(x)
    x = np.asarray(x).astype(jnp.dtype(dtype))
    return np.ascontiguousarray(x.T if tensor.transpose else x)


def _shards(tensors: list[Stored], itemsize: int, max_bytes: float) -> Iterator[list[Stored]]:
    """The tensors in order, in files of at most `max_bytes` (one larger tensor has its own)."""
    shard: list[Stored] = []
    size = 0
    for tensor in tensors:
        bytes_ = int(np.prod(tensor.shape)) * itemsize
        if shard and size + bytes_ > max_bytes:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += bytes_
    yield shard


def _shard_name(number: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _index(shards: list[list[Stored]], itemsize: int) -> dict[str, Any]:
    total = sum(int(np.prod(tensor.shape)) for shard in shards for tensor in shard) * itemsize
    names = {tensor.name: _shard_name(i, len(shards)) for i, shard in enumerate(shards, start=1) for tensor in shard}
    return {"metadata": {"total_size": total}, "weight_map": names}
