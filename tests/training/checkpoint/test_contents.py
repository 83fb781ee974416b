"""What a checkpoint holds, and which one becomes the exported model."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file

import jaxrl_llm
from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.files.hf import step_folders
from jaxrl_llm.models.model import load_model
from jaxrl_llm.training.checkpoint.manager import Checkpoints
from jaxrl_llm.training.checkpoint.orbax_manager import Keep
from jaxrl_llm.training.checkpoint.outputs import discard_exports, export_step
from jaxrl_llm.training.update import State

ROWS = [{"prompt": f"sort:{n}=", "completion": "".join(sorted(str(n)))} for n in range(100, 108)]


@pytest.fixture
def config(tmp_path):
    config = jaxrl_llm.default_config()
    config.algorithm.name, config.optimizer.learning_rate, config.total_steps = "sft", 1e-2, 3
    config.output_dir, config.batch.prompts, config.logging.backends = str(tmp_path / "run"), 8, ("jsonl",)
    config.checkpoint.every, config.data.shuffle = 1, False
    return config


def tensors(folder):
    return load_file(folder / "model.safetensors")


def same(one, other):
    return all(np.array_equal(tensor, other[name]) for name, tensor in one.items())


def test_models_beside_states_and_the_best_of_them(config):
    config.checkpoint.contents, config.checkpoint.keep = ("state", "hf"), 5
    config.checkpoint.best, config.checkpoint.best_mode, config.export.best = "loss", "max", True
    result = jaxrl_llm.train(config, ROWS)
    losses = [record["loss"] for record in result.metrics]
    best = int(np.argmax(losses)) + 1
    assert best < 3, losses
    steps = result.output_dir / "hf_steps"
    assert sorted(path.name for path in steps.iterdir()) == ["00001", "00002"]
    exported = tensors(result.output_dir / "hf")
    assert same(exported, tensors(steps / f"{best:05d}"))
    assert not same(exported, tensors(steps / f"{3 - best:05d}"))


@pytest.mark.slow
def test_a_best_by_no_metric_is_told_with_the_first_step(config):
    config.checkpoint.best, config.checkpoint.every, config.total_steps = "rewards", 4, 8
    with pytest.raises(ConfigError, match="step 1 has no such metric"):
        jaxrl_llm.train(config, ROWS)


@pytest.mark.slow
def test_every_state_that_a_run_goes_on_from_has_its_model(config):
    """Of the last step of a start it was hf/, whose place the next one's takes; and a kill may come before it."""
    config.checkpoint.contents, config.checkpoint.keep, config.total_steps = ("state", "hf"), 5, 2
    first = jaxrl_llm.train(config, ROWS).output_dir
    last = tensors(first / "hf")
    assert [*step_folders(first)] == [1]
    config.total_steps = 3
    jaxrl_llm.train(config, ROWS)
    assert [*step_folders(first)] == [1, 2] and same(last, tensors(first / "hf_steps" / "00002"))


def test_the_model_just_written_stays(tmp_path):
    """Steps are in the order of their numbers, beyond five digits too."""
    model = load_model("embedded:sort")
    for step in (99950, 100000, 100050):
        assert (export_step(tmp_path, step, model, None, 2) / "model.safetensors").is_file()
    assert list(step_folders(tmp_path)) == [100000, 100050]
    assert (export_step(tmp_path, 7, model, None, 1) / "model.safetensors").is_file()
    assert list(step_folders(tmp_path)) == [7]


def test_the_critic_of_a_step_is_written_beside_its_model(tmp_path):
    model, critic = load_model("embedded:sort"), load_model("embedded:sort", head="score", init_key=jax.random.key(1))
    for _ in range(2):  # a step that is made again takes the place of the first
        written = export_step(tmp_path, 3, model, critic, 1)
    assert same(tensors(written / "critic"), tensors(tmp_path / "hf_steps" / "00003" / "critic"))
    read = load_model(written / "critic", head="score")
    jax.tree.map(np.testing.assert_array_equal, read.params, critic.params)
    assert not (export_step(tmp_path, 3, model, None, 1) / "critic").exists()


