"""The folder of a run: whether it can be written, and the trained model that is left in it."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError

from jaxrl_llm.config import ConfigError
from jaxrl_llm.models.lora import has_adapters
from jaxrl_llm.models.model import Model, has_peft_adapter, save_adapter, save_hf
from jaxrl_llm.training.build import Run
from jaxrl_llm.training.checkpoint import folder_of
from jaxrl_llm.training.critic import critic_params
from jaxrl_llm.training.update import State, whole


def check_writable(folder: Path) -> None:
    """Makes the folder of a run; raises ConfigError when nothing can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
    except OSError as error:
        raise ConfigError(f"output_dir {folder} cannot be written: {error}; make room, or set another") from error


def export_run(config, parts: Run, state: State, note: Callable[[str], None]) -> Model:
    """The trained model, after it has been written to `hf`, its adapters to `adapter` and the critic to `critic`.

    `note` shows a line. Raises ConfigError when a folder cannot be written.
    """
    state, folder = whole(state, parts.frozen), Path(config.output_dir)
    model = replace(parts.model, params=state.params)
    try:
        save_hf(model, folder / "hf")
        if has_peft_adapter(model):
            save_adapter(model, folder / "adapter")
        elif has_adapters(model.params):
            note("hf/ has the adapters merged; this family's fused tensors leave no PEFT folder")
        if parts.critic is not None and state.critic is not None:
            save_hf(replace(parts.critic, params=critic_params(config, state)), folder / "critic")
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"the trained model could not be written to {folder}: {error}; its checkpoint is in {folder_of(config)}. "
            "Start the same command again when there is room, or write it elsewhere with python -m jaxrl_llm.export"
        ) from error
    return model
