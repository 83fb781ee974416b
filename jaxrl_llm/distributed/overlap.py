"""Collectives that run while the devices compute, where the compiler has to be asked for that: on TPUs.

Without these flags the compiler of libtpu 0.0.42 gathers the layers of an fsdp mesh one after another, each before it
is needed; with them gathers become part of the matmuls beside them. XLA's compiler for GPUs overlaps collectives by
itself, and CPUs have nothing to overlap.
"""

import importlib.util
import os

from jax._src import xla_bridge

TPU_FLAGS = {
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "xla_tpu_overlap_compute_collective_tc": "true",
    "xla_enable_async_all_gather": "true",
}
VARIABLE = "LIBTPU_INIT_ARGS"  # libtpu reads it when jax first asks for devices


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
