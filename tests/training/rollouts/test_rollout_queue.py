"""Rollouts that are made ahead: their schedule, their errors, and the bytes of them that a checkpoint holds."""

import threading
import time

import jax
import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.algorithms.turn_advantages import Turn, turn_table
from jaxrl_llm.config import ConfigError, default
from jaxrl_llm.data import tasks
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.distributed.turns import turn, yielded
from jaxrl_llm.rewards.runner import Logged
from jaxrl_llm.rollout.slots import Rollout
from jaxrl_llm.training.logging.stopwatch import Stopwatch
from jaxrl_llm.training.rollouts import rollout_queue
from jaxrl_llm.training.rollouts.experience import (
    Rollouts,
    joined,
    pack,
    placed,
    placed_queue,
    share_of,
    unpack,
    unpacked_queue,
)
from jaxrl_llm.training.rollouts.rollout_queue import RolloutQueue
from jaxrl_llm.training.setup.given import Given
from jaxrl_llm.training.setup.run import build
from jaxrl_llm.training.step import improve

MESH = make_mesh(devices=jax.devices()[:1])


def rollouts_of(number: int, version: int = 0, greedy: Rollouts | None = None) -> Rollouts:
    """A batch of two rows that are all `number`."""
    numbers = np.full((2, 3), number, np.int32)
    floats = numbers.astype(np.float32)
    rollout = Rollout(numbers, numbers, floats, floats - 0.1, numbers[:, 0], floats[:, 0] > 0, floats[:, 0])
    logged = Logged({"tries": [np.float32(0.1), 2]}, {"tokens": 3.0}, {"note": [np.int32(number), {"a": None}]})
    messages = [{"role": "user", "content": "zwei"}]
    rewards = np.array([[0.5, np.nan], [1.0, number]], np.float32)
    return Rollouts(
        jax.device_put(rollout), [{}], [messages, "é"], ["a", "b"], rewards, logged, version, 1, greedy, 0.25
    )


class Produced:
    """A `produce` that notes its calls, and fails at the step `fails`."""

    def __init__(self, fails: int = 0):
        self.calls, self.threads, self.fails = [], set(), fails

    def __call__(self, params, version, step, key):
        self.calls.append((params, version, step, key))
        self.threads.add(threading.current_thread().name)
        if step == self.fails:
            raise ValueError(f"step {step}")
        return rollouts_of(step, version)


def queue_of(produce, staleness: int, last_step: int = 6) -> RolloutQueue:
    watch = Stopwatch()
    return RolloutQueue(
        produce, staleness, last_step, "key {}".format, "copy of {}".format, MESH, MESH, watch, Stopwatch(within=watch)
    )


@pytest.mark.parametrize("staleness", [0, 1, 2, 9])
def test_each_batch_is_of_the_policy_so_many_updates_before(staleness):
    produce = Produced()
    with queue_of(produce, staleness) as queue:
        for step in range(1, 7):
            rollouts, metrics = queue.take(f"policy {step - 1}", step - 1, f"key {step}")
            version = max(0, step - 1 - staleness)
            assert (rollouts.rollout.tokens[0, 0], rollouts.version) == (step, version)
            assert metrics.get("rollout/age") == (step - 1 - version if staleness else None)
            assert {"producer/wait", "rollout/queue"} <= metrics.keys() or not staleness
    versions = [max(0, step - 1 - staleness) for step in range(1, 7)]
    name = "copy of policy {}" if staleness else "policy {}"
    expected = [(name.format(v), v, step, f"key {step}") for step, v in enumerate(versions, 1)]
    assert produce.calls == expected  # and none after the last step
    assert (threading.current_thread().name in produce.threads) == (staleness == 0)


def test_an_error_reaches_the_step_that_meets_it_and_ends_the_queue():
    produce = Produced(fails=3)
    with queue_of(produce, 4) as queue:
        for step in (1, 2):
            queue.take("policy", step - 1, None)
        with pytest.raises(ValueError, match="step 3") as caught:
            queue.take("policy", 2, None)
        assert caught.traceback[-1].name == "__call__"  # where it was raised
    assert [call[2] for call in produce.calls] == [1, 2, 3]


