"""The request queue: one thread that owns the devices, and decodes whatever rows are asked for at the time.

Between two chunks of decode steps it ends rows that were cancelled, prefills those that wait (first come, first served)
and lets them join the slot grid (running.py). What a row is given depends on its request alone, never on who else is
served, up to the rounding of programs of another size.

The grid decodes with one adapter at a time: a turn of an adapter takes the rows that had been asked for when it began,
and further ones while nobody waits for another.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.serving.errors import lacks_memory
from jaxrl_llm.serving.grid import RowRequest
from jaxrl_llm.serving.handles import Handle, Tokens
from jaxrl_llm.serving.metrics import Counts
from jaxrl_llm.serving.running import Running
from jaxrl_llm.serving.weights import Adapter, Weights

THREAD = "decoding"  # the name of the thread of a queue


class StoppedError(Exception):
    """The queue takes no requests any more, or has failed."""


class RequestQueue:
    """Rows that come and go, decoded side by side in `size` slots.

    `params` are those of the engine's net. The engine has group_size 1; its max_completion_length bounds every row, and
    its sampling and eos do not matter: each request brings its own. shrink and compile_work are of grids of groups.
    """

    def __init__(
        self,
        engine: Engine,
        params: Any,
        size: int,
        mesh: Any = None,
        adapters: Mapping[str, Adapter] | None = None,
        prefix_bytes: int = 0,
        adapts: bool = False,
    ):
        """`adapters` of the net are what `models.model.load_adapter` gives, by the names that requests call them; with
        `adapts` there may be others later.

        Texts that were computed are kept for those that go on with them, in so many bytes; none of a recurrent net.
        """
        self.engine, self.size, self.counts = engine, size, Counts()
        self._weights = Weights(engine, params, mesh, adapters, adapts)
        self.adapters, self._turn = self._weights.adapters, 0.0  # since when that of the weights has its turn
        self._running = Running(engine, self._weights, size, mesh, prefix_bytes, self.counts)
        self._condition = threading.Condition()
        self._waiting: deque[Handle] = deque()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._cancelled: list[Handle] = []
        self._stopping = self._ended = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)

    def clear_counts(self) -> None:
        """Sets all counts to 0."""
        self.counts = self._running.counts = Counts()

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(self, handles: Sequence[Handle]) -> None:
        """Adds rows to those that wait; raises StoppedError when the queue is stopped or has failed."""
        with self._condition:
            if self._weights.released:
                raise StoppedError("there are no weights at the moment")
            if gone := {handle.request.adapter for handle in handles} - {"", *self.adapters}:
                raise StoppedError(f"{gone.pop()} was let go; ask again")
            if self._stopping or self.failure is not None:
                raise StoppedError("the server is stopping" if self.failure is None else f"it failed: {self.failure}")
            self._waiting.extend(handles)
            self.counts.waiting = len(self._waiting)
            self._condition.notify()

    def cancel(self, handles: Sequence[Handle]) -> None:
        """Ends rows before their end: they get no more tokens, and leave their slots before the next chunk."""
        with self._condition:
            for handle in handles:
                handle.cancelled = True
                try:
                    self._waiting.remove(handle)
                    self.counts.cancelled_rows += 1
                except ValueError:  # it has a slot, or gets one now
                    self._cancelled.append(handle)
            self.counts.waiting = len(self._waiting)
            self._condition.notify()

    def replace(self, params: Any) -> None:
        """Takes other parameters of the net, or none where it raises. For functions that `call` has called.

        Rows that go on keep the caches of the earlier ones: a version of weights is `counts.weight_version`.
        """
        self._weights.set(params)
        self.clear_prefixes()
        self.counts.weight_version += 1

    def clear_prefixes(self) -> None:
        """Lets the kept texts go. For functions that `call` has called."""
        self._running.forget_prefixes()

    def release(self) -> None:
        """Lets the parameters and all caches go until the next `replace`; rows that have not ended get no more.

        For functions that `call` has called.
        """
        with self._condition:
            self._weights.release()
            for handle in filter(None, (*self._running.rows, *self._waiting)):
                handle.cancelled = True
            self._running.let_go()
            self._waiting.clear()

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Let the queue's thread, which owns the devices, call a function between two chunks.

        The future has what it returns or raises; where the queue ends before, StoppedError or its failure.
        """
        future: Future[Any] = Future()
        with self._condition:
            if self._ended:
                future.set_exception(self.failure or StoppedError("the queue has stopped"))
            else:
                self._calls.append((function, future))
                self._condition.notify()
        return future

    async def called(self, function: Callable[[], Any]) -> Any:
        """The result of a function that `call` has called; raises what it raises. For coroutines."""
        return await asyncio.wrap_future(self.call(function))

    def forget_adapter(self, name: str) -> bool:
        """Lets an adapter go unless it is in use; True where it did. For functions that `call` has called."""
        with self._condition:
            if any(
                handle.request.adapter == name for handle in (*self._running.rows, *self._waiting) if handle is not None
            ):
                return False
            self._weights.forget(name)
        self._running.forget_prefixes(name)  # there may be another by its name later
        return True

    def set_adapter(self, name: str, adapter: Adapter) -> None:
        """Takes an adapter, or another one by the same name, which rows under way do not see. For functions that `call`
        has called."""
        if name in self.adapters:
            self._running.forget_prefixes(name)
        self._weights.add(name, adapter)

    def stop(self, wait: float | None = None) -> None:
        """Takes no more requests; returns when the rows that were asked for have ended, or after `wait` seconds."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        if self._thread.is_alive():
            self._thread.join(wait)

    def _run(self) -> None:
        try:
            with self._weights.on_mesh():
                self._loop()
        except BaseException as error:
            with self._condition:
                self.failure = error
                pending = dict.fromkeys([*filter(None, self._running.rows), *self._waiting])
                self._waiting.clear()
            self._deliver()
            for handle in pending:
                handle.deliver(error)
            raise
        finally:
            with self._condition:
                self._ended = True
            for _, future in self._calls:  # who waits for a call would wait for ever
                if future.set_running_or_notify_cancel():
                    future.set_exception(self.failure or StoppedError("the queue has stopped"))

    def _loop(self) -> None:
        running = self._running
        while True:
            try:
                if not self._take_requests():
                    return
                decoding = running.dispatch(bool(self._waiting))
                self._deliver()  # while the devices compute
                if decoding:
                    running.collect()
            except Exception as error:
                if not lacks_memory(error):
                    raise
                running.lose(error)

    def _deliver(self) -> None:
        collected, self._running.collected = self._running.collected, []
        for handle, tokens in collected:
            if not handle.cancelled:
                handle.deliver(tokens)

    def _take_requests(self) -> bool:
        """Lets cancelled rows go and waiting ones join; False when the queue is stopped and nothing is left to do."""
        running, weights = self._running, self._weights
        with self._condition:
            while not (running.collected or self._waiting or self._cancelled or self._calls or running):
                if self._stopping:
                    return False
                self._condition.wait()
            cancelled, self._cancelled = set(self._cancelled), []
            calls = list(self._calls)
            self._calls.clear()
        for function, future in calls:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)
        # By the rows, as the slot of a handle that has ended may be another row's by now, or beyond a grid that shrank.
        running.end([slot for slot, handle in enumerate(running.rows) if handle in cancelled])
        with self._condition:
            adapter = weights.adapter
            own = [handle for handle in self._waiting if handle.request.adapter == adapter]
            if weights.stale and running:
                own = []
            if len(own) == len(self._waiting) or (not running and own[:1] == [self._waiting[0]]):
                self._turn = time.monotonic()
            elif not running:
                adapter, self._turn = self._waiting[0].request.adapter, time.monotonic()
                own = [handle for handle in self._waiting if handle.request.adapter == adapter]
            joining, regroups = running.chosen([handle for handle in own if handle.asked <= self._turn])
            for handle in joining:
                self._waiting.remove(handle)
            self.counts.waiting = len(self._waiting)
        try:
            gone = weights.params is None and joining
            if adapter != weights.adapter or gone or (weights.stale and not running):
                weights.turn_to(adapter)
            if regroups:  # those that wait join after a chunk
                running.make_single()
            running.join(joining)
        except BaseException as error:
            if lacks_memory(error):
                running.lose(error, joining)
                return True
            with self._condition:
                self._waiting.extendleft(reversed(joining))  # they are told as those that wait
            raise
        return True


def compile_first(queue: RequestQueue, width: int = 1, sampling: SamplingParams | None = None) -> None:
    """Sample a first row, of a prompt of `width` tokens: it compiles the programs that the next ones need, and shows
    that the model runs here before anyone asks. Raises what sampling it raises."""
    replies: SimpleQueue[Tokens | BaseException] = SimpleQueue()
    limit = min(2, queue.engine.max_completion_length)
    queue.submit([Handle(RowRequest([0] * width, limit, sampling or SamplingParams(), (), 0), replies.put)])
    while not isinstance(reply := replies.get(), BaseException) and reply.finish_reason is None:
        pass
    if isinstance(reply, BaseException):
        raise reply
    queue.clear_counts()
