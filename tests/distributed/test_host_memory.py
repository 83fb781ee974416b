"""What arrays left is no longer resident once it was given back."""

import os
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm.distributed import host_memory

ARRAY = 2**22  # bytes: glibc maps the first one apart, and keeps all that follow


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(host_memory._trim is None, reason="the allocator is not glibc's")
def test_freed_arrays_are_given_back():
    np.ones(ARRAY, np.uint8)
    pairs = [(np.ones(ARRAY, np.uint8), np.ones(2**16, np.uint8)) for _ in range(50)]
    between = [small for _, small in pairs]  # so that the heap does not shrink by itself
    del pairs
    before = resident()
    host_memory.return_memory()
    assert before - resident() > 40 * ARRAY
    assert all(small.all() for small in between)
