"""Forms that answers are held to: response formats, vLLM's guides and forced tool calls, as grammars.

All become one grammar in Lark's syntax, which llguidance compiles in milliseconds and follows on the host: requests are
of strangers, and no table of the states of a pattern is bounded by its length.
"""

import functools
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.config import ConfigError
from jaxrl_llm.data.templates import called_turn
from jaxrl_llm.environments.tool_calls import MARKS, PROBE_CALL, PROBE_TOOL
from jaxrl_llm.rollout.grammar import Grammar, Vocabulary, as_lark, pattern_as_lark
from jaxrl_llm.serving.errors import BadRequestError
from jaxrl_llm.serving.thoughts import template_of

MOST_CHARACTERS = 65_536  # of a grammar: a schema of a thousand properties compiles in a sixth of a second
KEPT = 128  # compiled grammars
STEP_FUEL = 20_000  # of llguidance: a step costs others 60 ms at most, where its own bound is seconds
# Between the tokens of JSON: room for a pretty print, and none for a model that never comes to an end.
WHITESPACE = {"whitespace_pattern": "[ \\n]{1,20}"}
FORMS = {
    "json": "a JSON schema, as an object or its text",
    "regex": "a regular expression",
    "choice": "a list of texts, none of them empty",
    "grammar": "a grammar in the syntax of Lark or GBNF",
}
STRUCTURED = ("json", "regex", "choice", "grammar", "json_object")


class Guides:
    """The compiled grammars of a served model, of which the latest are kept."""

    def __init__(self, tokenizer: Any, vocabulary: int, eos: tuple[int, ...]):
        self._model, self._lock = (tokenizer, vocabulary, eos), threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._compiled: Callable[[str, str], Grammar] = functools.lru_cache(KEPT)(self._compile)

    def grammar(self, text: str, param: str) -> Grammar:
        """The compiled grammar of a text in Lark's syntax; raises BadRequestError, which names the field `param`."""
        try:
            return self._compiled(text, param)
        except ConfigError as error:
            raise BadRequestError(str(error), param=param) from None

    def _compile(self, text: str, param: str) -> Grammar:
        with self._lock:
            if not self._model[2]:
                raise ConfigError(f"{param} needs a model with an end of text, without which no answer would end")
            self._vocabulary = self._vocabulary or Vocabulary(*self._model, param)
        return Grammar(text, self._vocabulary, param, STEP_FUEL)


def guide_of(body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]], tokenizer: Any) -> tuple[str, str] | None:
    """The grammar that a body asks for, in Lark's syntax, and the field that asked; None for an answer of any kind.

    `tools` are those that the answer may call, in the form of the tokenizer's chat template. Raises BadRequestError,
    which names the field: two guides, a form that there is not, calls of a form that no grammar here has, a text that
    is too long.
    """
    found = _named_guides(body)
    choice = body.get("tool_choice")
    if tools and choice not in (None, "auto", "none"):
        found["tool_choice"] = ("call", choice)
    if len(found) > 1:
        raise BadRequestError(f"{' and '.join(sorted(found))} are given; an answer has one guide", param=min(found))
    for param, (kind, value) in found.items():
        if isinstance(value, str):
            _check_length(param, value)  # before it is converted, which takes longer the longer it is
        try:
            if kind == "call":
                several = value == "required" and body.get("parallel_tool_calls") is not False
                text = f"start: {'calls' if several else 'call'}\n{_calls(tools, tokenizer)}"
            else:
                text = _lark(param, kind, value, tools, tokenizer)
        except ConfigError as error:
            raise BadRequestError(str(error), param=param) from None
        except RecursionError:
            raise BadRequestError(f"{param} is nested too deeply", param=param) from None
        if text is None:
            raise BadRequestError(f"{param} is {value!r:.100}; it takes {FORMS[kind]}", param=param)
        _check_length(param, text)
        if isinstance(body.get("ignore_eos"), bool) and body["ignore_eos"]:
            raise BadRequestError(f"ignore_eos and {param} contradict each other: leave one out", param="ignore_eos")
        for name in ("bad_words", "min_tokens"):
            if body.get(name):
                raise BadRequestError(f"{name} may forbid all that {param} allows: leave one of them out", param=name)
        return text, param
    return None


def _check_length(param: str, text: str) -> None:
    if len(text) > MOST_CHARACTERS:
        raise BadRequestError(
            f"{param} has {len(text):,} characters as a grammar; up to {MOST_CHARACTERS:,} are taken", param=param
        )


