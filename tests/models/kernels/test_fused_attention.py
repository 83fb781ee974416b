"""The kernels of TPUs and GPUs, run by Pallas' interpreter, against attention whose scores are all formed."""

import dataclasses
import functools
import importlib.util
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

import jaxrl_llm
from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.models import layers, model
from jaxrl_llm.models.kernels import fused_attention
from jaxrl_llm.models.kernels.fused_attention import (
    block_size,
    described,
    flash_attention,
    has_triton,
    implementation,
    splash_attention,
    with_sinks,
)
from jaxrl_llm.models.mixers import attention
from jaxrl_llm.models.model import check_attention, compute_dtype
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net
from jaxrl_llm.models.transformer import attention_mask, segment_positions

LENGTH = 150  # no multiple of a block
CONFIG = ModelConfig(
    vocab_size=31, width=16, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=24, init_scale=0.3, sliding_window=30
)


def packed_segments() -> np.ndarray:
    """Rows of documents with padding before, between and behind them, and a row of padding."""
    segments = np.zeros((3, LENGTH), np.int32)
    segments[0, 9:60], segments[0, 60:140] = 1, 2
    segments[1, :100], segments[1, 104:] = 4, 3
    return segments


def shared_prompts() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Segments, prefixes and positions of a prompt with three completions, and of one with two."""
    segments, prefixes, positions = np.zeros((3, 2, LENGTH), np.int32)
    for row, prompt, own in ((0, 70, (20, 35, 15)), (1, 10, (60, 64))):
        starts = np.cumsum((0, prompt, *own))
        for number, (start, stop) in enumerate(itertools.pairwise(starts)):
            segments[row, start:stop] = number + 1
            prefixes[row, start:stop] = 1
            positions[row, start:stop] = np.arange(stop - start) + (prompt if number else 0)
    return segments, prefixes, positions


@functools.partial(jax.jit, static_argnames=("attend",))
def outputs_and_gradients(attend, q, k, v, real):
    """What `attend` makes of real tokens, and the gradients of a number made of it."""

    def loss(parts):
        out = jnp.where(real[..., None, None, None], attend(*parts), 0.0)
        return jnp.sin(out).sum(), out

    (_, out), gradients = jax.value_and_grad(loss, has_aux=True)((q, k, v))
    return out, gradients


def dense(mask, softcap, q, k, v):
    scores = layers.soft_cap(jnp.einsum("ntjrd,nsjd->njrts", q, k), softcap)
    return jnp.einsum("njrts,nsjd->ntjrd", jax.nn.softmax(jnp.where(mask[:, None, None], scores, -1e30)), v)


@pytest.mark.parametrize(("window", "softcap"), [pytest.param(None, None, marks=pytest.mark.slow), (40, 2.0)])
@pytest.mark.parametrize("by", ["segments", pytest.param("mask", marks=pytest.mark.slow), "mask of images"])
def test_outputs_and_gradients(by, window, softcap):
    """Of packed documents, by their numbers; of completions that see their prompt, and of images, by a mask."""
    segments, prefixes, positions = shared_prompts()
    if by == "segments":
        segments, prefixes = packed_segments(), None
        positions = np.asarray(segment_positions(segments))
    runs = jnp.where((segments != 0) & (jnp.arange(segments.shape[1]) % 90 > 20), segments, 0)
    mask = attention_mask(segments, prefixes, runs if by == "mask of images" else None)
    if window:
        mask &= positions[:, :, None] - positions[:, None, :] < window
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((2, 2, 8), (2, 8), (2, 8))  # 4 query heads, 2 of keys
    q, k, v = (jax.random.normal(key, (*segments.shape, *shape)) for key, shape in zip(keys, shapes, strict=True))
    options = {"window": window} if by == "segments" else {"mask": mask}
    splash = functools.partial(splash_attention, segments=segments, softcap=softcap, interpret=True, **options)
    expected = outputs_and_gradients(functools.partial(dense, mask, softcap), q, k, v, segments != 0)
    found = outputs_and_gradients(splash, q, k, v, segments != 0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)
    assert np.isfinite(splash(q, k, v)).all()


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 2])
def test_flash_attention_of_gpus(heads):
    """Of packed documents, whose length is no multiple of a block; queries of one and of two heads share keys."""
    segments = packed_segments()[:2]
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((2, heads, 16), (2, 16), (2, 16))
    q, k, v = (jax.random.normal(key, (*segments.shape, *shape)) for key, shape in zip(keys, shapes, strict=True))
    flash = functools.partial(flash_attention, segments=segments, interpret=True)
    expected = outputs_and_gradients(functools.partial(dense, attention_mask(segments), None), q, k, v, segments != 0)
    found = outputs_and_gradients(flash, q, k, v, segments != 0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, expected)
    assert np.isfinite(flash(q, k, v)).all()


def test_sinks_as_the_scores_of_one_more_key():
    """What cuDNN gets: outputs and gradients of a softmax with one more score, which has no value."""
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((2, 2, 8), (2, 8), (2, 8))
    q, k, v = (jax.random.normal(key, (2, 40, *shape)) for key, shape in zip(keys, shapes, strict=False))
    sinks = 3 * jax.random.normal(keys[3], (2, 2))
    segments = np.ones((2, 40), np.int32)
    segments[0, 20:], segments[1, :5] = 2, 0
    mask = attention_mask(segments)

    def joined(q, k, v, sinks):
        scores = jnp.where(mask[:, None, None], jnp.einsum("ntjrd,nsjd->njrts", q, k), -1e30)
        one = jnp.broadcast_to(sinks[..., None, None], (*scores.shape[:-1], 1))
        return jnp.einsum("njrts,nsjd->ntjrd", jax.nn.softmax(jnp.concatenate([scores, one], -1))[..., :-1], v)

    def by_key(q, k, v, sinks):
        q, k, v, seen = with_sinks(q, k, v, mask, sinks)
        return dense(seen, None, q, k, v)[..., :8]

    @functools.partial(jax.jit, static_argnums=0)
    def found(attend, *arrays):
        return jax.value_and_grad(lambda *arrays: jnp.sin(attend(*arrays)).sum(), (0, 1, 2, 3))(*arrays)

    expected = found(joined, q, k, v, sinks)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found(by_key, q, k, v, sinks), expected)
    # In 16 bits the parts of a sink add up to all of its bits.
    half = with_sinks(*(x.astype(jnp.bfloat16) for x in (q, k, v)), mask, sinks)[0][0, 0, ..., 8:]
    np.testing.assert_allclose(half.astype(jnp.float32).sum(-1), sinks, rtol=1e-6)


@pytest.mark.parametrize(
    ("backend", "change", "length", "by_mask", "expected"),
    [
        ("cpu", {}, 100, False, "xla"),
        ("tpu", {}, 100, True, "splash"),
        ("gpu", {}, 100, False, "xla"),  # in float32
        ("gpu", {"dtype": "bfloat16", "sliding_window": None}, 4096, False, "cudnn"),
        ("gpu", {"dtype": "bfloat16", "sliding_window": None}, 4097, False, "flash"),
        ("gpu", {"dtype": "bfloat16", "sliding_window": None}, 4097, True, "cudnn"),
        ("gpu", {"dtype": "bfloat16"}, 4097, False, "cudnn"),
        ("gpu", {"dtype": "bfloat16", "attention_softcap": 30.0}, 100, False, "xla"),
        ("gpu", {"dtype": "bfloat16", "head_dim": 80}, 100, False, "cudnn"),
        ("gpu", {"dtype": "bfloat16", "head_dim": 20}, 100, False, "xla"),
        ("gpu", {"dtype": "bfloat16", "head_dim": 256}, 100, False, "xla"),  # before Hopper
        ("gpu", {"dtype": "bfloat16", "sliding_window": None, "attention_sinks": True}, 5000, False, "cudnn"),
        ("gpu", {"dtype": "bfloat16", "head_dim": 128, "attention_sinks": True}, 100, False, "xla"),  # before Hopper
        ("gpu", {"attention": "splash"}, 100, False, "splash"),
    ],
)
def test_what_auto_stands_for(backend, change, length, by_mask, expected, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert implementation(dataclasses.replace(CONFIG, **change), length, by_mask) == expected


@pytest.mark.parametrize(
    ("backend", "change", "expected"),
    [
        ("cpu", {}, "xla (there is no kernel for a cpu)"),
        ("tpu", {}, "splash"),
        ("tpu", {"attention_sinks": True}, "xla (no kernel of TPUs has this model's attention sinks)"),
        ("gpu", {"dtype": "bfloat16", "attention_sinks": True}, "cudnn"),
        ("gpu", {}, "xla (kernels take 16 bits, and model.dtype is float32)"),
        ("gpu", {"dtype": "bfloat16"}, "cudnn"),
        (
            "gpu",
            {"dtype": "bfloat16", "sliding_window": None},
            "cudnn for rows up to 4096 tokens, flash for longer ones",
        ),
        ("gpu", {"attention": "xla"}, "xla"),
    ],
)
def test_a_run_says_why_no_kernel_serves(backend, change, expected):
    assert described(dataclasses.replace(CONFIG, **change), backend) == expected


def test_without_pallas_triton_rows_are_attended_by_cudnn(monkeypatch):
    config = dataclasses.replace(CONFIG, dtype="bfloat16", sliding_window=None)
    assert has_triton()
    monkeypatch.setattr(fused_attention, "has_triton", lambda: False)
    assert implementation(config, 5000, False, "gpu") == "cudnn"
    assert described(config, "gpu") == "cudnn"


def test_a_jax_without_the_flash_kernel(monkeypatch):
    """jax 0.12 says that it will go: auto does without it, and who asks for it is told before anything compiles."""
    config = dataclasses.replace(CONFIG, dtype="bfloat16", sliding_window=None)
    assert implementation(config, 5000, False, "gpu") == "flash"
    check_attention(dataclasses.replace(config, attention="flash"), "gpu")
    real = importlib.util.find_spec

    def without(name, *more):
        return None if name == "jax.experimental.pallas.ops.gpu.attention" else real(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    assert implementation(config, 5000, False, "gpu") == "cudnn"
    with pytest.raises(ConfigError, match=rf"'flash': jax {jax.__version__} has no kernel of it"):
        check_attention(dataclasses.replace(config, attention="flash"), "gpu")


@pytest.mark.parametrize(("capability", "dtype", "kernel"), [("7.5", "float32", "xla"), ("8.0", "bfloat16", "cudnn")])
def test_gpus_without_units_for_bfloat16(monkeypatch, capability, dtype, kernel):
    """Colab's T4: nothing is left to auto that it cannot compile."""
    config = dataclasses.replace(CONFIG, dtype="bfloat16", sliding_window=None)
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(compute_capability=capability)])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    has_triton.cache_clear()
    assert compute_dtype("auto") == dtype
    assert implementation(config, 128, False) == kernel
    assert has_triton() == (kernel == "cudnn")
    has_triton.cache_clear()


