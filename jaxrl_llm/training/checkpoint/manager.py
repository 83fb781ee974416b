"""Saving and restoring a run: asynchronous, sharded, atomic Orbax checkpoints that are restored on any mesh.

A checkpoint holds the `State` (parameters, optimizer, step), a small JSON part (the data position and what else the
host needs to go on) and, where a run has them, a reference that follows the policy and a replay buffer. Random numbers
need no storage: every key is folded from the seed, the step and the row.

Before a checkpoint becomes final the hashes of its files are written beside them (`integrity`), and compared before it
is used: one that is torn or has changed is named, and the one before it taken.
"""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from orbax.checkpoint import checkpoint_managers as policies

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.resolve import closest
from jaxrl_llm.distributed.sharding import shardings
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.training.checkpoint import checksums
from jaxrl_llm.training.checkpoint.object_store import check_store
from jaxrl_llm.training.update import State

ARRAYS = ("reference", "replay")  # what a checkpoint may hold besides, each in a folder of its own
FAILURES = (OSError, ValueError)  # how a disk that is full, or not there, shows in Orbax and its array storage
RETRY_SECONDS = 30.0
FINAL_TRIES = 3


class Keep(NamedTuple):
    """Which checkpoints stay: the newest ones, and of the others one every so often and the best by a metric."""

    newest: int | None = None  # None is all
    steps: int = 0
    hours: float = 0.0
    best: str | None = None
    best_mode: str = "max"

    def rank(self, metrics: Mapping[str, float]) -> float:
        """What the best is the greatest by; the lowest of all for a metric that is not a number."""
        value = float(metrics.get(self.best or "", math.nan))
        return -math.inf if math.isnan(value) else value if self.best_mode == "max" else -value


