"""Quantised matrices of experts: MXFP4 by hand, outputs and gradients, what is kept for them, folders, the sampler."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.schema import QUANTIZED
from jaxrl_llm.distributed.sharding import AXES
from jaxrl_llm.models.adapters import lora
from jaxrl_llm.models.cast import decoding_params
from jaxrl_llm.models.files import mxfp4
from jaxrl_llm.models.model import add_adapters, copied_model, load_model, save_hf
from jaxrl_llm.models.moe import Experts, dense, grouped
from jaxrl_llm.models.net import Net
from jaxrl_llm.models.quantize import KINDS, dequantize, quantize, quantized_as
from jaxrl_llm.models.transformer import REMAT
from tests.models.adapters.test_expert_adapters import SHAPE, logits, moved
from tests.models.adapters.test_lora import TOKENS, shaken
from tests.models.conftest import make_oracle
from tests.models.test_moe import CONFIG, routed


def as_numbers(params, kind):
    """The parameters with quantised kernels as numbers."""
    if "codes" in params:
        return dequantize(params, kind, jnp.float32)
    return {name: as_numbers(x, kind) if isinstance(x, dict) else x for name, x in params.items()}


def test_mxfp4_by_hand():
    """7 is beyond the largest level; of two levels as near it is the even one; -0 is a level too."""
    column = np.zeros(32, np.float32)
    column[:9] = 7, 0.25, 0.75, -2.5, 5, 3.5, -0.25, 1.25, -6
    kernel = np.stack([column, column * 2.0**-9, np.zeros(32)], axis=1)
    stored = quantize(jnp.asarray(kernel), "mxfp4")
    np.testing.assert_array_equal(stored["scales"][0, :2], [127, 118])
    assert stored["codes"][0, 0] == 7 + 16 * 0 and stored["codes"][1, 0] == 2 + 16 * (8 + 4)
    expected = np.zeros(32, np.float32)
    expected[:9] = 6, 0, 1, -2, 4, 4, -0.0, 1, -6
    found = dequantize(stored, "mxfp4", jnp.float32)
    np.testing.assert_array_equal(found, np.stack([expected, expected * 2.0**-9, np.zeros(32)], axis=1))
    assert KINDS == QUANTIZED


def test_what_is_in_mxfp4_already_keeps_every_number():
    """Blocks of all 16 levels, of the small ones alone, whose scale then is another, and of the smallest scales."""
    draw = np.random.default_rng(0)
    levels = np.stack([draw.integers(0, 16, (64, 40)) % most + 8 * (most < 8) * draw.integers(0, 2, (64, 40))
                       for most in (16, 6, 4, 3, 2)])  # fmt: skip
    numbers = mxfp4.FP4[levels].reshape(5, 2, 32, 40) * 2.0 ** draw.integers(-120, 100, (5, 2, 1, 40))
    kernel = jnp.asarray(numbers.reshape(5, 64, 40), jnp.float32)
    np.testing.assert_array_equal(dequantize(quantize(kernel, "mxfp4"), "mxfp4", jnp.float32), kernel)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "kind"), [
    (way, kind) for way in (dense, grouped) for kind in KINDS if kind != "none"
])  # fmt: skip
def test_they_compute_as_their_numbers(way, kind):
    """Outputs and gradients, of the adapters beside them too; and each expert's matrix is stored as it is alone."""
    config = dataclasses.replace(CONFIG, quantize_experts=kind, lora=SHAPE, expert_bias=True)
    graph, state = nnx.split(Experts(config, nnx.Rngs(0)))
    of_numbers = nnx.split(Experts(dataclasses.replace(config, quantize_experts="none"), nnx.Rngs(0)))[0]
    params = moved({"experts": nnx.to_pure_dict(state)})["experts"]
    numbers = as_numbers(params, kind)
    one = jax.tree.map(lambda x: x[2], params["down"]["kernel"])
    np.testing.assert_array_equal(dequantize(one, kind, jnp.float32), numbers["down"]["kernel"][2])
    x, weights, chosen = routed(7)

    def loss(trained, graph, params):
        x, adapters = trained
        module = nnx.merge(graph, lora.combine(params, adapters))
        out = module.compute(way, x, weights, jnp.asarray(chosen))
        return (out * jnp.cos(jnp.arange(8))).sum(), out

    trained = (x, lora.adapters_of(params))
    found, expected = (
        jax.jit(jax.value_and_grad(functools.partial(loss, graph=graph, params=held), has_aux=True))(trained)
        for graph, held in ((graph, params), (of_numbers, numbers))
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=1e-5), found, expected)


