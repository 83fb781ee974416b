"""Targets of compilation: a named TPU or GPU with its own compiler, or simulated devices of this process."""

import contextlib
import importlib.util
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax._src import xla_bridge
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.config.wording import amount
from jaxrl_llm.distributed.devices import Device, Gpu, at_hand, named
from jaxrl_llm.distributed.overlap import overlap_collectives
from jaxrl_llm.distributed.sharding import make_mesh, row_groups
from jaxrl_llm.models import chunked_softmax
from jaxrl_llm.models.model import compute_dtype
from jaxrl_llm.training import update
from jaxrl_llm.training.setup.mesh import build_mesh

GPU_OPTIONS = (("xla_gpu_autotune_level", 0),)  # kernels are not tried out, as no device is there
PLUGINS = ("xla_cuda12", "xla_cuda13")  # folders of jax's CUDA plugin; others lie beside it
NVCC = ("cuda_nvcc", "cu13")  # folders of the CUDA compiler in NVIDIA's wheels, of versions 12 and 13
CUDA, CUDNN = (12, 9, 0), (9, 10, 0)  # versions that the GPU compiler gets where there is no driver to ask
HOST = {1: (1, 1, 1), 2: (1, 2, 1)}  # chips of one host, where there are fewer than four


class Target(NamedTuple):
    """The device that a plan is for, and the devices that stand for it."""

    device: Device
    mesh: Mesh
    compiler: str
    exact: bool  # temporaries are those of the device's own compiler
    dtype: str  # that `model.dtype = "auto"` stands for
    accelerator: bool
    options: tuple[tuple[str, Any], ...] = ()  # of the compiler

    @property
    def host(self) -> int | None:
        """Devices of one host where CPUs stand in for accelerators; None where the devices of the mesh say it."""
        return None if self.exact or not self.accelerator else self.device.host(self.mesh.size)


def at_hand_target(config) -> Target:
    """The devices of this process, as training would use them."""
    device, on_cpu = at_hand(jax.devices()[0]), jax.default_backend() == "cpu"
    compiler = f"{jax.default_backend()} compiler"
    return Target(device, build_mesh(config), compiler, True, compute_dtype("auto"), not on_cpu)


def target(config, name: str, count: int, simulate: bool = False) -> Target:
    """`count` devices called `name`; this process must not have used jax's devices yet.

    A TPU is compiled for by its own compiler where libtpu is installed, a GPU by its own where jax's CUDA plugin is,
    unless `simulate`; everything else by XLA's CPU compiler, for `count` CPU devices. Raises ConfigError for an unknown
    device, and for a mesh of another size, and as `row_groups` does.
    """
    stand_ins(config, name, count)
    mesh = build_mesh(config)
    row_groups(mesh, named(name).host(count))
    return target_of(mesh, name, simulate)


def stand_ins(config, name: str, count: int) -> list[Any]:
    """CPU devices of this process, as many as `count` devices called `name`; ConfigError where there are others."""
    if named(name).topology:
        overlap_collectives(config.overlap_collectives)  # as a run does
    jax.config.update("jax_platforms", "cpu")
    with contextlib.suppress(RuntimeError):  # the devices are there already; their number is checked below
        jax.config.update("jax_num_cpu_devices", count)
    if len(jax.devices()) != count:
        raise ConfigError(
            f"--devices={count}, but this process has {amount(len(jax.devices()), 'simulated device')} already: plan "
            "in a process of its own, and leave XLA_FLAGS=--xla_force_host_platform_device_count out"
        )
    return jax.devices()


def target_of(mesh: Mesh, name: str, simulate: bool = False) -> Target:
    """The devices called `name` for which those of `mesh` stand in, with their compiler as `target` says."""
    device, count = named(name), mesh.size
    if device.name == "cpu":
        return Target(device, mesh, "CPU compiler", True, "float32", False)
    if not simulate and device.topology and (chips := tpu_chips(device.topology, count)) is not None:
        return Target(device, make_mesh(**mesh.shape, devices=chips), "TPU compiler", True, "bfloat16", True)
    if not simulate and device.gpu and (chips := gpu_chips(device, count)) is not None:
        mesh, folder = make_mesh(**mesh.shape, devices=chips), _cuda_folder()
        return Target(device, mesh, "GPU compiler", True, "bfloat16", True, (*GPU_OPTIONS, *folder.items()))
    return Target(device, mesh, f"CPU compiler, {count} simulated devices", False, "bfloat16", True)


