"""Stochastic rounding: neighbours, expectation, and what stays as it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.rounding import round_like, stochastic_round


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("number", [0.3, -0.3, 1.0 - 2**-20, -255.9, 3e-3])
def test_a_number_becomes_one_of_its_neighbours_and_keeps_its_mean(dtype, number):
    draws = np.asarray(stochastic_round(jnp.full(200_000, number), dtype, jax.random.key(1)).astype(jnp.float32))
    below, above = np.unique(draws)
    assert below < np.float32(number) < above
    assert np.asarray(jnp.asarray(below).astype(dtype) == below)
    spacing = above - below
    assert spacing <= 2.0 ** (-7 if dtype == "bfloat16" else -10) * abs(number)
    np.testing.assert_allclose(draws.mean(dtype=np.float64), np.float32(number), atol=spacing * 0.006)  # 5 sigma


def test_numbers_of_the_type_stay_and_so_do_those_that_are_none():
    kept = jnp.asarray([0.0, -0.0, 1.0, -1.5, 3.0e38, 1e-38, jnp.inf, -jnp.inf, jnp.nan]).astype(jnp.bfloat16)
    for seed in range(20):
        again = stochastic_round(kept.astype(jnp.float32), "bfloat16", jax.random.key(seed))
        np.testing.assert_array_equal(again.astype(jnp.float32), kept.astype(jnp.float32))


def test_only_narrower_arrays_are_rounded_each_by_its_own_draw():
    x = jnp.full(1000, 0.3)
    tree = {"a": x, "b": x, "c": x, "n": jnp.int32(3)}
    like = {"a": x.astype(jnp.bfloat16), "b": x.astype(jnp.bfloat16), "c": x, "n": jnp.int32(2)}
    rounded = round_like(tree, like, jax.random.key(0))
    assert {name: str(leaf.dtype) for name, leaf in rounded.items()} == {
        "a": "bfloat16", "b": "bfloat16", "c": "float32", "n": "int32"
    }  # fmt: skip
    assert rounded["c"] is x and rounded["n"] == 3
    assert bool((rounded["a"] != rounded["b"]).any())
    again = round_like(tree, like, jax.random.key(0))
    np.testing.assert_array_equal(rounded["a"].astype(np.float32), again["a"].astype(np.float32))
