"""Shell scripts as the words of their commands, with variables, defaults, arrays and sums filled in; nothing is run."""

import ast
import fnmatch
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from jaxrl_llm.config.resolve import ConfigError
from jaxrl_llm.tools.migrate.values import ARITHMETIC

SPACE = re.compile(r"(?:\\\r?\n|[ \t\r])+|#[^\n]*")
REDIRECTION = re.compile(r"(?:\d*|&)(?:>>?|<)(&[\d-])?[ \t]*")
DOCUMENT = re.compile(r"\d*<<-?\s*(['\"]?)(\w+)\1[^\n]*\n(?:.*?\n)??\s*\2(?=\s|$)", re.DOTALL)  # cat <<EOF
COMMAND = r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"  # $(command) and $((sum)), brackets in brackets
OPEN = re.compile(rf"(?:{COMMAND}|\$\{{[^{{}}]*\}}|\S)+")
ASSIGNED = re.compile(r"(\w+)\+?=(.*)", re.DOTALL)
OPERATION = re.compile(r":?[-=+?]|##?|%%?|//?|\^\^|,,|:")
# Words before a command, or before an assignment.
PREFIXES = re.compile(r"if|then|else|elif|do|while|until|!|time|\{|export|local|declare|readonly|typeset|-[axrg]")
# Of integers, which the shell rounds towards zero; awk has those of ARITHMETIC.
SUMS = {
    **ARITHMETIC,
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
}
AWK = re.compile(r'\s*BEGIN\s*\{\s*(?:print|printf\s*"([^"]*)"\s*,)\s*([^;{}"]+?)\s*;?\s*\}\s*')


def commands(text: str, path: str) -> list[list[str]]:
    """Return the words of each command. What the script does not tell, `$1` or `$(date)`, stays as it is written.

    Raises ConfigError for a quotation, bracket or array that does not end.
    """
    return list(Shell(path).commands(text))


