"""Runs whose disk is full for a while, and where their checkpoints are kept."""

import errno
import json
import math
import os
import re
import resource
import shutil

import pytest

import jaxrl_llm
from jaxrl_llm.config import ConfigError, default, validate
from jaxrl_llm.config.flags import load_config_file
from jaxrl_llm.models.model import save_hf
from jaxrl_llm.training.checkpoint import manager, outputs
from tests.system.faults.equality import assert_same_run, metrics
from tests.system.faults.test_checkpoint_damage import fill, small_disk  # noqa: F401 (a fixture)


def configured(root, folder, **settings):
    config = load_config_file(f"{root}/configs/grpo.py:tiny")
    config.output_dir, config.logging.backends, config.eval.every = str(folder), ("jsonl",), -1
    config.total_steps, config.checkpoint.every = 8, 1
    for key, value in settings.items():
        section, _, leaf = key.partition("__")
        config[section][leaf] = value
    return config


def lengths(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


@pytest.mark.slow
@pytest.mark.parametrize("small_disk", ["24m"], indirect=True)
def test_a_run_outlives_a_full_disk(root, small_disk, tmp_path, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setattr(manager, "RETRY_SECONDS", 0.0)
    steps = []

    def filling(completions, trainer_state, **kwargs):
        steps.append(trainer_state.global_step)
        if steps[-1] == 2:
            fill(small_disk / "filler")
        if steps[-1] == 5:
            (small_disk / "filler").unlink()
        return lengths(completions)

    filling.__name__ = "lengths"
    whole = jaxrl_llm.train(configured(root, tmp_path / "whole"), rewards=lengths)
    disturbed = jaxrl_llm.train(configured(root, small_disk / "run"), rewards=filling)
    warnings = capsys.readouterr().err
    assert "could not be written to" in warnings and "No space left on device" in warnings
    assert "the completions of step" in warnings
    assert disturbed.output_dir == small_disk / "run"
    assert metrics(small_disk / "run/metrics.jsonl") == metrics(tmp_path / "whole/metrics.jsonl")
    for missing in (tmp_path / "whole/completions").glob("*.parquet"):  # tables are not kept for later
        if not (small_disk / "run/completions" / missing.name).exists():
            missing.unlink()
    assert_same_run(whole.output_dir, disturbed.output_dir)


@pytest.mark.slow
@pytest.mark.parametrize("small_disk", ["12m"], indirect=True)
def test_a_model_that_cannot_be_exported(root, small_disk, tmp_path):  # noqa: F811
    """The run ends with an error; its state is saved, and the same command exports when there is room."""
    config = configured(root, small_disk / "run", checkpoint__every=0, checkpoint__folder=str(tmp_path / "checkpoints"))
    config.total_steps = 2

    def filling(completions, trainer_state, **kwargs):
        if trainer_state.global_step == 1:
            fill(small_disk / "filler")
        return lengths(completions)

    with pytest.raises(ConfigError, match=r"model could not be written to .*run.*start the same command again"):
        jaxrl_llm.train(config, rewards=filling)
    (small_disk / "filler").unlink()
    config.checkpoint.accept_changes = ("rewards.functions",)
    result = jaxrl_llm.train(config, rewards=lengths)
    assert (result.output_dir / "hf/model.safetensors").is_file()


def test_an_output_folder_that_cannot_be_written(root, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output_dir .*file/run cannot be written"):
        jaxrl_llm.train(configured(root, tmp_path / "file/run", checkpoint__folder=str(tmp_path / "elsewhere")))


@pytest.mark.parametrize("room", [6000, 2000])
def test_a_disk_that_is_full_before_the_first_step(root, tmp_path, room):
    """What is written first is small, and the folder is tried with as much: config.json is what has no room."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"output_dir .*run cannot be written: .*File too large; make room"):
            jaxrl_llm.train(configured(root, tmp_path / "run"), rewards=lengths)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "run/config.json").exists() and not (tmp_path / "run/.lock").exists()


@pytest.mark.slow
def test_a_run_outlives_a_model_of_a_step_that_cannot_be_written(root, tmp_path, capsys, monkeypatch):
    def save(model, path, **options):
        if path.name == "00002":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save_hf(model, path, **options)

    monkeypatch.setattr(outputs, "save_hf", save)
    config = configured(root, tmp_path / "run", checkpoint__contents=("state", "hf"))
    config.total_steps = 4
    jaxrl_llm.train(config, rewards=lengths)
    assert sorted(path.name for path in (tmp_path / "run/hf_steps").iterdir()) == ["00001", "00003"]
    assert re.search(r"model of step 2 could not .* No space left on device.* The run goes on", capsys.readouterr().err)


@pytest.mark.slow
@pytest.mark.parametrize("room", ["for the state", "for neither", "later"])
def test_a_run_that_keeps_models_alone_is_not_lost_where_the_last_has_no_room(
    root, tmp_path, capsys, monkeypatch, room
):
    full = True

    def save(model, path, **options):
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save_hf(model, path, **options)

    def save_state(self, *args, **options):
        nonlocal full
        full = room != "later"
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(outputs, "save_hf", save)
    monkeypatch.setattr(manager, "RETRY_SECONDS", 0.0)
    if room != "for the state":
        monkeypatch.setattr(manager.Manager, "save", save_state)
    config = configured(root, tmp_path / "run", checkpoint__contents=("hf",), checkpoint__every=0)
    config.total_steps = 2
    if room == "later":
        jaxrl_llm.train(config, rewards=lengths)
    else:
        kept = "the newest checkpoint is of step 2" if room == "for the state" else "there is no checkpoint"
        with pytest.raises(ConfigError, match=f"model could not be written to .*{kept}.*start the same command again"):
            jaxrl_llm.train(config, rewards=lengths)
    assert "no checkpoint holds the model yet, so its state is saved" in capsys.readouterr().err
    if room == "for the state":
        full = False
        assert len(jaxrl_llm.train(config, rewards=lengths).metrics) == 2
    assert (tmp_path / "run/hf/model.safetensors").is_file() == (room != "for neither")


@pytest.mark.slow
def test_a_folder_that_is_deleted_is_made_again(root, tmp_path, capsys):
    def deleting(completions, trainer_state, **kwargs):
        if trainer_state.global_step == 2:
            shutil.rmtree(tmp_path / "run")
        return lengths(completions)

    config = configured(root, tmp_path / "run", checkpoint__every=0)
    config.total_steps = 3
    result = jaxrl_llm.train(config, rewards=deleting)
    assert [line["step"] for line in metrics(result.output_dir / "metrics.jsonl")][-1] == 3
    names = {path.name for path in result.output_dir.iterdir()}
    assert names >= {"config.json", "metrics.jsonl", "completions", "checkpoints", "hf"}
    assert (result.output_dir / "hf/README.md").is_file()
    assert "metrics.jsonl was deleted while the run goes on: it begins anew at step" in capsys.readouterr().err


@pytest.mark.slow
def test_what_a_run_keeps_and_where(root, tmp_path):
    config = configured(
        root, tmp_path / "run", checkpoint__folder=str(tmp_path / "elsewhere"), checkpoint__keep=1,
        checkpoint__keep_every=4, checkpoint__best="eval/reward", eval__every=1,
    )  # fmt: skip
    result = jaxrl_llm.train(config, rewards=lengths)
    by_step = {line["step"]: line["eval/reward"] for line in result.metrics if line["step"]}
    best = max(by_step, key=by_step.__getitem__)
    assert sorted(int(path.name) for path in (tmp_path / "elsewhere").iterdir()) == sorted({4, 8, best})
    assert not (tmp_path / "run/checkpoints").exists()
    assert jaxrl_llm.export(tmp_path / "run", tmp_path / "exported", step=best)
    assert (
        json.loads((tmp_path / "elsewhere" / str(best) / "metrics/metrics").read_text())["eval/reward"] == by_step[best]
    )
    shutil.rmtree(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="no checkpoints"):
        jaxrl_llm.export(tmp_path / "run", tmp_path / "again")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"output_dir": ""}, r"output_dir is empty \(is it an unset variable"),
        ({"output_dir": " "}, "output_dir is empty"),
        ({"model.path": ""}, r"model\.path is empty \(is it an unset variable"),
        ({"data.path": ""}, r"data\.path is empty"),
        ({"optimizer.learning_rate": 1e30}, r"optimizer\.learning_rate is 1e\+30, but it takes .* <= 100"),
        ({"optimizer.learning_rate": math.nan}, r"optimizer\.learning_rate is nan"),
        ({"algorithm.beta": 1e30}, r"algorithm\.beta is 1e\+30"),
        ({"batch.prompts": 10**30}, r"batch\.prompts is 1000000"),
        ({"output_dir": "gs://bucket/run"}, r"output_dir is 'gs://bucket/run'.*set checkpoint\.folder"),
        (
            {"checkpoint.best": "eval_loss"},
            "checkpoint.best is 'eval_loss', as transformers names it; here it is eval/loss",
        ),
        ({"checkpoint.best": "reward", "checkpoint.every": 0}, r"only the last step is saved: set checkpoint\.every"),
        ({"checkpoint.best": "eval_reward"}, "here it is eval/reward"),
        ({"checkpoint.best": "eval/reward", "eval.every": 0}, r"not those that are evaluated \(eval\.every = 0\)"),
        ({"checkpoint.best": "eval/reward", "eval.every": 20}, r"make eval\.every divide it"),
        ({"checkpoint.keep": 0}, r"checkpoint\.keep is 0"),
        ({"watch.hang_seconds": -1.0}, r"watch\.hang_seconds is -1"),
    ],
)
def test_settings_that_contradict_each_other(settings, message):
    config = default()
    config.update_from_flattened_dict(settings)
    with pytest.raises(ConfigError, match=message):
        validate(config)
