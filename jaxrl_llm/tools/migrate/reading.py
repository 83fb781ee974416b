"""Reading a file of another library into a `Source`: YAML, JSON, a shell script or a Python script; nothing is run."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from jaxrl_llm.config import flat
from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.tools.migrate.draft import Source
from jaxrl_llm.tools.migrate.scripts import PARSERS, read_script
from jaxrl_llm.tools.migrate.shell import commands
from jaxrl_llm.tools.migrate.table import find, table
from jaxrl_llm.tools.migrate.trl import RULES
from jaxrl_llm.tools.migrate.tunix_scripts import read_tunix

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")  # YAML 1.1 takes 1e-6 for a text
SHELL = ("", ".sh", ".bash", ".slurm", ".sbatch", ".txt")
LAUNCHERS = ("accelerate", "torchrun", "deepspeed", "trl", "axolotl", "uv")
DEVICES = {"--nproc_per_node": "trainer.n_gpus_per_node", "--nproc-per-node": "trainer.n_gpus_per_node"}
TREES = (".yaml", ".yml", ".json")
# Sections of the YAML of libraries, of which two tell it, and words of the commands that start them.
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
STARTED = {
    "llamafactory": re.compile(r"\bllamafactory-cli train\b"),
    "tunix": re.compile(r"\btunix[./]cli\b"),
    "openrlhf": re.compile(r"\bopenrlhf[./]cli\b"),
    # Scripts of others have flags besides.
    "nemo-rl": re.compile(r"\bexamples/run_(vlm_)?(grpo|ppo|sft|dpo|rm|distillation)\w*\.py(?!.* --(?!config\b))"),
}
TUNIX = {"grpo_main": "grpo", "grpo_vllm_main": "grpo", "ppo_main": "ppo", "peft_main": "sft"}
# Names of projects and runs are environment variables of the trackers, which scripts set in these ways:
# `export NAME=value`, `NAME=value command`, `os.environ["NAME"] = "value"`.
TRACKED = (
    "WANDB_PROJECT|WANDB_NAME|WANDB_ENTITY|WANDB_MODE|MLFLOW_EXPERIMENT_NAME|MLFLOW_TRACKING_URI|SWANLAB_PROJECT|"
    "TRACKIO_PROJECT"
)
VARIABLE = re.compile(rf"""\b({TRACKED})\b["'\]]*\s*[=,]\s*["']?([^\s"'$)]+)""")
# Sections of axolotl's YAML that are the value of one key.
WHOLE = (
    "lr_scheduler_kwargs", "optim_args", "gradient_checkpointing_kwargs", "fsdp_config", "chat_template_kwargs",
    "lora_rank_pattern", "lora_alpha_pattern", "pretraining_dataset",
)  # fmt: skip


def read(path: str, system: str = "auto", trainer: str = "", companion: str = "functions.py") -> Source:
    """Return the content of a file; `system` is a library, or auto, which looks at its keys.

    Functions that the file defines are named as those of the file `companion`. Raises ConfigError: a missing file, one
    of another kind, or one that cannot be read.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"there is no file {path} (looked in {Path.cwd()})")
    kind, text = file.suffix.lower(), file.read_text(encoding="utf-8")
    if kind in TREES:
        tree = _load(text, path, kind)
        parents = tree.get("defaults")  # of NeMo-RL a file, of Hydra a list of groups
        if system == "nemo-rl" or (system == "auto" and isinstance(parents, str)):
            source = Source("nemo-rl", trainer, *_inherited(file))
        else:
            source = _read_tree(tree, path, system, trainer)
    elif kind == ".py":
        source = _read_python(text, path, system, trainer, companion)
        if (
            source.library != "tunix"
            and (command := _documented(text))
            and not source.settings.keys()
            & {
                "max_steps",
                "learning_rate",
                "dataset_name",
            }
        ):
            flags = _read_flags(command, path, trainer)
            source = read_script(text, path, system, trainer or flags.trainer, companion, flags.settings)
            source = source._replace(
                checks=(*source.checks, "the arguments are those of the first command in its text")
            )
    elif kind in SHELL:
        source = _read_shell(text, path, system, trainer, companion)
    else:
        raise ConfigError(f"{path} is no .yaml, .json, .py or .sh file")
    if system == "auto" and kind != ".py":
        _check_keys(source)
    if source.library != "trl" or kind in TREES:  # verl has keys for the names of projects and runs
        return source
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return source._replace(settings={**dict(VARIABLE.findall(lines)), **source.settings})


