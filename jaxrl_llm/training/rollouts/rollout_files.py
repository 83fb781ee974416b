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
whole every sixteenth time; of a batch each learner reads the share of its own rows. The learners' side is `FileQueue`
(file_queue.py), the samplers' sampler.py.
"""

import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.resolve import exit_code
from jaxrl_llm.distributed.sharding import gathered
from jaxrl_llm.models.files.weight_changes import ENCODING, apply, as_bytes, changes
from jaxrl_llm.models.net import Params

log = logging.getLogger(__name__)

FOLDER, START, JOBS, LEARNER = "rollouts", "start.json", "jobs.json", "learner.json"
FULL = (errno.ENOSPC, errno.EDQUOT)
OWN = uuid.uuid4().hex[:12]  # of this process: containers have the same process ids
POLL_SECONDS = 0.1
ROOM_SECONDS = 5.0  # between two tries to write to a full disk
AT_ONCE = 1 << 28  # bytes of an array that are copied to all devices at once
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
    """The arrays of a policy by path, copied to the host in the first process, and {} in the others; every learner must
    call it.

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
        """Read the file, and return False where it has not changed for too long."""
        facts, now = read_facts(self._path), time.monotonic()
        if facts and facts != self.facts:
            self.facts, self._changed, self.seen = facts, now, True
        limit = self._rendezvous.silence_seconds if self.seen else self._rendezvous.start_seconds
        return now - self._changed <= limit

    @property
    def failed(self) -> bool:
        """True for an error of this process, and not of one before it, in whose place this one has started."""
        return "error" in self.facts and (self.seen or time.monotonic() - self._changed > ERROR_SECONDS)


def start_learners(rendezvous: Rendezvous) -> Heartbeat:
    """The sign of life of the learners."""
    return Heartbeat(rendezvous.folder / LEARNER, rendezvous.silence_seconds)
