"""Collectives that run while the devices compute, where the compiler has to be asked for that, on TPUs; and in one
order in all processes, which it has to be asked for on CPUs.

Without these flags the compiler of libtpu 0.0.42 gathers the layers of an fsdp mesh one after another, each before it
is needed; with them gathers become part of the matmuls beside them. XLA's compiler for GPUs overlaps collectives by
itself, and CPUs have nothing to overlap.
"""

import importlib.util
import mmap
import os
from pathlib import Path

import jaxlib
from jax._src import distributed, xla_bridge

TPU_FLAGS = {
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "xla_tpu_overlap_compute_collective_tc": "true",
    "xla_enable_async_all_gather": "true",
}
VARIABLE = "LIBTPU_INIT_ARGS"  # libtpu reads it when jax first asks for devices
# Of two collectives that do not wait for each other one process began this one first and another that one, and both
# ended with a mismatch: four of five runs of short updates by two processes, and none of twelve with this scheduler,
# which keeps more of the program's order.
CPU_FLAG = "xla_cpu_scheduler_type"
IN_ORDER = "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"


def overlap_collectives(wanted: bool) -> None:
    """Adds the flags to the environment where they are `wanted` and libtpu is installed.

    Those that the variable has already stay as they are. Nothing changes once jax has asked for devices.
    """
    tpu = importlib.util.find_spec("libtpu") is not None and not xla_bridge.backends_are_initialized()
    if wanted and tpu:
        given = os.environ.get(VARIABLE, "")
        added = [f"--{name}={value}" for name, value in TPU_FLAGS.items() if f"--{name}=" not in given]
        os.environ[VARIABLE] = " ".join([*given.split(), *added])


def overlaps() -> bool:
    """True where the flags were there when libtpu read them, as far as the environment tells."""
    return all(f"--{name}={value}" in os.environ.get(VARIABLE, "") for name, value in TPU_FLAGS.items())


def order_collectives() -> None:
    """Make CPUs of several processes begin their collectives in one order; to GPUs and TPUs the flag says nothing.

    A scheduler that `XLA_FLAGS` names already stays, as does a file of flags. Nothing changes once jax has asked for
    devices, nor with a jaxlib that has no such flag: XLA ends a process that is given one it does not know.
    """
    given, alone = os.environ.get("XLA_FLAGS", ""), distributed.global_state.num_processes in (None, 1)
    names_a_file = given.strip()[:1] not in ("", "-")
    if alone or names_a_file or CPU_FLAG in given or xla_bridge.backends_are_initialized():
        return
    for library in Path(jaxlib.__path__[0]).glob("*jax_common*"):
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            if all(text.find(name.encode()) >= 0 for name in (CPU_FLAG, IN_ORDER)):  # 12 ms: it begins with its texts
                os.environ["XLA_FLAGS"] = f"{given} --{CPU_FLAG}={IN_ORDER}".strip()
