"""The forms of tool calls, one of each family of models: how its calls are split from a text, and each of them read.

`MARKS` has them by the mark that opens one. What is malformed raises ValueError, or makes a call with an `error`.
"""

import ast
import contextlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

Schema = Mapping[str, Any]  # of a tool, as chat templates take it
Parameters = Mapping[str, Mapping[str, Any]]  # the schemas of a tool's parameters, by the tool's name

# What json.loads raises: an integer of thousands of digits is a plain ValueError, brackets without end are the other.
UNREADABLE = (ValueError, RecursionError)
NOT_PYTHON = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)  # what reading literals of Python raises
TURN_ENDS = (
    "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>",
    "<|assistant_end|>", "</s>",
)  # fmt: skip
WORDS = {"None": None, "True": True, "False": False, "null": None, "true": True, "false": False}
# Harmony: behind the header of a message, which says the role, the channel, and to whom.
MESSAGE = "<|message|>"
RECIPIENT = r"to=([^\s<\[]+)"  # no mark of another form begins within
FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>\s*", re.DOTALL)
KEY_AND_VALUE = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)
INVOKE = re.compile(r'\s*<invoke name="([^"]+)">(.*?)</invoke>\s*', re.DOTALL)
INVOKED_WITH = re.compile(r'\s*<parameter name="([^"]+)">(.*?)</parameter>\s*', re.DOTALL)
ESCAPES = "\\'\"abfnrtvxuUN01234567"  # what stands behind a backslash in Python
# A string of Python; one without its end goes to that of the text, which is not searched again and again for it then.
QUOTED = re.compile(r"""'(?:\\.|[^'\\])*(?:'|\\?\Z)|"(?:\\.|[^"\\])*(?:"|\\?\Z)""", re.DOTALL)


def _finite(text: str) -> float:
    """The number; raises ValueError for one that no JSON can hold: NaN, Infinity, and what a float rounds to it."""
    if math.isfinite(value := float(text)):
        return value
    raise ValueError(f"{text[:20]} is no finite number")


DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


class ToolCall(NamedTuple):
    """One call: the tool's name and arguments, for a malformed call the `error` in it, and the `id` that the model gave
    it, where its form has one that the template shows with the result."""

    name: str
    arguments: dict[str, Any]
    error: str | None = None
    id: str | None = None


def _tagged(body: str, parameters: Parameters) -> list[ToolCall]:
    """Hermes' JSON, Qwen3-Coder's functions, or a name with keys and values as GLM-4.5 writes them.

    A body without an end has its tag: of a name and its values nothing else tells whether they are all.
    """
    body = body.removeprefix("<tool_call>") if re.match(r"<tool_call>\s*(?:[\[{]|<function=)", body) else body
    if body.lstrip().startswith("<function="):
        return _functions(body, parameters)
    if named := re.match(r"\s*([A-Za-z_][\w.-]*)\s*(?=<arg_key>|\Z)", body):
        return [_typed_call(named[1], _all(KEY_AND_VALUE, body[named.end() :]), parameters)]
    value = _json(body)
    return [as_call(each) for each in (value if isinstance(value, list) else [value])]


def _functions(body: str, parameters: Parameters, framed: bool = True) -> list[ToolCall]:
    """`<function=NAME><parameter=KEY>VALUE</parameter></function>`; a value that is framed has lines of its own."""
    calls = []
    for name, inner in _all(FUNCTION, body, 1):
        pairs = _all(PARAMETER, inner)
        if framed:
            pairs = [(key, value.removeprefix("\n").removesuffix("\n")) for key, value in pairs]
        calls.append(_typed_call(name, pairs, parameters))
    return calls


def _invocations(body: str, parameters: Parameters) -> list[ToolCall]:
    """`<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>`."""
    return [_typed_call(name, _all(INVOKED_WITH, inner), parameters) for name, inner in _all(INVOKE, body, 1)]


def messages_of(text: str) -> list[str]:
    """The messages of a text in the Harmony format, each with its header, without the tokens between them."""
    return re.split(r"<\|(?:start|end|call|return)\|>", text)


def _message(body: str, parameters: Parameters) -> list[ToolCall]:
    """The call of a message of Harmony; none where it is to no tool."""
    header, mark, arguments = body.partition(MESSAGE)
    if (to := re.search(RECIPIENT, header)) is None:
        return []
    if not mark:
        raise ValueError(f"cut off before {MESSAGE}")
    return [as_call({"name": to[1].removeprefix("functions."), "arguments": arguments.strip() or {}})]


