"""Formats by name: those that are known, and functions of the user's own, plain or in axolotl's shape."""

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.config.resolve import ConfigError, closest, failing_as, resolve, split_options
from jaxrl_llm.data import Row
from jaxrl_llm.data.formats import axolotl, axolotl_sft, native
from jaxrl_llm.data.pairs import ANSWERS
from jaxrl_llm.data.tokenize import TEXTS

Example = Row
Format = Callable[[Mapping[str, Any]], Example]

COMMON: Mapping[str, Callable[..., Any]] = {
    "auto": native.auto,
    "passthrough": native.passthrough,
    "verl": native.verl,
    "harmony": native.harmony,
    "sharegpt": native.sharegpt,
    "openai_preference": native.openai_preference,
    "stepwise": native.stepwise,
    "alpaca": axolotl_sft.alpaca,
    "llamafactory": native.llamafactory,
}
PAIRS = axolotl.PAIRS
LABELS = axolotl.LABELS
OWN = {"labels": LABELS, "completions": axolotl_sft.COMPLETIONS}  # of a kind, before those of pairs
METHODS = {"dpo": PAIRS, "ipo": PAIRS, "simpo": PAIRS, "orpo": PAIRS, "kto": LABELS}
FILLED = ("row", "data_kind", "tokenizer")  # arguments of a format that are filled in, and no options
MAP_OPTIONS = ("remove_columns", "num_proc", "desc", "load_from_cache_file", "keep_in_memory")


class FactoryOptions(dict[str, Any]):
    """Settings as axolotl's factories and verl's classes read them: `cfg["name"]` or `cfg.name`, None without one."""

    def __missing__(self, name: str) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)