def _read_python(
    text: str, path: str, system: str, trainer: str, companion: str, flags: dict[str, Any] | None = None
) -> Source:
    """Return what a Python script configures; one that imports Tunix and not TRL is Tunix's."""
    imports = re.findall(r"(?m)^\s*(?:from|import) (\w+)", text)
    if system == "tunix" or (system == "auto" and "tunix" in imports and "trl" not in imports):
        return read_tunix(text, path, trainer, companion)
    return read_script(text, path, system, trainer, companion, flags)


def _documented(text: str) -> list[str] | None:
    """Return the words of the command in the docstring of a script that reads its arguments from a command line."""
    if not any(parser in text for parser in PARSERS):
        return None
    launched = r"(?m)^[ \t#]*((?:[A-Z_]+=\S+ +)*(?:accelerate|python3?|torchrun|trl|uv)\b(?:.*\\\n)*.*)"
    found = next((match[1] for match in re.finditer(launched, text) if ".py" in match[1]), "")
    try:
        words = next(iter(commands(re.sub(r"(?m)^[ \t]*#", "", found), "its command")), [])
    except ConfigError:
        return None
    return words if any(word.startswith("--") for word in words) else None


def _load(text: str, path: str, kind: str) -> dict[str, Any]:
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


def _check_keys(source: Source) -> None:
    """Raise ConfigError for a file of a library that is not known here, such as SkyRL.

    Its keys look like those of one that is, but most are none of that one's: what would be written are defaults.
    """
    if source.library not in ("trl", "verl"):  # others are told by names of their own
        return
    unknown = [key for key in source.settings if find(table(source.library), key) is None]
    if 2 * len(unknown) > len(source.settings):
        raise ConfigError(
            f"{source.path} is no file of TRL, verl, axolotl or Harmony: {len(unknown)} of its {len(source.settings)} "
            f"keys are none of {source.library}'s, such as {', '.join(unknown[:3])}. Set in a file of configs/ what it "
            f"says (docs/configuration.md has the keys), or say --system={source.library} if it is one"
        )


def _read_tree(tree: dict[str, Any], path: str, system: str, trainer: str) -> Source:
    """Return the content of a YAML or JSON file, whose keys tell the library where `system` is auto."""
    model, datasets = tree.get("model"), tree.get("datasets")
    # Those of axolotl have a type, and those of TRL's mixtures none.
    told = [library for library, sections in SECTIONS.items() if len(sections & tree.keys()) > 1]
    typed = isinstance(datasets, list) and any(isinstance(one, Mapping) and "type" in one for one in datasets)
    if system != "auto":
        library = system
    elif told:
        library = told[0]
    elif "finetuning_type" in tree or {"stage", "dataset"} <= tree.keys():
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
        raise ConfigError(f"{path} is no file of TRL, verl or axolotl that is known; say which with --system")
    if library == "verl":
        return Source("verl", trainer, _resolved(flat(tree)), path)
    if library == "llamafactory":
        return Source(library, trainer, {key: value for key, value in tree.items() if value is not None}, path)
    if library in SECTIONS:
        settings = flat(tree)
        return Source(library, trainer, _resolved(settings, nulls=True) if library == "nemo-rl" else settings, path)
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
        words = _named(path)
        named = words[-1] if words else ""
        checks = (f"the trainer is {named}, by the name of the file: --trainer is another",) if words else ()
    return Source(library, trainer or named, tree, path, checks)


