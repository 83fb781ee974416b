"""Saving and restoring a run: asynchronous, sharded, atomic Orbax checkpoints that are restored on any mesh.

A checkpoint holds the `State` (parameters, optimizer, step), a small JSON part (the data position and what else the
host needs to go on) and, where a run has them, a reference that follows the policy and a replay buffer. Random numbers
need no storage: every key is folded from the seed, the step and the row.
"""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.sharding import shardings
from jaxrl_llm.training.update import State

ARRAYS = ("reference", "replay")  # what a checkpoint may hold besides, each in a folder of its own


class Checkpoints:
    """The checkpoints of one run, under `folder/<step>`; a context manager that waits for the last save."""

    def __init__(self, folder: str | Path, keep: int | None = None):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        trees = {name: ocp.StandardCheckpointHandler() for name in ("state", *ARRAYS)}
        handlers = {**trees, "host": ocp.JsonCheckpointHandler()}
        self.folder = Path(folder).absolute()
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_) -> None:
        self._manager.close()

    def latest(self) -> int | None:
        """The newest complete step, None when there is none. An interrupted save leaves no step behind."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """The complete steps, oldest first."""
        return sorted(self._manager.all_steps())

    def discard_after(self, step: int | None) -> None:
        """Deletes the steps after `step`, all of them when it is None: a run that starts there writes them anew."""
        for other in self.steps():
            if step is None or other > step:
                self._manager.delete(other)

    def save(self, step: int, state: State, host: dict[str, Any], arrays: dict[str, Any] | None = None) -> None:
        """Starts saving; returns when the arrays are copied and may be donated. `arrays` are trees named in ARRAYS."""
        more = {name: ocp.args.StandardSave(tree) for name, tree in (arrays or {}).items()}
        items = {"state": ocp.args.StandardSave(vars(state)), "host": ocp.args.JsonSave(host), **more}
        self._manager.save(step, args=ocp.args.Composite(**items))

    def restore(self, step: int, like: State, mesh: Mesh) -> tuple[State, dict[str, Any]]:
        """The state of a step, cut over `mesh`, and its host part; `like` gives shapes, dtypes and memories.

        Raises ConfigError when the checkpoint cannot be read or belongs to another model or optimizer.
        """
        tree = jax.tree.map(_in_memory_of, _placed(jax.eval_shape(lambda: vars(like)), mesh), vars(like))
        try:
            restored = self._manager.restore(
                step, args=ocp.args.Composite(state=ocp.args.StandardRestore(tree), host=ocp.args.JsonRestore())
            )
        except (ValueError, KeyError, OSError) as error:
            raise ConfigError(
                f"checkpoint {self.folder / str(step)} cannot be restored: {error}\nIf it is damaged, delete that "
                "folder; if it is of another model or optimizer, use another output_dir or checkpoint.resume=never."
            ) from error
        return State(**restored["state"]), restored["host"]

    def restore_arrays(self, step: int, like: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
        """Those of the trees `like`, by name, that the step holds, cut over `mesh`.

        Raises ConfigError when one cannot be read or has other shapes.
        """
        named = {name: tree for name, tree in like.items() if (self.folder / str(step) / name).is_dir()}
        if not named:
            return {}
        trees = {name: _placed(jax.eval_shape(lambda tree=tree: tree), mesh) for name, tree in named.items()}
        items = {name: ocp.args.StandardRestore(tree) for name, tree in trees.items()}
        try:
            restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        except (ValueError, KeyError, OSError) as error:
            raise ConfigError(
                f"the {' and the '.join(named)} of checkpoint {self.folder / str(step)} cannot be restored: {error}\n"
                "Go on with the settings of algorithm and rollout that the run had, or use checkpoint.resume=never."
            ) from error
        return {name: restored[name] for name in named}

    def restore_params(self, step: int, shapes: Params, mesh: Mesh) -> Params:
        """The parameters of a step alone, cut over `mesh`; nothing else of the state is read.

        Raises ConfigError when the checkpoint cannot be read or has parameters of other shapes.
        """
        tree = {"params": _placed(shapes, mesh)}
        part = ocp.args.PyTreeRestore(tree, ocp.checkpoint_utils.construct_restore_args(tree), partial_restore=True)
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
                return reader.restore(self.folder / str(step) / "state", args=part)["params"]
        except (ValueError, KeyError, OSError) as error:
            raise ConfigError(
                f"the parameters of checkpoint {self.folder / str(step)} cannot be read: {error}"
            ) from error


def find(path: str | Path) -> tuple[Checkpoints, int]:
    """The checkpoints and step that `path` names: `RUN/checkpoints/STEP`, or the newest of `RUN/checkpoints` or `RUN`.

    Raises ConfigError when there is none.
    """
    path = Path(path).expanduser()
    folder, step = (path.parent, int(path.name)) if path.name.isdigit() else (path, None)
    folder = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    checkpoints = Checkpoints(folder) if folder.is_dir() else None
    steps = checkpoints.steps() if checkpoints else []
    if checkpoints is None or not steps or (step is not None and step not in steps):
        there = f"there are steps {', '.join(map(str, steps))}" if steps else "no checkpoint is there"
        raise ConfigError(f"checkpoint.resume is {str(path)!r}, but {there}; give auto, never or RUN/checkpoints/STEP")
    return checkpoints, steps[-1] if step is None else step


def _in_memory_of(shape: jax.ShapeDtypeStruct, x) -> jax.ShapeDtypeStruct:
    """The shape, placed in the memory that x lives in: of the device, or of the host."""
    place = shape.sharding
    if isinstance(x, jax.Array) and isinstance(place, NamedSharding) and x.sharding.memory_kind:
        place = place.with_memory_kind(x.sharding.memory_kind)
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=place)


def _placed(shapes, mesh: Mesh):
    """The shapes, each with its place on the mesh."""
    return jax.tree.map(
        lambda x, cut: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=cut), shapes, shardings(shapes, mesh)
    )
