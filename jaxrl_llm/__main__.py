"""Run a command: `python -m jaxrl_llm COMMAND`, installed as `jaxrl-llm COMMAND`."""

import importlib
from typing import NoReturn

from jaxrl_llm.commands.welcome import COMMANDS, welcome
from jaxrl_llm.config.flags import run
from jaxrl_llm.config.resolve import ConfigError, closest
from jaxrl_llm.config.starting import imports
from jaxrl_llm.config.version import __version__


def main(argv: list[str]) -> None:
    """Runs the command that the first argument names with the other arguments; without any it prints the overview."""
    if not argv or argv[0] in ("-h", "--help"):
        print(welcome(), end="")
        return
    if argv[0] == "--version":
        print(f"jaxrl_llm {__version__}")
        return
    command, *arguments = argv
    if command not in COMMANDS:
        raise ConfigError(
            f"there is no command {command!r}; the closest is {closest(command, COMMANDS)}; "
            f"commands are {', '.join(COMMANDS)}"
        )
    module = "jaxrl_llm.train" if command == "train" else f"jaxrl_llm.commands.{command}"
    with imports():
        imported = importlib.import_module(module)
    imported.main(arguments)


def console() -> NoReturn:
    """Entry point of the installed command `jaxrl-llm`."""
    run(main)


if __name__ == "__main__":
    console()
