"""The settings of a run that goes on: compared with those it had, refused where they would make it another run.

`config_history/` in the folder of the run keeps each former configuration, with the step it ended at and what changed.
"""

import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

from jaxrl_llm.config import ConfigDict, ConfigError, flat, from_json, to_json, with_correction
from jaxrl_llm.config.checks.values import reference_adapters
from jaxrl_llm.config.files import replaced, write_json
from jaxrl_llm.config.schema import BY_NAME, IDENTITY, OF_A_START
from jaxrl_llm.models.files import hf
from jaxrl_llm.models.model import config_folder
from jaxrl_llm.training.setup.data import model_entries, register

CONFIG = "config.json"
HISTORY = "config_history"
MOMENTS = "optimizer.moment_dtype"
OF_FROZEN = (  # what trained parameters, adapters above all, are trained beside
    "model.path", "model.revision", "model.random_init", "model.quantize", "model.quantize_experts", "model.trainable",
    "model.frozen", "lora.path", "lora.rank", "lora.alpha", "lora.rslora", "lora.dora", "lora.init", "lora.targets",
    "lora.layers_to_transform", "lora.exclude_modules", "lora.rank_pattern", "lora.alpha_pattern",
    "lora.modules_to_save", "lora.bias",
)  # fmt: skip
OF_FROZEN_CRITIC = ("critic.path", "critic.lora_rank", "critic.lora_alpha", "critic.lora_targets")
OF_MOMENTS = ("optimizer.galore_rank", "optimizer.lisa_layers")  # of IDENTITY: the shapes of moments
OF_OPTIMIZER = {"optimizer.name", MOMENTS, *OF_MOMENTS}  # of IDENTITY: a new optimizer may have others
OF_ARRAYS = (  # of IDENTITY: which arrays are trained, and their shapes
    "model.trainable", "model.frozen", "model.vision", "lora.rank", "lora.dora", "lora.targets",
    "lora.layers_to_transform", "lora.exclude_modules", "lora.rank_pattern", "lora.modules_to_save", "lora.bias",
    "critic.shared", "critic.lora_rank", "critic.lora_targets",
)  # fmt: skip
# Of IDENTITY: with another one the saved position means other rows, and `data.pipeline` refuses it.
OF_POSITION = ("seed", "data.shuffle", "data.streaming", "data.packing", "data.packing_strategy")

Changes = dict[str, tuple[Any, Any]]  # by key, the former value and the present one


def changed_settings(folder: Path, config: ConfigDict) -> Changes:
    """The settings in `config` that differ from those in the folder's config.json, or none if that cannot be read."""
    try:
        former = _recorded(folder)
    except ConfigError:  # it is no part of the run's state, which goes on without it; `start_record` tells of it
        return {}
    old, new = (flat(x.to_dict()) for x in (former, from_json(to_json(as_computed(config, former)))))
    return {
        name: (old[name], value)
        for name, value in new.items()
        if name in BY_NAME and name not in OF_A_START and old.get(name) != value
    }


def as_computed(config: ConfigDict, former: ConfigDict) -> ConfigDict:
    """The configuration as a run records it: what a run computes from its data and its model is as in `former`, such a
    record."""
    config = with_correction(config).copy_and_resolve_references()
    if config.num_epochs is not None and config.num_epochs == former.num_epochs:
        config.total_steps = former.total_steps  # it is computed from the data
    if config.optimizer.learning_rate == "auto":
        config.optimizer.learning_rate = former.optimizer.learning_rate  # it follows from the model
    if config.lora.reference == "auto" != former.lora.reference:  # of an earlier version, whose default was base
        config.lora.reference = reference_adapters(config)
    kinds = config.model.quantize_experts, former.model.quantize_experts
    if kinds == ("same", "none"):
        c = config.model
        register(c.register)
        if not hf.load_net(config_folder(c.path, c.revision), model_entries(config)).config.experts:
            c.quantize_experts = "none"  # as in the record of an earlier version, which is all the same to it
    return config


