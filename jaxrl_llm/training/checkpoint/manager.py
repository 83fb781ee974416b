"""Saving and restoring a run: asynchronous, sharded, atomic Orbax checkpoints that are restored on any mesh.

A checkpoint holds the `State` (parameters, optimizer, step), a small JSON part (the data position and the counters of
the host) and, where a run has them, a reference that follows the policy, the policy's average, a replay buffer,
rollouts that were made ahead, and the scores of the reference's completions. Random numbers need no storage: every key
is folded from the seed, the step and the row.

Before a checkpoint becomes final the hashes of its files are written beside them (`checksums`), and compared before it
is used: one that is torn or has changed is named, and the one before it is used.
"""

import contextlib
import errno
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from etils import epath
from jax.sharding import Mesh

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.resolve import TransientError, closest
from jaxrl_llm.distributed import processes
from jaxrl_llm.distributed.orbax import ocp
from jaxrl_llm.distributed.sharding import over
from jaxrl_llm.models.net import Params
from jaxrl_llm.training.checkpoint import checksums
from jaxrl_llm.training.checkpoint.object_store import is_remote, path_of
from jaxrl_llm.training.checkpoint.orbax_manager import Keep, Manager, hashing_handler, preservation_policy
from jaxrl_llm.training.checkpoint.shapes import difference, free, in_memory_of
from jaxrl_llm.training.runtime.preemption import Preempted
from jaxrl_llm.training.update import State

# Optional trees of a checkpoint, each in a folder of its own.
ARRAYS = ("reference", "average", "teacher", "replay", "queue", "partial", "reference_scores")
FAILURES = (OSError, ValueError)  # raised by Orbax and its array storage when a disk is full, or gone
RETRY_SECONDS = 30.0
FINAL_TRIES = 3


