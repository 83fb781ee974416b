"""Train in stages, each from the model of an earlier one.

    python -m jaxrl_llm stages --stages=configs/rlhf.py

The file defines `get_stages(folder)`, or `get_stages(folder, argument)` for `--stages=file.py:argument`: a dict of
configurations by name, in order. Each is trained in `folder/<name>`, and may read the `hf` folder of an earlier one.
The same command resumes after an interruption and skips finished stages.
"""

import contextlib
import warnings
from collections.abc import Mapping
from pathlib import Path

import jax

from jaxrl_llm.config import ConfigDict, ConfigError, flat, from_json, to_json, validate
from jaxrl_llm.config.files import read_json, write_json
from jaxrl_llm.config.flags import configured, find_config, load_options
from jaxrl_llm.config.resolve import import_file, naming
from jaxrl_llm.config.setting import Setting
from jaxrl_llm.distributed import processes
from jaxrl_llm.distributed.compilation_cache import keep_compiled
from jaxrl_llm.distributed.overlap import overlap_collectives
from jaxrl_llm.train import Result, train
from jaxrl_llm.training.checkpoint.data_files import checksum
from jaxrl_llm.training.checkpoint.manager import Checkpoints
from jaxrl_llm.training.checkpoint.settings import as_computed
from jaxrl_llm.training.logging.console import outlive_streams
from jaxrl_llm.training.setup.records import checkpoint_folder

FLAGS = (
    Setting(
        "stages",
        "",
        "Python file with get_stages: path.py or path.py:argument, or the name of a shipped one, such as rlhf.",
    ),
    Setting("output_dir", "runs/stages", "Folder of the runs of the stages."),
)

READ_MODELS = "read_models.json"


def load_stages(spec: str, folder: str | Path) -> dict[str, ConfigDict]:
    """The configurations that the file's `get_stages` returns, each with the output_dir `folder/<name>`.

    Raises ConfigError for a file without get_stages, for one that fails or returns anything but configurations, and for
    a stage that leaves nothing to go on from.
    """
    (path, argument), folder = find_config(spec, "--stages"), Path(folder).expanduser()
    get_stages = getattr(import_file(path), "get_stages", None)
    if not callable(get_stages):
        raise ConfigError(f"{path} has no function get_stages(folder); see configs/rlhf.py")
    arguments = (str(folder), *(() if argument is None else (argument,)))
    stages = configured(get_stages, arguments, path, f"--stages is {spec!r}")
    are_known = isinstance(stages, Mapping) and all(isinstance(config, ConfigDict) for config in stages.values())
    if not are_known or not stages:
        raise ConfigError(f"get_stages of {path} must return a dict of configurations by name")
    for name, config in stages.items():
        config.output_dir = str(folder / name)
        with naming(f"the stage {name}"):
            validate(config)
        if "state" not in config.checkpoint.contents:
            raise ConfigError(
                f"checkpoint.contents of the stage {name} is hf alone, from which no stage goes on, and without a "
                "checkpoint none is known to be finished: let it have state too"
            )
    return dict(stages)


def run_stages(stages: Mapping[str, ConfigDict]) -> dict[str, Result]:
    """The results of the stages that were not finished, by name and in order.

    Warns of a stage that began with the model of another one before that was trained on: `read_models.json` in its
    folder has the checksums of those that it began with.
    """
    results = {}
    for name, config in stages.items():
        finished, folder = is_finished(config), Path(config.output_dir)
        with processes.all_or_none():
            if jax.process_index() == 0:
                settings = [*map(str, flat(config.to_dict()).values())]
                read: dict[str, dict[str, str]] = {}  # checksums of files, by stage
                for other, its in stages.items():
                    if other != name and any(f"{its.output_dir}/" in value for value in settings):
                        weights = sorted((Path(its.output_dir) / "hf").glob("*.safetensors"))
                        read |= {other: {file.name: checksum(file) for file in weights}} if weights else {}
                checkpoints = checkpoint_folder(config)
                resumes = config.checkpoint.resume != "never" and checkpoints.is_dir()
                if finished or (resumes and any(path.name.isdigit() for path in checkpoints.iterdir())):
                    before = read_json(folder / READ_MODELS) or {}
                    for other in (other for other in read if before.get(other, read[other]) != read[other]):
                        warnings.warn(
                            f"the stage {name} {'is finished' if finished else 'has begun'}, but with a model of the "
                            f"stage {other} before that was trained on: delete {folder} to train it anew",
                            stacklevel=2,
                        )
                elif read:
                    folder.mkdir(parents=True, exist_ok=True)
                    write_json(folder / READ_MODELS, read)
        if jax.process_index() == 0:
            print(f"stage {name}: {f'finished before, in {folder}' if finished else folder}", flush=True)
        if not finished:
            results[name] = train(config)
    return results


def is_finished(config: ConfigDict) -> bool:
    """True when output_dir holds the trained model of a run with this configuration, even if a callback ended it.

    All processes must call it, and get the same: the model and the record may be on the machine of the first alone.
    """
    folder, total_steps = Path(config.output_dir), None
    with processes.all_or_none():
        record = folder / "config.json"
        if jax.process_index() == 0 and (folder / "hf" / "config.json").is_file() and record.is_file():
            with contextlib.suppress(ValueError):  # of another version, or what a crash has left of it
                recorded = from_json(record.read_text(encoding="utf-8"))
                if to_json(as_computed(config, recorded)) == to_json(recorded):
                    total_steps = recorded.total_steps
    total_steps = processes.gather(total_steps)[0]
    checkpoints_folder = checkpoint_folder(config)
    if total_steps is None or not checkpoints_folder.is_dir():
        return False
    with Checkpoints(checkpoints_folder, read_only=True) as checkpoints:
        latest = max(checkpoints.steps(), default=None)
        if latest is None or latest == total_steps:
            return latest is not None
        return checkpoints.host(latest).get("callbacks", {}).get("end") == latest


def main(argv: list[str]) -> None:
    """The command line: see `--help`."""
    options = load_options(argv, __doc__ or "", FLAGS)
    if not options["stages"]:
        raise ConfigError("--stages is missing; write --stages=configs/rlhf.py")
    stages = load_stages(options["stages"], options["output_dir"])
    first, *others = stages.values()
    outlive_streams()
    overlap_collectives(any(config.overlap_collectives for config in stages.values()))
    processes.join(first)  # after the flags above, as it asks for devices
    for config in others:
        config.processes.update(coordinator=None, count=None, index=None)
        processes.check_agreed(processes.agreed_facts(config), processes.START_ALIKE)
    for config in stages.values():
        keep_compiled(config.compilation_cache)  # one setting of the process: that of the last stage applies
    run_stages(stages)
