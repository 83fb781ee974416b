"""The parts of a checkpoint that a start takes up: `checkpoint.load`."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jaxrl_llm
from jaxrl_llm.config import ConfigError, validate
from jaxrl_llm.distributed.orbax import ocp
from jaxrl_llm.training.checkpoint.manager import Checkpoints
from jaxrl_llm.training.moments import updates_made
from jaxrl_llm.training.setup.run import begin_state, rescheduled

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")  # of the reader that is the oracle

ROWS = [{"prompt": f"sort:{n}=", "completion": "".join(sorted(str(n)))} for n in range(100, 132)]
RATE, STEPS = 1e-2, 4


def config_of(folder):
    config = jaxrl_llm.default_config()
    config.algorithm.name, config.batch.prompts, config.total_steps = "sft", 8, STEPS
    config.optimizer.learning_rate, config.optimizer.schedule, config.optimizer.max_grad_norm = RATE, "linear", 0.0
    config.optimizer.weight_decay, config.optimizer.min_lr_ratio = 0.0, 0.0
    config.output_dir, config.logging.backends = str(folder), ("jsonl",)
    config.checkpoint.every, config.checkpoint.keep = 1, STEPS
    return config


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of all steps."""
    config = config_of(tmp_path_factory.mktemp("load") / "whole")
    return jaxrl_llm.train(config, ROWS)


def interrupted(whole, folder, step):
    """The configuration of that run, stopped after a step in a folder of its own."""
    (folder / "checkpoints").mkdir(parents=True)
    for number in range(1, step + 1):
        shutil.copytree(whole.output_dir / "checkpoints" / str(number), folder / "checkpoints" / str(number))
    shutil.copy(whole.output_dir / "config.json", folder)
    return config_of(folder)


def state_of(folder, step):
    """The tree of arrays that a checkpoint holds."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        return jax.device_get(reader.restore(Path(folder) / "checkpoints" / str(step) / "state"))


def vector(tree, field=None):
    """The numbers of a tree, or of its parts of one name, in the order of its paths."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = [x for path, x in leaves if field in (None, *(getattr(key, "key", None) for key in path))]
    return np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in named])


def test_a_new_optimizer_goes_on_with_data_and_learning_rate(whole, tmp_path, capsys):
    config = interrupted(whole, tmp_path / "run", 2)
    config.checkpoint.load = ("model", "extra")
    result = jaxrl_llm.train(config, ROWS)
    assert "checkpoint.load is model,extra: a new optimizer begins, without moments" in capsys.readouterr().err
    own, others = result.metrics[0], whole.metrics[2]
    # Step 3 has the data and the weights of the undisturbed run, and the rate of a line from RATE to 0 in 4 steps.
    for name in ("step", "loss", "grad_norm", "num_tokens", "epoch"):
        assert own[name] == others[name], name
    assert own["lr"] == pytest.approx(RATE * (1 - 2 / STEPS), rel=1e-6) == others["lr"]
    # The moments are those of one gradient g, 0.1 g and 0.001 g^2, whose norm is the metric's, and the first update of
    # AdamW is the rate times the sign of g. In the undisturbed run those of two gradients before it are in them.
    before, after = (state_of(config.output_dir, step) for step in (2, 3))
    mu, nu = vector(after["opt_state"], "mu"), vector(after["opt_state"], "nu")
    np.testing.assert_allclose(mu**2 * 0.001 / 0.1**2, nu, rtol=1e-5, atol=1e-12)
    assert np.linalg.norm(mu) / 0.1 == pytest.approx(own["grad_norm"], rel=1e-5)
    moved, sure = vector(after["params"]) - vector(before["params"]), np.abs(mu) > 1e-5
    np.testing.assert_allclose(np.abs(moved[sure]), own["lr"], rtol=2e-3)
    assert sorted({*vector(after["opt_state"], "count")}) == [1, 3]  # of AdamW's own, and of its schedule
    assert not np.allclose(mu, vector(state_of(whole.output_dir, 3)["opt_state"], "mu"))


