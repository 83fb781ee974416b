"""Freed memory is kept: pages that a program has touched are not faulted in again."""

import json
import platform

import pytest

from jaxrl_llm.heap import keep_freed

FAULTS = """
import json, resource, sys
import jax, jax.numpy as jnp
from jaxrl_llm.heap import keep_freed

kept = keep_freed(sys.argv[1] == "keep")

@jax.jit
def twice(x):
    y = jax.lax.optimization_barrier(jnp.sort(x))
    return jax.lax.optimization_barrier(jnp.sort(y[::-1])).sum()

x = jnp.arange(2**23, dtype=jnp.float32)  # 32 MB
faults = []
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    twice(x).block_until_ready()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(json.dumps([kept, min(faults[1:])]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's allocator that is told")
def test_a_second_call_faults_no_pages_in(run_python, tmp_path):
    (tmp_path / "faults.py").write_text(FAULTS)
    pages = 2**23 * 4 // 4096
    kept, faults = json.loads(run_python("faults.py", "keep").stdout)
    assert kept and faults < pages // 10
    kept, faults = json.loads(run_python("faults.py", "return").stdout)
    assert not kept and faults >= pages


def test_elsewhere_nothing_is_done(monkeypatch):
    assert not keep_freed(False)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not keep_freed()
