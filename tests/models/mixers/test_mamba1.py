"""Mamba-1: the scan over the chunks of rows against its definition. As a mixer: test_short_conv.py."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.mixers.mamba1 import scanned

LENGTH = 37


def test_the_scan_is_its_definition():
    """Rows of one chunk and of three, slow and fast decays, documents that end within a chunk and at its edge; the
    gradients are those of one chunk, which is computed once."""
    rng = np.random.default_rng(0)
    c, b = (rng.normal(size=(2, LENGTH, 3)) for _ in range(2))
    x, dt = rng.normal(size=(2, LENGTH, 4)), rng.random((2, LENGTH, 4))
    rates = -np.array([0.01, 1.0, 20.0]) * rng.uniform(0.5, 1.5, (4, 1))
    segments = np.ones((2, LENGTH), int)
    segments[0, :3], segments[1, LENGTH - 16 :], segments[1, LENGTH - 3 :] = 0, 2, 3
    state, expected = np.zeros((2, 4, 3)), []
    for t in range(LENGTH):
        state[segments[:, t] != segments[:, max(t - 1, 0)]] = 0
        state = state * np.exp(dt[:, t, :, None] * rates) + (dt * x)[:, t, :, None] * b[:, t, None]
        expected.append((state * c[:, t, None]).sum(-1))

    arrays = [jnp.asarray(a, jnp.float32) for a in (c, b, x, dt, rates)]
    wanted, kept = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in (x.shape, state.shape))

    def run(chunk):
        def loss(c, b, x, dt, rates):
            out, last = scanned(c, b, x, dt, rates, jnp.asarray(segments), chunk)
            return (out * wanted).sum() + (last * kept).sum(), (out, last)

        return jax.jit(jax.value_and_grad(loss, range(5), has_aux=True))(*arrays)

    for chunk in (16, LENGTH):
        (_, (out, last)), _ = run(chunk)
        np.testing.assert_allclose(out, np.stack(expected, axis=1), atol=2e-6)
        np.testing.assert_allclose(last, state, atol=2e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), run(16)[1], run(LENGTH)[1])
