"""docs/data.md: every block runs, and the table of formats is that of format_table.py."""

import contextlib
import io
import os
import re
import shlex
import shutil

import pytest

from jaxrl_llm.commands.preview import main
from tests.data.format_table import MARKS, table


@pytest.fixture
def page(root):
    return (root / "docs" / "data.md").read_text(encoding="utf-8")


def test_the_table_of_formats(page):
    shown = page.partition(MARKS[0])[2].partition(MARKS[1])[0]
    assert shown == table(), "run python tests/data/format_table.py"


def test_every_code_block_runs(page, root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    shutil.copytree(root / "configs", tmp_path / "configs")
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 8
    for language, block in blocks:
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            if language == "sh":
                for line in block.splitlines():
                    words = shlex.split(line)
                    assert words[:4] == ["python", "-m", "jaxrl_llm", "preview"]
                    main(words[4:])
            else:
                assert language == "python"
                exec(compile(block, "docs/data.md", "exec"), {"__name__": "docs"})
        assert output.getvalue().strip(), f"nothing was printed by{os.linesep}{block}"
