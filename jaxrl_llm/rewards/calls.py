"""Calling reward functions: with a time limit, async ones at the same time, and with errors that name the row."""

import asyncio
import contextlib
import functools
import inspect
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxrl_llm.names import ConfigError

SEARCH_SECONDS = 10.0


class RewardError(ConfigError):
    """A reward function that failed, hung, or returned something that is not one number for each completion."""


class Call:
    """One reward function with the arguments it is called with."""

    def __init__(self, name: str, function: Callable[..., Any], arguments: dict[str, list[Any]]):
        self.name = name
        self.function = function
        self.arguments = arguments
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 (an instance with an async __call__)
        )

    def __call__(self) -> Any:
        """The results for the whole batch (a coroutine of them when the function is async).

        The lists are copied, so that a function that changes them does not change what the next one sees.
        """
        return self.function(**{name: list(values) for name, values in self.arguments.items()})

    def fails_alone(self, row: int) -> Exception | None:
        """The error that the function raises when it is given only `row`, if it does."""
        alone = Call(self.name, self.function, {name: [values[row]] for name, values in self.arguments.items()})
        try:
            asyncio.run(alone()) if self.is_async else alone()
        except Exception as error:
            return error
        return None


class _TimeUpError(Exception):
    """The time limit passed."""


def _within(seconds: float | None, function: Callable[[], Any]) -> Any:
    """What `function` returns or raises, in a thread that is left behind when it takes more than `seconds`.

    The thread is a daemon: one that never ends does not keep the process alive.
    """
    outcome: dict[str, Any] = {}

    def work() -> None:
        try:
            outcome["result"] = function()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=work, daemon=True, name="reward")
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise _TimeUpError
    if "error" in outcome:
        raise outcome["error"]
    return outcome["result"]


def run(call: Call, timeout: float | None) -> Any:
    """The results of a function. Raises RewardError when it raises or takes more than `timeout` seconds."""
    try:
        return call() if timeout is None else _within(timeout, call)
    except _TimeUpError:
        raise _too_slow([call.name], timeout) from None
    except Exception as error:
        raise _failure(call, error, timeout) from error


def gather(calls: list[Call], timeout: float | None) -> dict[str, Any]:
    """The results of async functions by name, run at the same time in one event loop of its own thread.

    The caller may have a running event loop itself (a notebook does), hence the thread.
    """
    if not calls:
        return {}
    finished: dict[str, Any] = {}

    async def finish(call: Call) -> None:
        try:
            finished[call.name] = await call()
        except Exception as error:
            finished[call.name] = error

    async def run_all() -> None:
        _, late = await asyncio.wait([asyncio.create_task(finish(call)) for call in calls], timeout=timeout)
        for task in late:
            task.cancel()

    # Cancelled functions get a second to end; one that blocks the loop is left behind with its thread.
    with contextlib.suppress(_TimeUpError):
        _within(None if timeout is None else timeout + 1.0, lambda: asyncio.run(run_all()))
    late = [call.name for call in calls if call.name not in finished]
    if late:
        raise _too_slow(late, timeout)
    for call in calls:
        if isinstance(finished[call.name], Exception):
            raise _failure(call, finished[call.name], timeout) from finished[call.name]
    return finished


def _too_slow(names: list[str], timeout: float | None) -> RewardError:
    return RewardError(
        f"reward {', '.join(repr(name) for name in names)} took more than rewards.timeout={timeout} seconds for a "
        "batch; find what it waits for, or raise the limit"
    )


def _failure(call: Call, error: Exception, timeout: float | None) -> RewardError:
    """The error to raise for a function that raised, naming the first row on which it raises the same alone."""
    rows = len(next(iter(call.arguments.values()), []))
    deadline = time.monotonic() + min(timeout or SEARCH_SECONDS, SEARCH_SECONDS)
    where = f"called with rows 0 to {rows - 1}"
    for row in range(rows):
        try:
            alone = _within(deadline - time.monotonic(), functools.partial(call.fails_alone, row))
        except _TimeUpError:
            break
        if type(alone) is type(error):
            shown = {name: values[row] for name, values in call.arguments.items() if name != "completion_ids"}
            where = f"on row {row} ({shorten(shown)})"
            break
    return RewardError(f"reward {call.name!r} raised {type(error).__name__}: {error}, {where}")


def shorten(value: Any, limit: int = 300) -> str:
    """`repr(value)`, cut to `limit` characters for an error message."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
