"""Sampling in fewer bits: what matrices and caches hold, that log-probs are the sampler's own, who may use it."""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxrl_llm
from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.sharding import path_name
from jaxrl_llm.models.adapters import lora
from jaxrl_llm.models.cast import decoding_params, draws_from_another, in_precision
from jaxrl_llm.models.families import family_of
from jaxrl_llm.models.kernels.stored_matmul import frozen_matmul, matmul
from jaxrl_llm.models.logprobs import token_logps
from jaxrl_llm.models.mixers.attention import Attention, KeyValues
from jaxrl_llm.models.mixers.mamba2 import Mamba2
from jaxrl_llm.models.mixers.short_conv import ShortConv
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net
from jaxrl_llm.models.quantize import BYTES, dequantize, narrowed, quantize, widened
from jaxrl_llm.rollout import engine as engines
from jaxrl_llm.rollout.assignment import assign
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import SamplingParams
from jaxrl_llm.rollout.scheduler import Scheduler
from jaxrl_llm.rollout.slots import row_keys
from jaxrl_llm.tools.plan.topology import tpu_chips
from jaxrl_llm.training.setup.worker import check_correction
from tests.models.decoding import padded
from tests.models.images import VISION

CONFIG = ModelConfig(
    vocab_size=29, width=16, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=24, init_scale=0.4, tie_embeddings=True
)
NET = Net(CONFIG)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]
TOKENS, SEGMENTS = padded(PROMPTS, "left")
ENGINE = Engine(SamplingParams(), net=NET, group_size=4, max_completion_length=8, eos=(3,), chunk=8)
KINDS = ["int8", pytest.param("fp8", marks=pytest.mark.slow)]
EXPERTS = Net(dataclasses.replace(CONFIG, experts=4, experts_per_token=2, expert_ffn=6))


@pytest.fixture(scope="module")
def params():
    return jax.jit(NET.init)(jax.random.key(0))


def generate(engine, params):
    return jax.tree.map(np.asarray, engine.generate(params, TOKENS, SEGMENTS, jax.random.key(1)))


def logps_of(net, params, rollout):
    """What a whole forward pass gives for the sampled tokens."""
    score = jax.jit(lambda p, t, s: token_logps(net, p, Inputs(t, s, prompt_width=TOKENS.shape[1]))[0])
    return np.asarray(score(params, rollout.tokens, rollout.segments)) * rollout.mask


def rounded(params, kind):
    """The parameters with their matrices put in 8 bits and back, layer by layer."""

    def visit(tree):
        return {
            name: dequantize(quantize(x, kind), kind, jnp.float32) if name == "kernel" else
            visit(x) if isinstance(x, dict) and name != "router" else x for name, x in tree.items()
        }  # fmt: skip

    return {**params, "layers": visit(params["layers"])}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_those_of_the_rounded_matrices(params, kind):
    """Token for token, with their log-probs, which differ from those of the parameters that are trained."""
    found = generate(dataclasses.replace(ENGINE, weights_dtype=kind), params)
    own = rounded(params, kind)
    expected = generate(ENGINE, own)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.sample_logps, expected.sample_logps, atol=1e-5)
    np.testing.assert_allclose(found.sample_logps, logps_of(NET, own, found), atol=1e-4)
    difference = np.abs(found.sample_logps - logps_of(NET, params, found)).max()
    assert 1e-3 < difference < {"int8": 0.3, "fp8": 2.0}[kind]


@pytest.mark.parametrize("kind", list(BYTES))
def test_which_parameters_are_in_eight_bits(kind):
    """The matrices of the layers, experts among them: not embeddings, norms or routers; adapters are merged before."""
    nets = {"dense": NET.with_lora(lora.LoraConfig(2)), "experts": EXPERTS}
    for name, net in nets.items():
        engine = dataclasses.replace(ENGINE, net=net, weights_dtype=kind)
        shapes = jax.eval_shape(engine.decoding_params, net.shapes())
        found = {path_name(path): x.dtype for path, x in jax.tree_util.tree_leaves_with_path(shapes)}
        narrow = {path.split("/", 1)[1] for path, dtype in found.items() if dtype == BYTES[kind][0]}
        matrices = [f"attention/{x}" for x in "qkvo"]
        matrices += [f"mlp{'/experts' * (name == 'experts')}/{x}" for x in ("gate", "up", "down")]
        assert narrow == {f"{matrix}/kernel/codes" for matrix in matrices}
        assert {dtype for path, dtype in found.items() if not path.endswith("codes")} == {jnp.dtype("float32")}


