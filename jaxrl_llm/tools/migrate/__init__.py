"""From configurations of other libraries to ours: tables of keys, and the rules that join several.

`reading` reads the keys that a file sets, `keys/` has a table of each library's keys with ours and what differs,
`defaults/` what the libraries do by default; the rules (`trl`, `verl`, `tunix`, ...) fill a `Draft`, and that
is written as a config file.
"""

import re
from pathlib import Path

from jaxrl_llm.config import ConfigDict, ConfigError
from jaxrl_llm.tools.migrate import (
    axolotl,
    harmony,
    llamafactory,
    ms_swift,
    nemo_rl,
    openrlhf,
    prime_rl,
    skyrl,
    trl,
    tunix,
    verl,
)
from jaxrl_llm.tools.migrate.draft import Draft, Options, RefusedError, Source, shown
from jaxrl_llm.tools.migrate.functions import write
from jaxrl_llm.tools.migrate.reading import read
from jaxrl_llm.tools.migrate.table import find, known

LIBRARIES = {
    "trl": trl.convert,
    "verl": verl.convert,
    "axolotl": axolotl.convert,
    "harmony": harmony.convert,
    "tunix": tunix.convert,
    "openrlhf": openrlhf.convert,
    "nemo-rl": nemo_rl.convert,
    "prime-rl": prime_rl.convert,
    "skyrl": skyrl.convert,
    "llamafactory": llamafactory.convert,
    "ms-swift": ms_swift.convert,
}


def migrate(
    path: str | Path,
    system: str = "auto",
    trainer: str = "",
    devices: int = 0,
    rows: int = 0,
    version: str = "",
    output: str | Path = "",
) -> tuple[ConfigDict, str]:
    """Return the valid configuration that a file of another library stands for, and the text of its config file.

    `system`, `trainer`, `devices`, `rows` and `version` say what the file does not: see `jaxrl_llm migrate --help`. A
    key that cannot be taken over is left out, and named under "Look at this first" in the text. Functions that the file
    defines are written to `NAME_functions.py`, where NAME is that of `output` (the file for the text) or else of
    `path`. Raises ConfigError: a file that cannot be read, or that configures nothing.
    """
    path, named = Path(path).expanduser(), Path(output or path).expanduser()
    companion = companion_of(named)
    source = read(str(path), system, trainer, str(companion))._replace(companion=str(companion))
    options, checks = Options(devices, rows, version), []
    while True:
        result, error = _converted(source, options, checks)
        if result is not None:
            draft, config, text = result
            write("\n\n\n".join(text.rstrip() for text in (source.functions, *draft.functions) if text), companion)
            return config, text
        key = _fault(source, options, error)
        if key is None:
            raise error
        reason = str(error).removeprefix(f"{path}: ")
        checks.append(f"{shown(key, source.settings[key])} is left out: {reason}")
        source = source.without(key)


def companion_of(config_file: Path) -> Path:
    """The file of the functions that a config file of this name takes from its source."""
    return config_file.with_name(f"{config_file.stem}_functions.py")


def _converted(
    source: Source, options: Options, checks: list[str] | None = None
) -> tuple[tuple[Draft, ConfigDict, str] | None, ConfigError]:
    """Return the draft, configuration and text of a source, or else the error that prevents them."""
    try:
        draft = LIBRARIES[source.library](source, options)
        draft.checks[:0] = checks or ()
        return (draft, *draft.finish()), ConfigError()
    except RefusedError:
        raise
    except ConfigError as error:
        return None, error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return None, ConfigError(f"{source.path} has a value of another kind than its key takes: {error}")


def _fault(source: Source, options: Options, error: ConfigError) -> str | None:
    """Return the key without which the source can be converted, or at least has another error; None without one.

    Keys are tried in the order in which the message of the error speaks of them, or of ours for them. Where several
    have the value that it complains of, it stays the same without one of them.
    """
    message, entries = str(error), known(source.library)

    def place(key: str) -> int:
        entry, value = find(entries, key), source.settings[key]
        words = [key, *(entry.ours.split() if entry else ()), *([value] if isinstance(value, str) else ())]
        found = [
            match.start() for word in words if (match := re.search(rf"(?<![\w.]){re.escape(word)}(?!\w)", message))
        ]
        return min(found, default=len(message))

    progress, places = None, {key: place(key) for key in source.settings}
    for key in sorted(source.settings, key=places.__getitem__):
        if progress is not None and places[key] == len(message):  # of the others the message says nothing
            break
        result, other = _converted(source.without(key), options)
        if result is not None:
            return key
        value = source.settings[key]
        if progress is None and (str(other) != message or (isinstance(value, str) and f"'{value}'" in message)):
            progress = key
    return progress
