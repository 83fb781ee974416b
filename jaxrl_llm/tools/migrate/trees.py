"""Reading YAML and JSON files of other libraries: which one they are of, and what their values refer to."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from jaxrl_llm.config import flat
from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.tools.migrate.draft import Source
from jaxrl_llm.tools.migrate.trl import RULES

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")  # YAML 1.1 takes 1e-6 for a text
TREES = (".yaml", ".yml", ".json")
# Sections of the YAML of libraries, of which two tell it.
SECTIONS = {
    "tunix": {
        "model_config", "actor_model_config", "tokenizer_config", "rollout_config", "rl_training_config",
        "training_config", "optimizer_config", "grpo_config", "agentic_grpo_config", "ppo_config", "reward_functions",
        "training_mode",
    },
    "nemo-rl": {
        "policy", "loss_fn", "grpo", "ppo", "sft", "dpo", "rm", "distillation", "cluster", "checkpointing", "env",
        "data_plane", "reward_penalties",
    },
}  # fmt: skip
# Sections of axolotl's YAML that are the value of one key.
WHOLE = (
    "lr_scheduler_kwargs", "optim_args", "gradient_checkpointing_kwargs", "fsdp_config", "chat_template_kwargs",
    "lora_rank_pattern", "lora_alpha_pattern", "pretraining_dataset",
)  # fmt: skip


def file_named(name: str | Path, path: str) -> Path | None:
    """Return the file that the file `path` names: beside it, from here, or from a folder above it, where the root of a
    checkout may be; None where it is in none of them."""
    above = Path(path).resolve().parent.parents
    places = (Path(path).parent / name, Path(name), *(folder / name for folder in above))
    return next((file for file in places if name and file.is_file()), None)


def load(file: Path, path: str = "", kind: str = "") -> dict[str, Any]:
    """Return the keys of a file, of JSON where its suffix, or `kind`, says so; raises ConfigError for another content.

    The error names the file as `path`, if that is given.
    """
    text, path, kind = file.read_text(encoding="utf-8"), path or str(file), kind or file.suffix.lower()
    try:
        tree = json.loads(text) if kind == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds {type(tree).__name__}, not a dictionary of keys")
    return _numbers(tree)


def _numbers(value: Any) -> Any:
    """Return the value with numbers in place of texts that are numbers with an exponent."""
    if isinstance(value, Mapping):
        return {str(key): _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return float(value) if isinstance(value, str) and NUMBER.fullmatch(value) else value


def parsed(text: str) -> Any:
    """Return the value of a text on a command line: as YAML, with exponents and None."""
    if text in ("None", "null"):
        return None
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return _numbers(value) if value is not None else text


OF_LLAMAFACTORY = ({"stage", "dataset"}, {"model_name_or_path", "template"})  # keys that no other library has together


def read_tree(tree: dict[str, Any], path: str, system: str, trainer: str) -> Source:
    """Return the content of a YAML or JSON file, whose keys tell the library where `system` is auto."""
    model, datasets = tree.get("model"), tree.get("datasets")
    # Those of axolotl have a type, and those of TRL's mixtures none.
    told = [library for library, sections in SECTIONS.items() if len(sections & tree.keys()) > 1]
    typed = isinstance(datasets, list) and any(isinstance(one, Mapping) and "type" in one for one in datasets)
    if system != "auto":
        library = system
    elif told:
        library = told[0]
    elif "model_class" in tree:
        raise ConfigError(
            f"{path} is of the v1 engine of LLaMA-Factory, whose files are not read; those with stage and dataset are"
        )
    elif "finetuning_type" in tree or any(keys <= tree.keys() for keys in OF_LLAMAFACTORY):
        library = "llamafactory"
    elif "actor_rollout_ref" in tree or (isinstance(model, Mapping) and "partial_pretrain" in model):
        library = "verl"
    elif "base_model" in tree or "rl" in tree or typed:
        library = "axolotl"
    elif any(isinstance(tree.get(key), Mapping) for key in ("trainer", "algorithm", "data")):
        library = "verl"
    elif any(key in tree for key in ("model_name_or_path", "dataset_name", "datasets", "learning_rate", "output_dir")):
        library = "trl"
    else:
        raise ConfigError(f"{path} has no keys by which its library is known; say which with --system")
    if library == "verl":
        return Source("verl", trainer, resolved(flat(tree)), path)
    if library == "llamafactory":
        return Source(library, trainer, {key: value for key, value in tree.items() if value is not None}, path)
    if library in SECTIONS:
        settings = flat(tree)
        return Source(library, trainer, resolved(settings, nulls=True) if library == "nemo-rl" else settings, path)
    if library == "axolotl":
        settings = {}
        for key, value in tree.items():
            if isinstance(value, Mapping) and key not in WHOLE:
                settings |= {f"{key}.{name}": item for name, item in value.items()}
            else:
                settings[key] = value
        return Source(library, trainer, {key: value for key, value in settings.items() if value is not None}, path)
    named = str(tree.pop("trainer", "")) if library == "trl" else ""
    checks = ()
    if library == "trl" and not (trainer or named):  # recipes/NAME/dpo/config.yaml
        words = trainers_named(path)
        named = words[-1] if words else ""
        checks = (f"the trainer is {named}, by the name of the file: --trainer is another",) if words else ()
    return Source(library, trainer or named, tree, path, checks)


def trainers_named(path: str) -> list[str]:
    """Return the trainers of TRL that the words of a path name: dpo of recipes/zephyr/dpo/config.yaml."""
    path = re.sub(r"(async|online|server)[\W_]+(dpo|grpo|distillation)", r"\1\2", path.lower())
    words = re.split(r"[\W_]+", re.sub(r"iw[\W_]+opd", "iwopd", path))
    return [word for word in words if word in RULES]


def resolved(settings: dict[str, Any], nulls: bool = False) -> dict[str, Any]:
    """Return verl's values with `${other.key}` and `${oc.env:NAME,default}` looked up; null ones with `nulls` alone."""

    def looked_up(match: re.Match[str]) -> str:
        kind, _, rest = match[1].rpartition(":")
        if kind == "mul" and re.fullmatch(r"\s*\d+\s*,\s*\d+\s*", rest):  # of NeMo-RL
            return str(math.prod(map(int, rest.split(","))))
        name, comma, unset = rest.partition(",")
        if kind == "oc.env":
            return str(Path.home()) if name == "HOME" else unset.strip() if comma else match[0]
        value = settings.get(name)
        return str(value) if kind in ("", "oc.select") and value is not None else unset.strip() if comma else match[0]

    def value_of(value: Any, depth: int = 0) -> Any:
        if not isinstance(value, str) or "${" not in value or depth > 8:
            return value
        alone = re.fullmatch(r"\$\{([\w.]+)\}", value)
        if alone and alone[1] in settings:
            return value_of(settings[alone[1]], depth + 1)
        filled = re.sub(r"\$\{([^${}]+)\}", looked_up, value)
        return value if filled == value else value_of(parsed(filled), depth + 1)

    def absolute(key: str, value: Any) -> Any:
        """Return a value with `${.name}`, of the section of its key, and `${..name}`, of the one above, in full."""

        def named(match: re.Match[str]) -> str:
            return "${" + ".".join((*key.split(".")[: -len(match[1])], match[2])) + "}"

        return re.sub(r"\$\{(\.+)([\w.]+)\}", named, value) if isinstance(value, str) else value

    settings = {key: absolute(key, value) for key, value in settings.items()}
    values = {key: value_of(value) for key, value in settings.items()}
    return {key: value for key, value in values.items() if (nulls or value is not None) and key != "defaults"}


def inherited(file: Path, overrides: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the keys of a file of NeMo-RL and of those that it builds on (`defaults: PARENT.yaml`), and notes.

    Files that are not there are those of its examples, whose values are the defaults, or noted.
    """
    layers, notes = [dict(overrides or {})], []
    while file.is_file():
        tree = load(file)
        parent = tree.pop("defaults", None)
        layers.append(flat(tree))
        if not isinstance(parent, str):
            break
        file = file.parent / parent
    else:
        if not re.search(r"(grpo_math_1B|sft|dpo|rm|distillation_math)\.yaml$", file.name):
            notes.append(f"{file} is not there: its keys are missing")
    settings: dict[str, Any] = {}
    for layer in reversed(layers):
        # A value takes the place of a section of the same name, and a section that of a value.
        replaced = {key for key in settings if any(f"{key}.".startswith(f"{new}.") for new in layer)}
        above = {new[: match.start()] for new in layer for match in re.finditer(r"\.", new)}
        settings = {key: value for key, value in settings.items() if key not in replaced | above} | layer
    return resolved(settings, nulls=True), tuple(notes)