def _mistral(body: str, parameters: Parameters) -> list[ToolCall]:
    """A list of JSON, or `NAME[CALL_ID]ID[ARGS]{...}`, of which ID, and in decoded text the marks, may be left out."""
    named = re.match(r"\s*([^\s\[{]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*", body)
    start = len(body) - len(body.lstrip()) if named is None else named.end()
    try:
        value, _ = DECODER.raw_decode(body, start)
    except UNREADABLE as error:
        raise ValueError(f"not JSON: {error}") from None
    if named is not None:
        return [as_call({"name": named[1], "arguments": value})]
    return [as_call(each) for each in (value if isinstance(value, list) else [value])]


def _gemma(body: str, parameters: Parameters) -> list[ToolCall]:
    """`call:NAME{KEY:VALUE}`: JSON with bare keys; texts stand within `<|"|>`, or `<escape>` (FunctionGemma)."""
    named = re.fullmatch(r"\s*call:([^\s{]+)\s*(\{.*\})\s*", body, re.DOTALL)
    if named is None:
        raise ValueError("not call:NAME{KEY:VALUE}")

    def in_json(match: re.Match[str]) -> str:
        word = match[1].strip()
        if match[2]:
            return json.dumps(word) + ":"
        return json.dumps(WORDS[word]) if word in WORDS else match[0]

    parts = re.split(r'<\|"\|>|<escape>', named[2])
    parts[::2] = [re.sub(r"([^{}\[\],:]+)(:?)", in_json, part) for part in parts[::2]]
    parts[1::2] = map(json.dumps, parts[1::2])
    return [as_call({"name": named[1], "arguments": _json("".join(parts))})]


def _python(body: str, parameters: Parameters) -> list[ToolCall]:
    """Calls as Python writes them, or JSON, which LFM2 writes where it is asked to."""
    if re.match(r"\s*\[?\s*\{", body):
        return _listed(body, parameters)
    return python_calls(body)


def _llama(text: str, parameters: Parameters) -> list[ToolCall]:
    """JSON or Python, between the marks or behind them."""
    parts = [part for part in re.split(r"<\|python_(?:start|end|tag)\|>", text) if part.strip()]
    body = without_end(parts[-1]) if parts else ""
    with contextlib.suppress(*UNREADABLE):
        values = json_values(body)
        if values and all(map(is_named, values)):
            return [as_call(value) for value in values]
    with contextlib.suppress(*UNREADABLE):
        return python_calls(body)
    return [ToolCall("", {}, f"the call {shorten(body)} is not JSON with name and parameters")]


def _deepseek(body: str, parameters: Parameters) -> list[ToolCall]:
    """`NAME<｜tool▁sep｜>{...}`, or before V3.1 `function<｜tool▁sep｜>NAME` and JSON in a fence."""
    name, _, arguments = body.partition("<｜tool▁sep｜>")
    if fenced := re.fullmatch(r"\s*(\S+)\s*```(?:json)?\s(.*)```\s*", arguments, re.DOTALL):
        name, arguments = fenced.groups()
    return [as_call({"name": name.strip(), "arguments": arguments.strip()})]


def _kimi(body: str, parameters: Parameters) -> list[ToolCall]:
    """`functions.NAME:NUMBER<|tool_call_argument_begin|>{...}`."""
    identity, _, arguments = body.partition("<|tool_call_argument_begin|>")
    identity, numbered = identity.strip(), re.search(r".:\d+\Z", identity.strip())
    name = re.sub(r":\d+\Z", "", identity).removeprefix("functions.")
    return [as_call({"name": name, "arguments": arguments.strip()})._replace(id=identity if numbered else None)]


def _apertus(body: str, parameters: Parameters) -> list[ToolCall]:
    """A list of JSON objects, each with the arguments under the name."""
    calls = []
    for value in json_values(body.strip()):
        is_call = isinstance(value, Mapping) and len(value) == 1
        calls += [as_call(dict(zip(("name", "arguments"), *value.items(), strict=True)) if is_call else value)]
    return calls


def _listed(body: str, parameters: Parameters) -> list[ToolCall]:
    """A list of JSON, with the words of Hermes or those of Cohere."""
    values = json_values(body.strip())
    cohere = {"tool_name": "name", "parameters": "arguments"}
    return [
        as_call({cohere.get(key, key): held for key, held in value.items()} if isinstance(value, Mapping) else value)
        for value in values
    ]


class Form(NamedTuple):
    """The two functions that read a form: `split` takes its calls out of a text from the opening mark on, `read` reads
    one."""

    split: Callable[[str], Sequence[str]]
    read: Callable[[str, Parameters], list[ToolCall]]


def _between(start: str, end: str) -> Callable[[str], Sequence[str]]:
    """Splits the parts of a text between marks, of which the last end may be missing."""
    return re.compile(f"{start}(.*?)(?:{end}|\\Z)", re.DOTALL).findall