def check_changes(folder: Path, changes: Changes, accepted: tuple[str, ...]) -> None:
    """Raises ConfigError for changed settings that say what the run is, unless they are `accepted`; and for those with
    which a checkpoint holds other arrays than the run, or another position in its data, accepted or not."""
    never = {name for name in (*OF_ARRAYS, *OF_POSITION, *OF_MOMENTS) if name in changes}
    never |= {MOMENTS} if "float8" in changes.get(MOMENTS, ()) else set()
    refused = [name for name in changes if name in IDENTITY and (name not in accepted or name in never)]
    if refused:
        names = ",".join(dict.fromkeys((*accepted, *refused)))
        other = f", or change them all the same with checkpoint.accept_changes={names}"
        if "float8" in changes.get(MOMENTS, ()):
            other = "; moments of other types are not converted to float8, nor back"
        elif shapes := [name for name in OF_MOMENTS if name in changes]:
            other = f"; with another {', '.join(shapes)} moments have other shapes"
        trained, order = ([name for name in names if name in changes] for names in (OF_ARRAYS, OF_POSITION))
        if trained or order:
            differs = "other arrays are trained than its checkpoints hold"
            differs = differs if trained else "its position in the data would be of other rows"
            other = (
                f"; with another {', '.join(trained or order)} {differs}, and a new run begins from its model: "
                f"model.path={folder / 'hf'}, or that of a checkpoint (jaxrl-llm export --run={folder})"
            )
        begun = ", begin a new optimizer (checkpoint.load=model,extra)" if {*refused} & OF_OPTIMIZER else ""
        raise ConfigError(
            f"the run in {folder} would go on as another one: {'; '.join(_words(x, changes[x]) for x in refused)}. Set "
            f"them back{begun}, or start a new run (another output_dir, or checkpoint.resume=never){other}"
        )


def check_frozen(folder: Any, config: ConfigDict, names: tuple[str, ...], accepted: tuple[str, ...]) -> list[str]:
    """Raises ConfigError where `config` differs in `names` from the run in `folder`, whose checkpoint it begins with.

    Those that are `accepted` may differ. Returns a line where the folder has no config.json that can be read.
    """
    try:
        former = _recorded(folder)
    except ConfigError as error:
        return [f"{error}: that its model.path and lora are these is not checked"]
    changes = changed_settings(folder, config)
    names = (*names, "seed") if former.model.random_init else names  # which it was drawn from
    if refused := [name for name in names if name in changes and name not in accepted]:
        raise ConfigError(
            f"what a checkpoint of {folder} holds was trained beside other parameters than this run's: "
            f"{'; '.join(_words(x, changes[x]) for x in refused)}. Set them as that run had them, or write its model "
            "to a folder (python -m jaxrl_llm export) and train from that with model.path, or begin with it all the "
            f"same with checkpoint.accept_changes={','.join(dict.fromkeys((*accepted, *refused)))}"
        )
    return []


def start_record(folder: Path, config: ConfigDict, changes: Changes, step: int | None) -> list[str]:
    """Writes config.json, and returns a line for each of `changes` after `step`, which is None where the run starts.

    With changes the former config.json goes to config_history/. A line tells where that one cannot be read.
    """
    lines: list[str] = []
    if step is None:
        shutil.rmtree(folder / HISTORY, ignore_errors=True)  # of a run that this one takes the place of
    elif changes:
        (folder / HISTORY).mkdir(exist_ok=True)
        taken = len(list((folder / HISTORY).glob(f"until_step_{step:05d}*.json")))
        entries = {
            "until_step": step,
            "time": datetime.now().astimezone().isoformat(" ", "seconds"),
            "changes": changes,
            "config": json.loads((folder / CONFIG).read_text(encoding="utf-8")),
        }
        write_json(folder / HISTORY / f"until_step_{step:05d}{f'_{taken + 1}' if taken else ''}.json", entries)
        lines = [f"changed after step {step}: {_words(name, change)}" for name, change in changes.items()]
    else:
        try:
            _recorded(folder)
        except ConfigError as error:
            lines = [f"{error}: whether the settings are those that the run had is not checked"]
    with replaced(folder / CONFIG) as unfinished:
        unfinished.write_text(to_json(config), encoding="utf-8")
    return lines


def _recorded(folder: Path) -> ConfigDict:
    """The configuration in the folder's config.json; raises ConfigError where it cannot be read."""
    try:
        return from_json((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # the latter of bytes that are no text, too
        raise ConfigError(f"{folder / CONFIG} cannot be read ({error})") from error


def _words(name: str, change: tuple[Any, Any]) -> str:
    old, new = (BY_NAME[name].show(value) or "(empty)" for value in change)
    return f"{name}: {old} -> {new}"
