"""A configuration in the making: our values with the keys they come from, what has no equivalent, what to look at."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.config import ConfigDict, assign, default, validate
from jaxrl_llm.config.resolve import ConfigError, closest
from jaxrl_llm.config.schema import KEYS
from jaxrl_llm.tools.migrate.table import Entry, find, names

OURS = {key.name: key for key in KEYS}
# Keys without an equivalent that change what is learned, unless they have this value.
MATTERS: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "trl.repetition_penalty": 1.0,
    "generation_kwargs": None,
    "trl.generation_kwargs": None,
    "vllm_guided_decoding_regex": None,
    "trl.vllm_guided_decoding_regex": None,
    "vllm_structured_outputs_regex": None,
    "optim_args": None,
    "use_dora": False,
    "lora_modules_to_save": None,
    "stop_token": "eos",
    "eval_packing": None,
    "actor_rollout_ref.rollout.do_sample": True,
    "actor_rollout_ref.rollout.ignore_eos": False,
    "algorithm.use_pf_ppo": False,
}


class Source(NamedTuple):
    """What a file says: the library, its trainer, and the keys that are set."""

    system: str  # trl, verl, axolotl or harmony
    trainer: str  # grpo, dpo, ...; empty where the keys tell
    given: dict[str, Any]
    path: str
    checks: tuple[str, ...] = ()  # what reading it could not make out


class Options(NamedTuple):
    """What the file does not say."""

    devices: int = 0  # processes that trained there; 0: as the file says, or 1
    rows: int = 0  # rows of the training data; 0: not known
    version: str = ""  # whose defaults; empty: the newest


class Draft:
    """Our settings as they are found. `get` reads a key of theirs, `set` writes one of ours."""

    def __init__(self, source: Source, defaults: Mapping[str, Any], table: Sequence[Entry], title: str):
        self.source, self.defaults, self.table, self.title = source, dict(defaults), table, title
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.used: set[str] = set()
        self.missing: list[str] = []
        self.checks: list[str] = list(source.checks)

    def get(self, key: str) -> Any:
        """The value of a key of theirs: the given one, or else its default there."""
        return self.source.given[key] if key in self.source.given else self.defaults.get(key)

    def given(self, key: str) -> bool:
        """True when the file sets the key."""
        return key in self.source.given

    def use(self, *theirs: str) -> None:
        """Says that these keys have had their effect."""
        self.used |= set(theirs)

    def set(self, ours: str, value: Any, *theirs: str) -> None:
        """Writes our key; `theirs` are the keys it comes from. None is our default."""
        self.use(*theirs)
        if value is None:
            return
        key = OURS[ours]
        value = tuple(value) if isinstance(value, list) else value
        if key.kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not key.accepts(value):
            raise ConfigError(f"{self.source.path}: {', '.join(theirs) or ours} gives {ours} = {value!r}, but it takes "
                              f"{key.allowed}")  # fmt: skip
        said = [name for name in theirs if self.given(name)]
        self.values[ours] = value
        unsaid = next((name for name in theirs if name in self.defaults), theirs[0] if theirs else "")
        self.origins[ours] = ", ".join(said) if said else f"{unsaid}, by default" if unsaid else ""

    def check(self, text: str) -> None:
        """Notes something that the user should look at."""
        if text not in self.checks:
            self.checks.append(text)

    def simple(self) -> None:
        """Writes every key whose entry alone says what it becomes."""
        for one in self.table:
            for key in one.keys:
                if one.convert is None:
                    continue
                value = self.get(key)
                self.set(one.ours.split()[0], None if value is None else one.convert(value), key)

    def finish(self) -> ConfigDict:
        """The configuration; keys without effect are collected. Raises ConfigError where it contradicts itself."""
        self.missing = []
        for key, value in self.source.given.items():
            if key in self.used:
                continue
            shown, one = f"{key} = {short(value)}", find(self.table, key)
            if one is None:
                near = closest(key, [name for name in names(self.table) if not name.endswith("*")])
                self.missing.append(f"{shown}: an unknown key; the closest is {near}")
                self.check(f"{key} is no known key; the closest is {near}")
            elif one.ours:
                self.missing.append(f"{shown}: without effect there, as the other keys are")
            else:
                self.missing.append(f"{shown}: {one.note}")
                if key in MATTERS and value != MATTERS[key]:
                    self.check(f"{shown} has no equivalent: {one.note}")
        config = default()
        for key, value in self.values.items():
            assign(config, key, value)
        try:
            validate(config)
        except ConfigError as error:
            raise ConfigError(f"{self.source.path}: what it says does not go together here: {error}") from error
        return config

    def text(self) -> str:
        """The config file. Keys that the source leaves at its default are in it where ours is another."""
        self.finish()
        lines = ['"""' + escaped(self.title), ""]
        lines += ["    python -m jaxrl_llm.train --config=THIS_FILE"]
        if self.checks:
            lines += ["", "Look at this first:", ""]
            for check in self.checks:
                lines += textwrap.wrap(escaped(check), 118, initial_indent="- ", subsequent_indent="  ")
        lines += ['"""', "", "from jaxrl_llm.config import default", "", "", 'def get_config(arg: str = ""):']
        lines += ["    config = default()"]
        for key in KEYS:
            if key.name in self.values and self._is_worth_writing(key.name):
                lines += _assignment(key.name, self.values[key.name], self.origins[key.name])
        if self.missing:
            lines += ["", "    # Nothing here does what these did:"]
            for text in self.missing:
                lines += textwrap.wrap(
                    " ".join(text.split()), 120, initial_indent="    # - ", subsequent_indent="    #   "
                )
        return "\n".join([*lines, "    return config", ""])

    def _is_worth_writing(self, name: str) -> bool:
        said = bool(self.origins[name]) and not self.origins[name].endswith("by default")
        return said or self.values[name] != OURS[name].default


