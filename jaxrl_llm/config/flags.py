"""The command line every `python -m jaxrl_llm.<command>` shares: `--config=FILE`, `--config.KEY=VALUE`, `--help`.

def main(argv):
    config, options = load_flags(argv, "Train a model.")  # or options = load_options(argv, ...): without --config
    ...

if __name__ == "__main__":
    run(main)
"""

import inspect
import platform
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from jaxrl_llm import __version__
from jaxrl_llm.config import ConfigDict, assign, check_keys, default, validate
from jaxrl_llm.config.resolve import ConfigError, closest, exit_code, import_file, path_and_line
from jaxrl_llm.config.schema import KEYS, SECTIONS, Key

CONFIG_FILE = Key(
    "config", "", "Config file, such as configs/grpo.py; its get_config receives ARGUMENT. Without it: the defaults."
)


# The output_dir of the configuration that this process was started with, once it is known.
_run_folder: list[Path] = []


class Flags(NamedTuple):
    """What a command line said: the validated configuration, and the command's own options by name."""

    config: ConfigDict
    options: dict[str, Any]


def run(main: Callable[[list[str]], None]) -> NoReturn:
    """Calls `main(arguments)` and exits: 0 when it returns, 2 with `error: ...` on stderr after a ConfigError.

    After any other error it is 1, the message names the file with the traceback, and after Ctrl-C it is 130. Of many
    processes none is left waiting: an error ends all of them (see `jaxrl_llm.distributed.processes`).
    """
    code: int | str | None = 0
    try:
        main(sys.argv[1:])
    except (Exception, KeyboardInterrupt) as error:
        reported = _others() is not None and _others().report(error)
        if not reported:
            print(f"error: {_last_words(error)}", file=sys.stderr)
        code = exit_code(error)
    except SystemExit as exit_:
        code = exit_.code
    if _others() is not None:
        _others().end(code)
    sys.exit(code)