def _named(path: str) -> list[str]:
    """Return the trainers of TRL that the words of a path name: dpo of recipes/zephyr/dpo/config.yaml."""
    path = re.sub(r"(async|server)[\W_]+(grpo|distillation)", r"\1\2", path.lower())
    words = re.split(r"[\W_]+", re.sub(r"iw[\W_]+opd", "iwopd", path))
    return [word for word in words if word in RULES]


def _resolved(settings: dict[str, Any], nulls: bool = False) -> dict[str, Any]:
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


def _read_shell(text: str, path: str, system: str, trainer: str, companion: str) -> Source:
    """Return the flags or overrides of the first command of a shell script that trains, and of the file it names."""
    found = commands(text, path)
    trains = [words for words in found if _trains(words)]
    trains = [words for words in trains if "verl.trainer" in " ".join(words)] or trains  # others prepare data
    serves = [words for words in found if "vllm-serve" in words or {"vllm", "serve"} <= set(words)]
    if serves and not trains:
        model = _read_flags(serves[0], path, trainer).settings.get("model", "FOLDER")
        raise ConfigError(
            f"{path} serves a model and trains nothing: `python -m jaxrl_llm serve --model={model}` does that here. "
            "Training needs no server: its sampler is built in"
        )
    if not trains:
        raise ConfigError(
            f"{path} has 0 commands that train, and one is needed: `trl grpo ...`, `accelerate launch FILE.py ...`, "
            "`python -m verl.trainer.main_ppo a=b ...`, `axolotl train FILE.yml`, "
            "`python -m tunix.cli.grpo_main ...`, `python -m openrlhf.cli.train_ppo_ray ...`, "
            "`uv run examples/run_grpo.py ...`"
        )
    words, checks = trains[0], ()
    if len(trains) > 1:
        checks = (f"the file has {len(trains)} commands that train, and the first is written",)
    if str(Path.home()) in " ".join(words) and "HOME" in text:
        checks = (*checks, f"$HOME is {Path.home()} in the paths below, as on this machine")
    starts = (i for i, word in enumerate(words) if Path(word).name in LAUNCHERS or "python" in Path(word).name)
    words = [word for word in words[next(starts, 0) :] if word]  # without srun and its flags
    line = " ".join(words)
    started = _started(line)
    if "tunix" in (system, started) and system in ("tunix", "auto"):
        return _read_tunix_command(words, path, trainer, checks)
    if "nemo-rl" in (system, started) and system in ("nemo-rl", "auto"):
        return _read_nemo_command(words, path, trainer, checks)
    if "openrlhf" in (system, started) and system in ("openrlhf", "auto"):
        words = [part for word in words for part in (word.split() if "openrlhf.cli" in word else [word])]
        start = next((i for i, word in enumerate(words) if re.search(r"openrlhf[./]cli", word)), 0)
        command = words[start].removesuffix(".py").rpartition("train_")[2].removesuffix("_ray")
        return _read_flags(words[start + 1 :], path, "", launched=False)._replace(
            library="openrlhf", trainer=trainer or command, checks=checks
        )
    overrides = [word for word in words if re.fullmatch(r"\+{0,2}[A-Za-z_]\w*\.[\w.]*=.*", word, re.DOTALL)]
    if system == "verl" or (system == "auto" and (overrides or "verl.trainer" in line)):
        pairs = (word.lstrip("+").partition("=") for word in overrides)
        settings = flat({key: parsed(value) for key, _, value in pairs})
        flags = dict(word.split("=", 1) for word in words if re.match(r"--[\w-]+=", word))
        settings |= {flag: value for flag, value in flags.items() if flag.startswith("--config-")}
        settings |= {key: parsed(flags[flag]) for flag, key in DEVICES.items() if flag in flags and key not in settings}
        settings = {key: value for key, value in settings.items() if value is not None}
        return Source("verl", trainer or ("sft" if "sft_trainer" in line else ""), _resolved(settings), path, checks)

    def beside(ends: tuple[str, ...]) -> Path | None:
        names = [word for word in words if word.endswith(ends) and not word.startswith("--")]
        files = (file for name in names for file in (Path(path).parent / name, Path(name)))
        return next((file for file in files if file.is_file()), None)

    if "llamafactory" in (system, started) and (file := beside(TREES)):
        pairs = (word.partition("=") for word in words if re.match(r"\w+=", word))
        tree = _load(file.read_text(encoding="utf-8"), str(file), file.suffix)
        tree |= {key: parsed(value) for key, _, value in pairs}
        return _read_tree(tree, str(file), "llamafactory", trainer)._replace(checks=checks)
    if "axolotl" in line and (file := beside(TREES)):
        source = _read_tree(_load(file.read_text(encoding="utf-8"), str(file), file.suffix), path, "axolotl", trainer)
        flags = _read_flags([word for word in words if word != str(file)], path, trainer).settings
        return source._replace(settings={**source.settings, **flags}, checks=(*checks, *source.checks))
    source = _read_flags(words, path, trainer)
    if (file := beside((".py",))) and re.search(
        r"\btrl\b|adaptive_harmony|\btunix\b", code := file.read_text(encoding="utf-8")
    ):
        script = _read_python(code, str(file), system, trainer, companion, source.settings)
        source = script._replace(path=path)
    elif not source.settings.keys() & {"model_name_or_path", "dataset_name", "config"}:
        started = next((word for word in words if word.endswith(".py")), "")
        note = f"{started}, which it starts, is not beside it: the model, data and rewards that it names are missing"
        checks = (*checks, note) if started and not file else checks
    return source._replace(checks=(*checks, *source.checks))


