"""Reading commands that start a training of another library, of shell scripts; nothing is run."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from jaxrl_llm.config import flat
from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.tools.migrate import ms_swift, prime_rl, skyrl
from jaxrl_llm.tools.migrate.draft import Source
from jaxrl_llm.tools.migrate.scripts import read_script
from jaxrl_llm.tools.migrate.shell import Shell
from jaxrl_llm.tools.migrate.trees import (
    TREES,
    file_named,
    inherited,
    load,
    parsed,
    read_tree,
    resolved,
    trainers_named,
)
from jaxrl_llm.tools.migrate.trl import RULES
from jaxrl_llm.tools.migrate.tunix_scripts import read_tunix

LAUNCHERS = ("accelerate", "torchrun", "deepspeed", "trl", "axolotl", "uv")
DEVICES = {"--nproc_per_node": "trainer.n_gpus_per_node", "--nproc-per-node": "trainer.n_gpus_per_node"}
# What commands start, by library.
STARTED = {
    "llamafactory": re.compile(r"\b(llamafactory-cli|lmf) train\b|\bsrc/train(_bash)?\.py\b.* --stage\b"),
    "tunix": re.compile(r"\btunix[./]cli\b"),
    "openrlhf": re.compile(r"\bopenrlhf[./]cli\b"),
    "prime-rl": re.compile(r"(^|\s|/)(rl|sft) (.* )?@ \S+\.toml\b"),
    "skyrl": skyrl.STARTS,
    "ms-swift": ms_swift.STARTS,
    # Scripts of others have flags besides.
    "nemo-rl": re.compile(r"\bexamples/run_(vlm_)?(grpo|ppo|sft|dpo|rm|distillation)\w*\.py(?!.* --(?!config\b))"),
}
SHIPPED = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine")  # configurations of verl
TUNIX = {"grpo_main": "grpo", "grpo_vllm_main": "grpo", "ppo_main": "ppo", "peft_main": "sft"}


def read_shell(text: str, path: str, system: str, trainer: str, companion: str) -> Source:
    """Return the flags or overrides of the first command of a shell script that trains, and of the file it names."""
    shell = Shell(path)
    found = list(shell.commands(text))
    trains = [words for words in found if _trains(words)]
    trains = [words for words in trains if "verl.trainer" in " ".join(words)] or trains  # others prepare data
    serves = [words for words in found if "vllm-serve" in words or {"vllm", "serve"} <= set(words)]
    if serves and not trains:
        model = read_flags(serves[0], path, trainer).settings.get("model", "FOLDER")
        raise ConfigError(
            f"{path} serves a model and trains nothing: `python -m jaxrl_llm serve --model={model}` does that here. "
            "Training needs no server: its sampler is built in"
        )
    if not trains:
        raise ConfigError(
            f"{path} has 0 commands that train, and one is needed: `trl grpo ...`, `accelerate launch FILE.py ...`, "
            "`python -m verl.trainer.main_ppo a=b ...`, `axolotl train FILE.yml`, "
            "`python -m tunix.cli.grpo_main ...`, `python -m openrlhf.cli.train_ppo_ray ...`, "
            "`uv run examples/run_grpo.py ...`, `uv run rl @ FILE.toml`, "
            "`python -m skyrl.train.entrypoints.main_base a=b ...`, `swift rlhf ...`"
        )
    words, checks = trains[0], ()
    if len(trains) > 1:
        checks = (f"the file has {len(trains)} commands that train, and the first is written",)
    if str(Path.home()) in " ".join(words) and "HOME" in text:
        checks = (*checks, f"$HOME is {Path.home()} in the paths below, as on this machine")
    starts = (i for i, word in enumerate(words) if Path(word).name in LAUNCHERS or "python" in Path(word).name)
    words = [word for word in words[next(starts, 0) :] if word]  # without srun and its flags
    line = " ".join(words)
    library = _started(line) if system == "auto" else system
    if library == "tunix":
        return _read_tunix(words, path, trainer, checks)
    if library == "prime-rl":
        source = prime_rl.read_command(words, path)
        return source._replace(checks=(*checks, *source.checks))
    if library == "ms-swift":
        flags = read_flags(words, path, ms_swift.trainer_of(words), launched=False)
        count = {"num_processes": devices} if (devices := ms_swift.devices_of(shell.variables)) else {}
        return flags._replace(library=library, settings=flags.settings | count, checks=checks)
    if library == "skyrl":
        source = skyrl.read_command(words, path)
        if script := next((word for word in words if word.endswith(".sh")), ""):  # it gives its words to another one
            if (file := file_named(script, path)) is None:
                checks = (*checks, f"the command starts {script}, which is not there: what it sets is missing")
            else:
                other = read_shell(file.read_text(encoding="utf-8"), str(file), "skyrl", trainer, companion)
                source = other._replace(settings=other.settings | source.settings, path=path)
        return source._replace(checks=(*checks, *source.checks))
    if library == "nemo-rl":
        return _read_nemo_rl(words, path, trainer, checks)
    if library == "openrlhf":
        words = [part for word in words for part in (word.split() if "openrlhf.cli" in word else [word])]
        start = next((i for i, word in enumerate(words) if re.search(r"openrlhf[./]cli", word)), 0)
        command = words[start].removesuffix(".py").rpartition("train_")[2].removesuffix("_ray")
        return read_flags(words[start + 1 :], path, "", launched=False)._replace(
            library="openrlhf", trainer=trainer or command, checks=checks
        )
    overrides = [word for word in words if re.fullmatch(r"\+{0,2}[A-Za-z_]\w*\.[\w.]*=.*", word, re.DOTALL)]
    if system == "verl" or (system == "auto" and (overrides or "verl.trainer" in line)):
        pairs = (word.lstrip("+").partition("=") for word in overrides)
        flags = {before: after for before, after in pairwise(words) if re.fullmatch(r"--config-\w+", before)}
        flags |= dict(word.split("=", 1) for word in words if re.match(r"--[\w-]+=", word))
        composed, notes = _composed(flags, path)
        settings, checks = composed | flat({key: parsed(value) for key, _, value in pairs}), (*checks, *notes)
        if not composed:
            settings |= {flag: value for flag, value in flags.items() if flag.startswith("--config-")}
        settings |= {key: parsed(flags[flag]) for flag, key in DEVICES.items() if flag in flags and key not in settings}
        settings = {key: value for key, value in settings.items() if value is not None}
        return Source("verl", trainer or ("sft" if "sft_trainer" in line else ""), resolved(settings), path, checks)

    def beside(ends: tuple[str, ...]) -> Path | None:
        files = (file_named(word, path) for word in words if word.endswith(ends) and not word.startswith("--"))
        return next(filter(None, files), None)

    if library == "llamafactory":
        file = beside(TREES)
        if file is None:
            flags = read_flags(words, path, trainer, launched=False)
            return flags._replace(library=library, trainer=trainer, checks=checks)
        pairs = (word.partition("=") for word in words if re.match(r"\w+=", word))
        tree = load(file)
        tree |= {key: parsed(value) for key, _, value in pairs}
        return read_tree(tree, str(file), "llamafactory", trainer)._replace(checks=checks)
    if "axolotl" in line and (file := beside(TREES)):
        source = read_tree(load(file), path, "axolotl", trainer)
        flags = read_flags([word for word in words if word != str(file)], path, trainer).settings
        return source._replace(settings={**source.settings, **flags}, checks=(*checks, *source.checks))
    source = read_flags(words, path, trainer)
    file = beside((".py",))
    code = file.read_text(encoding="utf-8") if file else ""
    if file and re.search(r"\btrl\b|adaptive_harmony|\btunix\b", code):
        script = read_python(code, str(file), system, trainer, companion, source.settings)
        source = script._replace(path=path)
    elif not source.settings.keys() & {"model_name_or_path", "dataset_name", "config"}:
        started = next((word for word in words if word.endswith(".py")), "")
        note = f"{started}, which it starts, is not beside it: the model, data and rewards that it names are missing"
        checks = (*checks, note) if started and not file else checks
    return source._replace(checks=(*checks, *source.checks))


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


def _composed(flags: Mapping[str, str], path: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the keys of the file that Hydra's flags name, and notes of files that it builds on; none where it is not
    there, or is verl's own, whose values are the defaults."""
    folder = flags.get("--config-path", flags.get("--config-dir", ""))
    name = flags.get("--config-name", "").removesuffix(".yaml")
    file = file_named(f"{folder}/{name}.yaml", path) if folder and name and name not in SHIPPED else None
    if file is None:
        return {}, ()
    tree = load(file)
    parents = [str(parent) for parent in tree.pop("defaults", None) or () if parent not in ("_self_", *SHIPPED)]
    notes = tuple(f"{file} builds on {parent}, which is not read" for parent in parents)
    return {key: value for key, value in flat(tree).items() if not key.startswith("hydra.")}, notes


