"""Matmuls of training with 8-bit operands: beside numpy's casts, in networks, on meshes, for accelerators, in runs."""

import collections
import functools
import math
import re
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import jaxrl_llm
from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.config import ConfigError, default, validate
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.distributed.devices import multiplies_fp8, named
from jaxrl_llm.models.adapters.lora import LoraConfig
from jaxrl_llm.models.cast import draws_from_another, in_precision
from jaxrl_llm.models.kernels.eight_bit_matmul import check_matmul_dtype, dtype_of, eight_bit_matmul
from jaxrl_llm.models.layers import Linear
from jaxrl_llm.models.logprobs import token_logps
from jaxrl_llm.models.model import describe, load_model
from jaxrl_llm.models.transformer import Transformer
from jaxrl_llm.tools.plan.compiler import traced_flops

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
KINDS = ("fp8", "int8")
TOKENS = np.arange(97, 109)[None]


def draws(tokens=48, d_in=32, d_out=64):
    """Inputs whose tokens differ in size, a matrix, and a gradient that is small."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(tokens, d_in)) * np.exp(2 * draw.normal(size=(tokens, 1)))
    kernel, gradient = draw.normal(size=(d_in, d_out)), draw.normal(size=(tokens, d_out)) * 1e-4
    return tuple(a.astype(np.float32) for a in (x, kernel, gradient))


def scale_of(a, axis, dtype):
    """As torchao's with powers of two: the largest number of the type over that of a, which is 1e-12 or more."""
    absmax = np.abs(a).max(axis=axis, keepdims=True).astype(np.float64)
    return 2.0 ** np.floor(np.log2(float(ml_dtypes.finfo(dtype).max) / np.maximum(absmax, 1e-12)))


def in_fp8(a, axis, dtype):
    scale = scale_of(a, axis, dtype)
    return (a * scale).astype(np.float32).astype(dtype).astype(np.float64) / scale


def in_int8(a, axis):
    step = np.abs(a).max(axis=axis, keepdims=True).astype(np.float64) / 127
    return np.round(a / step) * step


def products(x, kernel, gradient, kind):
    y, back = jax.vjp(lambda x, kernel: eight_bit_matmul(x, kernel, kind), x, kernel)
    return y, *back(gradient)


def close(found, expected, tolerance=1e-6):
    np.testing.assert_allclose(found, expected, atol=tolerance * np.abs(expected).max(), rtol=0)


def test_three_products_in_fp8():
    x, kernel, gradient = draws()
    y, of_x, of_kernel = products(x, kernel, gradient, "fp8")
    close(y, in_fp8(x, 1, E4M3) @ in_fp8(kernel, 0, E4M3))
    both = scale_of(x, 1, E4M3) * scale_of(kernel, 0, E4M3)
    of_codes = in_fp8((gradient / both).astype(np.float32), None, E5M2) * both
    close(of_x, of_codes @ in_fp8(kernel, 0, E4M3).T)
    close(of_kernel, in_fp8(x, 1, E4M3).T @ of_codes)
    frozen = jax.grad(lambda x: (eight_bit_matmul(x, kernel, "fp8") * gradient).sum())(x)
    scales = scale_of(kernel, 0, E4M3)
    close(frozen, in_fp8(gradient / scales, None, E5M2) * scales @ in_fp8(kernel, 0, E4M3).T)
    for found, plain in zip((y, of_x, of_kernel), (x @ kernel, gradient @ kernel.T, x.T @ gradient), strict=True):
        assert 1e-3 < np.abs(found - plain).max() / np.abs(plain).max() < 0.1


def test_two_products_in_int8():
    """The gradient of the matrix is not in 8 bits, as in AQT."""
    x, kernel, gradient = draws()
    y, of_x, of_kernel = products(x, kernel, gradient, "int8")
    close(y, in_int8(x, 1) @ in_int8(kernel, 0))
    close(of_kernel, x.T @ gradient)
    # g is rounded up or down: by less than a step of its token for each number of a code of W.
    matrix, steps = in_int8(kernel, 0).T, np.abs(kernel).max(axis=0) / 127
    step = np.abs(gradient * steps).max(axis=1, keepdims=True) / 127
    assert (np.abs(of_x - gradient @ matrix) < step * np.abs(matrix / steps[:, None]).sum(0) * 1.001).all()
    assert np.abs(of_x - gradient @ matrix).max() > 1e-3 * np.abs(of_x).max()