def test_a_checkpoint_of_another_kind_of_run_is_refused(whole, tmp_path):
    """As one of supervised fine-tuning, from which samples are to go on."""
    config = config_of(tmp_path / "samples")
    config.algorithm.name, config.checkpoint.resume = "grpo", str(whole.output_dir)
    with pytest.raises(
        ConfigError, match=r"learned from given rows, and algorithm.name = 'grpo' samples .*load=model$"
    ):
        jaxrl_llm.train(config, ROWS, rewards=lambda completions, **columns: [1.0] * len(completions))


@pytest.mark.slow
def test_another_optimizer_may_be_named(whole, tmp_path):
    config = interrupted(whole, tmp_path / "run", 3)
    config.optimizer.name = "sgd"
    with pytest.raises(ConfigError, match=r"adamw -> sgd\. Set them back, begin a new optimizer \(checkpoint\.load"):
        jaxrl_llm.train(config, ROWS)
    config.checkpoint.accept_changes = ("optimizer.name",)  # whose moments no checkpoint holds
    with pytest.raises(ConfigError, match=r"/3 holds other moments than the optimizer .*: opt_state/0/count is"):
        jaxrl_llm.train(config, ROWS)
    config.model.trainable, config.checkpoint.accept_changes = ("lm_head",), ("optimizer.name", "model.trainable")
    with pytest.raises(ConfigError, match=r"model.trainable: \(empty\) -> lm_head\. .*; with another model.trainable"):
        jaxrl_llm.train(config, ROWS)
    config.checkpoint.load, config.model.trainable, config.checkpoint.accept_changes = ("model", "extra"), (), ()
    (own,) = jaxrl_llm.train(config, ROWS).metrics
    assert own["loss"] == whole.metrics[3]["loss"]
    moved = vector(state_of(config.output_dir, 4)["params"]) - vector(state_of(config.output_dir, 3)["params"])
    assert np.linalg.norm(moved) == pytest.approx(RATE * (1 - 3 / STEPS) * own["grad_norm"], rel=1e-3)


def test_the_weights_alone_start_at_step_0(whole, tmp_path):
    config = config_of(tmp_path / "run")
    config.total_steps = 1
    config.checkpoint.load, config.checkpoint.resume = ("model",), str(whole.output_dir / "checkpoints" / "2")
    optimizer = optax.inject_hyperparams(optax.adam)(optax.linear_schedule(RATE, 0.0, STEPS))  # the user's own
    result = jaxrl_llm.train(config, ROWS, optimizers=optimizer)
    (own,) = result.metrics
    first, held = whole.metrics[0], vector(state_of(whole.output_dir, 2)["params"])
    for name in ("step", "num_tokens", "epoch"):
        assert own[name] == first[name], name  # the data from their start
    assert own["lr"] == pytest.approx(RATE) and own["loss"] != first["loss"]
    state = state_of(config.output_dir, 1)
    mu, moved = vector(state["opt_state"], "mu"), vector(state["params"]) - held
    np.testing.assert_allclose(np.abs(moved[np.abs(mu) > 1e-5]), RATE, rtol=2e-3)
    assert {*vector(state["opt_state"], "count")} == {1}
    config.checkpoint.resume = str(result.output_dir)
    with pytest.raises(ConfigError, match=r"deletes what is in .*/run/checkpoints, but .* is there: set"):
        jaxrl_llm.train(config, ROWS)
    assert (result.output_dir / "checkpoints" / "1").is_dir()


@pytest.mark.slow
def test_the_learning_rate_stays_with_the_steps(whole, tmp_path):
    """Whatever the number of updates that a step makes from there on."""
    config = interrupted(whole, tmp_path / "run", 2)
    config.batch.minibatches = 2
    rates = [own["lr"] for own in jaxrl_llm.train(config, ROWS).metrics]
    assert RATE * (1 - 2 / STEPS) >= rates[0] > RATE * (1 - 3 / STEPS) >= rates[1] > 0


