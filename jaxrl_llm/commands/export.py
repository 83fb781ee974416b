"""Write a checkpoint as a Hugging Face folder, and push it to the hub.

    python -m jaxrl_llm export --run=runs/grpo --output=exported
    python -m jaxrl_llm export --run=runs/grpo --push_to_hub=me/my-model --private

The folder holds the policy of a checkpoint (the newest one, or that of `--step`) with a model card, and loads in
transformers and vLLM; with `--critic` it holds PPO's critic, without a card. Adapters are merged; with `--adapter` the
folder holds them alone, in the format of PEFT. The optimizer's state is not read. Works while the run goes on. The
hub's token is the variable HF_TOKEN.
"""

import shutil
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import load_options
from jaxrl_llm.config.setting import Setting
from jaxrl_llm.distributed import processes
from jaxrl_llm.distributed.sharding import make_mesh
from jaxrl_llm.models.adapters import peft
from jaxrl_llm.models.adapters.lora import has_adapters
from jaxrl_llm.models.files.hf import refuse_foreign
from jaxrl_llm.models.model import save_adapter, save_hf
from jaxrl_llm.tools.cards import hub
from jaxrl_llm.tools.cards.card import write_card
from jaxrl_llm.training.logging.console import stderr_console, waiting
from jaxrl_llm.training.setup.run_models import checkpoint_critic, checkpoint_model, config_of, run_of

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
