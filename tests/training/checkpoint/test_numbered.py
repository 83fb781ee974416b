"""`{new}` in output_dir: a folder of its own for each start."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import jaxrl_llm
from jaxrl_llm.config import ConfigError, default, validate
from jaxrl_llm.config.flags import load_flags
from jaxrl_llm.training.checkpoint.outputs import numbered

ROWS = [{"prompt": f"sort:{n}=", "completion": "".join(sorted(str(n)))} for n in range(100, 108)]


def test_the_first_free_number_is_taken(tmp_path):
    name = str(tmp_path / "runs" / "{new}-grpo")
    assert [numbered(name) for _ in range(3)] == [str(tmp_path / "runs" / f"{n}-grpo") for n in (1, 2, 3)]
    (tmp_path / "runs" / "2-grpo").rmdir()
    (tmp_path / "runs" / "4-grpo").touch()  # a file is no folder to take
    assert [Path(numbered(name)).name for _ in range(2)] == ["2-grpo", "5-grpo"]
    named = str(tmp_path / "named")
    assert numbered(named) == named and not (tmp_path / "named").exists()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"output_dir .*file/run-\{new\} cannot be made: .*; set another"):
        numbered(str(tmp_path / "file" / "run-{new}"))


def test_starts_at_once_share_no_folder(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(numbered, [str(tmp_path / "run-{new}")] * 64))
    assert len(set(taken)) == 64 and {Path(folder).name for folder in taken} == {f"run-{n + 1}" for n in range(64)}


def test_a_run_knows_its_folder(tmp_path):
    (tmp_path / "run-1").mkdir()
    config = default()
    config.algorithm.name, config.total_steps, config.batch.prompts = "sft", 0, 8
    config.output_dir, config.logging.backends = str(tmp_path / "run-{new}"), ("jsonl",)
    folder = jaxrl_llm.train(config, ROWS).output_dir
    assert folder == tmp_path / "run-2" and (folder / "hf" / "config.json").is_file()
    assert json.loads((folder / "config.json").read_text())["output_dir"] == str(folder)
    assert config.output_dir == str(tmp_path / "run-{new}")  # what was given stays
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-1", "run-2"]


def test_flags_come_before_the_number(tmp_path):
    """It asks for devices, which the flags of their compiler come before; so what these refuse takes no number."""
    (tmp_path / "file").touch()
    config = default()
    config.algorithm.name, config.output_dir = "sft", str(tmp_path / "run-{new}")
    config.compilation_cache = str(tmp_path / "file" / "cache")
    with pytest.raises(ConfigError, match=r"compilation_cache: .* cannot be made"):
        jaxrl_llm.train(config, ROWS)
    assert not [*tmp_path.glob("run-*")]


def test_reading_flags_takes_no_number(tmp_path):
    load_flags([f"--config.output_dir={tmp_path}/run-{{new}}"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"output_dir": "runs-{new}/grpo"}, r"takes \{new\} once, in its last part: runs/grpo-\{new\}"),
        ({"output_dir": "{new}-{new}"}, r"takes \{new\} once"),
        ({"output_dir": "{new}", "checkpoint.folder": "/mnt/c"}, "checkpoint.folder = /mnt/c needs a folder that is"),
        ({"output_dir": "{new}", "rollout.processes": 1}, "rollout.processes = 1 needs a folder that is known"),
    ],
)
def test_where_it_cannot_stand(settings, words):
    config = default()
    config.update_from_flattened_dict(settings)
    with pytest.raises(ConfigError, match=words):
        validate(config)