class Checkpoints:
    """The checkpoints of one run, under `folder/<step>`; a context manager that waits for the last save.

    A save that fails (the disk is full, say) does not end the run: `warnings` tells of it and `retry_due` says when to
    try again. Leaving the context raises ConfigError when the last save that was asked for has not been made. With several
    processes a failed save raises at once. `read_only` is for looking at the checkpoints of another run.

    Raises ConfigError when the folder cannot be made or read.
    """

    def __init__(self, folder: str | Path, keep: Keep | None = None, read_only: bool = False):
        self.folder = path_of(folder)
        # Each store has a family of errors of its own.
        self._failures = (Exception,) if is_remote(self.folder) else FAILURES
        self._keep = keep or Keep()
        self._read_only = read_only
        self._saving: int | None = None  # the step of the save under way
        self._failed: int | None = None  # the step of a save that failed, until one succeeds
        self._reason, self._tried = "", 0.0
        self._news: list[str] = []
        try:
            self._manager = self._open()
        except self._failures as error:
            raise ConfigError(
                f"checkpoints cannot be kept in {self.folder}: {error}; give another output_dir or checkpoint.folder"
            ) from error

    def _open(self) -> ocp.CheckpointManager:
        if not self._read_only and jax.process_index() == 0:
            _clear_unfinished(self.folder)
        trees = {name: ocp.StandardCheckpointHandler() for name in ("state", *ARRAYS)}
        json_parts = {name: ocp.JsonCheckpointHandler() for name in ("host", "metrics")}
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_policy(self._keep),
            best_fn=self._keep.rank if self._keep.best else None,
            # Folders are made before save returns: where that fails, Orbax's threads would wait for them for minutes.
            async_options=ocp.AsyncOptions(
                post_finalization_callback=self._seal, create_directories_asynchronously=False
            ),
            create=not self._read_only,
        )
        return ocp.CheckpointManager(self.folder, options=options, item_handlers={**trees, **json_parts})

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: object, exception: BaseException | None, trace: object) -> None:
        self.wait()
        if self._failed is None:
            self._manager.close()
            return
        if exception is None:
            raise ConfigError(self._reason)
        exception.add_note(self._reason)

    def steps(self) -> list[int]:
        """The steps whose saving was completed, oldest first. An interrupted save leaves no step behind."""
        return sorted(self._manager.all_steps())

    def latest(self) -> int | None:
        """The newest of `steps`, None when there is none."""
        return max(self.steps(), default=None)

    def damage(self, step: int) -> str | None:
        """What is wrong with the files of a step, None when they are as they were saved; all processes agree.

        Object stores (gs://, s3://) check what they send themselves; nothing is compared there.
        """
        if is_remote(self.folder):
            return None
        process, count = jax.process_index(), jax.process_count()
        found = checksums.damage(Path(self.folder) / str(step), process, count)
        if count == 1:
            return found
        bad = np.flatnonzero(multihost_utils.process_allgather(np.array([found is not None])).reshape(-1))
        return found or (f"process {bad[0]} cannot read all of it, see its message" if len(bad) else None)

    def newest_intact(self) -> tuple[int | None, list[str]]:
        """The newest step whose files are as they were saved, None without steps; and what is wrong with later ones.

        Raises ConfigError when there are steps and none is whole.
        """
        problems: list[str] = []
        for step in reversed(self.steps()):
            problem = self.damage(step)
            if problem is None:
                return step, problems
            problems.append(f"the checkpoint of step {step} is damaged: {problem}")
        if problems:
            raise ConfigError(
                f"no checkpoint in {self.folder} can be used: {'; '.join(problems)}. Bring one back from a copy, or "
                "start anew with checkpoint.resume=never"
            )
        return None, problems

    def discard_after(self, step: int | None) -> None:
        """Deletes the steps after `step`, all of them when it is None: a run that starts there writes them anew."""
        for other in self.steps():
            if step is None or other > step:
                self._manager.delete(other)

    def save(
        self,
        step: int,
        state: State,
        host: dict[str, Any],
        arrays: dict[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        final: bool = False,
    ) -> None:
        """Starts saving; returns when the arrays are copied and may be donated. `arrays` are trees named in ARRAYS.

        `metrics` are those of the step, for `Keep.best`. `final` waits until the checkpoint is there, and tries
        FINAL_TRIES times. Raises ConfigError when the metrics lack the one that says which is best.
        """
        best = self._keep.best
        if best and metrics is not None and best not in metrics and not best.startswith("eval/"):
            near = closest(best, [*metrics])
            raise ConfigError(
                f"checkpoint.best is {best!r}, but step {step} has no such metric; the closest is {near!r}; see "
                "docs/metrics.md"
            )
        ranked = {best: float(metrics[best])} if best and metrics and best in metrics else None
        more = {name: ocp.args.StandardSave(tree) for name, tree in (arrays or {}).items()}
        items = {"state": ocp.args.StandardSave(vars(state)), "host": ocp.args.JsonSave(host), **more}
        for attempt in range(FINAL_TRIES if final else 1):
            if attempt:
                time.sleep(RETRY_SECONDS)
            self.wait()
            self._start(step, ocp.args.Composite(**items), ranked)
            if final:
                self.wait()
            if self._failed is None:
                break

    def _start(self, step: int, items: ocp.args.Composite, metrics: dict[str, float] | None) -> None:
        self._saving, self._tried = step, time.monotonic()
        try:
            if self._failed is not None:
                self._manager = self._open()  # removes what the failed save has left
            self._manager.save(step, args=items, metrics=metrics)
        except self._failures as error:
            self._fail(error)

    def wait(self) -> None:
        """Waits for the save under way, if there is one."""
        if self._saving is None:
            return
        try:
            self._manager.wait_until_finished()
        except self._failures as error:
            self._fail(error)
        else:
            self._saving = self._failed = None

    def warnings(self) -> list[str]:
        """What has gone wrong since the last call, for the log."""
        if self._saving is not None and jax.process_count() == 1 and not self._manager.is_saving_in_progress():
            self.wait()
        told, self._news = self._news, []
        return told

    @property
    def retry_due(self) -> bool:
        """True when a save has failed and it is time to try again."""
        return self._failed is not None and time.monotonic() - self._tried >= RETRY_SECONDS

    def _fail(self, error: Exception) -> None:
        step, self._failed, self._saving = self._saving, self._saving, None
        self._reason = f"the checkpoint of step {step} could not be written to {self.folder}: {error}"
        if jax.process_count() > 1:  # the others wait for this one's part
            raise ConfigError(self._reason) from error
        self._news.append(f"{self._reason}. The run goes on, and tries again after {RETRY_SECONDS:g} s")

    def _seal(self) -> None:
        """Called when all files of a save are there, before its folder gets its final name."""
        if not is_remote(self.folder):
            folder = Path(self.folder)
            unfinished = [path for path in folder.iterdir() if path.name.startswith(f"{self._saving}.")]
            checksums.write_hashes((unfinished or [folder / str(self._saving)])[0])

    def check(self, step: int) -> None:
        """Raises ConfigError when the files of a step are not as they were saved."""
        if problem := self.damage(step):
            others = ", ".join(str(other) for other in self.steps() if other != step)
            raise ConfigError(
                f"the checkpoint of step {step} is damaged: {problem}; "
                + (f"there are also steps {others}" if others else f"there is no other in {self.folder}")
            )

    def restore(self, step: int, like: State, mesh: Mesh) -> tuple[State, dict[str, Any]]:
        """The state of a step, cut over `mesh`, and its host part; `like` gives shapes, dtypes and memories.

        `like` may have been freed (see `free`): where memory is scarce there is no room for two states.

        Raises ConfigError when the checkpoint cannot be read or belongs to another model or optimizer.
        """
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), vars(like))
        tree = jax.tree.map(_in_memory_of, _placed(shapes, mesh), vars(like))
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

    def host(self, step: int) -> dict[str, Any]:
        """The host part of a step alone."""
        return self._manager.restore(step, args=ocp.args.Composite(host=ocp.args.JsonRestore()))["host"]

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


