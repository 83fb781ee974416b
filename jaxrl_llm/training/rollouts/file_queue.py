"""`FileQueue`: the learners' queue of rollouts that processes which only sample make, by files (see rollout_files.py).

Which policy samples which batch is that of `RolloutQueue`, whatever the timing. A checkpoint holds the batches that are
made and not trained on yet, as that of one process does: a run that goes on needs no file of these.
"""

import contextlib
import shutil
import time
import uuid
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.config.resolve import exit_code
from jaxrl_llm.data.pipeline import Pipeline
from jaxrl_llm.distributed import processes
from jaxrl_llm.distributed.processes import AgreedError
from jaxrl_llm.distributed.row_groups import RowGroup
from jaxrl_llm.models.adapters.lora import split
from jaxrl_llm.models.files.weight_changes import ENCODING
from jaxrl_llm.models.net import Params
from jaxrl_llm.training.checkpoint.outputs import writing
from jaxrl_llm.training.logging.stopwatch import Stopwatch
from jaxrl_llm.training.rollouts.experience import Rollouts, joined, pack, placed, placed_share, unpack, unpacked_queue
from jaxrl_llm.training.rollouts.rollout_files import (
    JOBS,
    LEARNER,
    LOST_CODE,
    POLL_SECONDS,
    START,
    HeartbeatReader,
    Rendezvous,
    policy_changes,
    policy_on_host,
    read_facts,
    read_file,
    write_file,
)

WHOLE_EVERY = 16  # policies: a sampler that starts late reads at most so many files


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

    def take(self, params: Params, version: int, key) -> tuple[Rollouts, dict[str, Any]]:
        """The batch of step `version + 1`, and metrics of the queue; `params` are those after `version` steps."""
        del key  # the samplers have their own
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
        """Have the batches of steps `first` to `last` sampled by the policy, from the prompts that come next; returns
        the metrics of its file."""
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
        """The rows of a step on the host, once they are there: the share of that number, or all of them where it is
        None.

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