def test_an_error_elsewhere_leaves_a_batch_behind_that_does_not_end(monkeypatch, caplog):
    monkeypatch.setattr(rollout_queue, "LEAVE_SECONDS", 0.05)
    begun, graded, steps = threading.Event(), threading.Event(), []

    def produce(params, version, step, key):
        steps.append(step)
        if step == 2:
            begun.set()
            graded.wait(5)
        return rollouts_of(step, version)

    queue = queue_of(produce, 2).__enter__()
    queue.take("policy", 0, None)
    begun.wait()
    queue.__exit__(KeyboardInterrupt)
    assert "left behind" in caplog.text
    left = [thread for thread in threading.enumerate() if thread.name == "rollouts"]
    assert left and all(thread.daemon for thread in left), "they would keep the process alive"
    graded.set()
    for thread in left:
        thread.join()
    assert steps == [1, 2], "no further batch is begun"


def test_a_thread_left_behind_does_not_change_how_a_command_ends(run_python):
    """It may be in JAX, where the end of the interpreter aborts the process, with another code."""
    code = """
import atexit, threading
import jaxrl_llm.distributed.processes
from jaxrl_llm.config.background import in_thread, leave_behind
from jaxrl_llm.config.flags import run

def main(argv):
    atexit.register(print, "the interpreter ends")
    leave_behind([in_thread(threading.Event().wait, "endless")])
    raise KeyboardInterrupt

run(main)
"""
    done = run_python("-c", code)
    assert (done.returncode, done.stdout) == (130, "") and "stopped by Ctrl-C" in done.stderr


def test_a_resumed_queue_goes_on_with_the_batches_that_were_saved():
    produce = Produced()
    with queue_of(produce, 2) as queue:
        queue.take("policy 0", 0, None)
        arrays = queue.get_arrays()
        assert [call[2] for call in produce.calls] == [1, 2, 3]  # it has waited for them
        expected = [queue.take(f"policy {step - 1}", step - 1, None)[0] for step in range(2, 7)]
    again = Produced()
    with queue_of(again, 2) as queue, jax.set_mesh(MESH):
        queue.restore(arrays)
        got = [queue.take(f"policy {step - 1}", step - 1, None)[0] for step in range(2, 7)]
    assert again.calls == produce.calls[3:]
    assert [x.version for x in got] == [x.version for x in expected] == [0, 0, 1, 2, 3]
    jax.tree.map(np.testing.assert_array_equal, [x.rollout for x in got], [x.rollout for x in expected])


def test_packed_rollouts_keep_every_bit():
    turns = turn_table([[Turn(1, 0.5), Turn(2, 0.1, "x")], [Turn(2, 1.0)]], 3, 2, 1)
    batches = [
        rollouts_of(7, 4, rollouts_of(1))
        ._replace(turns=turns, parts=turns._replace(states=turns.states + 1))
        ._replace(roles=[["first", "game/é"], ["agent"]], reference_scores=[[0.1, 1.0], [0.0, -2.5]]),
        rollouts_of(3)._replace(epochs=None, resampled_groups=None),
    ]
    packed = pack(batches)
    np.testing.assert_array_equal(packed, pack(batches))
    for got, batch in zip([placed(x, MESH) for x in unpack(packed)], batches, strict=True):
        jax.tree.map(np.testing.assert_array_equal, got.rollout, batch.rollout)
        np.testing.assert_array_equal(got.rewards, batch.rewards)
        assert got.rollout.finished.dtype == bool and got.rollout.tokens.sharding.mesh == MESH
        names = ("prompts", "completions", "version", "resampled_groups", "epochs", "roles", "reference_scores")
        assert [getattr(got, name) for name in names] == [getattr(batch, name) for name in names]
        assert got.logged == Logged(
            {"tries": [float(np.float32(0.1)), 2.0]},
            {"tokens": 3.0},
            {"note": [int(got.rollout.tokens[0, 0]), '{"a": null}']},
        )
        jax.tree.map(np.testing.assert_array_equal, (got.turns, got.parts), (batch.turns, batch.parts))
        assert (got.greedy is None) == (batch.greedy is None)
    assert int(unpack(packed)[0].greedy.rollout.tokens[0, 0]) == 1