@pytest.mark.slow
def test_adapters_are_in_the_codes(params):
    net = NET.with_lora(lora.LoraConfig(4, alpha=8.0))
    made = lora.adapters_of(net.init(jax.random.key(2)))
    made = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(3), x.shape), made)
    adapted = lora.combine(params, made)
    engine = dataclasses.replace(ENGINE, net=net, weights_dtype="int8")
    found, expected = generate(engine, adapted), generate(ENGINE, rounded(lora.merge(adapted, net.config.lora), "int8"))
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.sample_logps, expected.sample_logps, atol=1e-5)


@pytest.mark.slow
def test_the_schedule_changes_no_sample(params):
    """Slots, chunks and grids, with matrices and caches in 8 bits."""
    engine = dataclasses.replace(ENGINE, weights_dtype="int8", cache_dtype="fp8")
    expected = generate(engine, params)
    for change in ({"slots": 5, "chunk": 3}, {"chunk": 2, "shrink": 0.9}, {"slots": 2}):
        found = generate(dataclasses.replace(engine, **change), params)
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_allclose(found.sample_logps, expected.sample_logps, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"weights_dtype": "int8"}, {"weights_dtype": "fp8", "cache_dtype": "fp8"}])
def test_greedy_samples_of_a_trained_model_mostly_agree(change):
    model = jaxrl_llm.load_model("embedded:sort")
    ids = [model.tokenizer(f"sort:{number}=")["input_ids"] for number in range(1000, 9000, 125)]
    prompts, segments = padded(ids, "left")
    engine = Engine(SamplingParams(0.0), 1, 6, net=model.net, eos=(model.tokenizer.eos_token_id,))
    found = [
        np.asarray(one.generate(model.params, prompts, segments, jax.random.key(0)).tokens)
        for one in (engine, dataclasses.replace(engine, **change))
    ]
    assert (found[0] == found[1]).all(axis=1).mean() > 0.75


@pytest.mark.slow
@pytest.mark.parametrize("experts", [4, 8])  # computed all for each token, and in groups
def test_experts_sample_in_eight_bits(experts):
    """Token for token as with the rounded matrices, adapters merged before."""
    net = Net(dataclasses.replace(EXPERTS.config, experts=experts))
    net = net.with_lora(lora.LoraConfig(2, targets=lora.parse_targets(["q", "experts"])))
    params = jax.tree.map(lambda x: x + 0.02, jax.jit(net.init)(jax.random.key(0)))
    found = generate(dataclasses.replace(ENGINE, net=net, weights_dtype="int8"), params)
    own = rounded(lora.merge(params, net.config.lora), "int8")
    expected = generate(dataclasses.replace(ENGINE, net=net), own)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.sample_logps, expected.sample_logps, atol=1e-5)
    difference = np.abs(found.sample_logps - logps_of(net, params, found))
    assert 1e-4 < difference.mean() < 0.1


def test_another_type(params):
    """bfloat16 under a float32 trainer: all but the norms, and the caches with them."""
    engine = dataclasses.replace(ENGINE, weights_dtype="bfloat16")
    shapes = jax.eval_shape(engine.decoding_params, params)
    found = {path_name(path): x.dtype for path, x in jax.tree_util.tree_leaves_with_path(shapes)}
    assert {dtype for path, dtype in found.items() if not path.endswith("scale")} == {jnp.dtype("bfloat16")}
    _, cache, _ = jax.eval_shape(lambda p: engine.decoder.bind(p).prefill(TOKENS, SEGMENTS), shapes)
    assert {x.dtype for x in jax.tree.leaves(cache)} == {jnp.dtype("bfloat16")}
    rollout = generate(engine, params)
    difference = np.abs(rollout.sample_logps - logps_of(NET, params, rollout)).max()
    assert 1e-4 < difference < 0.3


