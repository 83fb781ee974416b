"""The configuration tree: making it from the table of settings, checking it, and writing it as JSON and as a page."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ml_collections.config_dict import placeholder

from jaxrl_llm.config.checks.contradictions import contradictions_at_a_look
from jaxrl_llm.config.corrections import with_correction
from jaxrl_llm.config.resolve import ConfigError, split_losses, split_options
from jaxrl_llm.config.schema import (
    BY_NAME,
    KEYS,
    LOSS_OPTIONS,
    OFFLINE,
    ONLINE_PREFERENCE,
    RENAMED,
    SECTIONS,
    ConfigDict,
    unknown_key,
)  # fmt: skip
from jaxrl_llm.config.secrets import masked
from jaxrl_llm.config.setting import Setting

OWN = "own"  # the entry of the JSON text with the parameters that a config file has added
# Advice where an object was given to a key that takes a name.
OBJECTS = {
    "model.path": ", a folder or a hub id; a model in memory is given to train(config, model=...)",
    "model.tokenizer": ", a folder or a hub id; a tokenizer in memory is given to train(config, tokenizer=...)",
    "data.path": "; rows in memory are given to train(config, train_dataset=...)",
    "data.eval_path": "; rows in memory are given to train(config, eval_dataset=...)",
    "data.format": ", path/to/file.py:function or my_module:function; what a function in memory makes of rows is given "
    "to train(config, train_dataset=[function(row) for row in rows])",
    "algorithm.loss": "; a mixture is one text, dpo+sft, with its weights in algorithm.loss_weights",
    "rewards.functions": "; functions are given to train(config, rewards=[...])",
    "optimizer.name": "; an optimizer of optax is given to train(config, optimizers=...)",
    "environment.name": "; an environment is given to train(config, environment=...)",
    "environment.agent": ", path/to/file.py:run or my_module:run",
}


class SettingError(ConfigError):
    """A name that is no key, or a value that a key does not take: its type is another one."""


class MissingKeyError(SettingError, AttributeError):
    """A name that is no key, read as an attribute: `hasattr` and `getattr` with a default take it for what it is."""


class Tree(ConfigDict):
    """The configuration, or a section of it. Scalars of numpy and JAX are taken for the numbers that they are.

    Raises SettingError, which names the key, for a name that is none and for a value of another type.
    """

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):  # of Python, which looks for its own
                raise
            raise MissingKeyError(self._unknown(name)) from None

    def __setitem__(self, key, value):
        if self.is_locked and key not in self:  # ml_collections would print the whole tree
            raise SettingError(self._unknown(key))
        value = plain(value)
        try:
            super().__setitem__(key, value)
        except TypeError as error:
            named = (known for known in KEYS if known.name.rpartition(".")[2] == key)
            setting = next((known for known in named if self._is(known.name.rpartition(".")[0])), None)
            if setting is None:
                raise
            if setting.words and setting.accepts(value):  # a word in place of a number, or a number again
                with self.ignore_type():
                    return super().__setitem__(key, value if value in setting.words else setting.kind(value))
            shown = f"{value!r}" if isinstance(value, str | int | float | list | tuple) else type(value).__name__
            way_out = OBJECTS.get(setting.name, "")
            raise SettingError(f"{setting.name} is {shown}, but it takes {setting.allowed}{way_out}") from error

    def __getitem__(self, key):
        """The value of a key or section; of a key of an earlier version, what stands for it now (`FORMER`).

        So code that reads a configuration outlives a new name; such a key is written under its new name alone.
        """
        try:
            return super().__getitem__(key)
        except KeyError:
            for former, name in RENAMED.items():
                if former.rpartition(".")[2] == key and name.rpartition(".")[2] in self:
                    return super().__getitem__(name.rpartition(".")[2])
            if (option := LOSS_OPTIONS.get(f"algorithm.{key}")) and "loss" in self and "aggregation" in self:
                default, name, takers = option
                written = (split_options(loss) for loss in split_losses(self["loss"]))
                return next((given[name] for loss, given in written if loss in takers and name in given), default)
            raise

    def _unknown(self, name: str) -> str:
        """The message for a name that is neither a key of this section nor, at the top, a section."""
        section = next((f"{known}." for known in SECTIONS if known and self._is(known)), "")
        if not section and (similar := difflib.get_close_matches(name, [known for known in SECTIONS if known], 1)):
            return f"there is no section {name}; the closest is {similar[0]}"
        return unknown_key(section + name)

    def _is(self, section: str) -> bool:
        """True where all keys of the section are in this one; several sections have keys of the same names."""
        return all(name.rpartition(".")[2] in self for name in BY_NAME if name.rpartition(".")[0] == section)


def plain(value: Any) -> Any:
    """The value with scalars of numpy and JAX, also those in a list, as Python's own."""
    if isinstance(value, tuple | list):
        return type(value)(map(plain, value)) if type(value) in (tuple, list) else value
    if isinstance(value, ConfigDict):  # which would look for the key closest to `shape`
        return value
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return value