def test_a_queue_of_several_row_groups():
    """Of each group the bytes of its own rows; another number of groups has the rows of all, and what each logged."""
    whole = [rollouts_of(7)._replace(turns=turn_table([[Turn(1, 0.5)], [Turn(2, 1.0)]], 3, 2, 1)), rollouts_of(3, 1)]
    shares = [[share_of(batch, index, 2) for batch in jax.device_get(whole)] for index in range(2)]
    packed = [pack(share) for share in shares]
    arrays = {"queue": {"bytes": np.concatenate(packed), "sizes": np.array(list(map(len, packed)))}}
    for got in (unpacked_queue(arrays), placed_queue(arrays, MESH)):
        assert [batch.version for batch in got] == [0, 1]
        for batch, expected in zip(got, whole, strict=True):
            jax.tree.map(np.testing.assert_array_equal, batch.rollout, expected.rollout)
            np.testing.assert_array_equal(batch.rewards, expected.rewards)
            assert (batch.prompts, batch.completions) == (expected.prompts, expected.completions)
            assert batch.logged.totals == {"tokens": 6.0} and len(batch.logged.metrics["tries"]) == 4
            assert len(batch.logged.columns["note"]) == 2
    earlier = {"queue": {"bytes": pack(whole)}}
    assert unpacked_queue(earlier)[0].logged.totals == {"tokens": 3.0} and unpacked_queue({}) == []


def test_turns():
    """A thread that waits in its turn gives it away, be it the main one or one that samples."""
    seen, waits = [], threading.Event()

    def other():
        with turn():
            seen.append("other")
            with yielded():
                waits.wait(10)
            seen.append("other again")

    with turn():
        thread = threading.Thread(target=other)
        thread.start()
        time.sleep(0.05)
        seen.append("held")
        with yielded():
            time.sleep(0.2)
        seen.append("again")
        waits.set()
        with yielded():
            thread.join(10)
    assert seen == ["held", "other", "again", "other again"]
    with yielded(), turn():  # of a thread that holds nothing
        assert not [x for x in seen if x == "other"][1:]
    nested, twice = threading.Thread(target=other), threading.Thread(target=other)
    with turn(), turn(), yielded():  # all of it
        nested.start()
        nested.join(5)
        assert not nested.is_alive()
    with turn(), yielded(), yielded():  # once
        twice.start()
        twice.join(5)
        assert not twice.is_alive()


def config_of(staleness: int):
    config = default()
    config.batch.prompts, config.batch.packing, config.eval.every, config.total_steps = 4, "false", -1, 4
    config.rollout.group_size, config.rollout.max_prompt_length, config.rollout.max_completion_length = 4, 16, 8
    config.optimizer.learning_rate, config.algorithm.aggregation = 1e-3, "token"
    config.rollout.staleness = staleness
    return config


def digits(completions, **kwargs):
    return [float(sum(map(ord, completion)) % 7) for completion in completions]


def test_stale_rows_need_a_correction():
    config = config_of(1)
    with jax.set_mesh(MESH), pytest.raises(ConfigError, match=r"rollout\.staleness is 1, so .* token_truncate") as told:
        build(config, MESH, Given(train_dataset=tasks.generate("sort", size=16), rewards=digits))
    assert "algorithm.old_logps=sampler" in str(told.value)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [{"importance_correction": "token_truncate"}, {"old_logps": "sampler"}])
def test_rows_are_those_of_the_policy_they_are_said_to_be_of(algorithm):
    config = config_of(2)
    for name, value in algorithm.items():
        config.algorithm[name] = value
    with jax.set_mesh(MESH):
        run = build(config, MESH, Given(train_dataset=tasks.generate("sort", size=16), rewards=digits))
        again = build(config, MESH, Given(train_dataset=tasks.generate("sort", size=16), rewards=digits))
        state, policies, root = run.state, [], jax.random.key(config.seed)
        with run.source.queue:
            for step in range(1, 5):
                policies.append(jax.tree.map(np.array, state.params))
                key, version = jax.random.fold_in(root, step), max(0, step - 3)
                batch, metrics, _ = run.source.next(state, key)
                policy = jax.device_put(policies[version], jax.tree.map(lambda x: x.sharding, state.params))
                expected = again.source.producer.produce(policy, version, step, key).rollout
                np.testing.assert_array_equal(batch.inputs.tokens, expected.tokens)
                np.testing.assert_array_equal(batch.sample_logps, expected.sample_logps)
                assert metrics["rollout/age"] == step - 1 - version
                state, _ = improve(run, state, batch)
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, policies[:2]), strict=True))


