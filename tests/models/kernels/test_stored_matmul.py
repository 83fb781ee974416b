"""Matmuls of few rows with dense matrices of 4 bits, by the kernel of GPUs in Pallas' interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.kernels import stored_matmul
from jaxrl_llm.models.quantize import dequantize, quantize


def drawn(rows: int, inner: int, columns: int, kind: str):
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.normal(size=(rows, inner)), jnp.bfloat16)
    return x, quantize(jnp.asarray(draw.normal(size=(inner, columns)), jnp.float32), kind)


def product(x, stored, kind: str) -> np.ndarray:
    """With the numbers as they are rounded, in float64."""
    return np.asarray(x, np.float64) @ np.asarray(dequantize(stored, kind, jnp.bfloat16), np.float64)


@pytest.mark.parametrize(
    ("rows", "inner", "columns", "kind", "programs"),
    [
        (8, 1024, 80, "nf4", (2, 2, 8)),  # eight programs share a sum, the last ones have part of the columns
        (3, 96, 48, "mxfp4", (2, 1, 2)),
        pytest.param(100, 1088, 130, "int4", (2, 3, 1), marks=pytest.mark.slow),  # as many rows as codes have room for
    ],
)
def test_few_rows_by_the_kernel(rows, inner, columns, kind, programs):
    x, stored = drawn(rows, inner, columns, kind)
    run = lambda x: stored_matmul._of_codes(x, stored, kind, "up", interpret=True)  # noqa: E731
    assert f"grid={programs}," in str(jax.make_jaxpr(run)(x))
    found = run(x)
    assert found is not None
    assert found.dtype == jnp.bfloat16
    expected = product(x, stored, kind)
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=2**-8 * np.abs(expected).max())


ON_A_MESH = """
import jax, numpy as np
from jaxrl_llm.distributed.sharding import make_mesh, parameter_spec
from jaxrl_llm.models.kernels import stored_matmul
from tests.models.kernels.test_stored_matmul import drawn, product

x, stored = drawn(160, 512, 128, "nf4")
expected = product(x, stored, "nf4")
for name, axes, rows, own in (
    ("up", {"data": 4}, 160, (256, 128)),
    ("up", {"fsdp": 2, "tensor": 2}, 160, (256, 64)),
    ("down", {"tensor": 4}, 16, (64, 128)),
):
    mesh = make_mesh(**({"data": 1} | axes))
    with jax.set_mesh(mesh):
        placed = {
            part: jax.device_put(array, jax.NamedSharding(mesh, parameter_spec(f"/{name}/kernel", array.shape, mesh)))
            for part, array in stored.items()
        }
        run = jax.jit(lambda x, stored: stored_matmul._of_codes(x, stored, "nf4", name, interpret=True))
        assert f"u8[1,{own[0]},{own[1]}]" in str(jax.make_jaxpr(run)(x[:rows], placed)), (name, axes)
        found = np.asarray(run(x[:rows], placed), np.float64)
        np.testing.assert_allclose(found, expected[:rows], atol=2**-7 * np.abs(expected).max())
        if name == "down":
            assert run(x, placed) is None  # rows of one device are too many
            odd = drawn(16, 192, 128, "nf4")[1]  # devices share a block of 64
            assert stored_matmul._of_codes(x[:16, :192], odd, "nf4", name) is None
"""


@pytest.mark.slow
def test_on_a_mesh_every_device_reads_its_own_codes(run_python):
    """Sums over sharded inputs are added; where devices share a scale, or have many rows, XLA converts."""
    result = run_python("-c", ON_A_MESH, devices=4)
    assert result.returncode == 0, result.stderr


def test_who_takes_the_kernel(monkeypatch):
    """Few rows, and those alone, on GPUs; gradients are by the numbers."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(stored_matmul, "has_triton", lambda: True)

    def traced(rows, inner=512, gradient=False):
        x, stored = drawn(rows, inner, 64, "nf4")
        multiply = lambda x: stored_matmul.frozen_matmul(x, stored, "nf4", "up").astype(jnp.float32).sum()  # noqa: E731
        text = str(jax.make_jaxpr(jax.grad(multiply) if gradient else multiply)(x))
        return "matmul_of_codes" in text, f"bf16[{inner},64]" in text

    assert traced(128) == (True, False)
    assert traced(129) == (False, True)
    assert traced(8, inner=72) == (False, True)  # blocks of 8 inputs
    assert traced(8, gradient=True) == (True, True)
    monkeypatch.setattr(stored_matmul, "has_triton", lambda: False)
    assert traced(8) == (False, True)
