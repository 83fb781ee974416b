"""Python scripts of TRL and Harmony, read from their syntax tree: a script is not run."""

import ast
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.tools.migrate.draft import IN_FEW_BITS, Source
from jaxrl_llm.tools.migrate.functions import Functions
from jaxrl_llm.tools.migrate.losses import with_options
from jaxrl_llm.tools.migrate.table import find, rules, table
from jaxrl_llm.tools.migrate.values import MOST, Unknown, Values, call_name

HARMONY_WORDS = ("adaptive_harmony", "harmony_client", "spawn_train", "StringThread")
PARSERS = ("HfArgumentParser", "TrlParser")
FUNCTIONS = ("reward_funcs", "tools", "environment_factory", "rollout_func", "grader", "callbacks")
SKIPPED = ("args",)
TOKENIZER = ("processing_class", "tokenizer")
OBJECTS = ("dataset", "model", "policy_model", "value_model")  # of a recipe, which makes them
ROWS = ("select", "shuffle", "filter", "map", "remove_columns", "rename_column", "select_columns", "train_test_split")
KEEPING = ("map", "remove_columns", "rename_column", "select_columns")  # of these, what keeps rows and their order
AS_STORED = ("GPTQConfig", "AwqConfig", "CompressedTensorsConfig")  # of models that are in few bits already
LOADERS = ("load_dataset", "load_from_disk", "from_json", "from_csv", "from_parquet")  # of datasets, and its Dataset
JOINING = ("concatenate_datasets", "interleave_datasets")
STANDARDIZING = ("standardize_sharegpt", "standardize_data_formats")  # of Unsloth: ShareGPT's rows are read as they are
# What transformers' TrainingArguments leave out is as there, also in a trainer of TRL whose config has other defaults.
PLAIN = {"learning_rate": 5e-5, "gradient_checkpointing": False, "bf16": False, "logging_steps": 500}
AVERAGE, STOPPING = "BEMACallback", "EarlyStoppingCallback"  # which are no hooks here but settings
# Callbacks that show or log what the run does here by itself.
SHOWING = re.compile(
    "(Rich|Notebook)?ProgressCallback|PrinterCallback|(Log|Tensor|W(and|e)|MLf|Sw|Trackio)[a-zA-Z]*Callback"
)
FOREIGN = {"trl", "unsloth", "verl", "adaptive_harmony", "harmony_client", "axolotl"}


def read_script(text: str, path: str, system: str, trainer: str, companion: str, flags: Any = None) -> Source:
    """Return the keys that a script's calls set, and the functions that it defines for them, for the file `companion`.

    `flags` are those of the command that starts the script: they replace the defaults of its parser. Raises ConfigError
    when it configures no trainer that is known.
    """
    harmony = system == "harmony" or (system == "auto" and any(name in text for name in HARMONY_WORDS))
    script = Script(text, path, companion, flags or {})
    calls = {call_name(node): node for node in script.calls}
    known = rules("scripts")["harmony" if harmony else "trl"]  # call -> its arguments by position
    present = [name for name in known if name in calls]
    trainers = sorted({_trainer(name) for name in present})
    if len(trainers) > 1 and not trainer:
        trainer = _trainer(max(present, key=lambda name: calls[name].lineno))
        script.note(f"the script has {' and '.join(trainers)}, and {trainer} is written: --trainer is another")
    if trainer:
        present = [name for name in present if _trainer(name) == trainer]
    if not present:
        others = ", ".join(sorted(name for name in calls if name.endswith("Trainer")))
        found = f"calls {others}, which is not migrated" if others else "calls no trainer"
        raise ConfigError(f"{path} {found}: those that are, are {', '.join(n for n in known if 'Config' not in n)}")
    settings: dict[str, Any] = {}
    if not harmony and "TrainingArguments" in calls and not any(name.endswith("Config") for name in present):
        arguments = calls["TrainingArguments"]
        settings |= PLAIN | script.arguments(arguments, ["output_dir"]) | script.later(arguments)
    for name in present:
        settings |= script.arguments(calls[name], known[name].split(), harmony)
        settings |= script.later(calls[name])
    if not harmony and AVERAGE in calls:
        given = script.arguments(calls[AVERAGE], rules("scripts")[AVERAGE].split())
        settings |= {AVERAGE: True, **{f"{AVERAGE}.{key}": value for key, value in given.items()}}
    if not harmony and "create_model_card" in calls:
        card = script.arguments(calls["create_model_card"], ["model_name", "dataset_name", "tags"])
        settings |= {key: card[key] for key in ("model_name", "tags") if key in card}
    if not harmony and "push_to_hub" in calls and not _depends(script.tree, calls["push_to_hub"]):
        settings.setdefault("push_to_hub", True)
    later = [node.args[0] for node in script.calls if call_name(node) == "add_callback" and node.args]
    added = [name for node in later if (name := script.named("callbacks", node)) is not ...]
    if added and not harmony:
        given = settings.get("callbacks", [])
        settings["callbacks"] = [*([given] if isinstance(given, str) else given), *added]
    if not harmony and STOPPING in calls:
        names = ("early_stopping_patience", "early_stopping_threshold")
        settings |= {names[0]: 1} | script.arguments(calls[STOPPING], names)
    adapters = next((calls[name] for name in ("LoraConfig", "get_peft_model") if name in calls), None)
    if not harmony and adapters and settings.get("peft_config", True) is not None:
        settings |= script.arguments(adapters, ["model"]) | {"peft_config": call_name(adapters)}
    if not harmony:
        settings |= script.of_unsloth(calls)
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
    return script.source("harmony" if harmony else "trl", trainer or _trainer(present[0]), settings, path)


