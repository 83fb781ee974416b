"""The arrays of a checkpoint by their shapes: those that are held compared with those that are wanted, and placed."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.distributed.sharding import over, path_name
from jaxrl_llm.training.update import State


def difference(held: Any, wanted: Any) -> tuple[str, str] | None:
    """The path of the first array whose shape differs between two trees, or that one of them lacks, and the difference
    in words; None where there is none."""
    theirs, own = ({path_name(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(part)}
                   for part in (held, wanted))  # fmt: skip
    differ = [path for path in sorted(theirs | own) if theirs.get(path) != own.get(path)]
    if not differ:
        return None
    path = min(differ, key=lambda path: "opt_state" in path.split("/"))  # moments follow from the parameters
    there, here = (f"is {[*x[path]]}" if path in x else "is not" for x in (theirs, own))
    return path, f"{path} {there} there, and {here} here"


def free(state: State) -> None:
    """Frees the memory of a state that is not used any more; its shapes and shardings stay known."""
    for x in jax.tree.leaves(state):
        if not x.is_deleted():
            x.delete()


def in_memory_of(like: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """The shapes of the arrays, sharded over the mesh in the memory that each is in: offloaded ones on the host."""

    def placed(shape: jax.ShapeDtypeStruct, x) -> jax.ShapeDtypeStruct:
        sharding = shape.sharding
        if isinstance(x, jax.Array) and isinstance(sharding, NamedSharding) and x.sharding.memory_kind:
            sharding = sharding.with_memory_kind(x.sharding.memory_kind)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    return jax.tree.map(placed, over(like, mesh), like)
