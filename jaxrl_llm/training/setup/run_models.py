"""The models of runs and of their checkpoints."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_llm.config import ConfigDict, ConfigError, from_json
from jaxrl_llm.config.files import read_json
from jaxrl_llm.models.adapters.lora import combine, split
from jaxrl_llm.models.files.hf import step_folders
from jaxrl_llm.models.model import Model, compute_dtype, describe, load_model
from jaxrl_llm.training.checkpoint.manager import Checkpoints
from jaxrl_llm.training.checkpoint.outputs import given_to
from jaxrl_llm.training.objectives.value import with_value_head
from jaxrl_llm.training.setup.data import model_entries, tokenizer_of
from jaxrl_llm.training.setup.models import build_critic, build_model, net_options, trained_parts
from jaxrl_llm.training.setup.records import GIVEN_KEYS, checkpoint_folder


def run_of(path: str | Path) -> tuple[Path, int | None]:
    """The folder of a run that `path` names, and the step of RUN/checkpoints/STEP, None of RUN itself."""
    folder = Path(path).expanduser()
    if folder.name.isdecimal() and folder.parent.name == "checkpoints" and not (folder / "config.json").is_file():
        return folder.parent.parent, int(folder.name)
    return folder, None


def config_of(folder: Path) -> ConfigDict:
    """The configuration of the run in a folder; raises ConfigError where there is none with checkpoints."""
    file = folder / "config.json"
    entries = read_json(file)
    if entries is None or "model_type" in entries:  # that of a model has the same name
        raise ConfigError(
            f"{folder} is not the folder of a run: it has no config.json of one; give the output_dir that the run was "
            "trained with"
        )
    config = from_json(file.read_text(encoding="utf-8"))
    if not (kept := checkpoint_folder(config, folder)).is_dir():
        raise ConfigError(f"the run in {folder} has no checkpoints: there is no folder {kept}")
    return config


def named_by(path: str) -> tuple[Path, int | None] | str:
    """The run and the step that `path` names, RUN/checkpoints/STEP, or RUN and None for the newest; or a model's path.

    Of a run that keeps no states, or has lost them, it is the path of its model, RUN/hf or the newest in RUN/hf_steps.
    """
    run, step = run_of(path)
    if "output_dir" not in (read_json(run / "config.json") or {}):  # that of a model has the same name
        return path
    if step is None:
        kept = checkpoint_folder(from_json((run / "config.json").read_text(encoding="utf-8")), run)
        if not (kept.is_dir() and any(x.name.isdecimal() for x in kept.iterdir())):
            models = (run / "hf", *reversed(step_folders(run).values()))
            if written := next((model for model in models if (model / "config.json").is_file()), None):
                return str(written)
    return run, step


def load_named(path: str, dtype: str, mesh: Mesh, trust_remote_code: bool = False) -> Model:
    """The language model at `path` as `load_model` takes it, or of a run or a checkpoint that it names.

    `trust_remote_code` runs a tokenizer's own code; for checkpoints the configuration of their run says so. Raises
    ConfigError as `load_model` and `export` do, and for a reward model.
    """
    named = named_by(path)
    if isinstance(named, str):
        model = load_model(named, dtype, mesh=mesh, trust_remote_code=trust_remote_code)
        if model.net.config.head != "lm":
            raise ConfigError(
                f"{named} is a reward model, which writes no text: rewards.functions=model:{named} scores with it"
            )
        return model
    run, step = named
    config = config_of(run)
    if config.algorithm.name in ("reward_model", "process_reward_model"):
        raise ConfigError(f"{run} trained a reward model, which writes no text")
    model, _ = checkpoint_model(run, config, step, mesh, compute_dtype(dtype))
    return replace(model, path=str(run))


def build_named(config: ConfigDict, mesh: Mesh, head: str | None = None) -> Model:
    """The model of the configuration, as `build_model` gives it, whose `model.path` may name a run or a checkpoint."""
    named = named_by(config.model.path)
    if isinstance(named, str):
        return build_model(_of(config, named), mesh, head)
    run, step = named
    given, _ = checkpoint_model(run, config_of(run), step, mesh, compute_dtype(config.model.dtype))
    if config.model.quantize not in ("none", given.net.config.quantized):
        raise ConfigError(
            f"model.quantize is {config.model.quantize}, but {config.model.path} is a checkpoint, whose matrices stay "
            f"as its run had them ({given.net.config.quantized}): name its model, {run / 'hf'}, or one that jaxrl-llm "
            f"export --run={config.model.path} writes"
        )
    return build_model(config, mesh, head, given=given)


def tokenizer_named(config: ConfigDict) -> Any:
    """The tokenizer of the model that `build_named` gives, without the model."""
    named = named_by(config.model.path)
    if isinstance(named, str):
        return tokenizer_of(_of(config, named))
    run = with_kept(config_of(named[0]), named[0])
    config = _of(config, run.model.path)
    config.model.revision = run.model.revision
    return tokenizer_of(config, None if config.model.tokenizer else tokenizer_of(run))


def _of(config: ConfigDict, path: str) -> ConfigDict:
    config = config.copy_and_resolve_references()
    config.model.path = path
    return config


def checkpoint_model(
    folder: Path, config: ConfigDict, step: int | None, mesh: Mesh, dtype: str = "float32"
) -> tuple[Model, int]:
    """The policy of a checkpoint, None for the newest, of the run in `folder`, sharded over `mesh`; and its step.

    `dtype` is that of the computation. Raises ConfigError for a step that is not there, and where the run was given its
    model in memory and that is needed and kept nowhere.
    """
    config = with_kept(config, folder)
    with jax.set_mesh(mesh), Checkpoints(checkpoint_folder(config, folder), read_only=True) as checkpoints:
        step = _step(checkpoints, step, folder)
        model = _untrained(config, mesh, dtype)
        frozen, shapes = split(model.params, model.net.config.frozen)
        params = combine(frozen, checkpoints.restore_params(step, shapes, mesh))
        return replace(model, params=params, mesh=mesh), step


def checkpoint_critic(folder: Path, config: ConfigDict, step: int | None, mesh: Mesh) -> tuple[Model, int]:
    """The critic of a checkpoint, None for the newest, as `checkpoint_model` gives the policy; and its step.

    Raises ConfigError as that does, and for a run without a critic.
    """
    if config.algorithm.name != "ppo":
        raise ConfigError(f"--critic: the run in {folder} has none (algorithm.name = {config.algorithm.name!r})")
    shared = config.critic.shared
    policy, step = checkpoint_model(folder, config, step, mesh) if shared else (None, step)
    config = with_kept(config, folder)
    with jax.set_mesh(mesh), Checkpoints(checkpoint_folder(config, folder), read_only=True) as checkpoints:
        step = _step(checkpoints, step, folder)
        critic = build_critic(config, policy or _untrained(config, mesh, "float32"), mesh)
        frozen, shapes = ({}, critic.params) if shared else split(critic.params, critic.net.config.frozen)
        params = combine(frozen, checkpoints.restore_params(step, shapes, mesh, critic=True))
        if policy is not None:
            params = with_value_head(policy.params, params)
        return replace(critic, params=params, mesh=mesh), step


def with_kept(config: ConfigDict, run: Path) -> ConfigDict:
    """The configuration of a run with its folder `hf` in place of a model and a tokenizer that it was given in memory.

    Raises ConfigError where there is no such folder, and for adapters of such a model, which it holds merged.
    """
    objects, whole, config = given_to(run), run / "hf", config.copy_and_resolve_references()
    keys = {name: GIVEN_KEYS[name] for name in ("model", "tokenizer") if name in objects}
    if "model" in keys and (config.lora.rank or (run / "adapter").is_dir()):
        raise ConfigError(
            f"{run} trains adapters of a model that was given in memory ({objects['model']}) and is kept nowhere, so "
            f"its checkpoints are not whole, as {whole} is at its end: give train a model by its path (model.path) "
            "whose checkpoints are to be exported or served"
        )
    if keys and not (whole / "config.json").is_file():
        raise ConfigError(
            f"{run} was given its {' and '.join(keys)} in memory, and nothing describes them before {whole} is there, "
            f"at its end: name what is to be exported or served earlier ({', '.join(keys.values())})"
        )
    config.update_from_flattened_dict(dict.fromkeys(keys.values(), str(whole)))
    return config


def _untrained(config: ConfigDict, mesh: Mesh, dtype: str) -> Model:
    """The model at the start of the run; where all parameters were trained shapes suffice, as these are restored."""
    config = config.copy_and_resolve_references()
    config.model.dtype, config.model.matmul_dtype = dtype, "auto"  # this device may be another than that of training
    c, tokenizer = config.model, tokenizer_of(config)
    if not (config.lora.rank or config.lora.path):
        described = describe(
            c.path, dtype, c.param_dtype, None, c.allow_pickle, c.trust_remote_code, c.revision, tokenizer,
            model_entries(config), trained=trained_parts(config), **net_options(config),
        )  # fmt: skip
        if not described.net.config.frozen:
            return described
    return build_model(config, mesh, tokenizer=tokenizer)


def _step(checkpoints: Checkpoints, step: int | None, run: Path) -> int:
    steps = checkpoints.steps()
    if not steps:
        models = [str(path) for path in (*step_folders(run).values(), run / "hf") if (path / "config.json").is_file()]
        written = f"; its models are {', '.join(models)}" if models else ""
        raise ConfigError(f"there is no checkpoint in {checkpoints.folder}{written}")
    if step is not None and step not in steps:
        raise ConfigError(
            f"there is no checkpoint of step {step} in {checkpoints.folder}; there are {', '.join(map(str, steps))}"
        )
    step = steps[-1] if step is None else step
    checkpoints.check(step)
    return step