def check_form(arg: str, *forms: str) -> None:
    """Raises ConfigError unless `arg`, behind the colon of `--config=NAME:ARG`, is empty or one of `forms`.

    For `get_config(arg)` of a configuration, which would otherwise be the whole experiment under a misspelt name.
    """
    if arg not in ("", *forms):
        known = f"it has {', '.join(forms)}" if forms else "it has none"
        raise ConfigError(f"the configuration has no form {arg!r}; {known}: write --config=NAME, or --config=NAME:FORM")


def default() -> ConfigDict:
    """The default configuration, a locked ConfigDict: `config.batch.prompts = 8` changes a key, and none can be added.

    docs/configuration.md has all keys, as does `python -m jaxrl_llm.train --help=all`. An unknown key, or a value of
    another type, raises ConfigError with the closest key, or with what the key takes.
    """
    tree: dict[str, Any] = {}
    for key in KEYS:
        section, _, leaf = key.name.rpartition(".")
        node = tree.setdefault(section, {}) if section else tree
        node[leaf] = placeholder(key.kind) if key.default is None else key.default
    config = Tree({name: Tree(node) if isinstance(node, dict) else node for name, node in tree.items()})
    config.lock()
    return config


def validate(config: ConfigDict) -> None:
    """Raises ConfigError for the first unknown or missing key, wrong value, or contradiction between keys.

    It runs no code of the user's: what a loss or advantage of their own decides is checked when a run is built.
    """
    check_keys(config)
    for message in contradictions_at_a_look(with_correction(config)):
        raise ConfigError(message)


def own_settings(config: ConfigDict) -> dict[str, Setting]:
    """The parameters that a config file has added, by name: at the top, or in a section of its own.

    Raises ConfigError for a value that no flag could have: anything but texts, numbers, true or false, and lists of
    them.
    """
    known, own = {*SECTIONS, *(name.partition(".")[0] for name in BY_NAME)}, {}
    for name, value in _settings(config).items():
        if name.partition(".")[0] in known or name in (*RENAMED, *LOSS_OPTIONS):
            continue
        kind = type((*value, "")[0]) if isinstance(value, tuple | list) else str if value is None else type(value)
        if kind not in (bool, int, float, str):
            raise ConfigError(
                f"the parameter {name} of the config file is {value!r:.80}, but it takes a text, a number, true or "
                "false, or a list of these"
            )
        own[name] = Setting(name, tuple(value) if isinstance(value, list) else value, "Of the config file.", kind)
    return own


def check_keys(config: ConfigDict) -> None:
    """Raises ConfigError for the first unknown or missing key, or value that its key does not accept."""
    values, own = _settings(config), own_settings(config)
    for name in values:
        if name not in BY_NAME and name not in own:
            raise ConfigError(unknown_key(name))
    for key in KEYS:
        if key.name not in values:
            raise ConfigError(f"the key {key.name} is missing; start from jaxrl_llm.config.default()")
        key.check(values[key.name])


def to_json(config: ConfigDict) -> str:
    """The configuration as JSON text, one key per line, without the secrets of addresses; `from_json` reads it."""
    tree, own = config.to_dict(), own_settings(config)
    if own:
        tree = {name: value for name, value in tree.items() if name in SECTIONS or name in BY_NAME}
        tree[OWN] = {name: flat(config)[name] for name in own}
    return json.dumps(masked(tree), indent=2, allow_nan=False) + "\n"


