"""Convert a configuration of TRL, verl, axolotl or Harmony to a config file; no code of it is run.

    python -m jaxrl_llm migrate FILE --output=my_config.py

FILE is a YAML of axolotl; a YAML of verl, or a shell script with its overrides (`python -m verl.trainer.main_ppo
key=value ...`); a Python script, a JSON or YAML file, or a shell script with the arguments of TRL's trainers; or a
recipe of Harmony. Each key is written beside the one it comes from. A default of the source is written where ours
differs, so that the run is the same. Keys without an equivalent are named in comments, and the points to check are
listed at the top of the file. docs/migrating.md has every key; `--tables` prints that page.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl_llm.config import ConfigDict, ConfigError
from jaxrl_llm.config.flags import load_options
from jaxrl_llm.config.schema import Setting
from jaxrl_llm.tools.migrate import axolotl, harmony, trl, verl
from jaxrl_llm.tools.migrate.draft import Options, Source
from jaxrl_llm.tools.migrate.page import page
from jaxrl_llm.tools.migrate.reading import read

SYSTEMS = {"trl": trl.convert, "verl": verl.convert, "axolotl": axolotl.convert, "harmony": harmony.convert}
FLAGS = (
    Setting("output", "", "File to write; empty prints the config file."),
    Setting("system", "auto", "Library that FILE is for; auto recognises it.", choices=("auto", *SYSTEMS)),
    Setting("trainer", "", "Trainer, where FILE does not name it: grpo, rloo, ppo, sft, dpo, kto, orpo, cpo, reward."),
    Setting(
        "devices",
        0,
        "Devices that it ran on: batches are counted per device there. 0 is the number in FILE, or 1.",
        int,
        minimum=0,
    ),
    Setting(
        "rows",
        0,
        "Rows of the training data: epochs become steps. 0 counts those of a local file.",
        int,
        minimum=0,
    ),
    Setting(
        "version", "", "Version whose defaults apply: 1.16 (newest) or 0.16 (GRPO) of TRL, 0.8 (newest) or 0.3 of verl."
    ),
    Setting("tables", False, "Print docs/migrating.md.", bool),
)


def migrate(
    path: str | Path, system: str = "auto", trainer: str = "", devices: int = 0, rows: int = 0, version: str = ""
) -> tuple[ConfigDict, str]:
    """The configuration that a file of another library stands for, valid, and the text of a config file that makes it.

    system, trainer, devices, rows and version say what the file does not; see the flags. Raises ConfigError: a file
    that cannot be read, a value without an equivalent, batches that do not divide, or epochs of an unknown number of
    rows.
    """
    source: Source = read(str(path), system, trainer)
    try:
        return SYSTEMS[source.system](source, Options(devices, rows, version))
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path} has a value of another kind than its key takes: {error}") from error


def main(argv: Sequence[str]) -> None:
    """The command line: see `--help`."""
    files = [argument for argument in argv if not argument.startswith("--")]
    options = load_options([argument for argument in argv if argument.startswith("--")], __doc__ or "", FLAGS)
    if options["tables"]:
        sys.stdout.write(page())
        return
    if len(files) != 1:
        raise ConfigError("give one file: python -m jaxrl_llm migrate FILE; values of flags are written --name=value")
    said = {name: options[name] for name in ("system", "trainer", "devices", "rows", "version")}
    _, text = migrate(files[0], **said)
    if not options["output"]:
        sys.stdout.write(text)
        return
    output = Path(options["output"])
    if output.exists():
        raise ConfigError(f"{output} is there already; name another file with --output, or remove it")
    output.write_text(text.replace("THIS_FILE", str(output)), encoding="utf-8")
    print(f"wrote {output}; its first lines say what to look at")
