"""Rollouts from processes that only sample: the files by which they and the learners meet.

All is in `output_dir/rollouts`, which every process reaches. Each start of the learners has a folder of its own there,
so that nothing of a run that was killed is ever read:

| file | written by | holds |
|---|---|---|
| `start.json` | learner 0 | the name of the folder, the settings of the run, and the shares of a batch |
| `learner.json`, `sampler_R.json` | each | a sign of life; of a sampler its newest batch, or its error |
| `FOLDER/jobs.json` | learner 0 | the policies, the newest step that was taken; at the end the exit code and error |
| `FOLDER/policy_V_A_B` | learner 0 | the policy of V updates, by which batches A to B are sampled |
| `FOLDER/batch_K` | sampler K mod R | the batch of step K with texts, log-probs and rewards, in shares |

A file gets its name when it is complete, and its checksum is compared when it is read. None is looked for before one
that is there always names it: a client of NFS believes for up to a minute (acdirmax, nfs(5)) that a name which it did
not find is not there. A policy is written as what differs from the file before (`models/files/weight_changes.py`), and
whole every sixteenth time; of a batch each learner reads the share of its own rows. Which policy samples which batch is
that of `RolloutQueue`, whatever the timing. A checkpoint holds the batches that are made and not trained on yet, as
that of one process does: a run that goes on needs no file of these.
"""

import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import shutil
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.resolve import exit_code
from jaxrl_llm.data.pipeline import Pipeline
from jaxrl_llm.distributed import processes
from jaxrl_llm.distributed.processes import AgreedError
from jaxrl_llm.distributed.row_groups import RowGroup
from jaxrl_llm.distributed.sharding import gathered
from jaxrl_llm.models.adapters.lora import split
from jaxrl_llm.models.files.weight_changes import ENCODING, apply, as_bytes, changes
from jaxrl_llm.models.net import Params
from jaxrl_llm.training.checkpoint.outputs import writing
from jaxrl_llm.training.logging.stopwatch import Stopwatch
from jaxrl_llm.training.rollouts.experience import Rollouts, joined, pack, placed, placed_share, unpack, unpacked_queue
from jaxrl_llm.training.rollouts.rollout_queue import Produce

log = logging.getLogger(__name__)

FOLDER, START, JOBS, LEARNER = "rollouts", "start.json", "jobs.json", "learner.json"
FULL = (errno.ENOSPC, errno.EDQUOT)
OWN = uuid.uuid4().hex[:12]  # of this process: containers have the same process ids
POLL_SECONDS = 0.1
ROOM_SECONDS = 5.0  # between two tries to write to a full disk
AT_ONCE = 1 << 28  # bytes of an array that are copied to all devices at once
WHOLE_EVERY = 16  # policies: a sampler that starts late reads at most so many files
WHOLE_FROM = 0.5  # the share of an array's numbers: of 32 bits nearly all change, and packing costs more than it saves
LOST_CODE = 1  # of a run that has lost a process: a job manager starts it again
ERROR_SECONDS = 60.0  # within which a process that is started again replaces the error of the one before


class Rendezvous(NamedTuple):
    """The folder by which `samplers` processes and the learners meet, and how long each waits for a sign of life."""

    folder: Path
    samplers: int
    start_seconds: float  # for the first
    silence_seconds: float  # for each that follows


def write_file(
    path: Path, header: dict[str, Any], parts: bytes | Sequence[bytes] = b"", wait_seconds: float = 0.0
) -> None:
    """Write `header` and the parts under the name, which the file has once it is complete.

    Waits so long for room on a disk that is full, and raises ConfigError where none comes; 0 raises OSError.
    """
    parts = [parts] if isinstance(parts, bytes) else parts
    header = {**header, "parts": [[len(part), hashlib.sha256(part).hexdigest()] for part in parts]}
    temporary, began, warned = path.with_name(f".{path.name}.{OWN}"), time.monotonic(), False
    while True:
        try:
            with temporary.open("wb") as file:
                file.write(json.dumps(header).encode() + b"\n")
                file.writelines(parts)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            return
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)  # it takes room
            if error.errno not in FULL or not wait_seconds:
                raise
            if (left := began + wait_seconds - time.monotonic()) <= 0:
                raise ConfigError(
                    f"{path} cannot be written: {error.strerror}; make room, or set another output_dir"
                ) from error
            if not warned:
                log.warning("%s cannot be written: %s; waiting %.0f s for room", path, error.strerror, wait_seconds)
            warned = True
            time.sleep(min(left, ROOM_SECONDS))


