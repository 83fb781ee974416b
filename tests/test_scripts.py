"""Scripts that tests run in processes of their own, most of them slow, import what there is and call it as it is."""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

FILES = [path for path in sorted((ROOT / "tests").glob("*/**/*.py")) if '"-c"' in path.read_text(encoding="utf-8")]


def scripts(path: Path) -> Iterator[ast.Module]:
    """Yields what the strings of a file that import the package say, with `None` for all that is formatted in."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(x.value) if isinstance(x, ast.Constant) else "None" for x in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = re.sub(r"(?<!\{)\{\w+(!r)?\}(?!\})", "None", node.value)
            text = text.replace("{{", "{").replace("}}", "}") if text != node.value else text
        else:
            continue
        if re.search(r"^\s*(from|import) jaxrl_llm", text, re.MULTILINE):
            try:
                yield ast.parse(textwrap.dedent(text).strip())
            except SyntaxError:  # of a string's parts, which `walk` comes to as well
                continue


def check(script: ast.Module) -> None:
    found = {}
    for node in ast.walk(script):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxrl_llm"):
            module = importlib.import_module(node.module)
            for name in node.names:
                if name.name != "*" and not hasattr(module, name.name):
                    importlib.import_module(f"{node.module}.{name.name}")
                found[name.asname or name.name] = getattr(module, name.name, None)
    for node in ast.walk(script):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not found.get(node.func.id):
            continue
        keywords = {x.arg: x.value for x in node.keywords}
        if None not in keywords and not any(isinstance(x, ast.Starred) for x in node.args):
            inspect.signature(found[node.func.id]).bind(*node.args, **keywords)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT / "tests").as_posix())
def test_scripts_import_and_call_what_there_is(path):
    for script in scripts(path):
        check(script)


@pytest.mark.parametrize(
    "line", ["from jaxrl_llm.config import defaults", "from jaxrl_llm.config import default\ndefault(config)"]
)
def test_others_are_found(line):
    with pytest.raises((ImportError, TypeError)):
        check(ast.parse(line))
