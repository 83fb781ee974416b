"""The layers of the package, proved from its import statements, and the source rules that no test of behaviour sees."""

import ast
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

PACKAGE = "jaxrl_llm"
ROOT = Path(__file__).parent.parent / PACKAGE
FILES = sorted(ROOT.rglob("*.py"))

LAYERS = {
    "algorithms": 0,
    "config": 0,
    "models": 1,
    "distributed": 1,
    "rollout": 2,
    "data": 3,
    "rewards": 3,
    "environments": 3,
    "training": 4,
    "serving": 4,
    "tools": 5,
    "commands": 6,
    "train": 6,
    "__main__": 6,
    PACKAGE: 6,  # what it exports is imported lazily
}
# The oracles of the tests; the package never needs them.
FORBIDDEN = {"torch", "trl", "peft", "accelerate", "vllm", "pytest"}
# What reads files, the network or a configuration has no place among the pure functions of the ground floor.
FORBIDDEN_IN_ALGORITHMS = {
    "transformers",
    "datasets",
    "grain",
    "orbax",
    "ml_collections",
    "os",
    "pathlib",
    "io",
    "rich",
}


def part(module: str) -> str:
    """`jaxrl_llm.data.templates` -> `data`; the package itself -> `jaxrl_llm`."""
    pieces = module.split(".")
    return pieces[1] if len(pieces) > 1 else pieces[0]


def module_name(path: Path) -> str:
    pieces = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(pieces[:-1] if pieces[-1] == "__init__" else pieces)


def imports(tree: ast.AST) -> Iterable[str]:
    """The full names of all imported modules, those inside functions too; a relative import starts with a dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            if base == PACKAGE:
                for alias in node.names:
                    is_module = (ROOT / alias.name).is_dir() or (ROOT / f"{alias.name}.py").is_file()
                    yield f"{base}.{alias.name}" if is_module else base
            else:
                yield base


def import_fault(importer: str, imported: str) -> str | None:
    """Why the module `importer` may not import `imported`, or None when it may."""
    if imported.startswith("."):
        return "relative import: write the full name"
    top = imported.split(".")[0]
    above, here = part(importer), part(imported)
    if top != PACKAGE:
        if top in FORBIDDEN or (above == "algorithms" and top in FORBIDDEN_IN_ALGORITHMS):
            return f"{top} is not for {above}"
        return None
    if here == "config":
        return "the ground floor knows no configuration" if above == "algorithms" else None
    if above == "config":
        return None if here == "algorithms" else "the configuration imports its own floor alone"
    upper, lower = LAYERS[above], LAYERS[here]
    if upper == 3 and not (above == here or lower == 0):
        return f"{above} (layer 3) imports layer 0 only"
    if above == PACKAGE:  # its interface is imported lazily
        return None
    if lower > upper:
        return f"{above} (layer {upper}) imports {here} (layer {lower})"
    return None


def source_faults(path: Path, tree: ast.AST) -> list[str]:
    """`file:line: fault` for each line that breaks the alignment rule or the layout rule."""
    faults = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and path.name != "logprobs.py" and is_shift(node):
            faults.append(f"{path}:{node.lineno}: {ast.unparse(node)} shifts tokens; only logprobs.py does")
        if isinstance(node, ast.Compare) and is_padding_comparison(node):
            faults.append(f"{path}:{node.lineno}: {ast.unparse(node)}; padding is segment 0, whatever the token")
    return faults


def is_shift(node: ast.Subscript) -> bool:
    """True for `x[:, 1:]` and `x[:, :-1]`, with more axes after them or not."""
    axes = node.slice.elts if isinstance(node.slice, ast.Tuple) else []
    slices = [ast.unparse(axis).replace(" ", "") for axis in axes]
    return len(slices) > 1 and slices[0] == ":" and slices[1] in ("1:", ":-1")


def is_padding_comparison(node: ast.Compare) -> bool:
    """True for `tokens != pad_id`, `ids == tokenizer.pad_token_id` and the like."""
    names = [getattr(side, "attr", getattr(side, "id", "")) for side in (node.left, *node.comparators)]
    is_equality = any(isinstance(operator, ast.Eq | ast.NotEq) for operator in node.ops)
    return is_equality and any(re.fullmatch(r"(.*_)?pad(_token)?(_id)?", name, re.IGNORECASE) for name in names)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def test_every_file_has_a_layer():
    parts = {part(module_name(path)) for path in FILES}
    assert parts <= LAYERS.keys(), "add the new part to LAYERS"
    assert {"algorithms", "config"} <= parts, "the package was not found"


def test_imports_go_down_only():
    faults = [
        f"{module_name(path)} -> {imported}: {fault}"
        for path in FILES
        for imported in imports(parse(path))
        if (fault := import_fault(module_name(path), imported))
    ]
    assert not faults, "\n".join(faults)


def test_no_files_import_each_other_in_a_circle():
    """Imports inside functions and of types alone count; the package's own interface is imported lazily."""
    modules = {module_name(path): path for path in FILES}
    arrows = {name: edges(name, ast.walk(parse(path)), modules) for name, path in modules.items() if name != PACKAGE}
    while leaves := [name for name, targets in arrows.items() if not targets & arrows.keys()]:
        for name in leaves:
            del arrows[name]
    assert not arrows, f"in circles, or above one: {sorted(arrows)}"


