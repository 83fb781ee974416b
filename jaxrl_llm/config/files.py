"""Files that are whole or not there, and JSON objects in files."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxrl_llm.config.resolve import ConfigError


@contextlib.contextmanager
def replaced(file: Path) -> Iterator[Path]:
    """The path to write to in place of `file`, which it becomes at the end: a kill, or an error as of a full disk,
    leaves a former file as it was."""
    unfinished = file.with_name(f".{file.name}.part")
    try:
        yield unfinished
        unfinished.replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def read_json(file: Path) -> dict[str, Any] | None:
    """The JSON object in `file`, None where there is no such file; raises ConfigError for anything but an object."""
    if not file.is_file():
        return None
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file} must hold a JSON object, but holds a {type(value).__name__}")
    return value


def write_json(file: Path, value: Any) -> None:
    """Writes `value` as indented JSON in place of a former file, as `replaced` says."""
    with replaced(file) as unfinished:
        unfinished.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
