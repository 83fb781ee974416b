"""Memory that arrays left, given back to the operating system where the devices are CPUs."""

import ctypes

import jax

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone


def return_memory() -> None:
    """Gives memory that was freed back to the operating system, on CPUs with glibc; elsewhere it does nothing.

    glibc keeps arrays of up to 32 MB that were freed for the next ones of their size. The sampler's copies of the
    layers would stay beside what an update needs, whose larger arrays are mapped apart: of 4.3 GB at the peak of a
    GRPO step of SmolLM2-135M those were 0.7.
    """
    if _trim is not None and jax.default_backend() == "cpu":
        _trim(0)