def _whole(text: str) -> Sequence[str]:
    return [text]


def _tagged_parts(text: str) -> Sequence[str]:
    """Splits the parts within `<tool_call>`; a text in the JSON of one may have the tag that ends it."""
    parts, position = [], 0
    while (start := text.find("<tool_call>", position)) >= 0:
        begin = closes = start + len("<tool_call>")
        if (json_text := re.compile(r"\s*(?=[{\[])").match(text, begin)) is not None:
            with contextlib.suppress(*UNREADABLE):
                _, closes = DECODER.raw_decode(text, json_text.end())
        end = text.find("</tool_call>", closes)
        parts.append(text[begin:end] if end >= 0 else text[start:])
        position = end if end >= 0 else len(text)
    return parts


DEEPSEEK = Form(_between("<｜tool▁calls?▁begin｜>(?!\\s*<｜tool▁call▁begin)", "<｜tool▁calls?▁end｜>"), _deepseek)
KIMI = Form(_between(r"<\|tool_call_begin\|>", r"<\|tool_call_end\|>"), _kimi)
HARMONY = Form(messages_of, _message)
MARKS = {
    "<tool_call>": Form(_tagged_parts, _tagged),
    "<function=": Form(re.compile(r"<function=.*?(?:</function>|\Z)", re.DOTALL).findall, _functions),
    "<seed:tool_call>": Form(_between("<seed:tool_call>", "</seed:tool_call>"), partial(_functions, framed=False)),
    "<|python_tag|>": Form(_whole, _llama),
    "<|python_start|>": Form(_whole, _llama),
    "[TOOL_CALLS]": Form(_between(r"\[TOOL_CALLS\]", r"(?=\[TOOL_CALLS\])"), _mistral),
    "<|tool_call>": Form(_between(r"<\|tool_call>", r"<tool_call\|>"), _gemma),
    "<start_function_call>": Form(_between("<start_function_call>", "<end_function_call>"), _gemma),
    "<|tool_call_start|>": Form(_between(r"<\|tool_call_start\|>", r"<\|tool_call_end\|>"), _python),
    "<function_calls>": Form(_between("<function_calls>", "</function_calls>"), _python),
    "<｜tool▁calls▁begin｜>": DEEPSEEK,
    "<｜tool▁call▁begin｜>": DEEPSEEK,
    "<|tool_call|>": Form(_between(r"<\|tool_call\|>", r"<\|/tool_call\|>|(?=<\|tool_call\|>)"), _listed),
    "<minimax:tool_call>": Form(_between("<minimax:tool_call>", "</minimax:tool_call>"), _invocations),
    "<|tool_calls_section_begin|>": KIMI,
    "<|tool_call_begin|>": KIMI,
    "<|tools_prefix|>": Form(_between(r"<\|tools_prefix\|>", r"<\|tools_suffix\|>"), _apertus),
    "<tool_calls>": Form(_between("<tool_calls>", "</tool_calls>"), _listed),
    "<TOOLCALL>": Form(_between("<TOOLCALL>", "</TOOLCALL>"), _listed),
    "<|START_ACTION|>": Form(_between(r"<\|START_ACTION\|>", r"<\|END_ACTION\|>"), _listed),
}


def shorten(value: Any, limit: int = 200) -> str:
    """The beginning of a text, or of the JSON of another value, with dots in place of what is beyond `limit`
    characters."""
    text = value if isinstance(value, str) else json.dumps(value, default=repr)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def without_end(text: str) -> str:
    """The text without the tokens that end a turn, and the space around it."""
    text = text.strip()
    while end := next((end for end in TURN_ENDS if text.endswith(end)), None):
        text = text.removesuffix(end).rstrip()
    return text


def _json(text: str) -> Any:
    try:
        return DECODER.decode(text)
    except UNREADABLE as error:
        raise ValueError(f"not JSON: {error}") from None


def json_values(text: str) -> list[Any]:
    """The JSON values of a text that holds nothing else, with semicolons or white space between.

    Raises ValueError where it is none.
    """
    values, position = [], 0
    while position < len(text):
        try:
            value, position = DECODER.raw_decode(text, position)
        except UNREADABLE as error:
            raise ValueError(f"not JSON: {error}") from None
        values += value if isinstance(value, list) else [value]
        while position < len(text) and (text[position].isspace() or text[position] == ";"):
            position += 1
    return values


def is_named(value: Any) -> bool:
    return isinstance(value, Mapping) and "name" in value


