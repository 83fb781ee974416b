"""docs/python.md and docs/agents.md: what they show of Python runs as it stands."""

import re

import pytest

import jaxrl_llm
from tests.conftest import ROOT


def blocks(page: str) -> list[str]:
    """The blocks of Python of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.slow
def test_objects_in_place_of_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "example"}
    for block in blocks("python.md"):
        exec(compile(block, "python.md", "exec"), names)
    assert {"rewards/length/mean", "rewards/exact_match/mean"} <= names["first"].metrics[-1].keys()
    second = names["second"]
    assert "eval/accuracy" in second.metrics[-1] and (second.output_dir / "given.json").is_file()


@pytest.mark.slow
def test_an_agent_as_the_page_writes_it(tmp_path, monkeypatch):
    pytest.importorskip("openai")
    pytest.importorskip("uvicorn")
    monkeypatch.chdir(tmp_path)
    (code,) = (block for block in blocks("agents.md") if block.startswith("# my_agent.py\n"))
    (tmp_path / "my_agent.py").write_text(code, encoding="utf-8")
    config = jaxrl_llm.default_config()
    config.environment.agent, config.rewards.functions = "my_agent.py:run", ("environment",)
    config.data.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    config.total_steps, config.eval.every = 2, -1
    config.batch.prompts, config.rollout.group_size, config.logging.backends = 2, 2, ("jsonl",)
    config.rollout.max_prompt_length, config.rollout.max_completion_length = 32, 64
    for line in jaxrl_llm.train(config).metrics:
        assert line["environment/calls"] == 2 and line["environment/failures"] == 0
