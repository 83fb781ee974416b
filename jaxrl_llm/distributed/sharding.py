"""The device mesh, and the tables of the axes along which every array is sharded.

One table maps parameters, one maps activations. The mesh has five axes; on one device each has size 1.

    data     rows; parameters are replicated
    fsdp     rows; parameters, gradients and moments are sharded, and all-gathered per layer
    context  positions of the training rows; parameters are sharded as by fsdp
    expert   rows; parameters are sharded as by fsdp, those of experts by expert: each device computes its own experts
    tensor   heads, feed-forward channels and vocabulary

On a dense model the expert axis acts as more fsdp. Attention needs complete rows: its inputs are sharded over `context`
by heads in place of positions; where the number of heads does not divide, each device gathers keys and values for its
own queries (models/mixers/context_attention.py). Sampling has one position a step and no use for `context`:
`rollout_mesh` counts it as more fsdp, which moves no parameter, or is another arrangement of the same devices.
"""

import contextlib
import functools
import re
from collections.abc import Callable
from types import EllipsisType
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.wording import amount

AXES = ("data", "fsdp", "context", "expert", "tensor")
ROWS = ("data", "fsdp", "expert")
FSDP = ("fsdp", "context", "expert")  # the axes that shard parameters and all-gather them per layer

# Matrices that lead from the model's width to heads or channels, and from these back to it.
FROM_WIDTH = "(q|k|v|q_b|kv_b|o_a|f|f_b|g_b|qkvz|qkv|z|gate|up|fc1)"
TO_WIDTH = "(o|o_b|out|down|fc2)"

# Path of a parameter -> the mesh axes of its trailing dimensions; leading ones (stacked layers) are not sharded.
PARAMETERS = (
    (r"experts/(gate|up)/kernel$", ("expert", ("fsdp", "context"), "tensor")),
    (r"experts/down/kernel$", ("expert", "tensor", ("fsdp", "context"))),
    (r"experts/(gate|up)/bias$", ("expert", "tensor")),
    (r"experts/down/bias$", ("expert", None)),
    (r"experts/gate_up/lora_a$", ("expert", ("fsdp", "context"), None)),
    (r"experts/(gate_up|gate|up)/lora_b$", ("expert", None, "tensor")),
    (r"experts/down/lora_a$", ("expert", "tensor", None)),
    (r"experts/down/lora_b$", ("expert", None, ("fsdp", "context"))),
    (r"/sinks$", ("tensor",)),
    (r"delta/log_decay$", (None, None, "tensor", None)),  # of Kimi delta attention; others have one dimension
    (r"mamba/log_rates$", (FSDP, None)),
    (r"((delta|mamba)/([qkv]_)?conv|ngrams/conv|conv/filter)$", (FSDP, None, None)),
    (r"embed/weight$", ("tensor", FSDP)),
    (r"positions/weight$", (None, FSDP)),
    (r"project_(in|out)/kernel$", (FSDP, None)),
    (r"/(q_a|kv_a|kv|scores|f_a|g_a|ba|b|a|x|dt|into)/(kernel|lora_a|start_a)$", (FSDP, None)),
    (r"/(narrow|widen|inject|qk|key|value)/(kernel|lora_a|start_a)$", (FSDP, None)),
    (rf"/{FROM_WIDTH}/kernel$", (FSDP, "tensor")),
    (rf"/{TO_WIDTH}/kernel$", ("tensor", FSDP)),
    (rf"/{FROM_WIDTH}/(lora|start)_a$", (FSDP, None)),
    (rf"/{FROM_WIDTH}/(lora|start)_b$", (None, "tensor")),
    (rf"/{TO_WIDTH}/(lora|start)_a$", ("tensor", None)),
    (rf"/{TO_WIDTH}/(lora|start)_b$", (None, FSDP)),
    (rf"/{FROM_WIDTH}/(bias|lora_m)$", ("tensor",)),
    (r"head/kernel$", (FSDP, "tensor")),
    (r"head/bias$", ("tensor",)),
    (r"(score(/hidden|/logits)?|router|shared_gate|proj|spread|gather|left)/kernel$", (FSDP, None)),
    (r"(patch|downsample)/kernel$", (None, None, None, FSDP)),
    (r"patch/kernel$", (None, FSDP)),
)