@pytest.mark.slow
def test_what_the_trainer_has_in_fp32_is_not_rounded_in_16_bits():
    """Logits of the sampler's parameters are those of the trainer's bit for bit, routers and biases included."""
    config = dataclasses.replace(
        CONFIG, dtype="bfloat16", layers=3, mixers=(Mamba2, ShortConv, Attention), attention_sinks=True, conv_bias=True,
        conv_size=3, delta_key_heads=2, delta_value_heads=4, delta_key_dim=6, delta_value_dim=5, delta_conv=4,
        experts=4, experts_per_token=2, expert_ffn=6, router_sigmoid=True, router_correction=True,
    )  # fmt: skip
    net, rng = Net(config), np.random.default_rng(0)

    def drawn(path, x):
        far = 300.0 if path_name(path).endswith("correction") else 0.0  # corrections whose differences are small
        return jnp.asarray(rng.normal(far, 0.4, x.shape), jnp.float32)

    params = jax.tree_util.tree_map_with_path(drawn, net.shapes())
    logits = jax.jit(lambda params: net.bind(params)(TOKENS, SEGMENTS))
    np.testing.assert_array_equal(logits(params), logits(decoding_params(params, net)))
    entries = VISION["qwen3_vl"]().to_dict()
    net = Net(family_of(entries).to_config(entries, dtype="bfloat16"))
    shapes = jax.eval_shape(functools.partial(decoding_params, decoder=net), net.shapes())
    assert shapes["vision"]["encoder"]["position"]["weight"].dtype == jnp.float32  # which is interpolated in fp32


def test_keys_and_values_in_fp8(params):
    """One byte a number, computed with as fp32: log-probs close to the policy's."""
    rollout = generate(dataclasses.replace(ENGINE, cache_dtype="fp8"), params)
    difference = np.abs(rollout.sample_logps - logps_of(NET, params, rollout)).max()
    assert 1e-3 < difference < 0.7
    cache = KeyValues(*(jnp.zeros((3, 2, 7, 8), jnp.uint8),) * 2)
    assert {x.dtype for x in Attention.empty_cache(cache, 4, 8)} == {jnp.dtype("uint8")}


def test_fp8_has_no_infinity():
    """Numbers beyond its range become its largest, where a cast would make them NaN."""
    x = jnp.array([1000.0, -1000.0, 448.0, 0.3, jnp.nan])
    stored = narrowed(x, jnp.dtype("uint8"))
    assert stored.dtype == jnp.uint8
    np.testing.assert_array_equal(widened(stored, jnp.float32), [448.0, -448.0, 448.0, 0.3125, np.nan])
    np.testing.assert_array_equal(widened(jnp.zeros(2, jnp.uint8), jnp.bfloat16), 0.0)  # as empty caches are
    assert narrowed(x, jnp.bfloat16).dtype == jnp.bfloat16


def test_fp8_by_hand():
    """The largest of a column is 448; between 256 and 448 the codes are 32 apart."""
    stored = quantize(jnp.array([[2.0], [-1.0], [1.2], [0.0]]), "fp8")
    assert stored["codes"].dtype == jnp.uint8 and stored["absmax"].shape == (1, 1)
    np.testing.assert_array_equal(widened(stored["codes"], jnp.float32)[:, 0], [448.0, -224.0, 256.0, 0.0])  # 268.8
    kernel, g = jnp.asarray(np.random.default_rng(0).normal(size=(64, 3)), jnp.float32), jnp.ones((5, 3))
    stored = quantize(kernel, "fp8")
    dense = dequantize(stored, "fp8", jnp.float32)
    assert np.abs(dense / kernel - 1).max() < 2**-4 + 1e-3
    y, back = jax.vjp(lambda x: frozen_matmul(x, stored, "fp8"), jnp.ones((5, 64)))
    np.testing.assert_allclose(y, jnp.ones((5, 64)) @ dense, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(back(g)[0], g @ dense.T, rtol=1e-5, atol=1e-5)


def decode_program(engine, params):
    """The compiled decode loop, its parameters' bytes, and the bytes of all of them in fp32."""
    held = jax.jit(engine.decoding_params)(params)
    keys = row_keys(jax.random.key(0), np.uint32(0), 12)
    bank, rows = engines.prefill(engine, held, TOKENS, SEGMENTS, keys)
    seated = assign(engine.decoder, bank, rows, keys, Scheduler(3, 4, 1, 12).grid, 8)
    compiled = engines.decode_chunk.lower(engine, held, *seated, 8).compile()
    return compiled, sum(x.nbytes for x in jax.tree.leaves(held))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_wide_copy_of_the_matrices_is_kept(kind):
    """The loop holds one converted matrix at a time, not those of all layers."""
    net = Net(dataclasses.replace(CONFIG, width=64, ffn=256, layers=4, heads=8))
    params = jax.jit(net.init)(jax.random.key(0))
    matrices = sum(
        x.size for path, x in jax.tree_util.tree_leaves_with_path(params) if path_name(path).endswith("kernel")
    )
    engine = dataclasses.replace(ENGINE, net=net)
    wide, wide_bytes = decode_program(engine, params)
    narrow, narrow_bytes = decode_program(dataclasses.replace(engine, weights_dtype=kind), params)
    assert narrow_bytes < wide_bytes - 2.8 * matrices
    memory, before = narrow.memory_analysis(), wide.memory_analysis()
    assert memory.argument_size_in_bytes < before.argument_size_in_bytes - 2.8 * matrices
    assert memory.temp_size_in_bytes < 1.5 * 4 * matrices / net.config.layers + 4 * before.temp_size_in_bytes


def settings(**changes):
    config = jaxrl_llm.default_config()
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in changes.items()})
    return config


