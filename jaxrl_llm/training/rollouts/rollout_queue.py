"""`RolloutQueue`: batches of rollouts that a thread makes while earlier ones are trained on.

The schedule is fixed: the batch of step k is sampled from the policy of max(0, k - 1 - staleness) steps, however long
anything takes. So a run has one result, whatever its timing (with `Arrivals`: given these), and a checkpoint holds the
batches that are made and not trained on yet. They are small beside the state, and what they cost (environments, judges)
is not spent twice; sampling them again would take the policies that made them, which no longer exist.
"""

import contextlib
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.config.background import in_thread, leave_behind
from jaxrl_llm.distributed.processes import beside
from jaxrl_llm.distributed.row_groups import RowGroup
from jaxrl_llm.distributed.sharding import resharding, shardings
from jaxrl_llm.distributed.turns import turn, yielded
from jaxrl_llm.models.adapters.lora import combine, split
from jaxrl_llm.models.net import Params
from jaxrl_llm.training.logging.stopwatch import Stopwatch
from jaxrl_llm.training.rollouts.arrivals import Arrivals
from jaxrl_llm.training.rollouts.experience import Rollouts, on_mesh, packed_queue, placed_queue

log = logging.getLogger(__name__)

LEAVE_SECONDS = 10.0  # after an error, for the batch under way to end

Produce = Callable[[Params, int, int, Any], Rollouts]


class TimedRollouts(NamedTuple):
    """A batch of the queue, and where the seconds of the thread that made it went, as metrics."""

    rollouts: Rollouts
    seconds: dict[str, float]


