"""Stages that start from each other's models, in one command that goes on where it was."""

import json
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_llm.commands import stages
from jaxrl_llm.commands.stages import is_finished, load_stages, run_stages
from jaxrl_llm.config import ConfigError, default
from jaxrl_llm.models.files.hf import EMBEDDED


@pytest.mark.slow
def test_three_stages_and_going_on(root, tmp_path):
    def stages():
        found = load_stages(f"{root / 'configs/rlhf.py'}:tiny", tmp_path)
        for config in found.values():
            config.eval.every, config.logging.backends = -1, ("jsonl",)
        found["ppo"].critic.learning_rate = 0.0
        return found

    first = stages()
    assert not any(is_finished(config) for config in first.values())
    assert list(run_stages(first)) == ["sft", "reward_model", "ppo"]
    lines = [json.loads(line) for line in (tmp_path / "ppo/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["objective/scores"] == pytest.approx(lines[0]["rewards/reward_model/mean"], rel=1e-5)
    start, critic = (load_file(tmp_path / name / "model.safetensors") for name in ("reward_model/hf", "ppo/critic"))
    assert start.keys() == critic.keys()
    for name, value in start.items():  # critic.path, which nothing moves
        np.testing.assert_array_equal(critic[name], value, err_msg=name)
    assert run_stages(stages()) == {}
    longer = stages()
    longer["ppo"].total_steps = 3
    done = run_stages(longer)
    assert list(done) == ["ppo"]
    assert [line["step"] for line in done["ppo"].metrics] == [1, 2, 3]


@pytest.mark.slow
def test_adapters_one_after_another(root, tmp_path):
    """Each stage adds a matrix of the rank of its adapters to what the one before has merged."""
    found = load_stages(f"{root / 'configs/relora.py'}:tiny", tmp_path)
    for config in found.values():
        config.eval.every, config.logging.backends, config.optimizer.warmup_steps = -1, ("jsonl",), 0
    assert list(run_stages(found)) == ["merge_1", "merge_2"]
    folders = EMBEDDED / "sort", tmp_path / "merge_1/hf", tmp_path / "merge_2/hf"
    start, first, second = (load_file(folder / "model.safetensors") for folder in folders)
    name = next(name for name in start if name.endswith("layers.1.mlp.down_proj.weight"))

    def rank(change):
        return int((np.linalg.svd(np.float64(change), compute_uv=False) > 1e-6).sum())

    assert (rank(first[name] - start[name]), rank(second[name] - first[name])) == (4, 4)
    assert rank(second[name] - start[name]) == 8


STAGES = """
from jaxrl_llm.config import default

def get_stages(folder):
    config = default()
    config.algorithm.name, config.data.path, config.eval.every = "sft", {rows!r}, -1
    config.num_epochs, config.batch.prompts, config.optimizer.learning_rate = {epochs}, 2, "auto"
    config.logging.backends = ("jsonl",)
    return {{"sft": config}}
"""


def test_a_finished_stage_whose_settings_are_computed_is_skipped(tmp_path, capsys):
    """Its record has the steps of its epochs and its learning rate as numbers."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(3 * (json.dumps({"prompt": "sort:21=", "completion": "12"}) + "\n"))

    def stages(epochs):
        file = tmp_path / f"stages_{epochs}.py"
        file.write_text(STAGES.format(rows=str(rows), epochs=epochs))
        return load_stages(str(file), tmp_path / "stages")

    assert [len(done.metrics) for done in run_stages(stages(1.0)).values()] == [2]
    assert f"stage sft: {tmp_path}/stages/sft\n" in capsys.readouterr().out
    assert run_stages(stages(1.0)) == {}
    assert capsys.readouterr().out == f"stage sft: finished before, in {tmp_path}/stages/sft\n"
    assert not is_finished(stages(2.0)["sft"])
    changed = stages(1.0)["sft"]
    changed.batch.prompts = 3
    assert not is_finished(changed)
    (tmp_path / "stages" / "sft" / "checkpoints" / "2").rename(tmp_path / "lost")
    assert not is_finished(stages(1.0)["sft"])


def test_a_stage_of_a_model_that_was_trained_on_since(tmp_path, monkeypatch):
    """It is not trained anew by itself, and a warning says so: by what the model is, and not by the times of files."""
    done: set[str] = set()
    monkeypatch.setattr(stages, "is_finished", lambda config: Path(config.output_dir).name in done)
    monkeypatch.setattr(stages, "train", lambda config: done.add(Path(config.output_dir).name))
    found = {name: default() for name in ("sft", "ppo", "other")}
    for name, config in found.items():
        config.output_dir = str(tmp_path / name)
    weights = tmp_path / "sft" / "hf" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_text("one")
    found["ppo"].rewards.functions = (f"model:{tmp_path}/sft/hf(add_eos=True)",)

    def told() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run_stages(found)
        return [str(warning.message) for warning in caught]

    assert told() == [] and done == {*found}
    assert [*json.loads((tmp_path / "ppo" / "read_models.json").read_text())] == ["sft"]
    assert not (tmp_path / "other").exists()
    os.utime(weights, (9e9, 9e9))
    assert told() == []
    weights.write_text("two")
    line = f"the stage ppo is finished, but with a model of the stage sft before that was trained on: delete {tmp_path}"
    assert told() == [f"{line}/ppo to train it anew"]
    done.remove("ppo")
    (tmp_path / "ppo" / "checkpoints" / "3").mkdir(parents=True)
    assert told() == [f"{line.replace('is finished', 'has begun')}/ppo to train it anew"]
    done.remove("ppo")
    found["ppo"].checkpoint.resume = "never"
    assert told() == told() == []


def test_the_home_folder_in_output_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "stages.py"
    file.write_text("from jaxrl_llm.config import default\ndef get_stages(folder):\n    return {folder: default()}\n")
    assert list(load_stages(str(file), "~/runs")) == [str(tmp_path / "runs")]


def test_files_without_stages(root, tmp_path):
    with pytest.raises(ConfigError, match=r"has no function get_stages\(folder\)"):
        load_stages(str(root / "configs/grpo.py"), tmp_path)
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def get_stages(folder):\n    return [folder]\n")
    with pytest.raises(ConfigError, match="must return a dict of configurations"):
        load_stages(str(wrong), tmp_path)


@pytest.mark.parametrize(
    ("line", "argument", "message"),
    [
        (
            "config.optimizer.learning_rat = 1.0",
            "",
            r"stages\.py:4: there is no key optimizer\.learning_rat; the closest is",
        ),
        ("config.batch.prompts = 'many'", "", r"stages\.py:4: "),
        ("{}['a']", "", r"stages\.py:4: KeyError"),
        ("pass", ":tiny", r"--stages is '.*:tiny', but .* defines get_stages\(folder\): too many"),
        ("config.checkpoint.contents = ('hf',)", "", "checkpoint.contents of the stage one is hf alone"),
        ("config.rollout.group_size = 1", "", "the stage one: rollout.group_size is 1"),
        ("return {}", "", "must return a dict of configurations"),
    ],
)
def test_mistakes_in_a_file_of_stages(tmp_path, line, argument, message):
    """As those in a config file: told in a line, with the place."""
    file = tmp_path / "stages.py"
    text = "from jaxrl_llm.config import default\ndef get_stages(folder):\n    config = default()\n    {}\n"
    file.write_text(text.format(line) + "    return {'one': config}\n")
    with pytest.raises(ConfigError, match=message):
        load_stages(f"{file}{argument}", tmp_path)
