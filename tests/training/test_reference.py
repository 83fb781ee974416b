"""State between the steps of an online run: replayed groups, the reference, controllers; and fills of flat groups."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm
from jaxrl_llm.algorithms.batch import Batch, Images, Inputs
from jaxrl_llm.algorithms.kl import AdaptiveKL
from jaxrl_llm.algorithms.turn_advantages import Turns
from jaxrl_llm.config import ConfigError, default, validate
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.models.model import load_model, save_hf
from jaxrl_llm.rollout.slots import Rollout
from jaxrl_llm.training.checkpoint.manager import Checkpoints
from jaxrl_llm.training.reference import Reference, ReferenceSpec, start_reference
from jaxrl_llm.training.rollouts.dynamic_sampling import fill
from jaxrl_llm.training.rollouts.experience import Rollouts
from jaxrl_llm.training.rollouts.replay import empty_replay, exchange, get_arrays, with_arrays
from jaxrl_llm.training.setup.given import Given
from jaxrl_llm.training.setup.run import build
from jaxrl_llm.training.setup.specs import controllers_of, reference_spec
from jaxrl_llm.training.update import State

MESH = make_mesh(devices=jax.devices()[:1])
FIXED = ReferenceSpec("base", False, ref_sync_steps=0, ref_mixup_alpha=1.0, ref_sync_after=0, seed=0)


def batch_of(numbers) -> Batch:
    """Rows of two tokens that hold their row's number in every field."""
    rows = np.repeat(np.array(numbers, np.float32)[:, None], 2, axis=1)
    integers = rows.astype(np.int32)
    inputs = Inputs(integers, integers, prompt_width=1)
    return Batch(inputs, rows, sample_logps=rows, old_logps=rows, advantages=rows)


def numbers_of(batch: Batch) -> list[int]:
    first = np.asarray(batch.inputs.tokens)[:, 0]
    for field in (batch.inputs.segments, batch.mask, batch.sample_logps, batch.old_logps, batch.advantages):
        np.testing.assert_array_equal(np.asarray(field), np.repeat(first[:, None], 2, axis=1))
    return first.tolist()


def test_replay_exchanges_flat_groups():
    replay = empty_replay(groups=2, group_size=2, width=2, prompt_width=1, mesh=MESH)
    key = jax.random.key(0)
    # Empty: the flat group (the second) stays. Groups 1 and 3 are stored.
    replay, out, count = exchange(replay, batch_of(range(10, 16)), np.float32([1, 0, 2]), key, group_size=2)
    assert (numbers_of(out), int(count)) == (list(range(10, 16)), 0)
    assert numbers_of(replay.rows) == [10, 11, 14, 15]
    np.testing.assert_array_equal(replay.priority, [1, 2])
    # Two flat groups are replaced by stored ones; the new group is stored and the oldest leaves.
    replay, out, count = exchange(replay, batch_of(range(20, 26)), np.float32([0, 3, 0]), key, group_size=2)
    assert int(count) == 2
    got = numbers_of(out)
    assert got[2:4] == [22, 23]
    assert got[:2] in ([10, 11], [14, 15])
    assert got[4:] in ([10, 11], [14, 15])
    assert numbers_of(replay.rows) == [22, 23, 10, 11]
    np.testing.assert_array_equal(replay.priority, [3, 1])


def test_stored_groups_keep_the_weights_of_their_rows():
    replay = empty_replay(groups=2, group_size=2, width=2, prompt_width=1, mesh=MESH, per_row=("loss_weight",))
    first = batch_of(range(1, 5)).replace(loss_weight=np.float32([1, 2, 3, 4]))
    replay, _, _ = exchange(replay, first, np.float32([1, 0]), jax.random.key(0), group_size=2)
    second = batch_of(range(5, 9)).replace(loss_weight=np.float32([5, 6, 7, 8]))
    _, out, count = exchange(replay, second, np.float32([1, 0]), jax.random.key(0), group_size=2)
    assert (numbers_of(out), int(count)) == ([5, 6, 1, 2], 1)
    np.testing.assert_array_equal(out.loss_weight, [5, 6, 1, 2])
    kept = get_arrays(replay)
    with pytest.raises(ConfigError, match=r"differ by loss_weight from .*: leave environment.options and"):
        with_arrays(empty_replay(groups=2, group_size=2, width=2, prompt_width=1, mesh=MESH), kept)
    np.testing.assert_array_equal(with_arrays(replay, kept).rows.loss_weight, replay.rows.loss_weight)


