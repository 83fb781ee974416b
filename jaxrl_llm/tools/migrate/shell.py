"""Shell scripts as the words of their commands, with variables, arrays and sums filled in; nothing is run."""

import ast
import operator
import re
import shlex
from collections.abc import Iterator, Mapping

from jaxrl_llm.config.resolve import ConfigError

SUMS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
}


def commands(text: str, path: str) -> list[list[str]]:
    """Return the words of each command; variables that the script does not set stay as they are written.

    Raises ConfigError for a quotation or an array that does not end.
    """
    variables: dict[str, str] = {}
    arrays: dict[str, list[str]] = {}
    lines = []
    for line in _lines(text, path):
        array = re.match(r"\s*(?:export\s+|declare -a\s+)?(\w+)\+?=\((.*)\)\s*(?:#.*)?$", line, re.DOTALL)
        if array:
            arrays.setdefault(array[1], []).extend(_words(array[2], variables, arrays))
            continue
        words = _words(line, variables, arrays)
        while words and (words[0] in ("export", "local") or re.fullmatch(r"\w+=.*", words[0], re.DOTALL)):
            name, equals, value = words.pop(0).partition("=")
            if equals:
                variables[name] = value
        if words:
            lines.append([word for word in words if word != "&"])
    return lines


def _lines(text: str, path: str) -> Iterator[str]:
    """Yield the script's lines, joined where one ends in a backslash, or within a quotation or an array."""
    held = ""
    for line in text.replace("\\\r\n", " ").replace("\\\n", " ").splitlines():
        if not held and line.lstrip().startswith("#"):
            continue
        held = f"{held}\n{line}" if held else line
        try:
            shlex.split(held, comments=True)
        except ValueError:
            continue
        opened = re.match(r"\s*(?:export\s+|declare -a\s+)?\w+\+?=\(", held)
        if opened and held.count("(") > held.count(")"):
            continue
        yield held
        held = ""
    if held.strip():
        raise ConfigError(f"{path}: a quotation or array that begins with {held.strip()[:60]!r} does not end")


def _words(line: str, variables: Mapping[str, str], arrays: Mapping[str, list[str]]) -> list[str]:
    words = []
    for word in shlex.split(_expanded(line, variables), comments=True):
        array = re.fullmatch(r"\$\{(\w+)\[@\]\}", word)
        words += arrays.get(array[1], [word]) if array else [word]
    return words


def _expanded(line: str, variables: Mapping[str, str]) -> str:
    """Return the line with known variables filled in and sums of numbers computed."""

    def value(match: re.Match[str]) -> str:
        name, _, other = (match[1] or match[2]).partition(":-")
        return variables.get(name, other or match[0])

    def computed(match: re.Match[str]) -> str:
        named = re.sub(r"\b[A-Za-z_]\w*\b", lambda name: variables.get(name[0], name[0]), match[1])
        try:
            return str(_sum(ast.parse(named.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return match[0]

    line = re.sub(r"\$\{(\w+(?::-[^}]*)?)\}|\$(\w+)", value, line)
    return re.sub(r"\$\(\((.*?)\)\)(?!\))", computed, line)


def _sum(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in SUMS:
        return SUMS[type(node.op)](_sum(node.left), _sum(node.right))
    raise ValueError(f"{ast.unparse(node)} is no sum of numbers")