def _inherited(file: Path, overrides: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], str, tuple[str, ...]]:
    """Return the keys of a file of NeMo-RL and of those that it builds on (`defaults: PARENT.yaml`), its path, notes.

    Files that are not there are those of its examples, whose values are the defaults, or noted.
    """
    layers, notes, child = [dict(overrides or {})], [], file
    while file.is_file():
        tree = _load(file.read_text(encoding="utf-8"), str(file), file.suffix)
        parent = tree.pop("defaults", None)
        layers.append(flat(tree))
        if not isinstance(parent, str):
            break
        file = file.parent / parent
    else:
        if not re.search(r"(grpo_math_1B|sft|dpo|rm|distillation_math)\.yaml$", file.name):
            notes.append(f"{file} is not there: its keys are missing")
    settings = {key: value for layer in reversed(layers) for key, value in layer.items()}
    return _resolved(settings, nulls=True), str(child), tuple(notes)


def _read_nemo_command(words: Sequence[str], path: str, trainer: str, checks: tuple[str, ...]) -> Source:
    """Return the keys of `uv run examples/run_grpo.py --config FILE.yaml a.b=c +d.e=f`."""
    script = next((Path(word).stem for word in words if "examples/run_" in word), "")
    told = next((kind for kind in ("grpo", "sft", "dpo", "rm", "distillation", "ppo") if kind in script.split("_")), "")
    named = next((after for before, after in pairwise(words) if before == "--config"), "")
    named = next((word.partition("=")[2] for word in words if word.startswith("--config=")), named)
    pairs = (word.lstrip("+").partition("=") for word in words if re.match(r"\+{0,2}[A-Za-z_][\w.]*=", word))
    overrides = flat({key: parsed(value) for key, _, value in pairs if "." in key})
    file = next(
        (file for file in (Path(path).parent / named, Path(named)) if file.is_file()), Path(named or f"{told}.yaml")
    )
    settings, _, notes = _inherited(file, overrides)
    return Source("nemo-rl", trainer or told, settings, path, (*checks, *notes))


