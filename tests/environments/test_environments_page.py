"""docs/environments.md: every example runs."""

import re

import pytest

from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
EXAMPLES = [
    (section.split("\n")[0], block)
    for section in PAGE.split("\n## ")[1:]
    for block in re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
]


@pytest.mark.slow
@pytest.mark.parametrize(("heading", "block"), EXAMPLES, ids=[heading for heading, _ in EXAMPLES])
def test_examples_run(heading, block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, heading, "exec"), {"__name__": "example"})
    assert capsys.readouterr().out.strip()


def test_the_page_has_examples():
    assert len(EXAMPLES) == 5