# Where no tensor axis cuts the first dimension, fsdp cuts it in place of the last: its shards are all-gathered as they
# lie, where XLA first transposes those of the last dimension, of all layers and in fp32. One dimension is not cut by
# both axes: XLA would gather the shards of tensor too.
WITHOUT_TENSOR = ((rf"(?<!experts)/{TO_WIDTH}/kernel$", (FSDP, None)),)

# Arrays in few bits are cut as the one whose codes and scales they are; scales alone where their number divides too.
PARTS = re.compile(r"/(codes|absmax|scales)$")

# Statistics of rows and columns, of adafactor and came: small, and of another shape than the parameter they belong to.
FACTORED = re.compile(r"/(v_|instability_)?(row|col)/")

# Meaning of an activation's dimension -> mesh axes.
ACTIVATIONS = {
    "rows": ROWS,
    "positions": ("context",),
    "heads": ("tensor",),
    "spread_heads": ("tensor", "context"),
    "ffn": ("tensor",),
    "vocab": ("tensor",),
    "copies": ("data",),  # rows, where all devices that share parameters work on the same
    "width": FSDP,
    "spread_vocab": ("tensor", *FSDP),
}


def make_mesh(data: int = -1, fsdp: int = 1, tensor: int = 1, context: int = 1, expert: int = 1, devices=None) -> Mesh:
    """The mesh of `AXES` over the devices; one size may be -1 (what remains).

    Raises ConfigError when the sizes do not multiply to the number of devices, and as `row_groups` does.
    """
    devices = jax.devices() if devices is None else devices
    sizes = _sizes(
        "mesh", {"data": data, "fsdp": fsdp, "context": context, "expert": expert, "tensor": tensor}, devices
    )
    types, mesh = (AxisType.Auto,) * len(AXES), None
    # JAX orders devices of a TPU slice by their links. It has no order for those of several slices, nor where a size is
    # not that of some of a slice's sides.
    with contextlib.suppress(AssertionError, NotImplementedError):
        mesh = jax.make_mesh(sizes, AXES, axis_types=types, devices=devices)
    if mesh is None or not in_process_order(mesh.devices):
        # Here the rows of a process are adjacent, in process order, and so are those of a slice.
        ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
        mesh = Mesh(np.array(ordered).reshape(sizes), AXES, axis_types=types)
    row_groups(mesh)  # refuses some
    return mesh


def in_process_order(devices: np.ndarray) -> bool:
    """True when rows sharded over an array of devices `AXES` belong to process 0 first, then to 1, and so on."""
    by_rows = devices.transpose(*(AXES.index(axis) for axis in (*ROWS, "context", "tensor")))
    owners = [device.process_index for device in by_rows.reshape(-1)]
    return owners == sorted(owners)


