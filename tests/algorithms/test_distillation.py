"""Distillation: the policy gradient of a teacher's advantages is the gradient of the reverse KL."""

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest

from jaxrl_llm.algorithms.distillation import (
    LEAST_PROBABILITY,
    distilled_advantages,
    generalized_jsd,
    hybrid_distances,
    position_weights,
    prefix_logps,
    sorted_distance,
)


def test_advantages_by_hand():
    logps, teacher = np.float32([[-1.0, -2.0, -9.0]]), np.float32([[-0.5, -3.0, 0.0]])
    got = distilled_advantages(np.float32([[0.25, 0.25, 0.25]]), logps, teacher, np.float32([[1, 1, 0]]), 2.0)
    np.testing.assert_allclose(got, [[0.25 + 2 * 0.5, 0.25 - 2 * 1.0, 0.0]])


@pytest.mark.parametrize("gamma", [0.4, 1.0])
def test_discounted_means_by_hand(gamma):
    """MiniLLM's: a tool's tokens between two turns neither count nor discount."""
    rng = np.random.default_rng(0)
    mask = np.array([[1, 1, 0, 0, 1, 1, 0], [0, 1, 1, 1, 1, 0, 0], [0] * 7], np.float32)
    logps, teacher = rng.normal(size=(2, 3, 7)).astype(np.float32)
    logps[mask == 0] = np.nan
    expected = np.zeros((3, 7))
    for row, live in enumerate(mask):
        places = np.flatnonzero(live)
        for start, place in enumerate(places):
            weights = gamma ** np.arange(len(places) - start)
            ahead = places[start:]
            expected[row, place] = 1.5 - 2 * weights @ (logps - teacher)[row, ahead] / weights.sum()
    got = distilled_advantages(np.full((3, 7), 1.5, np.float32), logps, teacher, mask, 2.0, gamma=gamma)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_what_is_outside_the_mask_is_not_read():
    unknown = np.float32([[np.nan, -2.0]])
    got = distilled_advantages(unknown, unknown, -unknown, np.float32([[0, 1]]), position_gamma=0.5)
    np.testing.assert_allclose(got, [[0.0, -2.0 + 1.5 * 4.0]])


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_tokens_of_no_probability_add_nothing_and_have_no_gradient(x64, beta):
    """As if they were not in the vocabulary, where both have none; a mixture is finite where one of them has none."""
    policy, teacher = np.array([0.5, -1.0, 2.0, -np.inf]), np.array([1.5, -0.3, 0.2, -np.inf])

    def divergence(logits, others):
        return generalized_jsd(jax.nn.log_softmax(logits), jax.nn.log_softmax(others), beta)

    value, slopes = jax.value_and_grad(divergence)(policy, teacher)
    expected, expected_slopes = jax.value_and_grad(divergence)(policy[:3], teacher[:3])
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    np.testing.assert_allclose(slopes, [*expected_slopes, 0.0], rtol=1e-9)
    if 0 < beta < 1:
        value, slopes = jax.value_and_grad(divergence)(policy, np.array([1.5, -0.3, -np.inf, 0.2]))
        assert np.isfinite(value) and np.isfinite(slopes).all()


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