def find(
    spec: Any,
    kind: str = "pairs",
    tokenizer: Any = None,
    options: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Format:
    """The function `row -> Example` of a format, for data of one kind: prompts, completions, pairs, triples, labels or
    steps.

    `spec` is a known name, with the method before it or not (`chatml.intel`, `kto.chatml.argilla`), or your own
    `my_module:function`, `my_module.function` or `path/to/file.py:function`; either with options in brackets,
    `harmony(field='turns')`. A dictionary is the options of `user_defined.default`, unset where empty, as in axolotl.
    `options` are more options.

    A name that pairs and labels share means the kind's own; formats of pairs serve every kind. Other columns of the row
    stay, but of those with text (prompt, messages, chosen, ...) only what the format returns. A function whose first
    argument is called `cfg` or `config` is one of axolotl's factories: `fn(cfg)` gives the function of a row, or that
    and `{"remove_columns": [...]}`; cfg has the `settings` of the run, by axolotl's names, and the options.

    Raises ConfigError: an unknown name or option, listing those there are.
    """
    if isinstance(spec, Mapping):
        said = {option: value for option, value in spec.items() if value not in (None, "")}
        spec, options = "user_defined.default", {**said, **(options or {})}
    if isinstance(spec, str):
        name, in_brackets = split_options(spec)
        options = {**in_brackets, **(options or {})}
        ours = _known(name, kind)
        function = ours or _user_function(name, kind)
    else:
        name, function, options, ours = getattr(spec, "__name__", "the format"), spec, dict(options or {}), None
    removed: tuple[str, ...] = ()
    if next(iter(inspect.signature(function).parameters), None) in ("cfg", "config"):
        function, removed = _call_factory(function, name, {**(settings or {}), **options})
    else:
        _check_options(name, function, options)
        function = functools.partial(function, **options)
    accepted = inspect.signature(function).parameters
    filled = {"data_kind": kind, "tokenizer": tokenizer, "processing_class": tokenizer}
    arguments = {key: value for key, value in filled.items() if key in accepted and key not in options}

    def form(row: Mapping[str, Any]) -> Example:
        row = row if ours else _copied(row)  # a function of the user's may change it, and it is read again
        made = function(row, **arguments)
        if not isinstance(made, Mapping):
            raise ConfigError(
                f"the format {name} returned {type(made).__name__}; it must return a dictionary of columns"
            )
        # A row's own text would contradict what the format made of it; `__all__` is axolotl's word for every column.
        dropped = {*removed, *(TEXTS if any(key in made for key in TEXTS) else ())}
        if "__all__" in removed:
            dropped |= set(row)
        return dict(row) if made is row else {**{key: row[key] for key in row if key not in dropped}, **made}

    return as_prompt(form, kind) if kind == "prompts" else form


def _copied(value: Any) -> Any:
    """The value with dictionaries and lists of its own."""
    if isinstance(value, Mapping):
        return {key: _copied(held) for key, held in value.items()}
    return list(map(_copied, value)) if isinstance(value, list) else value


def as_prompt(form: Format, kind: str) -> Format:
    """The format of data of a kind, whose examples serve as prompts: one without a prompt is given one."""
    return lambda row: native.with_prompt(form(row), kind)


def known(kind: str) -> Mapping[str, Callable[..., Any]]:
    """The formats by name for one kind: the kind's own first, then those of pairs."""
    return {**COMMON, **PAIRS, **OWN.get(kind, {})}


def fitting(
    row: Mapping[str, Any], kind: str, tokenizer: Any = None, read: Callable[[Example], Any] = dict
) -> list[str]:
    """The names of the known formats that can read a row and give all answers of its kind, in an example that can be
    `read`; without those that read anything."""
    candidates = [name for name in COMMON if name not in ("auto", "passthrough")]
    candidates += PAIRS if kind in ("pairs", "triples") else OWN.get(kind, ())
    names = []
    for name in candidates:
        try:
            made = find(name, kind, tokenizer)(row)
            read(made)
        except ConfigError:
            continue
        if made.keys() >= set(ANSWERS.get(kind, ())):
            names.append(name)
    return names


def code_of(spec: Any, kind: str) -> bytes | None:
    """The contents of the file of a user's own format; empty for a known one, None where there is no file."""
    if isinstance(spec, Mapping):
        return b""
    if isinstance(spec, str):
        name = split_options(spec)[0]
        if _known(name, kind) is not None:
            return b""
        spec = _user_function(name, kind)
    try:
        file = inspect.getsourcefile(spec)
    except TypeError:
        return None
    return Path(file).read_bytes() if file and Path(file).is_file() else None


def _known(name: str, kind: str) -> Callable[..., Any] | None:
    method, _, rest = name.partition(".")
    if method in METHODS and rest in METHODS[method]:
        return METHODS[method][rest]
    return known(kind).get(name)


def _user_function(name: str, kind: str) -> Callable[..., Any]:
    """The user's function; a name with neither file nor importable module is a misspelt format."""
    names = known(kind)
    if ".py:" not in name and ":" not in name:
        family = name.partition(".")[0]
        if "." not in name or any(other.partition(".")[0] == family for other in (*names, *METHODS)):
            raise ConfigError(
                f"unknown data format {name!r} for {kind}; known are {', '.join(sorted(names))}; the closest is "
                f"{closest(name, names)}; your own is written my_module:function or path/to/file.py:function"
            )
    module, _, function = name.rpartition(".")
    file = Path(*module.split(".")).with_suffix(".py") if module and ":" not in name else None
    # As in axolotl, a file in the current folder need not be on the Python path.
    value: Any = resolve(f"{file}:{function}" if file is not None and file.is_file() else name, names)
    if not callable(value):
        raise ConfigError(f"data format {name!r} is {type(value).__name__}, but it must be a function row -> dict")
    return value


def _call_factory(
    factory: Callable[..., Any], name: str, options: Mapping[str, Any]
) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """(function of a row, columns to remove) that a factory makes; raises ConfigError when it makes something else."""
    with failing_as(name):
        made = factory(FactoryOptions(options))
    transform, map_options = made if isinstance(made, tuple) and len(made) == 2 else (made, {})
    if not callable(transform) or not isinstance(map_options, Mapping):
        raise ConfigError(
            f"{name} returned {type(made).__name__}; it must return a function of a row, or that and a dictionary such "
            "as {'remove_columns': [...]}"
        )
    unknown = [key for key in map_options if key not in MAP_OPTIONS]
    if unknown:
        raise ConfigError(f"{name} asks for {unknown[0]!r} of datasets.map; here it is one of {', '.join(MAP_OPTIONS)}")
    removed = map_options.get("remove_columns") or ()
    return transform, (removed,) if isinstance(removed, str) else tuple(removed)


def _check_options(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    accepted = [key for key in list(parameters)[1:] if key not in FILLED]
    unknown = [key for key in options if key not in accepted]
    if unknown:
        near = f"; the closest is {closest(unknown[0], accepted)}" if accepted else ""
        raise ConfigError(f"{name} has no option {unknown[0]!r}; it takes {', '.join(accepted) or 'none'}{near}")
