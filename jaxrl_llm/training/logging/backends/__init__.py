"""Trackers that a run may report to besides the console and metrics.jsonl: a file and a `Backend` for each."""

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jaxrl_llm.config.resolve import ConfigError

# Backend -> the package it imports, its name for pip, and the class in the file of that name.
PACKAGES = {
    "tensorboard": ("tensorboardX", "tensorboardX", "TensorBoard"),
    "wandb": ("wandb", "wandb", "WeightsAndBiases"),
    "mlflow": ("mlflow", "mlflow-skinny", "MLflow"),
    "swanlab": ("swanlab", "swanlab", "SwanLab"),
    "trackio": ("trackio", "trackio", "Trackio"),
}


class Identity(NamedTuple):
    """The run as backends see it: names, settings by full key, and folder.

    `resume_step` is the step after which it goes on, or None for a run that starts.
    """

    project: str
    name: str
    settings: Mapping[str, Any]
    folder: Path
    resume_step: int | None


class Backend(Protocol):
    """A destination of metrics. A method may raise anything: `Delivery` catches it, and training goes on."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a step, finite numbers."""
        ...

    def table(self, name: str, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
        """Takes a table of completions: columns of one length, of numbers or of texts; None is an empty cell.

        `name` is completions, or eval/completions for those of an evaluation.
        """
        ...

    def close(self, failed: bool) -> None:
        """Ends the run there; `failed` when it ended with an error."""
        ...


def check_installed(backends: Sequence[str]) -> None:
    """Raises ConfigError, with the pip line, when the package of one of `logging.backends` is not installed."""
    for name in backends:
        if name in PACKAGES and importlib.util.find_spec(PACKAGES[name][0]) is None:
            pip = PACKAGES[name][1]
            raise ConfigError(f"logging.backends has {name}, which needs the package {pip}: pip install {pip}")


def start(name: str, run: Identity) -> Backend:
    """The backend of that name, started for the run.

    Raises ConfigError when its package is not installed, and what the package raises when it cannot start.
    """
    check_installed((name,))
    return getattr(importlib.import_module(f"{__name__}.{name}"), PACKAGES[name][2])(run)


def kept_id(run: Identity, backend: str) -> str | None:
    """The id under which `backend` knows the run that goes on, or None for a run that starts."""
    path = run.folder / f".{backend}_run"
    return path.read_text().strip() if run.resume_step is not None and path.exists() else None


def keep_id(run: Identity, backend: str, value: str) -> None:
    """Writes the backend's id of the run into its folder, for `kept_id`."""
    (run.folder / f".{backend}_run").write_text(value)
