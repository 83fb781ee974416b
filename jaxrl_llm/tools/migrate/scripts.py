"""What a Python script of TRL or Harmony says, read from its syntax tree: the script is not run."""

import ast
from typing import Any, NamedTuple

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.tools.migrate.draft import Source

TRL_CONFIGS = {
    "GRPOConfig": "grpo",
    "RLOOConfig": "rloo",
    "PPOConfig": "ppo",
    "SFTConfig": "sft",
    "DPOConfig": "dpo",
    "KTOConfig": "kto",
    "ORPOConfig": "orpo",
    "CPOConfig": "cpo",
    "RewardConfig": "reward",
}
TRL_TRAINERS = {name.replace("Config", "Trainer"): trainer for name, trainer in TRL_CONFIGS.items()}
HARMONY = {"SFT": "sft", "PPO": "ppo", "GRPO": "grpo", "DPO": "dpo"}
LOADERS = ("from_pretrained", "model")
FUNCTIONS = ("reward_funcs", "tools", "environment_factory", "rollout_func", "grader")
SKIPPED = ("args", "processing_class", "tokenizer")


class Unknown(NamedTuple):
    """A value that only running the script would tell."""

    text: str


def read_script(text: str, path: str, system: str, trainer: str) -> Source:
    """The keys that a script's calls set. Raises ConfigError when it configures no trainer that is known."""
    try:
        tree = ast.parse(text, filename=path)
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno} is no Python: {error.msg}") from error
    harmony = system == "harmony" or (system == "auto" and any(
        name in text for name in ("adaptive_harmony", "harmony_client", "spawn_train", "StringThread")))  # fmt: skip
    script = Script(tree, path)
    calls = {_name(node): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    known = HARMONY if harmony else {**TRL_TRAINERS, **TRL_CONFIGS}
    found = [name for name in known if name in calls]
    trainers = {known[name] for name in found}
    if trainer and not harmony:
        found = [name for name in found if known[name] == trainer]
    if not found or (len(trainers) > 1 and not trainer):
        raise ConfigError(
            f"{path} has {'several of' if found else 'no call of'} {', '.join(found or known)}"
            + (": say which with --trainer" if found else ", and so it configures no trainer that is known")
        )
    given: dict[str, Any] = {}
    for name in found:
        given |= script.keywords(calls[name], harmony)
    if not harmony and "LoraConfig" in calls:
        given |= script.keywords(calls["LoraConfig"])
        given["peft_config"] = "LoraConfig"
    if harmony and "CombinedGrader" in calls:
        given |= {f"CombinedGrader.{key}": one for key, one in script.keywords(calls["CombinedGrader"]).items()}
    return Source("harmony" if harmony else "trl", trainer or known[found[0]], given, path, tuple(script.unread))


def _name(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _loader(node: ast.expr) -> ast.Call | None:
    """The call in a chain, `client.model("name").tp(8).spawn_train("policy")`, that names what is loaded."""
    while isinstance(node, ast.Call | ast.Attribute | ast.Await):
        if isinstance(node, ast.Call):
            if _name(node) in LOADERS and node.args:
                return node
            node = node.func
        else:
            node = node.value
    return None


class Script:
    """The syntax tree of a script, its names, and what could not be read."""

    def __init__(self, tree: ast.Module, path: str):
        self.path, self.unread = path, []
        self.functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef
                                                                       | ast.ClassDef)}  # fmt: skip
        self.imported = {
            alias.asname or alias.name: f"{node.module}:{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
        }
        self.values: dict[str, ast.expr] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                self.values[node.targets[0].id] = node.value

    def keywords(self, call: ast.Call, harmony: bool = False) -> dict[str, Any]:
        """The keyword arguments of a call, with what data and models were loaded by."""
        given: dict[str, Any] = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                self.unread.append(f"line {call.lineno}: {ast.unparse(keyword.value)} is not read")
                continue
            if keyword.arg in SKIPPED:
                continue
            given |= self._argument(keyword.arg, keyword.value, harmony)
        return given

    def _argument(self, name: str, node: ast.expr, harmony: bool) -> dict[str, Any]:
        if name in FUNCTIONS:
            return {name: self._functions(node)}
        if name in ("train_dataset", "eval_dataset"):
            return self._dataset(name, node)
        value = self.value(node)
        if isinstance(value, Unknown):
            if name != "peft_config" and not harmony:
                self.unread.append(f"{name} = {value.text} is known only when the script runs: set it")
            return {name: f"<{value.text}>"} if harmony else {}
        return {name: value}

    def value(self, node: ast.expr, depth: int = 0) -> Any:
        """The value of an expression of constants and names of constants; `Unknown` otherwise."""
        if isinstance(node, ast.Name) and node.id in self.values and depth < 8:
            return self.value(self.values[node.id], depth + 1)
        if isinstance(node, ast.Await):
            return self.value(node.value, depth)
        if isinstance(node, ast.Call) and (loader := _loader(node)) is not None:
            return self.value(loader.args[0], depth + 1)
        if isinstance(node, ast.Call) and _name(node) == "dict" and not node.args:
            return {keyword.arg: self.value(keyword.value, depth + 1) for keyword in node.keywords if keyword.arg}
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "torch":
            return node.attr
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            return {ast.literal_eval(key): self.value(one, depth + 1) for key, one in pairs if key is not None}
        if isinstance(node, ast.List | ast.Tuple):
            items = [self.value(item, depth + 1) for item in node.elts]
            return next((item for item in items if isinstance(item, Unknown)), items)
        try:
            return ast.literal_eval(node)
        except ValueError:
            return self._product(node, depth)

    def _product(self, node: ast.expr, depth: int) -> Any:
        """`8 * 1024` and the like."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.FloorDiv | ast.Div):
            left, right = self.value(node.left, depth + 1), self.value(node.right, depth + 1)
            if isinstance(left, int | float) and isinstance(right, int | float) and right:
                if isinstance(node.op, ast.Mult):
                    return left * right
                return left // right if isinstance(node.op, ast.FloorDiv) else left / right
        return Unknown(ast.unparse(node))

    def _functions(self, node: ast.expr) -> Any:
        """Functions and models by name, as the configuration names them."""
        if isinstance(node, ast.Name) and node.id in self.values:
            return self._functions(self.values[node.id])
        if isinstance(node, ast.List | ast.Tuple):
            return [self._functions(item) for item in node.elts]
        value = self.value(node)
        if isinstance(value, str):
            return f"model:{value}"
        name = ast.unparse(node)
        if name in self.functions:
            return f"{self.path}:{name}"
        return self.imported.get(name, name)

    def _dataset(self, name: str, node: ast.expr) -> dict[str, Any]:
        """What `load_dataset(path, name, split=...)` says of a data set."""
        seen = 0
        while isinstance(node, ast.Name) and node.id in self.values and seen < 8:
            node, seen = self.values[node.id], seen + 1
        picked = None
        if isinstance(node, ast.Subscript):
            picked = self.value(node.slice)
            node = node.value
            while isinstance(node, ast.Name) and node.id in self.values and seen < 8:
                node, seen = self.values[node.id], seen + 1
        if not (isinstance(node, ast.Call) and _name(node) == "load_dataset" and node.args):
            self.unread.append(f"{name} = {ast.unparse(node)[:60]} is known only when the script runs: write its rows "
                               f"to "
                               "a file for data.path, or call train(config, train_dataset=...)")  # fmt: skip
            return {}
        path, more = self.value(node.args[0]), {keyword.arg: self.value(keyword.value) for keyword in node.keywords}
        split = picked if picked is not None else more.get("split")
        found: dict[str, Any] = {name: more.get("data_files", path) if path in ("json", "csv", "parquet") else path}
        if len(node.args) > 1 or "name" in more:
            found["dataset_config"] = self.value(node.args[1]) if len(node.args) > 1 else more["name"]
        if isinstance(split, str):
            found["dataset_train_split" if name == "train_dataset" else "dataset_test_split"] = split
        return found
