"""The part of a mesh that belongs to this process, for programs that no other process takes part in."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.distributed.sharding import AXES, on_device, rollout_mesh, shardings


class OwnPart(NamedTuple):
    """A mesh of this process's devices, and a function that gives it parameters of all processes: all must call it."""

    mesh: Mesh
    params: Callable[[Any], Any]

    @classmethod
    def of(cls, mesh: Mesh, kv_heads: int, arrangement: str | None = "auto") -> "OwnPart":
        """The part of a mesh whose processes each have rows of their own; of one process the mesh itself.

        Without a `context` axis its devices are in the order of processes: `row_groups` refuses others. Each process
        has all parameters: over its devices in `fsdp`, or as `arrangement`, a text of `rollout.mesh`, has them. Raises
        ConfigError for one that no process has all by itself.
        """
        count = jax.process_count()
        if not mesh.is_multi_process:
            return cls(mesh, lambda params: params)
        types = mesh.axis_types
        wide = Mesh(mesh.devices.reshape(count, mesh.size // count, 1, 1, 1), AXES, axis_types=types)
        wide = rollout_mesh(wide, arrangement, kv_heads)
        if wide.shape["data"] % count:
            raise ConfigError(
                f"rollout.mesh is {arrangement!r}, whose axes beside data go over several processes, but each of the "
                f"{count} processes samples by itself: make their sizes divide the {mesh.size // count} devices of one"
            )
        devices = wide.devices.reshape(count, wide.shape["data"] // count, *wide.devices.shape[1:])
        own = Mesh(devices[jax.process_index()], AXES, axis_types=types)
        return cls(own, functools.partial(_own_params, wide, own))


def _own_params(wide: Mesh, own: Mesh, params: Any) -> Any:
    leaves, structure = jax.tree.flatten(shardings(params, wide))
    everywhere = _moved(structure, tuple(leaves))(on_device(params))

    def own_shards(x: jax.Array, sharding) -> jax.Array:
        shards = {shard.device: shard.data for shard in x.addressable_shards}
        return jax.make_array_from_single_device_arrays(x.shape, sharding, [shards[x] for x in own.devices.flat])

    return jax.tree.map(own_shards, everywhere, shardings(params, own))


@functools.lru_cache(maxsize=8)
def _moved(structure, targets: tuple):
    # Kept here: a new jit object for each step would compile each step.
    return jax.jit(lambda params: params, out_shardings=jax.tree.unflatten(structure, targets))