def read_file(path: Path, part: int = 0) -> tuple[dict[str, Any], bytes]:
    """Header and one part; raises ConfigError when they are not as they were written, OSError without the file."""
    for more in (2, 1, 0):
        try:
            with path.open("rb") as file, contextlib.suppress(ValueError, TypeError, LookupError):
                header = json.loads(file.readline())
                parts = header.pop("parts")
                file.seek(sum(size for size, _ in parts[:part]), os.SEEK_CUR)
                found = file.read(parts[part][0])
                if hashlib.sha256(found).hexdigest() == parts[part][1]:
                    return header, found
            break
        except OSError as error:  # NFS: another machine has replaced the file since it was opened
            if error.errno != errno.ESTALE or not more:
                raise
    raise ConfigError(f"{path} is damaged: start the run again, which goes on from its newest checkpoint")


def read_facts(path: Path) -> dict[str, Any]:
    """The header of a file, {} where there is none."""
    try:
        return read_file(path)[0]
    except FileNotFoundError:
        return {}


def policy_on_host(params: Params) -> dict[str, np.ndarray]:
    """The arrays of a policy by path, copied to this host, {} but on the first process; every learner must call it.

    What several processes have parts of comes by way of the devices, each of which then has all of it: of a large stack
    of layers one after another.
    """
    arrays, first = {}, jax.process_index() == 0
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        in_turn = not x.is_fully_addressable and x.ndim > 2 and x.nbytes > AT_ONCE
        parts = (gathered(x[number]) for number in range(len(x))) if in_turn else [gathered(x)]
        whole = np.empty(x.shape if first else 0, x.dtype)  # a copy: the next update writes over `params`
        for number, part in enumerate(parts):
            if first:
                whole[number if in_turn else ...] = part
        if first:
            arrays[jax.tree_util.keystr(path)] = whole
    return arrays


def policy_changes(arrays: dict[str, np.ndarray], base: dict[str, np.ndarray]) -> tuple[list[Any], bytes, int]:
    """Path, type, shape, bytes and checksum of each array; what has changed since `base`; how many numbers have.

    An array that `base` lacks, or of which more than WHOLE_FROM has changed, is there whole (-1 bytes).
    """
    index, parts, total = [], [], 0
    for change in changes(arrays.items(), {path: as_bytes(x) for path, x in base.items()}, WHOLE_FROM):
        array, size = arrays[change.name], -1 if change.packed is None else len(change.packed)
        index.append([change.name, str(array.dtype), list(array.shape), size, change.checksum])
        parts.append(change.new if change.packed is None else change.packed)
        total += change.changed
    return index, b"".join(parts), total


