"""The GPU's decode kernel, run by Pallas' interpreter, and the row caches as every backend lays them out."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import transformer
from jaxrl_llm.models.kernels import decode_attention
from jaxrl_llm.models.mixers import attention, latent_attention
from jaxrl_llm.models.mixers.latent_attention import LatentAttention
from jaxrl_llm.models.model_config import ModelConfig
from jaxrl_llm.models.net import Net
from tests.models import decoding
from tests.models.decoding import continued_logits

CONFIG = ModelConfig(
    vocab_size=31, width=32, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=24, init_scale=0.3, dtype="float16"
)
NORMED = dataclasses.replace(CONFIG, qk_norm="head", norm_offset=0.5)
CHUNKED = dataclasses.replace(CONFIG, sliding_window=5, sliding_layers=(1,), sliding_chunks=True)
MIXED = dataclasses.replace(  # norms, sinks, and latents in a layer of their own
    NORMED, attention_sinks=True, mixers=(attention.Attention, LatentAttention), latent_size=24, rotary_head_dim=8,
    value_head_dim=12, query_rank=20,
)  # fmt: skip


def attended(q, prompt, cache, start, length, window, softcap, chunks, sinks=None):
    """The outputs of every query, one after another in float64; values may be smaller than keys."""
    out = np.zeros((*q.shape[:-1], prompt[1].shape[-1]))
    size = prompt[0].shape[2]
    for at in itertools.product(*map(range, q.shape[:5])):
        g, r, j, w, _ = at
        keys, values = (np.concatenate([p[g, j], c[g, r, j]]).astype(float) for p, c in zip(prompt, cache, strict=True))
        place = np.arange(len(keys)) - size  # that of the row's first token is 0
        own = length[g, r] + w
        position = own + size - start[g]
        near = (place + size - start[g]) // window == position // window if chunks else own - place < window
        seen = (place >= start[g] - size) & (place <= own) & near
        scores = q[at].astype(float) @ keys.T
        scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
        shares = np.where(seen, np.exp(scores - scores.max()), 0.0)
        sink = 0.0 if sinks is None else np.exp(sinks[j, at[4]] - scores.max())
        out[at] = shares @ values / (shares.sum(-1, keepdims=True) + sink)
    return out


CASES = (
    ((2, 3, 2, 1, 2, 16), (70, 96), None, None, False),  # no multiple of a block
    ((2, 2, 1, 3, 4, 16), (128, 64), None, 5.0, False),  # several tokens at once
    ((1, 2, 2, 2, 1, 16), (200, 300), 100, None, False),  # blocks before the window are not read
    ((2, 3, 2, 4, 2, 16), (200, 300), 100, None, True),  # nor those before the chunk
    ((2, 3, 1, 3, 2, 16), (70, 96), 2, None, True),  # tokens of several chunks at once
    ((2, 2, 2, 1, 2, 24), (70, 96), None, None, False),  # heads that are no power of two
    ((1, 2, 1, 1, 2, 8), (70, 96), None, None, False),  # or smaller than a tile
)


@pytest.mark.parametrize(
    ("shape", "sizes", "window", "softcap", "chunks", "programs"),
    [
        pytest.param(*case, programs, marks=() if (number + programs) % 2 else pytest.mark.slow)  # each case once
        for programs in (1, 256)
        for number, case in enumerate(CASES)
    ],
)
def test_decode_attention(shape, sizes, window, softcap, chunks, programs, monkeypatch):
    """Padded prompts, rows of every length, keys in one share or in many."""
    monkeypatch.setattr(decode_attention, "PROGRAMS", programs)
    draw = np.random.default_rng(0)
    g, r, j, w, _, d = shape
    q, *stored = (
        draw.normal(size=size).astype(np.float32)
        for size in (shape, *[(g, j, sizes[0], d)] * 2, *[(g, r, j, sizes[1], d)] * 2)
    )
    prompt, cache = stored[:2], stored[2:]
    start, length = draw.integers(0, sizes[0] - 1, (g,)), draw.integers(0, sizes[1] - w, (g, r))
    length[0, 0] = 0
    expected = attended(q, prompt, cache, start, length, window or 10**6, softcap, chunks)
    found = decode_attention.decode_attention(
        *(jax.tree.map(jnp.asarray, (q, prompt, cache, start, length))), window, softcap, chunks, interpret=True
    )
    np.testing.assert_allclose(found, expected, atol=3e-6)


@pytest.mark.parametrize("programs", [1, pytest.param(256, marks=pytest.mark.slow)])
def test_sinks_join_the_softmax_once(programs, monkeypatch):
    """However many shares the keys are read in, and where a row sees little else."""
    monkeypatch.setattr(decode_attention, "PROGRAMS", programs)
    draw, sizes = np.random.default_rng(0), (70, 96)
    shapes = ((2, 2, 2, 2, 3, 16), *[(2, 2, sizes[0], 16)] * 2, *[(2, 2, 2, sizes[1], 16)] * 2, (2, 3))
    q, *stored, sinks = (draw.normal(size=shape).astype(np.float32) for shape in shapes)
    start, length = np.asarray([0, 69]), np.asarray([[0, 5], [94, 0]])
    expected = attended(q, stored[:2], stored[2:], start, length, 10**6, None, False, sinks)
    found = decode_attention.decode_attention(
        *jax.tree.map(jnp.asarray, (q, stored[:2], stored[2:], start, length)), sinks=jnp.asarray(sinks), interpret=True
    )
    np.testing.assert_allclose(found, expected, atol=3e-6)


@pytest.mark.parametrize(
    ("heads", "at_once", "latent", "rotated", "programs"),
    [
        (70, 1, 32, 16, 1),  # more heads than a program has
        (4, 3, 24, 8, 256),  # several tokens at once, numbers that are no power of two, keys in many shares
        pytest.param(4, 3, 24, 8, 1, marks=pytest.mark.slow),
        pytest.param(70, 1, 32, 16, 256, marks=pytest.mark.slow),
    ],
)
def test_latents_are_keys_and_values(heads, at_once, latent, rotated, programs, monkeypatch):
    monkeypatch.setattr(decode_attention, "PROGRAMS", programs)
    draw, sizes, d = np.random.default_rng(0), (70, 96), latent + rotated
    shapes = ((2, 2, 1, at_once, heads, d), (2, 1, sizes[0], d), (2, 2, 1, sizes[1], d))
    q, prompt, cache = (draw.normal(size=shape).astype(np.float32) * 0.5 for shape in shapes)
    start, length = np.asarray([0, 33]), np.asarray([[0, 5], [96 - at_once, 60]])
    keys_values = [(x, x[..., :latent]) for x in (prompt, cache)]
    expected = attended(q, keys_values[0], keys_values[1], start, length, 10**6, None, False)
    arrays = jax.tree.map(jnp.asarray, (q, [prompt], [cache], start, length))
    found = decode_attention.decode_attention(*arrays, latent=latent, interpret=True)
    np.testing.assert_allclose(found, expected, atol=3e-6)


def drawn(config):
    """Random parameters, those of norms and sinks too, which otherwise begin as ones and zeros."""
    params = jax.jit(Net(config).init)(jax.random.key(0))
    draw = np.random.default_rng(3)

    def leaf(path, x):
        return draw.uniform(0.5, 1.5, x.shape).astype(x.dtype) if path[-1].key in ("scale", "sinks") else x

    return jax.tree_util.tree_map_with_path(leaf, params)


def forget_programs() -> None:
    """Of the helpers, which are jitted by net alone, and a backend does not change in a process; those of other tests
    stay, as to compile them again takes longer than this test."""
    decoding.prefill.clear_cache()
    decoding.decode.clear_cache()


def trace_as_on(backend: str, monkeypatch) -> None:
    """Programs that are traced from here on are those of an accelerator, as far as they run on CPUs."""
    kernel = functools.partial(decode_attention.decode_attention, interpret=True)
    for module in (attention, latent_attention):
        monkeypatch.setattr(module, "decode_attention", kernel)
    for module in (attention, transformer):  # prompts have no kernel that runs here
        monkeypatch.setattr(module, "implementation", lambda *_: "xla")
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    forget_programs()


@pytest.mark.parametrize(
    ("backend", "at_once", "config"),
    [
        pytest.param(backend, *case, marks=() if (backend, *case) == ("gpu", 2, MIXED) else pytest.mark.slow)
        for backend in ("gpu", "tpu")
        for case in ((2, MIXED), (1, MIXED), (1, CONFIG), (2, CONFIG), (2, CHUNKED))
    ],
)
def test_accelerators_decode_the_same(backend, at_once, config, monkeypatch):
    """With their own layouts of the caches and, on GPUs, the kernel: the logits of CPUs."""
    tokens = np.random.default_rng(1).integers(0, 31, (2, 9))
    segments = np.ones_like(tokens)
    segments[0, :4] = 0
    continuations = np.random.default_rng(2).integers(0, 31, (2, 3, 4))
    params = drawn(config)
    forget_programs()
    expected = continued_logits(Net(config), params, tokens, segments, continuations, at_once)
    trace_as_on(backend, monkeypatch)
    found = continued_logits(Net(config), params, tokens, segments, continuations, at_once)
    forget_programs()
    np.testing.assert_allclose(found, expected, atol=0.04)  # in float16: either is up to 0.055 off those of float32


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "int8", "fp8"])
def test_gpus_norm_queries_and_keys_together(kind, monkeypatch):
    """In one array, with the scales and the norms of each: what they are apart, bit for bit."""
    config = dataclasses.replace(NORMED, quantize=kind, heads=6)
    net, x = Net(config), jax.random.normal(jax.random.key(1), (2, 3, 1, config.width), jnp.float16)
    params = drawn(config)
    positions = jnp.arange(6).reshape(2, 3, 1)

    def projected(decodes: bool):
        mixer = net.unrolled().bind(params).layers[1].attention
        arrays = mixer.layer_arrays(config, config.layer_configs[1])
        found = mixer._project(x, positions, arrays, decodes=decodes)
        return found, mixer._normed_together(x)

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    apart, together = projected(False)[0], projected(True)
    assert together[1].shape == (2, 3, 1, 4, 2, 16)
    for found, expected in zip(together[0][:3], apart[:3], strict=True):
        assert found.shape == expected.shape
        np.testing.assert_array_equal(found, expected)
    assert not np.allclose(together[0][0][..., 0, 0, :], together[0][1][..., 0, :], atol=0.1)
