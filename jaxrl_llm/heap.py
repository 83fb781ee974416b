"""Memory that compiled programs free on a CPU is kept for their next call.

XLA takes the temporaries of a program from malloc at each call and frees them after it. glibc returns blocks of that
size to the kernel at once, which hands out zeroed pages again, one fault for every 4 KB: a third of an update's time.
"""

import ctypes
import platform

import jax

# glibc's <malloc.h>: the parameter, and the value it gets.
KEEP = {
    "M_ARENA_MAX": (-8, 1),  # one heap for all threads: only it can grow without limit
    "M_MMAP_MAX": (-4, 0),  # no block is a mapping of its own, which goes when the block does
    "M_TRIM_THRESHOLD": (-1, -1),  # the heap does not shrink
}


def keep_freed(wanted: bool = True) -> bool:
    """True when memory that is freed from now on stays with the process; call it before the first JAX computation.

    Nothing is done, and False returned, where it is not `wanted`, on other platforms than Linux with glibc, and where
    JAX is told to use no CPU: then programs do not run in the host's memory. It lasts until the process ends.
    """
    platforms = jax.config.jax_platforms or "cpu"
    if not wanted or platform.libc_ver()[0] != "glibc" or "cpu" not in platforms.split(","):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    accepted = [mallopt(number, value) for number, value in KEEP.values()]
    return all(accepted)
