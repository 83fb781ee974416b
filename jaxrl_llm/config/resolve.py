"""Names in a configuration become objects (`resolve`); wrong names and other user errors raise ConfigError."""

import ast
import contextlib
import difflib
import importlib
import importlib.metadata
import importlib.util
import inspect
import re
import sys
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxrl_llm.config.secrets import masked
from jaxrl_llm.config.user_code import contained, error_text

MOST_LISTED = 60  # names of a module that a message has room for
WORDS = {"true": True, "false": False, "none": None}  # of options, as on a command line, beside Python's own


class ConfigError(ValueError):
    """A user error: one readable message that names the setting or thing, its value and the fix.

    The secrets of addresses in it are masked.
    """

    code = 2  # the exit code of a command

    def __init__(self, *arguments: Any):
        super().__init__(*map(masked, arguments))


class TransientError(ConfigError):
    """A fault of machines, stores or networks, which the next start of the same command may not meet."""

    code = 1  # with which a job manager starts it again


def exit_code(error: BaseException) -> int:
    """The exit code after an error: that of a ConfigError or of `sys.exit`, 130 for Ctrl-C, 1 for any other."""
    if isinstance(error, ConfigError):
        return error.code
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def resolve(name: str | Callable[..., Any], package: str | ModuleType | Mapping[str, Any]) -> Any:
    """The object of a name in a configuration; a callable is returned as it is.

    `name` is a known one (a public callable of the module `package`, or a key of the mapping `package`), or the
    user's own: `"my_module:function"`, `"my_module.function"` or `"path/to/file.py:function"`.

    Raises ConfigError: an unknown name (listing the known ones and the closest), a module or file that is missing or
    fails when it is imported, or one without that name.
    """
    if callable(name):
        return name
    known = package if isinstance(package, Mapping) else _public_callables(package)
    if name in known:
        return known[name]
    if ":" in name:
        where, _, attribute = name.partition(":")
        return _attribute(name, import_file(where) if where.endswith(".py") else import_module(where, name), attribute)
    if "." in name and not name.endswith(".py"):
        where, _, attribute = name.rpartition(".")
        return _attribute(name, import_module(where, name), attribute)
    raise ConfigError(
        f"unknown name {name!r}; known are {', '.join(sorted(known)) or 'none'}"
        + (f"; the closest is {closest(name, known)}" if known else "")
        + "; your own is written my_module:function or path/to/file.py:function"
    )


def is_own(name: str) -> bool:
    """True for a name that `resolve` reads as the user's own, of a module or a file."""
    return ":" in name or ("." in name and not name.endswith(".py"))