def test_stored_groups_are_drawn_by_priority():
    replay = empty_replay(groups=3, group_size=1, width=2, prompt_width=1, mesh=MESH)
    replay, _, _ = exchange(replay, batch_of([7, 8]), np.float32([1, 3]), jax.random.key(0), group_size=1)
    _, out, count = exchange(replay, batch_of([0] * 4000), np.zeros(4000, np.float32), jax.random.key(1), group_size=1)
    drawn = numbers_of(out)
    assert int(count) == 4000
    assert drawn.count(7) + drawn.count(8) == 4000  # never the empty place
    assert abs(drawn.count(8) / 4000 - 0.75) < 0.03


def state_at(step: int, value: float) -> State:
    return State(jnp.asarray(step, jnp.int32), {"w": jnp.full(3, value)}, ())


def test_reference_follows_the_policy():
    reference = Reference({"w": jnp.zeros(3)}, dataclasses.replace(FIXED, ref_sync_steps=2, ref_mixup_alpha=0.6))
    seen = []
    for step, value in enumerate([9.0, 9.0, 1.0, 9.0, 2.0]):
        reference.sync(state_at(step, value))
        seen.append(round(float(reference.params["w"][0]), 4))
    assert seen == [0.0, 0.0, 0.6, 0.6, 1.44]  # after steps 2 and 4: 0.6 * 1, then 0.6 * 2 + 0.4 * 0.6


def test_a_reference_in_16_bits_follows_a_small_share():
    """Rounded to the nearest it would stay where it is, as each move is less than half the spacing of its type."""
    start = np.random.default_rng(0).normal(size=4096)
    policy = State(jnp.asarray(0), {"w": jnp.asarray(1.02 * start, jnp.bfloat16)}, ())
    target = np.asarray(policy.params["w"], np.float32)

    def distance(reference):
        assert reference.params["w"].dtype == jnp.bfloat16
        return np.abs(np.asarray(reference.params["w"], np.float32) - target).mean()

    def moved(reference, first, last):
        for step in range(first, last):
            reference.sync(dataclasses.replace(policy, step=jnp.asarray(step)))
        return reference

    def started(seed=3):
        spec = dataclasses.replace(FIXED, ref_sync_steps=1, ref_mixup_alpha=0.05, seed=seed)
        return Reference({"w": jnp.asarray(start, jnp.bfloat16)}, spec)

    before = distance(started())
    whole, half = moved(started(), 1, 41), moved(started(), 1, 21)
    np.testing.assert_allclose(distance(half) / before, 0.95**20, atol=0.03)
    assert distance(whole) / before < 0.2
    # A resumed run draws the same, and another seed does not.
    resumed = started()
    resumed.restore(half.arrays())
    np.testing.assert_array_equal(moved(resumed, 21, 41).params["w"], whole.params["w"])
    assert (moved(started(seed=4), 1, 41).params["w"] != whole.params["w"]).any()


def test_fixed_reference_is_not_saved():
    params = {"w": jnp.zeros(3)}
    reference = Reference(params, FIXED)
    reference.sync(state_at(512, 1.0))
    assert reference.params is params
    assert reference.arrays() == {}


def test_a_reference_that_moves_no_more_stays_where_it_was():
    """A run that goes on with ref_sync_steps = 0 compares with what the reference had become, and saves that."""
    moved = Reference({"w": jnp.zeros(3)}, dataclasses.replace(FIXED, ref_sync_steps=1))
    moved.sync(state_at(1, 5.0))
    for _ in range(2):
        fixed = Reference({"w": jnp.zeros(3)}, FIXED)
        assert fixed.tree().keys() == moved.arrays().keys()  # what is asked of a checkpoint
        fixed.restore(moved.arrays())
        fixed.sync(state_at(2, 9.0))
        np.testing.assert_array_equal(fixed.params["w"], [5.0] * 3)
        assert fixed.moves  # so that evaluations read it anew
        moved = fixed


