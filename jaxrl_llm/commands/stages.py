"""Train in stages, each from the model of an earlier one: `python -m jaxrl_llm stages --stages=configs/rlhf.py`.

The file defines `get_stages(folder)`, or `get_stages(folder, argument)` for `--stages=file.py:argument`: a dict of
configurations by name, in order. Each runs as `jaxrl_llm.train` would, in `folder/<name>`, and may read the `hf` folder
of one before it. The same command goes on where it was interrupted: a stage that is finished is not run again.
"""

from collections.abc import Mapping
from pathlib import Path

from jaxrl_llm.config import ConfigDict, ConfigError, to_json, validate
from jaxrl_llm.config.flags import load_options
from jaxrl_llm.config.resolve import import_file
from jaxrl_llm.config.schema import Key
from jaxrl_llm.distributed import processes
from jaxrl_llm.distributed.compilation_cache import keep_compiled
from jaxrl_llm.train import Result, train
from jaxrl_llm.training.checkpoint.manager import Checkpoints
from jaxrl_llm.training.run_specs import checkpoint_spec

FLAGS = (
    Key("stages", "", "Python file with get_stages, and its argument: path.py or path.py:argument."),
    Key("output_dir", "runs/chain", "Folder of the stages' runs."),
)


def load_stages(spec: str, folder: str | Path) -> dict[str, ConfigDict]:
    """The configurations that the file's `get_stages` returns, each with `folder/<name>` for its output_dir.

    Raises ConfigError for a file without get_stages, or one that returns something else than configurations.
    """
    path, colon, argument = spec.partition(":")
    get_stages = getattr(import_file(path), "get_stages", None)
    if not callable(get_stages):
        raise ConfigError(f"{path} has no function get_stages(folder); see configs/rlhf.py")
    stages = get_stages(str(folder), *((argument,) if colon else ()))
    if not isinstance(stages, Mapping) or not all(isinstance(config, ConfigDict) for config in stages.values()):
        raise ConfigError(f"get_stages of {path} must return a dict of configurations by name")
    for name, config in stages.items():
        config.output_dir = str(Path(folder) / name)
        validate(config)
    return dict(stages)


def run_stages(stages: Mapping[str, ConfigDict]) -> dict[str, Result]:
    """The results of the stages that had something left to do, in order; see the module's text."""
    return {name: train(config) for name, config in stages.items() if not is_finished(config)}


def is_finished(config: ConfigDict) -> bool:
    """True when output_dir holds the trained model of a run with this configuration, one that a callback ended too."""
    folder = Path(config.output_dir)
    written = folder / "config.json"
    if not (folder / "hf" / "config.json").is_file() or not written.is_file():
        return False
    if written.read_text(encoding="utf-8") != to_json(config):
        return False
    checkpoints_folder = checkpoint_spec(config).folder
    if not checkpoints_folder.is_dir():
        return False
    with Checkpoints(checkpoints_folder, read_only=True) as checkpoints:
        latest = checkpoints.latest()
        if latest is None or latest == config.total_steps:
            return latest is not None
        return checkpoints.host(latest).get("callbacks", {}).get("end") == latest


def main(argv: list[str]) -> None:
    """The command line: see `--help`."""
    options = load_options(argv, __doc__ or "", FLAGS)
    processes.join()
    if not options["stages"]:
        raise ConfigError("--stages is missing; write --stages=configs/rlhf.py")
    stages = load_stages(options["stages"], options["output_dir"])
    for config in stages.values():
        keep_compiled(config.compilation_cache)  # of all stages alike: the last one's holds
    run_stages(stages)