class Checkpoints:
    """The checkpoints of one run, under `folder/<step>`; a context manager that waits for the last save.

    A save that fails (the disk is full, say) does not end the run: `warnings` names it, and `retry_due` is True when it
    is time to try again. Leaving the context raises ConfigError when the last save that was asked for has not been
    made. With several processes a failed save raises at once. `read_only` is for the checkpoints of another run.

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
        self._gives_up = False  # the save under way is the last try
        self.exported: Path | None = None  # the model of the last step, once it is written
        self._warnings: list[str] = []
        try:
            self._manager = self._open()
        except self._failures as error:
            raise ConfigError(
                f"checkpoints cannot be kept in {self.folder}: {error}; give another output_dir or checkpoint.folder"
            ) from error

    def _open(self) -> ocp.CheckpointManager:
        if not self._read_only and jax.process_index() == 0 and self.folder.exists():
            # Remains of interrupted saves. Orbax would remove them in a thread, which a run that ends at once kills.
            for path in epath.Path(self.folder).iterdir():
                if ocp.utils.TMP_DIR_SUFFIX in path.name:
                    path.rmtree()
        hashes = jax.process_count() > 1 and not is_remote(self.folder)
        trees = {name: hashing_handler() if hashes else ocp.StandardCheckpointHandler() for name in ("state", *ARRAYS)}
        json_parts = {name: ocp.JsonCheckpointHandler() for name in ("host", "metrics")}
        options = ocp.CheckpointManagerOptions(
            preservation_policy=preservation_policy(self._keep),
            best_fn=self._keep.rank if self._keep.best else None,
            # Folders are made before save returns: where that fails, Orbax's threads would wait for them for minutes.
            async_options=ocp.AsyncOptions(
                post_finalization_callback=self._seal, create_directories_asynchronously=False
            ),
            create=not self._read_only,
        )
        return Manager(self.folder, options=options, item_handlers={**trees, **json_parts})

    def __enter__(self) -> "Checkpoints":
        self._hook = sys.unraisablehook
        sys.unraisablehook = self._show
        return self

    def _show(self, unraisable: "sys.UnraisableHookArgs") -> None:
        """Shows an exception that nothing can catch, save those of TensorStore's threads after a failed save."""
        if str(unraisable.exc_value) != "Event loop is closed":
            self._hook(unraisable)

    def __exit__(self, kind: object, exception: BaseException | None, trace: object) -> None:
        self.wait()
        if self._failed is None:
            self._manager.close()
            if not self._reason:
                sys.unraisablehook = self._hook
            if isinstance(exception, Preempted) and jax.process_index() == 0:  # its notes are the last line
                exception.add_note(self.outcome())
            return
        if exception is None:
            raise ConfigError(self.outcome())
        if self._reason not in str(exception):
            exception.add_note(self.outcome())

    def outcome(self) -> str:
        """The state of the run's files, in words: a save that failed, the newest checkpoint, the model written."""
        self.wait()
        found = [] if self._failed is None else [self._reason]
        try:
            newest = max(ocp.utils.checkpoint_steps(self.folder), default=None)
            step = "there is no checkpoint" if newest is None else f"the newest checkpoint is of step {newest},"
            found.append(f"{step} in {self.folder}")
        except self._failures as error:
            found.append(f"what is in {self.folder} cannot be read: {_words(error)}")
        if self.exported is not None:
            found.append(f"the trained model is in {self.exported}")
        return "; ".join(found)

    def steps(self) -> list[int]:
        """The steps that were saved completely, oldest first. An interrupted save leaves no step behind."""
        return sorted(self._manager.all_steps())

    def damage(self, step: int) -> str | None:
        """The first fault of a step's files, or None when they are as they were saved; all processes agree.

        Object stores (gs://, s3://) check what they send themselves; nothing is compared there.
        """
        if is_remote(self.folder):
            return None
        process, count = jax.process_index(), jax.process_count()
        fault = checksums.damage(Path(self.folder) / str(step), process, count)
        faults = [
            other if count == 1 else f"{other} (as process {index} reads it)"
            for index, other in enumerate(processes.gather(fault))
            if other is not None
        ]
        return faults[0] if faults else None

    def newest_intact(self) -> tuple[int | None, list[str]]:
        """The newest step whose files are as they were saved, or None without steps, and the faults of later steps.

        Raises ConfigError when there are steps and none is intact.
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
        """Deletes the steps after `step`, all of them when it is None: a run that starts there writes them anew.

        A line on standard error says so before it happens.
        """
        later = [other for other in self.steps() if step is None or other > step]
        if later and jax.process_index() == 0:
            kept = "in another output_dir (or checkpoint.folder) they stay"
            if step is None:
                kept = f"with checkpoint.resume=auto a run goes on from them, and {kept}"
            print(
                f"warning: deleting the checkpoints of steps {', '.join(map(str, later))} in {self.folder}, as the run "
                f"starts {'anew' if step is None else f'after step {step}'}: {kept}",
                file=sys.stderr,
                flush=True,
            )
        for other in later:
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
        """Starts saving; returns once the arrays are copied and may be donated. `arrays` are trees named in ARRAYS.

        `metrics` are those of the step, for `Keep.best`. `final` waits until the checkpoint is there, and tries
        FINAL_TRIES times. Raises ConfigError when the metrics lack the one that says which is best.
        """
        best = self._keep.best
        if metrics is not None:
            self.check_best(step, metrics)
        ranked = {best: float(metrics[best])} if best and metrics and best in metrics else None
        items = {"state": ocp.args.StandardSave(vars(state)), "host": ocp.args.JsonSave(host)}
        items |= {name: ocp.args.StandardSave(tree) for name, tree in (arrays or {}).items()}
        for attempt in range(FINAL_TRIES if final else 1):
            if attempt:
                time.sleep(RETRY_SECONDS)
            self.wait()
            self._gives_up = final and attempt == FINAL_TRIES - 1
            self._saving, self._tried = step, time.monotonic()
            try:
                if self._failed is not None:
                    self._manager = self._open()  # removes the remains of the failed save
                self._manager.save(step, args=ocp.args.Composite(**items), metrics=ranked)
            except self._failures as error:
                self._fail(error)
            if final:
                self.wait()
            if self._failed is None:
                break

    def check_best(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises ConfigError when the metrics of a step lack the one that says which checkpoint is best, unless it is
        of evaluations."""
        best = self._keep.best
        if best and best not in metrics and not best.startswith("eval/"):
            near = closest(best, [*metrics])
            raise ConfigError(
                f"checkpoint.best is {best!r}, but step {step} has no such metric; the closest is {near!r}; see "
                "docs/metrics.md"
            )

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

    def abandon(self) -> None:
        """Forgets that a save has failed, as what it would have kept is elsewhere."""
        self._failed, self._reason = None, ""

    def warnings(self) -> list[str]:
        """The failures and damage since the last call, for the log."""
        if self._saving is not None and jax.process_count() == 1 and not self._manager.is_saving_in_progress():
            self.wait()
        new, self._warnings = self._warnings, []
        return new

    @property
    def retry_due(self) -> bool:
        """True when a save has failed and it is time to try again."""
        return self._failed is not None and time.monotonic() - self._tried >= RETRY_SECONDS

    def _fail(self, error: Exception) -> None:
        step, self._failed, self._saving = self._saving, self._saving, None
        self._reason = f"the checkpoint of step {step} could not be written to {self.folder}: {_words(error)}"
        if jax.process_count() > 1:  # the others wait for this one's share
            full = any(os.strerror(number) in self._reason for number in (errno.ENOSPC, errno.EDQUOT))
            raise (ConfigError if full else TransientError)(self.outcome()) from error
        again = "" if self._gives_up else f". The run goes on, and tries again after {RETRY_SECONDS:g} s"
        self._warnings.append(f"{self._reason}{again}")

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
        """The state of a step, sharded over `mesh`, and its host part; `like` gives shapes, dtypes and memories.

        `like` may have been freed (see `free`): where memory is scarce there is no room for two states.

        Raises ConfigError when the checkpoint cannot be read or belongs to another model or optimizer.
        """
        tree = in_memory_of(vars(like), mesh)
        self._check_arrays(step, tree, self._shapes(step))
        args = ocp.args.Composite(state=ocp.args.StandardRestore(tree), host=ocp.args.JsonRestore())
        way_out = "If it is damaged, delete that folder; or use another output_dir or checkpoint.resume=never."
        with _reading(f"checkpoint {self.folder / str(step)} cannot be restored", way_out):
            restored = self._manager.restore(step, args=args)
        return State(**restored["state"]), restored["host"]

    def restore_best(self, state: State, mesh: Mesh, note: Callable[[str], None]) -> State:
        """The state of the best checkpoint, in place of `state`, whose arrays are freed; `note` shows which it is.

        It is the state itself where no checkpoint has the metric, which is noted, or where the best is damaged: see
        `warnings`.
        """
        self.wait()
        best = self._manager.best_step()
        if best is None or best == int(state.step):
            note(
                f"hf/ is the model of step {int(state.step)}, the last, " + ("the best" if best else "as none is best")
            )
            return state
        if problem := self.damage(best):
            self._warnings.append(
                f"hf/ is the model of step {int(state.step)}, the last, as the checkpoint of step {best}, the best by "
                f"{self._keep.best}, is damaged: {problem}"
            )
            return state
        free(state)
        note(f"hf/ is the model of step {best}, the best by {self._keep.best}")
        return self.restore(best, state, mesh)[0]

    def host(self, step: int) -> dict[str, Any]:
        """The host part of a step alone."""
        return self._manager.restore(step, args=ocp.args.Composite(host=ocp.args.JsonRestore()))["host"]

    def trees(self, step: int) -> set[str]:
        """The names of the trees of ARRAYS that a step holds."""
        return {name for name in ARRAYS if (self.folder / str(step) / name).is_dir()}

    def restore_arrays(self, step: int, like: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
        """The trees of `like` that the step holds, by name, sharded over `mesh`.

        None in place of a tree takes the one that was saved. Raises ConfigError when one cannot be read or has other
        shapes.
        """
        held, name = self.trees(step), self.folder / str(step)
        named = {part: tree for part, tree in like.items() if part in held}
        if not named:
            return {}
        other = "Go on with the settings of algorithm and rollout that the run had, or use checkpoint.resume=never"
        for part, tree in named.items():
            if tree and (found := difference(self._shapes(step, part), tree)):
                raise ConfigError(
                    f"the {part} of checkpoint {name} has other arrays than this run's: {found[1]}. {other}"
                )
        items = {
            part: ocp.args.StandardRestore(tree and over(jax.eval_shape(lambda tree=tree: tree), mesh))
            for part, tree in named.items()
        }
        with _reading(f"the {' and the '.join(named)} of checkpoint {name} cannot be restored", other):
            restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        return {part: restored[part] for part in named}

    def restore_params(self, step: int, shapes: Params, mesh: Mesh, critic: bool = False) -> Params:
        """The parameters of a step alone, or of its `critic`, sharded over `mesh`; nothing else of the state is read.

        Raises ConfigError when the checkpoint cannot be read or holds others than those of `shapes`.
        """
        tree: dict[str, Any] = {"params": over(shapes, mesh)}
        held = self._parameters(step, {"critic": tree})["critic"] if critic else self._parameters(step, tree)
        return held["params"]

    def restore_models(self, step: int, like: State, mesh: Mesh) -> tuple[Params, Params | None]:
        """The trained parameters of a step, and those of its critic, or None without one, as `restore` gives them.

        A critic is left where `like` has none, see `warnings`. Raises ConfigError when the checkpoint cannot be read or
        holds others than those of `like`.
        """
        held = {"params": like.params} | ({} if like.critic is None else {"critic": {"params": like.critic.params}})
        restored = self._parameters(step, in_memory_of(held, mesh))
        if like.critic is None and self._shapes(step).get("critic"):
            self._warnings.append(f"the critic of checkpoint {self.folder / str(step)} is left, as this run has none")
        return restored["params"], restored["critic"]["params"] if like.critic is not None else None

    def _parameters(self, step: int, tree: dict[str, Any]) -> dict[str, Any]:
        """The part `tree` of the state of a step: `params`, and `params` of `critic`."""
        name, held = self.folder / str(step), self._shapes(step)
        if "critic" in tree and not held.get("critic"):
            raise ConfigError(
                f"checkpoint {name} has no critic: write its model to a folder (python -m jaxrl_llm export) and train "
                "from that with model.path, and a new critic with it"
            )
        shapes = {key: x if key == "params" else {"params": x["params"]} for key, x in held.items() if key in tree}
        self._check_arrays(step, tree, shapes)
        args = ocp.args.PyTreeRestore(tree, ocp.checkpoint_utils.construct_restore_args(tree), partial_restore=True)
        unreadable = _reading(f"the parameters of checkpoint {name} cannot be read")
        with unreadable, ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            return reader.restore(name / "state", args=args)

    def _check_arrays(self, step: int, tree: dict[str, Any], shapes: dict[str, Any]) -> None:
        """Raises ConfigError where the arrays of a step, of these shapes, are not those of `tree`: Orbax lists two
        trees, or would drop what is left over and leave the place of what is missing empty."""
        if (found := difference(shapes, tree)) is None:
            return
        path, words = found
        what = "trained parameters than model.path, model.trainable and lora ask for"
        back = "them as its run had them"
        way_out = "a run begins from its model, written to a folder (python -m jaxrl_llm export), as model.path"
        if "opt_state" in path.split("/"):
            what = "moments than the optimizer of this run"
            back = (
                "optimizer.name as its run had it, and max_grad_norm, weight_decay_end and the b1 of sgd to none or 0 "
                "only where they were"
            )
            way_out = "a new optimizer begins with checkpoint.load=model,extra"
        raise ConfigError(f"checkpoint {self.folder / str(step)} holds other {what}: {words}. Set {back}; or {way_out}")

    def _shapes(self, step: int, part: str = "state") -> dict[str, Any]:
        """The shapes of the state of a step, or of another tree that it holds, in their tree."""
        name = self.folder / str(step)
        with _reading(f"checkpoint {name} cannot be read"):
            tree: Any = ocp.PyTreeCheckpointHandler().metadata(epath.Path(name / part)).tree
        return tree


def located(path: str | Path) -> tuple[Checkpoints, int | None]:
    """The checkpoints and the step that `path` names: RUN/checkpoints/STEP, or RUN/checkpoints or RUN, and None, for
    the newest. Raises ConfigError when there is none."""
    folder, step = path_of(path), None
    held = [x.name for x in folder.iterdir()] if folder.is_dir() else []
    if folder.name.isdigit() and not any(name == "checkpoints" or name.isdigit() for name in held):  # as a run may be
        folder, step = folder.parent, int(folder.name)
    folder = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    checkpoints = Checkpoints(folder, read_only=True) if folder.is_dir() else None
    steps = checkpoints.steps() if checkpoints else []
    if checkpoints is None or not steps or (step is not None and step not in steps):
        there = f"there are steps {', '.join(map(str, steps))}" if steps else "no checkpoint is there"
        raise ConfigError(
            f"checkpoint.resume is {str(path)!r}, but {there}; give auto (the newest in output_dir), never or "
            "RUN/checkpoints/STEP"
        )
    return checkpoints, step


def find(path: str | Path) -> tuple[Checkpoints, int, list[str]]:
    """The checkpoints and the intact step that `path` names (see `located`), and the faults of later steps.

    Raises ConfigError when there is none, or the step that is named is damaged.
    """
    checkpoints, step = located(path)
    if step is None:
        step, problems = checkpoints.newest_intact()
        assert step is not None
        return checkpoints, step, problems
    checkpoints.check(step)
    return checkpoints, step, []


@contextlib.contextmanager
def _reading(problem: str, way_out: str = "") -> Iterator[None]:
    """Raises ConfigError, with the problem, its cause and a way out, for files that Orbax cannot read."""
    try:
        yield
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError("\n".join(filter(None, (f"{problem}: {error}", way_out)))) from error


def _words(error: Exception) -> str:
    """The reason of a failed save in a line."""
    code = re.search(r"os_error_code='(\d+)'", str(error))  # TensorStore's messages name long paths before it
    if code:
        return f"[Errno {code[1]}] {os.strerror(int(code[1]))}"
    return " ".join(str(error).split())[:400] or type(error).__name__
