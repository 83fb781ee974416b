"""Distillation: the policy gradient of a teacher's advantages is the gradient of the reverse KL."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms.distillation import distilled_advantages


def test_advantages_by_hand():
    logps, teacher = np.float32([[-1.0, -2.0, -9.0]]), np.float32([[-0.5, -3.0, 0.0]])
    got = distilled_advantages(np.float32([[0.25, 0.25, 0.25]]), logps, teacher, np.float32([[1, 1, 0]]), 2.0)
    np.testing.assert_allclose(got, [[0.25 + 2 * 0.5, 0.25 - 2 * 1.0, 0.0]])


def test_expected_gradient_is_that_of_the_reverse_kl(x64):
    """The mean over what the policy samples of -A grad log p(y), over a vocabulary, is the gradient of the KL."""
    logits, other = np.random.default_rng(0).normal(size=(2, 5))
    tokens = jnp.arange(5)

    def logp(logits):
        return jax.nn.log_softmax(logits)

    probabilities, teacher = jnp.exp(logp(logits)), logp(other)
    advantages = distilled_advantages(jnp.zeros((5, 1)), logp(logits)[:, None], teacher[:, None], jnp.ones((5, 1)))
    expected = jax.grad(lambda x: (jnp.exp(logp(x)) * (logp(x) - teacher)).sum())(jnp.asarray(logits))
    got = jax.grad(lambda x: -(probabilities * advantages[:, 0] * logp(x)[tokens]).sum())(jnp.asarray(logits))
    np.testing.assert_allclose(got, expected, atol=1e-12)


def test_nothing_is_differentiated():
    def total(logps):
        return distilled_advantages(jnp.zeros((1, 2)), logps, jnp.zeros((1, 2)), jnp.ones((1, 2))).sum()

    np.testing.assert_array_equal(jax.grad(total)(jnp.ones((1, 2))), 0.0)
