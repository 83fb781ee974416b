"""What a file of another library says, as a `Source`: YAML, JSON, a shell script, or a Python script.

Nothing is run.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from jaxrl_llm.config import flat
from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.tools.migrate.draft import Source
from jaxrl_llm.tools.migrate.scripts import read_script
from jaxrl_llm.tools.migrate.shell import commands

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")  # YAML 1.1 takes 1e-6 for a text
SHELL = ("", ".sh", ".bash", ".slurm", ".sbatch", ".txt")
TRL_COMMANDS = ("grpo", "rloo", "ppo", "sft", "dpo", "kto", "orpo", "cpo", "reward")
# Names of projects and runs are environment variables of the trackers, which scripts set in these ways:
# `export NAME=value`, `NAME=value command`, `os.environ["NAME"] = "value"`.
TRACKED = "WANDB_PROJECT WANDB_NAME WANDB_ENTITY WANDB_MODE MLFLOW_EXPERIMENT_NAME MLFLOW_TRACKING_URI " \
          "SWANLAB_PROJECT TRACKIO_PROJECT"  # fmt: skip
VARIABLE = re.compile(rf"""\b({TRACKED.replace(" ", "|")})\b["'\]]*\s*[=,]\s*["']?([^\s"'$)]+)""")
LAUNCHERS = {
    "--num_processes": "num_processes",
    "--num-processes": "num_processes",
    "--nproc_per_node": "num_processes",
    "--nproc-per-node": "num_processes",
}


def read(path: str, system: str = "auto", trainer: str = "") -> Source:
    """What the file says; `system` is trl, verl, axolotl, harmony or auto, which looks at its keys.

    Raises ConfigError: a missing file, one of another kind, or one that cannot be read.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"there is no file {path} (looked in {Path.cwd()})")
    kind, text = file.suffix.lower(), file.read_text(encoding="utf-8")
    if kind == ".py":
        return _with_variables(read_script(text, path, system, trainer), text)
    if kind in (".yaml", ".yml", ".json"):
        tree = _tree(text, path, kind)
        return _of_tree(tree, path, _system_of(tree, path) if system == "auto" else system, trainer)
    if kind in SHELL:
        return _with_variables(_of_shell(text, path, system, trainer), text)
    raise ConfigError(f"{path} is no .yaml, .json, .py or .sh file")


def _with_variables(source: Source, text: str) -> Source:
    """The source with what a script of TRL tells the trackers; verl's `trainer.project_name` says it there."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    found = dict(VARIABLE.findall(lines)) if source.system == "trl" else {}
    return source._replace(given={**found, **source.given})


def _tree(text: str, path: str, kind: str) -> dict[str, Any]:
    try:
        tree = json.loads(text) if kind == ".json" else yaml.safe_load(text)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds {type(tree).__name__}, not a dictionary of keys")
    return numbers(tree)


def numbers(value: Any) -> Any:
    """The value with texts that are numbers with an exponent as numbers."""
    if isinstance(value, Mapping):
        return {str(key): numbers(one) for key, one in value.items()}
    if isinstance(value, list):
        return [numbers(one) for one in value]
    return float(value) if isinstance(value, str) and NUMBER.fullmatch(value) else value


def _system_of(tree: Mapping[str, Any], path: str) -> str:
    if "actor_rollout_ref" in tree or "partial_pretrain" in (tree.get("model") or {} if isinstance(
            tree.get("model"), Mapping) else {}):  # fmt: skip
        return "verl"
    if "base_model" in tree or "rl" in tree or isinstance(tree.get("datasets"), list):
        return "axolotl"
    if any(isinstance(tree.get(key), Mapping) for key in ("trainer", "algorithm", "data")):
        return "verl"
    if any(key in tree for key in ("model_name_or_path", "dataset_name", "learning_rate", "output_dir")):
        return "trl"
    raise ConfigError(f"{path} is no file of TRL, verl or axolotl that is known; say which with --system")


def _of_tree(tree: dict[str, Any], path: str, system: str, trainer: str) -> Source:
    if system == "verl":
        return Source("verl", trainer, _resolved(flat(tree)), path)
    return Source(system, trainer or str(tree.pop("trainer", "") if system == "trl" else ""), tree, path)


def _resolved(given: dict[str, Any]) -> dict[str, Any]:
    """verl's values with `${other.key}` looked up, and those left out that are null or say only that."""

    def value_of(value: Any, depth: int = 0) -> Any:
        if not isinstance(value, str) or "${" not in value or depth > 8:
            return value
        whole = re.fullmatch(r"\$\{([\w.]+)\}", value)
        if whole:
            return value_of(given.get(whole[1]), depth + 1)
        return re.sub(r"\$\{([\w.]+)\}", lambda name: str(value_of(given.get(name[1], ""), depth + 1)), value)

    found = {key: value_of(value) for key, value in given.items()}
    return {key: value for key, value in found.items() if value is not None and key != "defaults"}