def _named_guides(body: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """The kind and the value of each guide in a body, by its field."""
    found: dict[str, tuple[str, Any]] = {}
    response = body.get("response_format")
    if response is not None:
        kind = response.get("type") if isinstance(response, Mapping) else None
        inner = response.get("json_schema") if kind == "json_schema" else {}
        if kind not in ("text", "json_object", "json_schema") or not isinstance(inner, Mapping):
            raise BadRequestError(
                f"response_format is {response!r:.100}; its type is text, json_object, or json_schema with "
                '{"name": ..., "schema": {...}} as json_schema',
                param="response_format",
            )
        if kind != "text":
            schema = {"type": "object"} if kind == "json_object" else inner.get("schema")
            found["response_format"] = ("json", schema)
    for kind in ("json", "regex", "choice", "grammar"):
        if body.get(f"guided_{kind}") is not None:
            found[f"guided_{kind}"] = (kind, body[f"guided_{kind}"])
    structured = body.get("structured_outputs")
    if structured is not None:
        given = {k: v for k, v in structured.items() if v not in (None, False)} if _is_object(structured) else {}
        if not _is_object(structured) or set(given) - set(STRUCTURED) or len(given) > 1:
            raise BadRequestError(
                f"structured_outputs is {structured!r:.100}; it takes one of {', '.join(STRUCTURED)}",
                param="structured_outputs",
            )
        for kind, value in given.items():
            found["structured_outputs"] = ("json", {"type": "object"}) if kind == "json_object" else (kind, value)
    return found


def _lark(param: str, kind: str, value: Any, tools: Sequence[Mapping[str, Any]], tokenizer: Any) -> str | None:
    """The grammar of a guide; None where the value is not of the kind."""
    if kind == "json":
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                return None
        if not _is_object(value):
            return None
        answer = f"%json {json.dumps({**value, 'x-guidance': WHITESPACE})}"
        if tools:  # the model may call one first, as with a text
            return f"start: answer | calls\nanswer: {answer}\n{_calls(tools, tokenizer)}"
        return f"start: {answer}"
    if kind == "choice":
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        if not is_list or not value or not all(isinstance(text, str) and text for text in value):
            return None
        return f"start: {' | '.join(json.dumps(text, ensure_ascii=False) for text in value)}"
    if not isinstance(value, str) or not value:
        return None
    if kind == "regex":
        return pattern_as_lark(value, param)
    return as_lark(value, param)


def _calls(tools: Sequence[Mapping[str, Any]], tokenizer: Any) -> str:
    """The rules `call` and `calls`, of one of the tools and of several: as Hermes and Qwen write them, or Llama 3.

    Raises ConfigError for a chat template that writes calls otherwise.
    """
    as_llama, rules = _writes_as_llama(tokenizer, template_of(tokenizer)), []
    for tool in tools:
        function, arguments = tool["function"], "parameters" if as_llama else "arguments"
        schema = _moved(function.get("parameters") or {"type": "object"}, f"#/properties/{arguments}")
        called = {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, arguments: schema},
            "required": ["name", arguments],
            "additionalProperties": False,
            "x-guidance": WHITESPACE,
        }
        rules.append(f"tool_{len(rules)}: %json {json.dumps(called)}")
    names = " | ".join(f"tool_{number}" for number in range(len(rules)))
    forms = ['calls: call ("; " call)*', "call: tool"]
    if not as_llama:
        forms = [r'calls: call ("\n" call)*', r'call: "<tool_call>\n" tool "\n</tool_call>"']
    return "\n".join([*forms, f"tool: {names}", *rules])


@functools.lru_cache(8)
def _writes_as_llama(tokenizer: Any, template: str) -> bool:
    """True where the tokenizer's chat template writes calls as Llama 3, False as Hermes, or where it writes none.

    Raises ConfigError for another form: a model would be held to one that it was not trained on.
    """
    turn = called_turn(tokenizer, [PROBE_CALL], [PROBE_TOOL]) if template else None
    marks = [mark for mark in MARKS if mark in template]
    if turn is None and (not marks or "<tool_call>" in marks):
        return False
    if turn is not None and turn.lstrip().startswith("{"):
        return True
    if turn is not None and re.search(r"<tool_call>\s*\{", turn):
        return False
    raise ConfigError(
        "tool_choice=required or a named tool, and tools beside an answer's format, need a grammar of calls; there "
        "is one for the forms of Hermes (Qwen 2.5 and 3) and Llama 3; the model's chat template writes them as "
        f"{(turn or marks[0]).strip()!r:.100}: set tool_choice to auto, without a format, or to none"
    )


def _moved(schema: Any, to: str) -> Any:
    """A schema whose references to its own parts are right where it is a part of another, at `to`."""
    if isinstance(schema, list):
        return [_moved(each, to) for each in schema]
    if not _is_object(schema):
        return schema
    moved = {key: _moved(value, to) for key, value in schema.items()}
    if isinstance(schema.get("$ref"), str) and schema["$ref"].startswith("#"):
        moved["$ref"] = to + schema["$ref"][1:]
    return moved


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping)
