"""Concurrent calls with a time limit each: threads for functions, one shared event loop for coroutines.

Not a `ThreadPoolExecutor`: that waits for a call which never returns, at the latest when the program ends. Here such a
call is abandoned in its daemon thread, and its place goes to the next call.
"""

import asyncio
import concurrent.futures
import inspect
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from jaxrl_llm.config.background import EventLoop, in_thread
from jaxrl_llm.config.user_code import contained, contained_await, error_text

Call = Callable[[], Any]  # returns a result, or an awaitable of it


class CallResult(NamedTuple):
    """The result of the call `key`, or the error it raised, or `timed_out`."""

    key: int
    result: Any = None
    error: BaseException | None = None
    timed_out: bool = False

    @property
    def failure(self) -> str | None:
        """The failure, in the words of an error message; None for a call that returned."""
        if self.error is not None:
            return f"raised {error_text(self.error)}"
        return "took more than environment.timeout" if self.timed_out else None


class CallPool:
    """At most `max_calls` calls at once, each for at most `timeout` seconds (None: no limit) from its own start."""

    def __init__(self, max_calls: int, timeout: float | None):
        self.max_calls, self.timeout = max_calls, timeout
        self._queue: deque[tuple[int, Call]] = deque()
        self._running: dict[concurrent.futures.Future, tuple[int, float]] = {}  # key, and time by which it must end
        self._loop = EventLoop("async environments")

    def submit(self, key: int, call: Call) -> None:
        """Start `call`, or queue it while `max_calls` others are running."""
        self._queue.append((key, call))
        self._start_queued()

    def call(self, call: Call, most: float = math.inf) -> CallResult:
        """The result of one call, in at most `most` seconds, from any thread; `max_calls` does not bound these."""
        seconds = most if self.timeout is None else min(most, self.timeout)
        future = in_thread(partial(self._run, call), "environment")
        concurrent.futures.wait([future], None if math.isinf(seconds) else seconds)
        return _ended(0, future) if future.done() else CallResult(0, timed_out=True)

    def poll(self, wait: bool) -> list[CallResult]:
        """Return the calls that ended since the last poll; with `wait` at least one, if any is running."""
        while True:
            patience = 0.0
            if wait and self._running:
                first = min(deadline for _, deadline in self._running.values())
                patience = None if math.isinf(first) else max(first - time.monotonic(), 0.0)
            concurrent.futures.wait(self._running, patience, concurrent.futures.FIRST_COMPLETED)
            results, now = [], time.monotonic()
            for future, (key, deadline) in list(self._running.items()):
                # A coroutine is cancelled at the limit itself, maybe before anybody looks.
                if now >= deadline and (not future.done() or isinstance(future.exception(), TimeoutError)):
                    results.append(CallResult(key, timed_out=True))
                elif future.done():
                    results.append(_ended(key, future))
                else:
                    continue
                del self._running[future]  # the later result of a call that timed out is dropped
            self._start_queued()
            if results or not wait or not self._running:
                return results

    def run(self, calls: Mapping[int, Call]) -> dict[int, CallResult]:
        """Run all calls to their ends; returns the results by key."""
        for key, call in calls.items():
            self.submit(key, call)
        results: dict[int, CallResult] = {}
        while calls.keys() - results.keys():
            results |= {result.key: result for result in self.poll(wait=True)}
        return results

    def close(self) -> None:
        """Cancel the coroutines that still run, and stop the event loop."""
        self._loop.close()

    def _start_queued(self) -> None:
        while self._queue and len(self._running) < self.max_calls:
            key, call = self._queue.popleft()
            deadline = math.inf if self.timeout is None else time.monotonic() + self.timeout
            self._running[in_thread(partial(self._run, call), "environment")] = key, deadline

    def _run(self, call: Call) -> Any:
        with contained():
            result = call()
        if inspect.isawaitable(result):
            # Cancelled at the limit too, or an abandoned coroutine would keep its socket or its lock.
            return self._loop.start(asyncio.wait_for(contained_await(result), self.timeout)).result()
        return result


def _ended(key: int, future: concurrent.futures.Future) -> CallResult:
    error = future.exception()
    return CallResult(key, future.result() if error is None else None, error)