@pytest.mark.slow
def test_a_load_is_done_once(whole, tmp_path, capsys):
    """The same command again, as a job manager gives it, goes on from what the run has saved since, in full."""
    config = interrupted(whole, tmp_path / "run", 2)
    config.checkpoint.load, config.optimizer.name = ("model", "extra"), "lion"
    jaxrl_llm.train(config, ROWS)
    ended = vector(state_of(config.output_dir, 4))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    capsys.readouterr()
    assert [own["step"] for own in jaxrl_llm.train(config, ROWS).metrics] == [3, 4]
    err = capsys.readouterr().err
    assert "was done by an earlier start: the run goes on from the checkpoint of step 3" in err and "begins" not in err
    np.testing.assert_array_equal(vector(state_of(config.output_dir, 4)), ended)
    for step in ("3", "4"):  # as if it had been killed before it saved anything
        shutil.rmtree(tmp_path / "run" / "checkpoints" / step)
    jaxrl_llm.train(config, ROWS)
    assert "a new optimizer begins" in capsys.readouterr().err
    np.testing.assert_array_equal(vector(state_of(config.output_dir, 4)), ended)


@pytest.mark.slow
def test_weights_alone_are_loaded_once(whole, tmp_path):
    config = config_of(tmp_path / "run")
    config.total_steps = 2
    config.checkpoint.load, config.checkpoint.resume = ("model",), str(whole.output_dir / "checkpoints" / "2")
    jaxrl_llm.train(config, ROWS)
    ended = vector(state_of(config.output_dir, 2))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "2")
    assert [own["step"] for own in jaxrl_llm.train(config, ROWS).metrics] == [1, 2]
    assert [start["step"] for start in json.loads((tmp_path / "run" / "starts.json").read_text())] == [0, 1]
    np.testing.assert_array_equal(vector(state_of(config.output_dir, 2)), ended)
    recorded = json.loads((tmp_path / "run" / "config.json").read_text())
    assert recorded["checkpoint"]["load"] == ["model"]  # the command's own settings


@pytest.mark.slow
def test_another_runs_checkpoint_is_loaded_once(whole, tmp_path, capsys):
    """In full: a run that was preempted would begin there again, and delete what it has saved."""
    config = config_of(tmp_path / "run")
    config.total_steps, config.average.every = 3, 1
    config.checkpoint.resume = str(whole.output_dir / "checkpoints" / "2")
    assert [own["step"] for own in jaxrl_llm.train(config, ROWS).metrics] == [3]
    config.average.every = 0
    assert [own["step"] for own in jaxrl_llm.train(config, ROWS).metrics] == [3]
    err = capsys.readouterr().err
    assert "was done by an earlier start: the run goes on from the checkpoint of step 3" in err
    assert "checkpoints/3 holds average, which is left, as this run has none" in err and "deleting" not in err


def test_links_to_the_runs_own_checkpoints(whole, tmp_path):
    config = interrupted(whole, tmp_path / "run", 2)
    config.checkpoint.load = ("model",)
    for name, target in (("link", tmp_path / "run"), ("2", tmp_path / "run" / "checkpoints" / "2")):
        (tmp_path / name).symlink_to(target)
        config.checkpoint.resume = str(tmp_path / name)
        with pytest.raises(ConfigError, match=r"deletes what is in .*, but .* is there: set another output_dir"):
            jaxrl_llm.train(config, ROWS)
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["1", "2"]
    config.checkpoint.load, config.checkpoint.resume = ("model", "extra"), str(tmp_path / "link")
    assert [own["step"] for own in jaxrl_llm.train(config, ROWS).metrics] == [3, 4]
    assert (tmp_path / "run" / "checkpoints" / "1").is_dir()  # the run goes on, and keeps what it has


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """A run of a step that trains adapters."""
    config = config_of(tmp_path_factory.mktemp("adapters") / "run")
    config.total_steps, config.lora.rank = 1, 4
    return jaxrl_llm.train(config, ROWS)