def as_call(value: Any) -> ToolCall:
    """The call of an object with name and arguments, which may be JSON text."""
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):  # as OpenAI nests it
        value = value["function"]
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return ToolCall("", {}, f"the call {shorten(value)} is not an object with name and arguments")
    others = () if value.keys() & {"arguments", "parameters"} else value.items()
    for other in (name for name, held in others if isinstance(held, Mapping)):
        return ToolCall(value["name"], {}, f"the call has {shorten(other)} in the place of arguments")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = DECODER.decode(arguments)
        except UNREADABLE:
            return ToolCall(value["name"], {}, f"the arguments {shorten(arguments)} are not JSON")
    if not isinstance(arguments, Mapping):
        return ToolCall(value["name"], {}, f"the arguments {shorten(arguments)} are not an object")
    return ToolCall(value["name"], dict(arguments))


class _JsonWords(ast.NodeTransformer):
    """Puts the values of None, True and False, as JSON writes them too, in the place of names."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(WORDS[node.id]) if node.id in WORDS else node


def python_calls(text: str) -> list[ToolCall]:
    """The calls in Python's syntax, in a list or each in a line. Raises ValueError where the text is none."""

    def escaped(quoted: re.Match[str]) -> str:
        """The string without what Python refuses: line breaks, as templates have them, and lone backslashes."""
        known = re.sub(r"\\(.)", lambda pair: pair[0] if pair[1] in ESCAPES else "\\" + pair[0], quoted[0], flags=re.S)
        return known.replace("\n", "\\n")

    calls = []
    try:
        for statement in ast.parse(QUOTED.sub(escaped, text.strip())).body:
            value = statement.value if isinstance(statement, ast.Expr) else statement
            for call in value.elts if isinstance(value, ast.List | ast.Tuple) else [value]:
                if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name | ast.Attribute):
                    raise ValueError(f"{shorten(ast.unparse(call))} is no call")
                name, named = ast.unparse(call.func), {}
                for keyword in call.keywords:
                    named[keyword.arg] = ast.literal_eval(_JsonWords().visit(keyword.value))
                if call.args or None in named:
                    error = f"the call {shorten(ast.unparse(call))} has arguments without a name"
                    calls.append(ToolCall(name, {}, error))
                else:
                    calls.append(ToolCall(name, _through_json(named)))
        if not calls:
            raise ValueError("it has no calls")
    except NOT_PYTHON as error:
        raise ValueError(f"not Python: {error}") from None
    return calls


def _through_json(value: Any) -> Any:
    """The value with lists for tuples. Raises TypeError for sets and bytes, which JSON has not, as it has no NaN."""
    return json.loads(json.dumps(value, allow_nan=False))


def _all(pattern: re.Pattern[str], text: str, least: int = 0) -> list[tuple[str, str]]:
    """The pairs of a text that has `least` of them or more, and nothing else. Raises ValueError, naming the rest."""
    pairs, position = [], 0
    while match := pattern.match(text, position):
        pairs.append((match[1], match[2]))
        position = match.end()
    if text[position:].strip() or len(pairs) < least:
        raise ValueError(f"not well formed at {shorten(text[position:].strip(), 80)!r}")
    return pairs


def properties_of(function: Schema) -> dict[str, Any]:
    """The schemas of a function's parameters; none where it has none that can be read."""
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return dict(properties) if isinstance(properties, Mapping) else {}


def _typed_call(name: str, pairs: Sequence[tuple[str, str]], parameters: Parameters) -> ToolCall:
    """The call with each value as its parameter's schema says."""
    name = name.strip()
    schemas = parameters.get(name, {})
    return ToolCall(name, {key.strip(): _typed(value, schemas.get(key.strip())) for key, value in pairs})


def _typed(text: str, schema: Any) -> Any:
    """The value of a parameter that was written as text."""
    schema = schema if isinstance(schema, Mapping) else {}
    kinds = _kinds(schema)
    if text in ("null", "None") and ("null" in kinds or schema.get("nullable")):
        return None
    listed = schema.get("enum")
    if kinds - {"null"} == {"string"} or (isinstance(listed, list) and text in listed):
        return text
    if text in WORDS:
        return WORDS[text]
    with contextlib.suppress(*UNREADABLE):
        value = DECODER.decode(text)
        return text if isinstance(value, str) else value
    if kinds & {"array", "object"}:  # Seed-OSS writes them as Python does
        with contextlib.suppress(*NOT_PYTHON):
            return _through_json(ast.literal_eval(text.strip()))
    return text


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """The types that a value may have."""
    unions = [schema.get(word) for word in ("anyOf", "oneOf")]
    members = [each for union in unions if isinstance(union, list) for each in union if isinstance(each, Mapping)]
    kinds = [each.get("type") for each in (schema, *members)]
    return {str(kind) for each in kinds if each for kind in (each if isinstance(each, list) else [each])}
