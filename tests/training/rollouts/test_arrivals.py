"""Policies that come while rows are sampled: whose tokens are whose, and that a record of them gives the same bits."""

import dataclasses
import json
import time

import jax
import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.algorithms.off_policy import importance_correction
from jaxrl_llm.config import ConfigError, validate
from jaxrl_llm.training.logging.stopwatch import Stopwatch
from jaxrl_llm.training.rollouts.arrivals import RECORD, Arrivals
from jaxrl_llm.training.rollouts.experience import Partial
from jaxrl_llm.training.rollouts.rollout_queue import RolloutQueue
from jaxrl_llm.training.setup.given import Given
from jaxrl_llm.training.setup.run import build
from tests.system.faults.equality import assert_same_run
from tests.training.rollouts.test_partial_rollouts import ROWS, partial_config
from tests.training.rollouts.test_rollout_queue import MESH, config_of, digits, rollouts_of


def in_flight_config(staleness: int = 1, partial: bool = False):
    config = partial_config(staleness=staleness) if partial else config_of(staleness)
    config.rollout.update_in_flight, config.rollout.chunk = True, 2
    config.algorithm.importance_correction = "token_truncate"
    return config


class Asking:
    """A `produce` that asks its arrivals `count` times, waits between, and notes what it was given."""

    def __init__(self, arrivals: Arrivals, count: int = 6, pause: float = 0.01):
        self.arrivals, self.count, self.pause, self.given = arrivals, count, pause, {}

    def __call__(self, params, version, step, key):
        assert params == {}
        lengths, given = np.ones(2, np.int32), [self.arrivals.start(params)]
        for asked in range(1, self.count):
            time.sleep(self.pause)
            border = self.arrivals.border(lengths + asked, lengths > 1)
            given.append(border.params or given[-1])
        self.given[step] = given
        versions = self.arrivals.versions(lengths + self.count, self.count + 1)
        assert [f"copy of policy {version}" for version in versions[0]] == [given[0], *given]
        return rollouts_of(step, version)._replace(partial=Partial(versions, 0, 1))


def asked(path, staleness, followed=None, last_step=8, pause=0.01, resume=None, rests=(), count=6):
    """What each batch was given in a run of the queue alone, whose learner takes as long as a batch."""
    arrivals, watch = Arrivals(path, staleness, True, followed=followed), Stopwatch()
    produce = Asking(arrivals, count, pause)
    watches = watch, Stopwatch(within=watch)
    queue = RolloutQueue(
        produce, staleness, last_step, "key {}".format, "copy of {}".format, MESH, MESH, *watches, arrivals
    )
    first = 1
    if resume is not None:
        first, saved = resume
        with jax.set_mesh(MESH):
            queue.restore(saved)
    states = {}
    with queue:
        for step in range(first, last_step + 1):
            rollouts, metrics = queue.take(f"policy {step - 1}", step - 1, None)
            assert max(0, step - 1 - staleness) <= rollouts.partial.versions[:, 1:].min()
            assert rollouts.partial.versions.max() < step
            assert metrics["rollout/age"] <= staleness
            time.sleep(0.04)
            if step in rests:
                states[step] = queue.get_arrays()
    return produce.given, states


@pytest.mark.parametrize("staleness", [1, 3])
@pytest.mark.slow
def test_a_record_is_followed_whatever_the_timing(tmp_path, staleness):
    given, _ = asked(tmp_path / "one", staleness)
    assert any(len(set(x)) > 1 for x in given.values())  # policies came to batches under way
    again, _ = asked(tmp_path / "two", staleness, tmp_path / "one", pause=0.0)
    assert again == given and (tmp_path / "two").read_text() == (tmp_path / "one").read_text()
    again, _ = asked(tmp_path / "three", staleness, tmp_path / "one", pause=0.03)
    assert again == given