def test_gradients_in_int8_are_right_on_average():
    """Numbers of a hundredth of a step, which would be lost by rounding to the nearest, one draw for each token."""
    gradient = np.full((4096, 64), 1e-4 / 127, np.float32) * np.linspace(0.01, 3, 64, dtype=np.float32)
    gradient[:, 0] = 1e-4
    _, of_x, _ = products(np.ones((4096, 64), np.float32), np.eye(64, dtype=np.float32), gradient, "int8")
    deviation = 1e-4 / 127 / 2 / np.sqrt(4096)  # at most, of the mean
    np.testing.assert_allclose(of_x.mean(0), gradient[0], atol=4 * deviation)
    assert len(np.unique(of_x[:, 1])) == 2 and not (of_x[:-1] == of_x[1:]).all(1).any()
    other = products(np.ones((4096, 64), np.float32), np.eye(64, dtype=np.float32), 2 * gradient, "int8")[1]
    assert (other[:, 20] != 2 * of_x[:, 20]).any(), "another gradient, another draw"


@pytest.mark.parametrize(
    ("largest", "stored"),
    [(448.0, 448.0), (1.75, 1.75), (1.8, 1.75), (np.nextafter(np.float32(1.75), 2), 1.75), (1e-30, 2.0**-100), (0, 0)],
)
def test_the_scale_is_the_largest_power_of_two_that_fits(largest, stored):
    """The largest number stays within the type: 1.8 is 230.4 = 224 + 6.4 steps of 16 under the scale 128."""
    x = np.array([[largest] + [largest / 8] * 15], np.float32)
    found = np.asarray(eight_bit_matmul(x, np.eye(16, dtype=np.float32), "fp8"))[0]
    expected = in_fp8(x, 1, E4M3)[0]
    if largest > 1e-12:  # torchao's least maximum
        np.testing.assert_array_equal(found, expected.astype(np.float32))
        assert found[0] == stored
    elif largest:
        np.testing.assert_allclose(found, x[0], rtol=2**-4)
    else:
        assert not found.any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_is_not_finite_spoils_its_own_output(kind):
    x, kernel, gradient = draws()
    expected = products(x, kernel, gradient, kind)[0]
    x[3, 5], x[4, 6] = np.nan, np.inf
    found = np.asarray(products(x, kernel, gradient, kind)[0])
    assert not np.isfinite(found[3:5]).any()
    np.testing.assert_array_equal(np.delete(found, [3, 4], 0), np.delete(expected, [3, 4], 0))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_computed_of_a_token_does_not_depend_on_others(kind):
    x, kernel, gradient = draws()
    whole = products(x, kernel, gradient, kind)
    for start in (0, 16, 32):
        some = products(x[start : start + 16], kernel, gradient[start : start + 16], kind)
        np.testing.assert_array_equal(whole[0][start : start + 16], some[0])
        if kind == "fp8":  # until a gradient is 2^30 times below the largest
            np.testing.assert_array_equal(whole[1][start : start + 16], some[1])
    rows = products(x.reshape(3, 16, 32), kernel, gradient.reshape(3, 16, 64), kind)
    for found, expected in zip(rows, whole, strict=True):
        close(found.reshape(expected.shape), np.asarray(expected))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_in_16_bits(kind, dtype):
    """Sums beyond the range of float16 are scaled before they become its numbers; the matrix keeps its type."""
    x, kernel, gradient = draws()
    gradient *= 100
    x, gradient = jnp.asarray(x, dtype), jnp.asarray(gradient, dtype)
    found = products(x, kernel, gradient, kind)
    assert [a.dtype for a in found] == [dtype, dtype, "float32"]
    expected = products(np.asarray(x, np.float32), kernel, np.asarray(gradient, np.float32), kind)
    for ours, theirs in zip(found, expected, strict=True):
        close(np.asarray(ours, np.float32), np.asarray(theirs), 0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_counts_them_at_twice_the_rate(kind):
    x, kernel, gradient = draws()
    work = [2.0 * math.prod(x.shape) * kernel.shape[1]] * 3
    found = traced_flops(jax.make_jaxpr(functools.partial(products, kind=kind))(x, kernel, gradient))
    assert found == (sum(work) / 2 if kind == "fp8" else work[0] / 2 + work[1] / 2 + work[2])


@pytest.mark.parametrize("kind", KINDS)
def test_accelerators_multiply_the_codes(kind):
    """The matmuls of programs for GPUs and TPUs are of 8-bit numbers; a frozen matrix has two."""
    x, kernel, _ = (jnp.asarray(a) for a in draws())
    forward, of_x, of_kernel = ("f8E4M3FN", "f8E4M3FN"), ("f8E5M2", "f8E4M3FN"), ("f8E4M3FN", "f8E5M2")
    if kind == "int8":
        forward, of_x, of_kernel = ("i8", "i8"), ("i8", "i8"), ("f32", "f32")

    def loss(x, kernel):
        return jnp.sin(eight_bit_matmul(x, kernel, kind)).sum()

    for both in (True, False):
        program = jax.jit(jax.grad(loss, argnums=(0, 1) if both else 0)).trace(x, kernel)
        for platform in ("cuda", "tpu"):
            text = program.lower(lowering_platforms=(platform,)).as_text()
            found = re.findall(r"dot_general.*: \(tensor<\d+x\d+x(\w+)>, tensor<\d+x\d+x(\w+)>\)", text)
            assert sorted(found) == sorted([forward, of_x, *([of_kernel] if both else [])])


def test_maps_that_stay_in_the_type_of_the_computation():
    """Heads and the like, which have no name; decays; those whose sizes kernels do not take; the vision part."""
    assert dtype_of("q", 64, 32, "fp8") == "fp8" and dtype_of("down", 64, 16, "int8") == "int8"
    for name, d_in, d_out in (("", 64, 64), ("ba", 64, 64), ("q", 64, 24), ("q", 60, 64)):
        assert dtype_of(name, d_in, d_out, "fp8") == "auto"
    config = describe("embedded:shapes", matmul_dtype="int8").net.config
    model = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))
    kinds = {
        part: {x.matmul_dtype for _, x in nnx.iter_modules(getattr(model, part)) if isinstance(x, Linear)}
        for part in ("layers", "vision")
    }
    assert kinds == {"layers": {"int8"}, "vision": {"auto"}}


