"""The pass that gives norms of gradients besides log-probs, and the optimal token baseline that reads them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.advantages import otb_advantages, token_rewards
from jaxrl_llm.data import tasks
from jaxrl_llm.training.passes import scored_logps, scored_norms
from jaxrl_llm.training.setup.given import Given
from jaxrl_llm.training.setup.run import build
from tests.training.test_old_logps import MESH, config_of, digits


@pytest.fixture(scope="module")
def made():
    """A run with the optimal token baseline at temperature 2, its first experience, and its rewards."""
    config = config_of(advantage="otb", old_logps="trainer")
    config.rollout.temperature = 2.0
    with jax.set_mesh(MESH), pytest.MonkeyPatch.context() as patch:
        run = build(config, MESH, Given(train_dataset=tasks.generate("sort", size=16), rewards=digits))
        patch.setattr("jaxrl_llm.training.learner.scored_logps", None)  # the log-probs are of the same pass
        rollouts = run.source.producer.produce(run.state.params, 0, 1, jax.random.key(1))
        experience = run.source.learner.prepare(rollouts, run.state, jax.random.key(2))
    return run, experience, rollouts.rewards[:, 0]


def test_norms_are_of_the_gradient_by_the_logits(made):
    run, experience, _ = made
    batch, net, params = experience.batch, run.model.net, run.state.params
    with jax.set_mesh(MESH):
        logps, norms = scored_norms(net, params, batch.inputs, 2.0, 4, 1)
        expected = scored_logps(net, params, batch.inputs, 2.0, batch.rows, 1)
        logits = net.bind(params)(batch.inputs.tokens, batch.inputs.segments)[:, :-1].astype(jnp.float32) / 2.0
    score = jax.nn.one_hot(batch.inputs.tokens[:, 1:], logits.shape[-1]) - jax.nn.softmax(logits)
    mask = np.asarray(batch.mask)[:, 1:] > 0
    np.testing.assert_allclose(norms[:, 1:][mask], jnp.square(score).sum(-1)[mask], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(logps, expected, atol=1e-5)
    np.testing.assert_allclose(batch.old_logps, expected, atol=1e-5)


def test_advantages_are_of_each_place(made):
    run, experience, rewards = made
    batch = experience.batch
    with jax.set_mesh(MESH):
        _, norms = scored_norms(run.model.net, run.state.params, batch.inputs, 2.0, batch.rows, 1)
    mask = np.asarray(batch.mask)
    expected = otb_advantages(token_rewards(rewards, mask), norms, mask, group_size=4)
    np.testing.assert_allclose(batch.advantages, expected, rtol=1e-4, atol=1e-5)
    row = np.asarray(batch.advantages)[mask.sum(1).argmax()]
    assert len(np.unique(row[row != 0])) > 1, "a row has one advantage on all of its tokens"
