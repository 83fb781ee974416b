"""Tool calls in the text of a turn, in the form of each family of models: docs/environments.md has the table.

The text is raw, with special tokens, as the marks of most forms are such tokens.
"""

import contextlib
import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from jaxrl_llm.environments.tool_call_forms import (
    HARMONY,
    MARKS,
    MESSAGE,
    RECIPIENT,
    UNREADABLE,
    Parameters,
    Schema,
    ToolCall,
    as_call,
    is_named,
    json_values,
    messages_of,
    properties_of,
    python_calls,
    shorten,
    without_end,
)

THINKING = {  # where it begins and ends
    "<think>": "</think>", "<seed:think>": "</seed:think>", "[THINK]": "[/THINK]", "<|channel>thought": "<channel|>",
    "<|START_THINKING|>": "<|END_THINKING|>", "<|channel|>analysis<|message|>": "<|end|>",
}  # fmt: skip
THOUGHT = re.compile("|".join(map(re.escape, THINKING)))
# Of Harmony, a header of a message to a tool, and what may become one.
TO_TOOL = rf"(?:\A\s*|<\|start\|>assistant\s*|(?:<\|start\|>assistant)?<\|channel\|>\w+\s+){RECIPIENT}(?:\s+\w+)?\s*<\|"
UNFINISHED = re.compile(
    r"\A\s*(?:to?)?\Z|(?:<\|(?:start|channel)\|>|\A\s*to=)(?:(?!<\|message\|>).){0,200}\Z", re.DOTALL
)
OPENING = re.compile("|".join([*map(re.escape, MARKS), TO_TOOL]))
BEGINNING = re.compile("|".join([*map(re.escape, THINKING), OPENING.pattern]))
LONGEST_MARK = 64  # characters, of a header of Harmony too
BEGINNINGS = {mark[:size] for mark in (*MARKS, *THINKING, "<|start|>", "<|channel|>") for size in range(1, len(mark))}
LONGEST_BEGINNING = max(map(len, BEGINNINGS))
DEEPEST = 64  # objects and lists within one another

# One call, by which a chat template shows its form.
PROBE_CALL: dict[str, Any] = {"name": "probe_tool", "arguments": {"text": "a text", "number": 1}}
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": PROBE_CALL["name"],
        "description": "Does nothing.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "A text."},
                "number": {"type": "integer", "description": "A number."},
            },
            "required": ["text", "number"],
        },
    },
}


class TurnCalls(NamedTuple):
    """The calls of a turn, in order.

    start: the characters of the turn before the opening mark of the first one, all where there is none; said: what it
    says there; marked: False for calls that are the whole turn, without a mark.
    """

    calls: list[ToolCall]
    start: int
    said: str
    marked: bool = True


def parse_tool_calls(text: str, schemas: Iterable[Schema] = ()) -> list[ToolCall]:
    """The calls in a turn, in order; none when it asks for no tool. More in `turn_calls`."""
    return turn_calls(text, schemas).calls


def turn_calls(text: str, schemas: Iterable[Schema] = ()) -> TurnCalls:
    """The calls in a turn, and where they begin; `schemas` are of the tools that are offered.

    The first opening mark that is not within thinking tells the form. Without one, a turn is a call where it is nothing
    but JSON with `name` and `parameters` or `arguments` (Llama 3), one object, several with semicolons between, or a
    list; or a list of Python calls of offered tools (Llama 4). Behind a mark a call of a tool that takes nothing may
    leave its arguments out; without one such JSON is an answer. A call that is meant but malformed has an `error`.

    Where a form writes each value as text, that is the value of a parameter which is a string in the schemas; for
    others it is read as JSON, and stays text where it is none, or a text in JSON.
    """
    functions = [schema.get("function", schema) for schema in schemas]
    parameters = {function.get("name"): properties_of(function) for function in functions}
    if calls := _unmarked(text, parameters):
        return TurnCalls(list(map(_bounded, calls)), 0, "", marked=False)
    found = _marked(text, 0, parameters)
    end = re.search(r"</(?:seed:)?think>", text)
    if end is None or end.start() < found.start or THOUGHT.search(text, 0, end.start()):
        return found
    # The prompt has opened the thinking, and the mark is within; unless it is a call whose arguments have the word.
    if any(end[0] in json.dumps(call.arguments) for call in found.calls):
        return found
    return _marked(text, end.end(), parameters)


