"""The device mesh, and which axis of it every array is cut along.

One table maps parameters, one maps activations. The mesh has three axes: `data` (rows; parameters repeated), `fsdp`
(rows; parameters cut) and `tensor` (heads, feed-forward channels and vocabulary cut). The same code runs on one device:
there every axis has size 1.
"""

import re
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.config import ConfigError

AXES = ("data", "fsdp", "tensor")

# Path of a parameter -> the mesh axis of each of its trailing dimensions; leading ones (stacked layers) stay whole.
PARAMETERS = (
    (r"embed/weight$", ("tensor", "fsdp")),
    (r"(q|k|v|gate|up)/kernel(/codes|/absmax)?$", ("fsdp", "tensor")),
    (r"(o|down)/kernel(/codes|/absmax)?$", ("tensor", "fsdp")),
    (r"(q|k|v|gate|up)/lora_a$", ("fsdp", None)),
    (r"(q|k|v|gate|up)/lora_b$", (None, "tensor")),
    (r"(o|down)/lora_a$", ("tensor", None)),
    (r"(o|down)/lora_b$", (None, "fsdp")),
    (r"(q|k|v|gate|up)/bias$", ("tensor",)),
    (r"head/kernel$", ("fsdp", "tensor")),
    (r"(score|router)/kernel$", ("fsdp", None)),
)

# Adafactor's statistics of rows and columns: small, and of another shape than the parameter they belong to.
FACTORED = re.compile(r"/v_(row|col)/")

# Meaning of an activation's dimension -> mesh axes.
ACTIVATIONS = {"rows": ("data", "fsdp"), "heads": ("tensor",), "ffn": ("tensor",), "vocab": ("tensor",)}


def make_mesh(data: int = -1, fsdp: int = 1, tensor: int = 1, devices=None) -> Mesh:
    """The mesh `(data, fsdp, tensor)` over the devices; one size may be -1 (what remains).

    Raises ConfigError when the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [data, fsdp, tensor]
    if sizes.count(-1) > 1 or any(size == 0 or size < -1 for size in sizes):
        raise ConfigError(
            f"mesh sizes (data, fsdp, tensor) = {tuple(sizes)}: at most one may be -1, the others at least 1."
        )
    if -1 in sizes:
        sizes[sizes.index(-1)] = max(len(devices) // int(np.prod([size for size in sizes if size != -1])), 1)
    if int(np.prod(sizes)) != len(devices):
        raise ConfigError(
            f"mesh.data x mesh.fsdp x mesh.tensor = {' x '.join(map(str, sizes))} does not use the {len(devices)} "
            "devices at hand; set one of them to -1 to take what remains."
        )
    return jax.make_mesh(tuple(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def path_name(path) -> str:
    """The path of a pytree leaf as `layers/attention/q/kernel`."""
    return "/".join(str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", part)))) for part in path)


def _fitting(axes: tuple, shape: tuple[int, ...], mesh) -> PartitionSpec:
    """The axes that divide their dimensions; one that its axis does not divide (2 kv heads on 4) stays whole."""
    parts = []
    for size, names in zip(shape, axes, strict=True):
        names = (names,) if isinstance(names, str) else names
        divides = names and size % int(np.prod([mesh.shape[name] for name in names])) == 0
        parts.append((names if len(names) > 1 else names[0]) if divides else None)
    return PartitionSpec(*parts)


def parameter_spec(path: str, shape: tuple[int, ...], mesh) -> PartitionSpec:
    """The PartitionSpec of the parameter at `path`; parameters in no row of the table (norm scales) are repeated."""
    for pattern, axes in PARAMETERS:
        if re.search(pattern, path) and len(axes) <= len(shape) and not FACTORED.search(path):
            return _fitting((None,) * (len(shape) - len(axes)) + axes, shape, mesh)
    return PartitionSpec()


def shardings(tree, mesh: Mesh):
    """A tree of NamedShardings for a tree of arrays or shapes.

    Optimizer moments repeat the paths of the parameters they belong to, so one table serves a whole training state.
    """

    def leaf(path, x):
        return NamedSharding(mesh, parameter_spec(path_name(path), x.shape, mesh))

    return jax.tree_util.tree_map_with_path(leaf, tree)


def on_host(tree) -> Any:
    """The arrays in the host's memory, cut as they were; numbers stay on the device. Works under jit."""
    return _moved(tree, jax.memory.Space.Host)


def on_device(tree) -> Any:
    """The arrays in the device's memory; those that are there already are not copied. Works under jit."""
    return _moved(tree, jax.memory.Space.Device)


def _moved(tree, space) -> Any:
    return jax.tree.map(lambda x: jax.device_put(x, space) if x.ndim else x, tree)


def constrain(x, *dims: str | None):
    """`x` with its dimensions cut as ACTIVATIONS says; unchanged where no mesh is set."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, _fitting(tuple(dim and ACTIVATIONS[dim] for dim in dims), x.shape, mesh))


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over `data` and `fsdp`; every other dimension whole."""
    return NamedSharding(mesh, PartitionSpec(ACTIVATIONS["rows"]))


def row_shards(mesh: Mesh) -> int:
    """The number of parts rows are cut into."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def rows_to_global(rows, mesh: Mesh) -> Any:
    """Global arrays, cut by rows, from each process's own rows (a tree of numpy arrays `[rows, ...]`).

    Raises ConfigError when the rows do not divide: they are never repeated silently.
    """

    def leaf(x):
        x = np.asarray(x)
        total = x.shape[0] * jax.process_count()
        if total % row_shards(mesh):
            raise ConfigError(
                f"{total} rows do not divide into mesh.data x mesh.fsdp = {row_shards(mesh)} parts; "
                "change batch.prompts, rollout.group_size or the mesh."
            )
        return jax.make_array_from_process_local_data(row_sharding(mesh), x)

    return jax.tree.map(leaf, rows)


def local_rows(tree):
    """This process's own rows of global arrays, as numpy arrays in their global order."""

    def leaf(x):
        if x.is_fully_addressable:
            return np.asarray(x)
        shards = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
        return np.concatenate([np.asarray(shards[start]) for start in sorted(shards)])

    return jax.tree.map(leaf, tree)
