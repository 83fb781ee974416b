"""The memory and the rates of known devices: what a plan is made for, and what the speed of a run is compared with."""

import os
import re
from typing import NamedTuple

from jaxrl_llm.config.resolve import ConfigError, closest


class Gpu(NamedTuple):
    """A GPU as its compiler knows it: CUDA's device properties. `shared` is KiB of a multiprocessor."""

    capability: tuple[int, int]
    multiprocessors: int
    units: int  # of float32, in a multiprocessor
    shared: int
    cache: int  # MiB, L2
    clock: float  # GHz


class Device(NamedTuple):
    """One accelerator: bytes, and operations or bytes a second. A rate of 0 is unknown."""

    name: str
    memory: float
    flops: float  # dense bfloat16
    bandwidth: float  # of its memory
    interconnect: float  # out of one device, all links together, one direction
    node: int = 0  # devices that `interconnect` reaches; 0 is all
    network: float = 0.0  # out of one device to those of other nodes
    topology: str | None = None  # its name for the TPU compiler
    gpu: "Gpu | None" = None  # its description for the GPU compiler

    def rate(self, count: int) -> float:
        """Bytes a second that one of `count` devices can send: where they are more than a node has, no more than the
        network takes."""
        return min(self.interconnect, self.network) if self.node and count > self.node else self.interconnect

    @property
    def has_fp8(self) -> bool:
        """False for a device without matrix units for numbers in fp8: all TPUs here, and GPUs before Ada and Hopper."""
        return self.topology is None and (self.gpu is None or self.gpu.capability >= (8, 9))

    def host(self, count: int) -> int:
        """Devices of each host, and so of a process, where there are `count` in all."""
        if self.topology is None:
            return self.node or count
        return 8 if count == 8 and self.topology in ("v5e", "v6e") else CHIPS


CHIPS = 4  # of a host of TPUs in a slice of several
NETWORK = 50e9  # one 400 Gb/s port for each GPU
GIB = 2**30

# From data sheets: NVIDIA's of A100 80GB SXM, H100 SXM, H200 SXM and HGX B200; Google Cloud's pages of TPU versions.
# NVLink counts one direction, half of what the sheets name.
DEVICES = (
    Device("a100", 80e9, 312e12, 2.039e12, 300e9, 8, NETWORK, gpu=Gpu((8, 0), 108, 64, 164, 40, 1.41)),
    Device("h100", 80e9, 989e12, 3.35e12, 450e9, 8, NETWORK, gpu=Gpu((9, 0), 132, 128, 228, 50, 1.98)),
    Device("h200", 141e9, 989e12, 4.8e12, 450e9, 8, NETWORK, gpu=Gpu((9, 0), 132, 128, 228, 50, 1.98)),
    Device("b200", 180e9, 2250e12, 7.7e12, 900e9, 8, NETWORK, gpu=Gpu((10, 0), 148, 128, 228, 126, 1.965)),
    Device("v4", 32 * GIB, 275e12, 1.2e12, 300e9, topology="v4"),
    Device("v5e", 16 * GIB, 197e12, 0.82e12, 200e9, topology="v5e"),
    Device("v5p", 95 * GIB, 459e12, 2.765e12, 600e9, topology="v5p"),
    Device("v6e", 32 * GIB, 918e12, 1.64e12, 448e9, topology="v6e"),
)
# How jax names them, in lower case.
KINDS = {
    "tpu v4": "v4",
    "tpu v5 lite": "v5e",
    "tpu v5e": "v5e",
    "tpu v5p": "v5p",
    "tpu v5": "v5p",
    "tpu v6 lite": "v6e",
    "tpu v6e": "v6e",
}
# Dense bfloat16 of devices that no plan is made for, by words of what jax calls them; of several the first counts. From
# data sheets too: NVIDIA's (half of what they name with sparsity), AMD's, and Google Cloud's.
OTHER_FLOPS = {
    "h100 pcie": 756e12,
    "h100 nvl": 835e12,
    "h800": 989e12,
    "gh200": 989e12,
    "h20": 148e12,
    "gb200": 2500e12,
    "gb300": 2500e12,
    "b300": 2250e12,
    "a800": 312e12,
    "l40s": 362e12,
    "l40": 181e12,
    "l4": 121e12,
    "mi300x": 1307e12,
    "mi325x": 1307e12,
    "mi350x": 2300e12,
    "mi355x": 2500e12,
    "tpu7x": 1153.5e12,  # of one device: a chip is two
}


def cpu() -> Device:
    """This machine as a device: its memory, and rates of 0, which are unknown."""
    return Device("cpu", float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")), 0.0, 0.0, 0.0)


def named(name: str) -> Device:
    """The device of that name; raises ConfigError that lists the known ones."""
    known = {device.name: device for device in (*DEVICES, cpu())}
    if name not in known:
        raise ConfigError(
            f"--device={name} is not known; there are: {', '.join(known)}; the closest is {closest(name, known)}"
        )
    return known[name]


def at_hand(device) -> Device:
    """The device that a jax device is, with the memory that it reports.

    One that is not in the table has no rates.
    """
    kind = device.device_kind.lower()
    if device.platform == "cpu":
        return cpu()
    names = [KINDS[kind]] if kind in KINDS else [known.name for known in DEVICES if known.name in kind]
    known = named(names[0]) if names else Device(device.device_kind, 0.0, 0.0, 0.0, 0.0)
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    return known._replace(memory=float(limit)) if limit else known


def multiplies_fp8(device) -> bool:
    """False for a jax device that is known to have no matrix units for numbers in fp8."""
    capability = getattr(device, "compute_capability", "")
    is_older_gpu = re.fullmatch(r"[1-7]\.\d+|8\.[0-8]", str(capability))
    return not (is_older_gpu or re.match(r"tpu v[2-6]", device.device_kind.lower()))


def peak_flops(device) -> float:
    """The operations a second, dense bfloat16, of a jax device at its peak; 0 where they are not known."""
    words = set(re.split(r"[\s-]+", device.device_kind.lower()))
    others = (flops for names, flops in OTHER_FLOPS.items() if words.issuperset(names.split()))
    return next(others, at_hand(device).flops)
