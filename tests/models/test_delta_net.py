"""Gated delta nets: the chunked rule against its definition. As a mixer: test_short_conv.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import kimi_delta
from jaxrl_llm.models.delta_net import chunked, within_chunks


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
def test_the_chunked_rule_is_its_definition(length):
    """Rows of one chunk and of two, slow and fast decays, documents that end within a chunk and at its edge."""
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(2, length, 2, 6)) for _ in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v, beta = rng.normal(size=(2, length, 2, 2, 5)), rng.random((2, length, 2, 2))
    g = -rng.random((2, length, 2, 2)) * np.array([[0.01, 20.0], [1.0, 5.0]])
    segments = np.ones((2, length), int)
    segments[0, :3], segments[1, : length - 16] = 0, 2
    expected, last = token_by_token(q, k, v, g, beta, segments)
    arrays = [jnp.asarray(x, jnp.float32) for x in (q, k, v, g, beta)]
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