def find(path: str | Path) -> tuple[Checkpoints, int, list[str]]:
    """The checkpoints and step that `path` names, and what is wrong with later ones.

    `RUN/checkpoints/STEP`, or the newest whole one of `RUN/checkpoints` or `RUN`. Raises ConfigError when there is
    none, or the step that is named is damaged.
    """
    folder = path_of(path)
    step = int(folder.name) if folder.name.isdigit() else None
    folder = folder if step is None else folder.parent
    folder = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    checkpoints = Checkpoints(folder, read_only=True) if folder.is_dir() else None
    steps = checkpoints.steps() if checkpoints else []
    if checkpoints is None or not steps or (step is not None and step not in steps):
        there = f"there are steps {', '.join(map(str, steps))}" if steps else "no checkpoint is there"
        raise ConfigError(f"checkpoint.resume is {str(path)!r}, but {there}; give auto, never or RUN/checkpoints/STEP")
    if step is None:
        step, problems = checkpoints.newest_intact()
        assert step is not None
        return checkpoints, step, problems
    checkpoints.check(step)
    return checkpoints, step, []


def folder_of(config, run: str | Path | None = None):
    """Where the checkpoints of a run are: `checkpoint.folder`, or `checkpoints` in `run`, its output_dir."""
    return path_of(config.checkpoint.folder or Path(run or config.output_dir) / "checkpoints")


def keep_of(config) -> Keep:
    """Which checkpoints of a run stay."""
    c = config.checkpoint
    return Keep(c.keep, c.keep_every, c.keep_hours, c.best, c.best_mode)


def path_of(folder: str | Path) -> Any:
    """The absolute path of a folder, local or in an object store.

    Raises ConfigError for a store that cannot be reached with what is installed.
    """
    if not is_remote(folder):
        return Path(folder).expanduser().absolute()
    check_store(str(folder))
    return epath.Path(folder)


def is_remote(folder: Any) -> bool:
    """True for gs://, s3:// and the like."""
    return "://" in str(folder)


def _policy(keep: Keep) -> policies.PreservationPolicy | None:
    """Orbax's rule: a checkpoint stays that any of these keeps; None keeps all."""
    if keep.newest is None:
        return None
    rules: list[policies.PreservationPolicy] = [policies.LatestN(keep.newest)]
    if keep.steps:
        rules.append(policies.EveryNSteps(keep.steps))
    if keep.hours:
        rules.append(policies.EveryNSeconds(round(keep.hours * 3600)))
    if keep.best:
        rules.append(policies.BestN(get_metric_fn=keep.rank, n=1, keep_checkpoints_without_metrics=False))
    return policies.AnyPreservationPolicy(rules)


def free(state: State) -> None:
    """Gives back the memory of a state that is not used any more; its shapes and places stay known."""
    for x in jax.tree.leaves(state):
        if not x.is_deleted():
            x.delete()


def _clear_unfinished(folder: Path | epath.Path) -> None:
    """Removes what interrupted saves have left. Orbax would do it in a thread, which a run that ends at once kills."""
    folder = epath.Path(folder)
    for path in folder.iterdir() if folder.exists() else ():
        if ocp.utils.TMP_DIR_SUFFIX in path.name:
            path.rmtree()


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
