"""Python scripts of TRL and Harmony, read from their syntax tree: a script is not run."""

import ast
import operator
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.tools.migrate.draft import Source
from jaxrl_llm.tools.migrate.functions import Functions
from jaxrl_llm.tools.migrate.table import find, rules, table

HARMONY_WORDS = ("adaptive_harmony", "harmony_client", "spawn_train", "StringThread")
LOADERS = ("from_pretrained", "model")
SAME = ("spawn_train", "spawn_inference", "tp", "into_scoring_model", "to", "cuda", "get_peft_model")
PARSERS = ("HfArgumentParser", "TrlParser")
FUNCTIONS = ("reward_funcs", "tools", "environment_factory", "rollout_func", "grader", "callbacks")
SKIPPED = ("args", "processing_class", "tokenizer", "data_collator")
OBJECTS = ("dataset", "model", "policy_model", "value_model")  # of a recipe, which makes them
ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
ENVIRONMENT = ("os.environ.get", "os.getenv", "environ.get", "getenv")
PLAIN = {"str": str, "int": int, "float": float, "bool": bool, "Path": str, "len": len}
METHODS = ("replace", "lower", "upper", "strip", "split", "rsplit", "format", "join", "removesuffix", "removeprefix")
ROWS = ("select", "shuffle", "filter", "map", "remove_columns", "rename_column", "select_columns", "train_test_split")
FOREIGN = {"trl", "unsloth", "verl", "adaptive_harmony", "harmony_client", "axolotl"}
MOST = 12  # names that stand for names


class Unknown(NamedTuple):
    """A value that only running the script would tell."""

    text: str


def read_script(text: str, path: str, system: str, trainer: str, companion: str, flags: Any = None) -> Source:
    """Return the keys that a script's calls set, and the functions that it defines for them, for the file `companion`.

    `flags` are those of the command that starts the script: they replace the defaults of its parser. Raises ConfigError
    when it configures no trainer that is known.
    """
    try:
        tree = ast.parse(text, filename=path)
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno} is no Python: {error.msg}") from error
    harmony = system == "harmony" or (system == "auto" and any(name in text for name in HARMONY_WORDS))
    script = Script(tree, text, path, companion, flags or {})
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls = {_name(node): node for node in sorted(nodes, key=lambda node: node.lineno)}
    known = rules("scripts")["harmony" if harmony else "trl"]  # call -> its arguments by position
    present = [name for name in known if name in calls]
    trainers = sorted({_trainer(name) for name in present})
    if len(trainers) > 1 and not trainer:
        trainer = _trainer(max(present, key=lambda name: calls[name].lineno))
        script.note(f"the script has {' and '.join(trainers)}, and {trainer} is written: --trainer is another")
    if trainer:
        present = [name for name in present if _trainer(name) == trainer]
    if not present:
        raise ConfigError(f"{path} has no call of {', '.join(known)}, and so it configures no trainer that is known")
    settings: dict[str, Any] = {}
    for name in present:
        settings |= script.arguments(calls[name], known[name].split(), harmony)
        settings |= script.later(calls[name])
    adapters = next((calls[name] for name in ("LoraConfig", "get_peft_model") if name in calls), None)
    if not harmony and adapters and settings.get("peft_config", True) is not None:
        settings |= script.arguments(adapters, ["model"]) | {"peft_config": _name(adapters)}
    if harmony:
        if "CombinedGrader" in calls and ".py:" not in str(settings.get("grader")):
            combined = script.arguments(calls["CombinedGrader"], [])
            settings |= {f"CombinedGrader.{key}": value for key, value in combined.items()}
        settings |= script.parallel(calls.get("tp"))
    elif script.parsed and not script.flags and not any(name.endswith("Config") for name in present):
        script.note(
            "the script takes its arguments from the command line, and what it does not say itself is as in TRL by "
            "default: migrate the shell script with its command, or its YAML, in place of it"
        )
    settings = {key: value for key, value in script.flags.items() if key not in script.options} | settings
    if foreign := sorted(FOREIGN & {line.split()[1].partition(".")[0] for line in script.functions.imports.values()}):
        script.note(f"the functions in {companion} import {', '.join(foreign)}, which must be installed where they run")
    if script.read:
        script.note(f"as its parser has them by default: {', '.join(dict.fromkeys(script.read))}")
    library = "harmony" if harmony else "trl"
    for key, value in tuple(settings.items()):
        if isinstance(value, Unknown):
            entry = find(table(library), key)
            if entry and not entry.ours:
                settings[key] = f"<{value.text}>"
                continue
            del settings[key]
            ours = f" {entry.ours}" if entry else " it"
            script.note(f"{key} = {value.text} is known only when the script runs: set{ours}")
    for name, missing in script.functions.missing.items():
        script.note(f"{name} reads {', '.join(missing)}, which only the script makes: define it in {companion}")
    trainer = trainer or _trainer(present[0])
    return Source(library, trainer, settings, path, tuple(script.unread), script.functions.source())