def resolve_with_options(
    spec: str, package: str | ModuleType | Mapping[str, Any], reserved: Iterable[str] = ()
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function of `"name"` or `"name(option=1, other='text')"`, and its options.

    `reserved` are arguments that the caller passes itself; besides its own arguments a function may declare options
    that its caller reads (attribute `options`, with their defaults). A text for an option of the user's own function
    whose default is a number, or true or false, is read as one, as no check knows its types: 'False' would be true.
    Raises ConfigError: a name that `resolve` refuses, options that cannot be read, or that the function does not have,
    and a text for such an option of a built-in function.
    """
    name, options = split_options(spec)
    function = resolve(name, package)
    if options:
        parameters = inspect.signature(function).parameters.values()
        named = [parameter for parameter in parameters if not parameter.kind.name.startswith("VAR_")]
        defaults = {parameter.name: parameter.default for parameter in named if parameter.name not in reserved}
        defaults |= getattr(function, "options", {})
        unknown = [option for option in options if option not in defaults]
        if unknown:
            raise ConfigError(f"{name} has no option {unknown[0]!r}; it takes {', '.join(defaults) or 'none'}")
        if is_own(name):
            return function, {option: _read_as(defaults[option], value) for option, value in options.items()}
        for option, value in options.items():
            if isinstance(value, str) and isinstance(default := defaults[option], bool | int | float):
                takes = "true or false" if isinstance(default, bool) else "a number"
                raise ConfigError(f"{name}: {option} is {value!r}, a text, but it takes {takes}: write it unquoted")
    return function, options


def _read_as(default: Any, value: Any) -> Any:
    """The number or truth value that a text writes where the default is one; any other value as it is."""
    if not isinstance(value, str) or not isinstance(default, bool | int | float):
        return value
    try:
        read = ast.literal_eval(_Words().visit(ast.parse(value.strip(), mode="eval")))
    except (SyntaxError, ValueError):
        return value
    return read if type(read) in (type(default), int if type(default) is float else None) else value


class _Words(ast.NodeTransformer):
    """Replaces the names of WORDS by their values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(WORDS[node.id]) if node.id in WORDS else node


def split_options(spec: str) -> tuple[str, dict[str, Any]]:
    """The name and the options, literals, of `"name(option=1, other='text')"`; a mere name has none.

    true, false and none are written as in Python or as on a command line.

    Raises ConfigError when they cannot be read.
    """
    if not spec.endswith(")"):
        return spec, {}
    name, _, arguments = spec.partition("(")
    try:
        call = ast.parse(f"options({arguments}", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError("options are written name=value, in brackets once")
        options = {keyword.arg: ast.literal_eval(_Words().visit(keyword.value)) for keyword in call.keywords}
        if None in options or len(options) < len(call.keywords):
            raise ValueError("each option has a name, and one value")
        return name.strip(), {str(option): value for option, value in options.items()}
    except (SyntaxError, ValueError) as error:
        raise ConfigError(
            f"cannot read the options of {spec!r}; write name(option=1, other='text'), each of them once"
        ) from error


def split_losses(written: str) -> list[str]:
    """The losses that are joined by +, as `["dpo(alpha=1e+1)", "sft"]`; a + within brackets joins nothing."""
    losses, depth = [""], 0
    for letter in written:
        depth += (letter == "(") - (letter == ")")
        if letter == "+" and depth == 0:
            losses.append("")
        else:
            losses[-1] += letter
    return losses


def _public_callables(package: str | ModuleType) -> dict[str, Any]:
    """The callables a module defines (or lists in `__all__`), without those it merely imports."""
    module = importlib.import_module(package) if isinstance(package, str) else package
    if listed := getattr(module, "__all__", None):
        return {name: value for name, value in vars(module).items() if callable(value) and name in listed}
    return {
        name: value
        for name, value in vars(module).items()
        if callable(value)
        and not name.startswith("_")
        and f"{getattr(value, '__module__', '')}.".startswith(f"{module.__name__}.")
    }


def _attribute(name: str, module: ModuleType, attribute: str) -> Any:
    if hasattr(module, attribute):
        return getattr(module, attribute)
    known = sorted(_public_callables(module))
    listed = f"; it defines {', '.join(known)}" if 0 < len(known) <= MOST_LISTED else ""
    near = f"{listed}; the closest is {closest(attribute, known)}" if known else ""
    # A folder without __init__.py is a module without a file, as are some of Python's own.
    where = getattr(module, "__file__", None) or f"the module {module.__name__}"
    raise ConfigError(f"cannot find {name!r}: {where} has no {attribute!r}{near}")


def import_module(where: str, name: str) -> ModuleType:
    """The module `where`, for the setting or name `name`; raises ConfigError when it is missing or fails."""
    try:
        with contained():
            return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not (where == error.name or where.startswith(error.name + ".")):
            raise ConfigError(f"importing {where!r} for {name!r} failed: {error}") from error
        raise ConfigError(
            f"cannot find {name!r}: no module {error.name!r} on the Python path; "
            f"to name a file write path/to/file.py:function"
        ) from error
    except Exception as error:
        raise ConfigError(f"importing {where!r} for {name!r} failed: {type(error).__name__}: {error}") from error


def import_optional(module: str, least: str, asked: str) -> ModuleType:
    """The module of a package that only the setting or name `asked` needs.

    Raises ConfigError when the package is missing, older than the version `least`, another one of that name, or fails.
    """
    package = module.partition(".")[0]
    install = f"pip install '{package}>={least}'"
    found = importlib.util.find_spec(package)
    if found is None:
        raise ConfigError(f"{asked} needs the package {package}: {install}")
    try:
        version = importlib.metadata.version(package)
        here, wanted = (tuple(map(int, re.findall(r"\d+", text)[:2])) for text in (version, least))
        if here < wanted:
            raise ConfigError(f"{asked} needs {package} {least} or later, but this is {version}: {install}")
        with contained():
            return importlib.import_module(module)
    except ConfigError:
        raise
    except Exception as error:
        place = found.origin or next(iter(found.submodule_search_locations or ()), package)
        raise ConfigError(
            f"{asked} needs the package {package}, but {place} is another of that name, which is to be renamed, or is "
            f"broken ({type(error).__name__}: {error}): {install}"
        ) from error


def import_file(path: str | Path) -> ModuleType:
    """The module of a Python file; executed once for each content of the file.

    Raises ConfigError when the file is missing or fails, naming the line.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        beside = [str(other) for other in sorted(path.parent.glob("*.py"))]
        near = f"; the closest is {closest(str(path), beside)}" if beside else ""
        raise ConfigError(f"there is no file {path} (looked in {Path.cwd()}){near}")
    # The content is part of the name: a file edited between two calls in a notebook is executed again.
    source = path.read_bytes()
    name = f"{path.stem}_{zlib.crc32(bytes(path.resolve()) + source):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with contained():
            # Not by the loader, whose bytecode of a file may be that of another content, of the same size and second.
            exec(compile(source, path, "exec"), module.__dict__)
    except ConfigError:
        del sys.modules[name]
        raise
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{path_and_line(error, path)}: {type(error).__name__}: {error}") from error
    return module


@contextlib.contextmanager
def failing_as(what: str) -> Iterator[None]:
    """Raise a ConfigError that names `what`, and the line, for all that a user's function raises (`contained`)."""
    try:
        with contained():
            yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{what} failed: {error_text(error)}") from error


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Put `what`, a setting or a place, before the message of a ConfigError that is raised inside."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from error


def path_and_line(error: BaseException, path: str | Path) -> str:
    """`path:line` of the last line of `path` in the traceback of an exception; the path alone if there is none."""
    if isinstance(error, SyntaxError) and error.lineno:
        return f"{path}:{error.lineno}"
    file = Path(path).expanduser().resolve()
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == file]
    return f"{path}:{lines[-1]}" if lines else str(path)


def closest(name: str, known: Iterable[str]) -> str:
    """The known name most similar to `name`, in full or in its last dotted part, whatever the case of its letters.

    Of equally similar names the one most similar in full wins, or, for a `name` without dots, the first.
    """

    def similarity(other: str) -> tuple[float, float]:
        full, last = _ratio(name, other), _ratio(name.rpartition(".")[2], other.rpartition(".")[2])
        return max(full, last), full if "." in name else 0.0

    return max(known, key=similarity)


def _ratio(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a.lower(), b.lower()).ratio()
