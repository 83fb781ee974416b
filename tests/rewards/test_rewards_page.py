"""docs/rewards.md: every example runs, and the table is the code's."""

import re
import sys

import pytest

from jaxrl_llm.rewards.built_in import table
from tests.conftest import ROOT
from tests.rewards.judge_server import JudgeServer

PAGE = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
EXAMPLES = [
    (section.split("\n")[0], block)
    for section in PAGE.split("\n## ")[1:]
    for _, block in re.findall(r"^(`{3,})python\n(.*?)^\1$", section, re.DOTALL | re.MULTILINE)
]


@pytest.mark.parametrize(("heading", "block"), EXAMPLES, ids=[heading for heading, _ in EXAMPLES])
def test_examples_run(heading, block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with JudgeServer(lambda body: '{"right": 5, "clear": 3}') as server:
        block = block.replace("http://localhost:8000/v1", server.url)
        exec(compile(block, heading, "exec"), {"__name__": "example"})


def test_every_starting_point_has_an_example():
    headings = [section.split("\n")[0] for section in PAGE.split("\n## ")[1:]]
    starts = [heading for heading in headings if heading.startswith("You ")]
    assert len(starts) >= 8 and set(starts) == {heading for heading, _ in EXAMPLES}


def test_the_table_is_the_codes():
    assert PAGE.endswith("<!-- built-in rewards -->\n" + table()), (
        "write the end of docs/rewards.md with: python -m jaxrl_llm.rewards.built_in"
    )
