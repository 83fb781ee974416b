"""A worker process of the pool: `python -m jaxrl_llm.rewards.workers.process FD [walled]` serves tasks from a pipe.

It imports this package without JAX, and ends with the process that started it.
"""

import contextlib
import os
import pickle
import resource
import signal
import socket
import sys
import threading
import time
from typing import Any

from jaxrl_llm.config import user_code
from jaxrl_llm.rewards.call import Call, Log
from jaxrl_llm.rewards.runner import load_grader
from jaxrl_llm.rewards.sandbox import jail
from jaxrl_llm.rewards.workers.frames import MARK_BYTES, Frames, is_ours

WALLED_MB = 4096  # of address space, behind walls


def serve(frames: Frames, walled: bool = False) -> None:
    """Take tasks from the pipe, and send each row's result or error and then the log, until the pipe closes.

    Of a `walled` worker errors of other packages are RuntimeErrors, and nothing is logged: see `PlainUnpickler`.
    """
    functions: dict[Any, Any] = {}
    frames.send(b"ready")
    with contextlib.suppress(EOFError, KeyboardInterrupt, OSError):
        while True:
            spec, pickled, name, arguments, services, rows, prompts, keys = pickle.loads(frames.receive())
            identity, call = spec or pickled, None
            for key in keys:
                try:
                    if call is None:
                        if identity not in functions:
                            functions[identity] = load_grader(spec) if spec is not None else pickle.loads(pickled)
                        call = Call(name, functions[identity], arguments, services, rows, prompt_numbers=prompts)
                    _send(frames, "result", key, call.run(key))
                except Exception as raised:
                    foreign = walled and not is_ours(type(raised).__module__)
                    error = RuntimeError(f"{type(raised).__name__}: {raised}") if foreign else raised
                    with contextlib.suppress(Exception):  # of an error that is frozen
                        error.user_line = user_code.user_line(raised)  # pyright: ignore[reportAttributeAccessIssue]  # the traceback stays here
                    _send(frames, "error", key, error)
            _send(frames, "log", keys[-1], None if walled else Log() if call is None else call.log)


def _send(frames: Frames, kind: str, key: int, value: Any) -> None:
    """Send a row's result or error, or the log at the end; an error in the place of what cannot be sent."""
    try:
        data = pickle.dumps((kind, key, value))
        pickle.loads(data)  # some errors can be pickled and not unpickled
    except Exception as error:
        said = f"{type(value).__name__}: {value}" if kind == "error" else f"its {kind} cannot be sent: {error}"
        frames.send(pickle.dumps(("error", key, RuntimeError(said))))
        if kind != "log":
            return
        data = pickle.dumps((kind, key, Log()))
    frames.send(data)


def put_walls_up() -> None:
    """Give up, where Linux lets a process do so, whatever a verifier or parser has no use for.

    It writes no file, has no network, starts and signals no process; it has WALLED_MB of memory. It is no sandbox
    (rewards/sandbox): files can be read, and the other rows of its task be reached.
    """
    if sys.platform == "linux":
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        most = WALLED_MB * 2**20 if hard == resource.RLIM_INFINITY else min(WALLED_MB * 2**20, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        jail.prctl(jail.PR_SET_NO_NEW_PRIVS, 1)
        jail.restrict_files({"read": ["/"], "execute": [], "folder": ""})
        jail.refuse_system_calls(may_signal=False, may_fork=False)


def end_with(parent: int) -> None:
    """End this process, and all that it started, when its parent process is gone, whatever is running."""
    while os.getppid() == parent:
        time.sleep(0.5)
    with contextlib.suppress(PermissionError):  # behind walls, where it started none
        os.killpg(os.getpgid(0), signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    user_code.is_worker = True
    if sys.argv[2:] == ["walled"]:
        put_walls_up()  # before there is another thread: they hold for this one and those that it starts
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    pipe = socket.socket(fileno=int(sys.argv[1]))
    serve(Frames(pipe, pipe.recv(MARK_BYTES, socket.MSG_WAITALL)), walled=sys.argv[2:] == ["walled"])
