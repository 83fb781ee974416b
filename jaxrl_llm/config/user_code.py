"""Calls of users' functions: whatever such a function does to leave, `sys.exit` included, it ends in an error.

with contained():
    results = function(completions)  # raises an Exception, or Ctrl-C and nothing else
"""

import asyncio
import contextlib
import dis
import threading
from collections.abc import Iterator
from types import TracebackType

RAISE = dis.opmap["RAISE_VARARGS"]


class LeftError(Exception):
    """A function that called `sys.exit`, or raised another exception that would have ended its process or thread."""


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Raise LeftError for what a function raises beside ordinary errors.

    Ctrl-C passes, and so does the cancellation of the coroutine that this is in.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if _comes_from_outside(error):
            raise
        said = f"it called sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"it raised {error!r}"
        raise LeftError(said).with_traceback(error.__traceback__) from error


def _comes_from_outside(error: BaseException) -> bool:
    if isinstance(error, GeneratorExit):
        return True
    if isinstance(error, asyncio.CancelledError):
        with contextlib.suppress(RuntimeError):  # there is no running event loop
            task = asyncio.current_task()
            return task is not None and task.cancelling() > 0
    return isinstance(error, KeyboardInterrupt) and is_ctrl_c(error)


def is_ctrl_c(error: KeyboardInterrupt) -> bool:
    """True unless a function raised the KeyboardInterrupt itself; only the main thread gets those of Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        return False
    if (traceback := _innermost(error)) is None:
        return True
    # Python raises that of a signal between two instructions; asyncio.run passes it on by a statement of its own.
    frame = traceback.tb_frame
    raised = frame.f_code.co_code[traceback.tb_lasti] == RAISE
    return not raised or frame.f_globals.get("__name__", "").startswith("asyncio.")


def foreign_exit(error: SystemExit) -> str | None:
    """`file:line` of the call of `sys.exit` that is not this package's own, None where it is."""
    traceback, package = _innermost(error), __name__.partition(".")[0]
    if traceback is None or traceback.tb_frame.f_globals.get("__name__", "").partition(".")[0] == package:
        return None
    return f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}"


def _innermost(error: BaseException) -> TracebackType | None:
    """The traceback's last entry: where the error was raised first."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback


def run_forever(loop: asyncio.AbstractEventLoop) -> None:
    """Run an event loop until it is stopped, past tasks that call `sys.exit`, whose errors their futures hold."""
    while True:
        try:
            loop.run_forever()
            return
        except (SystemExit, KeyboardInterrupt):
            continue
