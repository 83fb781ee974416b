"""The event loop of async reward functions: one thread, kept for the run, in which all of a batch wait together.

It is kept because clients that a grader opens in `setup` belong to the loop they were opened in.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any

from jaxrl_llm.rewards.calls import Call, Ended, Log, TimeUpError, rows_ended

GRACE_SECONDS = 1.0  # cancelled functions get this long to end before the loop counts as blocked


class Loop:
    """An event loop in a daemon thread, started when it is first used.

    The caller may have a running event loop itself (a notebook does), hence the thread.
    """

    def __init__(self):
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future:
        """The future of a coroutine that starts now."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True, name="async rewards").start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, Any], seconds: float | None = None) -> Any:
        """What a coroutine returns or raises. Raises TimeUpError after `seconds`, and leaves a blocked loop behind."""
        future = self.start(coroutine)
        concurrent.futures.wait([future], seconds)
        if future.done():
            return future.result()
        future.cancel()
        self._loop = None
        raise TimeUpError

    def begin(self, call: Call, timeout: float | None) -> "Begun":
        """An async call that rows are added to, where it takes them one by one, and that `start` starts."""
        return Begun(self, call, timeout)

    def close(self) -> None:
        """Ends the thread; the loop may be used again, with a new one."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


class Begun:
    """An async call: of rows, each running from `add` on, or of the whole batch from `start` on."""

    def __init__(self, loop: Loop, call: Call, timeout: float | None):
        self.loop, self.call, self.timeout = loop, call, timeout
        self.results: dict[int, Any] = {}
        self.errors: dict[int, Exception] = {}
        self.logs: dict[int, Log] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self.future: concurrent.futures.Future[None] | None = None

    def add(self, index: int) -> None:
        """Starts a row."""
        self.loop.start(self._begin(index))

    def start(self) -> None:
        """Starts the batch, or says that every row has been added; the time limit counts from here."""
        if not self.call.one_by_one:
            self.add(0)
        self.future = self.loop.start(self._all())

    def result(self) -> Ended:
        """How the call ended, once it does."""
        assert self.future is not None
        # A function that blocks the loop never sees its cancellation: the loop is left behind with its thread.
        patience = None if self.timeout is None else self.timeout + GRACE_SECONDS
        concurrent.futures.wait([self.future], patience)
        if not self.future.done():
            self.future.cancel()
            self.loop._loop = None
        elif error := self.future.exception():
            raise error
        results, errors = dict(self.results), dict(self.errors)
        if self.call.one_by_one:
            self.call.log.join({row: self.logs[row] for row in results | errors}, self.call.rows)
            return rows_ended(self.call.rows, results, errors)
        if errors:
            return Ended(error=errors[0])
        return Ended(results[0]) if results else Ended(late=True)

    async def _all(self) -> None:
        if not self.tasks:
            return
        done, late = await asyncio.wait(self.tasks, timeout=self.timeout)
        for task in late:
            task.cancel()
        for task in done:
            task.result()

    async def _begin(self, index: int) -> None:
        self.tasks.append(asyncio.create_task(self._one(index)))

    async def _one(self, index: int) -> None:
        log = self.logs[index] = Log()
        try:
            self.results[index] = await (self.call.graded(index, log) if self.call.one_by_one else self.call())
        except Exception as error:
            self.errors[index] = error