class CallStart:
    """The place where the first call of a growing turn begins, or may come to begin.

    Each call of `of` looks at what is new alone, so that a long answer costs its length.
    """

    def __init__(self) -> None:
        self._blank = 0  # characters of space that the text begins with
        self._position = 0  # no mark begins before it
        self._closing: str | None = None  # of the thinking that is open there
        self._mark: int | None = None  # in that thinking, which would be a call if it never closed

    def of(self, text: str) -> int:
        """The characters before it, of the text up to now, which the next one begins with; all where there is none."""
        while self._blank < len(text) and text[self._blank].isspace():
            self._blank += 1
        if text[self._blank : self._blank + 1] in ("", "[", "{"):
            return 0
        while self._closing is not None or (found := BEGINNING.search(text, self._position)) is not None:
            if self._closing is None:
                if (closing := THINKING.get(found[0])) is None:
                    self._position = found.start()
                    return found.start()
                self._closing, self._position = closing, found.end()
            end = text.find(self._closing, self._position)
            if self._mark is None and (mark := OPENING.search(text, self._position, end if end >= 0 else len(text))):
                self._mark = mark.start()
            if end < 0:
                unfinished = UNFINISHED.search(text, self._position)
                certain = min(self._before_partial_mark(text), len(text) if unfinished is None else unfinished.start())
                self._position = min(max(self._position, len(text) - LONGEST_MARK), certain)
                return certain if self._mark is None else self._mark
            self._position, self._closing, self._mark = end + len(self._closing), None, None
        unfinished = UNFINISHED.search(text, self._position)
        certain = self._before_partial_mark(text)
        self._position = certain if unfinished is None else min(certain, unfinished.start())
        return self._position

    @staticmethod
    def _before_partial_mark(text: str) -> int:
        """The characters before the beginning of a mark that a text ends with, all where it ends with none."""
        sizes = range(min(LONGEST_BEGINNING, len(text)), 0, -1)
        return len(text) - next((size for size in sizes if text[-size:] in BEGINNINGS), 0)


def _marked(text: str, position: int, parameters: Parameters) -> TurnCalls:
    """The calls from the first opening mark behind a position."""
    opening = _opening(text, position)
    if opening is None:
        return TurnCalls([], len(text), text)
    start, calls = opening.start(), []
    split, read = MARKS.get(opening[0], HARMONY)
    for body in split(without_end(text[start:])):
        try:
            calls += read(body, parameters)
        except UNREADABLE as error:
            calls.append(ToolCall("", {}, f"the call {shorten(body.strip())} is {error}"))
    said = text[:start]
    if opening[0] not in MARKS:  # what Harmony says to the user is in messages too, beside its thinking
        messages = [message.partition(MESSAGE) for message in messages_of(said)]
        said = "\n".join(body for header, _, body in messages if body and "analysis" not in header)
    return TurnCalls(list(map(_bounded, calls)), start, said)


def _bounded(call: ToolCall) -> ToolCall:
    """The call; one with an error in the place of arguments that whoever copies or writes them may fail on."""
    level: list[Any] = [call.arguments]
    for _ in range(DEEPEST):
        held = [value for each in level for value in (each.values() if isinstance(each, dict) else each)]
        level = [value for value in held if isinstance(value, dict | list)]
        if not level:
            return call
    return ToolCall(call.name, {}, f"the arguments of {call.name} are nested more than {DEEPEST} deep")


def _opening(text: str, position: int) -> re.Match[str] | None:
    """The first opening mark behind a position that is not within thinking."""
    while opening := OPENING.search(text, position):
        while position <= opening.start():
            thought = THOUGHT.search(text, position, opening.start())
            end = -1 if thought is None else text.find(THINKING[thought[0]], thought.end())
            if end < 0:
                return opening
            position = end
    return None


def _unmarked(text: str, parameters: Parameters) -> list[ToolCall]:
    """The calls of a turn that is nothing but calls, without a mark."""
    body = without_end(text)
    # A turn that opens with a bracket may be an answer, such as {"sum": 3}, {"name": "Ann"}, {1, 2} or [f(2)].
    if body.startswith(("{", "[")):
        with contextlib.suppress(*UNREADABLE):
            values = json_values(body)
            needed = all(is_named(value) and value.keys() & {"arguments", "parameters"} for value in values)
            return [as_call(value) for value in values] if needed else []
    if re.match(r"\[\s*[\w.]+\(", body):
        with contextlib.suppress(*UNREADABLE):
            calls = python_calls(body)
            return calls if all(call.name in parameters for call in calls) else []
    return []
