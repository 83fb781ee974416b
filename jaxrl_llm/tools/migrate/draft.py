"""A configuration in the making: our values with the keys they come from, what has no equivalent, what to look at."""

import re
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.config import ConfigDict, assign, default, validate
from jaxrl_llm.config.resolve import ConfigError, closest, split_options
from jaxrl_llm.config.schema import KEYS, SCHEDULE_FREE
from jaxrl_llm.config.secrets import HIDDEN
from jaxrl_llm.rewards.built_in import BUILT_IN
from jaxrl_llm.tools.migrate.shell import COMMAND
from jaxrl_llm.tools.migrate.table import CONVERT, find, known, names, rules, table

OURS = {key.name: key for key in KEYS}
SECRET = re.compile(r"((^|\.|hub_|auth_|access_|api_)token|api_key|password|secret|wandb\.key|use_wandb)$")
OPEN = re.compile(rf"\$\{{[^{{}}]*\}}|{COMMAND}|\$[\w@]+")  # what a shell or a YAML would fill in
IN_FEW_BITS = (
    "matrices that the model's folder has in few bits are read as numbers, in model.param_dtype: set model.quantize to "
    "hold them in few bits (docs/models.md says which keep every number)"
)


class RefusedError(ConfigError):
    """A file that no key is to blame for: it does not train, or what the user says of it is wrong."""


class Source(NamedTuple):
    """The content of a file: its library, its trainer, and the keys that it sets."""

    library: str  # a key of LIBRARIES
    trainer: str  # grpo, dpo, ...; empty where the keys tell
    settings: dict[str, Any]
    path: str
    checks: tuple[str, ...] = ()  # what could not be read
    functions: str = ""  # the source of functions that the file defines
    companion: str = "functions.py"  # the file that they are written to

    def without(self, key: str) -> "Source":
        """Return the source without a key."""
        return self._replace(settings={name: value for name, value in self.settings.items() if name != key})


class Options(NamedTuple):
    """The facts that no file states."""

    devices: int = 0  # processes that trained there; 0: as the file says, or 1
    rows: int = 0  # rows of the training data; 0: unknown
    version: str = ""  # whose defaults; empty: the newest


def renamed(settings: Mapping[str, Any], name_of: Callable[[str], str]) -> dict[str, tuple[str, Any]]:
    """Return key of the rules -> (key in the file, value), as `Draft` takes them; of two of one name the later counts.

    Values that only a shell fills in are left out: they are as by default.
    """
    return {name_of(key): (key, value) for key, value in settings.items() if not OPEN.search(str(value))}


