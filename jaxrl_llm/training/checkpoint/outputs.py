"""The folder of a run: whether it can be written, and the trained model that is left in it."""

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models import hf, peft
from jaxrl_llm.models.lora import has_adapters
from jaxrl_llm.models.model import Model, has_peft_adapter, save_adapter, save_hf
from jaxrl_llm.training.checkpoint.manager import folder_of
from jaxrl_llm.training.objective_specs import critic_spec
from jaxrl_llm.training.objectives.value import critic_params
from jaxrl_llm.training.setup import Run
from jaxrl_llm.training.update import State, merge_frozen

GIVEN = "given.json"


def check_writable(folder: Path) -> None:
    """Makes the folder of a run; raises ConfigError when nothing can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
    except OSError as error:
        raise ConfigError(f"output_dir {folder} cannot be written: {error}; make room, or set another") from error


def check_outputs(config, goes_on: bool) -> None:
    """Raises ConfigError when the trained model would take the place of files that are not the run's own.

    A run that `goes_on` from its checkpoints may replace the model it has left, and so may one that was told to start
    anew with checkpoint.resume=never.
    """
    folder = Path(config.output_dir)
    for name, sign in (("hf", "config.json"), ("adapter", peft.CONFIG), ("critic", "config.json")):
        hf.refuse_foreign(folder / name, sign)
    if (folder / "hf" / "config.json").is_file() and not goes_on and config.checkpoint.resume != "never":
        raise ConfigError(
            f"{folder} holds a trained model (hf/), and no checkpoint that this run goes on from: choose another "
            "output_dir, or replace the model with checkpoint.resume=never"
        )


def write_given(folder: Path, given: Mapping[str, Any]) -> None:
    """Writes given.json: what `train` was given in place of names in its configuration, in words, by argument."""
    words = {name: _words(value) for name, value in given.items() if value is not None and not _is_nothing(value)}
    if words:
        (folder / GIVEN).write_text(json.dumps(words, indent=2) + "\n", encoding="utf-8")
    else:
        (folder / GIVEN).unlink(missing_ok=True)


def given_to(run: Path) -> dict[str, str]:
    """What `write_given` wrote in the folder of a run."""
    return json.loads((run / GIVEN).read_text(encoding="utf-8")) if (run / GIVEN).is_file() else {}


def _is_nothing(value: Any) -> bool:
    return isinstance(value, tuple | list) and not value


def _words(value: Any) -> str:
    if isinstance(value, str):
        return value
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    if isinstance(value, Mapping):
        return ", ".join(map(str, value))
    if isinstance(value, tuple | list) and not isinstance(value[0], Mapping):
        return ", ".join(map(_words, value))
    return f"{len(value)} rows in memory" if hasattr(value, "__len__") else type(value).__name__


def export_run(config, parts: Run, state: State, note: Callable[[str], None]) -> Model:
    """The trained model, after it has been written to `hf`, its adapters to `adapter` and the critic to `critic`.

    `note` shows a line. Raises ConfigError when a folder cannot be written.
    """
    state, folder = merge_frozen(state, parts.frozen), Path(config.output_dir)
    model = replace(parts.model, params=state.params)
    try:
        save_hf(model, folder / "hf")
        if has_peft_adapter(model):
            save_adapter(model, folder / "adapter")
        elif has_adapters(model.params):
            note("hf/ has the adapters merged; this family's fused tensors leave no PEFT folder")
        if parts.critic is not None and state.critic is not None:
            save_hf(replace(parts.critic, params=critic_params(critic_spec(config), state)), folder / "critic")
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"the trained model could not be written to {folder}: {error}; its checkpoint is in {folder_of(config)}. "
            "Start the same command again when there is room, or write it elsewhere with python -m jaxrl_llm export"
        ) from error
    return model
