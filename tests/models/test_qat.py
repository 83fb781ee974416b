"""Quantisation-aware training: the forward pass of quantised matrices, gradients that pass through, whole runs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxrl_llm
from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.config import ConfigError, default, validate
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.models.cast import draws_from_another, in_precision
from jaxrl_llm.models.kernels.stored_matmul import matmul, simulated_matmul
from jaxrl_llm.models.logprobs import token_logps
from jaxrl_llm.models.model import describe, load_model
from jaxrl_llm.models.moe import Experts, dense, grouped
from jaxrl_llm.models.net import Net
from jaxrl_llm.models.quantize import KINDS, dequantize, quantize
from tests.models.test_moe import CONFIG, routed
from tests.training.test_router_replay import write_mixture

TOKENS = np.arange(97, 109)[None]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_matmul_with_what_would_be_stored(kind):
    """Its gradients are those of the stored matrix, passed on; int4 is torchao's symmetric scheme."""
    draw = np.random.default_rng(0)
    x, kernel, pull = (jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in ((5, 128), (128, 6), (5, 6)))
    stored = dequantize(quantize(kernel, kind), kind, jnp.float32)
    assert 1e-3 < np.abs(stored - kernel).max() < 0.5
    found, back = jax.vjp(lambda x, kernel: simulated_matmul(x, kernel, kind), x, kernel)
    np.testing.assert_allclose(found, x @ stored, atol=1e-4)
    for found, expected in zip(back(pull), (pull @ stored.T, x.T @ pull), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4)
    if kind == "int4":  # scale = absmax / 7.5 of each group
        groups = np.asarray(kernel, np.float64).reshape(2, 64, 6)
        scale = np.abs(groups).max(axis=1, keepdims=True) / 7.5
        codes = np.clip(np.round(groups / scale), -8, 7)
        found = np.asarray(stored).reshape(2, 64, 6)
        ties = groups / scale < -7.4999  # of which -7 and -8 are as near
        np.testing.assert_allclose(np.where(ties, 0, found), np.where(ties, 0, codes * scale), atol=1e-6)
        assert 0 < ties.sum() <= 12 and (np.abs(found - groups) <= scale / 2 + 1e-6).all()


def test_two_codes_share_a_byte():
    config = describe("embedded:sort").net.config
    for settings, named in (({"qat": "int4"}, "model.qat"), ({"quantize": "nf4"}, "model.quantize, or teacher.*,")):
        net = Net(dataclasses.replace(config, ffn=33, **settings))
        with pytest.raises(ConfigError, match=rf"^{named} is .*4, which needs matrices with an even number .*, not 33"):
            net.shapes()


def test_the_sampler_has_what_is_trained_for():
    trained, stored = describe("embedded:sort", qat="int4").net, describe("embedded:sort", quantize="int4").net
    sampler = in_precision(trained, None)
    assert sampler == stored and not draws_from_another(sampler, trained)
    with pytest.raises(ConfigError, match=r"rollout.weights_dtype is int8, but model.qat trains for matrices in int4"):
        in_precision(trained, "int8")


@pytest.mark.slow
def test_the_model_computes_as_the_quantised_one():
    """Logits, and gradients with respect to its matrices as numbers."""
    base, stored = load_model("embedded:sort"), load_model("embedded:sort", quantize="int4")
    trained = load_model("embedded:sort", qat="int4")
    np.testing.assert_allclose(trained(TOKENS), stored(TOKENS), atol=1e-4)
    assert np.abs(trained(TOKENS) - base(TOKENS)).max() > 1e-2

    def loss(params, net: Net):
        return token_logps(net, params, Inputs(TOKENS, np.ones_like(TOKENS)))[0].sum()

    plain = jax.tree.map(lambda x: x, base.params)
    for part in ("attention", "mlp"):
        for name, linear in stored.params["layers"][part].items():
            plain["layers"][part][name]["kernel"] = dequantize(linear["kernel"], "int4", jnp.float32)
    expected = jax.jit(jax.grad(loss), static_argnums=1)(plain, base.net)
    found = jax.jit(jax.grad(loss), static_argnums=1)(base.params, trained.net)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3, rtol=1e-4), found, expected)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_sampler_and_trainer_compute_the_same_in_16_bits(kind):
    """So that no other policy is drawn from: the codes are multiplied, not a rounded matrix."""
    draw = np.random.default_rng(0)
    x, kernel, pull = (jnp.asarray(draw.normal(size=shape), jnp.bfloat16) for shape in ((5, 128), (128, 6), (5, 6)))
    kernel = kernel.astype(jnp.float32)
    found, back = jax.vjp(lambda x, kernel: simulated_matmul(x, kernel, kind), x, kernel)
    np.testing.assert_array_equal(found, matmul(x, quantize(kernel, kind), kind))
    assert [x.dtype for x in back(pull)] == [jnp.bfloat16, jnp.float32]


