"""Memory that compiled programs free on a CPU is kept for their next call.

XLA takes the temporaries of a program from malloc at each call and frees them after it. glibc returns blocks of that
size to the kernel at once, which hands out zeroed pages again, one fault for every 4 KB: a third of an update's time.
What compilation and a first step leave is in pieces, which later steps do not fit into: it is given back once.
"""

import ctypes
import os
import platform

VARIABLE = "JAXRL_KEEP_MEMORY"  # 0: leave malloc as it is
# glibc's <malloc.h>: the parameter, and the value it gets.
KEEP = {
    "M_ARENA_MAX": (-8, 1),  # one heap for all threads: only it can grow without limit
    "M_MMAP_MAX": (-4, 0),  # no block is a mapping of its own, which goes when the block does
    "M_TRIM_THRESHOLD": (-1, -1),  # the heap does not shrink
}


def keep_freed() -> bool:
    """True when memory that is freed from now on stays with the process, until `give_back` or its end.

    To be called before NumPy and JAX are imported: threads that they start have heaps of their own, which others may
    be given later. Nothing is done, and False returned, with JAXRL_KEEP_MEMORY=0, where JAX_PLATFORMS leaves out the
    CPU, and on other systems than Linux with glibc.
    """
    platforms = os.environ.get("JAX_PLATFORMS") or "cpu"
    if os.environ.get(VARIABLE) == "0" or "cpu" not in platforms.split(",") or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    accepted = [mallopt(number, value) for number, value in KEEP.values()]
    return all(accepted)


def give_back() -> None:
    """Returns the memory that is free now to the system, on Linux with glibc."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