def read_policy(path: Path, held: str, arrays: dict[str, np.ndarray]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Header and arrays of a policy; `arrays` are those of the file `held`, and stay as they are.

    A file of changes is read after the one that it changes, unless that is `held`. Raises ConfigError for changes that
    another version of this library wrote.
    """
    header, payload = read_file(path)
    if header.get("encoding") != ENCODING:
        raise ConfigError(
            f"{path} is encoded as {header.get('encoding')}, and what can be read is {ENCODING}: start all processes "
            "with the same command and packages"
        )
    if header["base"] and str(path.with_name(header["base"])) != held:
        arrays = read_policy(path.with_name(header["base"]), held, arrays)[1]
    read, changed, start = {}, [], 0
    for name, dtype, shape, size, checksum in header["arrays"]:
        if size < 0:
            read[name] = np.frombuffer(payload, jnp.dtype(dtype), math.prod(shape), start).reshape(shape)
        else:
            read[name] = arrays[name].copy() if size else arrays[name]
        if size > 0:
            changed.append((name, memoryview(payload)[start : start + size], checksum, as_bytes(read[name])))
        start += read[name].nbytes if size < 0 else size
    try:
        apply(changed)
    except ValueError as error:
        raise ConfigError(f"{path} changes another policy than {header['base']}: {error}") from error
    return header, read


def policy_params(arrays: dict[str, np.ndarray], like: Params) -> Params:
    """The parameters on devices, in the types and shardings of `like`; ConfigError for those of another model."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    own = [(jax.tree_util.keystr(path), x.dtype, x.shape) for path, x in leaves]
    if own != [(name, x.dtype, x.shape) for name, x in arrays.items()]:
        raise ConfigError(
            "the learners' policy has other parameters than the model that this process has loaded: start all "
            "processes with the same command, packages and files of the model"
        )
    placed = (jax.device_put(arrays[name], x.sharding) for (name, _, _), (_, x) in zip(own, leaves, strict=True))
    return jax.tree.unflatten(structure, placed)


class Heartbeat:
    """A sign of life in a file, written anew in a thread while the block runs, with the facts that `update` gives."""

    def __init__(self, path: Path, silence_seconds: float):
        self._path, self._pause = path, min(silence_seconds / 10, 5.0)
        self._facts: dict[str, Any] = {"process": uuid.uuid4().hex}
        self._number, self._ended, self._lock = 0, threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._beat, name="sign of life", daemon=True)

    def __enter__(self) -> "Heartbeat":
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.update()
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._ended.set()
        self._thread.join()
        if isinstance(error, Exception | SystemExit):
            with contextlib.suppress(OSError):  # the error itself is shown
                self.update(error=f"{type(error).__name__}: {error}", code=exit_code(error))

    def update(self, **facts: Any) -> None:
        """Write the facts, beside those of earlier calls."""
        with self._lock:
            self._facts |= facts
            self._number += 1
            write_file(self._path, {**self._facts, "number": self._number})

    def _beat(self) -> None:
        while not self._ended.wait(self._pause):
            with contextlib.suppress(OSError):  # a disk that is full for a moment; others see the silence
                self.update()


class HeartbeatReader:
    """The newest facts that another process wrote as a `Heartbeat`, and a verdict on whether it is lost.

    They are `seen` once they have changed: those that were there before may be of a process that is gone.
    """

    def __init__(self, path: Path, rendezvous: Rendezvous):
        self._path, self._rendezvous = path, rendezvous
        self.facts = read_facts(path)
        self._changed, self.seen = time.monotonic(), False

    def look(self) -> bool:
        """Read the file; False where it has not changed for too long."""
        facts, now = read_facts(self._path), time.monotonic()
        if facts and facts != self.facts:
            self.facts, self._changed, self.seen = facts, now, True
        limit = self._rendezvous.silence_seconds if self.seen else self._rendezvous.start_seconds
        return now - self._changed <= limit

    @property
    def failed(self) -> bool:
        """True for an error that is none of a process before, in whose place another one starts."""
        return "error" in self.facts and (self.seen or time.monotonic() - self._changed > ERROR_SECONDS)


def start_learners(rendezvous: Rendezvous) -> Heartbeat:
    """The sign of life of the learners."""
    return Heartbeat(rendezvous.folder / LEARNER, rendezvous.silence_seconds)