def _trainer(name: str) -> str:
    return re.sub("Trainer$|Config$", "", name).lower()


def _name(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


class Script:
    """The syntax tree of a script, its names, and what could not be read."""

    def __init__(self, tree: ast.Module, text: str, path: str, companion: str, flags: dict[str, Any]):
        self.path, self.flags, self.parsed = path, flags, any(parser in text for parser in PARSERS)
        self.unread: list[str] = []
        self.read: list[str] = []  # options of the parser whose default was taken
        self.functions = Functions(tree, text, companion)
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
            elif isinstance(node, ast.Call) and _name(node) == "add_argument":
                names = [str(name.value).lstrip("-") for name in node.args if isinstance(name, ast.Constant)]
                given = {keyword.arg: keyword.value for keyword in node.keywords}
                dest = getattr(given.get("dest"), "value", max(names, key=len))
                action = getattr(given.get("action"), "value", "")
                unset = ast.Constant(action == "store_false") if "store_" in str(action) else None
                self.options[str(dest).replace("-", "_")] = given.get("default", unset)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple):  # model, tokenizer = FastLanguageModel.from_pretrained(...)
            for index, name in enumerate(target.elts[1:], 1):
                part = ast.Subscript(value, ast.Constant(index), ast.Load())
                self._assign(name, ast.fix_missing_locations(ast.copy_location(part, value)))
            target = target.elts[0]
        if isinstance(target, ast.Name):
            self.values.setdefault(target.id, []).append(value)
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            self.changed.append((target.value.id, target.attr, value))

    def note(self, text: str) -> None:
        """Note something that the user should look at."""
        self.unread.append(text)

    def arguments(self, call: ast.Call, names: Sequence[str], harmony: bool = False) -> dict[str, Any]:
        """Return the arguments of a call, those by position by `names`; data and models by what they load."""
        settings: dict[str, Any] = {}
        for position, node in enumerate(call.args[len(names) :], len(names)):
            self.note(f"line {call.lineno}: argument {position + 1}, {ast.unparse(node)}, is not read")
        for keyword in (*map(ast.keyword, names, call.args), *call.keywords):
            name, node = keyword.arg, keyword.value
            if name is None:
                more = self.value(node)
                if isinstance(more, dict):
                    settings |= more
                else:
                    self.note(f"line {call.lineno}: {ast.unparse(node)} is not read")
            elif name in FUNCTIONS and not (isinstance(node, ast.Constant) and node.value is None):
                settings[name] = self._functions(name, node)
            elif name in ("train_dataset", "eval_dataset"):
                settings |= self._dataset(name, node)
            elif name not in SKIPPED:
                value = self.value(node)
                if isinstance(value, Unknown) and harmony and name in OBJECTS:
                    value = f"<{value.text}>"
                parts = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
                if isinstance(value, Unknown) and self.parsed and any(part.endswith("args") for part in parts):
                    continue  # of the command line: what that leaves out is as by default
                if not (isinstance(value, Unknown) and name == "peft_config" and "LoraConfig" in self.imported):
                    settings[name] = value
                if name in ("model", "model_name"):
                    settings |= self._loading(node)
        return {name: value for name, value in settings.items() if value is not ...}

    def _loading(self, node: ast.expr) -> dict[str, Any]:
        """Return the options with which a model is loaded, those of its quantisation among them."""
        for _ in range(MOST):
            if isinstance(node, ast.Name) and (value := self.lookup(node)) is not None:
                node = value
            elif isinstance(node, ast.Call) and _name(node) == "get_peft_model" and node.args:
                node = node.args[0]
        settings = {}
        for keyword in node.keywords if isinstance(node, ast.Call) and _name(node) == "from_pretrained" else ():
            if keyword.arg == "quantization_config":
                made = self.lookup(keyword.value) if isinstance(keyword.value, ast.Name) else keyword.value
                settings |= self.arguments(made, []) if isinstance(made, ast.Call) else {}
            elif keyword.arg and not keyword.arg.endswith("model_name"):
                settings[keyword.arg] = self.value(keyword.value)
        return settings

    def later(self, call: ast.Call) -> dict[str, Any]:
        """Return what is set on the object of a call afterwards: `args.max_steps = 5`."""
        names = [name for name, values in self.values.items() if call in values]
        return {attribute: self.value(value) for name, attribute, value in self.changed if name in names}

    def parallel(self, call: ast.Call | None) -> dict[str, Any]:
        """Return the devices of `.tp(2)`; `ctx.world_size` is all."""
        if call is None or not call.args:
            return {}
        size = self.value(call.args[0])
        return {"tp": -1 if isinstance(size, Unknown) and "world_size" in size.text else size}

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
            case ast.JoinedStr():
                parts = [inner(part.value if isinstance(part, ast.FormattedValue) else part) for part in node.values]
                return unknown if any(isinstance(part, Unknown) for part in parts) else "".join(map(str, parts))
            case ast.BoolOp():
                values = [inner(value) for value in node.values]
                if not any(isinstance(value, Unknown) for value in values):
                    stops = isinstance(node.op, ast.Or)
                    return next((value for value in values[:-1] if bool(value) == stops), values[-1])
            case ast.IfExp() if not isinstance(test := inner(node.test), Unknown):
                return inner(node.body if test else node.orelse)
            case ast.BinOp() if type(node.op) in ARITHMETIC:
                left, right = inner(node.left), inner(node.right)
                if (
                    isinstance(left, int | float)
                    and isinstance(right, int | float)
                    and (right or type(node.op) is not ast.Div)
                ):
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
        called, name = ast.unparse(node.func), _name(node)
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
        except (TypeError, ValueError):
            return unknown
        return unknown

    def _loaded(self, node: ast.expr) -> ast.expr | None:
        """Return the name that is loaded in a chain, `client.model("name").tp(8).spawn_train("policy")`."""
        same = isinstance(node, ast.Call) and _name(node) in SAME  # gives the model itself, not something of it
        for _ in range(2 * MOST):
            if isinstance(node, ast.Call):
                named = [keyword.value for keyword in node.keywords if str(keyword.arg).endswith("model_name")]
                if _name(node) in LOADERS and (node.args or named):
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

    def _functions(self, key: str, node: ast.expr) -> Any:
        """Return functions and models by name, as the configuration names them; those of the script are copied."""
        if isinstance(node, ast.List | ast.Tuple):
            return [name for item in node.elts if (name := self._functions(key, item)) is not ...] or ...
        if isinstance(node, ast.Name) and node.id not in self.functions.definitions:
            if node.id in self.imported:
                return self.imported[node.id]
            value = self.lookup(node)
            if isinstance(value, ast.List | ast.Tuple | ast.Constant | ast.Name | ast.Attribute):
                return self._functions(key, value)
        value = self.value(node)
        if isinstance(value, str):
            return f"model:{value}"
        if key == "grader" and not isinstance(node, ast.Name):
            return ast.unparse(node)
        if isinstance(node, ast.Attribute):  # rewards.format_reward of a module
            return ast.unparse(node)
        name = self.functions.add(node)
        if name is None:
            if key == "grader":
                return ast.unparse(node)
            self.note(f"{key}: {ast.unparse(node)[:80]} is made when the script runs: name a function")
            return ...
        return name

    def _dataset(self, name: str, node: ast.expr) -> dict[str, Any]:
        """Return the path, configuration and split of `load_dataset(path, name, split=...)["split"]`.

        A function of a row that the script maps is the format of the rows.
        """
        split, settings, changes = None, {}, []
        for _ in range(MOST):
            if isinstance(node, ast.Name) and (value := self.lookup(node)) is not None:
                node = value
            elif isinstance(node, ast.IfExp):
                node = node.body
            elif isinstance(node, ast.Subscript):
                node, split = node.value, self.value(node.slice) if split is None else split
            elif isinstance(node, ast.Call) and _name(node) in ROWS and isinstance(node.func, ast.Attribute):
                batched = any(keyword.arg == "batched" for keyword in node.keywords)
                if _name(node) == "map" and node.args and not batched and "dataset.map" not in settings:
                    settings["dataset.map"] = self.functions.add(node.args[0])
                if _name(node) not in ("shuffle", "remove_columns", "select_columns") and not settings.get(
                    "dataset.map"
                ):
                    changes.append(f"{_name(node)}({', '.join(map(ast.unparse, (*node.args, *node.keywords)))})")
                node = node.func.value
            elif isinstance(node, ast.Call) and isinstance(
                made := self.functions.definitions.get(_name(node)), ast.FunctionDef
            ):
                returned = [part.value for part in ast.walk(made) if isinstance(part, ast.Return) and part.value]
                node = returned[-1] if returned else node
            else:
                break
        if changes:
            self.note(f"{name}: the script changes its rows, which is not done here: {', '.join(changes)[:160]}")
        if not (isinstance(node, ast.Call) and _name(node) == "load_dataset" and node.args):
            text = ast.unparse(node)
            if not (isinstance(node, ast.Constant) and node.value is None) and not text.startswith("None"):
                self.note(
                    f"{name} = {text[:60]} is known only when the script runs: write its rows to a file for "
                    "data.path, or call train(config, train_dataset=...)"
                )
            return {}
        more = {keyword.arg: self.value(keyword.value) for keyword in node.keywords}
        path, splits = self.value(node.args[0]), more.get("split")
        if isinstance(splits, list):  # one data set for each
            split = splits[split if isinstance(split, int) else 0]
        split = splits if split is None else split
        if isinstance(path, Unknown) and self.parsed:
            return {}
        path = more.get("data_files", path) if path in ("json", "csv", "parquet") else path
        if isinstance(path, dict):  # data_files by split; each file is one split, train
            path, split = path.get(split, next(iter(path.values()))), "train"
        settings = {name: path, **{key: value for key, value in settings.items() if value and name == "train_dataset"}}
        if len(node.args) > 1 or "name" in more:
            settings["dataset_config"] = self.value(node.args[1]) if len(node.args) > 1 else more["name"]
        if self.parsed:  # what the command line leaves out is as by default
            settings = {key: value for key, value in settings.items() if not isinstance(value, Unknown)}
        if isinstance(split, str):
            settings["dataset_train_split" if name == "train_dataset" else "dataset_test_split"] = split
        return settings


def _default(node: ast.expr | None) -> ast.expr | None:
    """Return the default of a field of a class: `1e-6`, `field(default=1e-6)`, `Field(1e-6)`, `default_factory=...`."""
    if not (isinstance(node, ast.Call) and _name(node) in ("field", "Field")):
        return node
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    factory = given.get("default_factory")
    if isinstance(factory, ast.Lambda):
        return factory.body
    return given.get("default") or (node.args[0] if node.args else None)
