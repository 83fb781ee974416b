"""Calls of users' functions: what such a function does to exit, by `sys.exit`, `os._exit` or `os.exec`, is an error.

with contained():
    results = function(completions)  # raises an Exception, or Ctrl-C and nothing else
"""

import asyncio
import contextlib
import contextvars
import dis
import functools
import os
import sys
import sysconfig
import threading
import traceback as tracebacks
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

RAISE = dis.opmap["RAISE_VARARGS"]
PACKAGE = Path(__file__).parents[1]
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
_process = contextvars.ContextVar[int | None]("process", default=None)  # in which a user's function is running
_exit = os._exit
LONGEST = 4000  # characters of an error's text that are shown, its beginning and its end
ENDS = ("_exit", "execv", "execve")  # of os: they end the process, and all others of os that do call these
is_worker = False  # True: this process works for a run, which sees its end
P = ParamSpec("P")
R = TypeVar("R")


class LeftError(Exception):
    """A function that called `sys.exit`, or raised another exception that would have ended its process or thread."""


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Raise LeftError for what a function raises beside ordinary errors.

    Ctrl-C passes, and so do this package's own exits and the cancellation of the coroutine that this is in. A process
    that the function has forked ends here, where it would go on as a second run: it returned, could not start its
    program, or called `sys.exit`, whose code it gets.
    """
    if not is_worker:
        _guard_ends()  # with which a function would end the run, and with code 0 as if it were done
    process = os.getpid()
    token = _process.set(process)
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if _comes_from_outside(error):
            raise
        said = f"it called sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"it raised {error!r}"
        raise LeftError(f"{said}, in {place(error)}").with_traceback(error.__traceback__) from error
    finally:
        if os.getpid() != process:
            error = sys.exc_info()[1]
            match error.__cause__ if isinstance(error, LeftError) else None:
                case SystemExit(code=int() | None as code):
                    _exit((code or 0) & 255)
            if error is not None:
                tracebacks.print_exception(error)
            _exit(1)
        _process.reset(token)


@functools.cache
def _guard_ends() -> None:
    """Make each of ENDS an error where a user's function calls it: not in a process that it forks, nor in this
    package."""

    def guarded(name: str, end: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(end)
        def ends(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe().f_back  # None where atexit calls it
            while caller is not None and caller.f_globals is vars(os):  # os.execvp calls execv
                caller = caller.f_back
            if caller is not None and _process.get() == os.getpid():
                code = caller.f_code
                if not Path(code.co_filename).is_relative_to(PACKAGE):
                    shown = ", ".join(map(repr, args[:1]))  # others of execve are secrets of the environment
                    where = f"{code.co_qualname} ({code.co_filename}:{caller.f_lineno})"
                    raise LeftError(f"it called os.{name}({shown}), in {where}")
            return end(*args, **kwargs)

        return ends

    for name in ENDS:
        setattr(os, name, guarded(name, getattr(os, name)))


async def contained_await(result: Awaitable[Any]) -> Any:
    """The result of an awaitable of the user's; what it raises beside ordinary errors becomes LeftError, see
    `contained`."""
    with contained():
        return await result


def _comes_from_outside(error: BaseException) -> bool:
    if isinstance(error, SystemExit):
        return is_own_exit(error)
    if isinstance(error, asyncio.CancelledError):
        with contextlib.suppress(RuntimeError):  # there is no running event loop
            task = asyncio.current_task()
            return task is not None and task.cancelling() > 0
    return isinstance(error, GeneratorExit) or (isinstance(error, KeyboardInterrupt) and is_ctrl_c(error))


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


def is_own_exit(error: SystemExit) -> bool:
    """True for an exit that this package raised itself: after --help, and of a run that is preempted."""
    if (traceback := _innermost(error)) is None:
        return True
    # By its package: the name of a module that runs as a command is __main__.
    package = traceback.tb_frame.f_globals.get("__package__") or ""
    return package.partition(".")[0] == __name__.partition(".")[0]


def error_text(error: BaseException) -> str:
    """The type and message of an error, and the line of the user's code that it comes from, where it is known."""
    message = f"{type(error).__name__}: {error}"
    if len(message) > LONGEST:
        message = f"{message[: LONGEST // 2]} ... {message[-LONGEST // 2 :]}"
    line = None if isinstance(error, LeftError) else user_line(error)  # a LeftError says its place itself
    return f"{message} ({line})" if line else message


def user_line(error: BaseException) -> str | None:
    """The innermost file:line of a traceback outside this package, Python and installed packages, or None without one.

    The traceback of an error that came from another process is lost, so that its `user_line`, set there, goes first.
    """
    if line := getattr(error, "user_line", None):
        return line
    lines = [
        f"{frame.filename}:{frame.lineno}"
        for frame in tracebacks.extract_tb(error.__traceback__)
        if _is_users(frame.filename)
    ]
    return lines[-1] if lines else None


def _is_users(filename: str) -> bool:
    """True for a file outside this package, Python and installed packages."""
    file = Path(filename)
    return (
        not filename.startswith("<frozen ")
        and not {"site-packages", "dist-packages"} & set(file.parts)
        and not file.is_relative_to(PACKAGE)
        and not file.is_relative_to(STANDARD_LIBRARY)
    )


def without_locals(function: Callable[P, R]) -> Callable[P, R]:
    """The function, whose errors hold the variables of the user's own functions alone.

    A notebook keeps the newest error, with it the frames that it passed, and in these the arrays of a whole run.
    """

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True  # from the reader of a notebook
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            del args, kwargs
            _clear_frames(error)
            raise

    return called


def _clear_frames(error: BaseException) -> None:
    """Let the frames of an error, and of those that it comes from, go of their variables, save the user's."""
    found: list[BaseException] = [error]
    for each in found:
        for frame, _ in tracebacks.walk_tb(each.__traceback__):
            if not _is_users(frame.f_code.co_filename):
                with contextlib.suppress(RuntimeError):  # it still runs
                    frame.clear()
        found += [x for x in (each.__cause__, each.__context__) if x is not None and x not in found]


def place(error: BaseException) -> str:
    """The function in which an error was raised, with file and line."""
    if (traceback := _innermost(error)) is None:
        return "an unknown place"
    code = traceback.tb_frame.f_code
    return f"{code.co_qualname} ({code.co_filename}:{traceback.tb_lineno})"


def _innermost(error: BaseException) -> TracebackType | None:
    """The traceback's last entry: where the error was raised first."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback
