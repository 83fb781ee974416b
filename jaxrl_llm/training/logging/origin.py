"""starts.json: when, where, by which command and with which versions a run was started, and gone on with."""

import json
import platform
import shlex
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
import jaxlib

from jaxrl_llm.config.files import write_json
from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.config.secrets import masked
from jaxrl_llm.config.version import __version__

STARTS = "starts.json"


def write_start(folder: Path, step: int | None) -> None:
    """Adds this start, after `step`, to starts.json in the folder of a run; None starts the run, and the file.

    Each has time (ISO 8601, with the offset to UTC), step, host, devices, folder (from which relative paths count),
    command, commit (None outside of a git repository) and versions. A line of the command shows no password of an
    address.
    """
    starts = [] if step is None else read_starts(folder)
    devices, processes = jax.devices(), jax.process_count()
    of_processes = f" of {processes} processes" if processes > 1 else ""
    starts.append(
        {
            "time": datetime.now().astimezone().isoformat(" ", "seconds"),
            "step": step or 0,
            "host": platform.node(),
            "devices": f"{len(devices)} {devices[0].device_kind}{of_processes}",
            "folder": str(Path.cwd()),
            "command": " ".join(shlex.quote(masked(word)) for word in sys.orig_argv),
            "commit": _commit(),
            "versions": {
                "jaxrl_llm": __version__,
                "jax": jax.__version__,
                "jaxlib": jaxlib.__version__,
                "python": platform.python_version(),
            },
        }
    )
    write_json(folder / STARTS, starts)


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """The starts of the run in the folder, oldest first, or none where the file is not there.

    Raises ConfigError when it is not a list of JSON objects.
    """
    path = folder / STARTS
    try:
        starts = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}): remove it") from error
    if not isinstance(starts, list) or not all(isinstance(start, dict) for start in starts):
        raise ConfigError(f"{path} is not a list of objects: remove it")
    return starts


def _commit() -> str | None:
    """The commit of the present folder's repository, with `+` where tracked files differ from it."""
    try:
        head, changes = (
            subprocess.run(["git", *words], capture_output=True, text=True, timeout=10, check=True).stdout.strip()
            for words in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head}+" if changes else head
