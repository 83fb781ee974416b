"""Write a checkpoint as a Hugging Face folder.

    python -m jaxrl_llm.export --run=runs/grpo --output=exported

The folder holds the policy as it was at a step (the newest checkpoint unless `--step` says another), and loads in
transformers and vLLM. Adapters are merged; with `--adapter` the folder holds them alone, as PEFT reads them. The
optimizer's state is not read. Works while the run goes on.
"""

from dataclasses import replace
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxrl_llm import processes
from jaxrl_llm.command_line import load_options, run
from jaxrl_llm.config import ConfigDict, ConfigError, from_json
from jaxrl_llm.keys import Key
from jaxrl_llm.models.lora import combine, split
from jaxrl_llm.models.model import Model, describe, save_adapter, save_hf
from jaxrl_llm.sharding import make_mesh
from jaxrl_llm.training.build import build_model
from jaxrl_llm.training.checkpoint import Checkpoints, folder_of

FLAGS = (
    Key("run", "", "Folder of the run: its output_dir."),
    Key("step", None, "Step of the checkpoint; none is the newest.", int, minimum=0),
    Key("output", "", "Folder to write."),
    Key("dtype", None, "Type of the stored weights; none keeps that of the checkpoint.",
        choices=("float32", "bfloat16", "float16")),
    Key("adapter", False, "Write the adapters of the run alone, a PEFT folder in float32.", bool),
)  # fmt: skip


def export(
    run: str | Path, output: str | Path, step: int | None = None, dtype: str | None = None, adapter: bool = False
) -> Path:
    """The folder `output`, after the policy of a checkpoint of the run has been written to it.

    Parameters are cut over all devices at hand, whatever mesh the run had. `dtype` None keeps them bit for bit. With
    `adapter` it is the adapters alone, as a PEFT folder. Raises ConfigError: no run, no such checkpoint, adapters asked
    of a run that has none, or `output` holds something else.
    """
    output = Path(output).expanduser()
    folder = Path(run).expanduser()
    config = _config_of(folder)
    mesh = make_mesh(data=1, fsdp=-1)
    with jax.set_mesh(mesh), Checkpoints(folder_of(config, folder), read_only=True) as checkpoints:
        step = _step(checkpoints, step)
        model = _untrained(config, mesh)
        frozen, shapes = split(model.params)
        params = combine(frozen, checkpoints.restore_params(step, shapes, mesh))
        model = replace(model, params=params, mesh=mesh)
        save_adapter(model, output) if adapter else save_hf(model, output, dtype)
    return output


def _untrained(config: ConfigDict, mesh: Mesh) -> Model:
    """The model as the run started: shapes suffice where all of it is trained."""
    if config.lora.rank or config.lora.path:
        return build_model(config, mesh)
    head = "score" if config.algorithm.name == "reward_model" else "lm"
    c = config.model
    return describe(c.path, "float32", c.param_dtype, trust_remote_code=c.trust_remote_code, head=head)


def _config_of(folder: Path) -> ConfigDict:
    file = folder / "config.json"
    config = from_json(file.read_text(encoding="utf-8")) if file.is_file() else None
    if config is None or not folder_of(config, folder).is_dir():
        raise ConfigError(
            f"{folder} is not the folder of a run: it has no config.json or no checkpoints; "
            "give the output_dir that the run was trained with"
        )
    return config


def _step(checkpoints: Checkpoints, step: int | None) -> int:
    steps = checkpoints.steps()
    if not steps:
        raise ConfigError(f"there is no checkpoint in {checkpoints.folder}")
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
    for name in ("run", "output"):
        if not options[name]:
            raise ConfigError(f"--{name} is missing; write --{name}=FOLDER")
    folder = export(**options)
    if jax.process_index() == 0:
        print(folder)


if __name__ == "__main__":
    run(main)