@pytest.mark.slow
def test_rewards_are_computed_while_earlier_steps_are_trained_on(tmp_path):
    """Those of a step wait for the end of the step before, which comes only where a thread of its own asks for them."""
    config = config_of(1)
    config.algorithm.importance_correction, config.output_dir = "token_truncate", str(tmp_path)
    config.logging.backends, config.checkpoint.every = (), 0
    ended = [threading.Event() for _ in range(config.total_steps + 1)]
    ended[0].set()

    class Ended:
        def on_step(self, moment):
            ended[moment.step].set()

    def waiting(completions, trainer_state, **kwargs):
        assert ended[trainer_state.global_step].wait(60), "the steps and their rewards take turns"
        return digits(completions)

    result = jaxrl_llm.train(config, tasks.generate("sort", size=16), rewards=waiting, callbacks=Ended())
    assert [metrics["rollout/age"] for metrics in result.metrics] == [0, 1, 1, 1]


TWO_MESHES = """
import json
from pathlib import Path
import jax, numpy as np
from jax._src.array import ArrayImpl
from jaxrl_llm.config import ConfigError
from jaxrl_llm.data import tasks
from jaxrl_llm.distributed.sharding import make_mesh, resharding, shardings
from jaxrl_llm.training.setup.mesh import build_mesh
from jaxrl_llm.training.setup.given import Given
from jaxrl_llm.training.setup.run import build
from jaxrl_llm.training.step import improve
from jaxrl_llm.training.update import merge_frozen
from tests.training.rollouts.test_rollout_queue import config_of, digits

def steps(mesh, config):
    rows, seen = tasks.generate("sort", size=16), []
    with jax.set_mesh(mesh):
        run = build(config, mesh, Given(train_dataset=rows, rewards=digits))
        state, root = run.state, jax.random.key(config.seed)
        with run.source.queue:
            for step in range(1, 4):
                batch, metrics, _ = run.source.next(merge_frozen(state, run.frozen), jax.random.fold_in(root, step))
                assert batch.inputs.tokens.sharding.mesh == mesh
                seen.append(jax.device_get((batch.inputs.tokens, batch.sample_logps, batch.advantages)))
                state, _ = improve(run, state, batch)
    return run, seen, jax.device_get(state.params)

mesh_2x2 = make_mesh(data=2, tensor=2, devices=jax.devices()[4:])
config = config_of(0)
config.algorithm.importance_correction = "token_truncate"
config.lora.rank = LORA
_, seen, params = steps(make_mesh(devices=jax.devices()[:4]), config)
config.rollout.devices = 4
for mesh_text in ("auto", "tensor=2"):
    config.rollout.mesh = mesh_text
    run, own_seen, own_params = steps(build_mesh(config), config)
    worker = run.source.producer.worker
    pairs = ({"fsdp": 4}, worker.mesh), ({"tensor": 2, "data": 2}, worker.mesh), ({"fsdp": 4}, mesh_2x2)
    for sizes, sampling in pairs:
        train = make_mesh(**{"data": 1, **sizes}, devices=jax.devices()[:4])
        here, value = jax.device_put(own_params, shardings(own_params, train)), ArrayImpl._value
        ArrayImpl._value = property(lambda x: 1 / 0)  # nothing passes through the host
        with jax.set_mesh(train):
            there = jax.device_put(resharding(here, train, sampling)(here), shardings(here, sampling))
        ArrayImpl._value = value
        jax.tree.map(np.testing.assert_array_equal, there, own_params)
    assert set(worker.mesh.devices.flat) == set(jax.devices()[4:]) and run.mesh.size == 4
    for one, other in zip(seen, own_seen):
        np.testing.assert_array_equal(one[0], other[0])
        equal = np.testing.assert_array_equal if mesh_text == "auto" else np.testing.assert_allclose
        jax.tree.map(lambda a, b: equal(a, b, **({} if mesh_text == "auto" else {"atol": 1e-4})), one, other)
    if mesh_text == "auto":
        jax.tree.map(np.testing.assert_array_equal, params, own_params)
config.rollout.staleness, config.rollout.mesh = 1, "auto"
ahead, again = (steps(build_mesh(config), config) for _ in range(2))
jax.tree.map(np.testing.assert_array_equal, ahead[1:], again[1:])  # whatever the timing
np.testing.assert_array_equal(ahead[1][0][0], seen[0][0])  # both of the policy of the start
assert (ahead[1][2][1] != seen[2][1]).any()
if config.lora.rank:  # what comes now moves the same arrays
    raise SystemExit
record = Path("in_flight/arrivals.jsonl")
record.parent.mkdir()
config.rollout.update_in_flight, config.rollout.chunk = True, 2
config.output_dir, config.total_steps = "in_flight", 3
steps(build_mesh(config), config)
lines = [json.loads(line) for line in record.read_text().splitlines()]
assert [line["step"] for line in lines] == [1, 2, 3]
lines[2]["policies"] = [[0, 1], [2, 2]]  # the policy of two steps comes to the batch of the third half way
Path("followed").write_text("".join(json.dumps(line) + chr(10) for line in lines))
config.rollout.arrivals = "followed"
runs = []
for mesh_text in ("auto", "auto", "tensor=2"):
    config.rollout.mesh = mesh_text
    runs.append(steps(build_mesh(config), config))
    assert record.read_text() == Path("followed").read_text()
jax.tree.map(np.testing.assert_array_equal, runs[0][1:], runs[1][1:])
for one, other in zip(runs[0][1], runs[2][1]):
    np.testing.assert_array_equal(one[0], other[0])
    np.testing.assert_allclose(one[1], other[1], atol=1e-4)
config.rollout.mesh = "auto"
config.rollout.devices = 0
try:
    steps(make_mesh(devices=jax.devices()[:4]), config)
except ConfigError as error:
    assert "4 devices sample and train in turn" in str(error)
else:
    raise AssertionError("no policy would come")
config.rollout.update_in_flight, config.rollout.arrivals, config.rollout.devices = False, None, 4
config.rollout.staleness, config.rollout.partial_prompts, config.rollout.partial_tokens = 0, 4, 3
_, seen, params = steps(build_mesh(config), config)
for mesh_text, atol in ((None, 0), ("tensor=2", 1e-4)):
    config.rollout.devices, config.rollout.mesh = 0, mesh_text
    _, own_seen, own_params = steps(make_mesh(devices=jax.devices()[:4]), config)
    for one, other in zip(jax.tree.leaves((seen, params)), jax.tree.leaves((own_seen, own_params)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=atol)
config.rollout.devices, config.rollout.mesh, config.rollout.partial_prompts = 8, "auto", 0
config.rollout.partial_tokens = 0
try:
    build_mesh(config)
except ConfigError as error:
    assert "rollout.devices is 8, of 8 devices" in str(error)
else:
    raise AssertionError("no device is left to train")
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 4])
def test_two_meshes_equal_one(run_python, rank):
    """Four devices that train and four that sample: bit for bit what four do in turn, where meshes are alike."""
    done = run_python("-c", TWO_MESHES.replace("LORA", str(rank)), devices=8, timeout=1500)
    assert done.returncode == 0, done.stderr


def test_shares_of_a_batch_make_it_up():
    """Rows, what belongs to them, and the greedy completions."""
    greedy = rollouts_of(5)
    turns = turn_table([[Turn(1, 1.0)], [Turn(1, 0.5), Turn(2, 0.25, "x")]], 2, 2, 1)
    batch = rollouts_of(3, greedy=greedy)._replace(turns=turns, roles=[["x"], ["y"]], environments=["e", "f"])
    shares = [share_of(batch, number, 2) for number in range(2)]
    assert [share.completions for share in shares] == [["a"], ["b"]]
    assert [share.rollout.tokens.shape for share in shares] == [(1, 3)] * 2
    assert shares[1].turns.rewards.tolist() == [[0.5, 0.25]] and shares[1].greedy.prompts == ["é"]
    assert joined(shares[:1]) is shares[0]
    (one, other) = (pack([x]).tobytes() for x in (batch, joined(shares)))
    assert one == other
