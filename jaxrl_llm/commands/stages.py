"""Train in stages, each from the model of an earlier one.

    python -m jaxrl_llm stages --stages=configs/rlhf.py

The file defines `get_stages(folder)`, or `get_stages(folder, argument)` for `--stages=file.py:argument`: a dict of
configurations by name, in order. Each is trained in `folder/<name>`, and may read the `hf` folder of an earlier one.
The same command resumes after an interruption and skips finished stages.
"""

from collections.abc import Mapping
from pathlib import Path

from jaxrl_llm.config import ConfigDict, ConfigError, from_json, to_json, validate
from jaxrl_llm.config.flags import find_config, load_options
from jaxrl_llm.config.resolve import import_file
from jaxrl_llm.config.schema import Setting
from jaxrl_llm.distributed import processes
from jaxrl_llm.distributed.compilation_cache import keep_compiled
from jaxrl_llm.train import Result, train
from jaxrl_llm.training.checkpoint.manager import Checkpoints
from jaxrl_llm.training.checkpoint.settings import as_computed
from jaxrl_llm.training.setup.records import checkpoint_spec

FLAGS = (
    Setting(
        "stages",
        "",
        "Python file with get_stages: path.py or path.py:argument, or the name of a shipped one, such as rlhf.",
    ),
    Setting("output_dir", "runs/stages", "Folder of the runs of the stages."),
)


def load_stages(spec: str, folder: str | Path) -> dict[str, ConfigDict]:
    """The configurations that the file's `get_stages` returns, each with the output_dir `folder/<name>`.

    Raises ConfigError for a file without get_stages, or one that returns anything but configurations.
    """
    (path, argument), folder = find_config(spec, "--stages"), Path(folder).expanduser()
    get_stages = getattr(import_file(path), "get_stages", None)
    if not callable(get_stages):
        raise ConfigError(f"{path} has no function get_stages(folder); see configs/rlhf.py")
    stages = get_stages(str(folder), *(() if argument is None else (argument,)))
    if not isinstance(stages, Mapping) or not all(isinstance(config, ConfigDict) for config in stages.values()):
        raise ConfigError(f"get_stages of {path} must return a dict of configurations by name")
    for name, config in stages.items():
        config.output_dir = str(folder / name)
        validate(config)
    return dict(stages)


def run_stages(stages: Mapping[str, ConfigDict]) -> dict[str, Result]:
    """The results of the stages that were not finished, by name and in order."""
    return {name: train(config) for name, config in stages.items() if not is_finished(config)}


def is_finished(config: ConfigDict) -> bool:
    """True when output_dir holds the trained model of a run with this configuration, even if a callback ended it."""
    folder = Path(config.output_dir)
    record = folder / "config.json"
    if not (folder / "hf" / "config.json").is_file() or not record.is_file():
        return False
    try:
        recorded = from_json(record.read_text(encoding="utf-8"))
    except ConfigError:  # of another version
        return False
    if to_json(as_computed(config, recorded)) != to_json(recorded):
        return False
    checkpoints_folder = checkpoint_spec(config).folder
    if not checkpoints_folder.is_dir():
        return False
    with Checkpoints(checkpoints_folder, read_only=True) as checkpoints:
        latest = checkpoints.latest()
        if latest is None or latest == recorded.total_steps:
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
        keep_compiled(config.compilation_cache)  # one setting of the process: that of the last stage applies
    run_stages(stages)
