"""Grouped matmuls by loops and by the kernels of GPUs, run by Pallas' interpreter, against NumPy; who uses which."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl_llm.distributed.sharding import AXES
from jaxrl_llm.models import moe
from jaxrl_llm.models.kernels import grouped_matmul
from jaxrl_llm.models.model import load_model
from jaxrl_llm.models.moe import Experts
from jaxrl_llm.models.quantize import dequantize, quantize
from jaxrl_llm.models.transformer import REMAT
from jaxrl_llm.tools.plan.compiler import traced_flops
from tests.models.oracles import VARIANTS, make_oracle, oracle_logits
from tests.models.test_moe import CONFIG

MANY = dataclasses.replace(CONFIG, experts=8)  # four times as many as a token uses


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of which even small arrays have several, the last of them not full."""
    for name, value in {"COLUMNS": 16, "BYTES": 64, "BLOCKS": (16, 16)}.items():
        monkeypatch.setattr(grouped_matmul, name, value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("interpret", [False, True])
@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        (45, [0, 17, 1, 0, 20]),  # empty groups, two blocks, rows behind the last group
        pytest.param(3, [1, 0, 0, 2, 0, 0], marks=pytest.mark.slow),  # more groups than rows
        pytest.param(32, [16, 16], marks=pytest.mark.slow),
        pytest.param(20, [0, 0], marks=pytest.mark.slow),
        pytest.param(1, [0, 1, 0], marks=pytest.mark.slow),
    ],
)
def test_outputs_and_gradients(rows, sizes, interpret, dtype, small_tiles):
    draw = np.random.default_rng(0)
    shapes = ((rows, 24), (len(sizes), 24, 20), (rows, 20))
    x, kernels, d_out = (jnp.asarray(draw.normal(size=shape), dtype) for shape in shapes)

    @jax.jit
    def run(x, kernels, sizes, d_out):
        multiply = functools.partial(grouped_matmul.grouped_matmul, sizes=sizes, interpret=interpret)
        out, pull = jax.vjp(multiply, x, kernels)
        return out, *pull(d_out)

    found = run(x, kernels, jnp.asarray(sizes, jnp.int32), d_out)
    exact = [np.asarray(a.astype(jnp.float32), float) for a in (x, kernels, d_out)]
    ends = np.cumsum(sizes)
    expected = [np.zeros(shape) for shape in (d_out.shape, x.shape, kernels.shape)]
    for group, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        own = slice(end - size, end)
        expected[0][own] = exact[0][own] @ exact[1][group]
        expected[1][own] = exact[2][own] @ exact[1][group].T
        expected[2][group] = exact[0][own].T @ exact[2][own]
    tolerance = {"float32": 2e-5, "bfloat16": 2.0**-7}[dtype]
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        np.testing.assert_allclose(np.asarray(a.astype(jnp.float32)), b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", ["int8", *(pytest.param(x, marks=pytest.mark.slow) for x in ("fp8", "nf4"))])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_of_quantised_matrices(kind, dtype, small_tiles):
    """Outputs and gradients of the kernels of GPUs, which read codes of 8 bits, against the numbers in fp32."""
    draw, sizes = np.random.default_rng(0), np.array([0, 17, 1, 0, 20], np.int32)
    x, kernels, d_out = (draw.normal(size=shape) for shape in ((45, 24), (5, 24, 20), (45, 20)))
    x, d_out = jnp.asarray(x, dtype), jnp.asarray(d_out, dtype)
    stored = quantize(jnp.asarray(kernels, jnp.float32), kind)

    @jax.jit
    def run(x, stored, d_out):
        multiply = functools.partial(grouped_matmul.grouped_matmul, sizes=jnp.asarray(sizes), kind=kind, interpret=True)
        out, pull = jax.vjp(lambda x: multiply(x, stored), x)
        return out, *pull(d_out)

    numbers, groups = np.asarray(dequantize(stored, kind, jnp.float32)), np.repeat(range(5), sizes)
    expected = [np.zeros((45, 20)), np.zeros((45, 24))]
    exact = [np.asarray(a.astype(jnp.float32)) for a in (x, d_out)]
    expected[0][:38] = np.einsum("ri,rio->ro", exact[0][:38], numbers[groups])
    expected[1][:38] = np.einsum("ro,rio->ri", exact[1][:38], numbers[groups])
    tolerance = {"float32": 2e-5, "bfloat16": 2.0**-5}[dtype]  # matrices or gradients are rounded too
    for a, b in zip(run(x, stored, d_out), expected, strict=True):
        assert a.dtype == dtype
        np.testing.assert_allclose(np.asarray(a.astype(jnp.float32)), b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", ["nf4", *(pytest.param(x, marks=pytest.mark.slow) for x in ("mxfp4", "int4"))])
def test_few_rows_read_codes_of_4_bits(kind):
    """The kernel of GPUs forms no matrix, and its products are those of the numbers, bit for bit; many rows form it."""
    draw, sizes = np.random.default_rng(0), jnp.asarray([0, 17, 1, 0, 20], jnp.int32)
    stored = quantize(jnp.asarray(draw.normal(size=(5, 192, 80)), jnp.float32), kind)
    multiply = functools.partial(grouped_matmul.grouped_matmul, sizes=sizes, interpret=True)
    x = jnp.asarray(draw.normal(size=(45, 192)), jnp.bfloat16)
    found = multiply(x, stored, kind=kind)
    numbers = dequantize(stored, kind, jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(multiply(x, numbers), np.float32))
    assert np.abs(np.asarray(found, np.float32)[:38]).min(axis=1).max() > 0
    for rows, forms in ((45, False), (5 * 200, True)):
        traced = jax.make_jaxpr(functools.partial(multiply, kind=kind))(jnp.zeros((rows, 192), jnp.bfloat16), stored)
        assert ("bf16[5,192,80]" in str(traced)) == forms
        assert traced_flops(traced) == 2 * rows * 192 * 80


@pytest.mark.parametrize(
    ("backend", "axes"),
    [
        ("cpu", {}),
        *(("gpu", axes) for axes in ({}, {"fsdp": 2, "expert": 2, "tensor": 2})),
        *(pytest.param(backend, {"expert": 4}, marks=pytest.mark.slow) for backend in ("gpu", "cpu")),
        pytest.param("cpu", {"fsdp": 2, "expert": 2, "tensor": 2}, marks=pytest.mark.slow),
    ],
)
def test_an_update_takes_three_matmuls_a_matrix(backend, axes, monkeypatch):
    """Forward and both gradients, of the tokens' own experts alone: 18 k D f operations a token, on all devices
    together, and no ragged_dot."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    graph, state = nnx.split(Experts(MANY, nnx.Rngs(0)))
    x = jnp.zeros((8, 5, 8))
    weights, chosen = jnp.ones((8, 5, 2)), jnp.zeros((8, 5, 2), jnp.int32)
    loss = lambda state, x: nnx.merge(graph, state)(x, weights, chosen).sum()  # noqa: E731
    shape = dict.fromkeys(AXES, 1) | axes
    mesh = jax.sharding.AbstractMesh(
        tuple(shape.values()), tuple(shape), axis_types=(jax.sharding.AxisType.Auto,) * len(shape)
    )
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.make_jaxpr(jax.grad(loss, (0, 1)))(state, x)
    assert "ragged_dot" not in str(traced)
    assert traced_flops(traced) == 18 * 40 * 2 * 8 * 6


@pytest.mark.parametrize("backend", ["gpu", "cpu", "tpu"])
def test_what_is_saved_of_matmuls_is_saved_of_experts(backend, monkeypatch):
    """With `model.remat=dots`, of gate, up and down a row for each copy of a token, of blocks as of whole groups."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    graph, state = nnx.split(Experts(MANY, nnx.Rngs(0)))
    weights, chosen = jnp.ones((40, 2)), jnp.zeros((40, 2), jnp.int32)

    @functools.partial(jax.checkpoint, policy=REMAT["dots"])
    def layer(state, x, weights):
        return nnx.merge(graph, state)(x, weights, chosen)

    arguments = (state, jnp.zeros((40, 8)), weights)
    saved = jax.tree.map(jnp.shape, jax.tree.leaves(jax.eval_shape(lambda *x: jax.vjp(layer, *x)[1], *arguments)))
    given = jax.tree.map(jnp.shape, jax.tree.leaves(arguments))
    assert sorted(set(saved) - set(given)) == [(80, 6), (80, 8)]
    forward = 6 * 40 * 2 * 8 * 6
    once_more = jax.make_jaxpr(jax.grad(lambda *x: jnp.sin(layer(*x)).sum(), (0, 1, 2)))(*arguments)
    assert traced_flops(once_more) == 3 * forward


@pytest.mark.parametrize(
    ("backend", "triton", "config", "way"),
    [
        ("cpu", False, CONFIG, "dense"),
        ("cpu", False, MANY, "grouped"),
        ("gpu", True, CONFIG, "grouped"),
        ("gpu", False, MANY, "dense"),
        ("tpu", False, MANY, "grouped"),
    ],
)
def test_who_computes_which_way(backend, triton, config, way, monkeypatch):
    called = []
    for name in ("dense", "grouped"):
        monkeypatch.setattr(moe, name, lambda kernels, x, *_, name=name, **__: called.append(name) or x)
    experts = Experts(config, nnx.Rngs(0))
    monkeypatch.setattr(moe, "has_triton", lambda: triton)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    experts(jnp.zeros((3, 8)), jnp.ones((3, 2)), jnp.zeros((3, 2), int))
    assert called == [way]


def test_many_experts_equal_those_of_transformers(tmp_path, monkeypatch):
    """The loop is what a CPU takes for them."""
    config = VARIANTS["qwen3_moe"]()
    config.num_experts = 8
    monkeypatch.setitem(VARIANTS, "qwen3_moe", lambda: config)
    oracle = make_oracle("qwen3_moe")
    oracle.save_pretrained(tmp_path)
    monkeypatch.delattr(moe, "dense")
    tokens = np.random.default_rng(0).integers(0, 97, (3, 12))
    model = load_model(tmp_path)
    found = jax.jit(lambda params: model.net.bind(params)(jnp.asarray(tokens)))(model.params)
    np.testing.assert_allclose(found, oracle_logits(oracle, tokens), atol=2e-5)
