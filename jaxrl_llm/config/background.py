"""Work in threads of its own: a function in one, or coroutines on an event loop, that other threads wait for.

And the end of a process whose users have left threads behind.
"""

import asyncio
import concurrent.futures
import contextlib
import multiprocessing
import os
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

END_SECONDS = 30.0  # within which the threads and processes that users have started end, once a command has

_left: weakref.WeakSet[concurrent.futures.Future] = weakref.WeakSet()


class TimeUpError(Exception):
    """The result of a function was not there within its time limit; the function may go on running."""


def in_thread(function: Callable[[], Any], name: str) -> concurrent.futures.Future:
    """The future of a function that starts now, in a daemon thread: one that never ends keeps no process alive."""
    future = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # whoever stops waiting for it cannot cancel what runs

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True, name=name).start()
    return future


def leave_behind(futures: Iterable[concurrent.futures.Future]) -> None:
    """Remember functions that nobody waits for any more, for `is_left_behind`: no thread can be ended from outside."""
    _left.update(futures)


def is_left_behind() -> bool:
    """True while a function that `leave_behind` was told of still runs."""
    return not all(future.done() for future in _left)


def end_in_time(code: int) -> None:
    """Once this process ends, let it do so with `code` within END_SECONDS.

    Python would wait for ever for threads and processes that are no daemons, such as those of a pool in which one
    hangs. It is not kept from what takes long at its exit otherwise.
    """
    ending = threading.Event()

    def end() -> None:
        ending.wait()
        time.sleep(END_SECONDS)
        threads = [x for x in threading.enumerate() if not x.daemon and x is not threading.main_thread()]
        processes = [x for x in multiprocessing.active_children() if not x.daemon]
        if not threads and not processes:
            return
        names = ", ".join(x.name for x in (*threads, *processes))
        print(
            f"warning: {END_SECONDS:g} s after the end of the command there still runs what your code has started: "
            f"{names}. It is left behind: end it, or start it with daemon=True",
            file=sys.stderr,
        )
        for process in processes:
            process.kill()
        if jax := sys.modules.get("jax"):  # other processes of the run wait for this one to leave
            with contextlib.suppress(Exception):
                jax.distributed.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    threading.Thread(target=end, daemon=True, name="end of the command").start()
    threading._register_atexit(ending.set)  # pyright: ignore[reportAttributeAccessIssue]; functions of atexit come later


class EventLoop:
    """An event loop in a daemon thread, which starts with the first coroutine; any thread may call its methods.

    The caller may have a running event loop itself (a notebook does), hence the thread. The loop is kept until `close`,
    because connections that a coroutine opens belong to the loop they were opened in.
    """

    def __init__(self, name: str):
        self.name = name  # of the thread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future:
        """Start a coroutine on the loop, whose thread starts with the first one, and return its future."""
        with self._lock:  # several threads may start the first coroutine at once
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_serve, args=(self._loop,), daemon=True, name=self.name).start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def wait(self, future: concurrent.futures.Future, seconds: float | None) -> bool:
        """True when `future` ended within `seconds`; else the loop is taken for blocked and left behind."""
        concurrent.futures.wait([future], seconds)
        if future.done():
            return True
        future.cancel()
        self._loop = None
        return False

    def run(self, coroutine: Coroutine[Any, Any, Any], seconds: float | None = None) -> Any:
        """The result of a coroutine, or its error. Raises TimeUpError after `seconds`."""
        future = self.start(coroutine)
        if not self.wait(future, seconds):
            raise TimeUpError
        return future.result()

    def close(self, last: Callable[[], Awaitable[None]] | None = None) -> None:
        """Cancel the coroutines that still run, await `last()`, and end the thread. A later coroutine starts a new
        one."""

        async def stop() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if last is not None:
                await last()
            asyncio.get_running_loop().stop()

        with self._lock:
            if self._loop is not None:
                asyncio.run_coroutine_threadsafe(stop(), self._loop)
                self._loop = None


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            loop.run_forever()
            return loop.close()
        except (SystemExit, KeyboardInterrupt):  # of a task, whose future holds the error
            continue