def _depends(tree: ast.Module, call: ast.Call) -> bool:
    """Return True for a call that stands under an `if`, other than that of a script that is run."""
    choices = (node for node in ast.walk(tree) if isinstance(node, ast.If) and "__name__" not in ast.unparse(node.test))
    return any(call is part for node in choices for part in ast.walk(node))


def _trainer(name: str) -> str:
    return "sft" if name.startswith("Unsloth") else re.sub("Trainer$|Config$", "", name).lower()


def _of_each(node: ast.ListComp) -> ast.expr | None:
    """Return the function of `[function(row) for row in rows]`; None for other lists."""
    made, loop = node.elt, node.generators[0]
    if len(node.generators) > 1 or loop.ifs or not isinstance(made, ast.Call) or made.keywords:
        return None
    return made.func if [*map(ast.unparse, made.args)] == [ast.unparse(loop.target)] else None


class Loaded(NamedTuple):
    """The rows that a script loads: the call that does it, the split, the share that is held out, and its changes of
    them."""

    node: ast.expr  # the call that loads them
    split: Any  # of its, which is taken
    held: Any  # the share of the rows that train_test_split holds out, or the text of the call where that is no share
    rows: str | None  # the function of a row that is mapped
    first: int | None  # of the split, so many of its first rows alone