def rollout_mesh(mesh: Mesh, text: str | None = None, kv_heads: int = 1, host: int | None = None) -> Mesh:
    """The mesh that samples: the same devices in the same order, arranged by a text such as `fsdp=2,tensor=4`.

    Axes that are not named have size 1, `data` what remains. None is the mesh itself with `context` merged into `fsdp`:
    no parameter moves. `auto` is that too, on CPUs and where `fsdp` and `context` are 1; else, so that no token gathers
    parameters, `expert` stays and `tensor` is as large as `kv_heads` and the devices of a process allow: `host` of them
    where CPUs stand in for accelerators. Raises ConfigError for sizes that do not fit, for a context axis, and as
    `row_groups` does.
    """
    if text == "auto":
        shape, text = mesh.shape, None
        if shape["fsdp"] * shape["context"] > 1 and (host is not None or jax.default_backend() != "cpu"):
            process = mesh.devices.flat[0].process_index
            near = sum(device.process_index == process for device in mesh.devices.flat)
            near = (near if host is None else min(near, host)) // shape["expert"]
            tensor = max(size for size in range(1, max(near, 1) + 1) if kv_heads % size == 0 and near % size == 0)
            text = f"expert={shape['expert']},tensor={tensor}"
    if text is None and mesh.shape["context"] == 1:
        return mesh
    merged = dict(mesh.shape) | {"fsdp": mesh.shape["fsdp"] * mesh.shape["context"], "context": 1}
    sizes = merged if text is None else _parsed(text)
    if unknown := [name for name in sizes if name not in AXES]:
        raise ConfigError(f"rollout.mesh names {unknown[0]!r}, but a mesh has the axes {', '.join(AXES)}")
    if sizes.get("context", 1) != 1:
        raise ConfigError(
            "rollout.mesh has a context axis, but completions are sampled one position at a time: leave it out"
        )
    default = dict.fromkeys(AXES, 1) | {"data": 1 if -1 in sizes.values() else -1}
    devices = mesh.devices.reshape(-1)
    sizes = _sizes("rollout.mesh", default | sizes, devices)
    sampling_mesh = Mesh(devices.reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    row_groups(sampling_mesh, host)  # refuses some
    return sampling_mesh


def _parsed(text: str) -> dict[str, int]:
    entries = [entry.partition("=") for entry in text.replace(" ", "").split(",")]
    try:
        return {axis: int(size) for axis, _, size in entries}
    except ValueError as error:
        raise ConfigError(f"rollout.mesh is {text!r}, but it takes sizes of axes, such as fsdp=2,tensor=4") from error


def _sizes(name: str, sizes: dict[str, int], devices) -> tuple[int, ...]:
    """The sizes in the order of AXES, -1 replaced; raises ConfigError when they do not fit the devices."""
    shown = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    known = [size for size in sizes.values() if size != -1]
    if len(known) < len(sizes) - 1 or min(known) < 1:
        raise ConfigError(f"{name} sizes {shown}: at most one may be -1, the others at least 1.")
    product = int(np.prod(known))
    resolved = tuple(max(len(devices) // product, 1) if sizes[axis] == -1 else sizes[axis] for axis in AXES)
    if int(np.prod(resolved)) != len(devices):
        raise ConfigError(
            f"{name} {shown} does not use the {amount(len(devices), 'device')} at hand: the product of the sizes must "
            f"be {len(devices)}; set one of them to -1 to take what remains."
        )
    return resolved


@functools.lru_cache
def row_groups(mesh: Mesh, host: int | None = None) -> int:
    """The number of row groups: the processes of one hold the same rows, those of another hold other rows.

    It is the number of processes unless `context` or `tensor` spans several. The groups have as many processes each,
    and their rows are in the order of their processes. `host` is the number of devices of a process where CPUs of one
    stand in for those of several. Raises ConfigError where no such groups of adjacent processes come about.
    """
    owners = np.arange(mesh.size).reshape(mesh.devices.shape) // (host or mesh.size)
    if host is None:
        owners = np.vectorize(lambda device: device.process_index)(mesh.devices)
    shards = row_shards(mesh)
    by_rows = owners.transpose(*(AXES.index(axis) for axis in (*ROWS, "context", "tensor"))).reshape(shards, -1)
    held = [np.flatnonzero((by_rows == process).any(axis=1)).tolist() for process in np.unique(owners)]
    groups = len({tuple(rows) for rows in held})
    size, own = len(held) // groups, shards // groups
    for number, rows in enumerate(held):
        first = number // size * own
        if rows != list(range(first, first + own)):
            raise ConfigError(
                f"the mesh {dict(mesh.shape)} gives processes some rows in common and others not, or those of one to "
                f"processes that are not adjacent: make context x tensor divide the {mesh.size // len(held)} devices "
                "of a process, or be a multiple of them; with context above 1, expert x tensor divides them too"
            )
    return groups


def path_name(path) -> str:
    """The path of a pytree leaf as `layers/attention/q/kernel`."""
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def _fitting(axes: tuple, shape: tuple[int, ...], mesh) -> PartitionSpec:
    """The axes that divide their dimensions; along one that does not (2 kv heads on 4) the array is replicated."""
    spec = []
    for size, names in zip(shape, axes, strict=True):
        kept: list[str] = []
        for name in (names,) if isinstance(names, str) else names or ():
            if mesh.shape[name] > 1 and size % int(np.prod([mesh.shape[n] for n in (*kept, name)])) == 0:
                kept.append(name)
        spec.append(None if not kept else kept[0] if len(kept) == 1 else tuple(kept))
    return PartitionSpec(*spec)


def parameter_spec(path: str, shape: tuple[int, ...], mesh) -> PartitionSpec:
    """The PartitionSpec of the parameter at `path`; parameters in no row of the table (norm scales) are replicated.

    Raises ConfigError for experts whose number mesh.expert does not divide.
    """
    path = PARTS.sub("", path)
    if re.search(r"experts/\w+/kernel$", path) and shape[-3] % mesh.shape["expert"]:
        raise ConfigError(f"mesh.expert is {mesh.shape['expert']}, but it must divide the model's {shape[-3]} experts")
    rows = PARAMETERS if mesh.shape.get("tensor", 1) > 1 else (*WITHOUT_TENSOR, *PARAMETERS)
    for pattern, axes in rows:
        if re.search(pattern, path) and len(axes) <= len(shape) and not FACTORED.search(path):
            return _fitting((None,) * (len(shape) - len(axes)) + axes, shape, mesh)
    return PartitionSpec()


def resharding(tree, mesh: Mesh, other: Mesh) -> Callable[[Any], Any]:
    """A program of `mesh` that gives parameters such as `tree` the shards that they have on `other`, of other devices.

    So shards are copied to these as they are: where they differ, `jax.device_put` reads whole arrays into the host's
    memory. Where several devices are to have a copy of the same shard, each gets a part of it, and they gather the
    parts; the partitioner alone would have every device gather everything. It is the identity where the devices do not
    divide into the shards.
    """
    shards = other.size // other.shape["data"]
    if mesh.size % shards:
        return lambda tree: tree
    sizes = other.shape | {"data": mesh.size // shards}
    alike = Mesh(mesh.devices.reshape([*sizes.values()]), other.axis_names, axis_types=other.axis_types)
    # One samples at a time along `context`, so that its size is 1: here it shards what `data` copies.
    axes = [{"data": "context", "context": "data"}.get(axis, axis) for axis in alike.axis_names]
    parts = shardings(tree, Mesh(alike.devices, axes, axis_types=alike.axis_types))

    def program(tree):
        in_parts = alike.shape["data"] > 1 and mesh.shape["data"] == 1
        return jax.lax.with_sharding_constraint(tree, parts) if in_parts else tree

    return jax.jit(program, out_shardings=shardings(tree, alike))


def shardings(tree, mesh: Mesh):
    """A tree of NamedShardings for a tree of arrays or shapes.

    Optimizer moments repeat the paths of the parameters they belong to, so one table serves a whole training state.
    """

    def leaf(path, x):
        return NamedSharding(mesh, parameter_spec(path_name(path), x.shape, mesh))

    return jax.tree_util.tree_map_with_path(leaf, tree)


def on_host(tree) -> Any:
    """The arrays in the host's memory, with their sharding; scalars stay on the device. It works under jit."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host) if x.ndim else x, tree)


def has_host_memory() -> bool:
    """True when the devices read and write pinned memory of the host."""
    return all("pinned_host" in {memory.kind for memory in x.addressable_memories()} for x in jax.local_devices())


def on_device(tree) -> Any:
    """The arrays in the device's memory; those that are there already stay as they are. It works under jit."""

    def moved(x):
        is_there = x.ndim == 0 or (not isinstance(x, Tracer) and x.sharding.memory_kind != "pinned_host")
        return x if is_there else jax.device_put(x, jax.memory.Space.Device)

    return jax.tree.map(moved, tree)


def placed(tree, places) -> Any:
    """The shapes of a tree of arrays or shapes, with the shardings of the tree `places`."""
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, places)


def over(tree, mesh: Mesh) -> Any:
    """Shapes of parameters, or of an optimizer's state, sharded over the mesh."""
    return placed(tree, shardings(tree, mesh))


def bytes_on_device(tree, host: bool = False) -> int:
    """Bytes of a tree of arrays, or of placed shapes, on one device; with `host`, those that wait in the host's
    memory."""

    def item_size(dtype) -> int:
        return 8 if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key) else np.dtype(dtype).itemsize

    return sum(
        int(np.prod(x.sharding.shard_shape(x.shape), dtype=np.int64)) * item_size(x.dtype)
        for x in jax.tree.leaves(tree)
        if (x.sharding.memory_kind == "pinned_host") == host
    )


def constrain(x, *dims: str | EllipsisType | None):
    """`x` with its dimensions sharded by ACTIVATIONS, as XLA likes where it is `...`; unchanged without a mesh, and
    inside `shard_map`, where each device computes with its own shard."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.are_all_axes_manual:
        return x
    return jax.lax.with_sharding_constraint(x, activation_spec(x.shape, *dims))


def constrain_rows(x):
    """`x` `[N,...]` with its rows sharded, and no other dimension."""
    return constrain(x, "rows", *(None,) * (x.ndim - 1))


def activation_spec(shape: tuple[int, ...], *dims: str | EllipsisType | None) -> PartitionSpec:
    """The PartitionSpec of an activation on the current mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    fitting = _fitting(tuple(ACTIVATIONS[dim] if isinstance(dim, str) else None for dim in dims), shape, mesh)
    return PartitionSpec(
        *(PartitionSpec.UNCONSTRAINED if dim is ... else axes for dim, axes in zip(dims, fitting, strict=True))
    )


def all_gathered(shard, spec: PartitionSpec, axes: tuple[str, ...]):
    """Inside `shard_map`, a shard of an array with this spec gathered along these axes; along others it stays one."""
    for dim, names in enumerate(spec):
        own = (names,) if isinstance(names, str) else names or ()
        if kept := tuple(axis for axis in own if axis in axes):
            shard = jax.lax.all_gather(shard, kept, axis=dim, tiled=True)
    return shard


def is_sharded() -> bool:
    """True when the current mesh has several devices, except inside `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.size > 1 and not mesh.are_all_axes_manual


def context_shards() -> int:
    """The number of shards of the positions on the current mesh; 1 without a mesh, and inside `shard_map`."""
    return jax.sharding.get_abstract_mesh().shape["context"] if is_sharded() else 1


def vocab_shards(size: int) -> int:
    """The shards of logits of so many tokens on the current mesh; 1 without a mesh, or where they are not divided."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty or size % mesh.shape["tensor"] else mesh.shape["tensor"]


def columns_are_whole() -> bool:
    """True when no axis of the current mesh shards the outputs of matrices, or the positions of rows."""
    mesh = jax.sharding.get_abstract_mesh()
    return not is_sharded() or mesh.shape["tensor"] * mesh.shape["context"] == 1


def attention_dims(kv_heads: int) -> tuple[tuple[str | None, str | None], tuple[str | None, str | None]]:
    """The names in ACTIVATIONS of (positions, heads) in attention, for queries and for keys and values.

    With a context axis that divides the heads each device has all positions of its heads, else its own queries.
    """
    if context_shards() == 1:
        return (None, "heads"), (None, "heads")
    spread = (None, "spread_heads")
    return (spread, spread) if kv_heads % head_shards() == 0 else (("positions", "heads"), (None, "heads"))


def head_shards() -> int:
    """The number of shards of heads where attention has complete rows."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape["tensor"] * mesh.shape["context"] if is_sharded() else 1


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over `data`, `fsdp` and `expert`; other dimensions are not sharded."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def row_shards(mesh: Mesh) -> int:
    """The number of shards into which a mesh divides rows, by its axes `ROWS`; a batch is a multiple of it."""
    return int(np.prod([mesh.shape[axis] for axis in ROWS]))


def rows_to_global(rows, mesh: Mesh) -> Any:
    """Global arrays, sharded by rows, from each process's own rows (a tree of numpy arrays `[rows, ...]`; None stays).

    Processes of a row group give the same. Raises ConfigError when the rows do not divide: they are never replicated
    silently.
    """

    def leaf(x):
        x = np.asarray(x)
        total = x.shape[0] * row_groups(mesh)
        if total % row_shards(mesh):
            raise ConfigError(
                f"{total} rows do not divide into mesh.data x mesh.fsdp x mesh.expert = {row_shards(mesh)} parts; "
                "change batch.prompts, rollout.group_size or the mesh."
            )
        return jax.make_array_from_process_local_data(row_sharding(mesh), x)

    return jax.tree.map(leaf, rows)


def local_rows(tree):
    """This process's own rows of global arrays, as numpy arrays in their global order; numpy arrays as they are."""

    def leaf(x):
        if not isinstance(x, jax.Array) or x.is_fully_addressable:
            return np.asarray(x)
        shards = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
        return np.concatenate([np.asarray(shards[start]) for start in sorted(shards)])

    return jax.tree.map(leaf, tree)


def gathered(x: jax.Array) -> np.ndarray:
    """The whole array as NumPy's, on every process; all must call it where it is sharded over several."""
    return np.asarray(x if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True))


def local_range(rows: jax.Array | np.ndarray) -> slice:
    """The rows of a global array that are this process's own, which are adjacent; all of a numpy array."""
    if not isinstance(rows, jax.Array) or rows.is_fully_addressable:
        return slice(0, len(rows))
    found = [shard.index[0].indices(len(rows)) for shard in rows.addressable_shards]
    return slice(min(start for start, _, _ in found), max(stop for _, stop, _ in found))