class Shell:
    """The variables and arrays of a script while its commands are read; HOME is that of this machine, PWD is `.`."""

    def __init__(self, path: str):
        self.path = path
        self.variables = {"HOME": str(Path.home()), "PWD": ".", "0": path, "BASH_SOURCE": path}
        # The arguments of the script, and the script itself.
        self.arrays: dict[str, list[str]] = {"@": [], "*": [], "BASH_SOURCE": [path]}

    def commands(self, text: str) -> Iterator[list[str]]:
        """Yield the words of each command; assignments have their effect on the commands after them."""
        for words in self._lines(text):
            while words and (PREFIXES.fullmatch(words[0]) or ASSIGNED.fullmatch(words[0])):
                if match := ASSIGNED.fullmatch(words.pop(0)):
                    self.variables[match[1]] = match[2]
            if words[:1] == ["for"] and words[2:3] == ["in"] and len(words) > 3:
                self.variables[words[1]] = words[3]  # the first round of a loop
            elif words:
                yield words

    def _lines(self, text: str) -> Iterator[list[str]]:
        at, words = 0, []
        while at < len(text):
            if match := SPACE.match(text, at):
                at = match.end()
            elif match := DOCUMENT.match(text, at):
                at = match.end()
                if words[:1] == ["read"]:  # read -r -d '' NAME <<EOF
                    body = match[0].partition("\n")[2].rpartition("\n")[0]
                    self.variables[words[-1]] = self.text(body.replace("\\\n", " "))
            elif match := REDIRECTION.match(text, at):
                at = match.end() if match[1] else self._word(text, match.end())[1]
            elif text[at] in "\n;&|()":
                yield words
                at, words = at + 1, []
            else:
                more, at = self._word(text, at)
                words += more
        yield words

    def _word(self, text: str, at: int) -> tuple[list[str], int]:
        """Return the words that the word at a position becomes, and the position behind it."""
        parts, quoted = [""], False
        while at < len(text) and text[at] not in " \t\r\n;&|()":
            sign = text[at]
            if sign == "\\":
                parts[-1] += text[at + 1 : at + 2].strip("\n")
                at += 2
            elif sign == "'":
                end = self._end(text, at, "'")
                parts[-1] += text[at + 1 : end]
                at, quoted = end + 1, True
            elif sign == '"':
                at, quoted = self._quotation(text, at + 1, parts), True
            elif sign in "$`":
                value, at = self._expansion(text, at)
                # The shell splits a value at its spaces; one that is not known stays whole.
                words = OPEN.findall(value) if isinstance(value, str) else value
                parts[-1] += words[0] if words else ""
                parts += words[1:]
            else:
                parts[-1] += sign
                at += 1
        if text[at : at + 1] == "(" and (match := ASSIGNED.fullmatch(parts[0])):
            end = self._close(text, at)
            items = [word for words in self._lines(text[at + 1 : end]) for word in words]
            self.arrays[match[1]] = [*(self.arrays.get(match[1], []) if "+=" in parts[0] else []), *items]
            return [], end + 1
        return (parts if quoted or any(parts) else []), at

    def _quotation(self, text: str, at: int, parts: list[str]) -> int:
        """Add what stands in double quotes to the last of the parts; return the position behind it."""
        began = at
        while at < len(text) and text[at] != '"':
            if text[at] == "\\" and text[at + 1 : at + 2] in ('"', "\\", "$", "`", "\n"):
                parts[-1] += text[at + 1].strip("\n")
                at += 2
            elif text[at] in "$`":
                value, at = self._expansion(text, at)
                words = [value] if isinstance(value, str) else value
                parts[-1] += words[0] if words else ""
                parts += words[1:]
            else:
                parts[-1] += text[at]
                at += 1
        if at >= len(text):
            self._endless(text, began - 1)
        return at + 1

    def _expansion(self, text: str, at: int) -> tuple[str | list[str], int]:
        """Return what `$NAME`, `${NAME...}`, `$(command)` or `$((sum))` stands for, and the position behind it."""
        if text[at] == "`":
            end = self._end(text, at, "`")
            return self._output(text[at + 1 : end], text[at : end + 1]), end + 1
        if text.startswith(("$(", "${"), at):
            end = self._close(text, at + 1)
            whole = text[at : end + 1]
            if text[at + 1] == "{":
                return self._parameter(whole[2:-1], whole), end + 1
            if whole.startswith("$((") and whole.endswith("))"):
                return self._sum(whole), end + 1
            return self._output(whole[2:-1], whole), end + 1
        match = re.compile(r"\$([A-Za-z_]\w*|[\d@*#?$!])").match(text, at)
        if not match:
            return "$", at + 1
        if match[1] in self.arrays:
            return self.arrays[match[1]], match.end()
        return self.variables.get(match[1], match[0]), match.end()

    def _parameter(self, inner: str, whole: str) -> str | list[str]:
        match = re.fullmatch(r"(\w+|[@*])(?:\[([^]]*)\])?(.*)", inner, re.DOTALL)
        if not match:
            return whole
        name, index, rest = match[1], match[2], match[3]
        sign = found[0] if (found := OPERATION.match(rest)) else ""
        word = rest[len(sign) :]
        if index in ("@", "*") or (name in "@*" and sign == ":"):
            items = self.arrays.get(name)
            if items is None:
                return whole
            bounds = [int(part) for part in word.split(":") if part.strip().isdigit()] if sign == ":" else []
            return items[bounds[0] :][: bounds[1] if bounds[1:] else None] if bounds else items
        value = self.variables.get(name)
        if index is not None:
            items = self.arrays.get(name, [])
            value = items[int(index)] if index.isdigit() and int(index) < len(items) else None
        if sign in (":-", "-", ":=", "="):
            value = value if value or (value is not None and ":" not in sign) else self.text(word)
            if "=" in sign:
                self.variables[name] = value
            return value
        if sign in (":+", "+"):
            return self.text(word) if value else ""
        if value is None:
            return f"${name}" if "?" in sign else whole
        if sign in ("#", "##", "%", "%%"):
            return _trimmed(value, self.text(word), sign)
        if sign in ("/", "//"):
            old, _, new = self.text(word).partition("/")
            return value.replace(old, new, -1 if sign == "//" else 1)
        if sign == ":":
            bounds = [int(part) for part in word.split(":") if re.fullmatch(r"\s*-?\d+\s*", part)]
            return value[bounds[0] :][: bounds[1] if bounds[1:] else None] if bounds else whole
        return {"^^": value.upper(), ",,": value.lower()}.get(sign, value)

    def text(self, text: str) -> str:
        """Return a text with its quotations and expansions replaced."""
        return " ".join(word for words in self._lines(text) for word in words)

    def _output(self, command: str, whole: str) -> str:
        """Return what a command within a command writes, of those that need nothing but their arguments."""
        words = [word for words in self._lines(command) for word in words]
        if words[:1] == ["pwd"]:
            return "."
        if words[:1] == ["cd"] and words[-1] == "pwd" and not any("$" in word for word in words):
            folders = [word for word in words[1:-1] if not word.startswith("-")]
            return os.path.normpath(folders[0]) if folders else whole
        if len(words) < 2 or any("$" in word for word in words):
            return whole
        if words[0] == "expr":
            try:
                return str(_computed(ast.parse(" ".join(words[1:]), mode="eval").body))
            except (SyntaxError, ValueError, ArithmeticError):
                return whole
        if words[0] == "awk" and (match := AWK.fullmatch(words[-1])):
            return self._formatted(match[1] or "%.6g", match[2], whole)
        if words[0] == "printf" and len(words) == 3:
            return self._formatted(words[1], words[2], whole)
        if words[0] == "basename":
            return PurePath(words[1]).name.removesuffix(words[2] if words[2:] else "")
        if words[0] in ("dirname", "realpath", "readlink", "echo"):
            values = [word for word in words[1:] if not word.startswith("-")]
            return str(PurePath(values[0]).parent) if words[0] == "dirname" else " ".join(values)
        return whole

    def _formatted(self, form: str, sum_: str, whole: str) -> str:
        """Return a sum of numbers as awk and printf write it."""
        try:
            return form.replace("%s", "%.6g") % float(_computed(ast.parse(sum_.strip(), mode="eval").body, ARITHMETIC))
        except (ArithmeticError, SyntaxError, TypeError, ValueError):
            return whole

    def _sum(self, whole: str) -> str:
        inner = re.sub(r"\$\{(\w+)\}|\$(\w+)", lambda name: name[1] or name[2], whole[3:-2])
        named = re.sub(r"\b[A-Za-z_]\w*\b", lambda name: self.variables.get(name[0], name[0]), inner)
        try:
            return str(_computed(ast.parse(named.strip(), mode="eval").body))
        except (ArithmeticError, SyntaxError, ValueError):
            return whole

    def _close(self, text: str, at: int) -> int:
        """Return the position of the bracket that closes the one at a position."""
        opening, closing, depth, place = text[at], {"(": ")", "{": "}"}[text[at]], 0, at
        while place < len(text):
            if text[place] == "\\":
                place += 1
            elif text[place] == "'" and closing == ")":
                place = self._end(text, place, "'")
            elif closing == ")" and text[place] == "#" and text[place - 1] in " \t\n(":
                place = text.find("\n", place) if "\n" in text[place:] else len(text)
            else:
                depth += (text[place] == opening) - (text[place] == closing)
                if not depth:
                    return place
            place += 1
        return self._endless(text, at)

    def _end(self, text: str, at: int, sign: str) -> int:
        end = text.find(sign, at + 1)
        return end if end >= 0 else self._endless(text, at)

    def _endless(self, text: str, at: int) -> int:
        shown = " ".join(text[max(text.rfind("\n", 0, at), 0) :][:60].split())
        raise ConfigError(f"{self.path}: a quotation, bracket or array in {shown!r} does not end")


def _trimmed(value: str, pattern: str, sign: str) -> str:
    """Return a value without its beginning (#) or end (%) of that pattern, the longest where the sign is double."""
    sizes = range(len(value) + 1) if len(sign) == 1 else range(len(value), -1, -1)
    for size in sizes:
        start = sign[0] == "#"
        if fnmatch.fnmatchcase(value[:size] if start else value[len(value) - size :], pattern):
            return value[size:] if start else value[: len(value) - size]
    return value


def _computed(node: ast.expr, sums: Mapping[type, Callable[[Any, Any], Any]] = SUMS) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int if sums is SUMS else int | float):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_computed(node.operand, sums)
    if isinstance(node, ast.BinOp) and type(node.op) in sums:
        return sums[type(node.op)](_computed(node.left, sums), _computed(node.right, sums))
    raise ValueError(f"{ast.unparse(node)} is no sum of numbers")