class Script(Values):
    """The syntax tree of a script, its calls by line, what these are given, and what could not be read."""

    def __init__(self, text: str, path: str, companion: str, flags: dict[str, Any]):
        try:
            self.tree = ast.parse(text, filename=path)
        except SyntaxError as error:
            raise ConfigError(f"{path}:{error.lineno} is no Python: {error.msg}") from error
        super().__init__(self.tree, path, flags)
        nodes = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        self.calls = sorted(nodes, key=lambda node: node.lineno)
        self.parsed = any(parser in text for parser in PARSERS)
        self.unread: list[str] = []
        self.functions = Functions(self.tree, text, companion)

    def source(self, library: str, trainer: str, settings: dict[str, Any], path: str) -> Source:
        """Return what was read: settings without those that only the run tells, which are noted, and the functions."""
        if self.read:
            self.note(f"as its parser has them by default: {', '.join(dict.fromkeys(self.read))}")
        for key, value in tuple(settings.items()):
            if isinstance(value, Unknown):
                entry = find(table(library), key)
                if entry and not entry.ours:
                    settings[key] = f"<{value.text}>"
                    continue
                del settings[key]
                ours = entry.ours if entry else "it"
                self.note(f"{key} = {value.text} is known only when the script runs: set {ours}")
        for name, missing in self.functions.missing.items():
            self.note(
                f"{name} reads {', '.join(missing)}, which only the script makes: define it in {self.functions.file}"
            )
        return Source(library, trainer, settings, path, tuple(self.unread), self.functions.source())

    def note(self, text: str) -> None:
        """Note something that the user should look at."""
        self.unread.append(text)

    def arguments(self, call: ast.Call, names: Sequence[str], harmony: bool = False) -> dict[str, Any]:
        """Return the arguments of a call, those by position by `names`; data and models by what they load."""
        settings: dict[str, Any] = {}
        rows: dict[str, dict[str, Any]] = {"train_dataset": {}, "eval_dataset": {}}
        formatting = None
        for position, node in enumerate(call.args[len(names) :], len(names)):
            self.note(f"line {call.lineno}: argument {position + 1}, {ast.unparse(node)}, is not read")
        keywords = [*map(ast.keyword, names, call.args), *call.keywords]
        given = {keyword.arg for keyword in keywords if ast.unparse(keyword.value) != "None"}
        for keyword in keywords:
            name, node = keyword.arg, keyword.value
            if name is None:
                more = self.value(node)
                if isinstance(more, dict):
                    settings |= more
                else:
                    self.note(f"line {call.lineno}: {ast.unparse(node)} is not read")
            elif name in FUNCTIONS and name in given:
                settings[name] = self.named(name, node)
            elif name in rows:
                rows[name] = self._dataset(name, node)
            elif name in TOKENIZER:
                settings |= self._tokenizer(node)
            elif name == "quantization_config":
                settings |= self._quantized(node)
            elif name == "data_collator" and name in given:
                made = self.lookup(node) if isinstance(node, ast.Name) else node
                settings[name] = call_name(made) if isinstance(made, ast.Call) else ast.unparse(node)
            elif name == "formatting_func" and name in given:
                formatting = node
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
        train, test = rows.values()
        if formatting is not None:
            settings["formatting_func"] = self.functions.add_text(formatting, train.pop("dataset.map", None))
        if isinstance(factory := settings.get("environment_factory"), str):
            settings |= self._environment(factory, given)
        settings = test | settings | train  # of the same key, that of the rows that are trained on counts
        path, split = test.get("eval_dataset"), test.get("dataset_test_split")
        same = (path, split) == (train.get("train_dataset"), train.get("dataset_train_split"))
        if "train_test_split" in train and path is not None and not (same and "train_test_split" in test):
            del settings["train_test_split"]
            evaluated = path if path != train.get("train_dataset") else f"the split {split} of {path}"
            self.note(f"train_test_split is not done: all rows are trained on, and {evaluated} is evaluated on")
        return {name: value for name, value in settings.items() if value is not ...}

    def _tokenizer(self, node: ast.expr) -> dict[str, Any]:
        """Return the name that a tokenizer is loaded by, and the chat template that the script gives it."""
        made = self.lookup(node) if isinstance(node, ast.Name) else node
        if not isinstance(made, ast.Call) or call_name(made) != "from_pretrained":
            return {}
        name, changed = self.value(made), self.later(made)
        template = {"chat_template": changed["chat_template"]} if "chat_template" in changed else {}
        return {"processing_class": name, **template} if isinstance(name, str) else template

    def _loading(self, node: ast.expr) -> dict[str, Any]:
        """Return the options with which a model is loaded, those of its quantisation among them."""
        for _ in range(MOST):
            if isinstance(node, ast.Name) and (value := self.lookup(node)) is not None:
                node = value
            elif isinstance(node, ast.Call) and call_name(node) == "get_peft_model" and node.args:
                node = node.args[0]
        settings = {}
        for keyword in node.keywords if isinstance(node, ast.Call) and call_name(node) == "from_pretrained" else ():
            if keyword.arg == "quantization_config":
                settings |= self._quantized(keyword.value)
            elif keyword.arg and not keyword.arg.endswith("model_name"):
                settings[keyword.arg] = self.value(keyword.value)
        return settings

    def _quantized(self, node: ast.expr) -> dict[str, Any]:
        """Return the options of a BitsAndBytesConfig; others of a model that the script quantises are noted."""
        made = self.lookup(node) if isinstance(node, ast.Name) else node
        called = call_name(made) if isinstance(made, ast.Call) else ""
        if isinstance(made, ast.Call) and called == "BitsAndBytesConfig":
            given = self.arguments(made, [])
            return ({"bnb_4bit_quant_type": "fp4"} if "load_in_4bit" in given else {}) | given  # its own default
        if called in AS_STORED:
            self.note(IN_FEW_BITS)
        elif ast.unparse(node) != "None" and not self.parsed:
            self.note(f"quantization_config = {ast.unparse(made or node)[:80]} is not read: set model.quantize")
        return {}

    def of_unsloth(self, calls: dict[str, ast.Call]) -> dict[str, Any]:
        """Return what functions of Unsloth change of the trainer and the tokenizer that they are given."""
        settings = {}
        collator = calls.get("UnslothVisionDataCollator")
        responses = {key.arg: self.value(key.value) for key in collator.keywords} if collator else {}
        if "train_on_responses_only" in calls or responses.get("train_on_responses_only"):
            settings["train_on_responses_only"] = True
        if template := calls.get("get_chat_template"):
            words = [*template.args[1:], *(key.value for key in template.keywords if key.arg == "chat_template")]
            self.note(
                f"get_chat_template writes rows by its template {', '.join(map(ast.unparse, words[:1]))}; here the "
                "tokenizer's own is used: see that it is this one (python -m jaxrl_llm preview --config=... shows the "
                "rows), or name another with data.chat_template"
            )
        return settings

    def _environment(self, factory: str, given: set[str | None]) -> dict[str, Any]:
        """Return what follows from an environment: whether it has rewards, as it must where no functions are `given`,
        and its rows where no data set is."""
        settings: dict[str, Any] = {}
        classes = [self.functions.definitions.get(name) for name in self.functions.chosen]
        parts = [part for node in classes if isinstance(node, ast.ClassDef) for part in node.body]
        if "reward_funcs" not in given or any(getattr(part, "name", "") == "get_reward" for part in parts):
            settings["environment_factory.get_reward"] = True
        elif not factory.startswith(self.functions.file):
            self.note(f"{factory}: if it has get_reward, add environment to rewards.functions")
        if "train_dataset" not in given:
            settings["train_dataset"] = "task:seeds"
            self.note(
                "the environment has its prompts itself: a row of task:seeds is a number, the column seed, of which "
                "reset has to make the prompt, as the completions of a row are compared"
            )
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

    def named(self, key: str, node: ast.expr) -> Any:
        """Return functions and models by name, as the configuration names them; those of the script are copied."""
        made = self.lookup(node) if isinstance(node, ast.Name) else node
        if isinstance(made, ast.Call) and call_name(made) in (AVERAGE, STOPPING):
            return ...
        if isinstance(node, ast.List | ast.Tuple):
            return [name for item in node.elts if (name := self.named(key, item)) is not ...] or ...
        called = call_name(made) if isinstance(made, ast.Call) else getattr(node, "id", "")
        if key == "callbacks" and SHOWING.fullmatch(called):
            self.note(f"callbacks: {called} is left out: the console and logging.backends show what it does")
            return ...
        if key == "reward_funcs" and isinstance(made, ast.Call) and (known := rules("trl")["rewards"].get(called)):
            given = self.arguments(made, list(known["options"]))
            if not any(isinstance(value, Unknown) for value in given.values()):
                if "note" in known:
                    self.note(f"{called}: {known['note']}")
                return with_options(known["name"], {known["options"][name]: value for name, value in given.items()})
        if key == "callbacks" and isinstance(made, ast.Call) and isinstance(made.func, ast.Name):
            name = self.imported.get(made.func.id) or self.functions.add(made.func)
            defined = getattr(self.functions.definitions.get(made.func.id), "body", ())
            init = next((part for part in defined if getattr(part, "name", "") == "__init__"), None)
            positions = [argument.arg for argument in init.args.args[1:]] if isinstance(init, ast.FunctionDef) else []
            keywords = [*map(ast.keyword, positions, made.args), *made.keywords]
            options = {str(keyword.arg): self.value(keyword.value) for keyword in keywords}
            unread = len(made.args) > len(positions) or any(isinstance(value, Unknown) for value in options.values())
            if name is None or unread:
                self.note(
                    f"callbacks: {ast.unparse(made)[:80]} is made when the script runs: name a class in callbacks"
                )
                return ...
            return with_options(name, options)
        if isinstance(node, ast.Name) and node.id not in self.functions.definitions:
            if node.id in self.imported:
                return self.imported[node.id]
            value = self.lookup(node)
            if isinstance(value, ast.List | ast.Tuple | ast.Constant | ast.Name | ast.Attribute):
                return self.named(key, value)
        value = self.value(node)
        if isinstance(value, str):
            return f"model:{value}"
        if key == "grader" and not isinstance(node, ast.Name):
            return ast.unparse(node)
        if isinstance(node, ast.Attribute) and ast.unparse(node).partition(".")[0] not in self.values:
            return ast.unparse(node)  # of a module, rewards.format_reward
        name = self.functions.add(node)
        if name is None:
            if key == "grader":
                return ast.unparse(node)
            self.note(f"{key}: {ast.unparse(node)[:80]} is made when the script runs: name a function")
            return ...
        return name

    def _rows_of(self, name: str, node: ast.expr) -> Loaded:
        """Return the call that loads the rows of an expression, and what the script does with them."""
        split, first, changes = None, None, list[str]()
        held: Any = 0.0
        rows: Any = ...  # the first function that it maps
        for _ in range(MOST):
            if isinstance(node, ast.Name) and (value := self.lookup(node)) is not None:
                node = value
            elif isinstance(node, ast.IfExp):
                node = node.body
            elif isinstance(node, ast.Subscript):
                node, split = node.value, self.value(node.slice) if split is None else split
            elif (
                isinstance(node, ast.Call)
                and call_name(node) == "train_test_split"
                and isinstance(node.func, ast.Attribute)
                and not (name == "train_dataset" and split == "test")  # a part of the rows to train on, and no more
            ):
                given = {key.arg: self.value(key.value) for key in node.keywords}
                size = self.value(node.args[0]) if node.args else given.get("test_size")
                if size is None:  # as the library has it
                    rest = given.get("train_size", 0.75)
                    size = round(1 - rest, 10) if isinstance(rest, float) else rest
                if isinstance(held, float) and isinstance(size, float) and 0 < size < 1:
                    held += (1 - held) * size
                else:
                    held = f"train_test_split({', '.join(map(ast.unparse, (*node.args, *node.keywords)))})"
                node, split = node.func.value, None  # what follows is the split that it divides
            elif isinstance(node, ast.Call) and call_name(node) in ROWS and isinstance(node.func, ast.Attribute):
                batched, called = any(keyword.arg == "batched" for keyword in node.keywords), call_name(node)
                text = f"{called}({', '.join(map(ast.unparse, (*node.args, *node.keywords)))})"
                if called == "map" and batched and self._writes_text(node):
                    node = node.func.value
                    continue
                if first is not None and called not in KEEPING:
                    changes.append(f"select(range({first}))")
                    first = None
                if called == "select" and (size := self._first(node)) is not None:
                    first = size
                elif called == "map" and node.args and not batched and rows is ...:
                    rows = self.functions.add(node.args[0])
                    changes += [] if rows else [text]
                elif called not in ("shuffle", "remove_columns", "select_columns"):
                    changes.append(text)
                split = None if call_name(node) == "train_test_split" else split
                node = node.func.value
            elif isinstance(node, ast.Call) and call_name(node) in STANDARDIZING and node.args:
                node = node.args[0]
            elif isinstance(node, ast.ListComp) and rows is ... and (function := _of_each(node)):
                rows, node = self.functions.add(function), node.generators[0].iter
                changes += [] if rows else [ast.unparse(function)]
            elif isinstance(node, ast.Call) and isinstance(
                made := self.functions.definitions.get(call_name(node)), ast.FunctionDef
            ):
                returned = [part.value for part in ast.walk(made) if isinstance(part, ast.Return) and part.value]
                node = returned[-1] if returned else node
            else:
                break
        if changes:
            self.note(f"{name}: the script changes its rows, which is not done here: {', '.join(changes)[:160]}")
        return Loaded(node, split, held, None if rows is ... else rows, first)

    def _writes_text(self, node: ast.Call) -> bool:
        """Return True for a map that makes texts of conversations by the chat template, as the run does by itself."""
        name = node.args[0].id if node.args and isinstance(node.args[0], ast.Name) else ""
        made = self.functions.definitions.get(name)
        text = ast.unparse(made) if made else ""
        columns = set(re.findall(r"\w+\['(\w+)'\]", text))
        return "apply_chat_template" in text and columns in ({"conversations"}, {"messages"})

    def _first(self, node: ast.Call) -> int | None:
        """Return N of `rows.select(range(N))`, the first rows; None for others."""
        chosen = node.args[0] if node.args else None
        if not isinstance(chosen, ast.Call) or call_name(chosen) != "range" or len(chosen.args) != 1:
            return None
        size = self.value(chosen.args[0])
        return size if isinstance(size, int) else None

    def _source(self, name: str, node: ast.expr, **more: Any) -> dict[str, Any] | None:
        """Return one of several data sets as an entry of `data.sources` or, with a name, of `eval.sets`; None without a
        path."""
        found, split = self._dataset(name, node), f"dataset_{'train' if name == 'train_dataset' else 'test'}_split"
        keys = {"path": name, "split": split, "name": "dataset_config", "format": "dataset.map"}
        entry = more | {ours: found.get(theirs) for ours, theirs in keys.items()}
        return {key: value for key, value in entry.items() if value is not None} if name in found else None

    def _dataset(self, name: str, node: ast.expr) -> dict[str, Any]:
        """Return the path, configuration and split of `load_dataset(path, name, split=...)["split"]`, or the path of
        another of the LOADERS.

        A function of a row that the script maps is the format of the rows. In the place of the path are the sources of
        data sets that are joined, and of a dictionary of those to evaluate on the sets.
        """
        made = self.lookup(node) if isinstance(node, ast.Name) else node
        if name == "eval_dataset" and isinstance(made, ast.Dict):
            pairs = zip(made.keys, made.values, strict=True)
            sets = [one for key, value in pairs if key and (one := self._source(name, value, set=self.value(key)))]
            return {name: sets} if sets else {}
        whole, noted = node, len(self.unread)
        node, split, held, rows, first = self._rows_of(name, node)
        share = {"train_test_split": held} if held else {}
        if isinstance(node, ast.Call) and call_name(node) in JOINING and name == "train_dataset" and node.args:
            joined = self.lookup(node.args[0]) if isinstance(node.args[0], ast.Name) else node.args[0]
            parts = joined.elts if isinstance(joined, ast.List | ast.Tuple) else []
            weights = {keyword.arg: self.value(keyword.value) for keyword in node.keywords}.get("probabilities")
            if not isinstance(weights, list) or len(weights) != len(parts):  # in turn, or one after the other
                weights = [1.0 if call_name(node) == "interleave_datasets" else None] * len(parts)
            found = [self._source(name, part, weight=weight) for part, weight in zip(parts, weights, strict=True)]
            if found and all(found) and first is None:
                return {name: [{"format": rows, **one} if rows and one else one for one in found], **share}
        text, loaded = ast.unparse(node), isinstance(node, ast.Call) and call_name(node) in LOADERS and node.args
        absent, function = text.startswith("None"), f"{name.removesuffix('_dataset')}_rows"
        changed = not loaded or len(self.unread) > noted  # rows that the script makes, or of which a change is noted
        if changed and not absent and (copied := self.functions.add_rows(function, whole, self.lookup)):
            del self.unread[noted:]
            return {name: copied}
        if not (isinstance(node, ast.Call) and loaded):
            if not (absent or (share and name == "eval_dataset")):
                self.note(
                    f"{name} = {text[:60]} is known only when the script runs: write its rows to a file for "
                    "data.path, or call train(config, train_dataset=...)"
                )
            return share
        more = {keyword.arg: self.value(keyword.value) for keyword in node.keywords}
        path, splits = self.value(node.args[0]), more.get("split")
        if isinstance(splits, list):  # one data set for each
            split = splits[split if isinstance(split, int) else 0]
        split = splits if split is None else split
        if isinstance(path, Unknown) and self.parsed:
            return share
        path = more.get("data_files", path) if path in ("json", "csv", "parquet") else path
        if isinstance(path, dict):  # data_files by split; each file is one split, train
            path, split = path.get(split, next(iter(path.values()))), "train"
        settings = {name: path, **share}
        if rows and name == "train_dataset":
            settings["dataset.map"] = rows
        if len(node.args) > 1 or "name" in more:
            settings["dataset_config"] = self.value(node.args[1]) if len(node.args) > 1 else more["name"]
        if self.parsed:  # what the command line leaves out is as by default
            settings = {key: value for key, value in settings.items() if not isinstance(value, Unknown)}
        if first is not None:
            if isinstance(split, str) and "[" not in split:
                split = f"{split}[:{first}]"
            else:
                self.note(f"{name}: the script takes its first {first} rows, which is not done here")
        if isinstance(split, str):
            settings["dataset_train_split" if name == "train_dataset" else "dataset_test_split"] = split
        return settings
