"""The kernels of GPUs, run by a GPU: `JAX_PLATFORMS=cuda XLA_FLAGS= pytest tests/models/kernels/test_gpu_kernels.py`.

Every other test runs on the CPU, which interprets the kernels. Sizes are those of models that people train.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import quantize
from jaxrl_llm.models.kernels.decode_attention import decode_attention
from jaxrl_llm.models.kernels.fused_attention import cudnn_attention, flash_attention, with_sinks
from jaxrl_llm.models.kernels.grouped_matmul import grouped_matmul
from jaxrl_llm.models.mixers.latent_attention import LatentAttention
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net
from tests.models.decoding import continued_logits
from tests.models.kernels.test_decode_attention import attended
from tests.models.kernels.test_fused_attention import dense

CONFIG = ModelConfig(
    vocab_size=997, width=256, layers=2, heads=8, kv_heads=2, head_dim=64, ffn=512, init_scale=0.1, dtype="bfloat16"
)


@pytest.fixture(autouse=True)
def gpu():
    """Skips where there is none: asked here, as to collect tests starts no backend."""
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU is here")


def relative(found, expected) -> float:
    """The norm of the difference, in that of what is expected."""
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize(
    ("shape", "sizes", "window", "softcap", "chunks"),
    [
        ((8, 8, 8, 1, 2, 128), (512, 1024), None, None, False),  # Qwen3-0.6B, 64 rows
        ((8, 8, 2, 1, 7, 64), (64, 320), None, None, False),  # Qwen2.5-0.5B
        ((1, 4, 4, 1, 7, 128), (500, 700), None, None, False),  # Qwen2.5-7B, few rows: keys are split
        ((2, 2, 1, 1, 4, 256), (130, 600), 512, None, False),  # Gemma 3 1B
        ((2, 2, 4, 1, 2, 256), (130, 600), 100, 50.0, False),  # Gemma 2
        ((2, 4, 4, 1, 1, 96), (100, 200), None, None, False),  # Phi-3
        ((2, 4, 8, 1, 5, 128), (100, 200), 64, None, True),  # Llama 4
        ((2, 4, 3, 5, 3, 64), (100, 200), None, None, False),  # SmolLM2, five tokens at once
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_decode_attention(shape, sizes, window, softcap, chunks, dtype):
    draw = np.random.default_rng(0)
    g, r, j, w, _, d = shape
    drawn = (draw.normal(size=size) for size in (shape, *[(g, j, sizes[0], d)] * 2, *[(g, r, j, sizes[1], d)] * 2))
    q, *stored = (jnp.asarray(x, dtype) for x in drawn)
    q = q * d**-0.5
    start, length = draw.integers(0, sizes[0] - 1, (g,)), draw.integers(0, sizes[1] - w, (g, r))
    length[0, 0] = 0
    kernel = jax.jit(decode_attention, static_argnames=("softcap", "chunks"))
    arrays = (jnp.asarray(start), jnp.asarray(length))
    found = kernel(q, tuple(stored[:2]), tuple(stored[2:]), *arrays, window, softcap=softcap, chunks=chunks)
    host = [np.asarray(x, np.float64) for x in (q, *stored)]
    expected = attended(host[0], host[1:3], host[3:], start, length, window or 10**6, softcap, chunks)
    assert np.isfinite(np.asarray(found, np.float64)).all()
    assert relative(found, expected) < {"bfloat16": 6e-3, "float16": 1e-3}[dtype]


@pytest.mark.parametrize(("shape", "sizes"), [((2, 2, 8, 1, 8, 64), (512, 1024)), ((1, 2, 2, 3, 4, 64), (100, 200))])
def test_sinks_of_decoded_tokens(shape, sizes):
    """gpt-oss-20b; and few rows, whose keys are split."""
    draw = np.random.default_rng(0)
    g, r, j, w, per_head, d = shape
    drawn = (draw.normal(size=size) for size in (shape, *[(g, j, sizes[0], d)] * 2, *[(g, r, j, sizes[1], d)] * 2))
    q, *stored = (jnp.asarray(x, jnp.bfloat16) for x in drawn)
    q, sinks = q * d**-0.5, draw.normal(size=(j, per_head)).astype(np.float32)
    start, length = draw.integers(0, sizes[0] - 1, (g,)), draw.integers(0, sizes[1] - w, (g, r))
    arrays = (jnp.asarray(start), jnp.asarray(length))
    found = jax.jit(decode_attention)(q, tuple(stored[:2]), tuple(stored[2:]), *arrays, sinks=sinks)
    host = [np.asarray(x, np.float64) for x in (q, *stored)]
    expected = attended(host[0], host[1:3], host[3:], start, length, 10**6, None, False, sinks)
    assert relative(found, expected) < 6e-3


@pytest.mark.parametrize(
    ("rows", "at_once", "heads"),
    [
        ((2, 4), 1, 128),  # DeepSeek-V3
        ((1, 2), 1, 32),  # Kimi-Linear, few rows: keys are split
        ((1, 2), 5, 16),  # DeepSeek-V2-Lite, five tokens at once
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_latents_of_decoded_tokens(rows, at_once, heads, dtype):
    draw, (g, r), sizes = np.random.default_rng(0), rows, (130, 1024)
    shapes = ((g, r, 1, at_once, heads, 576), (g, 1, sizes[0], 576), (g, r, 1, sizes[1], 576))
    q, prompt, cache = (jnp.asarray(draw.normal(size=shape), dtype) for shape in shapes)
    q = q * 576**-0.5
    start, length = draw.integers(0, sizes[0] - 1, (g,)), draw.integers(0, sizes[1] - at_once, (g, r))
    kernel = jax.jit(decode_attention, static_argnames="latent")
    found = kernel(q, (prompt,), (cache,), jnp.asarray(start), jnp.asarray(length), latent=512)
    q, prompt, cache = (np.asarray(x, np.float64) for x in (q, prompt, cache))
    keys_values = [(x, x[..., :512]) for x in (prompt, cache)]
    expected = attended(q, keys_values[0], keys_values[1], start, length, 10**6, None, False)
    assert relative(found, expected) < {"bfloat16": 6e-3, "float16": 1e-3}[dtype]


def test_caches_in_fp8_are_read_as_what_they_are():
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = ((4, 4, 2, 1, 4, 128), *[(4, 2, 128, 128)] * 2, *[(4, 4, 2, 256, 128)] * 2)
    q, *stored = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
    stored = [x.astype(quantize.BYTES["fp8"][0]) for x in stored]
    start, length = jnp.zeros(4, int), jnp.full((4, 4), 200)
    found, expected = (
        jax.jit(decode_attention)(q * 128**-0.5, tuple(x[:2]), tuple(x[2:]), start, length)
        for x in (stored, [x.astype(jnp.bfloat16) for x in stored])
    )
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))


@pytest.mark.parametrize(
    ("implementation", "length", "heads", "keys", "size"),
    [
        ("cudnn", 320, 14, 2, 64),
        ("cudnn", 1537, 16, 8, 128),
        ("cudnn", 300, 4, 1, 256),
        ("cudnn with sinks", 319, 16, 2, 64),
        ("flash", 1100, 14, 2, 64),
        ("flash", 1100, 8, 4, 128),
        ("flash", 600, 4, 1, 256),
    ],
)
def test_attention_of_rows(implementation, length, heads, keys, size):
    """Outputs and gradients against scores that are all formed in float32: packed documents, and padding."""
    shapes = ((keys, heads // keys, size), (keys, size), (keys, size), (keys, heads // keys, size))
    drawn = zip(jax.random.split(jax.random.key(0), 4), shapes, strict=True)
    q, k, v, weights = (jax.random.normal(key, (2, length, *shape), jnp.bfloat16) for key, shape in drawn)
    q = q * size**-0.5
    segments = np.ones((2, length), np.int32)
    segments[0, length // 3 :], segments[0, -7:], segments[1, : length // 4] = 2, 0, 0
    mask = (segments[:, :, None] == segments[:, None]) & np.tri(length, dtype=bool)
    real = jnp.asarray(segments != 0)[..., None, None, None]
    sinks = jax.random.normal(jax.random.key(1), (keys, heads // keys)) if "sinks" in implementation else None

    def attend(q, k, v):
        if implementation == "flash":
            return flash_attention(q, k, v, jnp.asarray(segments))
        return cudnn_attention(q, k, v, jnp.asarray(mask), sinks)

    def all_scores(q, k, v):
        if sinks is None:
            return dense(jnp.asarray(mask), None, q, k, v)
        *extended, seen = with_sinks(q, k, v, jnp.asarray(mask), sinks)
        return dense(seen, None, *extended)[..., :size]

    def outputs_and_gradients(function, *arguments):
        def total(*x):
            out = jnp.where(real, function(*x), 0)
            return (out.astype(jnp.float32) * weights).sum(), out

        gradients, out = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(*arguments)
        return out, *gradients

    found = outputs_and_gradients(attend, q, k, v)
    with jax.default_matmul_precision("highest"):
        expected = outputs_and_gradients(all_scores, *(x.astype(jnp.float32) for x in (q, k, v)))
    for a, b in zip(found, expected, strict=True):
        assert relative(a, b) < 2e-2


@pytest.mark.parametrize(
    ("rows", "groups", "width", "hidden"),
    [
        (512, 128, 2048, 768),  # Qwen3-30B-A3B, 64 rows that decode
        (16384, 128, 2048, 768),  # and an update
        (4096, 32, 2880, 2880),  # gpt-oss-20b
        (64, 8, 4096, 14336),  # Mixtral
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_grouped_matmuls(rows, groups, width, hidden, dtype):
    """Outputs and gradients, of groups of any size and rows behind the last one, against one matmul after another."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (rows, width), (groups, width, hidden), (rows, hidden)
    x, kernels, d_out = (jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))
    sizes = np.random.default_rng(0).multinomial(rows, np.random.default_rng(1).dirichlet(np.ones(groups + 1)))[:-1]

    @jax.jit
    def run(x, kernels, d_out):
        out, pull = jax.vjp(lambda x, kernels: grouped_matmul(x, kernels, jnp.asarray(sizes, jnp.int32)), x, kernels)
        return out, *pull(d_out)

    def one_by_one(x, kernels):
        ends = np.cumsum(sizes)
        parts = [x[end - size : end] @ kernel for end, size, kernel in zip(ends, sizes, kernels, strict=True)]
        return jnp.concatenate([*parts, jnp.zeros((rows - sizes.sum(), hidden))])

    with jax.default_matmul_precision("highest"):
        out, pull = jax.vjp(one_by_one, x.astype(jnp.float32), kernels.astype(jnp.float32))
        expected = out, *pull(d_out.astype(jnp.float32))
    for found, exact in zip(run(x, kernels, d_out), expected, strict=True):
        assert relative(found, exact) < {"bfloat16": 5e-3, "float32": 2e-3}[dtype]


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4", "nf4", "mxfp4"])
@pytest.mark.parametrize("rows", [64, 512, 16384])
def test_grouped_matmuls_of_quantised_matrices(rows, kind):
    """Outputs and gradients against those of the numbers, which the kernel multiplies with in float32."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (rows, 2048), (32, 2048, 768), (rows, 768)
    x, kernels, d_out = (jax.random.normal(key, shape, "bfloat16") for key, shape in zip(keys, shapes, strict=True))
    sizes = np.random.default_rng(0).multinomial(rows, np.random.default_rng(1).dirichlet(np.ones(33)))[:-1]
    stored = jax.jit(quantize.quantize, static_argnums=1)(kernels, kind)

    def outputs_and_gradients(x, kernels, d_out, kind):
        out, pull = jax.vjp(lambda x: grouped_matmul(x, kernels, jnp.asarray(sizes, jnp.int32), kind), x)
        return out, *pull(d_out)

    run = jax.jit(outputs_and_gradients, static_argnums=3)
    numbers = quantize.dequantize(stored, kind, jnp.float32)
    expected = run(x.astype(jnp.float32), numbers, d_out.astype(jnp.float32), "none")
    for a, b in zip(run(x, stored, d_out, kind), expected, strict=True):
        assert relative(a, b) < 1e-2


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qk_norm": "head"},
        {"sliding_window": 5, "sliding_layers": (1,)},
        {"attention_sinks": True},
        {"mixers": (LatentAttention,) * 2, "latent_size": 128, "rotary_head_dim": 32, "value_head_dim": 64},
        {"attention": "xla"},
        {"quantize": "int8"},
        {"quantize": "fp8"},
        {"quantize": "nf4"},
        {"experts": 4, "experts_per_token": 4},  # all of them: which ones are chosen is a matter of rounding
    ],
)
@pytest.mark.parametrize("at_once", [1, 2])
def test_what_is_decoded_is_what_rows_compute(changes, at_once):
    """In bfloat16, token by token over the caches, against whole rows of the same parameters in the same type."""
    config = dataclasses.replace(CONFIG, **changes)
    tokens = np.random.default_rng(1).integers(0, 997, (2, 40))
    segments = np.ones_like(tokens)
    segments[0, :7] = 0
    continuations = np.random.default_rng(2).integers(0, 997, (2, 3, 8))
    params = jax.jit(Net(config).init)(jax.random.key(0))
    decoded = continued_logits(Net(config).unrolled(), params, tokens, segments, continuations, at_once)
    whole = jax.jit(lambda tokens, segments: Net(config).bind(params)(tokens, segments))
    for group, row in np.ndindex(2, 3):
        ids = np.concatenate([tokens[group], continuations[group, row]])[None]
        expected = whole(ids, np.concatenate([segments[group], np.ones(8, int)])[None])[0, 40:]
        assert relative(decoded[group, row], expected) < 2e-2
