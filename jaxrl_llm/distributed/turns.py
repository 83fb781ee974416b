"""Turns of threads on the devices that they share.

A program over several devices meets itself in its collectives. Two threads that start programs at the same moment may
reach the devices in different orders, and then each device waits for another one for ever. So a thread starts programs
in its `turn` alone, which it gives away while it waits (`yielded`): the main thread of a run that samples beside its
updates has it by default, another one for as long as it samples.
"""

import contextlib
import threading
from collections.abc import Iterator

_lock = threading.RLock()
_own = threading.local()  # its `depth` is the number of blocks of `turn`, not yielded, that the thread is in


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """Start programs in here, save where the turn is `yielded`; waits while another thread does."""
    with _lock:
        _own.depth = getattr(_own, "depth", 0) + 1
        try:
            yield
        finally:
            _own.depth -= 1


@contextlib.contextmanager
def yielded() -> Iterator[None]:
    """Give the turn away while this thread waits, and take it again; nothing where the thread does not hold it."""
    depth, _own.depth = getattr(_own, "depth", 0), 0
    for _ in range(depth):
        _lock.release()
    try:
        yield
    finally:
        for _ in range(depth):
            _lock.acquire()
        _own.depth = depth
