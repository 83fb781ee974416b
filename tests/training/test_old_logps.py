"""`algorithm.old_logps`: the policy that the ratio compares with, the trainer's or the sampler's."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl_llm.algorithms.aggregation import loss_weights
from jaxrl_llm.config import ConfigError, default, validate
from jaxrl_llm.data import tasks
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.training.passes import scored_logps
from jaxrl_llm.training.rollouts.experience import Partial
from jaxrl_llm.training.setup.given import Given
from jaxrl_llm.training.setup.objectives import objective_of
from jaxrl_llm.training.setup.records import health_spec
from jaxrl_llm.training.setup.run import build
from jaxrl_llm.training.setup.specs import old_logps_of
from jaxrl_llm.training.step import improve

MESH = make_mesh(devices=jax.devices()[:1])


def config_of(**algorithm):
    config = default()
    config.batch.prompts, config.batch.packing, config.eval.every = 4, "false", -1
    config.rollout.group_size, config.rollout.max_prompt_length, config.rollout.max_completion_length = 4, 16, 8
    config.optimizer.learning_rate, config.optimizer.eps = 1e-3, 1e-4
    config.algorithm.aggregation = "token"
    for name, value in algorithm.items():
        config.algorithm[name] = value
    validate(config)
    return config


def digits(completions, **kwargs):
    return [float(sum(map(ord, completion)) % 7) for completion in completions]


def stepped(config):
    """The run of a configuration, its first experience, and the state after it."""
    with jax.set_mesh(MESH):
        run = build(config, MESH, Given(train_dataset=tasks.generate("sort", size=16), rewards=digits))
        experience = run.source.next(run.state, jax.random.key(1))
        state, updates = improve(run, run.state, experience.batch)
    return run, experience, state, updates


@pytest.mark.slow
def test_dppo_drops_tokens_that_moved():
    """The second update of a step has moved from the sampler: its loss leaves out the tokens that went too far."""
    bounds = {"epsilon_low": 0.01, "epsilon_high": 0.01}
    config = config_of(loss="dppo(kl_coef=0.0)", num_iterations=2, **bounds)
    run, experience, state, _ = stepped(config)
    batch, net = experience.batch, run.model.net
    np.testing.assert_array_equal(batch.old_logps, batch.sample_logps)
    with jax.set_mesh(MESH):
        logps = np.asarray(scored_logps(net, state.params, batch.inputs, 1.0, batch.rows, 1))
        objective = objective_of(config, net)
        loss, _ = jax.jit(objective.loss)(state.params, objective.prepare(batch))
    mask, advantages, sampled = (np.asarray(x) for x in (batch.mask, batch.advantages, batch.sample_logps))
    moved = np.exp(logps) - np.exp(sampled)
    dropped = (mask > 0) & np.where(advantages > 0, moved > 0.01, moved < -0.01)
    assert 0 < dropped.sum() < mask.sum()
    surrogate = -advantages * np.exp(np.where(mask > 0, logps - sampled, 0.0))
    weights = np.asarray(loss_weights(batch.mask, "token"))
    expected = (weights * np.where(dropped, 0.0, surrogate)).sum()
    np.testing.assert_allclose(loss, expected, rtol=1e-4, atol=1e-6)
    assert abs(expected - (weights * surrogate).sum()) > 1e-4, "without the mask the loss is the same"


@pytest.mark.slow
def test_m2po_bounds_the_second_moment_of_an_update():
    """Nothing is left out before the policy moves, and in the next update just so much that the bound holds."""
    run, experience, state, (first,) = stepped(config_of(loss="m2po(threshold=1e-4)"))
    batch = experience.batch
    with jax.set_mesh(MESH):
        logps = np.asarray(scored_logps(run.model.net, state.params, batch.inputs, 1.0, batch.rows, 1))
        _, (second,) = improve(run, state, batch)
    squares = np.square(logps - np.asarray(batch.sample_logps))[np.asarray(batch.mask) > 0]
    left = sorted(squares)
    while np.mean(left) > 1e-4:
        left.pop()
    assert float(first["m2po/masked"]) == 0 < len(left) < len(squares)
    assert round(float(second["m2po/masked"]) * len(squares), 3) == len(squares) - len(left)


KL_IN_REWARD = {"kl_in_reward": True, "beta": 0.1, "advantage": "rloo"}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, KL_IN_REWARD], ids=["", "kl"])
def test_sampler_and_trainer_agree_on_policy(settings):
    (_, ours, state, _), (_, theirs, other, _) = (
        stepped(config_of(old_logps=kind, **settings)) for kind in ("sampler", "trainer")
    )
    mask = np.asarray(ours.batch.mask)
    np.testing.assert_array_equal(ours.batch.old_logps, ours.batch.sample_logps)
    np.testing.assert_allclose(ours.batch.old_logps * mask, theirs.batch.old_logps * mask, atol=1e-4)
    np.testing.assert_allclose(ours.batch.advantages, theirs.batch.advantages, atol=1e-3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), state.params, other.params)


def test_auto_computes_only_what_differs():
    assert old_logps_of(config_of()) == "policy"  # one update: the policy has sampled its rows
    assert old_logps_of(config_of(num_iterations=2)) == "trainer"
    assert old_logps_of(config_of(replay_groups=2)) == "trainer"
    assert old_logps_of(config_of(beta=0.1, kl_controller="adaptive")) == "trainer"
    assert old_logps_of(config_of(old_logps="trainer")) == "trainer"
    assert old_logps_of(config_of(old_logps="sampler", num_iterations=2)) == "sampler"
    assert old_logps_of(config_of(loss="dppo")) == "sampler"
    assert old_logps_of(config_of(loss="dppo", old_logps="trainer")) == "trainer"


def test_a_policy_that_moves_in_a_step_is_no_mismatch_of_the_sampler():
    """Compared with the sampler is then the policy as it is in each update, and the warning says what moved it."""
    assert health_spec(config_of(loss="dppo", num_iterations=2)).older == ("algorithm.num_iterations",)
    assert health_spec(config_of(loss="dppo")).older == health_spec(config_of(num_iterations=2)).older == ()


def test_correction_with_sampler_is_refused():
    config = config_of(old_logps="sampler", importance_correction="token_truncate")
    with pytest.raises(ConfigError, match=r"importance_correction is token_truncate.*samples would be weighed twice"):
        old_logps_of(config)
    config = config_of(loss="dppo", importance_correction="sequence_mask")
    with pytest.raises(ConfigError, match=r"importance_correction is sequence_mask.*'dppo'.*weighed twice"):
        old_logps_of(config)
    assert old_logps_of(config_of(loss="reinforce", old_logps="sampler", importance_correction="sequence_mask"))


@pytest.mark.slow
@pytest.mark.parametrize("normalize", [False, True])
def test_bypass_weighs_by_the_policy_itself(normalize):
    """In each update of a step `reinforce` is weighed by the ratio of the policy as it is then and the sampler."""
    config = config_of(rollout_correction="bypass_pg_is(threshold=1.05)", num_iterations=2)
    config.algorithm.importance_normalize = normalize
    run, experience, state, _ = stepped(config)
    config, batch, net = run.config, experience.batch, run.model.net
    np.testing.assert_array_equal(batch.old_logps, batch.sample_logps)
    with jax.set_mesh(MESH):
        logps = np.asarray(scored_logps(net, state.params, batch.inputs, 1.0, batch.rows, 1))
        objective = objective_of(config, net)
        assert (objective.observe is not None) == normalize
        observed = objective.observe(state.params, batch) if objective.observe else None
        prepared = objective.prepare(batch, observed)
        loss, metrics = jax.jit(objective.loss)(state.params, prepared)
    mask, sampled = np.asarray(batch.mask), np.asarray(batch.sample_logps)
    ratio = np.exp(((logps - sampled) * mask).sum(axis=1, keepdims=True))
    weights = np.minimum(ratio, 1.05)
    assert 0 < (ratio > 1.05).sum() < len(ratio), "some are cut and some are not"
    if normalize:
        weights = weights / weights[mask.any(axis=1)].mean()
    expected = (np.asarray(loss_weights(batch.mask, "token")) * -weights * np.asarray(batch.advantages) * logps).sum()
    np.testing.assert_allclose(loss, expected, rtol=1e-3, atol=1e-5)
    tokens = np.broadcast_to(ratio > 1.05, mask.shape)[mask > 0]
    np.testing.assert_allclose(metrics["rollout_corr/fraction_high"], tokens.mean(), rtol=1e-4)


def interpolated(staleness=1, **changes):
    config = config_of(old_logps="interpolated", importance_correction="token_truncate", **changes)
    config.rollout.staleness, config.total_steps = staleness, 2
    validate(config)
    return config


@pytest.mark.slow
def test_interpolation_takes_the_age_of_rows_and_costs_no_pass(monkeypatch):
    """The second batch of a run with staleness 1 is of the policy before the first update: age 1, half of the way."""

    def no_pass(*_):
        raise AssertionError("log-probs are computed before the update")

    config = interpolated()
    assert old_logps_of(config) == "interpolated"
    with jax.set_mesh(MESH):
        run = build(config, MESH, Given(train_dataset=tasks.generate("sort", size=16), rewards=digits))
        with run.source.queue:
            monkeypatch.setattr("jaxrl_llm.training.learner.scored_logps", no_pass)
            first = run.source.next(run.state, jax.random.key(1))
            np.testing.assert_array_equal(first.batch.proximal_share, 0.0)
            state, _ = improve(run, run.state, first.batch)
            second = run.source.next(state, jax.random.key(2))
        batch, net = second.batch, run.model.net
        assert batch.old_logps is None and second.metrics["rollout/proximal_share"] == 0.5
        logps = np.asarray(scored_logps(net, state.params, batch.inputs, 1.0, batch.rows, 1))
        objective = objective_of(config, net)
        loss, _ = jax.jit(objective.loss)(state.params, objective.prepare(batch))
    mask, advantages, sampled = (np.asarray(x) for x in (batch.mask, batch.advantages, batch.sample_logps))
    change = (logps - sampled) * mask
    assert np.abs(change).max() > 1e-3
    ratio, weights = np.exp(change / 2), np.minimum(np.exp(change / 2), 3.0)
    surrogate = -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)
    expected = (np.asarray(loss_weights(batch.mask, "token")) * weights * surrogate).sum()
    np.testing.assert_allclose(loss, expected, rtol=1e-3, atol=1e-5)


def test_interpolation_takes_the_age_of_tokens():
    """Rows that several policies sampled have a share for each token."""
    config = interpolated(staleness=0)
    with jax.set_mesh(MESH):
        run = build(config, MESH, Given(train_dataset=tasks.generate("sort", size=16), rewards=digits))
        rollouts = run.source.producer.produce(run.state.params, 0, 1, jax.random.key(1))
        versions = np.tile([[0, 0, 1, 1, 2, 2, 3, -1]], (16, 1)).astype(np.int32)
        rollouts = rollouts._replace(partial=Partial(versions, 0, 1))
        state = dataclasses.replace(run.state, step=run.state.step + 3)
        batch = run.source.learner.prepare(rollouts, state, jax.random.key(2)).batch
    share = np.asarray(batch.proximal_share)[:, -8:]
    expected = np.array([3 / 4, 3 / 4, 2 / 3, 2 / 3, 1 / 2, 1 / 2, 0, 0])
    np.testing.assert_allclose(share, np.tile(expected, (16, 1)), rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "reader"),
    [
        ({"replay_groups": 2}, "replay_groups"),
        ({"beta": 0.1, "kl_in_reward": True, "advantage": "rloo"}, "kl_in_reward"),
        ({"beta": 0.1, "kl_controller": "adaptive"}, "an adaptive controller"),
        ({"importance_normalize": True}, "importance_normalize"),
    ],
)
def test_interpolation_is_not_known_before_the_update(changes, reader):
    config = interpolated(**changes)
    with pytest.raises(ConfigError, match=rf"old_logps is interpolated.*{reader}.*set old_logps to trainer or sampler"):
        old_logps_of(config)


def test_interpolation_needs_a_correction():
    config = interpolated()
    config.algorithm.importance_correction = "none"
    with jax.set_mesh(MESH), pytest.raises(ConfigError, match="importance_correction is none"):
        build(config, MESH, Given(train_dataset=tasks.generate("sort", size=16), rewards=digits))


def test_sampler_needs_no_correction():
    config = config_of(old_logps="sampler")
    config.environment.rollout_func = "server(url='http://localhost:1/v1', model='m')"
    validate(config)
    config.algorithm.old_logps = "auto"
    with pytest.raises(ConfigError, match="importance_correction is none"):
        validate(config)
