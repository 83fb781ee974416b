"""Convert a configuration of another library to a config file; no code of it is run.

    python -m jaxrl_llm migrate FILE --output=my_config.py

FILE is, of
    TRL, Unsloth    a Python script or notebook; a JSON, YAML or shell script with the arguments of TRL's trainers
    verl            a YAML, or a shell script with overrides: python -m verl.trainer.main_ppo key=value ...
    axolotl         a YAML
    LLaMA-Factory   a YAML, or a shell script that starts it
    ms-swift        a shell script: swift rlhf --rlhf_type grpo ...
    OpenRLHF        a shell script: python -m openrlhf.cli.train_ppo_ray ...
    NeMo-RL         a YAML, or a shell script: uv run examples/run_grpo.py ...
    prime-rl        a TOML, or a shell script: uv run rl @ FILE.toml ...
    SkyRL           a shell script: python -m skyrl.train.entrypoints.main_base ...
    Tunix           a YAML, a shell script or a Python script: python -m tunix.cli.grpo_main ...
    Harmony         a recipe in Python

Each key is written beside the one it comes from. A default of the source is written where ours differs, so that the run
is the same. Keys without an equivalent are named in comments, and the points to check are listed at the top of the
file. Rewards and other functions that FILE defines are copied to my_config_functions.py. docs/migrating.md has every
key; `--tables` prints that page.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl_llm.config import ConfigError
from jaxrl_llm.config.flags import load_options, positional
from jaxrl_llm.config.setting import Setting
from jaxrl_llm.tools.migrate import LIBRARIES, companion_of, migrate
from jaxrl_llm.tools.migrate.documentation import page
from jaxrl_llm.tools.migrate.trl import RULES

FLAGS = (
    Setting("output", "", "File to write; empty prints the config file."),
    Setting("system", "auto", "Library that FILE is for; auto recognises it.", choices=("auto", *LIBRARIES)),
    Setting("trainer", "", f"Trainer, where FILE does not name it: {', '.join(RULES)}; of Tunix dapo and drgrpo too."),
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
        "version",
        "",
        "Version whose defaults apply: 1.16 (newest) or 0.16 (GRPO) of TRL, 0.9 (newest), 0.8 or 0.3 of verl.",
    ),
    Setting("tables", False, "Print docs/migrating.md.", bool),
)


def main(argv: Sequence[str]) -> None:
    """Run the command line: see `--help`."""
    files, flags = positional(argv, FLAGS)
    options = load_options(flags, __doc__ or "", FLAGS)
    if options["tables"]:
        sys.stdout.write(page())
        return
    if len(files) != 1:
        raise ConfigError("give one file: python -m jaxrl_llm migrate FILE --output=my_config.py")
    output = Path(options["output"]).expanduser()
    if options["output"] and output.suffix != ".py":
        raise ConfigError(f"--output is {options['output']}, but a config file is Python: name it {output.name}.py")
    if options["output"] and output.exists():
        raise ConfigError(f"{output} is there already; name another file with --output, or remove it")
    if options["output"]:
        output.parent.mkdir(parents=True, exist_ok=True)
    said = {name: options[name] for name in ("system", "trainer", "devices", "rows", "version", "output")}
    _, text = migrate(files[0], **said)
    if not options["output"]:
        sys.stdout.write(text)
        return
    output.write_text(text.replace("THIS_FILE", str(output)), encoding="utf-8")
    functions = companion_of(output)
    also = f" and {functions}, the functions that {files[0]} defines" if functions.name in text else ""
    print(f"wrote {output}{also}; its first lines say what to look at")
