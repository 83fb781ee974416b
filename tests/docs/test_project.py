"""What stands around the package: its metadata, the wheel, workflows, templates, and the versions that they name."""

import datetime
import importlib.util
import re
import tomllib
import zipfile
from pathlib import Path
from urllib.parse import urlparse

import pytest
import yaml

import jaxrl_llm

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TOOLS = {"pip", "grep", *(re.split(r"[>=<\[]", name)[0] for name in PROJECT["optional-dependencies"]["dev"]), "mkdocs"}


def read_yaml(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_address_is_one():
    """That of pyproject.toml; the notebooks' are compared in test_notebooks.py."""
    for name, address in PROJECT["urls"].items():
        parsed = urlparse(address)
        assert parsed.scheme == "https" and parsed.netloc and not parsed.query, name
    owner, name = urlparse(REPOSITORY).path.strip("/").split("/")
    assert name == PROJECT["name"]
    known = (REPOSITORY, f"https://{owner}.github.io/{name}/", "https://colab.research.google.com")
    pages = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "notebooks").glob("*.py"),
        ROOT / "CITATION.cff",
    ]
    for page in pages:
        for address in re.findall(r"https://[^\s)\"'`>]*jaxrl[^\s)\"'`>]*", page.read_text(encoding="utf-8")):
            assert address.startswith(known), f"{page.name}: {address}"
    assert all(PROJECT["urls"][key].startswith(known) for key in PROJECT["urls"])


def test_the_citation_is_of_this_version():
    citation = read_yaml(ROOT / "CITATION.cff")
    assert citation["version"] == jaxrl_llm.__version__
    assert citation["license"] == PROJECT["license"] and citation["repository-code"] == REPOSITORY
    dated = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert dated[0] == (jaxrl_llm.__version__, str(citation["date-released"]))
    assert datetime.date.fromisoformat(dated[0][1])


def test_the_changelog_has_a_place_for_what_comes():
    sections = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sections[0] == "Unreleased"


def test_the_wheel_is_typed(tmp_path):
    """It holds py.typed, the configs and the embedded model, and no tests."""
    pytest.importorskip("hatchling", reason='pip install -e ".[dev]"')
    from hatchling.builders.wheel import WheelBuilder

    (path,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = zipfile.ZipFile(path).namelist()
    assert {"jaxrl_llm/py.typed", "jaxrl_llm/configs/grpo.py", "jaxrl_llm/train.py"} <= set(names)
    assert any(name.endswith("model.safetensors") for name in names)
    assert not [name for name in names if name.startswith(("tests", "docs", "configs"))]
    metadata = next(name for name in names if name.endswith("METADATA"))
    assert f"Project-URL: Repository, {REPOSITORY}\n" in zipfile.ZipFile(path).read(metadata).decode()


def test_the_package_is_typed():
    assert (Path(jaxrl_llm.__file__).parent / "py.typed").is_file()
    assert "Typing :: Typed" in PROJECT["classifiers"]


def commands(workflow: dict) -> list[str]:
    """The command lines of a workflow's steps."""
    steps = (step for job in workflow["jobs"].values() for step in job["steps"])
    return [line for step in steps for line in step.get("run", "").splitlines()]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_what_exists(path):
    workflow = read_yaml(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert {"push", "pull_request"} <= set(workflow[True])  # YAML 1.1 reads `on` as a truth value
    lines = commands(workflow)
    assert lines
    for line in lines:
        program, *arguments = line.split()
        if program == "python":
            assert arguments[0] == "-m"
            assert importlib.util.find_spec(arguments[1]), line
        else:
            assert program in TOOLS, line
        for extras in re.findall(r"\.\[([\w,]+)\]", line):
            assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"]), line
        for file in re.findall(r"(?<= )(?:tests/|pyproject)\S*", line):
            assert (ROOT / file).exists(), line


def test_the_workflows_run_the_commands_of_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line for path in WORKFLOWS for line in commands(read_yaml(path))]
    assert "python -m pytest -n auto --dist worksteal" in lines and "mkdocs build --strict" in lines
    assert "-m pytest -n auto --dist worksteal" in readme


def test_what_pushes_leave_out_is_tested_at_night():
    """Slow tests, in parts that are all of them, and those that are skipped without packages of other extras."""
    workflow = read_yaml(ROOT / ".github" / "workflows" / "tests.yml")
    assert workflow[True]["schedule"]
    slow, optional = (workflow["jobs"][name] for name in ("slow", "optional"))
    assert {job["if"] for job in (slow, optional)} == {"github.event_name == 'schedule'"}
    assert commands({"jobs": {"": slow}})[-1] == "python -m pytest -m slow -n auto --dist worksteal ${{ matrix.part }}"
    *folders, rest = slow["strategy"]["matrix"]["part"]
    assert all((ROOT / folder).is_dir() for folder in folders)
    assert rest == " ".join(f"--ignore={folder}" for folder in folders)

    lines = commands({"jobs": {"": optional}})
    assert all('-m "slow or not slow"' in line for line in lines[1:])
    files, extras = " ".join(lines[1:]).split(), PROJECT["optional-dependencies"]

    def modules(names) -> tuple[str, ...]:
        return tuple(re.split(r"[>=<\[]", x)[0].replace("-", "_") for name in names for x in extras[name])

    installed, ordinary = modules(re.findall(r"\[([\w,]+)\]", lines[0])[0].split(",")), modules(("dev", "docs"))
    for path in (ROOT / "tests").rglob("test_*.py"):
        for package in re.findall(r'importorskip\("(\w+)', path.read_text(encoding="utf-8")):
            known = [name for name in modules(extras) if name.startswith(package) and name not in ordinary]
            if known:
                assert set(known) & set(installed), f"no job installs {package}"
                assert str(path.relative_to(ROOT)) in files, (
                    f"no job has {path.name}, which is skipped without {package}"
                )


def test_python_versions_are_tested():
    claimed = {item.rsplit(" ", 1)[1] for item in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", item)}
    text = (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
    assert claimed == set(re.findall(r'"(3\.\d+)"', text))


def test_issue_forms_are_forms():
    """With the fields that GitHub asks for: a name, a description, and a body of known elements with labels."""
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    for path in forms:
        form = read_yaml(path)
        if path.stem == "config":
            assert form == {"blank_issues_enabled": True}
            continue
        assert form["name"] and form["description"]
        for element in form["body"]:
            assert element["type"] in {"textarea", "checkboxes", "input", "dropdown"} and element["attributes"]["label"]
    assert len(forms) == 3


def test_links_of_the_pages_at_the_root():
    for page in ROOT.glob("*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert "://" in target or (ROOT / target).exists(), f"{page.name}: {target}"