def from_json(text: str) -> ConfigDict:
    """The configuration that `to_json` wrote; keys that the text lacks have their default.

    The text of an earlier version is read too: a renamed key under its new name, and a key that is an option of a loss
    now as that option, where the loss of the run takes it; before `model.quantize_experts`, experts were not quantised.
    Raises ConfigError for text that is no JSON object, an unknown key or a wrong value.
    """
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"the configuration is not JSON: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"the configuration must be a JSON object, but is a {type(tree).__name__}")
    config = default()
    with config.unlocked():
        for name, value in tree.pop(OWN, {}).items():
            _place(config, name, tuple(value) if isinstance(value, list) else value)
    options: dict[str, Any] = {}
    for name, value in (values := _settings(tree)).items():
        if name in LOSS_OPTIONS:
            options[name] = value
        else:
            assign(config, RENAMED.get(name, name), value)
    if config.model.quantize != "none" and "model.quantize_experts" not in values:
        config.model.quantize_experts = "none"
    algorithm = config.algorithm
    if options and algorithm.name in OFFLINE and algorithm.loss == "ppo_clip":
        algorithm.loss = "auto"  # ppo_clip was the default of every algorithm, where it meant nothing for these
    auto = {"reward_model": "bradley_terry", "preference": "dpo", ONLINE_PREFERENCE: "dpo"}.get(
        algorithm.name, "ppo_clip"
    )
    losses = split_losses(auto if algorithm.loss == "auto" else algorithm.loss)
    for i, written in enumerate(losses):
        loss, given = split_options(written)
        for name, value in options.items():
            former_default, option, takers = LOSS_OPTIONS[name]
            if loss in takers and value != former_default:
                given.setdefault(option, value)
        losses[i] = f"{loss}({', '.join(f'{x}={given[x]!r}' for x in given)})" if given else loss
    if "+".join(losses) != auto:
        algorithm.loss = "+".join(losses)
    validate(config)
    return config


def flat(tree: Mapping[str, Any] | ConfigDict, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dictionaries by full name, `{"optimizer.learning_rate": 1e-6}`; an empty one is a leaf."""
    leaves: dict[str, Any] = {}
    for name in tree:
        value = tree[name]
        if isinstance(value, Mapping | ConfigDict) and len(value):
            leaves |= flat(value, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def _settings(tree: Mapping[str, Any] | ConfigDict) -> dict[str, Any]:
    """The leaves of the tree, without sections that are empty."""
    return {name: x for name, x in flat(tree).items() if not isinstance(x, Mapping | ConfigDict)}


def assign(config: ConfigDict, name: str, value: Any) -> None:
    """Sets the key with the full name `name`; raises ConfigError for an unknown key or a value it does not take."""
    if name not in BY_NAME:
        raise ConfigError(unknown_key(name))
    value = plain(value)
    BY_NAME[name].check(value)
    _place(config, name, value)


def _place(config: ConfigDict, name: str, value: Any) -> None:
    """Sets the leaf of that full name; where the configuration is unlocked its sections are made."""
    *sections, leaf = name.split(".")
    for section in sections:
        if section not in config:
            config[section] = Tree()
        config = config[section]
    config[leaf] = value


def spec_of(kind: Any, section: ConfigDict, /, base: Any = None, **others: Any) -> Any:
    """The dataclass `kind` of which fields are settings of `section` by the same name, but for those in `others`.

    Settings that are none, and fields that are no settings, are those of `base`, if there is one.
    """
    own = {field.name: section[field.name] for field in fields(kind) if field.name in section}
    if base is not None:
        own = vars(base) | {name: value for name, value in own.items() if value is not None}
    return kind(**own | others)


def reference() -> str:
    """The text of docs/configuration.md: one table per section, every key with default, allowed values and meaning."""
    page = [
        "# Configuration\n\n"
        "Every key, its default and what it takes. A config file (see `configs/`) starts from "
        "`jaxrl_llm.config.default()` and changes some; the command line changes more: "
        "`--config.rollout.temperature=0.8`. Values are shown as a command line takes them: a list with commas, "
        "nothing for an empty one, `none` for None. This page is written by `python -m jaxrl_llm.config`.\n"
    ]
    for section, meaning in SECTIONS.items():
        page.append(f"\n## {section or 'Top level'}\n\n{meaning}\n\n")
        page.append("| key | default | allowed | meaning |\n|---|---|---|---|\n")
        for key in KEYS:
            if key.name.rpartition(".")[0] == section:
                cells = (f"`{key.name}`", f"`{key.show(key.default)}`", key.allowed, key.doc)
                page.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return "".join(page)