class RolloutQueue:
    """The rollouts of each step in turn; a context manager, behind which no batch is made.

    produce: `(params, version, step, key)` makes the batch of a step by the policy of `version` steps. staleness:
    updates between the policy that samples a batch and the one that is updated with it; with 0 `take` makes each batch
    itself, and there is no thread. last_step: of the run. key_of: the key of a step. publish: the policy's parameters
    in arrays that no update donates. mesh: that samples. train_mesh: that trains, the same or one of other devices;
    then a program of these gives each policy, in the type that decodes, the shards that it has on `mesh`, to which they
    are copied, and rows are moved back. watch: of the thread that takes. own_watch: of the one that makes. arrivals:
    what comes to batches while they are made; where policies do, each is published there, and none is kept for a batch.
    own_params: gives parameters to `mesh` where that is this process's part of those of several; then each makes its
    own rows of a batch, and its thread starts no program of all, which would have to come in one order with the
    updates.

    An error of what makes a batch is raised by the `take` or `rest` that meets it, and no further batch is made. The
    exit waits for the batch under way. After an error, or Ctrl-C, it waits no longer than LEAVE_SECONDS and leaves the
    thread behind: what that waits for may be a reward function that takes minutes.
    """

    def __init__(
        self,
        produce: Produce,
        staleness: int,
        last_step: int,
        key_of: Callable[[int], Any],
        publish: Callable[[Params], Params],
        mesh: Mesh,
        train_mesh: Mesh,
        watch: Stopwatch,
        own_watch: Stopwatch,
        arrivals: Arrivals | None = None,
        own_params: Callable[[Params], Params] | None = None,
    ):
        self.staleness, self._produce = staleness, produce
        self._arrivals = arrivals
        self._last_step, self._key_of, self._publish = last_step, key_of, publish
        self._mesh, self._train_mesh, self._watch, self._own_watch = mesh, train_mesh, watch, own_watch
        self._apart = mesh.device_ids.tolist() != train_mesh.device_ids.tolist()
        self._own_params = own_params
        self._frozen: Params | None = None  # on the mesh that samples
        self._reshard: Callable[[Params], Params] | None = None
        self._queue: deque[Future[TimedRollouts]] = deque()  # the batches of the next steps, in order
        self._error: BaseException | None = None  # of a thread, or of the end
        self._idle_since: float | None = None
        meet = staleness and mesh.size > 1 and (own_params is not None or not self._apart)
        self._turn = turn() if meet else contextlib.nullcontext()

    def __enter__(self) -> "RolloutQueue":
        self._turn.__enter__()
        if self._arrivals is not None:
            self._arrivals.open()
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        self._turn.__exit__(None, None, None)
        if self._arrivals is not None:
            self._arrivals.rest(True)
        self._error = self._error or CancelledError("the run has ended")
        if left := wait(self._queue, LEAVE_SECONDS if failed else None).not_done:
            leave_behind(left)
            log.warning("a batch is still sampled and graded: it is left behind, with the memory that it takes")

    def take(self, params: Params, version: int, key) -> tuple[Rollouts, dict[str, Any]]:
        """The batch of step `version + 1`, and metrics of the queue; `params` are those after `version` steps.

        Batches of the steps up to `version + 1 + staleness` are made of these parameters, unless they are in the queue.
        """
        if not self.staleness and not self._queue:
            if self._apart:
                params = self._published(params)
            return self._rollouts(params, version, version + 1, key), {}
        newest, last = version + len(self._queue), min(version + 1 + self.staleness, self._last_step)
        in_flight = self._arrivals is not None and self._arrivals.in_flight
        if newest < last or (in_flight and not all(future.done() for future in self._queue)):
            params = self._published(params)
            if self._arrivals is not None and in_flight:
                self._arrivals.publish(version, params)
                params = {}  # which batches take from there
            for step in range(newest + 1, last + 1):
                before = weakref.ref(self._queue[-1]) if self._queue else None  # whose result others may let go
                make = partial(self._make, before, params, version, step)
                self._queue.append(in_thread(make, "rollouts"))
        ready = sum(future.done() for future in self._queue)
        with self._watch("rollout_wait"), yielded():
            made = self._queue[0].result()
        self._queue.popleft()
        age = np.float32(version - made.rollouts.version)
        return made.rollouts, {"rollout/age": age, "rollout/queue": np.float32(ready), **made.seconds}

    def rest(self) -> None:
        """Wait until all batches are made that can be: from then to the next `take` only the caller's thread works."""
        if not self._queue:
            return
        if self._arrivals is not None:
            self._arrivals.rest(True)
        with self._watch("rollout_wait"), yielded():
            for future in self._queue:
                future.result()
        if self._arrivals is not None:
            self._arrivals.rest(False)

    def get_arrays(self) -> dict[str, Any]:
        """The batches of the queue as the tree of arrays that a checkpoint holds, by name."""
        self.rest()
        return packed_queue([future.result().rollouts for future in self._queue], RowGroup.of(self._train_mesh))

    def restore(self, arrays: dict[str, Any]) -> None:
        """Take up the batches that `arrays` hold, their rows sharded over the mesh that trains."""
        self._queue.clear()
        for batch in placed_queue(arrays, self._train_mesh):
            future: Future[TimedRollouts] = Future()
            future.set_result(TimedRollouts(batch, {}))
            self._queue.append(future)
        if self._arrivals is not None:
            self._arrivals.resume()

    def _published(self, params: Params) -> Params:
        """The parameters in arrays of their own, on the mesh that samples; what is frozen is moved there once."""
        params = self._publish(params)
        if not self._apart:
            return params
        frozen, trained = split(params)
        here = self._frozen
        if self._own_params is not None:
            here = self._frozen = self._own_params(frozen) if here is None else here
            return combine(here, self._own_params(trained))
        if here is None:
            here = self._frozen = jax.device_put(frozen, shardings(frozen, self._mesh))
        if self._reshard is None:
            self._reshard = resharding(trained, self._train_mesh, self._mesh)
        return combine(here, jax.device_put(self._reshard(trained), shardings(trained, self._mesh)))

    def _rollouts(self, params: Params, version: int, step: int, key) -> Rollouts:
        if self._apart:
            key = jax.device_put(key, NamedSharding(self._mesh, PartitionSpec()))
        if self._arrivals is not None:
            self._arrivals.begin(step, version)
        with jax.set_mesh(self._mesh):
            rollouts = self._produce(params, version, step, key)
        if isinstance(self._error, CancelledError):  # nobody waits: the record may be another run's by now
            raise self._error
        if self._arrivals is not None:
            self._arrivals.end()
        return on_mesh(rollouts, self._train_mesh) if self._apart else rollouts

    def _make(
        self, before: weakref.ref[Future[TimedRollouts]] | None, params: Params, version: int, step: int
    ) -> TimedRollouts:
        """The batch of a step, made once that of the step before is."""
        if before is not None and (future := before()) is not None:
            wait([future])
            del future
        if self._error is not None:  # the data is behind a batch that failed
            raise self._error
        waited = 0.0 if self._idle_since is None else time.perf_counter() - self._idle_since
        try:
            with beside():
                rollouts = self._rollouts(params, version, step, self._key_of(step))
        except BaseException as error:
            self._error = error
            raise
        self._idle_since = time.perf_counter()
        phases = {name.removeprefix("time/"): seconds for name, seconds in self._own_watch.take().items()}
        return TimedRollouts(rollouts, {f"producer/{name}": x for name, x in {**phases, "wait": waited}.items()})