def _of_shell(text: str, path: str, system: str, trainer: str) -> Source:
    """What the commands of a shell script say that start a training."""
    found = [words for words in commands(text, path) if _starts_training(words)]
    trains = [words for words in found if "verl.trainer.main" in " ".join(words)]
    found = trains or found  # others prepare data
    if len(found) != 1:
        raise ConfigError(f"{path} has {len(found)} commands that train, and one is needed: `trl grpo ...`, "
                          "`accelerate launch FILE.py ...`, `python -m verl.trainer.main_ppo a=b ...`")  # fmt: skip
    words = found[0]
    overrides = [word for word in words if re.fullmatch(r"\+{0,2}[A-Za-z_][\w.]*=.*", word, re.DOTALL) and "." in
                 word.partition("=")[0]]  # fmt: skip
    if system == "verl" or (system == "auto" and overrides):
        if "fsdp_sft_trainer" in " ".join(words) or "sft_trainer" in " ".join(words):
            trainer = trainer or "sft"
        return Source("verl", trainer, _resolved(_of_overrides(overrides)), path)
    return _of_flags(words, path, trainer)


def _starts_training(words: Sequence[str]) -> bool:
    line = " ".join(words)
    if "vllm-serve" in line or words[0] in ("pip", "echo", "set", "cd", "ray"):
        return False
    if "verl.trainer" in line or "verl/trainer" in line:
        return True
    if any(re.fullmatch(r"[\w.]+\.[\w.]+=.*", word, re.DOTALL) for word in words):
        return True
    runs_script = any(word.endswith(".py") for word in words) and any("--" in word for word in words)
    return runs_script or ("trl" in [Path(word).name for word in words] and any(word in TRL_COMMANDS for word in words))


def _of_overrides(words: Sequence[str]) -> dict[str, Any]:
    given = {}
    for word in words:
        key, _, text = word.lstrip("+").partition("=")
        given[key] = parsed(text)
    return flat(given)


def parsed(text: str) -> Any:
    """What a value on a command line stands for: as YAML, numbers with exponents and None included."""
    if text in ("None", "null"):
        return None
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return numbers(value) if value is not None else text


def _of_flags(words: Sequence[str], path: str, trainer: str) -> Source:
    """TRL's flags: `--name value`, `--name=value`, `--name a b`, and `--name` alone for true."""
    given: dict[str, Any] = {}
    named = [word for before, word in pairwise(words) if Path(before).name == "trl" and word in TRL_COMMANDS]
    script = next((Path(word).stem for word in words if word.endswith(".py")), "")
    trainer = trainer or (named[0] if named else next((name for name in TRL_COMMANDS if name in
                                                       script.replace("-", "_").split("_")), ""))  # fmt: skip
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not word.startswith("--"):
            continue
        name, equals, text = word[2:].partition("=")
        values = [text] if equals else []
        while not equals and index < len(words) and not words[index].startswith("--"):
            if words[index].endswith(".py"):
                break
            values.append(words[index])
            index += 1
        key = LAUNCHERS.get(f"--{name}", name.replace("-", "_"))
        if not values and key.startswith("no_") and key != "no_cuda":
            given[key.removeprefix("no_")] = False
        else:
            given[key] = True if not values else parsed(values[0]) if len(values) == 1 else [parsed(v) for v in values]
    return _with_config(given, path, trainer)


def _with_config(given: dict[str, Any], path: str, trainer: str) -> Source:
    """`--config FILE` of TRL's command line holds more of the same."""
    more = given.pop("config", None)
    if isinstance(more, str):
        file = Path(path).parent / more if not Path(more).is_file() else Path(more)
        if not file.is_file():
            raise ConfigError(f"{path} reads {more}, which is not there")
        given = {**_tree(file.read_text(encoding="utf-8"), str(file), ".yaml"), **given}
    for key in ("reward_funcs", "loss_type", "lora_target_modules", "report_to"):
        if isinstance(given.get(key), str) and key == "reward_funcs":
            given[key] = [given[key]]
    return Source("trl", trainer, given, path)