def _last_words(error: BaseException) -> str:
    """What a person is told of the error that ends a command; the traceback of one that is no ConfigError is kept."""
    if isinstance(error, ConfigError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "stopped by Ctrl-C; a run goes on from its newest checkpoint when the same command is started again"
    kept = "".join(traceback.format_exception(error))
    file = _run_folder[0] / "error.txt" if _run_folder and _run_folder[0].is_dir() else Path("jaxrl_llm_error.txt")
    versions = f"jaxrl_llm {__version__}, Python {platform.python_version()}, {platform.platform()}"
    try:
        file.write_text(f"{sys.orig_argv}\n{versions}\n\n{kept}", encoding="utf-8")
    except OSError as refused:
        return f"{kept}(it could not be written to {file}: {refused})"
    words = str(error).strip()
    return f"{type(error).__name__}{': ' if words else ''}{words}\nThe full traceback is in {file.absolute()}"


def _others() -> Any:
    """The module of processes; None where no command has imported it, which takes seconds, and so none has joined."""
    return sys.modules.get("jaxrl_llm.distributed.processes")


def load_flags(argv: Sequence[str], usage: str = "", options: Sequence[Key] = ()) -> Flags:
    """The configuration and options that the arguments (without the program's name) ask for.

    `--config=configs/grpo.py` reads a config file, `--config=configs/grpo.py:tiny` calls its `get_config("tiny")`;
    without it the configuration is `jaxrl_llm.config.default()`. `--config.batch.prompts=8` changes one key, in any
    order. A list is written `a,b`, a missing optional value `none`; `--config.data.packing` alone is true. `options`
    are the command's own flags: `Key("steps", 3, ...)` is `--steps`. `--help` prints `usage` and every key, and exits.

    Raises ConfigError for an unknown or repeated flag, a wrong value, or a bad config file.
    """
    _exit_after_help(argv, lambda: help_text(usage, options))
    keys = {CONFIG_FILE.name: CONFIG_FILE, **{f"config.{key.name}": key for key in KEYS}}
    keys |= {option.name: option for option in options}
    given = _split(argv, keys)
    config = load_config_file(given.pop("config")) if "config" in given else default()
    values = {option.name: option.default for option in options}
    for name, text in given.items():
        value = keys[name].parse(text)
        if name in values:
            values[name] = value
        else:
            assign(config, keys[name].name, value)
    validate(config)
    _run_folder[:] = [Path(config.output_dir)]
    return Flags(config, values)


def load_options(argv: Sequence[str], usage: str, options: Sequence[Key]) -> dict[str, Any]:
    """The options by name, of a command that has no `--config`; otherwise like `load_flags`."""
    _exit_after_help(argv, lambda: help_text(usage, options, tree=()))
    keys = {option.name: option for option in options}
    given = _split(argv, keys)
    return {name: key.parse(given[name]) if name in given else key.default for name, key in keys.items()}


def _exit_after_help(argv: Sequence[str], text: Callable[[], str]) -> None:
    if {"--help", "-h", "-help"} & set(argv):
        print(text(), end="")
        raise SystemExit(0)


def _split(argv: Sequence[str], keys: dict[str, Key]) -> dict[str, str]:
    """The text given for each flag; raises ConfigError for what is no known flag, comes twice or has no value."""
    given: dict[str, str] = {}
    arguments = list(argv)
    while arguments:
        flag = arguments.pop(0)
        if not flag.startswith("--"):
            raise ConfigError(f"unexpected argument {flag!r}: every argument is a flag, --name=value; see --help")
        name, equals, text = flag[2:].partition("=")
        if name not in keys:
            known = {flag.removeprefix("config."): flag for flag in keys}
            near = known[closest(name.removeprefix("config."), known)]
            raise ConfigError(f"unknown flag --{name}; the closest is --{near}; see --help")
        if name in given:
            raise ConfigError(f"--{name} is given twice: {given[name]!r} and {text or flag!r}; keep one")
        if not equals and arguments and not arguments[0].startswith("--"):
            text = arguments.pop(0)
        elif not equals and keys[name].kind is bool:
            text = "true"
        elif not equals:
            raise ConfigError(f"--{name} has no value; write --{name}=VALUE")
        given[name] = text
    return given


def load_config_file(spec: str) -> ConfigDict:
    """The ConfigDict that the `get_config` of a Python file returns; `spec` is `path.py` or `path.py:argument`.

    A relative path starts at the current directory. Raises ConfigError when the file is missing, fails (naming the
    line), has no `get_config`, or when that does not take the argument or returns something else.
    """
    path, colon, argument = spec.partition(":")
    if Path(path).suffix != ".py":
        raise ConfigError(f"--config is {spec!r}, but it takes a Python file, path.py or path.py:argument")
    module = import_file(path)
    get_config = getattr(module, "get_config", None)
    if not callable(get_config):
        raise ConfigError(f"{path} has no function get_config; it must return a ConfigDict made from config.default()")
    arguments = (argument,) if colon else ()
    try:
        inspect.signature(get_config).bind(*arguments)
    except TypeError as error:
        takes = f"get_config{inspect.signature(get_config)}"
        raise ConfigError(f"--config is {spec!r}, but {path} defines {takes}: {error}") from error
    try:
        config = get_config(*arguments)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{path_and_line(error, path)}: {_explain(error)}") from error
    if not isinstance(config, ConfigDict):
        raise ConfigError(
            f"get_config of {path} returned {type(config).__name__}; it must return a ConfigDict made from "
            "jaxrl_llm.config.default()"
        )
    check_keys(config)
    return config


def _explain(error: Exception) -> str:
    """What went wrong in a config file, with the full name and range of the key where the tree refused a change."""
    message = str(error)
    # A locked ConfigDict names only the last part of the key, and lists its neighbours as objects.
    unknown = re.search(r"""Key "(\w+)" does not exist|^(?:"'|'\\')(\w+)\\?'""", message)
    if isinstance(error, AttributeError | KeyError) and unknown:
        name = unknown[1] or unknown[2]
        return f"there is no key {name}; the closest is {closest(name, [*SECTIONS, *(key.name for key in KEYS)])}"
    refused = re.search(r"override field '(\w+)' \(reference\)\. (.*) is of original type", message, re.DOTALL)
    if isinstance(error, TypeError) and refused:
        keys = [key for key in KEYS if key.name.rpartition(".")[2] == refused[1]]
        return f"{refused[1]} is {refused[2]!r}, but " + "; ".join(f"{key.name} takes {key.allowed}" for key in keys)
    return f"{type(error).__name__}: {message}"


def help_text(usage: str = "", options: Sequence[Key] = (), tree: Sequence[Key] = KEYS) -> str:
    """The text of `--help`: the usage, then every flag with its default, meaning and allowed values.

    `tree` are the keys of the configuration; without any there is no `--config` either.
    """
    wrap = textwrap.TextWrapper(width=100, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False)
    lines = [usage.strip(), ""] if usage else []
    if tree:
        lines += ["  --config=FILE.py[:ARGUMENT]", *wrap.wrap(CONFIG_FILE.doc)]
    for prefix, keys in (("", options), ("config.", tree)):
        for key in keys:
            lines.append(f"  --{prefix}{key.name}={key.show(key.default)}")
            lines += wrap.wrap(f"{key.doc} Takes {key.allowed}.")
    return "\n".join(lines) + "\n"