def configured(**settings):
    config = default()
    config.rollout.group_size, config.rollout.max_completion_length = 2, 1
    for name, value in settings.items():
        config.algorithm[name] = value
    return config


def test_controllers_move_and_are_restored():
    config = configured(
        beta=0.1, kl_controller="adaptive", kl_target=0.1, kl_horizon=100.0, entropy_controller="adaptive",
        entropy_target=0.5, entropy_delta=0.01,
    )  # fmt: skip
    controllers = controllers_of(config)
    assert controllers.metrics() == {"kl_coef": 0.1, "entropy_coef": 0.0}
    controllers = controllers.after_rollouts(jnp.asarray(5.0), 10)  # far above the target: the error is clipped to 0.2
    np.testing.assert_allclose(controllers.kl.coef, 0.1 * (1 + 0.2 * 10 / 100), rtol=1e-6)
    controllers = controllers.after_updates(0.4)
    np.testing.assert_allclose(controllers.metrics()["entropy_coef"], 0.01, rtol=1e-6)
    controllers = controllers.after_updates(0.9)  # above the target: it falls, and does not apply
    assert controllers.metrics()["entropy_coef"] == 0.0
    fresh = controllers_of(config).with_state(controllers.get_state())
    assert fresh == controllers
    moved = [each.after_rollouts(jnp.asarray(0.01), 10).kl.coef for each in (fresh, controllers)]
    assert moved[0] == moved[1] != controllers.kl.coef


def test_a_fixed_coefficient_stays():
    controllers = controllers_of(configured(beta=0.1)).after_rollouts(None, 10)
    assert controllers.kl.coef == 0.1
    assert controllers.metrics() == {}
    controllers = controllers.with_state({"kl_coef": 0.7})  # a checkpoint of a run with another beta
    assert controllers.kl.coef == 0.1


def test_no_kl_term_keeps_no_reference():
    rewards, rows = [lambda completions: [0.0] * len(completions)], [{"prompt": "sort:21="}] * 4
    for beta in (0.0, 0.1):
        config = configured(beta=beta)
        config.eval.every, config.batch.prompts = -1, 2
        with jax.set_mesh(MESH):
            run = build(config, MESH, Given(train_dataset=rows, rewards=rewards))
        reference = run.source.learner.reference
        assert (reference is not None) == (beta > 0)
        assert run.source.restorable().keys() == {"queue", *(("reference",) if beta else ())}
    weights = zip(jax.tree.leaves(reference.params), jax.tree.leaves(run.state.params), strict=True)
    assert all(x is not y for x, y in weights)  # updates donate the policy's buffers


def test_a_checkpoint_holds_the_arrays(tmp_path):
    config = configured(beta=0.1, ref_sync_steps=2, replay_groups=2)
    with jax.set_mesh(MESH), Checkpoints(tmp_path / "checkpoints") as checkpoints:
        empty = empty_replay(groups=2, group_size=2, width=2, prompt_width=1, mesh=MESH)
        rows, priority = batch_of([1, 2, 3, 4]), np.float32([1, 0])
        replay, _, _ = exchange(empty, rows, priority, jax.random.key(0), group_size=2)
        spec, controllers = reference_spec(config), controllers_of(config)
        reference = Reference({"w": jnp.arange(3.0)}, spec)
        arrays = reference.arrays() | {"replay": get_arrays(replay)}
        checkpoints.save(1, state_at(1, 0.0), controllers.get_state(), arrays)
        checkpoints.save(2, state_at(2, 0.0), controllers.get_state(), {})
        fresh = Reference(start_reference(spec, {"w": jnp.zeros(3)}), spec)
        shapes = fresh.arrays() | {"replay": get_arrays(empty)}
        restored = checkpoints.restore_arrays(1, shapes, MESH)
        fresh.restore(restored)
        np.testing.assert_array_equal(fresh.params["w"], [0, 1, 2])
        replay = with_arrays(empty, restored["replay"])
        assert numbers_of(replay.rows)[:2] == [1, 2]
        np.testing.assert_array_equal(replay.priority, [1, 0])
        assert checkpoints.restore_arrays(2, shapes, MESH) == {}
        larger = empty_replay(groups=4, group_size=2, width=2, prompt_width=1, mesh=MESH)
        with pytest.raises(ConfigError, match=r"the replay of .*/1 has other .*: priority is \[2\] there, and is \[4"):
            checkpoints.restore_arrays(1, {"replay": get_arrays(larger)}, MESH)


