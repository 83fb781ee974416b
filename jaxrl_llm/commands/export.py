"""Write a checkpoint as a Hugging Face folder, and push it to the hub.

    python -m jaxrl_llm export --run=runs/grpo --output=exported
    python -m jaxrl_llm export --run=runs/grpo --push_to_hub=me/my-model --private

The folder holds the policy of a checkpoint (the newest one, or that of `--step`) with a model card, and loads in
transformers and vLLM; with `--critic` it holds PPO's critic, without a card. Adapters are merged; with `--adapter` the
folder holds them alone, in the format of PEFT. The optimizer's state is not read. Works while the run goes on. The
hub's token is the variable HF_TOKEN.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_llm.config import ConfigDict, ConfigError, from_json
from jaxrl_llm.config.files import read_json
from jaxrl_llm.config.flags import load_options
from jaxrl_llm.config.setting import Setting
from jaxrl_llm.distributed import processes
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.models.adapters import peft
from jaxrl_llm.models.adapters.lora import combine, has_adapters, split
from jaxrl_llm.models.files.hf import refuse_foreign, step_folders
from jaxrl_llm.models.model import Model, describe, save_adapter, save_hf
from jaxrl_llm.tools.cards import hub
from jaxrl_llm.tools.cards.card import write_card
from jaxrl_llm.training.checkpoint.manager import Checkpoints
from jaxrl_llm.training.checkpoint.outputs import given_to
from jaxrl_llm.training.logging.console import stderr_console, waiting
from jaxrl_llm.training.objectives.value import with_value_head
from jaxrl_llm.training.setup.data import model_entries, tokenizer_of
from jaxrl_llm.training.setup.models import build_critic, build_model, net_options, trained_parts
from jaxrl_llm.training.setup.records import GIVEN_KEYS, checkpoint_folder

FLAGS = (
    Setting("run", "", "Folder of the run, its output_dir, or of one of its checkpoints."),
    Setting("step", None, "Step of the checkpoint; none is the newest.", int, minimum=0),
    Setting("output", "", "Folder to write; with push_to_hub it may be left out."),
    Setting(
        "dtype",
        None,
        "Storage type of the weights; none is that of the checkpoint.",
        choices=("float32", "bfloat16", "float16"),
    ),
    Setting("critic", False, "Write the critic of a run of PPO, its value network, in place of the policy.", bool),
    Setting("adapter", False, "Write only the adapters of the run, as a PEFT folder in float32.", bool),
    Setting("overwrite", False, "Replace a model that the folder, or the repository, already holds.", bool),
    Setting("push_to_hub", None, "Repository of the Hugging Face hub to push to, OWNER/NAME or NAME."),
    Setting("private", False, "Create that repository as a private one.", bool),
)

PUSHED = ".pushed"  # temporary folder inside the run's, for a model that is pushed


def export(
    run: str | Path,
    output: str | Path,
    step: int | None = None,
    dtype: str | None = None,
    adapter: bool = False,
    overwrite: bool = False,
    repo: str | None = None,
    critic: bool = False,
) -> Path:
    """Writes the policy of a checkpoint, with a model card, to the folder `output` and returns its path.

    `run` is the folder of a run, or of its checkpoint, RUN/checkpoints/STEP, as `step` names it too. Parameters are
    sharded over all local devices, whatever mesh the run had. `dtype` None keeps them bit for bit. With
    `adapter` the folder holds the adapters alone, in the format of PEFT. `repo` is the hub name in the card. With
    `critic` it is the critic, without a card. Raises ConfigError: no run, no such checkpoint, `adapter` for a policy or
    critic without adapters or with a `dtype`, `critic` for a run without a critic, or an `output` that already holds a
    model (unless `overwrite`) or anything else.
    """
    if adapter and dtype is not None:
        raise ConfigError("--dtype is of whole models, and --adapter writes float32: leave one out")
    output = Path(output).expanduser()
    folder, named = run_of(run)
    if None not in (step, named) and step != named:
        raise ConfigError(f"--step is {step}, but --run names the checkpoint of step {named}: leave one out")
    config, step = config_of(folder), named if step is None else step
    existing = [name for name in ("config.json", peft.CONFIG) if (output / name).is_file()]
    if existing and not overwrite:
        raise ConfigError(
            f"{output} holds a model already ({existing[0]}): choose another folder, or replace it with --overwrite"
        )
    refuse_foreign(output.absolute(), peft.CONFIG if adapter else "config.json")  # before the model is read
    mesh = make_mesh(data=1, fsdp=-1)
    with jax.set_mesh(mesh):
        model, step = (checkpoint_critic if critic else checkpoint_model)(folder, config, step, mesh)
        if adapter and not has_adapters(model.params):
            raise ConfigError(
                f"--adapter: the {'critic' if critic else 'policy'} of {folder} has no adapters: leave --adapter out"
            )
        save_adapter(model, output) if adapter else save_hf(model, output, dtype, overwrite=True)
        with processes.all_or_none():
            if jax.process_index() == 0 and not critic:
                write_card(output, folder, step, repo, config.export.title, config.export.tags)
    return output


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


def push(run: str | Path, repo: str, output: str | Path = "", private: bool = False, **options: Any) -> str:
    """Exports the policy of a checkpoint, or its critic, pushes it to the hub, and returns its address there.

    `options` are those of `export`. Without `output` a temporary folder inside the run's is used. Raises ConfigError as
    `export`, `hub.check` and `hub.push` do, before anything is written where that is possible.
    """
    overwrite, url = options.get("overwrite", False), ""
    home = run_of(run)[0]
    folder = Path(output).expanduser() if output else home / PUSHED
    with processes.all_or_none():
        if jax.process_index() == 0:
            config_of(home)
            hub.check(repo, private, overwrite)
            if not output:
                shutil.rmtree(folder, ignore_errors=True)  # left by a push that was killed
    try:
        export(run, folder, repo=repo, **options)
        with processes.all_or_none():
            if jax.process_index() == 0:
                url = hub.push(folder, repo, private, overwrite, f"{home.resolve().name}, by jaxrl_llm")
    finally:
        if not output and jax.process_index() == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return url


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


def main(argv: list[str]) -> None:
    """The command line: see `--help`."""
    options = load_options(argv, __doc__ or "", FLAGS)
    processes.join()
    repo, private = options.pop("push_to_hub"), options.pop("private")
    for name in ("run",) if repo else ("run", "output"):
        if not options[name]:
            raise ConfigError(f"--{name} is missing; write --{name}=FOLDER")
    if private and not repo:
        raise ConfigError("--private is of a repository: write --push_to_hub=OWNER/NAME too")
    with waiting(f"exporting {options['run']}", stderr_console(), lines=False):
        destination = push(repo=repo, private=private, **options) if repo else export(**options)
    if jax.process_index() == 0:
        print(destination)
