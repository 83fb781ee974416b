"""The models of runs and of their checkpoints, which a command takes in the place of a model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxrl_llm.commands.export import checkpoint_model, config_of, run_of, with_kept
from jaxrl_llm.config import ConfigDict, ConfigError, from_json
from jaxrl_llm.config.files import read_json
from jaxrl_llm.models.files.hf import step_folders
from jaxrl_llm.models.model import Model, compute_dtype, load_model
from jaxrl_llm.training.setup.data import tokenizer_of
from jaxrl_llm.training.setup.models import build_model
from jaxrl_llm.training.setup.records import checkpoint_folder


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