@contextlib.contextmanager
def traced_as_on(target: Target) -> Iterator[None]:
    """Traces programs as a process on the target would: code that asks for the backend gets the target's.

    Those of simulated devices are traced as what they are, programs of CPUs, but form as many logits at once, and hold
    as many gradients.
    """
    here, own = jax.default_backend, target.mesh.devices.flat[0].platform
    logits, in_place = chunked_softmax.LOGITS_IN_FLIGHT, update.ADDS_IN_PLACE["cpu"]
    jax.default_backend = lambda: own
    if target.accelerator:
        chunked_softmax.LOGITS_IN_FLIGHT = chunked_softmax.LOGITS_ON_ACCELERATORS
        update.ADDS_IN_PLACE["cpu"] = update.ADDS_IN_PLACE["tpu" if target.device.topology else "gpu"]
    try:
        yield
    finally:
        jax.default_backend, chunked_softmax.LOGITS_IN_FLIGHT = here, logits
        update.ADDS_IN_PLACE["cpu"] = in_place


def tpu_chips(version: str, count: int) -> list[Any] | None:
    """The chips of a slice, for the compiler alone; None without libtpu or a slice of that many."""
    if importlib.util.find_spec("libtpu") is None or count & (count - 1):
        return None
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # do not ask a metadata server about this machine
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no chip is taken: others may plan, or train, meanwhile
    options: dict[str, Any] = {"chip_config_name": "megacore"} if version == "v4" else {}
    if count in HOST:
        options["chips_per_host_bounds"] = HOST[count]
        sizes = HOST[count][: _axes(version)]
    else:
        sizes = slice_shape(count, _axes(version))
    name = f"{version}:{'x'.join(map(str, sizes))}"
    return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices)


def gpu_chips(device: Device, count: int) -> list[Any] | None:
    """GPUs of one host, for the compiler alone; None without jax's CUDA plugin."""
    if device.gpu is None or not _cuda_folder():
        return None
    # A topology is asked for by the name "cuda", while its devices say "gpu", which jax resolves by the GPUs it finds.
    canonical = xla_bridge.canonicalize_platform
    xla_bridge.canonicalize_platform = lambda platform: "cuda" if platform in ("gpu", "cuda") else canonical(platform)
    description = _described(device, device.gpu)
    found = topologies.get_topology_desc(platform="cuda", target_config=description, topology=f"1x1x{count}")
    return list(found.devices)


def _cuda_folder() -> dict[str, str]:
    """The compiler option that says where the CUDA compiler of the plugin's wheels lies; empty without both."""
    compilers, plugins = _folders_in("nvidia", NVCC), _folders_in("jax_plugins", PLUGINS)
    return {"xla_gpu_cuda_data_dir": str(compilers[0])} if compilers and plugins else {}


def _folders_in(package: str, names: Sequence[str]) -> list[Path]:
    """The folders of these names in a package that several wheels share, each with a part of it."""
    spec = importlib.util.find_spec(package)
    folders = [Path(base) / name for base in (spec and spec.submodule_search_locations) or () for name in names]
    return [folder for folder in folders if folder.is_dir()]


def _described(device: Device, gpu: Gpu) -> str:
    """The text of XLA's target configuration of a GPU."""
    kib, (major, minor) = 2**10, gpu.capability
    chip = {
        "threads_per_block_limit": 1024, "threads_per_warp": 32, "threads_per_core_limit": 2048,
        "shared_memory_per_block": 48 * kib, "shared_memory_per_block_optin": (gpu.shared - 1) * kib,
        "shared_memory_per_core": gpu.shared * kib, "registers_per_block_limit": 2**16,
        "registers_per_core_limit": 2**16,
        "block_dim_limit_x": 2**31 - 1, "block_dim_limit_y": 2**16 - 1, "block_dim_limit_z": 2**16 - 1,
        "core_count": gpu.multiprocessors, "fpus_per_core": gpu.units, "clock_rate_ghz": gpu.clock,
        "l2_cache_size": gpu.cache * kib**2, "device_memory_size": int(device.memory),
        "memory_bandwidth": int(device.bandwidth),
    }  # fmt: skip
    fields = [f"{name}: {value}" for name, value in chip.items()]
    fields += [f"cuda_compute_capability {{ major: {major} minor: {minor} }}"]
    versions = [
        f"{name} {{ major: {x} minor: {y} patch: {z} }}"
        for name, (x, y, z) in (("runtime_version", CUDA), ("dnn_version_info", CUDNN))
    ]
    # By the kind that a real one says it is: of another name jax 0.11 and later lower no Triton kernel.
    named = ['platform_name: "CUDA"', f'device_description_str: "NVIDIA {device.name.upper()}"']
    return "\n".join(["gpu_device_info {", *fields, "}", *versions, *named])


def _axes(version: str) -> int:
    return 3 if version in ("v4", "v5p") else 2


def slice_shape(count: int, axes: int) -> tuple[int, ...]:
    """The sides of a slice of `count` chips, a power of two from 4: as equal as can be, two by two on a host."""
    sides = [2, 2] + [1] * (axes - 2)
    while math.prod(sides) < count:
        sides[sides.index(min(sides))] *= 2
    return tuple(sides)
