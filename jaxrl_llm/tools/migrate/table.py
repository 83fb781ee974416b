"""Tables of the keys of other libraries, read from keys/LIBRARY.txt.

Each line is an entry: `their keys | our keys | what differs`. `=` before our key: one key of theirs is one of ours, and
its value goes over by itself (`CONVERT` where it is written another way). Without it the rules of the library set ours,
from several keys. No key of ours: there is nothing like it, and the last column says why.
"""

import functools
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import yaml


def _top_k(value: Any) -> int:
    return max(int(value), 0)


def _names(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


# Their key -> our value of theirs, where the two are written differently.
CONVERT: dict[str, Callable[[Any], Any]] = {
    "gradient_checkpointing": lambda on: "block" if on else "auto",
    "chat_template_kwargs": lambda options: ", ".join(f"{name}={value!r}" for name, value in options.items()),
    "top_k": _top_k,
    "stop_token_id": lambda token: (int(token),),
    "actor_rollout_ref.rollout.top_k": _top_k,
    "data.image_key": lambda name: "auto" if name == "images" else name,
    "reward_weights": tuple,
    "loss_weights": tuple,
    "reward_clip_range": tuple,
    "max_tool_calling_iterations": lambda calls: int(calls) + 1,
    "scale_rewards": lambda by: {True: "group", "True": "group", False: "none", "False": "none"}.get(by, by),
    "use_adaptive_entropy": lambda on: "adaptive" if on else "fixed",
    "actor_rollout_ref.model.target_modules": _names,
    "actor_rollout_ref.model.exclude_modules": _names,
    "model.target_modules": _names,
    "model.exclude_modules": _names,
    "trl.reward_num_workers": lambda count: int(count) if int(count) > 1 else 0,
}


class Entry(NamedTuple):
    """Keys of another library that mean the same here."""

    keys: tuple[str, ...]  # a name that ends in `*` stands for all that begin like it
    ours: str  # our key, or several; empty where there is nothing like it
    note: str  # what differs, or why there is nothing
    direct: bool  # the value of each key is that of ours


@functools.cache
def table(library: str) -> tuple[Entry, ...]:
    """Return every key of a library of `LIBRARIES`."""
    text = files("jaxrl_llm.tools.migrate").joinpath("keys", f"{library}.txt").read_text(encoding="utf-8")
    entries = []
    for line in text.splitlines():
        keys, ours, note = (cell.strip() for cell in line.split("|"))
        entries.append(Entry(tuple(keys.split()), ours.removeprefix("= "), note, ours.startswith("= ")))
    return tuple(entries)


PARENTS = {"llamafactory": "trl", "ms-swift": "trl"}  # a library that takes the keys of another besides its own


def known(library: str) -> tuple[Entry, ...]:
    """Return every key that a file of a library may have: those of `table`, and those of the library in PARENTS."""
    parent = PARENTS.get(library)
    return table(library) + (table(parent) if parent else ())


def find(entries: Sequence[Entry], key: str) -> Entry | None:
    """Return the entry of a key, by its full name or else by a `*`; None for an unknown key."""
    exact = next((entry for entry in entries if key in entry.keys), None)
    return exact or next(
        (entry for entry in entries for name in entry.keys if name[-1] == "*" and key.startswith(name[:-1])), None
    )


def names(entries: Sequence[Entry]) -> list[str]:
    """Return all keys of a table."""
    return [key for entry in entries for key in entry.keys]


@functools.cache
def rules(name: str) -> dict[str, Any]:
    """Return the file defaults/NAME.yaml."""
    text = files("jaxrl_llm.tools.migrate").joinpath("defaults", f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


def defaults(library: str, name: str) -> dict[str, Any]:
    """Return what `library` (trl or verl) does with keys that are not set, by a section of defaults/LIBRARY.yaml."""
    return {key: value for key, value in rules(library)[name].items() if value is not None}