@pytest.mark.parametrize("way", [dense, grouped])
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_no_numbers_of_theirs_are_kept_for_the_backward_pass(way, kind):
    """Of a layer without rematerialisation, and of one whose matmuls are saved."""
    config = dataclasses.replace(CONFIG, quantize_experts=kind)
    graph, state = nnx.split(Experts(config, nnx.Rngs(0)))
    x, weights, chosen = routed(40)

    def layer(x):
        return nnx.merge(graph, state).compute(way, x, weights, jnp.asarray(chosen)).sum()

    for function in (layer, jax.checkpoint(layer, policy=REMAT["dots"])):
        kept = jax.tree.leaves(jax.eval_shape(lambda x, function=function: jax.vjp(function, x)[1], x))
        assert not [x for x in kept if x.shape in ((4, 8, 6), (4, 6, 8)) and jnp.issubdtype(x.dtype, jnp.floating)]
        assert way is dense or function is layer or (80, 6) in {x.shape for x in kept}


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_few_tokens_convert_the_matrices_of_their_own_experts(kind):
    """In float32 the gates of all 64 are 400 kB, and those of one 6."""
    config = dataclasses.replace(CONFIG, width=64, expert_ffn=24, experts=64, quantize_experts=kind)
    graph, state = nnx.split(Experts(config, nnx.Rngs(0)))

    def layer(state, x):
        return nnx.merge(graph, state).compute(grouped, x, jnp.ones((2, 2)), jnp.array([[3, 9], [9, 60]]))

    compiled = jax.jit(layer).lower(state, jnp.zeros((2, 64))).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 100_000


@pytest.mark.slow
def test_a_folder_is_read_in_fewer_bits_and_written_as_numbers(tmp_path):
    """Layer by layer as all at once, experts in another kind than the rest; the export has adapters merged."""
    make_oracle("mixtral").save_pretrained(tmp_path / "base")
    base = load_model(tmp_path / "base")
    model = load_model(tmp_path / "base", quantize="int8", quantize_experts="nf4")
    config = model.net.config
    assert config.quantized == "int8 (experts nf4)"
    assert dataclasses.replace(config, quantize_experts="same").quantized == "int8"
    expected = quantized_as(base.params, model.net.shapes(), config.quantized_at)
    jax.tree.map(np.testing.assert_array_equal, model.params, expected)
    adapted = shaken(add_adapters(model, SHAPE, jax.random.key(0)))
    save_hf(adapted, tmp_path / "merged")
    np.testing.assert_allclose(load_model(tmp_path / "merged")(TOKENS), adapted(TOKENS), atol=1e-4)
    assert np.abs(adapted(TOKENS) - model(TOKENS)).max() > 0.1
    with pytest.raises(ConfigError, match=r"quantize_experts = 'int3' is not one of same, none, int8"):
        load_model(tmp_path / "base", quantize_experts="int3")
    mesh = jax.make_mesh((1,) * len(AXES), AXES)
    copy = copied_model(adapted, mesh, quantize="int8", quantize_experts="nf4")
    jax.tree.map(np.testing.assert_array_equal, copy.params, adapted.params)
    with pytest.raises(
        ConfigError, match=r"is int8, but .* in memory stores its matrices as int8 \(experts nf4\): save"
    ):
        copied_model(adapted, mesh, quantize="int8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "beside"),
    [({"quantize_experts": "mxfp4"}, {"experts"}), ({"quantize": "int8"}, {"experts", "attention"})],
)
def test_the_sampler_has_them_as_they_are(kinds, beside):
    """With the adapters of quantised matrices beside these, and others merged."""
    net = Net(dataclasses.replace(CONFIG, lora=SHAPE, **kinds))
    params = moved(jax.jit(net.init)(jax.random.key(0)))
    sampler = decoding_params(params, net)
    assert {"experts", "attention"} & {
        part for part, experts in (("experts", True), ("attention", False)) if lora.has_adapters_of(sampler, experts)
    } == beside
    kernels = [tree["layers"]["mlp"]["experts"]["up"]["kernel"] for tree in (sampler, params)]
    jax.tree.map(np.testing.assert_array_equal, *kernels)
    np.testing.assert_allclose(logits(net, sampler, TOKENS % 31), logits(net, params, TOKENS % 31), atol=1e-5)


def test_channels_that_devices_cannot_share_are_refused():
    """Six of each expert over six devices: a byte has two of them."""
    mesh = AbstractMesh((1, 1, 1, 1, 6), AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))
    graph, state = nnx.split(Experts(dataclasses.replace(CONFIG, quantize_experts="nf4"), nnx.Rngs(0)))
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(ConfigError, match=r"mesh.tensor is 6, .* share a byte"):
        jax.eval_shape(lambda *x: nnx.merge(graph, state).compute(dense, *x), *routed(6))
