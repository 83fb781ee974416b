"""From configurations of TRL, verl, axolotl and Harmony to ours: tables of keys, and the rules that join several.

`reading` reads the keys that a file sets, `keys/` has a table of each library's keys with ours and what differs, the
rules (`trl`, `verl`, `axolotl`, `harmony`) fill a `Draft`, and that is written as a config file.
"""

from pathlib import Path

from jaxrl_llm.config import ConfigDict, ConfigError
from jaxrl_llm.tools.migrate import axolotl, harmony, trl, verl
from jaxrl_llm.tools.migrate.draft import Options
from jaxrl_llm.tools.migrate.reading import read

LIBRARIES = {"trl": trl.convert, "verl": verl.convert, "axolotl": axolotl.convert, "harmony": harmony.convert}


def migrate(
    path: str | Path, system: str = "auto", trainer: str = "", devices: int = 0, rows: int = 0, version: str = ""
) -> tuple[ConfigDict, str]:
    """Return the valid configuration that a file of another library stands for, and the text of its config file.

    `system`, `trainer`, `devices`, `rows` and `version` say what the file does not: see `jaxrl_llm migrate --help`.
    Raises ConfigError: a file that cannot be read, a value without an equivalent, batches that do not divide, or epochs
    of an unknown number of rows.
    """
    source = read(str(path), system, trainer)
    try:
        return LIBRARIES[source.library](source, Options(devices, rows, version)).finish()
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path} has a value of another kind than its key takes: {error}") from error