def edges(name: str, nodes: Iterable[ast.AST], modules: dict[str, Path]) -> set[str]:
    """The modules of the package that a module imports by these statements."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {x if x in modules else node.module for x in full}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return (found & modules.keys()) - {name}


def test_every_command_is_imported_without_extras():
    """Where the tests run all extras are installed, so that no import of theirs fails."""
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [wanted for packages in project["optional-dependencies"].values() for wanted in packages]
    names = [{re.split(r"[^\w-]", wanted)[0].replace("-", "_") for wanted in wants}
             for wants in (extras, project["dependencies"])]  # fmt: skip
    optional = names[0] - names[1]
    assert {"starlette", "uvicorn", "matplotlib"} <= optional
    modules = {module_name(path): path for path in FILES}
    waiting = [name for name in modules if part(name) in ("commands", "train", "__main__")]
    reached, faults = set(waiting), []
    while waiting:
        name = waiting.pop()
        module = parse(modules[name])
        faults += [f"{name} imports {x}" for node in module.body if isinstance(node, ast.Import | ast.ImportFrom)
                   for x in imports(node) if x.split(".")[0] in optional]  # fmt: skip
        found = edges(name, module.body, modules) - reached
        reached |= found
        waiting += found
    assert f"{PACKAGE}.training.rollouts.agent_rollout" in reached
    assert not faults


def test_training_does_not_import_tools():
    above = [path for path in FILES if part(module_name(path)) in ("training", "rollout", "models", "data", "rewards")]
    assert not [path for path in above if any(".tools" in name for name in imports(parse(path)))]


def test_serving_and_training_stand_beside_each_other():
    """Agents are trained through an endpoint: one file of training opens it, and serving knows no training."""
    for room, other, allowed in (("training", "serving", ["agent_rollout.py"]), ("serving", "training", [])):
        files = [path for path in FILES if part(module_name(path)) == room]
        assert files
        assert [path.name for path in files if any(f".{other}" in name for name in imports(parse(path)))] == allowed


def test_the_root_holds_the_loop_and_rooms():
    files = {path.name for path in ROOT.iterdir() if path.is_file()}
    assert files <= {"__init__.py", "__main__.py", "train.py", "py.typed"}


def test_alignment_and_layout_rules():
    faults = [fault for path in FILES for fault in source_faults(path.relative_to(ROOT.parent), parse(path))]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("importer", "statement"),
    [
        ("algorithms.kl", "from jaxrl_llm.config import ConfigError"),
        ("algorithms.kl", "import jaxrl_llm.models.logprobs"),
        ("algorithms.kl", "from transformers import AutoTokenizer"),
        ("models.hf", "from jaxrl_llm import rollout"),
        ("rollout.engine", "def f():\n    from jaxrl_llm.training.update import update"),
        ("data.templates", "from jaxrl_llm.rewards.runner import Rewards"),
        ("rewards.runner", "from jaxrl_llm.models import hf"),
        ("training.update", "from jaxrl_llm import train"),
        ("training.update", "from jaxrl_llm import __version__"),
        ("config", "from jaxrl_llm.models import hf"),
        ("config", "from jaxrl_llm import train"),
        ("models.logprobs", "import torch.nn"),
        ("models.logprobs", "from . import rope"),
    ],
)
def test_forbidden_imports_are_seen(importer, statement):
    assert any(import_fault(f"{PACKAGE}.{importer}", imported) for imported in imports(ast.parse(statement)))


@pytest.mark.parametrize(
    ("importer", "statement"),
    [
        ("algorithms.kl", "from jaxrl_llm.algorithms import aggregation"),
        ("config.checks.values", "from jaxrl_llm.algorithms import advantages"),
        (
            "rollout.engine",
            "from jaxrl_llm.models.logprobs import token_logps\nfrom jaxrl_llm.config import ConfigError",
        ),
        ("data.templates", "from jaxrl_llm.data import tokenize\nfrom jaxrl_llm.algorithms.batch import Batch"),
        ("training.online", "from jaxrl_llm import rewards, rollout, data"),
        ("train", "from jaxrl_llm.config.flags import run"),
    ],
)
def test_allowed_imports_pass(importer, statement):
    assert not any(import_fault(f"{PACKAGE}.{importer}", imported) for imported in imports(ast.parse(statement)))


@pytest.mark.parametrize(
    "line", ["x[:, 1:]", "x[:, :-1, :]", "tokens != pad_id", "mask = ids == tokenizer.pad_token_id", "0 != PAD"]
)
def test_broken_rules_are_seen(line):
    assert source_faults(Path("rollout/engine.py"), ast.parse(line))


@pytest.mark.parametrize(
    "line", ["x[:, 1]", "x[..., :-1]", "x[1:]", "x[:, 1:3]", "segments != 0", "pad_id > vocabulary"]
)
def test_kept_rules_pass(line):
    assert not source_faults(Path("rollout/engine.py"), ast.parse(line))


def test_logprobs_may_shift_but_not_compare_with_padding():
    assert not source_faults(Path("logprobs.py"), ast.parse("x[:, 1:]"))
    assert source_faults(Path("logprobs.py"), ast.parse("tokens != pad_id"))
