"""Meshes of several simulated CPU devices, in a process of their own: JAX fixes the device count when it starts.

And the order of devices of TPU slices, of which descriptions will do.
"""

import dataclasses

import pytest

from jaxrl_llm.distributed.sharding import make_mesh, row_groups


@dataclasses.dataclass(frozen=True)
class Chip:
    """What a mesh asks of a TPU."""

    id: int
    process_index: int
    coords: tuple[int, int, int]
    slice_index: int
    device_kind: str
    core_on_chip: int = 0
    platform: str = "tpu"


def chips(kind: str, shape: tuple[int, int, int], slices: int) -> list[Chip]:
    """The chips of slices, in hosts of 2 x 2."""
    x, y, z = shape
    places = [(a, b, c) for c in range(z) for b in range(y) for a in range(x)]
    hosts = [(c * (y // 2) + b // 2) * (x // 2) + a // 2 for a, b, c in places]
    of_slice = max(hosts) + 1
    return [
        Chip(number * len(places) + place, number * of_slice + host, coords, number, kind)
        for number in range(slices)
        for place, (coords, host) in enumerate(zip(places, hosts, strict=True))
    ]


@pytest.mark.parametrize(
    ("kind", "shape", "slices", "sizes"),
    [
        ("TPU v5", (4, 4, 8), 1, {"fsdp": 32, "tensor": 4}),
        ("TPU v5", (4, 4, 8), 1, {"fsdp": 64, "tensor": 2}),  # no side of the slice is 2, nor 64
        ("TPU v6 lite", (4, 4, 1), 1, {"fsdp": 8, "tensor": 2}),
        ("TPU v5 lite", (4, 4, 1), 1, {"fsdp": 8, "tensor": 2}),
        ("TPU v6 lite", (4, 4, 1), 2, {"data": 2, "fsdp": 16}),
        ("TPU v5", (2, 2, 2), 4, {"fsdp": 32}),
        ("TPU v5 lite", (4, 4, 1), 2, {"data": 4, "fsdp": 4, "tensor": 2}),
    ],
)
def test_devices_of_tpu_slices_are_in_the_order_of_processes(kind, shape, slices, sizes):
    """Whatever the sizes, and so in that of slices: the outermost axes go from one to the next."""
    devices = chips(kind, shape, slices)
    mesh = make_mesh(**({"data": 1} | sizes), devices=devices)
    assert {name: size for name, size in mesh.shape.items() if size > 1} == {k: v for k, v in sizes.items() if v > 1}
    order = [device.process_index for device in mesh.devices.flat]
    assert order == sorted(order) and {*mesh.devices.flat} == {*devices}
    assert row_groups(mesh) == len({*order})


def test_on_eight_devices(root, run_python):
    done = run_python("-m", "pytest", str(root / "tests/distributed/mesh_checks.py"), "-q", devices=8, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr


def test_context_of_any_size(root, run_python):
    done = run_python("-m", "pytest", str(root / "tests/distributed/context_checks.py"), "-q", devices=8, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_failing_check_fails_here(root, run_python):
    """On one device the checks cannot pass: the exit status does carry their result."""
    done = run_python("-m", "pytest", str(root / "tests/distributed/mesh_checks.py"), "-qk", "eight_devices")
    assert done.returncode == 1
    assert "1 failed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "checks",
    [
        *(f"the_{what}_of and {model}" for what in ("update", "samples") for model in ("dense", "experts")),
        "not the_update_of and not the_samples_of",
    ],
)
def test_every_mesh_of_eight_devices(root, run_python, checks):
    """All sizes of the five axes that multiply to 8, and the slow checks that are made on a few of them."""
    done = run_python(
        "-m",
        "pytest",
        str(root / "tests/distributed/mesh_checks.py"),
        "-q",
        "-mslow",
        "-k",
        checks,
        devices=8,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