@pytest.fixture
def interpreted(monkeypatch):
    """Nets with attention by the interpreted kernel."""
    monkeypatch.setattr(attention, "splash_attention", functools.partial(splash_attention, interpret=True))
    return lambda config: Net(dataclasses.replace(config, attention="splash"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sliding", "scan", "changes"),
    [
        ((1,), True, {}),
        ((1,), True, {"sliding_chunks": True}),
        ((0,), False, {}),
        ((0, 1), True, {}),
        ((1,), True, {"sliding_chunks": True, "sliding_window": 1000}),
    ],
)
def test_a_net_is_the_same(interpreted, sliding, scan, changes):
    """Its hidden states, its gradients and the keys and values of a prompt; of layers some of which slide."""
    config = dataclasses.replace(CONFIG, sliding_layers=sliding, scan_layers=scan, **changes)
    params = jax.jit(Net(config).init)(jax.random.key(0))
    segments = jnp.asarray(packed_segments())
    tokens = np.random.default_rng(0).integers(0, 31, segments.shape)

    @functools.partial(jax.jit, static_argnums=0)
    def found(net, params):
        def loss(params):
            hidden, cache, _ = net.bind(params).prefill(tokens, segments)
            hidden = jnp.where(segments[..., None] != 0, hidden, 0.0)
            return jnp.sin(hidden).sum(), (hidden, cache)

        return jax.value_and_grad(loss, has_aux=True)(params)

    (_, (expected, cache)), gradients = found(Net(config), params)
    (_, (hidden, own_cache)), own_gradients = found(interpreted(config), params)
    np.testing.assert_allclose(hidden, expected, atol=2e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4, rtol=1e-5), own_gradients, gradients)
    real = np.asarray(segments != 0)
    for a, b in zip(jax.tree.leaves(own_cache), jax.tree.leaves(cache), strict=True):
        by_token = (np.moveaxis(np.asarray(x), -2, -3).reshape(-1, *segments.shape, 16)[:, real] for x in (a, b))
        np.testing.assert_allclose(*by_token, atol=2e-5)


