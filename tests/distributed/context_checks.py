"""Checks of attention where mesh.context shards rows and no heads, on 8 devices. test_sharding.py runs this file."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.batch import Inputs
from jaxrl_llm.config import ConfigError
from jaxrl_llm.distributed.sharding import make_mesh, rows_to_global, shardings
from jaxrl_llm.models.kernels.fused_attention import described, implementation, splash_attention
from jaxrl_llm.models.layers import soft_cap
from jaxrl_llm.models.mixers import attention, context_attention
from jaxrl_llm.models.mixers.context_attention import Places
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net
from jaxrl_llm.models.transformer import attention_mask, segment_positions
from tests.models.kernels.test_fused_attention import _equations, packed_segments, shared_prompts

CONFIG = ModelConfig(vocab_size=48, width=24, layers=2, heads=6, kv_heads=2, head_dim=8, ffn=32, init_scale=0.3)
MESHES = [{"data": 1, "context": 8}, {"data": 1, "context": 4, "tensor": 2}, {"data": 2, "context": 4}]


def assert_close(found, expected, atol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), found, expected)


@pytest.fixture
def small_blocks(monkeypatch):
    """Several blocks of queries on each device, and of keys."""
    monkeypatch.setattr(context_attention, "SCORES", 1)


def dense(q, k, v, places: Places, softcap, sinks, slopes):
    """Attention whose scores are all formed, zeros where nothing is seen."""
    seen = attention_mask(places.segments, places.prefixes, places.runs)
    if places.earliest is not None:
        seen &= places.positions[:, None] >= places.earliest[:, :, None]
    if (beyond := places.beyond) is not None:
        seen |= (beyond[:, :, None] == beyond[:, None]) & (beyond != 0)[:, None]
    scores = soft_cap(jnp.einsum("ntjrd,nsjd->njrts", q, k), softcap)
    if slopes is not None:
        scores += slopes[:, :, None, None] * places.positions[:, None, None, None]
    scores = jnp.where(seen[:, None, None], scores, -1e30)
    one = jnp.full((*scores.shape[:-1], 1), -1e30) if sinks is None else sinks[..., None, None]
    shares = jax.nn.softmax(jnp.concatenate([scores, jnp.broadcast_to(one, (*scores.shape[:-1], 1))], -1))[..., :-1]
    return jnp.einsum("njrts,nsjd->ntjrd", jnp.where(seen[:, None, None], shares, 0.0), v)


@pytest.mark.parametrize(
    ("rows", "kinds", "sizes"),
    [
        ("packed", ("window", "softcap", "sinks"), MESHES[0]),
        ("prefixes", ("windows", "runs", "slopes"), MESHES[1]),
        pytest.param("packed", (), MESHES[2], marks=pytest.mark.slow),
        pytest.param("packed", ("window", "runs beyond"), MESHES[2], marks=pytest.mark.slow),
        pytest.param("prefixes", ("sinks",), MESHES[0], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_outputs_and_gradients(rows, kinds, sizes, small_blocks):
    """Of whatever says who sees whom and changes scores, in rows with padding, by several blocks of each device."""
    length = 144 if kinds else 143  # of the latter each device has complete rows
    segments, prefixes, positions = (x[:2, :length] for x in shared_prompts())
    if rows == "packed":
        segments, prefixes = packed_segments()[:2, :length], None
        positions = np.asarray(segment_positions(segments))
    index = np.broadcast_to(np.arange(length), segments.shape)
    runs = np.where((segments != 0) & (index % 90 > 20), segments, 0)
    window = positions % 20 if "windows" in kinds else 19  # of each token, or of all
    places = Places(
        index,
        segments,
        positions,
        positions - window if {"window", "windows"} & {*kinds} else None,
        prefixes,
        runs if "runs" in kinds else None,
        runs if "runs beyond" in kinds else None,
    )
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, length, *shape)).astype("f") for shape in ((2, 3, 8), (2, 8), (2, 8)))
    sinks = rng.normal(size=(2, 3)).astype("f") if "sinks" in kinds else None
    slopes = rng.normal(size=(2, 3)).astype("f") * 0.1 if "slopes" in kinds else None
    cap = 2.0 if "softcap" in kinds else None

    @functools.partial(jax.jit, static_argnums=0)
    def found(attend, *parts):
        def loss(parts):
            q, k, v, sinks = parts
            out = attend(q, k, v, places, cap, sinks, slopes)
            return jnp.sin(3 * out).mean(), out

        return jax.value_and_grad(loss, has_aux=True)(parts)

    expected = found(dense, q, k, v, sinks)
    with jax.set_mesh(make_mesh(**sizes)):
        assert_close(found(context_attention.context_attention, q, k, v, sinks), expected)


def logps_and_gradients(net, params, inputs, weights):
    def loss(params):
        bound = net.bind(params)
        logps = jax.nn.log_softmax(bound.logits(bound.hidden(inputs)))
        return (weights[..., None] * logps).mean(), logps

    return jax.value_and_grad(loss, has_aux=True)(params)


def check(net, whole, sizes, shares: bool):
    """Log-probs and gradients of a mesh are those of `whole` on one device, of rows that no mesh divides."""
    params = jax.jit(whole.init)(jax.random.key(0))
    segments, prefixes, positions = (np.concatenate([x[:2, :141]] * 2) for x in shared_prompts())
    if not shares:
        segments = np.concatenate([packed_segments()[:2, :141]] * 2)
        prefixes, positions = None, np.asarray(segment_positions(segments))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + 0.05 * rng.normal(size=x.shape).astype("f"), params)
    tokens, weights = rng.integers(0, 48, segments.shape), rng.normal(size=segments.shape).astype("f")
    inputs = Inputs(tokens, segments, positions, prefix_segments=prefixes)
    arrays = (inputs, np.where(segments != 0, weights, 0.0))
    expected = jax.jit(logps_and_gradients, static_argnums=0)(whole, params, *arrays)
    mesh = make_mesh(**sizes)
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, shardings(params, mesh))
        (value, logps), gradients = jax.jit(logps_and_gradients, static_argnums=0)(
            net, placed, *rows_to_global(arrays, mesh)
        )
    real = (segments != 0)[..., None]
    assert_close((value, gradients), (expected[0][0], expected[1]))
    assert_close(np.where(real, logps, 0.0), np.where(real, expected[0][1], 0.0), 2e-5)


@pytest.mark.parametrize(
    ("changes", "sizes", "shares"),
    [
        ({"sliding_window": 30, "sliding_layers": (1,)}, MESHES[0], True),
        pytest.param(
            {"attention_sinks": True, "sliding_window": 30, "sliding_layers": (0,)}, {"data": 2, "context": 4}, False,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"attention_softcap": 2.0, "remat": "dots"}, {"data": 1, "fsdp": 2, "context": 4}, True,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"sliding_window": 30, "sliding_layers": (0, 1), "sliding_chunks": True, "scan_layers": False},
            MESHES[1], False, marks=pytest.mark.slow,
        ),
        pytest.param({"alibi": 8.0, "remat": "block"}, MESHES[0], False, marks=pytest.mark.slow),
        pytest.param(
            {"experts": 4, "experts_per_token": 2, "expert_ffn": 16}, {"data": 1, "context": 4, "expert": 2}, False,
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_net_is_that_of_one_device(changes, sizes, shares, small_blocks):
    """Packed rows, and rows that share prefixes."""
    net = Net(dataclasses.replace(CONFIG, **changes))
    check(net, net, sizes, shares)


@pytest.mark.parametrize(
    ("kernel", "changes"),
    [("cudnn", {"attention_sinks": True}), pytest.param("splash", {}, marks=pytest.mark.slow)],
)
def test_kernels_compute_copies_of_keys(kernel, changes, monkeypatch):
    """Two heads of keys on four devices, each of which has complete rows of one of four heads of queries."""
    real = jax.nn.dot_product_attention
    monkeypatch.setattr(attention, "splash_attention", functools.partial(splash_attention, interpret=True))
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda *args, **options: real(*args, **options | {"implementation": "xla"})
    )
    config = dataclasses.replace(CONFIG, heads=4, layers=1, **changes)
    net = Net(dataclasses.replace(config, attention=kernel))
    check(net, Net(config), {"data": 2, "context": 4}, shares=False)


def test_what_auto_stands_for():
    """Kernels where heads of queries can be sharded in place of positions, if none needs the mask of a long row."""
    four = dataclasses.replace(CONFIG, heads=4, dtype="bfloat16")
    window = dataclasses.replace(four, sliding_window=30)
    with jax.set_mesh(make_mesh(2, context=4)):
        assert implementation(four, 4096, False, "gpu") == "cudnn"
        assert implementation(four, 5000, False, "gpu") == "flash"
        assert implementation(four, 5000, True, "gpu") == "context"
        assert implementation(window, 5000, False, "gpu") == "context"
        assert implementation(window, 5000, False, "tpu") == "splash"
        assert implementation(window, 5000, True, "tpu") == "context"
        assert implementation(four, 100, False, "cpu") == "context"
        assert implementation(dataclasses.replace(four, index_top=64), 100, True, "gpu") == "context"
        six = dataclasses.replace(four, heads=6)
        assert described(six, "gpu") == "context (mesh.context shards rows whose heads it cannot shard)"
        with pytest.raises(ConfigError, match=r"mesh.context = 4 shards them: .* does not divide the model's 6 heads"):
            implementation(dataclasses.replace(six, attention="splash"), 100, False, "tpu")
    with jax.set_mesh(make_mesh(4, context=2)):
        assert implementation(four, 5000, True, "gpu") == "cudnn"
        assert implementation(four, 100, False, "cpu") == "xla"


def test_no_array_has_a_number_for_each_pair_of_tokens():
    """A pass and its gradients, as they are compiled: none is as large as a device's queries times all keys."""
    net, length = Net(dataclasses.replace(CONFIG, layers=1)), 2048
    tokens = jax.ShapeDtypeStruct((1, length), np.int32)
    gradients = jax.grad(lambda params, tokens: net.bind(params).hidden(Inputs(tokens)).sum())
    with jax.set_mesh(make_mesh(1, context=8)):
        text = jax.jit(gradients).lower(net.shapes(), tokens).compile().as_text()
    sizes = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"\b(?:f32|pred|s32)\[([\d,]+)\]", text)]
    assert length * 24 <= max(sizes) < length * length // 8


