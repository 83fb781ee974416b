"""Calls that run beside each other in threads, each with a time limit; async ones share one event loop."""

import asyncio
import inspect
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

GRACE_SECONDS = 1.0  # a cancelled coroutine has this long to end before its thread leaves it behind


class Ended(NamedTuple):
    """How the call with number `key` ended: with a result, with an error, or at its time limit."""

    key: int
    result: Any = None
    error: Exception | None = None
    late: bool = False


class Workers:
    """At most `count` calls at once, each for at most `timeout` seconds (None: no limit) from its own start.

    A call that is late is left behind in its thread, which is a daemon, and makes room for the next.
    """

    def __init__(self, count: int, timeout: float | None):
        self.count, self.timeout = count, timeout
        self._pending: deque[tuple[int, Callable[[], Any]]] = deque()
        self._running: dict[int, tuple[object, float]] = {}  # a ticket for each call, and when it started
        self._ended: queue.Queue[tuple[object, Ended]] = queue.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, key: int, call: Callable[[], Any]) -> None:
        """Begins `call`, or puts it in the queue; it may return an awaitable."""
        self._pending.append((key, call))
        self._fill()

    def done(self, wait: bool) -> list[Ended]:
        """The calls that have ended since the last look; with `wait` at least one, if any is under way."""
        found: list[Ended] = []
        while True:
            self._take(found, block=0.0)
            self._expire(found)
            self._fill()
            if found or not wait or not self._running:
                return found
            self._take(found, block=self._patience())

    def all(self, calls: dict[int, Callable[[], Any]]) -> dict[int, Ended]:
        """How each of the calls ended, when all have."""
        for key, call in calls.items():
            self.start(key, call)
        ended: dict[int, Ended] = {}
        while len(ended) < len(calls):
            ended |= {end.key: end for end in self.done(wait=True)}
        return ended

    def close(self) -> None:
        """Ends the event loop."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(_end(), self._loop)
            self._loop = None

    def _fill(self) -> None:
        while self._pending and len(self._running) < self.count:
            key, call = self._pending.popleft()
            ticket = object()
            self._running[key] = (ticket, time.monotonic())
            threading.Thread(target=self._work, args=(ticket, key, call), daemon=True, name="environment").start()

    def _work(self, ticket: object, key: int, call: Callable[[], Any]) -> None:
        try:
            result = call()
            if inspect.isawaitable(result):
                future = asyncio.run_coroutine_threadsafe(_awaited(result, self.timeout), self._event_loop())
                result = future.result(None if self.timeout is None else self.timeout + GRACE_SECONDS)
            self._ended.put((ticket, Ended(key, result)))
        except Exception as error:
            self._ended.put((ticket, Ended(key, error=error)))

    def _take(self, found: list[Ended], block: float | None) -> None:
        """Adds what has ended, after waiting up to `block` seconds (None: without end) for the first."""
        while True:
            try:
                ticket, ended = self._ended.get(block is None or block > 0, block or None)
            except queue.Empty:
                return
            if self._running.get(ended.key, (None, 0))[0] is ticket:  # one that was late is not heard
                del self._running[ended.key]
                found.append(ended)
            block = 0.0

    def _expire(self, found: list[Ended]) -> None:
        if self.timeout is None:
            return
        now = time.monotonic()
        for key in [key for key, (_, began) in self._running.items() if now - began >= self.timeout]:
            del self._running[key]
            found.append(Ended(key, late=True))

    def _patience(self) -> float | None:
        if self.timeout is None:
            return None
        first = min(began for _, began in self._running.values())
        return max(first + self.timeout - time.monotonic(), 0.001)

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        with _LOCK:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, daemon=True, name="async environments").start()
            return self._loop


_LOCK = threading.Lock()


async def _end() -> None:
    """Cancels what the running loop still has under way, and stops it."""
    late = asyncio.all_tasks() - {asyncio.current_task()}
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    asyncio.get_running_loop().stop()


async def _awaited(awaitable: Any, seconds: float | None) -> Any:
    return await asyncio.wait_for(awaitable, seconds)
