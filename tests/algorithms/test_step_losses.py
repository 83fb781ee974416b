"""The loss of steps: by hand, against torch's, and of labels between wrong and right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.step_losses import step_cross_entropy

LOGITS = np.random.default_rng(0).normal(0, 3, (3, 5, 2)).astype(np.float32)


def test_by_hand():
    logits = np.log([[[3.0, 1.0], [1.0, 3.0], [1.0, 1.0]]])  # right with 1/4, 3/4 and 1/2
    np.testing.assert_allclose(step_cross_entropy(logits, [[0, 1, 1]]), -np.log([[0.75, 0.75, 0.5]]), rtol=1e-6)
    np.testing.assert_allclose(step_cross_entropy(logits[:, :1], [[0.5]]), -0.5 * np.log([[0.25 * 0.75]]), rtol=1e-6)
    with pytest.raises(ValueError, match="logits has shape"):
        step_cross_entropy(logits[0], [[0, 1, 1]])


def test_logits_of_16_bits_are_subtracted_in_32():
    logits = jnp.array([[[0.01, 4.0]]], jnp.bfloat16)
    expected = np.log1p(np.exp(float(logits[0, 0, 0]) - 4.0))
    np.testing.assert_allclose(step_cross_entropy(logits, [[1]]), [[expected]], rtol=1e-5)


def test_is_the_cross_entropy_of_torch():
    """Value and gradient, of labels that are classes, and of probabilities of these."""
    torch = pytest.importorskip("torch")
    draw = np.random.default_rng(1)
    for labels in (draw.integers(0, 2, (3, 5)).astype(np.float32), draw.random((3, 5)).astype(np.float32)):
        leaf = torch.tensor(LOGITS, requires_grad=True)
        target = torch.tensor(np.stack([1 - labels, labels], -1)).reshape(-1, 2)
        theirs = torch.nn.functional.cross_entropy(leaf.reshape(-1, 2), target, reduction="none").reshape(3, 5)
        theirs.sum().backward()
        np.testing.assert_allclose(step_cross_entropy(LOGITS, labels), theirs.detach(), rtol=1e-5, atol=1e-6)
        gradient = jax.grad(lambda x, y: step_cross_entropy(x, y).sum())(LOGITS, labels)
        np.testing.assert_allclose(gradient, leaf.grad, rtol=1e-5, atol=1e-6)
    assert np.isfinite(step_cross_entropy(1e4 * LOGITS, labels)).all()