def _read_tunix_command(words: Sequence[str], path: str, trainer: str, checks: tuple[str, ...]) -> Source:
    """Return the keys of `python -m tunix.cli.grpo_main BASE.yaml override_config_file=FILE key=value`."""
    entry = next(
        (Path(word.removesuffix(".py").replace(".", "/")).name for word in words if re.search(r"tunix[./]cli", word)),
        "",
    )
    pairs = {key: value for key, sign, value in (word.partition("=") for word in words) if sign and key[:1].isalpha()}
    trees = []
    for name in (
        next((word for word in words if word.endswith(TREES) and "=" not in word), ""),
        pairs.pop("override_config_file", ""),
    ):
        file = next((file for file in (Path(path).parent / name, Path(name)) if name and file.is_file()), None)
        shipped = name.endswith(("base_config.yaml", "base_agentic_config.yaml"))  # whose values are the defaults
        trees.append(
            flat(_load(file.read_text(encoding="utf-8"), str(file), file.suffix)) if file and not shipped else {}
        )
        if name and not (file or shipped):
            checks = (*checks, f"the command reads {name}, which is not there: its keys are missing")
    base, given = trees[0], trees[1] | flat({key: parsed(value) for key, value in pairs.items()})
    replaced = {"training_config", "optimizer_config", "rl_training_config"} & {key.partition(".")[0] for key in given}
    settings = {key: value for key, value in base.items() if key.partition(".")[0] not in replaced} | given
    return Source("tunix", trainer or TUNIX.get(entry, ""), settings, path, checks)


def _started(line: str) -> str:
    """Return the library of STARTED that a command starts; empty for another."""
    return next((library for library, start in STARTED.items() if start.search(line)), "")


def _trains(words: Sequence[str]) -> bool:
    """Return True for the words of a command that trains."""
    line = " ".join(words)
    if "vllm-serve" in line or not words or words[0] in ("pip", "echo", "set", "cd"):
        return False
    if words[0] == "ray" and not any("python" in word for word in words):
        return False
    if "verl.trainer" in line or "verl/trainer" in line or _started(line):
        return True
    if any(re.fullmatch(r"[\w.]+\.[\w.]+=.*", word, re.DOTALL) for word in words):
        return True
    if any(word.endswith(".py") for word in words) and any("python" in word or word in LAUNCHERS for word in words):
        return "--" in line or "accelerate" in line or "torchrun" in line
    if "axolotl" in line and any(word.endswith(TREES) for word in words):
        return "preprocess" not in words
    return "trl" in [Path(word).name for word in words] and any(word in RULES for word in words)


def parsed(text: str) -> Any:
    """Return the value of a text on a command line: as YAML, with exponents and None."""
    if text in ("None", "null"):
        return None
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return _numbers(value) if value is not None else text


def _read_flags(words: Sequence[str], path: str, trainer: str, launched: bool = True) -> Source:
    """Return TRL's flags: `--name value`, `--name=value`, `--name a b`, and `--name` alone for true.

    A `.py` ends the flags of the launcher, if the words are `launched`.
    """
    settings: dict[str, Any] = {}
    if not trainer:
        named = [word for before, word in pairwise(words) if Path(before).name == "trl" and word in RULES]
        script = next((Path(word).stem for word in words if word.endswith(".py")), "")
        trainer = next(iter((*named, *_named(script))), "")
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not word.startswith("--"):
            continue
        name, equals, text = word[2:].partition("=")
        values = [text] if equals else []
        while not equals and index < len(words) and not words[index].startswith("--"):
            if launched and words[index].endswith(".py"):
                break
            values.append(words[index])
            index += 1
        key = name.replace("-", "_")
        key = "num_processes" if key == "nproc_per_node" else key
        if not values and key.startswith("no_") and key != "no_cuda":
            settings[key.removeprefix("no_")] = False
        else:
            several = [parsed(value) for value in values]
            settings[key] = several[0] if len(several) == 1 else several or True
    # `--config FILE` of TRL's command line holds more of the same.
    more, checks = settings.pop("config", None), ()
    if isinstance(more, str):
        file = Path(more) if Path(more).is_file() else Path(path).parent / more
        if file.is_file():
            settings = {**_load(file.read_text(encoding="utf-8"), str(file), ".yaml"), **settings}
        else:
            checks = (f"the command reads --config {more}, which is not there: its keys are missing",)
    if isinstance(settings.get("reward_funcs"), str):
        settings["reward_funcs"] = [settings["reward_funcs"]]
    return Source("trl", trainer, settings, path, checks)
