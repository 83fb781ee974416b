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
_holders: list[int] = []  # the thread of each block of `turn`


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """Start programs in here, save where the turn is `yielded`; waits while another thread does."""
    with _lock:
        _holders.append(threading.get_ident())
        try:
            yield
        finally:
            _holders.remove(threading.get_ident())


@contextlib.contextmanager
def yielded() -> Iterator[None]:
    """Give the turn away while this thread waits, and take it again; nothing where the thread does not hold it."""
    if threading.get_ident() not in _holders:
        yield
        return
    _lock.release()
    try:
        yield
    finally:
        _lock.acquire()
