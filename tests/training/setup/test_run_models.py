"""Runs and their checkpoints in the place of a model: which of them a path names."""

import json

import pytest

import jaxrl_llm
from jaxrl_llm.config import ConfigError, to_json
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.training.setup.run_models import load_named, named_by


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(to_json(jaxrl_llm.default_config()))
    return folder


@pytest.mark.parametrize("path", ["embedded:sort", "Qwen/Qwen3-0.6B", "gs://bucket/model", "nowhere/checkpoints/3"])
def test_what_is_no_run_is_a_model(path):
    assert named_by(path) == path


def test_a_run_is_its_newest_checkpoint_or_else_its_model(run):
    assert named_by(str(run)) == (run, None)
    with pytest.raises(ConfigError, match="has no checkpoints: there is no folder"):
        load_named(str(run), "auto", make_mesh())
    for model in ("hf_steps/00002", "hf_steps/00010", "hf"):
        (run / model).mkdir(parents=True)
        (run / model / "config.json").write_text("{}")
        assert named_by(str(run)) == str(run / model)
    assert named_by(str(run / "hf")) == str(run / "hf")
    (run / "checkpoints/20").mkdir(parents=True)
    assert named_by(str(run)) == (run, None)
    assert named_by(str(run / "checkpoints/20")) == (run, 20)


def test_checkpoints_of_another_folder(run, tmp_path):
    record = json.loads((run / "config.json").read_text())
    record["checkpoint"]["folder"] = str(tmp_path / "kept")
    (run / "config.json").write_text(json.dumps(record))
    (tmp_path / "kept/4").mkdir(parents=True)
    (run / "hf").mkdir()
    (run / "hf/config.json").write_text("{}")
    assert named_by(str(run)) == (run, None)
