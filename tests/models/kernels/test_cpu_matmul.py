"""Products of 16-bit arrays on CPUs, against NumPy in fp64."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.kernels import cpu_matmul

ROUNDING = 2.0**-8  # of bfloat16, relative


def draw(seed: int, *shape: int, dtype=jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def exact(x) -> np.ndarray:
    return np.asarray(x.astype(jnp.float32), np.float64)


# One row and odd numbers of them are padded.
@pytest.mark.parametrize("rows", [1, pytest.param(2, marks=pytest.mark.slow), 7])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_products_and_gradients(rows, dtype):
    x, kernel, d_out = draw(0, rows, 6, dtype=dtype), draw(1, 6, 5, dtype=jnp.float32), draw(2, rows, 5, dtype=dtype)
    out, pull = jax.vjp(cpu_matmul.matmul, x, kernel)
    d_x, d_kernel = pull(d_out)
    assert out.dtype == d_x.dtype == dtype and d_kernel.dtype == jnp.float32
    matrix = exact(kernel.astype(dtype))
    np.testing.assert_allclose(exact(out), exact(x) @ matrix, rtol=ROUNDING, atol=ROUNDING)
    np.testing.assert_allclose(exact(d_x), exact(d_out) @ matrix.T, rtol=ROUNDING, atol=ROUNDING)
    # To fp32's digits: not rounded to 16 bits on the way.
    np.testing.assert_allclose(exact(d_kernel), exact(x).T @ exact(d_out), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(cpu_matmul.matmul_transposed(d_out, kernel), d_x)
    np.testing.assert_array_equal(cpu_matmul.over_rows(x, d_out), d_kernel)


def test_rows_of_several_dimensions():
    x, y = draw(0, 2, 3, 4), draw(1, 2, 3, 5)
    np.testing.assert_allclose(cpu_matmul.over_rows(x, y), np.einsum("nsi,nsj->ij", exact(x), exact(y)), rtol=1e-5)
    kernel = draw(2, 4, 5)
    np.testing.assert_allclose(
        exact(cpu_matmul.matmul(x, kernel)), exact(x) @ exact(kernel), rtol=ROUNDING, atol=ROUNDING
    )
    np.testing.assert_allclose(
        exact(cpu_matmul.matmul_transposed(y, kernel)), exact(y) @ exact(kernel).T, rtol=ROUNDING, atol=ROUNDING
    )


def in_16_bits(function, *arguments) -> list[bool]:
    """Of each product of the compiled function: are its factors read in 16 bits?"""
    text = jax.jit(function).lower(*arguments).compile().as_text()
    bodies = [body for body in text.split("\n\n") if " dot(" in body]
    return ["f32" not in " ".join(re.findall(r"= (\S+) parameter", body)) and "ENTRY" not in body for body in bodies]


def test_no_product_is_left_to_converted_copies():
    x, kernel = draw(0, 64, 128), draw(1, 128, 192)

    def gradients(product):
        return jax.grad(lambda x, kernel: product(x, kernel).astype(jnp.float32).sum(), argnums=(0, 1))

    if all(in_16_bits(gradients(jnp.matmul), x, kernel)):
        pytest.skip("this release of XLA needs no special forms, or this CPU has no products of 16 bits")
    found = in_16_bits(gradients(cpu_matmul.matmul), x, kernel)
    assert found and all(found)


def test_a_sum_over_rows_may_be_transposed():
    """As the head does with the gradient of its table."""
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=(160, size)), jnp.bfloat16) for size in (320, 96))
    found = jax.jit(lambda x, y: cpu_matmul.over_rows(x, y).T)(x, y)
    np.testing.assert_allclose(found, exact(y).T @ exact(x), rtol=1e-5, atol=1e-4)