class FileQueue:
    """The rollouts of each step in turn, from processes that only sample; the learners' side, as `RolloutQueue`.

    pipeline: of the learners, which goes as far as the samplers'. publish: the policy in the type that decodes;
    `frozen` names the parts of it that never change. facts: settings, in which samplers must agree.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        staleness: int,
        last_step: int,
        publish: Callable[[Params], Params],
        frozen: tuple[str, ...],
        pipeline: Pipeline,
        facts: dict[str, Any],
        mesh: Mesh,
        watch: Stopwatch,
    ):
        self.staleness = staleness
        self._rendezvous, self._last_step, self._publish, self._frozen = rendezvous, last_step, publish, frozen
        self._pipeline, self._facts, self._mesh, self._watch = pipeline, facts, mesh, watch
        self._queue: deque[int | Rollouts] = deque()  # of the next steps: asked for, or loaded, all rows on the host
        self._policies: list[tuple[int, Path, str]] = []  # the last batch of each, its file, and that which it changes
        self._written: tuple[str, dict[str, np.ndarray]] = "", {}  # the newest file, and the arrays that it stands for
        self._asked = 0  # policies so far
        self._seconds: dict[int, dict[str, float]] = {}
        self._first = jax.process_index() == 0
        self._folder, self._jobs = rendezvous.folder, dict[str, Any](policies=[], taken=0)

    def __enter__(self) -> "FileQueue":
        self._folder = self._rendezvous.folder / processes.gather(uuid.uuid4().hex)[0]
        with processes.all_or_none():
            if self._first:
                for path in self._rendezvous.folder.iterdir():
                    if path.is_dir():
                        shutil.rmtree(path, ignore_errors=True)  # of an earlier start
                self._folder.mkdir()
                self._write_jobs()
                start = {"folder": self._folder.name, "settings": self._facts, "shares": RowGroup.of(self._mesh).count}
                start["learner"] = read_facts(self._rendezvous.folder / LEARNER)["process"]
                write_file(self._rendezvous.folder / START, start)
        files = [self._rendezvous.folder / f"sampler_{index}.json" for index in range(self._rendezvous.samplers)]
        self._readers = [HeartbeatReader(file, self._rendezvous) for file in files]
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self._first:
            return
        code = 0 if error is None else exit_code(error)
        with contextlib.suppress(OSError):  # the error itself is shown, and samplers see that the learners are silent
            self._write_jobs(0.0, end={"code": code, "error": "" if error is None else str(error)})
            for path in self._folder.iterdir():
                if path.name != JOBS:
                    path.unlink(missing_ok=True)
            for path in self._rendezvous.folder.glob("sampler_*.json"):
                if "error" in read_facts(path):  # it has been shown
                    path.unlink(missing_ok=True)

    def take(self, produce: Produce, params: Params, version: int, key) -> tuple[Rollouts, dict[str, Any]]:
        """The batch of step `version + 1`, and metrics of the queue; `params` are those after `version` steps."""
        del produce, key  # the samplers have their own
        newest, last = version + len(self._queue), min(version + 1 + self.staleness, self._last_step)
        metrics = {}
        if newest < last:
            with self._watch("publish"):
                metrics = self._ask(params, version, newest + 1, last)
        step = version + 1
        for reader in self._readers:
            reader.look()
        ready = sum(not isinstance(x, int) or self._is_made(x) for x in self._queue)
        with self._watch("rollout_wait"):
            rollouts = self._queue.popleft()
            if isinstance(rollouts, int):
                rollouts = self._read(step, RowGroup.of(self._mesh).index)
                rollouts = placed_share(rollouts, self._mesh)
            else:
                rollouts = placed(rollouts, self._mesh)
        if self._first:
            # Files of changes need those before them, back to a whole one: as far as a batch is still to come of them.
            done = sum(last <= step for last, _, _ in self._policies)
            wholes = [place for place, (_, _, base) in enumerate(self._policies[: done + 1]) if not base]
            gone = self._policies[: max(wholes, default=0)]  # none of a queue that a checkpoint filled
            self._policies = self._policies[len(gone) :]
            with writing(self._folder):
                self._write_jobs(taken=step)  # before the files go: a new sampler makes no such batch
            for path in (self._path(step), *(path for _, path, _ in gone)):
                path.unlink(missing_ok=True)
        metrics |= {"rollout/age": np.float32(version - rollouts.version), "rollout/queue": np.float32(ready)}
        return rollouts, metrics | self._seconds.pop(step, {})

    def rest(self) -> None:
        """Nothing: what samples is elsewhere."""

    def get_arrays(self) -> dict[str, Any]:
        """The batches of the queue as the tree of arrays that a checkpoint holds, by name; waits for them."""
        with self._watch("rollout_wait"):
            batches = [self._read(batch) if isinstance(batch, int) else batch for batch in self._queue]
        self._queue = deque(batches)
        return {"queue": {"bytes": pack(batches)}} if batches else {}

    def restore(self, arrays: dict[str, Any]) -> None:
        """Take up the batches that `arrays` hold; rows are placed when they are taken."""
        self._queue = deque(unpacked_queue(arrays))

    def _path(self, step: int) -> Path:
        return self._folder / f"batch_{step:08d}"

    def _write_jobs(self, wait_seconds: float | None = None, **facts: Any) -> None:
        """Write the facts, beside those of earlier calls, and the names of the policies to where samplers look."""
        self._jobs |= {**facts, "policies": [path.name for _, path, _ in self._policies]}
        waits = self._rendezvous.silence_seconds if wait_seconds is None else wait_seconds
        write_file(self._folder / JOBS, self._jobs, wait_seconds=waits)

    def _is_made(self, step: int) -> bool:
        """True once the sampler of a step says, in the newest sign of life that was looked at, that its batch is
        there."""
        facts = self._readers[step % self._rendezvous.samplers].facts
        return facts.get("folder") == self._folder.name and facts.get("made", 0) >= step

    def _ask(self, params: Params, version: int, first: int, last: int) -> dict[str, np.float32]:
        """Have the batches of the steps sampled by the policy, of the prompts that come next; metrics of its file."""
        arrays, metrics = policy_on_host(split(self._publish(params), self._frozen)[1]), {}
        with processes.all_or_none(), writing(self._folder):
            if self._first:
                path = self._folder / f"policy_{version:08d}_{first:08d}_{last:08d}"
                base, before = self._written if self._asked % WHOLE_EVERY else ("", {})
                index, payload, changed = policy_changes(arrays, before)
                if base:
                    metrics["weights/changed_share"] = np.float32(changed / sum(x.size for x in arrays.values()))
                    metrics["weights/written_share"] = np.float32(len(payload) / sum(x.nbytes for x in arrays.values()))
                facts = {"arrays": index, "base": base, "encoding": ENCODING, "pipeline": self._pipeline.get_state()}
                write_file(path, facts, payload, self._rendezvous.silence_seconds)
                self._policies.append((last, path, base))
                self._written, self._asked = (path.name, arrays), self._asked + 1
                self._write_jobs()
        for step in range(first, last + 1):
            next(self._pipeline)
            self._queue.append(step)
        return metrics

    def _read(self, step: int, share: int | None = None) -> Rollouts:
        """A share of the rows of a step, all of them without a number, on the host, once they are there.

        Raises ConfigError for a sampler that has failed, or shows no sign of life, which is no error of the user's.
        """
        index = step % self._rendezvous.samplers
        with processes.all_or_none():
            while not self._is_made(step):
                reader, name = self._readers[index], f"sampler {index} of {self._rendezvous.samplers}"
                alive = reader.look()
                if reader.failed:
                    error, code = reader.facts["error"], reader.facts.get("code") or LOST_CODE
                    raise AgreedError(f"{name}, which was to make the batch of step {step}: {error}", code)
                if not alive:
                    raise AgreedError(
                        f"{name}, which was to make the batch of step {step}, shows no sign of life in "
                        f"{self._rendezvous.folder}: it was killed, its machine is lost, or it does not reach that "
                        "folder, or finds no room there. Start the run again, which goes on from its newest "
                        "checkpoint; a sampler alone that is started again within "
                        f"{self._rendezvous.silence_seconds:g} s (processes.heartbeat_seconds) goes on too",
                        LOST_CODE,
                    )
                if not self._is_made(step):
                    time.sleep(POLL_SECONDS)
            numbers = range(RowGroup.of(self._mesh).count) if share is None else (share,)
            read = [read_file(self._path(step), number) for number in numbers]
            rollouts = joined([unpack(np.frombuffer(payload, np.uint8))[0] for _, payload in read])
        self._seconds[step] = read[0][0]["seconds"]
        return rollouts
