"""The command line of every command: `--config=FILE`, `--config.KEY=VALUE`, the command's own flags, and `--help`.

def main(argv):
    config, options = load_flags(argv, "Train a model.")  # or options = load_options(argv, ...): without --config
    ...

if __name__ == "__main__":
    run(main)
"""

import contextlib
import gc
import inspect
import logging
import os
import platform
import re
import select
import signal
import sys
import textwrap
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import reduce
from operator import getitem
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from jaxrl_llm.config import ConfigDict, assign, check_keys, default, from_json, own_settings, validate
from jaxrl_llm.config.background import end_in_time
from jaxrl_llm.config.files import read_json
from jaxrl_llm.config.resolve import ConfigError, closest, exit_code, import_file, path_and_line
from jaxrl_llm.config.resuming import way_on
from jaxrl_llm.config.schema import BY_NAME, FORMER, KEYS, OF_A_START, SECTIONS, nearest, unknown_key
from jaxrl_llm.config.secrets import masked
from jaxrl_llm.config.setting import Setting
from jaxrl_llm.config.starting import STARTED
from jaxrl_llm.config.tree import SettingError
from jaxrl_llm.config.user_code import contained, is_own_exit, place
from jaxrl_llm.config.version import __version__

CONFIG_FILE = Setting(
    "config",
    "",
    "Config file, such as configs/grpo.py, or the name of a shipped one, such as grpo; its get_config receives "
    "ARGUMENT. Or the folder of a run, for its settings. Without it: the defaults.",
)
TOP_LEVEL = "run"  # the name that --help gives the keys outside all sections
PACKAGE = Path(__file__).parent.parent

# The folder of the run that this process was started for: its output_dir, once the flags are read.
_run_folder: ContextVar[Path | None] = ContextVar("_run_folder", default=None)


class Flags(NamedTuple):
    """The validated configuration of a command line, and the command's own options by name."""

    config: ConfigDict
    options: dict[str, Any]


def run(main: Callable[[list[str]], None]) -> NoReturn:
    """Calls `main(arguments)` and exits: 0 when it returns, 2 with `error: ...` on stderr after a ConfigError.

    After any other error it is 1 and the message names the file with the traceback; after Ctrl-C it is 130; where
    nobody reads the output any more, as behind `| head`, it is 141, without a message, as of other programs. An error
    in one of several processes ends all of them (see `jaxrl_llm.distributed.processes`). Warnings are lines
    `warning: ...` on stderr, and so is what is logged as one where the user's code sets up no logging.
    """
    STARTED.close()
    warnings.formatwarning = _warning_line
    sys.unraisablehook = _unraisable
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_LogLine())
    gc.set_threshold(20_000, 20, 20)  # by default it would take a tenth of a run's start
    code: int | str | None = 0
    try:
        main(sys.argv[1:])
        print(end="", flush=True)  # what cannot be written is an error here, not as Python ends
    except (Exception, KeyboardInterrupt) as error:
        processes, code = _processes(), exit_code(error)
        if isinstance(error, BrokenPipeError) and _unread():
            code = 128 + signal.SIGPIPE
        if (processes is None or not processes.report(error)) and code != 128 + signal.SIGPIPE:
            with contextlib.suppress(OSError):
                print(end="", flush=True)
            print(f"error: {masked(_message(error))}", file=sys.stderr)
    except SystemExit as exit_:
        code = exit_.code
        if not is_own_exit(exit_):
            print(f"error: sys.exit({exit_.code!r}) was called in {place(exit_)}", file=sys.stderr)
            code = exit_.code or 1
        elif notes := getattr(exit_, "__notes__", ()):  # of a run that was preempted
            sys.stdout.flush()
            print("; ".join(notes), file=sys.stderr, flush=True)
    end_in_time(code if isinstance(code, int) else int(code is not None))
    if (processes := _processes()) is not None:
        processes.end(code)
    sys.exit(code)


def _warning_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """The line of a warning; one that this package does not raise has its kind and its place behind it."""
    own = category is UserWarning and Path(filename).is_relative_to(PACKAGE)
    return masked(f"warning: {message}{'' if own else f' ({category.__name__}, {filename}:{lineno})'}\n")


