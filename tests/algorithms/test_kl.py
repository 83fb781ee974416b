import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.kl import KINDS, AdaptiveKL, full_kl, kl_estimate

LOGPS, REF = np.array([-1.0, -2.0, -0.5]), np.array([-1.3, -1.9, -0.7])


def test_estimates_by_hand(x64):
    k1 = np.array([0.3, -0.1, 0.2])
    np.testing.assert_allclose(kl_estimate(LOGPS, REF, "k1"), k1, rtol=1e-12)
    np.testing.assert_allclose(kl_estimate(LOGPS, REF, "abs"), abs(k1), rtol=1e-12)
    np.testing.assert_allclose(kl_estimate(LOGPS, REF, "k2"), [0.045, 0.005, 0.02], rtol=1e-12)
    np.testing.assert_allclose(kl_estimate(LOGPS, REF, "k3"), np.exp(-k1) - 1 + k1, rtol=1e-12)
    assert float(kl_estimate(0.3, 0.0, "k3")) == pytest.approx(0.040818, abs=5e-7)


def test_the_full_kl_is_what_k1_and_k3_estimate(x64):
    """By hand, by torch, and as the mean of each estimate over the tokens that the policy draws."""
    policy, reference = np.log([0.7, 0.2, 0.1]), np.log([0.5, 0.3, 0.2])
    by_hand = 0.7 * np.log(7 / 5) + 0.2 * np.log(2 / 3) + 0.1 * np.log(1 / 2)
    np.testing.assert_allclose(full_kl(policy, reference), by_hand, rtol=1e-12)
    for kind in ("k1", "k3"):
        mean = (np.exp(policy) * kl_estimate(policy, reference, kind)).sum()
        np.testing.assert_allclose(mean, by_hand, rtol=1e-12)
    assert float(full_kl(policy, policy)) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_estimates_vanish_exactly_when_the_policies_agree(kind):
    np.testing.assert_array_equal(kl_estimate(REF, REF, kind), 0.0)


def test_k3_is_accurate_for_tiny_ratios_in_float32():
    # exp(-k) - 1 + k loses all digits below 1e-4 in float32; the leading term is k^2 / 2
    np.testing.assert_allclose(kl_estimate(np.float32(1e-3), np.float32(0), "k3"), 5e-7, rtol=1e-2)


def test_k3_is_never_negative_and_its_gradient_is_one_minus_the_inverse_ratio(x64):
    k1 = np.linspace(-4, 4, 41)
    assert (np.asarray(kl_estimate(k1, np.zeros(41), "k3")) >= 0).all()
    gradient = jax.vmap(jax.grad(lambda x: kl_estimate(x, 0.0, "k3")))(k1)
    np.testing.assert_allclose(gradient, 1 - np.exp(-k1), rtol=1e-12)


def expected_gradient(estimate, theta, ref):
    """The exact expectation, over a three-way distribution, of the gradient of a per-sample loss term."""

    def per_token(theta):
        logps = jax.nn.log_softmax(theta)
        return jnp.sum(jax.lax.stop_gradient(jnp.exp(logps)) * estimate(logps, jax.nn.log_softmax(ref)))

    return jax.grad(per_token)(theta)


def test_which_estimates_regularise_when_used_as_a_loss(x64):
    theta, ref = jnp.array([0.3, -0.5, 1.1]), jnp.array([0.0, 0.4, -0.2])

    def exact_kl(theta):
        logps = jax.nn.log_softmax(theta)
        return jnp.sum(jnp.exp(logps) * (logps - jax.nn.log_softmax(ref)))

    exact = jax.grad(exact_kl)(theta)
    of_kind = {kind: expected_gradient(lambda a, b, kind=kind: kl_estimate(a, b, kind), theta, ref) for kind in KINDS}
    np.testing.assert_allclose(of_kind["k1"], 0.0, atol=1e-12)
    np.testing.assert_allclose(of_kind["k2"], exact, rtol=1e-10)
    assert float(jnp.dot(of_kind["k3"], exact)) > 0
    bound = expected_gradient(lambda a, b: kl_estimate(a, b, "k3", k2_gradient=True), theta, ref)
    np.testing.assert_allclose(bound, exact, rtol=1e-10)


def test_the_corrected_estimate_has_the_exact_gradient_for_samples_of_an_older_policy(x64):
    theta, ref = jnp.array([0.3, -0.5, 1.1]), jax.nn.log_softmax(jnp.array([0.0, 0.4, -0.2]))
    old = jax.nn.log_softmax(jnp.array([0.1, 0.2, 0.3]))

    def expected(theta):
        logps = jax.nn.log_softmax(theta)
        return jnp.sum(jnp.exp(old) * kl_estimate(logps, ref, "k3", ratio=jnp.exp(logps - old)))

    def exact(theta):
        logps = jax.nn.log_softmax(theta)
        return jnp.sum(jnp.exp(logps) * (logps - ref))

    np.testing.assert_allclose(expected(theta), exact(theta), rtol=1e-12)
    np.testing.assert_allclose(jax.grad(expected)(theta), jax.grad(exact)(theta), rtol=1e-10)


@pytest.mark.parametrize("kind", ["abs", "k2", "k3"])
def test_a_policy_equal_to_its_reference_is_not_pulled(kind):
    np.testing.assert_array_equal(jax.grad(lambda x: kl_estimate(x, REF, kind).sum())(REF), 0.0)


def test_k2_gradient_keeps_the_value(x64):
    np.testing.assert_allclose(
        kl_estimate(LOGPS, REF, "k3", k2_gradient=True), kl_estimate(LOGPS, REF, "k3"), rtol=1e-12
    )


def test_log_ratio_clamp():
    assert float(kl_estimate(-500.0, 0.0, "k3")) == np.inf
    assert float(kl_estimate(-500.0, 0.0, "k3", log_ratio_clamp=20.0)) == pytest.approx(np.exp(20) - 21, rel=1e-5)


def test_half_precision_inputs_are_raised():
    assert kl_estimate(jnp.ones(2, "bfloat16"), jnp.zeros(2, "bfloat16")).dtype == jnp.float32


def test_unknown_kind():
    with pytest.raises(ValueError, match="unknown KL estimate 'k4'; choose one of k1, abs, k2, k3"):
        kl_estimate(0.0, 0.0, "k4")


def test_adaptive_controller_by_hand(x64):
    controller = AdaptiveKL(0.001, target=0.1, horizon=10_000)
    # error clipped to 0.2, times 1024 / 10000
    assert float(controller.update(0.2, 1024).coef) == pytest.approx(0.00102048, rel=1e-12)
    assert float(controller.update(0.0, 1024).coef) == pytest.approx(0.00097952, rel=1e-12)
    assert float(controller.update(0.11, 1000).coef) == pytest.approx(0.001 * 1.01, rel=1e-12)
    assert controller.coef == 0.001


def test_controllers_are_pytrees_with_one_scalar_of_state():
    controller = AdaptiveKL(0.001, target=0.2)
    leaves, structure = jax.tree.flatten(controller)
    assert leaves == [0.001]
    assert jax.tree.unflatten(structure, [0.5]) == AdaptiveKL(0.5, target=0.2)
    updated = jax.jit(lambda c, kl: c.update(kl, 64))(controller, 0.3)
    np.testing.assert_allclose(updated.coef, controller.update(0.3, 64).coef, rtol=1e-6)
