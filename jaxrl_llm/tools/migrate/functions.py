"""The functions that a script defines for a run, copied to a file of their own, which does not train when imported."""

import ast
import builtins
import copy
import textwrap
from collections.abc import Callable
from pathlib import Path

from jaxrl_llm.config.resolve import ConfigError

MARK = '"""Functions that `jaxrl_llm migrate` wrote."""'
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
DEFINITION = FUNCTION | ast.ClassDef
GROWS = ("append", "extend", "insert", "update", "setdefault")
LOADS = ("load_dataset", "load_from_disk")
RUNS = (
    "Trainer", "Config", "parse_args", "parse_args_and_config", "parse_args_into_dataclasses", "parse_known_args",
)  # fmt: skip


class Functions:
    """Chosen functions of a script with all that they read: other functions, classes, constants and imports."""

    def __init__(self, tree: ast.Module, text: str, file: str):
        self.text, self.file = text, file
        self.definitions: dict[str, DEFINITION] = {}
        self.statements: dict[str, ast.stmt] = {}  # what defines a name, wherever it stands
        self.chosen: dict[str, str] = {}  # name -> its source, in the order of use
        self.imports: dict[str, str] = {}
        self.missing: dict[str, list[str]] = {}
        self.grown: set[str] = set()  # lists and dictionaries that statements add to
        methods = {id(part) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for part in node.body}
        for node in ast.walk(tree):
            if isinstance(node, DEFINITION) and id(node) not in methods:
                self.definitions.setdefault(node.name, node)
                self.statements.setdefault(node.name, node)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in GROWS:
                self.grown.add(ast.unparse(node.func.value))
            elif isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    self.statements.setdefault(alias.asname or alias.name.partition(".")[0], node)
            elif isinstance(node, ast.Assign | ast.AnnAssign) and id(node) not in methods:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name):
                        self.statements[target.id] = node

    def add(self, node: ast.expr) -> str | None:
        """Choose a function, by its name or as an expression that makes one; return its name for a configuration.

        None where it reads names that the script does not define for itself.
        """
        if isinstance(node, ast.Name):
            if node.id not in self.statements or isinstance(self.statements[node.id], ast.Import | ast.ImportFrom):
                return None
            missing = self._take(node.id)
            if missing and node.id not in self.definitions:
                return None
            if missing:
                self.missing[node.id] = sorted(set(missing))
            return f"{self.file}:{node.id}"
        if not isinstance(node, ast.Call | ast.Lambda | ast.Dict | ast.Attribute) or self._wanting(node):
            return None
        name = f"made_{len(self.chosen) + 1}"
        for part in self._free(node):
            self._take(part)
        self.chosen[name] = f"{name} = {ast.unparse(node)}"
        return f"{self.file}:{name}"

    def add_text(self, node: ast.expr, rows: str | None) -> str:
        """Choose the format of rows of text that a function `node` of a row makes, or of what the chosen function
        `rows` makes of it; return its name for a configuration."""
        row = ast.Name("row") if rows is None else ast.Call(ast.Name(rows.rpartition(":")[2]), [ast.Name("row")], [])
        if missing := [name for part in sorted(self._free(node)) for name in self._take(part)]:
            self.missing["text_of"] = sorted(set(missing))
        self.chosen["text_of"] = f'def text_of(row):\n    return {{"text": {ast.unparse(ast.Call(node, [row], []))}}}'
        return f"{self.file}:text_of"

    def add_rows(self, name: str, node: ast.expr, lookup: Callable[[ast.Name], ast.expr | None]) -> str | None:
        """Choose a function `name` that gives the rows of an expression, and return its name for a configuration.

        What the expression reads by name and calls make, as `lookup` has it, is made in the function, not where the
        file is imported. None where the expression reads names that the script does not define for itself, or fills in
        a loop, and where it draws a part of the rows, which would be another each time.
        """

        statements = self.statements

        class Inlined(ast.NodeTransformer):
            def visit_Name(self, node: ast.Name) -> ast.expr:
                value = lookup(node) if node.id in statements else None  # of several names one is none of its own
                made = isinstance(value, ast.Call | ast.Subscript | ast.Name | ast.ListComp)
                return self.visit(copy.deepcopy(value)) if made else node

        try:
            made = Inlined().visit(copy.deepcopy(node))
        except RecursionError:  # a name that stands for itself
            return None
        if self._wanting(made) or self._free(made) & self.grown or _calls(made, (*RUNS, "train_test_split")):
            return None
        for part in sorted(self._free(made)):
            self._take(part)
        if name in self.chosen:
            name = f"{name}_{len(self.chosen)}"
        self.chosen[name] = f"def {name}():\n    return {ast.unparse(made)}"
        return f"{self.file}:{name}"

    def source(self) -> str:
        """Return the text of the file; empty without a function."""
        if not self.chosen:
            return ""
        imports = sorted(set(self.imports.values()), key=lambda line: (line.startswith("from"), line))
        return "\n\n\n".join(filter(None, ("\n".join(imports), *self.chosen.values())))

    def _wanting(self, node: ast.AST, seen: frozenset[str] = frozenset()) -> list[str]:
        """Return the names that a node reads, itself or by others, and the script does not define for itself."""
        missing = []
        for name in self._free(node) - seen:
            statement = self.statements.get(name)
            if statement is None or self._made_by_running(name, statement):
                missing.append(name)
            elif not isinstance(statement, ast.Import | ast.ImportFrom):
                missing += self._wanting(statement, seen | {name})
        return missing

    def _take(self, name: str) -> list[str]:
        """Choose what defines a name, after what that reads; return the names that are not defined."""
        if name in self.chosen or name in self.imports:
            return []
        statement = self.statements.get(name)
        if statement is None or self._made_by_running(name, statement):
            return [name]
        if isinstance(statement, ast.Import | ast.ImportFrom):
            alias = next(a for a in statement.names if name in (a.asname, a.name.partition(".")[0]))
            short = ast.Import([alias])
            if isinstance(statement, ast.ImportFrom):
                short = ast.ImportFrom(statement.module, [alias], statement.level)
            self.imports[name] = ast.unparse(short)
            return []
        self.chosen[name] = ""  # a function may read itself
        missing = [other for part in sorted(self._free(statement) - {name}) for other in self._take(part)]
        del self.chosen[name]
        if missing and name not in self.definitions:  # a value that cannot be made stops the whole file
            return [name]
        self.chosen[name] = self._source(statement)
        return missing

    def _made_by_running(self, name: str, statement: ast.stmt) -> bool:
        """Return True for a name whose statement loads or trains, or reads what earlier ones made of the name."""
        if not isinstance(statement, ast.Assign):
            return False
        return _calls(statement.value, (*RUNS, *LOADS)) or name in self._free(statement.value)

    def _source(self, node: ast.stmt) -> str:
        first = min([node.lineno, *(line.lineno for line in getattr(node, "decorator_list", ()))])
        lines = "\n".join(self.text.splitlines()[first - 1 : node.end_lineno])
        several = any(isinstance(part, ast.Constant) and "\n" in str(part.value) for part in ast.walk(node))
        if node.col_offset and (several or ";" in lines):  # a text of several lines would lose its indentation
            return ast.unparse(node)
        return textwrap.dedent(lines)

    def _free(self, node: ast.AST) -> set[str]:
        """Return the names that a node reads and does not bind itself; annotations and builtins aside."""
        read, bound = set(), set(dir(builtins))
        for part in ast.walk(node):
            if isinstance(part, ast.Name):
                (read if isinstance(part.ctx, ast.Load) else bound).add(part.id)
            elif isinstance(part, ast.arg):
                bound.add(part.arg)
            elif isinstance(part, DEFINITION | ast.ExceptHandler):
                bound.add(str(part.name))
            elif isinstance(part, ast.Import | ast.ImportFrom):
                bound |= {alias.asname or alias.name.partition(".")[0] for alias in part.names}
        return read - bound


def _calls(node: ast.AST, names: tuple[str, ...]) -> bool:
    """Return True for an expression that calls something whose name ends like one of `names`."""
    called = (part.func for part in ast.walk(node) if isinstance(part, ast.Call))
    return any(getattr(function, "attr", getattr(function, "id", "")).endswith(names) for function in called)


def public_functions(file: Path) -> list[str]:
    """Return the names of the functions that a file defines, without those that begin with `_`, sorted."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    return sorted(node.name for node in body if isinstance(node, FUNCTION) and not node.name.startswith("_"))


def write(text: str, path: Path) -> None:
    """Write a file of functions; nothing where there are none. Raises ConfigError rather than replace another file."""
    if not text:
        return
    text = f"{MARK}\n\n{text}"
    if path.exists() and not path.read_text(encoding="utf-8").startswith(MARK):
        raise ConfigError(f"{path} is there already; rename it, or write the config under another name with --output")
    try:
        path.write_text(text.rstrip() + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the functions cannot be written to {path} ({error}): choose a folder with --output"
        ) from error