class Draft:
    """Our settings while rules collect them: `get` reads a key of theirs, `set` writes one of ours.

    `defaults` are theirs. `translated` serves a library whose keys are read under the names of another: key of the
    rules -> (key in the file, value).
    """

    def __init__(
        self,
        source: Source,
        title: str,
        defaults: Mapping[str, Any],
        translated: Mapping[str, tuple[str, Any]] | None = None,
    ):
        self.source, self.defaults = source, dict(defaults)
        self.title = title.replace("FILE", Path(source.path).name)
        self.settings = (
            source.settings if translated is None else {key: value for key, (_, value) in translated.items()}
        )
        self.names = {key: name for key, (name, _) in (translated or {}).items()}
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.used: set[str] = set()
        self.checks: list[str] = list(source.checks)
        self.functions: list[str] = []  # the source of functions that the rules make
        for key, value in source.settings.items():
            entry = find(known(source.library), key)
            if (opened := OPEN.findall(str(value))) and (entry is None or entry.ours):
                self.check(f"{shown(key, value)}: the file does not say what {', '.join(opened)} is; write its value")

    def get(self, key: str) -> Any:
        """Return the value of a key of theirs, as set in the file or else its default there."""
        return self.settings[key] if key in self.settings else self.defaults.get(key)

    def first(self, *keys: str, default: Any = None) -> Any:
        """Return the value of the first of their keys that is not None, or `default`."""
        return next((value for key in keys if (value := self.get(key)) is not None), default)

    def named(self, key: str) -> str:
        """Return the name that a key of the rules has in the file."""
        return self.names.get(key, key)

    def sets(self, key: str) -> bool:
        """Return True when the file sets the key."""
        return key in self.settings

    def use(self, *theirs: str) -> None:
        """Record that these keys have had their effect."""
        self.used |= {self.names.get(key, key) for key in theirs}

    def set(self, ours: str, value: Any, *theirs: str) -> None:
        """Set our key, from the keys `theirs`; None leaves our default. Raises ConfigError for a value it refuses."""
        self.use(*theirs)
        if value is not None:
            self._put(ours, value, theirs)

    def take(self, ours: str, *theirs: str, default: Any = None) -> None:
        """Set our key to the first value of the keys `theirs`, or else `default`, as the type of ours.

        Raises TypeError where there is none, and ValueError for a text that is no number where ours is one.
        """
        self.set(ours, OURS[ours].kind(self.first(*theirs, default=default)), *theirs)

    def set_none(self, ours: str, *theirs: str) -> None:
        """Set our key to none, from the keys `theirs`. Raises ConfigError for a key that is never none."""
        self._put(ours, None, theirs)

    def _put(self, ours: str, value: Any, theirs: tuple[str, ...]) -> None:
        key = OURS[ours]
        value = tuple(value) if isinstance(value, list) else value
        if key.kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not key.accepts(value):
            raise ConfigError(
                f"{self.source.path}: {', '.join(theirs) or ours} gives {ours} = {value!r}, but it takes {key.allowed}"
            )
        self.values[ours] = value
        in_file = [self.names.get(key, key) for key in theirs if key in self.settings or key in self.source.settings]
        unset = next((name for name in theirs if name in self.defaults), theirs[0] if theirs else "")
        self.used |= set(in_file)
        self.origins[ours] = ", ".join(dict.fromkeys(in_file)) or (f"{self.named(unset)}, by default" if unset else "")

    def drop(self, *ours: str) -> None:
        """Take back keys of ours: they have no effect here."""
        for key in ours:
            self.values.pop(key, None)

    def check(self, text: str) -> None:
        """Note something that the user should look at."""
        if text not in self.checks:
            self.checks.append(text)

    def set_direct(self, library: str) -> None:
        """Set every key of ours whose value is that of one key of `library`."""
        for entry in table(library):
            for key in entry.keys if entry.direct else ():
                value = self.get(key)
                self.set(entry.ours.split()[0], value if value is None else CONVERT.get(key, lambda x: x)(value), key)

    def function(self, name: str, text: str, **filled: Any) -> str:
        """Write a function, with the words `filled` in its text replaced, and return its name for a setting."""
        words = "|".join(sorted(filled, key=len, reverse=True))
        self.functions.append(re.sub(words, lambda word: str(filled[word[0]]), text) if filled else text)
        return f"{self.source.companion}:{name}"

    def finish(self) -> tuple[ConfigDict, str]:
        """Return the configuration and the text of its file; raises ConfigError where the keys contradict each other.

        Keys that the source leaves at its default are in the file where ours is another.
        """
        self._doubts()
        missing = self._missing()
        config = default()
        for key, value in self.values.items():
            assign(config, key, value)
        try:
            validate(config)
        except ConfigError as error:
            raise ConfigError(f"{self.source.path}: what it says does not go together here: {error}") from error
        lines = [f'"""{_escaped(self.title)}', "", "    python -m jaxrl_llm.train --config=THIS_FILE"]
        if self.checks:
            lines += ["", "Look at this first:", ""]
            for check in self.checks:
                lines += textwrap.wrap(_escaped(check), 118, initial_indent="- ", subsequent_indent="  ")
        lines += ['"""', "", "from jaxrl_llm.config import default", "", "", 'def get_config(arg: str = ""):']
        lines += ["    config = default()"]
        for name in self._written():
            lines += _assignment(name, self.values[name], self.origins[name])
        if missing:
            lines += ["", "    # Keys without a setting of their own:"]
            for text in missing:
                text = " ".join(text.split())
                lines += textwrap.wrap(text, 120, initial_indent="    # - ", subsequent_indent="    #   ")
        return config, "\n".join([*lines, "    return config", ""])

    def _written(self) -> list[str]:
        """Return the keys of ours that stand in the file: those it sets there, and defaults there that differ here."""
        stated = [name for name, origin in self.origins.items() if origin and not origin.endswith("by default")]
        return [
            name
            for name, key in OURS.items()
            if name in self.values and (name in stated or self.values[name] != key.default)
        ]

    def _doubts(self) -> None:
        """Note what may keep the run from starting: the model's architecture, adapters, names of rewards."""
        known, model = rules("warnings"), str(self.values.get("model.path", ""))
        kinds = {kind: re.search(known[kind], model, re.IGNORECASE) for kind in ("known", "vision", "other")}
        if re.search(known["images"], model, re.IGNORECASE):
            if "model.vision" not in self.values:
                self.check(
                    f"{model} reads images: its encoder and projector are frozen unless model.vision is trained (or "
                    "lora)"
                )
        elif kinds["vision"]:
            self.check(
                f"{model} speaks of images or sound: of models that read images, docs/vision.md names those here"
            )
        if model and (Path(model).expanduser() / "config.json").is_file():
            from jaxrl_llm.models.families import family_of  # here, as others need no networks
            from jaxrl_llm.models.files.hf import read_config

            try:
                family_of(read_config(Path(model).expanduser()))
            except ConfigError as error:
                self.check(f"model.path is {model}: {error}")
        elif kinds["other"] or not (kinds["known"] or kinds["vision"] or model in ("", "MODEL")):
            self.check(
                f"model.path is {model}: see that docs/models.md has its architecture (model_type in config.json)"
            )
        experts, key = has_experts(model), "model.router_aux_loss_coef"
        told = key in self.values or "output_router_logits=True" in str(self.values.get("model.overrides"))
        if experts and not told and self.source.library != "harmony":  # that of config.json by default here
            self.values[key], self.origins[key] = 0.0, "no load-balancing loss, by default"
        if self.values.get("model.quantize") and experts:
            if self.values.get("model.quantize_experts") == "none":
                self.check(
                    f"model.quantize_experts is none: the matrices of experts, most of {model}, stay as they are: see "
                    "with python -m jaxrl_llm plan that the devices hold them"
                )
            elif "model.quantize_experts" not in self.values:
                self.check(
                    f"model.quantize stores the matrices of experts in fewer bits too, most of {model}; bitsandbytes "
                    "leaves them as they are, as model.quantize_experts = 'none' does"
                )
        targets = self.values.get("lora.targets", ())
        if self.values.get("lora.rank") and (odd := [name for name in targets if name not in known["adapters"]]):
            names = tuple(name for name in targets if name in known["adapters"]) or ("all-linear",)
            self.check(
                f"lora.targets: {', '.join(odd)[:200]} are no modules with adapters here; {', '.join(names)} is written"
            )
            self.values["lora.targets"] = names
        adapted = self.values.get("lora.rank") or self.values.get("lora.path")
        narrow = self.values.get("model.param_dtype", "float32") != "float32"
        if self.values.get("optimizer.name") == SCHEDULE_FREE and narrow and not adapted:
            self.check(f"{SCHEDULE_FREE}: its average is not kept in 16 bits; model.param_dtype is float32")
            self.values["model.param_dtype"] = "float32"
        for name in self.values.get("rewards.functions", ()):
            if not re.search(r"[:.]", name) and name != "REWARD" and split_options(name)[0] not in BUILT_IN:
                self.check(
                    f"rewards.functions: there is no reward {name} here; name one of docs/rewards.md or your own"
                )

    def _missing(self) -> list[str]:
        """Return a line for each key of the file that is in no setting; those that matter are noted."""
        entries, missing = known(self.source.library), []
        written = {key for name in self._written() for key in self.origins[name].split(", ")}
        for key, value in self.source.settings.items():
            if key in written:
                continue
            line, entry = shown(key, value), find(entries, key)
            if entry is None:
                near = closest(key, (name for name in names(entries) if name[-1] != "*"))
                missing.append(f"{line}: an unknown key; the closest is {near}")
                self.check(f"{key} is no known key; the closest is {near}")
                continue
            ours = ", ".join(entry.ours.split())
            part = "part of" if key in self.used else "has no part in"
            missing.append(f"{line}: {'; '.join(filter(None, (entry.ours and f'{part} {ours}', entry.note)))}")
            matters = rules("warnings")["matters"]
            if not entry.ours and key in matters and value not in (None, matters[key]):
                self.check(f"{line} has no equivalent: {entry.note}")
        return missing


