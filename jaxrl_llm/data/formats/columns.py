"""Reading the columns of a row, with errors that say what was looked for and what there is."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.config.resolve import ConfigError


def first(row: Mapping[str, Any], names: Sequence[str], format_name: str) -> tuple[str, Any]:
    """(name, value) of the first of the columns that the row has and that is not None."""
    for name in names:
        if row.get(name) is not None:
            return name, row[name]
    raise ConfigError(
        f"the format {format_name} looks for {' or '.join(map(repr, names))}; the row has "
        f"{', '.join(shown(row)) or 'nothing'}; name another format with data.format, or rename a column"
    )


def text(row: Mapping[str, Any], names: Sequence[str], format_name: str) -> str:
    """The text of the first of the columns that the row has."""
    name, value = first(row, names, format_name)
    if not isinstance(value, str):
        raise ConfigError(
            f"column {name!r} is {type(value).__name__}, but the format {format_name} takes text there"
            + ("; formats ending in argilla_chat or ultra take messages" if isinstance(value, list) else "")
        )
    return value


def messages(row: Mapping[str, Any], names: Sequence[str], format_name: str, count: int | None = None) -> list[Any]:
    """The messages, with role and content, of the first of the columns that the row has; `count` of them if given."""
    name, value = first(row, names, format_name)
    check_messages(value, name, format_name)
    if count is not None and len(value) != count:
        raise ConfigError(
            f"column {name!r} has {len(value)} messages, but the format {format_name} reads exactly {count}; "
            "chat_template.argilla_chat reads longer conversations"
        )
    return list(value)


def check_messages(value: Any, name: str, format_name: str) -> None:
    """Raises ConfigError unless `value` is a non-empty list of messages with role and content."""
    good = isinstance(value, list | tuple) and value and all(isinstance(x, Mapping) and "content" in x for x in value)
    if not good:
        shape = f"a list of {type(value[0]).__name__}" if isinstance(value, list) and value else type(value).__name__
        raise ConfigError(
            f"column {name!r} is {shape if value else 'empty'}, but the format {format_name} takes a list of messages "
            "with role and content there"
        )


def shown(row: Mapping[str, Any]) -> list[str]:
    """The columns of the row, those without a value marked."""
    return [name if value is not None else f"{name} (none)" for name, value in row.items()]
