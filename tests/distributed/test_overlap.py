"""The flags of the TPU compiler are set before jax asks for devices, where libtpu is installed, over nobody's own."""

import os
import subprocess
import sys

import pytest

from jaxrl_llm.distributed import overlap

SCRIPT = """
import importlib.machinery, os, sys, types
if INSTALLED:
    sys.modules["libtpu"] = types.ModuleType("libtpu")
    sys.modules["libtpu"].__spec__ = importlib.machinery.ModuleSpec("libtpu", None)
else:
    import importlib.util
    found = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *more: None if name == "libtpu" else found(name, *more)
import jax
jax.config.update("jax_platforms", "cpu")
from jaxrl_llm.distributed.overlap import overlap_collectives, overlaps
if STARTED:
    jax.devices()
overlap_collectives(False)
print(os.environ.get("LIBTPU_INIT_ARGS"))
overlap_collectives(True)
overlap_collectives(True)
print(os.environ.get("LIBTPU_INIT_ARGS"), overlaps())
"""
FLAGS = (
    "--xla_tpu_enable_async_collective_fusion=true --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true "
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true --xla_tpu_overlap_compute_collective_tc=true "
    "--xla_enable_async_all_gather=true"
)


@pytest.mark.parametrize(
    ("installed", "started", "given", "then"),
    [
        (True, False, None, f"{FLAGS} True"),
        pytest.param(False, False, None, "None False", marks=pytest.mark.slow),
        pytest.param(True, True, None, "None False", marks=pytest.mark.slow),  # too late: libtpu would not read them
        pytest.param(
            True,
            False,
            "--xla_enable_async_all_gather=false --other=1",
            f"--xla_enable_async_all_gather=false --other=1 {FLAGS.rpartition(' ')[0]} False",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_flags_of_the_tpu_compiler(monkeypatch, installed, started, given, then):
    if given is None:
        monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    else:
        monkeypatch.setenv("LIBTPU_INIT_ARGS", given)
    script = SCRIPT.replace("INSTALLED", str(installed)).replace("STARTED", str(started))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [str(given), then], done.stderr


@pytest.mark.parametrize(
    ("count", "started", "given", "then"),
    [
        (2, False, "--other=1", "--other=1 --xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"),
        (2, False, "--xla_cpu_scheduler_type=A", "--xla_cpu_scheduler_type=A"),
        (2, False, "of_mine.txt", "of_mine.txt"),
        (2, True, "", ""),
        (1, False, "", ""),
        (None, False, "", ""),
    ],
)
def test_cpus_of_several_processes_compute_in_one_order(monkeypatch, count, started, given, then):
    monkeypatch.setenv("XLA_FLAGS", given)
    monkeypatch.setattr(overlap.distributed.global_state, "num_processes", count)
    monkeypatch.setattr(overlap.xla_bridge, "backends_are_initialized", lambda: started)
    overlap.order_collectives()
    assert os.environ["XLA_FLAGS"] == then


def test_a_library_without_the_flag_gets_none(monkeypatch, tmp_path):
    """With it such a process would end: "Unknown flags in XLA_FLAGS"."""
    (tmp_path / "libjax_common.so").write_bytes(b"xla_cpu_scheduler_type of other values")
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(overlap.jaxlib, "__path__", [str(tmp_path)])
    monkeypatch.setattr(overlap.distributed.global_state, "num_processes", 2)
    monkeypatch.setattr(overlap.xla_bridge, "backends_are_initialized", lambda: False)
    overlap.order_collectives()
    assert os.environ["XLA_FLAGS"] == ""