def has_experts(model: str) -> bool:
    """Return True for a mixture of experts, by the config.json of its folder, or else by its name."""
    file = Path(model).expanduser() / "config.json"
    if file.is_file():
        return bool(
            re.search(r'"(num_experts|num_local_experts|n_routed_experts|moe_num_experts)": *[1-9]', file.read_text())
        )
    return bool(re.search(rules("warnings")["experts"], Path(model).name, re.IGNORECASE))


def shown(key: str, value: Any) -> str:
    """Return `KEY = VALUE` on one line, shortened where it is long; `***` for a secret."""
    return f"{key} = {HIDDEN if _secret(key, value) else short(value)}"


def short(value: Any) -> str:
    """Return a value on one line, shortened where it is long."""
    text = " ".join(repr(_without_secrets(value)).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def _secret(key: Any, value: Any) -> bool:
    """Return True for the value of a key that is named like a secret."""
    return isinstance(value, str) and bool(SECRET.search(str(key)))


def _without_secrets(value: Any) -> Any:
    """Return a value with `***` for the secrets in its dictionaries."""
    if isinstance(value, dict):
        return {key: HIDDEN if _secret(key, each) else _without_secrets(each) for key, each in value.items()}
    return [_without_secrets(each) for each in value] if isinstance(value, list) else value


def _escaped(text: str) -> str:
    """Return the text as it may stand in a docstring."""
    return " ".join(text.split()).replace("\\", "\\\\").replace('"""', "'''")


def _assignment(name: str, value: Any, origin: str) -> list[str]:
    """Return the line that sets a key, with its origin beside it or, where there is no room, above it."""
    line, comment = f"    config.{name} = {_literal(value)}", f"# {origin}"
    if len(line) > 120 and isinstance(value, tuple):
        items = []
        for item in value:
            written = f"        {_literal(item)},"
            if len(written) > 120 and isinstance(item, dict):
                pairs = [f"            {_literal(key)}: {_literal(value)}," for key, value in item.items()]
                items += ["        {", *pairs, "        },"]
            else:
                items.append(written)
        return [*([f"    {comment}"] if origin else ()), f"    config.{name} = (", *items, "    )"]
    if not origin:
        return [line]
    if len(line) + len(comment) + 2 <= 120:
        return [f"{line}  {comment}"]
    return [*textwrap.wrap(origin, 118, initial_indent="    # ", subsequent_indent="    # "), line]


def _literal(value: Any) -> str:
    """Return a value as Python source, strings in double quotes."""
    if isinstance(value, str):
        quoted = repr(value)
        return f'"{quoted[1:-1]}"' if quoted[0] == "'" and '"' not in quoted and "\\'" not in quoted else quoted
    if isinstance(value, tuple | list):
        inner = ", ".join(map(_literal, value))
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    return repr(value)
