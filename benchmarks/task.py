"""The arguments of one task, which runs in a process of its own: `--model`, `--case`, `--folder`."""

import argparse
import os
from pathlib import Path
from typing import NamedTuple

from benchmarks.cases import CASES, SHAPES, Shape, usual_dtype
from benchmarks.meter import peak_gb


class Task(NamedTuple):
    """What one process measures."""

    model: str
    case: str
    folder: Path  # of the model
    least: int | None  # intervals; None is what meter.Meter decides

    @property
    def shape(self) -> Shape:
        """The workloads of the model."""
        return SHAPES[self.model]


def device() -> str:
    """Where is computed: cpu, or an accelerator as PyTorch calls it."""
    return os.environ.get("BENCHMARK_DEVICE", "cpu")


def dtype() -> str:
    """What is computed in."""
    return os.environ.get("BENCHMARK_DTYPE", usual_dtype(device()))


def jax_peak_gb() -> float:
    """The most GB in use so far: of the accelerator's memory by jax, on CPUs of this process."""
    if device() == "cpu":
        return peak_gb()
    import jax

    return jax.local_devices()[0].memory_stats()["peak_bytes_in_use"] / 2**30


def read(argv: list[str]) -> Task:
    """The task that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=SHAPES, required=True)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--intervals", type=int)
    options = parser.parse_args(argv)
    return Task(options.model, options.case, options.folder, options.intervals)
