"""Formats of the user's own in axolotl's shape: `fn(cfg)` gives `transform_fn`, or that and a dictionary.

The dictionary is `{"remove_columns": [...]}`. A function whose first argument is called `cfg` or `config` is such a
factory; any other takes the row itself.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.config.resolve import ConfigError

UNDERSTOOD = ("remove_columns", "num_proc", "desc", "load_from_cache_file", "keep_in_memory")


class Settings(dict[str, Any]):
    """The options as a factory reads them: `cfg["name"]` or `cfg.name`, None where there is none."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)


def is_factory(function: Callable[..., Any]) -> bool:
    """True when the function makes the transform, and does not take rows itself."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False
    return bool(names) and names[0] in ("cfg", "config")


def made_by(
    factory: Callable[..., Any], name: str, options: Mapping[str, Any]
) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """(transform, columns to remove) that a factory makes; raises ConfigError when it makes something else."""
    made = factory(Settings(options))
    transform, more = made if isinstance(made, tuple) and len(made) == 2 else (made, {})
    if not callable(transform) or not isinstance(more, Mapping):
        raise ConfigError(
            f"{name} returned {type(made).__name__}; it must return a function of a row, or that and a dictionary such "
            "as {'remove_columns': [...]}"
        )
    unknown = [key for key in more if key not in UNDERSTOOD]
    if unknown:
        raise ConfigError(f"{name} asks for {unknown[0]!r} of datasets.map; here it is one of {', '.join(UNDERSTOOD)}")
    removed = more.get("remove_columns") or ()
    return transform, (removed,) if isinstance(removed, str) else tuple(removed)