@pytest.mark.slow
def test_completions_see_their_prompt(interpreted):
    segments, prefixes, positions = shared_prompts()
    tokens = np.random.default_rng(0).integers(0, 31, segments.shape)
    config = dataclasses.replace(CONFIG, layers=1)
    params = jax.jit(Net(config).init)(jax.random.key(0))

    @functools.partial(jax.jit, static_argnums=0)
    def hidden(net, params):
        return net.bind(params).hidden(Inputs(tokens, segments, positions, prefix_segments=prefixes))

    real = segments != 0
    expected = hidden(Net(config), params)[real]
    np.testing.assert_allclose(hidden(interpreted(config), params)[real], expected, atol=2e-5)
    apart = Net(config).bind(params).hidden(Inputs(tokens, segments, positions))[real]
    assert np.abs(apart - expected).max() > 0.1


def test_no_mask_is_made_where_segments_say_it_all(interpreted):
    """The largest arrays of a long row's forward pass grow with its length, not with its square."""

    def largest(net) -> int:
        tokens = jnp.zeros((1, 2048), jnp.int32)
        traced = jax.make_jaxpr(lambda params: net.bind(params).hidden(Inputs(tokens)))(net.shapes())
        return max(x.aval.size for equation in _equations(traced.jaxpr) for x in equation.outvars)

    assert largest(Net(CONFIG)) >= 2048**2
    assert largest(interpreted(CONFIG)) < 2048 * 1024


