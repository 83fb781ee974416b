"""What arrays left is no longer resident once it was given back."""

import pytest

from jaxrl_llm.distributed import host_memory

# Of a process of its own, whose heap has no other room: arrays of a size that glibc keeps, with others between them.
PROCESS = """
import os
import numpy as np
from jaxrl_llm.distributed.host_memory import return_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

np.ones(2**22, np.uint8)  # glibc maps the first one apart, and keeps those that follow
pairs = [(np.ones(2**22, np.uint8), np.ones(2**16, np.uint8)) for _ in range(50)]
between = [small for _, small in pairs]
del pairs
before = resident()
return_memory()
print((before - resident()) // 2**22)
"""


@pytest.mark.skipif(host_memory._trim is None, reason="the allocator is not glibc's")
def test_freed_arrays_are_given_back(run_python):
    assert int(run_python("-c", PROCESS).stdout) > 40
