"""xIELU, the activation of Apertus: by hand, and against transformers."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers.activations import XIELUActivation

from jaxrl_llm.models.layers import XIELU

X = np.array([-3.0, -0.5, -1e-3, 0.0, 1e-3, 0.5, 2.0], np.float32)
FLOATS = SimpleNamespace(param_dtype="float32")


def test_values_by_hand():
    """As it starts a = c = 0.8 and b = 0.5."""
    below = [0.8 * (np.expm1(x) - x) + 0.5 * x for x in (-3.0, -0.5, -1e-3)]
    expected = [*below, 0.8 * np.expm1(-1e-6), *(0.8 * x**2 + 0.5 * x for x in (1e-3, 0.5, 2.0))]
    np.testing.assert_allclose(XIELU(FLOATS)(jnp.asarray(X)), expected, rtol=2e-6, atol=1e-9)


def test_gradients_are_those_of_transformers_and_two_numbers_stay():
    theirs, ours = XIELUActivation(dtype=torch.float32), XIELU(FLOATS)
    with torch.no_grad():
        theirs.alpha_p.fill_(0.7)
        theirs.alpha_n.fill_(-0.4)
    ours.alpha_p[...], ours.alpha_n[...] = jnp.full((1,), 0.7), jnp.full((1,), -0.4)
    x = torch.tensor(X, requires_grad=True)
    (theirs(x) ** 2).sum().backward()

    def loss(module, x):
        return (module(x) ** 2).sum()

    found, of_x = jax.grad(loss, argnums=(0, 1))(ours, jnp.asarray(X))
    assert x.grad is not None and theirs.alpha_p.grad is not None and theirs.alpha_n.grad is not None
    np.testing.assert_allclose(of_x, x.grad, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.alpha_p[...], theirs.alpha_p.grad, rtol=1e-5)
    np.testing.assert_allclose(found.alpha_n[...], theirs.alpha_n.grad, rtol=1e-5)
    assert found.beta[...] == found.eps[...] == 0
    rounded = ours(jnp.asarray(X, jnp.bfloat16))
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_allclose(rounded.astype(jnp.float32), ours(jnp.asarray(X)), rtol=2e-2, atol=1e-3)