@pytest.mark.slow
def test_a_run_that_goes_on_follows_its_record_as_far_as_it_goes(tmp_path):
    given, states = asked(tmp_path / "whole", 2, rests=[3])
    lines = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    (tmp_path / "killed").write_bytes(b"".join(lines[:6]) + lines[6][:9])  # the batches of steps 4 and 5 are saved
    again, _ = asked(tmp_path / "killed", 2, pause=0.0, resume=(4, states[3]))
    assert sorted(again) == [6, 7, 8] and again[6] == given[6]
    assert [json.loads(x)["step"] for x in (tmp_path / "killed").read_text().splitlines()] == [*range(1, 9)]
    replayed, _ = asked(tmp_path / "replayed", 2, tmp_path / "killed", rests=[3])
    assert replayed == given | again
    asked(tmp_path / "killed", 2)  # a run that starts has a record of its own
    assert len((tmp_path / "killed").read_text().splitlines()) == 8


def test_a_learner_that_rests_elsewhere_than_the_run_that_is_followed_leaves_it(tmp_path):
    """A save waits for the batch under way, to which no policy comes then; nobody waits for the other."""
    lines = [{"step": step, "policies": [[0, max(0, step - 2)]], "ends": []} for step in range(1, 9)]
    lines[4]["policies"].append([3, 4])  # comes after step 4
    (tmp_path / "one").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given, _ = asked(tmp_path / "two", 1, tmp_path / "one", rests=[4])
    assert set(given[5]) == {"copy of policy 3"} and given[6][0] == "copy of policy 4"
    given, _ = asked(tmp_path / "three", 1, tmp_path / "one")
    assert given[5][2:4] == ["copy of policy 3", "copy of policy 4"]


def test_records_that_fit_no_run(tmp_path):
    path = tmp_path / RECORD
    for text, message in (
        ('{"step": 5, "policies": [[0, 1]], "ends": []}', r"step 5 has the policies \{0: 1\}, .*staleness=2"),
        ('{"step": 5, "policies": [[0, 5]], "ends": []}', "step 5 has the policies"),
        ('{"step": 5, "policies": [[1, 4]], "ends": []}', "step 5 has the policies"),
        ('{"step": 5, "policies": [[0, 4], [3, 3]], "ends": []}', "step 5 has the policies"),
        ('{"step": 5}', 'line 1 of .* which is no line of arrivals'),
        ("[0", "line 1 of .* which is no line of arrivals"),
    ):  # fmt: skip
        path.write_text(text + "\n")
        with pytest.raises(ConfigError, match=message):
            Arrivals(tmp_path / "own", 2, True, followed=path)
    with pytest.raises(ConfigError, match=r"rollout.arrivals is .*none, which cannot be read"):
        Arrivals(tmp_path / "own", 2, True, followed=tmp_path / "none")
    path.write_text('{"step": 5, "policies": [[0, 1]], "ends": []}\n')
    Arrivals(path, 2, True).resume()  # of the run itself, when it had another staleness: not followed
    Arrivals(path, 2, False).resume()


def test_what_arrivals_need():
    validate(in_flight_config())
    validate(in_flight_config(partial=True))
    for section, key, value in (
        ("environment", "name", "guess"),
        ("environment", "tools", ("python",)),
        ("environment", "rollout_func", "rollouts.py:sample"),
        ("environment", "agent", "agents.py:run"),
        ("rollout", "processes", 1),
    ):
        config = in_flight_config()
        config[section][key] = value
        with pytest.raises(ConfigError, match=rf"rollout.update_in_flight is true, but {section}.{key} is"):
            validate(config)
    config = in_flight_config(staleness=0)
    with pytest.raises(ConfigError, match=r"update_in_flight is true, but rollout.staleness is 0"):
        validate(config)
    config = config_of(0)
    config.rollout.max_wait = 1.0
    with pytest.raises(ConfigError, match=r"rollout.max_wait is 1.0, but rollout.partial_prompts is 0"):
        validate(config)
    config = config_of(0)
    config.rollout.arrivals = "arrivals.jsonl"
    with pytest.raises(ConfigError, match=r"rollout.arrivals is 'arrivals.jsonl', but rollout.update_in_flight is"):
        validate(config)
    config = in_flight_config()
    config.algorithm.advantage = "remax"
    with (
        jax.set_mesh(MESH),
        pytest.raises(ConfigError, match=r"update_in_flight is true, but algorithm.advantage = 'rem"),
    ):
        build(config, MESH, Given(train_dataset=ROWS, rewards=digits))


