"""The start of a command, which is mostly its imports."""

import contextlib
import gc
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def imports() -> Iterator[None]:
    """Import without the garbage collector, which would take a sixth of the time and passes over what was imported, and
    let Ctrl-C end the process at once.

    Nothing has begun that would have to be closed, and Python's own way fails here: JAX has callbacks of the collector,
    in which a KeyboardInterrupt is lost, and modules in C make an ImportError of it.
    """
    collects, main = gc.isenabled(), threading.current_thread() is threading.main_thread()
    ends = main and signal.getsignal(signal.SIGINT) is signal.default_int_handler  # it may be ignored, or the user's
    gc.disable()
    if ends:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if ends:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        gc.freeze()
        if collects:
            gc.enable()


# Holds `imports` where `python -m jaxrl_llm.train` was started, until the command runs.
STARTED = contextlib.ExitStack()
