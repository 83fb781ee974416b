"""Data formats: each a function `row -> Example` found by name, from the columns people have to those training reads.

An Example is a dictionary with the columns of one of these sets, and whatever else rewards read:

| kind | columns |
|---|---|
| prompts | `prompt` |
| completions | `prompt` and `completion`, or `messages`, or `text` |
| pairs | `prompt` (or none: the common beginning), `chosen`, `rejected`, and maybe `margin` |
| labels | `prompt`, `completion`, `label`; or those of pairs, which become two rows |

A prompt or completion is text or a list of messages; `tools` and `chat_template_kwargs` go to the chat template.
`python -m jaxrl_llm.data.formats` writes the table of all formats.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.config.resolve import ConfigError, closest, resolve, split_options
from jaxrl_llm.data.formats import chat_templates, labels, native, pairs
from jaxrl_llm.data.formats.custom import is_factory, made_by
from jaxrl_llm.data.formats.native import CONTENT

Example = dict[str, Any]
Format = Callable[[Mapping[str, Any]], Example]

KINDS = ("prompts", "completions", "pairs", "labels")
COMMON: Mapping[str, Callable[..., Any]] = {
    "auto": native.auto,
    "passthrough": native.passthrough,
    "verl": native.verl,
    "harmony": native.harmony,
    "sharegpt": native.sharegpt,
    "stepwise": native.stepwise,
}
PAIRS: Mapping[str, Callable[..., Any]] = {**pairs.FORMATS, **chat_templates.FORMATS}
LABELS: Mapping[str, Callable[..., Any]] = labels.FORMATS
METHODS = {"dpo": PAIRS, "ipo": PAIRS, "simpo": PAIRS, "orpo": PAIRS, "kto": LABELS}
GIVEN = ("row", "kind", "tokenizer")  # arguments that are filled in, and no options


def find(
    spec: Any,
    kind: str = "pairs",
    tokenizer: Any = None,
    options: Mapping[str, Any] | None = None,
    purpose: str | None = None,
) -> Format:
    """The function `row -> Example` of a format, for data of one kind (see `KINDS`).

    `spec` is a known name, with the method before it or not (`chatml.intel`, `kto.chatml.argilla`), or your own
    `my_module:function`, `my_module.function` or `path/to/file.py:function`; either with options in brackets,
    `harmony(field='turns')`. A dictionary is the options of `user_defined.default`. `options` are more options.
    `purpose` is the kind that is made of the rows where it is another: prompts, to sample for rows of pairs.

    A name that pairs and labels share means the kind's own; formats of pairs serve every kind. Other columns of the row
    stay, but of those with text (prompt, messages, chosen, ...) only what the format returns.

    Raises ConfigError: an unknown name or option, listing those there are.
    """
    if isinstance(spec, Mapping):
        spec, options = "user_defined.default", {**spec, **(options or {})}
    name, written = split_options(spec) if isinstance(spec, str) else (getattr(spec, "__name__", "the format"), {})
    options = {**written, **(options or {})}
    function = _known(name, kind) if isinstance(spec, str) else spec
    if function is None:
        function = _own(name, kind)
    removed: tuple[str, ...] = ()
    if is_factory(function):
        function, removed = made_by(function, name, options)
    else:
        _check_options(name, function, options)
        function = functools.partial(function, **options)
    accepted = inspect.signature(function).parameters
    filled = {"kind": purpose or kind, "tokenizer": tokenizer, "processing_class": tokenizer}
    given = {key: value for key, value in filled.items() if key in accepted and key not in options}

    def form(row: Mapping[str, Any]) -> Example:
        return _merged(name, row, function(row, **given), removed)

    return form


def known(kind: str) -> Mapping[str, Callable[..., Any]]:
    """The formats by name for one kind: the kind's own first, then those of pairs."""
    return {**COMMON, **PAIRS, **(LABELS if kind == "labels" else {})}


def fitting(row: Mapping[str, Any], kind: str, tokenizer: Any = None) -> list[str]:
    """The known formats, written for one kind of data, that can read a row; those that read anything left out."""
    own = LABELS if kind == "labels" else PAIRS if kind == "pairs" else {}
    found = []
    for name in [*(name for name in COMMON if name not in ("auto", "passthrough")), *own]:
        try:
            find(name, kind, tokenizer)(row)
        except ConfigError:
            continue
        found.append(name)
    return found


def code_of(spec: Any, kind: str) -> bytes | None:
    """The file that holds a format of the user's own; empty for a known one, None where it cannot be found."""
    if isinstance(spec, Mapping):
        return b""
    if isinstance(spec, str):
        name = split_options(spec)[0]
        if _known(name, kind) is not None:
            return b""
        spec = _own(name, kind)
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


def _own(name: str, kind: str) -> Callable[..., Any]:
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
    # As in axolotl, a file in the current folder needs no place on the Python path.
    found: Any = resolve(f"{file}:{function}" if file is not None and file.is_file() else name, names)
    if not callable(found):
        raise ConfigError(f"data format {name!r} is {type(found).__name__}, but it must be a function row -> dict")
    return found


def _check_options(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    takes = [key for key in list(parameters)[1:] if key not in GIVEN]
    unknown = [key for key in options if key not in takes]
    if unknown:
        near = f"; the closest is {closest(unknown[0], takes)}" if takes else ""
        raise ConfigError(f"{name} has no option {unknown[0]!r}; it takes {', '.join(takes) or 'none'}{near}")


def _merged(name: str, row: Mapping[str, Any], made: Any, removed: tuple[str, ...]) -> Example:
    """The row with what the format made of it; its own text columns that the format did not return are left out."""
    if made is row:
        return dict(row)
    if not isinstance(made, Mapping):
        raise ConfigError(f"the format {name} returned {type(made).__name__}; it must return a dictionary of columns")
    dropped = {*removed, *(CONTENT if any(key in made for key in CONTENT) else ())}
    if "__all__" in removed:
        dropped |= set(row)
    return {**{key: value for key, value in row.items() if key not in dropped}, **made}