OTHER = "holds other trained parameters than model.path, model.trainable and lora ask for: .*"


@pytest.mark.parametrize("load", [("model",), pytest.param(("model", "extra"), marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lora.targets": ("q_proj",)}, "beside other parameters than this run's: lora.targets: all-linear -> q_proj"),
        ({"lora.alpha": 32.0, "lora.rslora": True}, r"lora.alpha: 16.0 -> 32.0; lora.rslora: false -> true\. Set them"),
        ({"model.random_init": True}, "model.random_init: false -> true"),
        (
            {"lora.targets": ("q_proj",), "checkpoint.accept_changes": ("lora.targets",)},
            OTHER + r"k/lora_a is \[.*4\] there, and is not here",
        ),
        pytest.param(
            {"lora.dora": True, "checkpoint.accept_changes": ("lora.dora",)},
            OTHER + "lora_m is not there, and is",
            marks=pytest.mark.slow,
        ),
        (
            {"lora.rank": 8, "checkpoint.accept_changes": ("lora.rank",)},
            OTHER + r"lora_a is \[.*4\] there, and is \[.*8\] here",
        ),
        ({"lora.rank": 0}, OTHER + "is not there, and is"),
    ],
)
def test_parameters_that_do_not_fit_are_named(whole, adapters, tmp_path, settings, words, load):
    """Neither what is left over is dropped nor what is missing made up, and nothing was deleted."""
    config = interrupted(whole, tmp_path / "run", 1)
    config.lora.rank = 4
    config.checkpoint.load, config.checkpoint.resume = load, str(adapters.output_dir)
    config.update_from_flattened_dict(settings)
    with pytest.raises(ConfigError, match=words):
        jaxrl_llm.train(config, ROWS)
    assert (tmp_path / "run" / "checkpoints" / "1").is_dir()


@pytest.mark.slow
def test_adapters_beside_a_model_in_memory(tmp_path):
    model = jaxrl_llm.load_model("embedded:sort")
    config = config_of(tmp_path / "first")
    config.total_steps, config.lora.rank = 1, 4
    jaxrl_llm.train(config, ROWS, model=model)
    config.output_dir, config.checkpoint.resume = str(tmp_path / "second"), config.output_dir
    config.checkpoint.load = ("model",)
    with pytest.raises(ConfigError, match=r"was given its model in memory \(embedded:sort.*give it again, train\("):
        jaxrl_llm.train(config, ROWS)
    jaxrl_llm.train(config, ROWS, model=model)


def test_checkpoints_without_their_runs_record(adapters, tmp_path, capsys):
    shutil.copytree(adapters.output_dir / "checkpoints", tmp_path / "bare" / "checkpoints")
    config = config_of(tmp_path / "run")
    config.total_steps, config.lora.rank = 1, 4
    config.checkpoint.load, config.checkpoint.resume = ("model",), str(tmp_path / "bare")
    jaxrl_llm.train(config, ROWS)
    assert "bare/config.json cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("load", "resume", "words"),
    [
        (("model", "optimizer"), "auto", "load is 'model,optimizer', but it takes"),
        (("optimizer", "extra"), "auto", "load is 'optimizer,extra', but it takes"),
        ((), "auto", "load is '', but it takes"),
        (("model",), "auto", "resume is auto, which names no checkpoint to load from"),
        (("model", "extra"), "never", "resume is never, which names no checkpoint to load from"),
    ],
)
def test_parts_that_make_no_start_are_refused(load, resume, words):
    config = jaxrl_llm.default_config()
    config.checkpoint.load, config.checkpoint.resume = load, resume
    with pytest.raises(ConfigError, match=words):
        validate(config)


