"""Completions that are sampled over several steps: whose tokens they are, and that nothing of them is lost."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.config import ConfigError, default, validate
from jaxrl_llm.data import tasks
from jaxrl_llm.training.rollouts.experience import Partial, pack, placed, unpack
from jaxrl_llm.training.setup.given import Given
from jaxrl_llm.training.setup.run import build
from tests.training.rollouts.test_rollout_queue import MESH, config_of, digits, rollouts_of

ROWS = tasks.generate("sort", size=32)
STEPS, WIDTH = 4, 8  # WIDTH: tokens of a completion


def partial_config(prompts: int = 3, tokens: int = 3, staleness: int = 0):
    config = config_of(staleness)
    config.rollout.partial_prompts, config.rollout.partial_tokens = prompts, tokens
    config.algorithm.importance_correction = "token_truncate"
    return config


def source_of(config):
    return build(config, MESH, Given(train_dataset=ROWS, rewards=digits))


def produced(producer, policies, first: int = 1):
    """The rollouts of the steps from `first`, each by its policy."""
    root = jax.random.key(default().seed)
    return [
        producer.produce(policies[step - 1], step - 1, step, jax.random.fold_in(root, step))
        for step in range(first, len(policies) + 1)
    ]


def by_prompt(batches):
    """The completions `[K,C]`, their log-probs, lengths and ends of each prompt, by its text."""
    found = {}
    for batch in batches:
        rollout = jax.tree.map(np.asarray, batch.rollout)
        tokens, logps = (x[:, -WIDTH:].reshape(-1, 4, WIDTH) for x in (rollout.tokens, rollout.sample_logps))
        rows = tokens, logps, rollout.lengths.reshape(-1, 4), rollout.finished.reshape(-1, 4)
        for number, prompt in enumerate(batch.prompts[::4]):
            assert prompt not in found
            found[prompt] = tuple(x[number] for x in rows)
    return found


@pytest.mark.slow
def test_tokens_are_of_the_policies_they_are_said_to_be_of_and_a_resumed_run_goes_on():
    """With one policy the samples are those of a run that ends every completion at once; with several each token's
    log-prob is that of the policy of its version; and half-finished rows survive in a checkpoint, bit for bit."""
    with jax.set_mesh(MESH):
        run = source_of(partial_config())
        source, start, nothing = run.source, run.state.params, run.source.get_state()
        producer = source.producer
        assert not source.get_arrays().keys() & {"partial"}
        expected = by_prompt(produced(dataclasses.replace(producer, partial=None), [start] * STEPS))
        source.set_state(nothing, {})
        batches = produced(producer, [start] * STEPS)
        common = [(row, expected[prompt]) for prompt, row in by_prompt(batches).items() if prompt in expected]
        assert len(common) >= 4 * (STEPS - 1)
        for (tokens, logps, *ends), (tokens_, logps_, *ends_) in common:
            np.testing.assert_array_equal(tokens, tokens_)
            np.testing.assert_allclose(logps, logps_, atol=1e-4)
            jax.tree.map(np.testing.assert_array_equal, ends, ends_)
        assert sum(batch.partial.waiting for batch in batches) > 0

        policies = [jax.tree.map(lambda x, step=step: x * (1 + 0.05 * step), start) for step in range(STEPS)]
        source.set_state(nothing, {})
        batches = produced(producer, policies[:2])
        saved = source.get_state(), source.get_arrays()
        batches += produced(producer, policies, first=3)
        learner, several = source.learner, 0
        for step, batch in enumerate(batches, 1):
            versions, rollout = batch.partial.versions, batch.rollout
            here = np.arange(WIDTH) < np.asarray(rollout.lengths)[:, None]
            np.testing.assert_array_equal(versions >= 0, here)
            assert (np.diff(np.where(here, versions, STEPS), axis=1) >= 0).all() and versions.max() <= step - 1
            logps = [
                np.asarray(learner._logps(policy, learner.inputs(rollout.tokens, rollout.segments, rollout.mask)))
                for policy in policies
            ]
            of_version = np.choose(np.maximum(versions, 0), [x[:, -WIDTH:] for x in logps])
            recorded = np.asarray(rollout.sample_logps)[:, -WIDTH:]
            np.testing.assert_allclose(recorded, np.where(here, of_version, 0), atol=2e-4)
            metrics = batch.partial.metrics(step - 1)
            assert metrics["rollout/age_max"] == (step - 1 - versions)[here].max() >= metrics["rollout/age"]
            several += metrics["rollout/partial_rows"] > 0
        assert several

        source.set_state(*saved)
        for got, batch in zip(produced(producer, policies, first=3), batches[2:], strict=True):
            jax.tree.map(np.testing.assert_array_equal, got.rollout, batch.rollout)
            np.testing.assert_array_equal(got.partial.versions, batch.partial.versions)
            assert (got.prompts, got.completions) == (batch.prompts, batch.completions)
            np.testing.assert_array_equal(got.rewards, batch.rewards)

        producer.partial.engine = dataclasses.replace(producer.partial.engine, max_completion_length=9)
        with pytest.raises(ConfigError, match=r"room for 8 tokens, but .*max_completion_length 9"):
            source.set_state(*saved)


def test_the_queue_keeps_versions():
    partial = Partial(np.array([[0, 1, -1], [2, 2, 2]], np.int32), 5, 2)
    got = [placed(x, MESH) for x in unpack(pack([rollouts_of(3)._replace(partial=partial), rollouts_of(4)]))]
    np.testing.assert_array_equal(got[0].partial.versions, partial.versions)
    assert got[0].partial[1:] == (5, 2) and got[1].partial is None
    assert partial.metrics(3) == {
        "rollout/age": np.float32(8 / 5),
        "rollout/age_max": 3,
        "rollout/partial_rows": 0.5,
        "rollout/row_policies": 1.5,
        "rollout/policies": 3,
        "rollout/waiting_rows": 5,
        "rollout/rounds": 2,
    }


def test_what_partial_rollouts_need():
    config = partial_config()
    validate(config)
    config.rollout.partial_tokens = 8
    with pytest.raises(ConfigError, match=r"partial_tokens is 8, but rollout.max_completion_length is 8"):
        validate(config)
    config.rollout.partial_prompts, config.rollout.partial_tokens = 0, 3
    with pytest.raises(ConfigError, match=r"partial_tokens is 3, but rollout.partial_prompts is 0"):
        validate(config)
    for key, value in (
        ("data.curriculum_easy", 0.9),
        ("data.streaming", True),
        ("environment.name", "guess"),
        ("environment.rollout_func", "rollouts.py:sample"),
        ("rollout.router_replay", True),
        ("rollout.structured_grammar", 'start: "a"'),
    ):
        config, (section, _, name) = partial_config(), key.partition(".")
        config[section][name] = value
        with pytest.raises(ConfigError, match=rf"rollout.partial_prompts is 3, but {key} is"):
            validate(config)
    with jax.set_mesh(MESH):
        config = partial_config()
        config.algorithm.importance_correction = "none"
        with pytest.raises(ConfigError, match=r"rollout\.partial_prompts is 3, so .* token_truncate"):
            source_of(config)
        config = partial_config()
        config.algorithm.advantage = "remax"
        with pytest.raises(ConfigError, match=r"partial_prompts is 3, but algorithm.advantage = 'remax'"):
            source_of(config)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_has_one_result_whatever_its_slots(tmp_path, staleness):
    """Slots, chunks and where the host looks change no sample; and the policy that is trained learns from the rows."""
    results = []
    for name, slots, chunk in (("one", 0, 32), ("two", 5, 2)):
        config = partial_config(staleness=staleness)
        config.output_dir, config.rollout.slots, config.rollout.chunk = str(tmp_path / name), slots, chunk
        config.total_steps, config.logging.backends, config.checkpoint.every = 6, (), 0
        results.append(jaxrl_llm.train(config, ROWS, rewards=digits))
    one, two = (result.metrics for result in results)
    for name in ("rollout/age", "rollout/age_max", "rollout/partial_rows", "rollout/waiting_rows", "reward", "entropy"):
        np.testing.assert_allclose([x[name] for x in one], [x[name] for x in two], rtol=1e-3, err_msg=name)
    assert max(x["rollout/age_max"] for x in one) > staleness
    assert max(x["rollout/partial_rows"] for x in one) > 0
    params = [jax.tree.leaves(result.model.params) for result in results]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), *params)
    assert all(bool(jnp.isfinite(x).all()) for x in params[0])