def escaped(text: str) -> str:
    """The text as it may stand in a docstring."""
    return " ".join(text.split()).replace("\\", "\\\\").replace('"""', "'''")


def short(value: Any) -> str:
    """A value on one line, cut where it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def _assignment(name: str, value: Any, origin: str) -> list[str]:
    """The line that sets a key, with its origin beside it or, where there is no room, above it."""
    line, comment = f"    config.{name} = {written(value)}", f"# {origin}"
    if len(line) > 120 and isinstance(value, tuple):
        parts = [line for part in value for line in _item(part)]
        return [f"    {comment}", f"    config.{name} = (", *parts, "    )"]
    if not origin:
        return [line]
    if len(line) + len(comment) + 2 <= 120:
        return [f"{line}  {comment}"]
    return [*textwrap.wrap(origin, 118, initial_indent="    # ", subsequent_indent="    # "), line]


def _item(part: Any) -> list[str]:
    """The lines of one item of a long tuple."""
    line = f"        {written(part)},"
    if len(line) <= 120 or not isinstance(part, dict):
        return [line]
    inner = [f"            {written(key)}: {written(value)}," for key, value in part.items()]
    return ["        {", *inner, "        },"]


def written(value: Any) -> str:
    """A value as Python writes it, texts in double quotes."""
    if isinstance(value, str):
        quoted = repr(value)
        return f'"{quoted[1:-1]}"' if quoted[0] == "'" and '"' not in quoted and "\\'" not in quoted else quoted
    if isinstance(value, tuple | list):
        inner = ", ".join(written(one) for one in value)
        return f"({inner},)" if len(value) == 1 and isinstance(value, tuple) else (
            f"({inner})" if isinstance(value, tuple) else f"[{inner}]")  # fmt: skip
    if isinstance(value, dict):
        return "{" + ", ".join(f"{written(key)}: {written(one)}" for key, one in value.items()) + "}"
    return repr(value)
