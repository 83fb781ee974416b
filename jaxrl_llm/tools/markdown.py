"""Markdown that documentation and model cards share."""

from collections.abc import Iterable, Sequence


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; a `|` in a cell is escaped."""
    lines = ["|" + "---|" * len(heads)]
    for cells in (heads, *rows):
        lines.append("".join(f"| {cell.replace('|', chr(92) + '|')} ".replace("|  ", "| ") for cell in cells) + "|")
    return "\n".join([lines[1], lines[0], *lines[2:], ""])