@pytest.mark.parametrize(("remat", "runs"), [("none", 3), ("dots", 3), ("block", 4)])
def test_what_is_saved_of_matmuls_is_saved_of_attention(interpreted, remat, runs):
    """Beside the forward pass's kernel there are two for gradients, and with blocks the forward pass's once more."""
    net = interpreted(dataclasses.replace(CONFIG, layers=1, remat=remat, scan_layers=False))
    tokens = jnp.zeros((1, 256), jnp.int32)
    loss = jax.make_jaxpr(jax.grad(lambda params: net.bind(params).hidden(Inputs(tokens)).sum()))
    assert sum(x.primitive.name == "pallas_call" for x in _equations(loss(net.shapes()).jaxpr)) == runs


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name != "pallas_call":
            for inner in core.jaxprs_in_params(equation.params):
                yield from _equations(inner)


@pytest.mark.parametrize(
    ("length", "block"),
    [(1, 128), (130, 128), (256, 256), (640, 128), (768, 256), (1000, 512), (1152, 256), (4096, 512)],
)
def test_blocks_pad_no_more_than_an_eighth_of_a_row(length, block):
    assert block_size(length) == block


@pytest.mark.slow
def test_a_grpo_run_is_the_same(interpreted, monkeypatch, tiny_run, tmp_path, root):
    """Two steps: prompts are computed by segments, and packed rows, whose completions share a prompt, by a mask."""
    monkeypatch.setattr(model, "check_attention", lambda *_: None)
    config = load_config_file(f"{root / 'configs' / 'grpo.py'}:tiny")
    config.model.attention, config.batch.packing = "splash", "true"
    config.output_dir, config.logging.backends = str(tmp_path / "run"), ("jsonl",)
    found = jaxrl_llm.train(config)
    steps = [[line for line in run.metrics if "loss" in line] for run in (found, tiny_run)]
    assert len(steps[0]) == 2
    for one, expected in zip(*steps, strict=True):
        for name in ("loss", "grad_norm", "reward"):
            assert one[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