def _started(line: str) -> str:
    """Return the library of STARTED that a command starts; empty for another."""
    return next((library for library, start in STARTED.items() if start.search(line)), "")


def read_flags(words: Sequence[str], path: str, trainer: str, launched: bool = True) -> Source:
    """Return TRL's flags: `--name value`, `--name=value`, `--name a b`, and `--name` alone for true.

    A `.py` ends the flags of the launcher, if the words are `launched`.
    """
    settings: dict[str, Any] = {}
    if not trainer:
        named = [word for before, word in pairwise(words) if Path(before).name == "trl" and word in RULES]
        script = next((Path(word).stem for word in words if word.endswith(".py")), "")
        trainer = next(iter((*named, *trainers_named(script))), "")
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
        if file := file_named(more, path):
            settings = {**load(file, kind=".yaml"), **settings}
        else:
            checks = (f"the command reads --config {more}, which is not there: its keys are missing",)
    if isinstance(settings.get("reward_funcs"), str):
        settings["reward_funcs"] = [settings["reward_funcs"]]
    return Source("trl", trainer, settings, path, checks)


def _read_nemo_rl(words: Sequence[str], path: str, trainer: str, checks: tuple[str, ...]) -> Source:
    """Return the keys of `uv run examples/run_grpo.py --config FILE.yaml a.b=c +d.e=f`."""
    script = next((Path(word).stem for word in words if "examples/run_" in word), "")
    told = next((kind for kind in ("grpo", "sft", "dpo", "rm", "distillation", "ppo") if kind in script.split("_")), "")
    named = next((after for before, after in pairwise(words) if before == "--config"), "")
    named = next((word.partition("=")[2] for word in words if word.startswith("--config=")), named)
    pairs = (word.lstrip("+").partition("=") for word in words if re.match(r"\+{0,2}[A-Za-z_][\w.]*=", word))
    overrides = flat({key: parsed(value) for key, _, value in pairs if "." in key})
    file = file_named(named, path) or Path(named or f"{told}.yaml")
    settings, notes = inherited(file, overrides)
    return Source("nemo-rl", trainer or told, settings, path, (*checks, *notes))


