"""The peak rates of devices by what jax calls them."""

from types import SimpleNamespace

import jax
import pytest

from jaxrl_llm.distributed.devices import peak_flops


@pytest.mark.parametrize(
    ("kind", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("AMD Instinct MI300X", 1307e12),
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v6 lite", 918e12),
        ("TPU7x", 1153.5e12),
        ("NVIDIA GeForce RTX 4090", 0.0),
    ],
)
def test_the_peak_of_a_device(kind, flops):
    assert peak_flops(SimpleNamespace(device_kind=kind, platform="gpu", memory_stats=lambda: None)) == flops


def test_the_peak_of_a_cpu_is_not_known():
    assert peak_flops(jax.devices("cpu")[0]) == 0
