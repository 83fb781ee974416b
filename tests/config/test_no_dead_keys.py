"""Every key of the configuration is read somewhere in the package: a setting without effect is a lie."""

import ast
import functools
from pathlib import Path

from jaxrl_llm.config.schema import KEYS, SECTIONS

ROOT = Path(__file__).parent.parent.parent / "jaxrl_llm"
# Checks of settings are no reading of them; corrections.py has the effect of the preset that it writes out.
FILES = [x for x in ROOT.rglob("*.py") if ROOT / "config" not in x.parents or x.name == "corrections.py"]


@functools.cache
def fields_of_classes() -> dict[str, set[str]]:
    """The annotated names of the classes of modules, which are the fields of a spec."""
    classes = [node for path in FILES for node in parse(path).body if isinstance(node, ast.ClassDef)]
    return {
        node.name: {x.target.id for x in node.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)}
        for node in classes
    }


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def read_keys(tree: ast.AST) -> set[str]:
    """The keys `a.b` that code reads, as `config.a.b`, through `a = config.a`, or from an argument `a: ConfigDict`; and
    those of `spec_of(Spec, config.a, ...)`: the fields of that class that it is not given otherwise."""
    # A name such as `c` stands for another section in each function, so each is read by itself.
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return set().union(*(keys_of_scope(list(ast.walk(scope))) for scope in (tree, *functions)))


def keys_of_scope(nodes: list[ast.AST]) -> set[str]:
    """The keys read in the nodes of a module or function, nested functions included."""
    found, sections = set(), section_names(nodes)
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            if is_config(node.value):
                found.add(node.attr)
            elif section := section_of(node.value, sections):
                found.add(f"{section}.{node.attr}")
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "spec_of":
            kind, section = ast.unparse(node.args[0]), section_of(node.args[1], sections)
            given = {keyword.arg for keyword in node.keywords}
            found |= {f"{section}.{field}" for field in fields_of_classes()[kind] - given}
    return found


def section_names(nodes: list[ast.AST]) -> dict[str, str]:
    """The section of each variable that is assigned from `config.<section>` or is an argument of that name."""
    names = {}
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                many = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                pairs = zip(target.elts, node.value.elts, strict=False) if many else [(target, node.value)]
                for name, value in pairs:
                    if isinstance(name, ast.Name) and (section := section_of(value, {})):
                        names[name.id] = section
        elif isinstance(node, ast.arg) and node.arg in SECTIONS and is_config_dict(node.annotation):
            names[node.arg] = node.arg
    return names


def is_config_dict(annotation: ast.expr | None) -> bool:
    return annotation is not None and "ConfigDict" in ast.unparse(annotation)


def section_of(node: ast.AST, names: dict[str, str]) -> str | None:
    """The section an expression stands for, or None."""
    if isinstance(node, ast.Attribute) and node.attr in SECTIONS and is_config(node.value):
        return node.attr
    return names.get(node.id) if isinstance(node, ast.Name) else None


def is_config(node: ast.AST) -> bool:
    """True for `config` and `<anything>.config`."""
    return getattr(node, "attr", getattr(node, "id", None)) == "config"


def test_every_key_is_read():
    read = set().union(*(read_keys(parse(path)) for path in FILES))
    dead = [key.name for key in KEYS if key.name not in read]
    assert not dead, f"no code reads config.<key> of these {len(dead)} keys: {', '.join(dead)}"


def test_ways_to_read_a_key():
    assert "rollout.top_p" in read_keys(ast.parse("f(config.rollout.top_p)"))
    assert "rollout.top_p" in read_keys(ast.parse("f(self.config.rollout.top_p)"))
    assert "rollout.top_p" in read_keys(ast.parse("r = config.rollout\nf(r.top_p)"))
    assert "rollout.top_p" in read_keys(ast.parse("r, b = config.rollout, config.batch\nf(r.top_p)"))
    assert "rollout.top_p" in read_keys(ast.parse("def f(rollout: ConfigDict):\n    return rollout.top_p"))
    two = "def f():\n    c = config.model\n    return c.path\ndef g():\n    c = config.rollout\n    return c.top_p"
    assert {"model.path", "rollout.top_p"} <= read_keys(ast.parse(two))
    assert "seed" in read_keys(ast.parse("f(config.seed)"))
    made = read_keys(ast.parse("spec_of(OptimizerSpec, config.optimizer, b2=1)"))
    assert "optimizer.b1" in made
    assert "optimizer.b2" not in made


def test_what_is_no_reading_of_a_key():
    assert not read_keys(ast.parse("batch.prompts + other.rollout.top_p"))
    assert "rollout.top_p" not in read_keys(ast.parse("config.rollout.top_p = 1"))
    assert "rollout.top_p" not in read_keys(ast.parse("'config.rollout.top_p'"))
