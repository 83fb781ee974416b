import jax
import numpy as np
import pytest

from jaxrl_llm.algorithms.controllers import AdaptiveEntropy, RunningMean


def test_the_controller_steps_by_delta_and_acts_below_target_only():
    controller = AdaptiveEntropy(coef=0.1)
    assert float(controller.applied) == 0  # nothing measured so far
    low = controller.update(0.15)
    assert float(low.coef) == pytest.approx(0.105)
    assert float(low.applied) == pytest.approx(0.105)
    high = low.update(0.25)
    assert float(high.coef) == pytest.approx(0.1)
    assert float(high.applied) == 0
    assert float(high.update(0.2).applied) == pytest.approx(0.105)  # exactly on target counts as low


def test_the_controller_stays_within_its_range():
    assert float(AdaptiveEntropy(coef=0.002).update(1.0).coef) == 0
    assert float(AdaptiveEntropy(coef=0.998).update(0.0).coef) == 1


def test_the_controller_is_a_pytree_of_two_scalars():
    controller = AdaptiveEntropy(coef=0.1, target=0.5)
    assert jax.tree.leaves(controller) == [0.1, float("inf")]
    updated = jax.jit(lambda c, e: c.update(e))(controller, 0.4)
    assert updated.target == 0.5
    assert float(updated.applied) == pytest.approx(0.105)


def test_running_mean_of_batches_is_the_mean_of_all():
    rng = np.random.default_rng(0)
    batches = [rng.normal(size=n).astype(np.float32) for n in (3, 8, 1)]
    state = RunningMean()
    for batch in batches:
        state = jax.jit(lambda s, b: s.update(b))(state, batch)
    np.testing.assert_allclose(state.mean, np.concatenate(batches).mean(), rtol=1e-5)
    assert float(state.count) == 12
    spoiled = state.update(np.array([np.nan, -np.inf, float(state.mean)]))
    np.testing.assert_allclose([spoiled.mean, spoiled.count], [state.mean, 13], rtol=1e-6)