def test_weights_by_position_by_hand(x64):
    """The first token has 1 + gamma; tokens outside the mask and rows without disagreement change nothing."""
    gap = np.array([[0.5, -1.5, 9.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    mask = np.array([[1.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    weights = np.asarray(position_weights(gap, mask, 0.4))
    np.testing.assert_allclose(weights[0, [0, 1, 3]], [1.4, 1 + 0.4 * (1 - 0.5 / 4), 1 + 0.4 * (1 - 2 / 4)], rtol=1e-12)
    np.testing.assert_allclose(weights[1], 1.4)
    logps = -np.random.default_rng(0).exponential(size=(2, 4))
    found = distilled_advantages(np.full((2, 4), 0.25), logps, logps - gap, mask, 2.0, 0.4)
    np.testing.assert_allclose(found, (0.25 - 2.0 * weights * gap) * mask, atol=1e-12)


def test_the_term_of_a_token_has_a_limit(x64):
    """Positions are weighed by the whole difference; verl clamps the negative of this term."""
    gap = np.array([[0.5, -1.5, 3.0, 2.0]])
    mask, logps = np.ones((1, 4)), -np.random.default_rng(0).exponential(size=(1, 4))
    found = distilled_advantages(np.zeros((1, 4)), logps, logps - gap, mask, 2.0, limit=1.0)
    np.testing.assert_allclose(found, -2.0 * np.array([[0.5, -1.0, 1.0, 1.0]]), atol=1e-12)
    found = distilled_advantages(np.zeros((1, 4)), logps, logps - gap, mask, 1.0, 0.4, 1.0)
    weights = np.asarray(position_weights(gap, mask, 0.4))
    np.testing.assert_allclose(found, -weights * np.array([[0.5, -1.0, 1.0, 1.0]]), atol=1e-12)


def test_sorted_distances_by_hand():
    """The likeliest with the likeliest, whatever their ids; the shorter vocabulary is filled up with zeros."""
    p, q = np.float32([[0.1, 0.6, 0.3]]), np.float32([[0.2, 0.5, 0.2, 0.1]])
    np.testing.assert_allclose(sorted_distance(p, q), [0.1 + 0.1 + 0.1 + 0.1], rtol=1e-6)
    np.testing.assert_allclose(sorted_distance(q, p), [0.4], rtol=1e-6)
    gradients = jax.grad(lambda p, q: 2.0 * sorted_distance(p, q).sum(), (0, 1))(jnp.asarray(p), jnp.asarray(q))
    np.testing.assert_allclose(gradients[0], [[-2.0, 2.0, 2.0]])
    np.testing.assert_array_equal(gradients[1], 0.0)
    np.testing.assert_array_equal(sorted_distance(p, p[:, ::-1]), 0.0)


def test_the_slope_of_a_sorted_distance_is_its_derivative(x64):
    logits, other = np.random.default_rng(0).normal(size=(2, 4, 9))
    teacher = jax.nn.softmax(jnp.asarray(other))

    def total(logits):
        return (sorted_distance(jax.nn.softmax(logits), teacher) * jnp.arange(1.0, 5.0)).sum()

    jax.test_util.check_grads(total, (jnp.asarray(logits),), order=1, modes=["rev"])


def test_hybrid_distances_by_hand():
    """Tokens 0 and 2 are the teacher's 3 and 1; the others are sorted."""
    p, q, matches = np.float32([0.4, 0.3, 0.2, 0.1]), np.float32([0.5, 0.1, 0.1, 0.2, 0.1]), np.int32([3, -1, 1, -1])
    matched, other = hybrid_distances(p, q, matches, 1.0)
    np.testing.assert_allclose(matched, 0.4 * np.log(0.4 / 0.2) + 0.2 * np.log(0.2 / 0.1), rtol=1e-5)
    np.testing.assert_allclose(other, abs(0.3 - 0.5) + abs(0.1 - 0.1) + abs(0.0 - 0.1), rtol=1e-5)
    none, whole = hybrid_distances(p, q, np.full(4, -1, np.int32), 0.5)
    np.testing.assert_allclose(none, 0.0, atol=1e-9)
    np.testing.assert_allclose(whole, sorted_distance(p, q), rtol=1e-6)
    shuffled = np.int32([2, 0, 3, 1])
    everything, nothing = hybrid_distances(p, p[np.argsort(shuffled)], shuffled, 0.5)
    np.testing.assert_allclose([everything, nothing], 0.0, atol=1e-7)
    np.testing.assert_allclose(
        hybrid_distances(p, np.float32([0.1, 0.2, 0.3, 0.4]), np.int32([0, 1, 2, 3]), 0.3)[0],
        generalized_jsd(np.log(p), np.log(np.float32([0.1, 0.2, 0.3, 0.4])), 0.3),
        rtol=1e-5,
    )


def test_probabilities_of_spans_by_hand():
    """Tokens 0 and 1 come before the last one of a span, that of column 2; token 3 is its own, token 4 in none."""
    logps = np.log(np.float32([[0.5, 0.25, 0.1, 0.3, 1e-20]]))
    found = prefix_logps(logps, np.int32([[2, 2, -1, -1, -1]]), 4)
    np.testing.assert_allclose(found, [[0.0, 0.0, np.log(0.125), 0.0]], rtol=1e-6)
    least = prefix_logps(logps, np.int32([[-1, -1, -1, 3, 3]]), 4)
    np.testing.assert_allclose(least[0, 3], np.log(0.3 * LEAST_PROBABILITY), rtol=1e-6)
