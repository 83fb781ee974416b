"""`Setting`: the type, the range and the meaning of one setting, and its values as texts of a command line."""

import difflib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.config.resolve import ConfigError

ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\"}  # by the letter behind a backslash, as in JSON
SHOWN = {letter: f"\\{name}" for name, letter in ESCAPES.items()}
LARGEST = 1e15  # of numbers that enter float32 computations, where larger ones overflow


@dataclass(frozen=True)
class Setting:
    """One setting. A tuple default makes it a list of `kind`; a None default, or `none`, lets it be none."""

    name: str
    default: Any
    doc: str
    kind: type = str
    choices: tuple[str, ...] | None = None
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None  # exclusive
    below: float | None = None  # exclusive
    besides: float | None = None  # a number that it takes though it is out of the range
    words: tuple[str, ...] = ()  # that stand for a number
    none: bool = False  # it may be none, which is not its default
    escapes: bool = False  # a text that a command line gives with those of ESCAPES, which a shell does not read
    hint: str = ""  # for who gives a value that is no choice

    @property
    def optional(self) -> bool:
        """True for a setting that may be none."""
        return self.none or self.default is None

    @property
    def many(self) -> bool:
        """True for a setting whose value is a list."""
        return isinstance(self.default, tuple)

    @property
    def allowed(self) -> str:
        """The values that the setting takes, in words."""
        if self.choices:
            text = "one of " + ", ".join(self.choices)
        else:
            text = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}.get(
                self.kind, "a path or a dictionary"
            )
        bounds = ((">", self.above), (">=", self.minimum), ("<", self.below), ("<=", self.maximum))
        text += " and".join(f" {sign} {bound:g}" for sign, bound in bounds if bound is not None)
        others = self.words if self.besides is None else (f"{self.besides:g}", *self.words)
        text += "".join(f", or {other}" for other in others)
        if self.many:
            text = f"a list, each {text}"
        return f"{text}, or none" if self.optional else text

    def show(self, value: Any) -> str:
        """The value as it is written on the command line."""
        if isinstance(value, tuple | list):
            text = ",".join(map(self.show, value))
            plainly = not value or self._items(text) == tuple(value)
            return text if plainly else json.dumps(list(value), ensure_ascii=False)
        if self.escapes and isinstance(value, str):
            return re.sub(r"[\n\r\t\\]", lambda found: SHOWN[found[0]], value)
        return str(value).lower() if value is None or isinstance(value, bool) else str(value)

    def accepts(self, value: Any) -> bool:
        """True when the value has the setting's type and lies in its range."""
        if self.many:
            return isinstance(value, tuple | list) and all(self._accepts_one(item) for item in value)
        return (value is None and self.optional) or self._accepts_one(value)

    def _accepts_one(self, value: Any) -> bool:
        if value in self.words:
            return True
        kinds = {float: (int, float), dict: (str, Mapping)}.get(self.kind, self.kind)
        if not isinstance(value, kinds) or (isinstance(value, bool) and self.kind is not bool):
            return False
        if self.choices and value not in self.choices:
            return False
        if self.kind not in (int, float):
            return True
        return value == self.besides or (
            abs(value) <= (LARGEST if self.kind is float else sys.maxsize)  # False for nan
            and (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def parse(self, text: str) -> Any:
        """The value of a command line text; raises ConfigError when the setting does not take it."""
        if self.many:
            value = self._items(text)
        else:
            value = None if self.optional and text.lower() == "none" else self._parse_one(text)
        self.check(value)
        return value

    def _items(self, text: str) -> tuple[Any, ...]:
        """The items of a list: `a,b` or, where they have commas, a list in JSON, `[",", "b"]`; none of `` and `()`."""
        if text in ("", "()"):
            return ()
        if text.startswith("["):
            try:
                items = json.loads(text)
            except json.JSONDecodeError:
                items = None
            if isinstance(items, list) and all(map(self._accepts_one, items)):
                return tuple(items)
        return tuple(self._parse_one(item) for item in _split_list(text))

    def _parse_one(self, text: str) -> Any:
        if self.kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
        if self.kind is dict:
            return text
        if self.escapes:
            return re.sub(r"\\([nrt\\])", lambda found: ESCAPES[found[1]], text)
        try:
            return self.kind(text)
        except ValueError:
            return text

    def check(self, value: Any) -> None:
        """Raises ConfigError with the setting's name, the value and the allowed values unless it accepts the value."""
        if not self.accepts(value):
            raise ConfigError(f"{self.name} is {value!r}, but it takes {self.allowed}{self._instead(value)}")

    def _instead(self, value: Any) -> str:
        """The end of a message: the closest choice to a value that is none, or the hint of the setting."""
        items = value if isinstance(value, tuple | list) else (value,)
        wrong = next((str(item).lower() for item in items if item not in (self.choices or items)), "")
        near = difflib.get_close_matches(wrong, self.choices or (), 1)
        if near and (wrong == near[0] or not self.hint):
            return f"; the closest is {near[0]}"
        return f"; {self.hint}" if wrong and self.hint else ""


def _split_list(text: str) -> list[str]:
    """The text split at commas outside brackets and quotes: `a,b(c=1,d=2)` has two items."""
    items, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'" and depth:
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == "," and depth <= 0:
            items.append("")
            continue
        items[-1] += letter
    return items