def test_models_of_an_abandoned_timeline_go(config, capsys):
    folder = Path(config.output_dir)
    for name in ("00001", "00002", "100000", "mine", ".00002.partial-7", ".00001.earlier-7"):
        (folder / "hf_steps" / name).mkdir(parents=True)
    discard_exports(folder, 1)
    assert sorted(path.name for path in (folder / "hf_steps").iterdir()) == ["00001", "mine"]
    assert f"deleting the models of steps 2, 100000 in {folder / 'hf_steps'}, as the run starts after step 1" in (
        capsys.readouterr().err
    )
    discard_exports(folder, 1)
    assert capsys.readouterr().err == ""
    config.total_steps = 0
    with pytest.raises(ConfigError, match=r"holds models of steps \(hf_steps/\), and no checkpoint that this run"):
        jaxrl_llm.train(config, ROWS)  # one that was killed and kept no states: its models are all there is of it
    assert (folder / "hf_steps" / "00001").is_dir()
    config.checkpoint.resume = "never"
    jaxrl_llm.train(config, ROWS)
    assert [path.name for path in (folder / "hf_steps").iterdir()] == ["mine"]
    assert "deleting the models of steps 1 in" in capsys.readouterr().err


def test_a_best_checkpoint_that_is_damaged_is_not_exported(tmp_path):
    mesh, told = Mesh(np.array(jax.devices()[:1]), ("data",)), []
    state = State(jnp.array(2), {"w": jnp.full((2,), 2.0)}, ())
    with Checkpoints(tmp_path, Keep(best="loss", best_mode="min")) as checkpoints:
        checkpoints.save(1, State(jnp.array(1), {"w": jnp.full((2,), 1.0)}, ()), {}, metrics={"loss": 0.1})
        checkpoints.save(2, state, {}, metrics={"loss": 0.2})
        checkpoints.wait()
        damaged = next(path for path in (tmp_path / "1" / "state").rglob("d/*") if path.is_file())
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
        found = checkpoints.restore_best(state, mesh, told.append)
        (warning,) = checkpoints.warnings()
    assert found is state and not state.params["w"].is_deleted()
    assert "of step 2, the last, as the checkpoint of step 1, the best by loss, is damaged" in warning and not told


def test_the_model_only(config):
    config.checkpoint.contents, config.checkpoint.keep = ("hf",), 1
    result = jaxrl_llm.train(config, ROWS)
    assert [path.name for path in (result.output_dir / "hf_steps").iterdir()] == ["00002"]
    assert not [path for path in (result.output_dir / "checkpoints").iterdir() if path.name.isdigit()]
    assert (result.output_dir / "hf" / "config.json").is_file()
    for settings, words in (
        ({"checkpoint.best": "loss"}, "checkpoint.contents is hf, and the best"),
        ({"checkpoint.contents": ()}, "checkpoint.contents is empty"),
        ({"checkpoint.contents": ("state",), "export.best": True}, "set checkpoint.best"),
    ):
        changed = config.copy_and_resolve_references()
        changed.update_from_flattened_dict(settings)
        with pytest.raises(ConfigError, match=words):
            jaxrl_llm.train(changed, ROWS)


def test_checkpoints_that_are_deleted_are_named_first(tmp_path, capsys):
    state = State(jnp.zeros((), jnp.int32), {"w": jnp.zeros(2)}, ())
    with Checkpoints(tmp_path / "own") as checkpoints:
        checkpoints.discard_after(None)
        for step in (1, 2, 3):
            checkpoints.save(step, state, {})
        checkpoints.wait()
        assert "deleting" not in capsys.readouterr().err
        checkpoints.discard_after(2)
        said = capsys.readouterr().err
        assert f"deleting the checkpoints of steps 3 in {tmp_path / 'own'}, as the run starts after step 2" in said
        checkpoints.discard_after(None)
        said = capsys.readouterr().err
        assert "steps 1, 2 in" in said and "checkpoint.resume=auto" in said and "another output_dir" in said
        assert checkpoints.steps() == []


def test_a_run_whose_steps_are_done_says_that_nothing_is_trained(config, capsys):
    config.total_steps = 1
    first = jaxrl_llm.train(config, ROWS)
    assert "nothing is trained" not in capsys.readouterr().err
    again = jaxrl_llm.train(config, ROWS)
    jax.tree.map(np.testing.assert_array_equal, again.model.params, first.model.params)
    assert "has made its 1 step; nothing is trained" in (told := capsys.readouterr().err)
    assert "nothing is trained: raise total_steps, or set another output_dir or checkpoint.resume=never" in told