@pytest.mark.slow
@pytest.mark.parametrize("partial", [False, True])
def test_log_probs_are_of_the_policies_that_came_and_are_corrected(tmp_path, partial):
    """Policies that differ behind the last layer alone have the same keys and values: each token's log-prob is that
    which its policy gives to the whole row, and the ratio of the newest one's tokens is 1."""
    lines = [{"step": 1, "policies": [[0, 0]], "ends": []}, {"step": 2, "policies": [[0, 0], [2, 1]], "ends": []}]
    (tmp_path / "followed").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = in_flight_config(partial=partial)
    config.rollout.arrivals, config.output_dir = str(tmp_path / "followed"), str(tmp_path)
    config.rollout.partial_tokens, config.algorithm.num_iterations = 7 * partial, 2  # which needs old log-probs
    with jax.set_mesh(MESH):
        run = build(config, MESH, Given(train_dataset=ROWS, rewards=digits))
        source, root = run.source, jax.random.key(config.seed)
        learner, start = source.learner, run.state.params
        policies = [start, {**start, "head": jax.tree.map(lambda x: 1.5 * x, start["head"])}]
        with source.queue:
            for version, policy in enumerate(policies):
                key = jax.random.fold_in(root, version + 1)
                rollouts, _ = source.queue.take(policy, version, key)
        state = dataclasses.replace(run.state, params=policies[1], step=run.state.step + 1)
        batch = learner.prepare(rollouts, state, key).batch
        rollout, versions = rollouts.rollout, rollouts.partial.versions
        logps = [
            np.asarray(learner._logps(policy, learner.inputs(rollout.tokens, rollout.segments, rollout.mask)))
            for policy in policies
        ]
    width = versions.shape[1]
    here = np.arange(width) < np.asarray(rollout.lengths)[:, None]
    np.testing.assert_array_equal(versions >= 0, here)
    assert (versions == 1).sum() > 12 and ((versions == 1).any(axis=1) & (versions == 0).any(axis=1)).sum() > 2
    of_version = np.choose(np.maximum(versions, 0), [x[:, -width:] for x in logps])
    recorded = np.asarray(rollout.sample_logps)[:, -width:]
    np.testing.assert_allclose(recorded, np.where(here, of_version, 0), atol=2e-4)
    _, ratio = importance_correction(batch.old_logps, batch.sample_logps, batch.mask, "token_truncate", 2.0)
    ratio = np.asarray(ratio)[:, -width:]
    np.testing.assert_allclose(ratio[versions == 1], 1, atol=1e-3)
    assert abs(ratio[versions == 0] - 1).max() > 0.1
    metrics = rollouts.partial.metrics(1)
    assert metrics["rollout/policies"] == 2 and 1 < metrics["rollout/row_policies"] <= 2
    assert metrics["rollout/age_max"] == 1 > metrics["rollout/age"] > 0


def trained(folder, config, **changes):
    """The folder of a run whose reward takes a while."""

    def slow(completions, **kwargs):
        time.sleep(0.05)
        return digits(completions)

    config.output_dir, config.total_steps, config.checkpoint.every = str(folder), 8, 3
    config.logging.backends = ("jsonl",)
    config.rollout.update(changes)
    jaxrl_llm.train(config, ROWS, rewards=slow)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("form", ["in flight", "partial", "max wait"])
def test_a_run_that_follows_a_record_has_the_same_bits(tmp_path, form):
    config = in_flight_config(2, partial=form != "in flight")
    config.optimizer.learning_rate = 3e-3
    if form == "max wait":
        config.rollout.update_in_flight, config.rollout.staleness = False, 0
        config.rollout.partial_tokens, config.rollout.max_wait = 7, 0.01
    one = trained(tmp_path / "one", config)
    lines = [json.loads(line) for line in (one / RECORD).read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, 9)]
    two = trained(
        tmp_path / "two", config, arrivals=str(one / RECORD), **({} if form != "max wait" else {"max_wait": 9.0})
    )
    assert (two / RECORD).read_text() == (one / RECORD).read_text()
    assert_same_run(one, two)


def test_a_full_disk_is_named(tmp_path):
    """The bits of a batch could not be repeated without its line."""
    arrivals = Arrivals(tmp_path / "run" / RECORD, 1, False, max_wait=0.0)
    arrivals.begin(1, 0)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RECORD).symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=r"output_dir .*run cannot be written: .*No space left on device; make room"):
        arrivals.end()
