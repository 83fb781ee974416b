"""Move in from another library: its configuration becomes a config file of ours, and nothing of it is run.

    python -m jaxrl_llm migrate FILE --output=my_config.py

FILE is a YAML of axolotl; a YAML of verl, or a shell script with its overrides (`python -m verl.trainer.main_ppo
key=value ...`); a Python script, a JSON or YAML file, or a shell script with the arguments of TRL's trainers; or a
recipe of Harmony. Keys are written with what they come from beside them. What the source leaves at its default is
written where ours is another, so that the run is theirs. What has no equivalent is named in a comment, and what to look
at first stands at the top of the file. docs/migrating.md has every key; `--tables` prints that page.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import load_options
from jaxrl_llm.config.schema import Key
from jaxrl_llm.tools.migrate import LIBRARIES, migrate
from jaxrl_llm.tools.migrate.documentation import page

FLAGS = (
    Key("output", "", "File to write; empty prints the config file."),
    Key("system", "auto", "The library that FILE is for; auto looks at it.", choices=("auto", *LIBRARIES)),
    Key("trainer", "", "The trainer, where FILE does not tell: grpo, rloo, ppo, sft, dpo, kto, orpo, cpo, reward."),
    Key("devices", 0, "Devices that it ran on: it counts batches by them. 0 is FILE's number, or 1.", int, minimum=0),
    Key("rows", 0, "Rows of the training data: epochs become steps. 0 counts those of a local file.", int, minimum=0),
    Key("version", "", "Defaults of this version: 1.16 (newest) or 0.16 (GRPO) of TRL, 0.8 (newest) or 0.3 of verl."),
    Key("tables", False, "Print docs/migrating.md.", bool),
)


def main(argv: Sequence[str]) -> None:
    """Run the command line: see `--help`."""
    files = [argument for argument in argv if not argument.startswith("--")]
    options = load_options([argument for argument in argv if argument.startswith("--")], __doc__ or "", FLAGS)
    if options["tables"]:
        sys.stdout.write(page())
        return
    if len(files) != 1:
        raise ConfigError("give one file: python -m jaxrl_llm migrate FILE; values of flags are written --name=value")
    _, text = migrate(files[0], **{name: options[name] for name in ("system", "trainer", "devices", "rows", "version")})
    if not options["output"]:
        sys.stdout.write(text)
        return
    output = Path(options["output"])
    if output.exists():
        raise ConfigError(f"{output} is there already; name another file with --output, or remove it")
    output.write_text(text.replace("THIS_FILE", str(output)), encoding="utf-8")
    print(f"wrote {output}; its first lines say what to look at")
