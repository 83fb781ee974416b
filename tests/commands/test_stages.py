"""Stages that start from each other's models, in one command that goes on where it was."""

import json

import pytest

from jaxrl_llm.commands.stages import is_finished, load_stages, run_stages
from jaxrl_llm.config import ConfigError


@pytest.mark.slow
def test_three_stages_and_going_on(root, tmp_path):
    def stages():
        found = load_stages(f"{root / 'configs/rlhf.py'}:tiny", tmp_path)
        for config in found.values():
            config.eval.every, config.logging.backends = -1, ("jsonl",)
        return found

    first = stages()
    assert not any(is_finished(config) for config in first.values())
    assert list(run_stages(first)) == ["sft", "reward_model", "ppo"]
    lines = [json.loads(line) for line in (tmp_path / "ppo/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["objective/scores"] == pytest.approx(lines[0]["rewards/reward_model/mean"], rel=1e-5)
    assert run_stages(stages()) == {}
    longer = stages()
    longer["ppo"].total_steps = 3
    done = run_stages(longer)
    assert list(done) == ["ppo"]
    assert [line["step"] for line in done["ppo"].metrics] == [3]


def test_files_without_stages(root, tmp_path):
    with pytest.raises(ConfigError, match=r"has no function get_stages\(folder\)"):
        load_stages(str(root / "configs/grpo.py"), tmp_path)
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def get_stages(folder):\n    return [folder]\n")
    with pytest.raises(ConfigError, match="must return a dict of configurations"):
        load_stages(str(wrong), tmp_path)