def test_a_critic_that_is_missing_or_left(tmp_path):
    config, mesh = jaxrl_llm.default_config(), Mesh(np.array(jax.devices()[:1]), ("data",))
    params, of_critic, optimizer = {"w": jnp.full((2,), 2.0)}, {"v": jnp.full((3,), 5.0)}, optax.sgd(1.0)
    with jax.set_mesh(mesh), Checkpoints(tmp_path) as checkpoints:
        alone = begin_state(config, mesh, optimizer, None, params, None, 0)
        both = begin_state(config, mesh, optimizer, optimizer, params, of_critic, 0)
        for step, state in ((1, alone), (2, both)):
            checkpoints.save(step, state, {}, final=True)
        with pytest.raises(ConfigError, match=r"/1 has no critic: write its model"):
            checkpoints.restore_models(1, both, mesh)
        assert not checkpoints.warnings()
        loaded, none = checkpoints.restore_models(2, alone, mesh)
        (line,) = checkpoints.warnings()
        assert "the critic of checkpoint" in line and "/2 is left, as this run has none" in line and none is None
        wider = begin_state(config, mesh, optimizer, optimizer, params, {"v": jnp.zeros((4,))}, 0)
        with pytest.raises(ConfigError, match=r"critic/params/v is \[3\] there, and is \[4\] here"):
            checkpoints.restore_models(2, wider, mesh)
    np.testing.assert_array_equal(loaded["w"], params["w"])


def test_the_critic_is_loaded_and_begins_as_the_policy_does(tmp_path):
    """Its own optimizer has made the updates of all steps, the policy's those after the critic's warm-up."""
    config, mesh = jaxrl_llm.default_config(), Mesh(np.array(jax.devices()[:1]), ("data",))
    config.batch.minibatches, config.critic.warmup_steps, config.critic.minibatches = 2, 3, 4
    optimizer = optax.adamw(lambda count: 1.0, weight_decay=lambda count: 0.1)
    params, of_critic = {"w": jnp.full((2,), 2.0)}, {"v": jnp.full((3,), 5.0)}
    with jax.set_mesh(mesh), Checkpoints(tmp_path) as checkpoints:
        began = begin_state(config, mesh, optimizer, optimizer, params, of_critic, 0)
        checkpoints.save(5, replace(began, step=began.step + 5), {})
        checkpoints.wait()
        loaded = checkpoints.restore_models(5, began, mesh)
        state = begin_state(config, mesh, optimizer, optimizer, *loaded, 5)
        shared = begin_state(config, mesh, optimizer, None, *loaded, 5)
        alone = begin_state(config, mesh, optimizer, None, loaded[0], None, 5)
        injected = optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(1.0, 0.0, 20))
        given = begin_state(config, mesh, injected, None, loaded[0], None, 5)
        moved = rescheduled(state, {"policy": 2, "critic": 4}, {"policy": 8, "critic": 1})
    jax.tree.map(np.testing.assert_array_equal, loaded, (params, of_critic))
    for begun, updates in ((state, (5 - 3) * 2), (state.critic, 5 * 4), (shared, 5 * 2), (alone, 5 * 2)):
        adam, decay, schedule = begun.opt_state
        assert (int(updates_made(begun.opt_state)), int(adam.count)) == (updates, 0)
        assert (int(decay.count), int(schedule.count)) == (updates, updates)
        assert not any(x.any() for x in jax.tree.leaves((adam.mu, adam.nu)))
    for begun, updates in ((moved, (5 - 3) * 8), (moved.critic, 5 * 1)):  # a run that goes on with other minibatches
        adam, decay, schedule = begun.opt_state
        assert (int(adam.count), int(decay.count), int(schedule.count)) == (0, updates, updates)
    assert rescheduled(state, {}, {"policy": 8, "critic": 1}).opt_state is state.opt_state
    assert int(optax.tree_utils.tree_get(given.opt_state, "hyperparams_states")["learning_rate"].count) == 5 * 2
    assert int(state.step) == int(shared.step) == 5 and shared.opt_state[0].mu.keys() == {"w", "v"}
    jax.tree.map(np.testing.assert_array_equal, shared.critic.params, of_critic)