@pytest.mark.slow
@pytest.mark.parametrize("way", [dense, grouped])
def test_experts_compute_with_what_would_be_stored(way):
    """Their matrices get the gradients of the stored ones; with quantize_experts=none they are numbers."""
    graph, state = nnx.split(Experts(dataclasses.replace(CONFIG, qat="int4"), nnx.Rngs(0)))
    plain = nnx.split(Experts(CONFIG, nnx.Rngs(0)))[0]
    x, weights, chosen = routed(7)

    def loss(params, graph):
        out = nnx.merge(graph, params).compute(way, x, weights, jnp.asarray(chosen))
        return (out * jnp.cos(jnp.arange(8))).sum(), out

    rounded = jax.tree.map(lambda x: dequantize(quantize(x, "int4"), "int4", jnp.float32), state)
    found, expected = (
        jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)(params, graph)
        for params, graph in ((state, graph), (rounded, plain))
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, expected)
    left = nnx.split(Experts(dataclasses.replace(CONFIG, qat="int4", quantize_experts="none"), nnx.Rngs(0)))[0]
    np.testing.assert_array_equal(loss(state, left)[1], loss(state, plain)[1])
    assert np.abs(loss(state, left)[1] - found[0][1]).max() > 1e-4


@pytest.mark.slow
def test_a_mixture_is_served_as_it_was_trained(root, tmp_path):
    """By the written model, quantised, and by the sampler."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    folder = write_mixture(tmp_path, **experts, initializer_range=0.3)
    for of_experts in ("same", "none"):
        settings = {"model__path": str(folder), "model__random_init": True, "model__quantize_experts": of_experts}
        result = jaxrl_llm.train(tiny(root, tmp_path / of_experts, "grpo", **settings))
        written = load_model(result.output_dir / "hf", quantize="int4", quantize_experts=of_experts)
        np.testing.assert_allclose(written(TOKENS), result.model(TOKENS), atol=1e-3)
        for line in result.metrics:
            assert line["sampling/sampling_logp_difference/max"] < 1e-3


def tiny(root, folder, config, **changes):
    made = load_config_file(f"{root / 'configs' / config}.py:tiny")
    made.output_dir, made.eval.every, made.logging.backends = str(folder), -1, ("jsonl",)
    made.model.qat, made.optimizer.warmup_steps, made.checkpoint.every = "int4", 0, 1
    for name, value in changes.items():
        section, leaf = name.split("__")
        made[section][leaf] = value
    return made


@pytest.mark.slow
@pytest.mark.parametrize("config", ["sft", "grpo"])
def test_a_run(root, tmp_path, config):
    """The model that is written computes, quantised, as the one that was trained; the sampler has it so."""
    changes = {"batch__microbatch_rows": 4} if config == "sft" else {}
    result = jaxrl_llm.train(tiny(root, tmp_path / "run", config, **changes))
    written = load_model(result.output_dir / "hf", quantize="int4")
    np.testing.assert_allclose(written(TOKENS), result.model(TOKENS), atol=1e-3)
    for line in result.metrics:
        assert line.get("sampling/sampling_logp_difference/max", 0.0) < 1e-3
    if config == "grpo":
        again = tiny(root, tmp_path / "again", config, checkpoint__resume=str(result.output_dir / "checkpoints/1"))
        jax.tree.map(np.testing.assert_array_equal, jaxrl_llm.train(again).model.params, result.model.params)


def test_frozen_matrices_are_refused():
    for section, leaf, value in (("lora", "rank", 4), ("lora", "path", "folder"), ("model", "quantize", "nf4")):
        config = default()
        config.model.qat = "int8"
        config[section][leaf] = value
        config.lora.rank = 4 if leaf == "quantize" else config.lora.rank
        with pytest.raises(ConfigError, match=r"model.qat is int8, for which the matrices are trained as numbers, but"):
            validate(config)