def _unraisable(error: Any) -> None:
    """Reports an error that Python cannot raise where it came up, in a finalizer or a callback of the collector; Ctrl-C
    comes again, elsewhere, as a signal: it ends a wait too, which `_thread.interrupt_main` does not.
    """
    if error.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(error)
        return
    main = threading.main_thread().ident
    threading.Timer(0.05, signal.pthread_kill, (main, signal.SIGINT)).start()  # at once it would come up in here


class _LogLine(logging.Formatter):
    """The form of a log record on stderr, that of a warning: `warning: ...`."""

    def format(self, record: logging.LogRecord) -> str:
        return masked(f"{record.levelname.lower()}: {super().format(record)}")


def _unread() -> bool:
    """Whether standard output is a pipe without a reader; what is still to be written there is then dropped."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    if gone := bool(output.poll(0)):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains as it ends
    return gone


def _processes() -> ModuleType | None:
    """The module of processes if it was imported; importing it here would take seconds, and nothing has joined yet."""
    return sys.modules.get("jaxrl_llm.distributed.processes")


def _message(error: BaseException) -> str:
    """The message for the error that ends a command; the traceback of an unexpected one is written to a file."""
    # JAX adds a note on errors that pass through it: which frames a traceback leaves out, and none is shown here.
    notes = [note for note in getattr(error, "__notes__", ()) if "JAX_TRACEBACK_FILTERING" not in note]
    if isinstance(error, ConfigError):
        return "; ".join((str(error), *notes))
    if isinstance(error, KeyboardInterrupt):
        return f"stopped by Ctrl-C; for a run to go on from its newest checkpoint {way_on()}"
    report = "".join(traceback.format_exception(error))
    folder = _run_folder.get()
    file = folder / "error.txt" if folder is not None and folder.is_dir() else Path("jaxrl_llm_error.txt")
    versions = f"jaxrl_llm {__version__}, Python {platform.python_version()}, {platform.platform()}"
    try:
        file.write_text(masked(f"{sys.orig_argv}\n{versions}\n\n{report}"), encoding="utf-8")
    except OSError as refused:
        return f"{report}(it could not be written to {file}: {refused})"
    message = "; ".join((str(error).strip(), *notes)).strip("; ")
    return f"{type(error).__name__}{': ' if message else ''}{message}\nThe full traceback is in {file.absolute()}"


def load_flags(argv: Sequence[str], usage: str = "", options: Sequence[Setting] = ()) -> Flags:
    """The configuration and options of the arguments (without the program's name).

    `--config=configs/grpo.py` reads a config file, `--config=configs/grpo.py:tiny` calls its `get_config("tiny")`,
    `--config=grpo` finds the shipped file, and `--config=runs/grpo` reads the configuration of a run; without it that
    is `jaxrl_llm.config.default()`.
    `--config.batch.prompts=8` changes one key, in any order; `--config.batch.prompts 8` too. A list is written `a,b`,
    or in JSON where its items have commas, a missing optional value `none`; `--config.data.packing` alone is true.
    Parameters that the config file has added are flags too, `--config.my_length=30`. `options` are the command's own
    flags: `Setting("steps", 3, ...)` is `--steps`. `--help` prints the usage and exits, see `help_text`.

    Raises ConfigError for an unknown or repeated flag, a wrong value, or a bad config file.
    """
    _exit_after_help(argv, usage, options, KEYS)
    flags = {CONFIG_FILE.name: CONFIG_FILE, **{f"config.{key.name}": key for key in KEYS}}
    flags |= {option.name: option for option in options}
    spec = _value_of("config", argv)
    config = default() if spec is None else load_config_file(spec)
    own = own_settings(config)
    flags |= {f"config.{name}": setting for name, setting in own.items()}
    texts = _split(argv, flags)
    texts.pop("config", None)
    values = {option.name: option.default for option in options}
    for name, text in texts.items():
        value = flags[name].parse(text)
        if name in values:
            values[name] = value
        elif flags[name].name in own:
            *sections, leaf = flags[name].name.split(".")
            reduce(getitem, sections, config)[leaf] = value
        else:
            assign(config, flags[name].name, value)
    validate(config)
    config.output_dir = str(Path(config.output_dir).expanduser())
    set_run_folder(config.output_dir)
    return Flags(config, values)


def set_run_folder(output_dir: str) -> None:
    """Sets the folder that the traceback of an unexpected error goes to, that of the run of this process."""
    _run_folder.set(Path(output_dir).absolute())


def _value_of(flag: str, argv: Sequence[str]) -> str | None:
    """The text of the first `--flag=TEXT` or `--flag TEXT`, or None where there is none."""
    for index, argument in enumerate(argv):
        if argument.startswith(f"--{flag}="):
            return argument.partition("=")[2]
        if argument == f"--{flag}" and index + 1 < len(argv) and not argv[index + 1].startswith("--"):
            return argv[index + 1]
    return None


def load_options(argv: Sequence[str], usage: str, options: Sequence[Setting]) -> dict[str, Any]:
    """The options by name, of a command that has no `--config`; otherwise like `load_flags`."""
    _exit_after_help(argv, usage, options, ())
    flags = {option.name: option for option in options}
    texts = _split(argv, flags)
    return {name: flag.parse(texts[name]) if name in texts else flag.default for name, flag in flags.items()}


def positional(argv: Sequence[str], options: Sequence[Setting]) -> tuple[list[str], list[str]]:
    """The words of a command line, which stand anywhere among its flags, and these with their values.

    What follows a flag without `=` is its value; after a flag that is true or false only where it says which.
    """
    switches = {f"--{option.name}" for option in options if option.kind is bool}
    words: list[str] = []
    flags: list[str] = []
    flag = ""  # whose value may come next
    for argument in argv:
        says = flag not in switches or argument.lower() in ("true", "false", "1", "0")
        is_value = bool(flag) and says and not argument.startswith("--")
        is_flag = argument.startswith("-") and not is_value
        (flags if is_flag or is_value else words).append(argument)
        flag = argument if is_flag and "=" not in argument else ""
    return words, flags


def file_to_write(flag: str, text: str) -> Path | None:
    """The file that a flag names for what a command finds out, or None for an empty text.

    Raises ConfigError, before the command's work is done, where it cannot be written.
    """
    if not text:
        return None
    path = Path(text).expanduser()
    if not path.parent.is_dir():
        raise ConfigError(f"--{flag}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise ConfigError(f"--{flag}: {path} is a folder, but it takes a file")
    return path


def _exit_after_help(argv: Sequence[str], usage: str, options: Sequence[Setting], keys: Sequence[Setting]) -> None:
    for index, argument in enumerate(argv):
        flag, equals, section = argument.partition("=")
        if flag not in ("--help", "-help", "-h"):
            continue
        if not equals and index + 1 < len(argv) and not argv[index + 1].startswith("-"):
            section = argv[index + 1]
        print(help_text(usage, options, section, keys), end="")
        raise SystemExit(0)


def _split(argv: Sequence[str], flags: dict[str, Setting]) -> dict[str, str]:
    """The text of each flag; raises ConfigError for an unknown flag, one that comes twice or one without a value."""
    texts: dict[str, str] = {}
    arguments = list(argv)
    while arguments:
        flag = arguments.pop(0)
        if not flag.startswith("--"):
            bare = flag.lstrip("-")
            # A flag, a key as verl's commands have them, a config file, or a model.
            prefixes = ("", "config.") if "=" in bare else ("", "config.", f"{CONFIG_FILE.name}=", "model=")
            meant = (prefix + bare for prefix in prefixes if (prefix + bare).partition("=")[0] in flags)
            raise ConfigError(
                f"unexpected argument {flag!r}: every argument is a flag, --name=value"
                f"{''.join(f', such as --{text}' for text in [*meant][:1])}; see --help"
            )
        name, equals, text = flag[2:].partition("=")
        if name not in flags:
            key = name.removeprefix("config.")
            if key != name and key in FORMER and CONFIG_FILE.name in flags:
                raise ConfigError(f"unknown flag --{name}: {unknown_key(key)}")
            known = {flag.removeprefix("config."): flag for flag in flags}
            raise ConfigError(f"unknown flag --{name}; the closest is --{known[nearest(key, known)]}; see --help")
        if name in texts:
            raise ConfigError(f"--{name} is given twice: {texts[name]!r} and {text or flag!r}; keep one")
        if not equals and arguments and not arguments[0].startswith("--"):
            text = arguments.pop(0)
        elif not equals and flags[name].kind is bool:
            text = "true"
        elif not equals:
            raise ConfigError(f"--{name} has no value; write --{name}=VALUE")
        texts[name] = text
    return texts


def shipped_configs() -> dict[str, Path]:
    """The config files of the distribution by name, `grpo` or `recipes/...`, and their paths.

    They lie in the package of an installed wheel, and beside it in a checkout.
    """
    folder = PACKAGE / "configs" if (PACKAGE / "configs").is_dir() else PACKAGE.parent / "configs"
    # Agents, and what several recipes share, are no configurations.
    found = sorted(folder.rglob("*.py"))
    paths = [path for path in found if path.parent.name != "agents" and not path.name.startswith("_")]
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in paths}


def find_config(spec: str, flag: str = "--config") -> tuple[Path, str | None]:
    """The file and the argument of `path.py`, `path.py:argument`, `name` or `name:argument`.

    A name without `.py` is that of a file here or in `./configs`, or else of a shipped one. A shipped one is also found
    by its path in the repository, `configs/NAME.py`, where there is no such file, with a warning. Raises ConfigError
    for a name that is none of these; another path is not looked up.
    """
    name, colon, argument = spec.partition(":")
    shipped = shipped_configs()
    path: Path | None = Path(name)
    if path.suffix != ".py":
        candidates = [Path(f"{name}.py").expanduser(), Path("configs", f"{name}.py")]
        path = next((file for file in candidates if file.is_file()), shipped.get(name))
    elif not path.expanduser().is_file() and path.parts[0] == "configs":
        known = path.relative_to("configs").with_suffix("").as_posix()
        if known in shipped:
            warnings.warn(f"there is no file {path} here; this is the shipped {flag}={known}", stacklevel=2)
        path = shipped.get(known, path)
    if path is None and Path(name).suffix in (".yaml", ".yml", ".json", ".sh"):
        of_run = "a run has left no such file: name its output_dir, or the config.json in it"
        of_others = f"python -m jaxrl_llm migrate {name} --output=my_config.py writes one for TRL, verl or axolotl"
        way_out = of_run if name.endswith("config.json") else of_others
        raise ConfigError(f"{flag} is {spec!r}, but it takes a Python file, or a run; {way_out}")
    if path is None:
        raise ConfigError(
            f"{flag} is {spec!r}, but it takes a Python file, path.py or path.py:argument, or the name of a shipped "
            f"one: {', '.join(shipped)}"
            + (f"; the closest is {closest(name.removeprefix('configs/'), shipped)}" if shipped else "")
        )
    return path, argument if colon else None


def load_config_file(spec: str) -> ConfigDict:
    """The ConfigDict that the `get_config` of a Python file returns; `spec` is one of `find_config`, or names a run.

    That is the folder of a run or the config.json in it, whose settings it had. A relative path starts at the current
    directory. Raises ConfigError when the file is missing, fails (naming the
    line), has no `get_config`, or when that does not take the argument or returns something else.
    """
    if (record := _record_of(spec)) is not None:
        return record
    path, argument = find_config(spec)
    module = import_file(path)
    get_config = getattr(module, "get_config", None)
    if not callable(get_config):
        has_stages = hasattr(module, "get_stages")
        way_out = f"its stages are trained by python -m jaxrl_llm stages --stages={spec}"
        raise ConfigError(
            f"{path} has no function get_config; "
            f"{way_out if has_stages else 'it must return a ConfigDict made from config.default()'}"
        )
    config = configured(get_config, () if argument is None else (argument,), path, f"--config is {spec!r}")
    if not isinstance(config, ConfigDict):
        raise ConfigError(
            f"get_config of {path} returned {type(config).__name__}; it must return a ConfigDict made from "
            "jaxrl_llm.config.default()"
        )
    check_keys(config)
    return config


def _record_of(spec: str) -> ConfigDict | None:
    """The configuration with which the run that `spec` names goes on, or None where it names none."""
    path = Path(spec).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if path.name != "config.json" or spec in shipped_configs() or Path(f"{spec}.py").is_file():
        return None
    entries = read_json(path)
    if entries is None:
        return None
    if "output_dir" not in entries or "model_type" in entries:
        raise ConfigError(f"--config is {spec!r}, but {path} is no run's: name the output_dir of a run")
    if given := read_json(path.with_name("given.json")):
        warnings.warn(f"{path} lacks what the run was given in Python: {', '.join(given)}", stacklevel=2)
    config = from_json(path.read_text(encoding="utf-8"))
    for name in OF_A_START:  # `checkpoint.resume=never` of the start that wrote it would delete what it has saved
        assign(config, name, BY_NAME[name].default)
    config.output_dir = str(path.parent)
    return config


def configured(function: Callable[..., Any], arguments: Sequence[str], path: Path, asked: str) -> Any:
    """The result of a function of the Python file at `path`, called with these arguments; `asked` is the flag that
    names the file.

    Raises ConfigError when it does not take the arguments or fails, naming the line.
    """
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        signature = f"{function.__name__}{inspect.signature(function)}"
        raise ConfigError(f"{asked}, but {path} defines {signature}: {error}") from error
    try:
        with contained():
            return function(*arguments)
    except SettingError as error:
        raise ConfigError(f"{path_and_line(error, path)}: {error}") from error
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{path_and_line(error, path)}: {_explain(error)}") from error


def _explain(error: Exception) -> str:
    """The message for an error in a config file, with the full name of the key where the tree has none of that name."""
    message = str(error)
    unknown = re.search(r"""^(?:"'|'\\')(\w+)\\?'""", message)  # a ConfigDict that is read names only the last part
    if isinstance(error, AttributeError | KeyError) and unknown:
        leaf = unknown[1]
        if former := [name for name in FORMER if name.rpartition(".")[2] == leaf]:
            return "; ".join(unknown_key(name) for name in former)
        return f"there is no key {leaf}; the closest is {nearest(leaf, [*SECTIONS, *BY_NAME])}"
    return f"{type(error).__name__}: {message}"


def help_text(
    usage: str = "", options: Sequence[Setting] = (), section: str = "", keys: Sequence[Setting] = KEYS
) -> str:
    """The text of `--help`: the usage, the command's own flags, and a line for each section of the configuration.

    With a section (`--help=optimizer`) it is the keys of that section with default, meaning and allowed values; with
    `all` it is everything. `keys` are those of the configuration, none for a command without `--config`. Raises
    ConfigError for an unknown section.
    """
    sections = {name or TOP_LEVEL: meaning for name, meaning in SECTIONS.items()} if keys else {}
    if section and section not in (*sections, "all"):
        raise ConfigError(
            f"--help has no section {section!r}; the closest is {closest(section, [*sections, 'all'])}; sections are "
            f"{', '.join(sections) or 'none'}, or all"
        )
    if section in sections:
        own = [key for key in keys if (key.name.rpartition(".")[0] or TOP_LEVEL) == section]
        return "\n".join([*textwrap.wrap(f"{section}: {sections[section]}", 100), "", *_described("config.", own), ""])
    lines = [usage.strip(), ""] if usage else []
    if keys:
        lines += ["  --config=FILE.py[:ARGUMENT]", *_wrapped(CONFIG_FILE.doc)]
    lines += _described("", options)
    if keys and section == "all":
        lines += _described("config.", keys)
    elif keys:
        lines += [
            "",
            "Settings, each --config.KEY=VALUE. --help=SECTION lists those of a section, --help=all every one:",
        ]
        for name, meaning in sections.items():
            lines.append(f"  {name:<13}{textwrap.shorten(meaning, 100, placeholder=' ...')}")
    return "\n".join(lines) + "\n"


def _described(prefix: str, settings: Sequence[Setting]) -> list[str]:
    """The lines on some flags: name and default, then meaning and allowed values."""
    lines = []
    for setting in settings:
        lines.append(f"  --{prefix}{setting.name}={setting.show(setting.default)}")
        lines += _wrapped(f"{setting.doc} Takes {setting.allowed}.")
    return lines


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False)