def logps(net, params):
    return token_logps(net, params, Inputs(TOKENS, np.ones_like(TOKENS)))[0].sum()


def matmuls(net, part: str):
    """The matmuls of a backward pass to the parameters whose paths have that part, by the type of their operands."""
    shapes = net.shapes()
    asked = jax.tree_util.tree_map_with_path(lambda path, _: part in jax.tree_util.keystr(path), shapes)
    chosen = jax.tree.map(lambda x, yes: x if yes else None, shapes, asked)
    others = jax.tree.map(lambda x, yes: None if yes else x, shapes, asked)

    def loss(chosen, others):
        return logps(net, jax.tree.map(lambda x, y: y if x is None else x, chosen, others, is_leaf=lambda x: x is None))

    text = jax.jit(jax.grad(loss)).trace(chosen, others).lower(lowering_platforms=("tpu",)).as_text()
    found = re.findall(r"dot_general.*: \(tensor<(?:\d+x)+([a-zA-Z]\w*)>, tensor<(?:\d+x)+([a-zA-Z]\w*)>\)", text)
    return collections.Counter("fp8" if "f8" in "".join(pair) else pair[0].replace("i8", "int8") for pair in found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_network_has_its_layers_in_8_bits(kind):
    """The seven maps of a layer, which is scanned, and neither the head nor attention; of LoRA the base."""
    net, plain = (describe("embedded:sort", matmul_dtype=dtype).net for dtype in (kind, "auto"))
    found, others = matmuls(net, ""), matmuls(plain, "")
    assert found[kind] == 7 * (3 if kind == "fp8" else 2) and found.total() == others.total()
    adapted = matmuls(net.with_lora(LoraConfig(2)), "lora")
    assert adapted[kind] == 7 * 2 and adapted["f32"] > 7 * 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_for_the_backward_pass(kind):
    """With remat=dots outputs in the type of the computation, and no sums of codes; gradients are the same."""
    params, found = load_model("embedded:sort").params, {}
    for remat in ("none", "block", "dots"):
        net = describe("embedded:sort", matmul_dtype=kind, remat=remat).net
        found[remat] = jax.jit(jax.grad(functools.partial(logps, net)))(params)
        off = jax.tree.map(lambda a, b: jnp.abs(a - b).max() / jnp.abs(b).max(), found[remat], found["none"])
        assert max(jax.tree.leaves(off)) < 0.02  # numbers that differ in the last bit may become neighbours in 8
    net = describe("embedded:sort", "bfloat16", matmul_dtype=kind, remat="dots").net
    saved = jax.eval_shape(lambda params: jax.vjp(functools.partial(logps, net), params)[1], net.shapes())
    # Of q, o, gate and up; k and v are narrower, and nothing needs that of down.
    shapes = {(net.config.layers, TOKENS.size, size) for size in (net.config.width, net.config.ffn)}
    assert [str(x.dtype) for x in jax.tree.leaves(saved) if x.shape in shapes] == ["bfloat16"] * 4


def test_sampling_does_without():
    trained, plain = describe("embedded:sort", matmul_dtype="fp8").net, describe("embedded:sort").net
    for dtype in (None, "bfloat16", "int8"):
        assert in_precision(trained, dtype) == in_precision(plain, dtype)
        assert draws_from_another(in_precision(trained, dtype), trained)
    assert not draws_from_another(plain, plain)


def test_devices_without_fp8():
    older = [("NVIDIA A100-SXM4-80GB", "8.0"), ("Tesla T4", "7.5"), ("TPU v6 lite", ""), ("TPU v5p", "")]
    newer = [("NVIDIA H100 80GB HBM3", "9.0"), ("NVIDIA L4", "8.9"), ("TPU7x", ""), ("cpu", ""), ("AMD", "gfx942")]
    for devices, has in ((older, False), (newer, True)):
        for kind, capability in devices:
            device = types.SimpleNamespace(device_kind=kind, compute_capability=capability)
            assert multiplies_fp8(device) == has, kind
    assert [named(name).has_fp8 for name in ("a100", "v6e", "h100", "b200", "cpu")] == [False, False, True, True, True]
    config = types.SimpleNamespace(matmul_dtype="fp8", quantize="none", qat="none")
    with pytest.raises(ConfigError, match=r"matmul_dtype is fp8, but this device \(v6e\) multiplies .* Set it to int8"):
        check_matmul_dtype(config, "v6e", False)
    check_matmul_dtype(types.SimpleNamespace(matmul_dtype="int8", quantize="none", qat="none"), "v6e", False)


def test_settings_that_contradict_it():
    for leaf, value in (("qat", "int8"), ("quantize", "nf4"), ("dtype", "float32")):
        config = default()
        config.model.matmul_dtype, config.model[leaf] = "int8", value
        config.lora.rank = 4 if leaf == "quantize" else 0
        with pytest.raises(ConfigError, match=rf"model.matmul_dtype is int8, .*model.{leaf} is {value}, "):
            validate(config)
    with pytest.raises(ConfigError, match=r"matmul_dtype = 'fp4' is not one of auto, fp8, int8"):
        load_model("embedded:sort", matmul_dtype="fp4")
    with pytest.raises(ConfigError, match="matmul_dtype is fp8, but quantize is nf4 and qat none: "):
        describe("embedded:sort", matmul_dtype="fp8", quantize="nf4")


def tiny(root, folder, config, **changes):
    made = load_config_file(f"{root / 'configs' / config}.py:tiny")
    made.output_dir, made.eval.every, made.logging.backends = str(folder), -1, ("jsonl",)
    made.optimizer.warmup_steps, made.checkpoint.every = 0, 1
    for name, value in changes.items():
        section, leaf = name.split("__")
        made[section][leaf] = value
    return made


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", ["sft", "grpo"])
def test_a_run(root, tmp_path, config, kind):
    """Goes on bit for bit, and compares with the old policy as the update computes it; its model is a plain one."""
    changes = {"model__matmul_dtype": kind, "algorithm__importance_correction": "token_truncate"}
    changes = changes if config == "grpo" else {"model__matmul_dtype": kind}
    result = jaxrl_llm.train(tiny(root, tmp_path / "run", config, **changes))
    changes["checkpoint__resume"] = str(result.output_dir / "checkpoints/1")
    again = jaxrl_llm.train(tiny(root, tmp_path / "again", config, **changes))
    jax.tree.map(np.testing.assert_array_equal, again.model.params, result.model.params)
    written = load_model(result.output_dir / "hf")
    assert written.net.config.matmul_dtype == "auto" and result.model.net.config.matmul_dtype == kind
    if config == "grpo":
        first = result.metrics[0]
        assert first["ratio/mean"] == pytest.approx(1, abs=1e-5) and abs(first["ratio/kl"]) < 1e-5
        assert 1e-4 < first["sampling/sampling_logp_difference/max"] < 1


def test_samples_of_another_policy_are_corrected_for(root, tmp_path):
    config = tiny(root, tmp_path / "run", "grpo", model__matmul_dtype="int8")
    with pytest.raises(
        ConfigError, match=r"model.matmul_dtype is int8, .* algorithm.importance_correction is none: set to"
    ):
        jaxrl_llm.train(config)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_falls_as_without(root, tmp_path, kind):
    """Of a model from random weights, in 40 steps, which take it from 5.8 to 2.2."""
    found = {}
    for dtype in ("auto", kind):
        config = load_config_file(str(root / "configs" / "sft_tiny.py"))
        config.output_dir, config.total_steps, config.eval.every = str(tmp_path / dtype), 40, -1
        config.logging.backends, config.model.matmul_dtype = ("jsonl",), dtype
        found[dtype] = [line["loss"] for line in jaxrl_llm.train(config).metrics]
    assert found["auto"][-1] < found["auto"][0] - 0.5
    assert abs(np.mean(found[kind][-5:]) - np.mean(found["auto"][-5:])) < 0.02


MESH = """
import dataclasses, jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.distributed.sharding import make_mesh, shardings
from jaxrl_llm.models.kernels.eight_bit_matmul import eight_bit_matmul
from jaxrl_llm.models.logprobs import token_logps
from jaxrl_llm.models.model import load_model
from jaxrl_llm.models.net import Net
from tests.models.kernels.test_eight_bit_matmul import KINDS, close, draws

def products(x, kernel, gradient, kind):
    y, back = jax.vjp(lambda x, kernel: eight_bit_matmul(x, kernel, kind), x, kernel)
    return y, *back(gradient)

mesh = jax.make_mesh((2, 2, 2), ("rows", "in", "out"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
specs = P("rows", "in"), P("in", "out"), P("rows", "out")
for kind in KINDS:
    run = jax.jit(products, static_argnums=3)
    whole = run(*draws(), kind)
    parts = run(*(jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(draws(), specs)), kind)
    for found, expected in zip(parts, whole):
        assert len(found.sharding.device_set) == 8
        close(found, np.asarray(expected))

tokens = np.tile(np.arange(97, 105), (8, 2))
for kind in KINDS:
    model = load_model("embedded:sort", matmul_dtype=kind)
    for tile in (0, 8):
        net = Net(dataclasses.replace(model.net.config, mlp_tile_tokens=tile))
        run = jax.jit(jax.value_and_grad(
            lambda params, tokens: token_logps(net, params, Inputs(tokens, jnp.ones_like(tokens)))[0].sum()
        ))
        loss, gradients = run(model.params, tokens)
        for axes in ({"data": 8}, {"data": 1, "fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 2, "context": 2}):
            mesh = make_mesh(**axes)
            with jax.set_mesh(mesh):
                params = jax.device_put(model.params, shardings(model.params, mesh))
                other, others = run(params, tokens)
            # Numbers that differ in the last bit may become neighbours in 8.
            assert abs(other / loss - 1) < 1e-3, (kind, tile, axes, other, loss)
            off = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(b).max()), others, gradients)
            assert max(jax.tree.leaves(off)) < 0.05, (kind, tile, axes, off)
"""


@pytest.mark.slow
def test_on_a_mesh(run_python):
    """Scales of sharded dimensions are those of all devices, and so are draws."""
    done = run_python("-c", MESH, devices=8)
    assert done.returncode == 0, done.stderr[-3000:]
