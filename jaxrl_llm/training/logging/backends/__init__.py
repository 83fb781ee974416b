"""Where the metrics of a run go besides the console and metrics.jsonl: one file per backend, one `Backend` each."""

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jaxrl_llm.config import ConfigDict, flat
from jaxrl_llm.config.resolve import ConfigError

# Backend -> the package it imports, and the name pip knows it by.
PACKAGES = {
    "tensorboard": ("tensorboardX", "tensorboardX"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow-skinny"),
    "swanlab": ("swanlab", "swanlab"),
    "trackio": ("trackio", "trackio"),
}


class Identity(NamedTuple):
    """What a backend is told of a run: its names, its settings by full key, its folder, and after which step it goes on
    (None: it starts)."""

    project: str
    name: str
    settings: Mapping[str, Any]
    folder: Path
    resume_step: int | None


class Backend(Protocol):
    """One place that metrics go to. A method may raise anything; `Delivery` sees to it that training goes on."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a step, finite numbers."""
        ...

    def table(self, step: int, columns: Mapping[str, Sequence[Any]]) -> None:
        """Takes a table of completions: columns of one length, of numbers or of texts; None is an empty cell."""
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


def identity_of(config: ConfigDict, folder: Path, resume_step: int | None) -> Identity:
    """The Identity of the run of `config` in `folder`; without `logging.run_name` its name is that of the folder."""
    name = config.logging.run_name or folder.resolve().name
    return Identity(config.logging.project, name, flat(config.to_dict()), folder, resume_step)


def start(name: str, run: Identity) -> Backend:
    """The backend of that name, started for the run.

    Raises ConfigError when its package is not installed, and what the package raises when it cannot start.
    """
    check_installed((name,))
    return importlib.import_module(f"{__name__}.{name}").start(run)


def kept_id(run: Identity, backend: str) -> str | None:
    """The id under which `backend` knows the run that goes on, None for a run that starts."""
    path = run.folder / f".{backend}_run"
    return path.read_text().strip() if run.resume_step is not None and path.exists() else None


def keep_id(run: Identity, backend: str, value: str) -> None:
    """Keeps the backend's id of the run in its folder, for when it goes on."""
    (run.folder / f".{backend}_run").write_text(value)
