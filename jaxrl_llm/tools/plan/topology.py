"""Targets of compilation: a TPU by its name, with its own compiler, or simulated devices of this process."""

import contextlib
import importlib.util
import math
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.tools.plan.devices import Device, at_hand, named
from jaxrl_llm.training.setup.run import build_mesh

HOST = {1: (1, 1, 1), 2: (1, 2, 1)}  # chips of one host, where there are fewer than four


class Target(NamedTuple):
    """The device that a plan is for, and the devices that stand for it."""

    device: Device
    mesh: Mesh
    compiler: str
    exact: bool  # temporaries are those of the device's own compiler
    dtype: str  # that `model.dtype = "auto"` stands for
    scanned: bool  # layers are scanned where `model.scan_layers` is auto, as accelerators do


def at_hand_target(config) -> Target:
    """The devices of this process, as training would use them."""
    device, on_cpu = at_hand(jax.devices()[0]), jax.default_backend() == "cpu"
    dtype = "float32" if on_cpu else "bfloat16"
    return Target(device, build_mesh(config), f"{jax.default_backend()} compiler", True, dtype, not on_cpu)


def target(config, name: str, count: int, simulate: bool = False) -> Target:
    """`count` devices called `name`; this process must not have used jax's devices yet.

    A TPU is compiled for by its own compiler where libtpu is installed, unless `simulate`; everything else by XLA's CPU
    compiler, for `count` CPU devices. Raises ConfigError for an unknown device, and for a mesh of another size.
    """
    device = named(name)
    jax.config.update("jax_platforms", "cpu")
    with contextlib.suppress(RuntimeError):  # the devices are there already; their number is checked below
        jax.config.update("jax_num_cpu_devices", count)
    if len(jax.devices()) != count:
        raise ConfigError(
            f"--devices={count}, but this process has {len(jax.devices())} simulated devices already: plan in a "
            "process of its own, and leave XLA_FLAGS=--xla_force_host_platform_device_count out"
        )
    mesh = build_mesh(config)
    if device.name == "cpu":
        return Target(device, mesh, "CPU compiler", True, "float32", False)
    chips = None if simulate or device.topology is None else tpu_chips(device.topology, count)
    if chips is None:
        return Target(device, mesh, f"CPU compiler, {count} simulated devices", False, "bfloat16", True)
    mesh = make_mesh(**mesh.shape, devices=chips)
    return Target(device, mesh, "TPU compiler", True, "bfloat16", True)


@contextlib.contextmanager
def traced_as_on(target: Target) -> Iterator[None]:
    """Programs are traced as a process on the target would: what asks for the backend is told the target's.

    Those of simulated devices are traced as what they are, programs of CPUs.
    """
    here, own = jax.default_backend, target.mesh.devices.flat[0].platform
    jax.default_backend = lambda: own
    try:
        yield
    finally:
        jax.default_backend = here


def tpu_chips(version: str, count: int) -> list[Any] | None:
    """The chips of a slice, for the compiler alone; None without libtpu or a slice of that many."""
    if importlib.util.find_spec("libtpu") is None or count & (count - 1):
        return None
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # ask no metadata server what this machine is
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no chip is taken: others may plan, or train, meanwhile
    options: dict[str, Any] = {"chip_config_name": "megacore"} if version == "v4" else {}
    if count in HOST:
        options["chips_per_host_bounds"] = HOST[count]
        sizes = HOST[count][: _axes(version)]
    else:
        sizes = slice_shape(count, _axes(version))
    name = f"{version}:{'x'.join(map(str, sizes))}"
    return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices)


def _axes(version: str) -> int:
    return 3 if version in ("v4", "v5p") else 2


def slice_shape(count: int, axes: int) -> tuple[int, ...]:
    """The sides of a slice of `count` chips, a power of two from 4: as equal as can be, two by two on a host."""
    sides = [2, 2] + [1] * (axes - 2)
    while math.prod(sides) < count:
        sides[sides.index(min(sides))] *= 2
    return tuple(sides)
