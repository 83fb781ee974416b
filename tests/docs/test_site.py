"""The documentation as a site: built strictly, every page in its navigation, nothing of it loaded from elsewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("material", reason='pip install -e ".[docs]"')

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The folder of the built site; a broken link, or a page without a place in the navigation, ends the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", f"--site-dir={folder}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_there(site):
    pages = {path.with_suffix(".html").name for path in (ROOT / "docs").glob("*.md")}
    assert pages | {"readme.html", "changelog.html", "contributing.html", "security.html"} <= {
        path.name for path in site.glob("*.html")
    }
    assert not (site / "hooks.py").exists()


def test_nothing_is_loaded_from_elsewhere(site):
    """Scripts, styles, fonts and pictures are files of the site, so that it reads offline and tells nobody."""
    for path in site.glob("*.html"):
        text = path.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?([^\"' >]+)", text)
        loaded += re.findall(r"<link\b(?![^>]*rel=[\"']?canonical)[^>]*\bhref=[\"']?([^\"' >]+)", text)
        assert loaded and not [address for address in loaded if address.startswith(("http", "//"))], path.name
        assert 'data-md-component="source"' not in text, "it asks GitHub's API for the number of stars"


def test_links_hold_in_the_site(site):
    """To pages they are relative; to files of the repository they lead there."""
    index = (site / "index.html").read_text(encoding="utf-8")
    assert 'href="tutorial.html"' in index and 'href="readme.html"' in index
    assert "/blob/main/notebooks/inside_grpo.ipynb" in index
    readme = (site / "readme.html").read_text(encoding="utf-8")
    assert 'href="results.html"' in readme and 'href="docs/' not in readme


def test_tables_after_the_marks_of_benchmarks_are_tables(site):
    for name in ("plan", "gpu_sizes", "performance", "rewards", "data"):
        text = (site / f"{name}.html").read_text(encoding="utf-8")
        body = re.sub(r"<(pre|code)\b.*?</\1>", "", text[text.index("<article") :], flags=re.DOTALL)
        assert "<table>" in body and "|---" not in body, name