def _read_tunix(words: Sequence[str], path: str, trainer: str, checks: tuple[str, ...]) -> Source:
    """Return the keys of `python -m tunix.cli.grpo_main BASE.yaml override_config_file=FILE key=value`."""
    started = next((word for word in words if re.search(r"tunix[./]cli", word)), "")
    entry = re.split(r"[./]", started.removesuffix(".py"))[-1]
    pairs = {key: value for key, sign, value in (word.partition("=") for word in words) if sign and key[:1].isalpha()}
    named = next((word for word in words if word.endswith(TREES) and "=" not in word), "")
    trees: list[dict[str, Any]] = []
    for name in (named, pairs.pop("override_config_file", "")):
        file, tree = file_named(name, path), {}
        shipped = name.endswith(("base_config.yaml", "base_agentic_config.yaml"))  # whose values are the defaults
        if file and not shipped:
            tree = flat(load(file))
        elif name and not shipped:
            checks = (*checks, f"the command reads {name}, which is not there: its keys are missing")
        trees.append(tree)
    base, given = trees[0], trees[1] | flat({key: parsed(value) for key, value in pairs.items()})
    replaced = {"training_config", "optimizer_config", "rl_training_config"} & {key.partition(".")[0] for key in given}
    settings = {key: value for key, value in base.items() if key.partition(".")[0] not in replaced} | given
    return Source("tunix", trainer or TUNIX.get(entry, ""), settings, path, checks)


def read_python(
    text: str, path: str, system: str, trainer: str, companion: str, flags: dict[str, Any] | None = None
) -> Source:
    """Return what a Python script configures; one that imports Tunix and not TRL is Tunix's."""
    imports = re.findall(r"(?m)^\s*(?:from|import) (\w+)", text)
    if system == "tunix" or (system == "auto" and "tunix" in imports and "trl" not in imports):
        return read_tunix(text, path, trainer, companion)
    return read_script(text, path, system, trainer, companion, flags)
