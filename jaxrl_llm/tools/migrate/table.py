"""The shape of the tables of keys: `Entry`, and how a table is looked up and printed."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """Some keys of another library that have the same fate here."""

    keys: tuple[str, ...]
    ours: str  # our key, or several; empty where there is nothing like it
    note: str  # what differs, or why there is nothing
    convert: Callable[[Any], Any] | None = None  # makes our value of theirs; None: the rules do, from several keys


def entry(keys: str, ours: str = "", note: str = "", convert: Callable[[Any], Any] | None = None) -> Entry:
    """The entry of some keys, separated by spaces."""
    return Entry(tuple(keys.split()), ours, note, convert)


def same(value: Any) -> Any:
    """The value as it is."""
    return value


def find(table: Sequence[Entry], key: str) -> Entry | None:
    """The entry of a key; a name that ends in `*` serves all that begin like it. None for an unknown key."""
    exact = next((one for one in table if key in one.keys), None)
    return exact or next(
        (one for one in table for name in one.keys if name[-1] == "*" and key.startswith(name[:-1])), None
    )


def names(table: Sequence[Entry]) -> list[str]:
    """All keys of a table."""
    return [key for one in table for key in one.keys]


def markdown(table: Sequence[Entry]) -> str:
    """The table as a page shows it: first the keys that have one of ours, then the others."""
    lines = ["| there | here | what differs |", "|---|---|---|"]
    for one in sorted(table, key=lambda one: not one.ours):
        theirs = ", ".join(f"`{key}`" for key in one.keys)
        ours = ", ".join(f"`{key}`" for key in one.ours.split()) if one.ours else "none"
        lines.append(f"| {theirs} | {ours} | {one.note} |".replace("|  |", "| |"))
    return "\n".join(lines) + "\n"