@pytest.mark.parametrize("change", [{"weights_dtype": "int8"}, {"weights_dtype": "bfloat16"}, {"cache_dtype": "fp8"}])
def test_training_in_fewer_bits_needs_a_correction(change):
    engine = dataclasses.replace(ENGINE, **change)
    (name, value), config = *change.items(), settings()
    with pytest.raises(ConfigError, match=rf"rollout.{name} is {value}, .*importance_correction is none: set token_tr"):
        check_correction(config, engine)
    config.algorithm.importance_correction = "token_truncate"
    check_correction(config, engine)


def test_what_needs_no_correction():
    half = Net(dataclasses.replace(CONFIG, dtype="bfloat16"))
    for engine in (
        ENGINE,
        dataclasses.replace(ENGINE, weights_dtype="float32", cache_dtype="bfloat16"),
        dataclasses.replace(ENGINE, net=half, weights_dtype="bfloat16"),
        dataclasses.replace(ENGINE, net=Net(dataclasses.replace(CONFIG, quantize="int8")), weights_dtype="int8"),
    ):
        check_correction(settings(), engine)


def test_matrices_that_are_quantised_already_are_sampled_with_as_they_are():
    net = Net(dataclasses.replace(CONFIG, quantize="nf4"))
    with pytest.raises(ConfigError, match=r"weights_dtype is int8, but model.quantize has the matrices in nf4 already"):
        in_precision(net, "int8")
    assert in_precision(net, "bfloat16").config.quantize == "nf4"
    net = Net(dataclasses.replace(EXPERTS.config, quantize_experts="mxfp4"))
    with pytest.raises(ConfigError, match=r"weights_dtype is fp8, but .* matrices in mxfp4 \(experts alone\) already"):
        in_precision(net, "fp8")
    trained = Net(dataclasses.replace(EXPERTS.config, qat="int8"))
    assert in_precision(trained, "int8").config.quantized == "int8"
    alone = Net(dataclasses.replace(EXPERTS.config, qat="int8", quantize_experts="none"))
    assert in_precision(alone, "int8").config.quantized == "int8 (experts none)"
    assert not draws_from_another(in_precision(trained, "int8"), trained)
    assert draws_from_another(in_precision(EXPERTS, "int8"), EXPERTS)


def test_experts_stay_on_tpus(monkeypatch):
    """Where no kernel reads their codes; those that are quantised already are sampled with all the same."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert in_precision(EXPERTS, "int8").config.quantized == "int8 (experts none)"
    assert in_precision(NET, "int8") == Net(dataclasses.replace(CONFIG, quantize="int8"))
    held = Net(dataclasses.replace(EXPERTS.config, quantize="int8"))
    assert in_precision(held, "int8") == held


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the TPU compiler is not installed")
@pytest.mark.parametrize("kind", BYTES)
def test_tpus_read_one_byte_a_number(kind):
    """The TPU compiler makes the conversion part of the product: no layer's matrix is there in 16 bits."""
    chips = tpu_chips("v5e", 1)
    place = NamedSharding(Mesh(np.array(chips), ("rows",)), PartitionSpec())
    layers, width, rows = 4, 1024, 16

    def array(*shape: int, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def decode(x, codes, absmax):
        def layer(x, kernel):
            return matmul(x, dict(zip(("codes", "absmax"), kernel, strict=True)), kind), None

        return jax.lax.scan(layer, x, (codes, absmax))[0]

    codes = array(layers, width, width, dtype=BYTES[kind][0])
    x, absmax = array(rows, width, dtype=jnp.bfloat16), array(layers, 1, width, dtype=jnp.float32)
    memory = jax.jit(decode).lower(x, codes, absmax).compile().memory_analysis()
    assert memory.argument_size_in_bytes < 1.1 * layers * width**2
    assert memory.temp_size_in_bytes < width**2  # less than one matrix in 8 bits
