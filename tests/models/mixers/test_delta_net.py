"""Gated delta nets: the chunked rule against its definition. As a mixer: test_short_conv.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.mixers import kimi_delta
from jaxrl_llm.models.mixers.chunk_states import across
from jaxrl_llm.models.mixers.delta_net import Change, Chunk, chunked, within_chunks


def token_by_token(q, k, v, g, beta, segments):
    """The definition, in float64."""
    state, found = np.zeros((*v[:, 0].shape[:3], q.shape[-1], v.shape[-1])), []
    for t in range(q.shape[1]):
        if t:
            state[segments[:, t] != segments[:, t - 1]] = 0
        state = state * np.exp(g[:, t]).reshape(*g.shape[:1], *g.shape[2:4], -1, 1)
        missing = (v[:, t] - np.einsum("nhrdv,nhd->nhrv", state, k[:, t])) * beta[:, t][..., None]
        state = state + k[:, t][:, :, None, :, None] * missing[..., None, :]
        found.append(np.einsum("nhrdv,nhd->nhrv", state, q[:, t]))
    return np.stack(found, axis=1), state


@pytest.mark.parametrize("length", [23, 70])
def test_the_chunked_rule_is_its_definition(length, monkeypatch):
    """Rows of one chunk and of two, slow and fast decays, documents that end within a chunk and at its edge.

    As CPUs compute it, and as accelerators do.
    """
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(2, length, 2, 6)) for _ in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v, beta = rng.normal(size=(2, length, 2, 2, 5)), rng.random((2, length, 2, 2))
    g = -rng.random((2, length, 2, 2)) * np.array([[0.01, 20.0], [1.0, 5.0]])
    segments = np.ones((2, length), int)
    segments[0, :3], segments[1, : length - 16] = 0, 2
    expected, last = token_by_token(q, k, v, g, beta, segments)
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, k, v, g, beta)]
    for backend in ("cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        found, state = jax.jit(lambda *a: chunked(within_chunks, *a, chunk=16))(*arrays, jnp.asarray(segments))
        np.testing.assert_allclose(found, expected, atol=5e-6)
        np.testing.assert_allclose(state, last, atol=5e-6)


def test_decays_of_each_number_of_a_key():
    """Kimi delta attention, in blocks of 16 tokens within the chunks; with equal decays it is the other rule."""
    rng = np.random.default_rng(0)
    length = 70
    q, k = (rng.normal(size=(2, length, 2, 6)) for _ in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v, beta = rng.normal(size=(2, length, 2, 2, 5)), rng.random((2, length, 2, 2))
    g = -rng.random((2, length, 2, 2, 6)) * np.array([0.01, 0.1, 1.0, 3.0, 8.0, 20.0])
    segments = np.ones((2, length), int)
    segments[0, :3], segments[1, length - 20 :] = 0, 2
    expected, last = token_by_token(q, k, v, g, beta, segments)
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, k, v, g, beta)]
    run = jax.jit(lambda *a: chunked(kimi_delta.within_chunks, *a, chunk=40))
    found, state = run(*arrays, jnp.asarray(segments))
    np.testing.assert_allclose(found, expected, atol=5e-6)
    np.testing.assert_allclose(state, last, atol=5e-6)
    arrays[3] = arrays[3][..., 2]
    alike = jax.jit(lambda *a: chunked(within_chunks, *a, chunk=40))(*arrays, jnp.asarray(segments))
    arrays[3] = jnp.repeat(arrays[3][..., None], 6, axis=-1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-6), run(*arrays, jnp.asarray(segments)), alike)


def test_slow_decays_keep_their_digits_behind_fast_ones():
    """As differences of sums from the first token of a chunk they were wrong by 1e-4 behind 40 of exp(-20)."""
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(1, 64, 1, 6)) for _ in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v, beta = rng.normal(size=(1, 64, 1, 1, 5)), rng.random((1, 64, 1, 1))
    g = np.where(np.arange(64)[:, None, None, None] < 40, -20.0, -0.01) * rng.uniform(0.5, 1.5, (1, 64, 1, 1, 6))
    arrays, segments = [jnp.asarray(x, jnp.float32) for x in (q, k, v, g, beta)], np.ones((1, 64), int)
    expected, last = token_by_token(*(np.asarray(x, np.float64) for x in arrays), segments)
    found, state = jax.jit(lambda *a: chunked(kimi_delta.within_chunks, *a))(*arrays, jnp.asarray(segments))
    np.testing.assert_allclose(found, expected, atol=2e-6)
    np.testing.assert_allclose(state, last, atol=2e-6)


@pytest.mark.parametrize(("corrects", "decays"), [(True, 1), (True, 6), (False, 1)])
def test_states_by_matrices_of_chunks(corrects, decays):
    """What accelerators compute, and its gradients, against a scan and those that jax derives of it."""
    rng = np.random.default_rng(0)
    chunks, size, lead = 5, 4, (2, 2, 2)
    own, keys = (rng.normal(size=(chunks, *lead, size, n)) * 0.3 for n in (5, 6))
    reads, kept = rng.normal(size=(chunks, *lead, size * (1 + corrects), 6)), rng.random((chunks, *lead, decays))
    arrays = [jnp.asarray(x, jnp.float32) for x in (own, reads, kept, keys)]
    wanted = [rng.normal(size=shape) for shape in (own.shape, own.shape, (*lead, 6, 5))]

    def scanned(own, reads, kept, keys):
        def step(state, chunk: Chunk):
            out, added = chunk.parts(chunk.reads @ state)
            return state * chunk.kept[..., None] + chunk.keys.swapaxes(-1, -2) @ added, (out, added)

        last, (out, added) = jax.lax.scan(step, jnp.zeros((*lead, 6, 5)), Chunk(own, reads, reads, kept, keys))
        return out, added, last

    def loss(function, *arrays):
        found = function(*arrays)
        return sum((x * y).sum() for x, y in zip(found, wanted, strict=True)), found

    found, expected = (
        jax.jit(jax.value_and_grad(functools.partial(loss, function), (0, 1, 2, 3), has_aux=True))(*arrays)
        for function in (across, scanned)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6 * np.abs(b).max()), found, expected)


@pytest.mark.parametrize("decays", [1, 6])
def test_a_change_is_made_and_read_at_once(decays, monkeypatch):
    """On accelerators by sums in the pass that writes, and only in the rows that lack it."""
    rng = np.random.default_rng(0)
    lead, kept, key, added, state, reads = (
        (2, 3, 2, 2),
        *(rng.normal(size=(2, 3, *shape)) for shape in ((2, 2, decays), (2, 6), (2, 2, 5), (2, 2, 6, 5), (2, 2, 2, 6))),
    )
    rows = rng.random((2, 3)) < 0.5
    following = state * kept[..., None] + key[:, :, :, None, :, None] * added[..., None, :]
    following = np.where(rows[..., None, None, None, None], following, state)
    expected = following, np.einsum("...td,...dv->...tv", reads, following)
    change = Change(*(jnp.asarray(x, jnp.float32) for x in (kept, key, added)))
    for backend in ("cpu", "gpu", "tpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        found = change.where(jnp.asarray(rows)).made(*(jnp.asarray(x, jnp.float32) for x in (state, reads)))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)
    assert found[1].shape == (*lead, 2, 5)
