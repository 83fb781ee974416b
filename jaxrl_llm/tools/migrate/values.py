"""The values of a script's expressions, as far as its text tells them; nothing is run."""

import ast
import contextlib
import operator
from pathlib import Path
from typing import Any, NamedTuple

LOADERS = ("from_pretrained", "model")
SAME = ("spawn_train", "spawn_inference", "tp", "into_scoring_model", "to", "cuda", "get_peft_model")
ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
ENVIRONMENT = ("os.environ.get", "os.getenv", "environ.get", "getenv")
PLAIN = {"str": str, "int": int, "float": float, "bool": bool, "Path": str, "len": len}
METHODS = ("replace", "lower", "upper", "strip", "split", "rsplit", "format", "join", "removesuffix", "removeprefix")
MOST = 12  # names that stand for names


class Unknown(NamedTuple):
    """A value that only running the script would tell."""

    text: str


def call_name(call: ast.Call) -> str:
    """Return the last name of what is called."""
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


class Values:
    """The names of a script with what they stand for: values, imports, options of its command line."""

    def __init__(self, tree: ast.Module, path: str, flags: dict[str, Any]):
        self.flags = flags  # of the command that starts the script: they replace defaults
        self.read: list[str] = []  # options of the parser whose default was taken
        self.imported: dict[str, str] = {}
        self.values: dict[str, list[ast.expr]] = {}  # each name's values, in the order of the script
        self.options: dict[str, ast.expr | None] = {}  # of parsers and classes of arguments, with their defaults
        self.changed: list[tuple[str, str, ast.expr]] = []  # object.attribute = value
        for node in sorted(ast.walk(tree), key=lambda node: getattr(node, "lineno", 0)):
            if isinstance(node, ast.ImportFrom):
                module = str(Path(path).with_name(f"{node.module}.py")) if node.level else node.module
                for alias in node.names:
                    self.imported[alias.asname or alias.name] = f"{module}:{alias.name}"
            elif isinstance(node, ast.Assign):
                self._assign(node.targets[-1], node.value)
            elif isinstance(node, ast.AnnAssign) and node.value:
                self._assign(node.target, node.value)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = node.args.args[len(node.args.args) - len(node.args.defaults) :]
                for name, value in zip(names, node.args.defaults, strict=True):
                    self.values.setdefault(name.arg, []).append(value)
            elif isinstance(node, ast.ClassDef):
                for field in node.body:
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                        self.options[field.target.id] = _default(field.value)
            elif isinstance(node, ast.Call) and call_name(node) == "add_argument":
                names = [str(name.value).lstrip("-") for name in node.args if isinstance(name, ast.Constant)]
                given = {keyword.arg: keyword.value for keyword in node.keywords}
                dest = getattr(given.get("dest"), "value", max(names, key=len, default=""))
                action = getattr(given.get("action"), "value", "")
                unset = ast.Constant(action == "store_false") if "store_" in str(action) else None
                self.options[str(dest).replace("-", "_")] = given.get("default", unset)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for name, part in zip(target.elts, value.elts, strict=True):  # train, test = rows["train"], rows["test"]
                self._assign(name, part)
            return
        if isinstance(target, ast.Tuple):  # model, tokenizer = FastLanguageModel.from_pretrained(...)
            for index, name in enumerate(target.elts[1:], 1):
                part = ast.Subscript(value, ast.Constant(index), ast.Load())
                self._assign(name, ast.fix_missing_locations(ast.copy_location(part, value)))
            target = target.elts[0]
        if isinstance(target, ast.Name):
            self.values.setdefault(target.id, []).append(value)
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            self.changed.append((target.value.id, target.attr, value))

    def value(self, node: ast.expr, depth: int = 0) -> Any:
        """Return the value of an expression of constants, names of constants and options; `Unknown` otherwise."""
        unknown = Unknown(ast.unparse(node))
        if depth > MOST:
            return unknown

        def inner(child: ast.expr) -> Any:
            return self.value(child, depth + 1)

        match node:
            case ast.Constant():
                return node.value
            case ast.Name() if (value := self.lookup(node)) is not None:
                return inner(value)
            case ast.Await():
                return inner(node.value)
            case ast.Attribute(value=ast.Name(id="torch")):
                return node.attr
            case ast.Attribute() if node.attr in self.flags:
                return self.flags[node.attr]
            case ast.Attribute() if self.options.get(node.attr) is not None and isinstance(node.value, ast.Name):
                self.read.append(node.attr)
                return inner(self.options[node.attr])  # pyright: ignore[reportArgumentType]
            case ast.UnaryOp(op=ast.USub()) if isinstance(number := inner(node.operand), int | float):
                return -number
            case ast.UnaryOp(op=ast.Not()) if not isinstance(value := inner(node.operand), Unknown):
                return not value
            case ast.Dict():
                pairs = [(inner(key), inner(value)) for key, value in zip(node.keys, node.values, strict=True) if key]
                return {
                    key: getattr(value, "text", value) for key, value in pairs if not isinstance(key, Unknown | list)
                }
            case ast.List() | ast.Tuple():
                items = [inner(item) for item in node.elts]
                return unknown if any(isinstance(item, Unknown) for item in items) else items
            case ast.FormattedValue(conversion=-1):
                value, form = inner(node.value), inner(node.format_spec) if node.format_spec else ""
                with contextlib.suppress(TypeError, ValueError):  # of a form that the value does not take
                    return unknown if Unknown in map(type, (value, form)) else format(value, form)
            case ast.JoinedStr():
                parts = [inner(part) for part in node.values]
                return unknown if any(isinstance(part, Unknown) for part in parts) else "".join(parts)
            case ast.BoolOp():
                values = [inner(value) for value in node.values]
                if not any(isinstance(value, Unknown) for value in values):
                    stops = isinstance(node.op, ast.Or)
                    return next((value for value in values[:-1] if bool(value) == stops), values[-1])
            case ast.IfExp() if not isinstance(test := inner(node.test), Unknown):
                return inner(node.body if test else node.orelse)
            case ast.BinOp() if type(node.op) in ARITHMETIC:
                left, right = inner(node.left), inner(node.right)
                numbers = isinstance(left, int | float) and isinstance(right, int | float)
                if numbers and (right or isinstance(node.op, ast.Add | ast.Sub | ast.Mult)):
                    return ARITHMETIC[type(node.op)](left, right)
                if isinstance(left, str) and isinstance(right, str) and isinstance(node.op, ast.Add | ast.Div):
                    return left + right if isinstance(node.op, ast.Add) else f"{left}/{right}"  # Path(a) / b
            case ast.Subscript() if isinstance(whole := inner(node.value), dict | list | str):
                try:
                    return whole[inner(node.slice)]
                except (KeyError, IndexError, TypeError):
                    return unknown
            case ast.Call():
                return self._call(node, depth, unknown)
        return unknown

    def _call(self, node: ast.Call, depth: int, unknown: Unknown) -> Any:
        """Return what a call gives that is plain, or the name that it loads."""
        called, name = ast.unparse(node.func), call_name(node)
        if (loaded := self._loaded(node)) is not None:
            return self.value(loaded, depth + 1)
        if called == "dict" and not node.args:
            return {keyword.arg: self.value(keyword.value, depth + 1) for keyword in node.keywords if keyword.arg}
        arguments = [self.value(argument, depth + 1) for argument in node.args]
        if name in ("is_bf16_supported", "is_bfloat16_supported"):
            return True
        if called in ENVIRONMENT and len(arguments) == 2:
            return arguments[1]
        if node.keywords or any(isinstance(argument, Unknown) for argument in arguments):
            return unknown
        try:
            if called == "os.path.join":
                return "/".join(arguments)
            if called in PLAIN and len(arguments) == 1:
                return PLAIN[called](arguments[0])
            if isinstance(node.func, ast.Attribute) and name in METHODS:
                owner = self.value(node.func.value, depth + 1)
                return getattr(owner, name)(*arguments) if isinstance(owner, str) else unknown
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            return unknown
        return unknown

    def _loaded(self, node: ast.expr) -> ast.expr | None:
        """Return the name that is loaded in a chain, `client.model("name").tp(8).spawn_train("policy")`."""
        same = isinstance(node, ast.Call) and call_name(node) in SAME  # gives the model itself, not something of it
        for _ in range(2 * MOST):
            if isinstance(node, ast.Call):
                named = [keyword.value for keyword in node.keywords if str(keyword.arg).endswith("model_name")]
                if call_name(node) in LOADERS and (node.args or named):
                    return (*node.args, *named)[0]
                node = node.func
            elif isinstance(node, ast.Attribute | ast.Await):
                node = node.value
            elif same and isinstance(node, ast.Name) and isinstance(value := self.lookup(node), ast.Call | ast.Await):
                node = value
            else:
                return None
        return None

    def lookup(self, node: ast.Name) -> ast.expr | None:
        """Return what a name stands for: its last value before that line, else its last."""
        values = self.values.get(node.id, [])
        before = [value for value in values if getattr(value, "end_lineno", 0) < getattr(node, "lineno", 1 << 30)]
        return (before or values or [None])[-1]


def _default(node: ast.expr | None) -> ast.expr | None:
    """Return the default of a field of a class: `1e-6`, `field(default=1e-6)`, `Field(1e-6)`, `default_factory=...`."""
    if not (isinstance(node, ast.Call) and call_name(node) in ("field", "Field")):
        return node
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    factory = given.get("default_factory")
    if isinstance(factory, ast.Lambda):
        return factory.body
    return given.get("default") or (node.args[0] if node.args else None)
