"""Calls of rewards in this process: in a thread with a time limit, or on an event loop where many wait together."""

import asyncio
import concurrent.futures
import contextlib
import math
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from jaxrl_llm.config.background import EventLoop, TimeUpError, in_thread
from jaxrl_llm.rewards.call import Call, Log, Outcome

GRACE_SECONDS = 1.0  # cancelled coroutines get this long to end before the event loop counts as blocked
# By time.monotonic(), when nobody waits any more for the reward that runs here: what starts work elsewhere, in other
# threads or processes, ends it then, and raises TimeUpError.
DEADLINE: ContextVar[float] = ContextVar("deadline", default=math.inf)


def within(seconds: float, function: Callable[[], Any]) -> Any:
    """The result of `function` or its error, from a thread that is left behind when it takes more than `seconds`.

    Raises TimeUpError.
    """
    deadline = time.monotonic() + seconds

    def work() -> Any:
        DEADLINE.set(deadline)
        return function()

    future = in_thread(work, "reward")
    concurrent.futures.wait([future], seconds)
    if not future.done():
        raise TimeUpError
    return future.result()


def run_here(call: Call, timeout: float | None) -> Outcome:
    """The outcome of a synchronous call, run in the caller's thread without a time limit, else in one of its own."""
    outcome = Outcome()

    def work() -> None:
        for key in call.keys:
            try:
                outcome.results[key] = call.run(key)
            except TimeUpError:
                return
            except Exception as error:
                outcome.errors[key] = error

    with contextlib.suppress(TimeUpError):
        work() if timeout is None else within(timeout, work)
    return outcome.copy()


class AsyncCall:
    """An async call on the event loop: of rows, each running from `give` on, or of the whole batch from `start` on."""

    def __init__(self, loop: EventLoop, call: Call, timeout: float | None):
        self.loop, self.call, self.timeout = loop, call, timeout
        self.partial = Outcome()
        self.logs: dict[int, Log] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self.all_done: concurrent.futures.Future[None] | None = None
        self.deadline = math.inf

    def give(self, row: int) -> None:
        """Start a function of single rows on a row whose completion is there; a function of the batch waits for
        `start`."""
        if self.call.rowwise:
            self.loop.start(self._create_task(row))

    def start(self) -> None:
        """Start a batch function; every row has been given, and the time limit counts from here."""
        if self.timeout is not None:
            self.deadline = time.monotonic() + self.timeout
        if not self.call.rowwise:
            self.loop.start(self._create_task(0))
        self.all_done = self.loop.start(self._wait_for_tasks())

    def outcome(self) -> Outcome:
        """The outcome of the call, once it has ended or its time is up."""
        assert self.all_done is not None
        # A function that blocks the loop never sees its cancellation, hence the limit on top of that of the tasks.
        if self.loop.wait(self.all_done, None if self.timeout is None else self.timeout + GRACE_SECONDS):
            self.all_done.result()
        outcome = self.partial.copy()
        if self.call.rowwise:
            ended = outcome.results.keys() | outcome.errors.keys()
            self.call.log.extend_rows({row: self.logs[row] for row in ended}, self.call.rows)
        return outcome

    async def _create_task(self, key: int) -> None:
        self.tasks.append(asyncio.create_task(self._run(key)))

    async def _run(self, key: int) -> None:
        log = self.logs[key] = Log()
        DEADLINE.set(self.deadline)
        try:
            self.partial.results[key] = await self.call.run_async(key, log)
        except TimeUpError:
            pass  # it is late
        except Exception as error:
            self.partial.errors[key] = error

    async def _wait_for_tasks(self) -> None:
        if not self.tasks:  # asyncio.wait refuses an empty list
            return
        done, late = await asyncio.wait(self.tasks, timeout=self.timeout)
        for task in late:
            task.cancel()
        for task in done:
            task.result()