def sampled_of(numbers) -> Rollouts:
    rows = np.repeat(np.array(numbers, np.int32)[:, None], 3, axis=1)
    one = rows[:, 0]
    rollout = Rollout(rows, rows, rows.astype(np.float32), rows.astype(np.float32), one, one > 0, one)
    names = [str(n) for n in numbers]
    examples = [{"id": n // 10} for n in numbers[::2]]
    turns = Turns(*(np.array(numbers)[:, None] for _ in Turns._fields))
    rewards = np.float32(numbers)[:, None]
    roles = [[name] for name in names]
    return Rollouts(jax.tree.map(jnp.asarray, rollout), examples, names, names, rewards, turns=turns, roles=roles)


@pytest.mark.parametrize(
    ("fresh_flat", "expected", "still"),
    [
        ([False, True, False], [50, 51, 20, 21, 70, 71], [False, False, False]),
        ([True, True, False], [70, 71, 20, 21, 30, 31], [False, False, True]),
        ([True, True, True], [10, 11, 20, 21, 30, 31], [True, False, True]),
    ],
)
def test_flat_groups_are_filled_with_fresh_ones(fresh_flat, expected, still):
    held, fresh = sampled_of([10, 11, 20, 21, 30, 31]), sampled_of([50, 51, 60, 61, 70, 71])
    with jax.set_mesh(MESH):
        filled, flat = fill(held, np.array([True, False, True]), fresh, np.array(fresh_flat), MESH)
    np.testing.assert_array_equal(flat, still)
    assert filled.completions == filled.prompts == [str(n) for n in expected]
    assert filled.roles == [[str(n)] for n in expected]
    assert filled.examples == [{"id": n // 10} for n in expected[::2]]
    np.testing.assert_array_equal(filled.rewards[:, 0], expected)
    assert all(x[:, 0].tolist() == expected for x in filled.turns)
    np.testing.assert_array_equal(filled.rollout.tokens, np.repeat(np.array(expected)[:, None], 3, axis=1))
    np.testing.assert_array_equal(filled.rollout.lengths, expected)


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize(("seen", "more"), [(True, True), (False, True), (True, False)])
def test_images_come_with_their_groups(per_row, seen, more):
    """Those of prompts, or of each row, where the held groups have some or none, and where the fresh ones have none."""

    def images(first):
        count = jnp.arange(first, first + (6 if per_row else 3))
        return Images(jnp.zeros((len(count), 1, 2, 2, 3)), count)

    held, fresh = sampled_of([10, 11, 20, 21, 30, 31]), sampled_of([50, 51, 60, 61, 70, 71])
    held = held._replace(images=images(1) if seen else None)
    fresh = fresh._replace(images=images(11) if more else None)
    with jax.set_mesh(MESH):
        filled, _ = fill(held, np.array([True, False, True]), fresh, np.array([False, True, False]), MESH)
    assert filled.images is not None
    own = [3, 4] if per_row else [2]
    expected = [11, 12, *own, 15, 16] if per_row else [11, *own, 13]
    assert filled.images.count.tolist() == [x if (more if x > 10 else seen) else 0 for x in expected]


def test_adaptive_kl_of_the_configuration():
    controllers = controllers_of(configured(beta=0.1, kl_controller="adaptive", kl_target=0.3))
    assert controllers.kl == AdaptiveKL(0.1, 0.3, 10_000.0)


@pytest.mark.slow
def test_offloaded_reference_changes_nothing(root, tmp_path):
    def losses(name, config_file, **algorithm):
        config = load_config_file(f"{root / 'configs' / config_file}:tiny")
        config.output_dir, config.eval.every, config.logging.backends = str(tmp_path / name), -1, ("jsonl",)
        for key, value in algorithm.items():
            config.algorithm[key] = value
        return [line["loss"] for line in jaxrl_llm.train(config).metrics]

    online = {"beta": 0.5, "ref_sync_steps": 1}
    assert losses("a", "grpo.py", offload_reference=True, **online) == losses("b", "grpo.py", **online)
    assert losses("c", "dpo.py", offload_reference=True) == losses("d", "dpo.py")


OFFLOADED = {
    "grpo": {"algorithm.beta": 0.5, "algorithm.ref_sync_steps": 1, "algorithm.num_iterations": 2, "eval.every": 2},
    "grpo_lora": {"algorithm.beta": 0.5, "rewards.functions": ("target_length", "model:rm(offload=True)")},
    "dpo": {"eval.every": 2},
    "ppo": {"checkpoint.every": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OFFLOADED)
def test_offloaded_parameters_change_nothing(root, tmp_path, name, monkeypatch):
    """The losses and the model of a run, of a resumed one too; the parameters wait in the host's memory."""
    monkeypatch.chdir(tmp_path)
    if name == "grpo_lora":
        save_hf(load_model("embedded:sort", head="score"), tmp_path / "rm")

    def run(folder, **more):
        config = load_config_file(f"{root / 'configs' / name}.py:tiny")
        config.output_dir, config.eval.every, config.logging.backends = folder, -1, ("jsonl",)
        config.update_from_flattened_dict(OFFLOADED[name] | more)
        return jaxrl_llm.train(config)

    plain, offloaded = run("plain"), run("offloaded", **{"model.offload": True, "optimizer.offload": True})
    assert {x.sharding.memory_kind for x in jax.tree.leaves(offloaded.model.params)} == {"pinned_host"}
    for line, other in zip(plain.metrics, offloaded.metrics, strict=True):
        for metric in ("loss", "grad_norm", "kl", "reward", "eval/reward", "eval/loss", "critic/loss"):
            assert line.get(metric) == other.get(metric)
    jax.tree.map(np.testing.assert_array_equal, plain.model.params, offloaded.model.params)
    if name == "ppo":
        again = run("again", **{"model.offload": True, "checkpoint.resume": "offloaded/checkpoints/1"})
        jax.tree.map(np.testing.assert_array_equal, plain.model.params, again.model.params)
    text = jaxrl_llm.generate(offloaded.model, ["sort:4821="], max_new_tokens=4)
    assert text == jaxrl_llm.generate(plain.model, ["sort:4821="], max_new_tokens=4)
    np.testing.assert_array_equal(offloaded.model(np.arange(97, 109)[None]), plain.model(np.arange(97, 109)[None]))


@pytest.mark.slow
@pytest.mark.usefixtures("whole_tasks")
def test_a_full_kl_does_not_depend_on_packing_or_the_parts_of_a_batch(root, tmp_path):
    """Rows that move, in a run whose minibatches and micro-batches each take their rows of the reference's vectors."""

    def run(packing, rows):
        config = load_config_file(f"{root / 'configs' / 'grpo.py'}:tiny")
        config.output_dir, config.total_steps = str(tmp_path / f"{packing}{rows}"), 3
        config.algorithm.kl, config.algorithm.beta, config.algorithm.num_iterations = "full", 0.5, 2
        config.optimizer.learning_rate, config.eval.every = 3e-3, -1
        config.batch.minibatches, config.batch.packing, config.batch.microbatch_rows = 2, packing, rows
        config.logging.backends = ("jsonl",)
        return jaxrl_llm.train(config)

    packed, rows, parts = run("true", 0), run("false", 0), run("false", 4)
    for other in (rows, parts):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), packed.model.params, other.model.params)
    assert packed.metrics[-1]["kl"] > 0.01


@pytest.mark.parametrize(
    ("name", "value"), [("kl_in_reward", True), ("kl_bias_correction", True), ("kl_controller", "adaptive")]
)
def test_what_needs_an_estimate_of_the_kl_has_none_of_the_full_one(name, value):
    config = default()
    config.algorithm.kl, config.algorithm.beta = "full", 0.1
    config.algorithm[name] = value
    with pytest.raises(ConfigError, match=rf"algorithm\.kl is 'full', but algorithm\.{name}.* set kl to k1 or k3"):
        validate(config)