def test_devices_have_as_many_blocks(small_blocks, monkeypatch):
    """Of 16 halves of shards, each device has one from the start of the row and one that is as far from its end."""
    counts, spans = [], context_attention._spans

    def counted(*args):
        first, last = spans(*args)
        jax.debug.callback(lambda count: counts.append(int(count)), (last - first).sum())
        return first, last

    monkeypatch.setattr(context_attention, "_spans", counted)
    q, k = jnp.ones((1, 128, 2, 3, 8)), jnp.ones((1, 128, 2, 8))
    places = Places(jnp.arange(128)[None], jnp.ones((1, 128), int), jnp.arange(128)[None])
    with jax.set_mesh(make_mesh(1, context=8)):
        jax.block_until_ready(jax.jit(context_attention.context_attention)(q, k, k, places, None))
        jax.effects_barrier()
    assert counts == [17] * 8


@pytest.mark.parametrize(("remat", "loops"), [("none", 2), ("dots", 2), ("block", 3)])
def test_what_is_saved_of_matmuls_is_saved_of_attention(remat, loops):
    """A loop over keys in the forward pass and one for gradients; with `block` the former's once more."""
    net = Net(dataclasses.replace(CONFIG, layers=1, remat=remat, scan_layers=False))
    with jax.set_mesh(make_mesh(1, context=8)):
        traced = jax.make_jaxpr(jax.grad(lambda params: net.bind(params).hidden(Inputs(jnp.zeros((1, 64), int))).sum()))
        equations = [*_equations(traced(net.shapes()).jaxpr)]
    assert sum(x.primitive.name == "while" for x in equations) == loops
