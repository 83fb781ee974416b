"""Python scripts of TRL and Harmony, read from their syntax tree: a script is not run."""

import ast
import operator
from typing import Any, NamedTuple

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.tools.migrate.draft import Source

NAMES = ("GRPO", "RLOO", "PPO", "SFT", "DPO", "KTO", "ORPO", "CPO", "Reward")
TRL = {f"{name}{kind}": name.lower() for kind in ("Trainer", "Config") for name in NAMES}
HARMONY = {"SFT": "sft", "PPO": "ppo", "GRPO": "grpo", "DPO": "dpo"}
HARMONY_WORDS = ("adaptive_harmony", "harmony_client", "spawn_train", "StringThread")
LOADERS = ("from_pretrained", "model")
FUNCTIONS = ("reward_funcs", "tools", "environment_factory", "rollout_func", "grader")
SKIPPED = ("args", "processing_class", "tokenizer")
ARITHMETIC = {ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv, ast.Div: operator.truediv}
MOST = 8  # names that stand for names


class Unknown(NamedTuple):
    """A value that only running the script would tell."""

    text: str


def read_script(text: str, path: str, system: str, trainer: str) -> Source:
    """Return the keys that a script's calls set; raises ConfigError when it configures no trainer that is known."""
    try:
        tree = ast.parse(text, filename=path)
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno} is no Python: {error.msg}") from error
    harmony = system == "harmony" or (system == "auto" and any(name in text for name in HARMONY_WORDS))
    script = Script(tree, path)
    calls = {_name(node): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    known = HARMONY if harmony else TRL
    present = [name for name in known if name in calls]
    trainers = {known[name] for name in present}
    if trainer and not harmony:
        present = [name for name in present if known[name] == trainer]
    if not present or (len(trainers) > 1 and not trainer):
        raise ConfigError(
            f"{path} has {'several of' if present else 'no call of'} {', '.join(present or known)}"
            + (": say which with --trainer" if present else ", and so it configures no trainer that is known")
        )
    settings: dict[str, Any] = {}
    for name in present:
        settings |= script.keywords(calls[name], harmony)
    if not harmony and "LoraConfig" in calls:
        settings |= script.keywords(calls["LoraConfig"])
        settings["peft_config"] = "LoraConfig"
    if harmony and "CombinedGrader" in calls:
        combined = script.keywords(calls["CombinedGrader"])
        settings |= {f"CombinedGrader.{key}": value for key, value in combined.items()}
    library = "harmony" if harmony else "trl"
    return Source(library, trainer or known[present[0]], settings, path, tuple(script.unread))


def _name(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


class Script:
    """The syntax tree of a script, its names, and what could not be read."""

    def __init__(self, tree: ast.Module, path: str):
        self.path, self.unread = path, []
        definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        self.functions = {node.name for node in tree.body if isinstance(node, definitions)}
        self.imported: dict[str, str] = {}
        self.values: dict[str, ast.expr] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    self.imported[alias.asname or alias.name] = f"{node.module}:{alias.name}"
            elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                self.values[node.targets[0].id] = node.value

    def keywords(self, call: ast.Call, harmony: bool = False) -> dict[str, Any]:
        """Return the keyword arguments of a call; data and models by what they were loaded from."""
        settings: dict[str, Any] = {}
        for keyword in call.keywords:
            name, node = keyword.arg, keyword.value
            if name is None:
                self.unread.append(f"line {call.lineno}: {ast.unparse(node)} is not read")
            elif name in FUNCTIONS:
                settings[name] = self._functions(node)
            elif name in ("train_dataset", "eval_dataset"):
                settings |= self._dataset(name, node)
            elif name not in SKIPPED:
                value = self.value(node)
                if not isinstance(value, Unknown):
                    settings[name] = value
                elif harmony:
                    settings[name] = f"<{value.text}>"
                elif name != "peft_config":
                    self.unread.append(f"{name} = {value.text} is known only when the script runs: set it")
        return settings

    def value(self, node: ast.expr, depth: int = 0) -> Any:
        """Return the value of an expression of constants and names of constants; `Unknown` otherwise."""
        if isinstance(node, ast.Name) and node.id in self.values and depth < MOST:
            return self.value(self.values[node.id], depth + 1)
        if isinstance(node, ast.Await):
            return self.value(node.value, depth)
        if isinstance(node, ast.Call):
            if (loaded := _loaded(node)) is not None:
                return self.value(loaded, depth + 1)
            if _name(node) == "dict" and not node.args:
                return {keyword.arg: self.value(keyword.value, depth + 1) for keyword in node.keywords if keyword.arg}
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "torch":
            return node.attr
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            return {ast.literal_eval(key): self.value(value, depth + 1) for key, value in pairs if key is not None}
        if isinstance(node, ast.List | ast.Tuple):
            items = [self.value(item, depth + 1) for item in node.elts]
            return next((item for item in items if isinstance(item, Unknown)), items)
        try:
            return ast.literal_eval(node)
        except ValueError:
            if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:  # `8 * 1024` and the like
                left, right = self.value(node.left, depth + 1), self.value(node.right, depth + 1)
                if isinstance(left, int | float) and isinstance(right, int | float) and right:
                    return ARITHMETIC[type(node.op)](left, right)
            return Unknown(ast.unparse(node))

    def _functions(self, node: ast.expr) -> Any:
        """Return functions and models by name, as the configuration names them."""
        if isinstance(node, ast.Name) and node.id in self.values:
            return self._functions(self.values[node.id])
        if isinstance(node, ast.List | ast.Tuple):
            return [self._functions(item) for item in node.elts]
        value = self.value(node)
        if isinstance(value, str):
            return f"model:{value}"
        name = ast.unparse(node)
        return f"{self.path}:{name}" if name in self.functions else self.imported.get(name, name)

    def _dataset(self, name: str, node: ast.expr) -> dict[str, Any]:
        """Return the path, configuration and split of `load_dataset(path, name, split=...)["split"]`."""
        split, depth = None, 0
        while depth < MOST:
            if isinstance(node, ast.Name) and node.id in self.values:
                node, depth = self.values[node.id], depth + 1
            elif isinstance(node, ast.Subscript) and split is None:
                node, split = node.value, self.value(node.slice)
            else:
                break
        if not (isinstance(node, ast.Call) and _name(node) == "load_dataset" and node.args):
            self.unread.append(
                f"{name} = {ast.unparse(node)[:60]} is known only when the script runs: write its rows to a file for "
                "data.path, or call train(config, train_dataset=...)"
            )
            return {}
        path, more = self.value(node.args[0]), {keyword.arg: self.value(keyword.value) for keyword in node.keywords}
        split = more.get("split") if split is None else split
        settings = {name: more.get("data_files", path) if path in ("json", "csv", "parquet") else path}
        if len(node.args) > 1 or "name" in more:
            settings["dataset_config"] = self.value(node.args[1]) if len(node.args) > 1 else more["name"]
        if isinstance(split, str):
            settings["dataset_train_split" if name == "train_dataset" else "dataset_test_split"] = split
        return settings


def _loaded(node: ast.expr) -> ast.expr | None:
    """Return the name that is loaded in a chain, `client.model("name").tp(8).spawn_train("policy")`."""
    while isinstance(node, ast.Call | ast.Attribute | ast.Await):
        if isinstance(node, ast.Call):
            if _name(node) in LOADERS and node.args:
                return node.args[0]
            node = node.func
        else:
            node = node.value
    return None
