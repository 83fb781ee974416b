"""Tool calls in the forms of the models: those of the templates that TRL ships, and written by hand of others."""

import copy
import json
import random
import re
import time
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from jaxrl_llm.data.templates import called_turn
from jaxrl_llm.environments.tool_calls import MARKS, THINKING, CallStart, ToolCall, parse_tool_calls, turn_calls
from jaxrl_llm.environments.tools import call_tool, turn_message
from jaxrl_llm.models.files.hf import EMBEDDED

try:
    import trl

    TEMPLATES = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
except ImportError:
    TEMPLATES = []

TYPES = {
    "text": "string", "digits": "string", "word": "string", "lines": "string", "count": "integer", "share": "number",
    "flag": "boolean", "empty": "array", "listed": "array", "nested": "object",
}  # fmt: skip
PROPERTIES: dict[str, dict] = {name: {"type": kind, "description": f"The {name}."} for name, kind in TYPES.items()}
PROPERTIES["nothing"] = {"type": "string", "nullable": True, "description": "Nothing."}
SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Does it.",
            "parameters": {"type": "object", "properties": PROPERTIES},
        },
    }
    for name in ("find_all", "tell_time")
]
ARGUMENTS = {
    "text": 'say "no", it\'s 5 < 6 & {x: [y]} ünï 私 👍',
    "digits": "007",
    "word": "true",
    "lines": "one\n  two\n\nthree\\n",
    "count": -3,
    "share": 0.25,
    "flag": True,
    "nothing": None,
    "empty": [],
    "listed": [1, "2", None, False, [2.5]],
    "nested": {"a": {"b": ["c, d", {"e": True}]}, "n": None},
}
FIND, TIME = ToolCall("find_all", ARGUMENTS), ToolCall("tell_time", {})
# These write texts between quotes as they are, so that quotes and backslashes within are lost.
UNQUOTED = ("lfm2_2_5", "lfm2_2_5_v2")
UNREAD = ("muse_glimmer",)  # of no family that is supported


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(EMBEDDED / "sort")


def with_template(tokenizer, text):
    own = copy.copy(tokenizer)
    own.chat_template = text
    return own


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_calls_of_templates(tokenizer, path):
    """What a template writes is what is read, for each value of JSON."""
    own, calls = with_template(tokenizer, path.read_text()), [FIND, TIME]
    if path.stem.removesuffix("_training") in UNQUOTED:
        calls[0] = ToolCall("find_all", {**ARGUMENTS, "text": 'say "no" {x: [y]} ünï 私 👍', "lines": "one\n two"})
    functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
    turns = [called_turn(own, functions[:count], SCHEMAS) for count in (1, 2)]
    if turns == [None, None]:
        assert "tool_calls" not in own.chat_template or "deepseek_r1_distill" in path.stem
        return
    for count, turn in enumerate(turns, 1):
        if turn is None:  # as two calls are to Llama 3 and gpt-oss
            assert count == 2 and path.stem.startswith(("llama3", "gptoss"))
        elif path.stem.removesuffix("_training") in UNREAD:
            assert all(call.error for call in parse_tool_calls(turn, SCHEMAS))
        else:
            assert parse_tool_calls(turn, SCHEMAS) == calls[:count]


ADD = ToolCall("add", {"a": 1, "b": 2})


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', [ADD]),
        ('I add.<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call><|im_end|>', [ADD]),
        ('<tool_call>{"name":"add","arguments":{"a":1,"b":2}}</tool_call> and '
         '<tool_call>{"name":"now","arguments":{}}</tool_call>', [ADD, ToolCall("now", {})]),
        ('<tool_call>{"name": "now"}', [ToolCall("now", {})]),
        ('{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>', [ADD]),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}<|eom_id|>', [ADD]),
        ('{"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "now", "parameters": {}}',
         [ADD, ToolCall("now", {})]),
        ('[{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]', []),
        ('<tool_call>{"name": "now"}</tool_call>', [ToolCall("now", {})]),
        ('<|python_tag|>{"name": "now"}', [ToolCall("now", {})]),
        ('{"name": "add", "arguments": {"a": 1, "b": 2}}', [ADD]),
        ('{"name": "Ann", "age": 30}', []),
        ('[{"name": "add", "parameters": {}}, {"name": "Ann"}]', []),
        ("[" * 20_000, []),
        ('{"a":' * 20_000, []),
        ('{"name": "add", "parameters": {"a": ' + "1" * 5000 + "}}", []),
        ("The answer is 3.", []),
        ('{"sum": 3}', []),
        ("{1, 2}", []),
        ("", []),
    ],
    ids=range(20),
)  # fmt: skip
def test_calls(text, calls):
    assert parse_tool_calls(text) == calls


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<tool_call>{'name': 'add'}</tool_call>", "the call {'name': 'add'} is not JSON"),
        ("<tool_call>[1]</tool_call>", "is not an object with name and arguments"),
        ('<tool_call>{"arguments": {}}</tool_call>', "is not an object with name and arguments"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "the arguments [1] are not an object"),
        ('<tool_call>{"name": "add", "args": {"a": 1}}</tool_call>', "the call has args in the place of arguments"),
        ('<tool_call>{"name": "add", "arguments": "{1"}</tool_call>', "the arguments {1 are not JSON"),
        ("<|python_tag|>{add(1)}", "is not JSON with name and parameters"),
        ("<|python_tag|>" + "[" * 20_000, "is not JSON with name and parameters"),
        ("<tool_call>" + "[" * 20_000, "is not JSON: maximum recursion depth"),
        ('<tool_call>{"name": "add", "arguments": {"a": ' + "1" * 5000 + "}}</tool_call>", "is not JSON: Exceeds"),
        ('<tool_call>{"name": "add", "arguments": "' + "[" * 20_000 + '"}</tool_call>', "[... are not JSON"),
    ],
    ids=range(11),
)
def test_malformed_calls_have_an_error(text, error):
    (call,) = parse_tool_calls(text)
    assert error in (call.error or "")


def of(*calls):
    return [ToolCall(name, arguments) for name, arguments in calls]


A = ("find_all", {"text": "a, b", "count": 2, "nothing": None, "listed": [True, "x"], "nested": {"k": 1.5}})
B = ("tell_time", {})
IN_JSON = '{"text": "a, b", "count": 2, "nothing": null, "listed": [true, "x"], "nested": {"k": 1.5}}'
BY_NAME = f'{{"name": "find_all", "arguments": {IN_JSON}}}'
IN_PYTHON = "find_all(text='a, b', count=2, nothing=None, listed=[True, \"x\"], nested={'k': 1.5})"
IN_BOTH = 'find_all(text="a, b", count=2, nothing=null, listed=[true, "x"], nested={"k": 1.5})'
QWEN = """<function=find_all>
<parameter=text>
a, b
</parameter>
<parameter=count>
2
</parameter>
<parameter=nothing>
None
</parameter>
<parameter=listed>
[true, "x"]
</parameter>
<parameter=nested>
{"k": 1.5}
</parameter>
</function>"""
SEED = (
    "<function=find_all>\n<parameter=text>a, b</parameter>\n<parameter=count>2</parameter>\n<parameter=nothing>None"
    "</parameter>\n<parameter=listed>[True, 'x']</parameter>\n<parameter=nested>{'k': 1.5}</parameter>\n</function>"
)
GLM = (
    "<arg_key>text</arg_key><arg_value>a, b</arg_value><arg_key>count</arg_key><arg_value>2</arg_value>\n"
    '<arg_key>nothing</arg_key><arg_value>null</arg_value><arg_key>listed</arg_key><arg_value>[true, "x"]</arg_value>'
    '<arg_key>nested</arg_key><arg_value>{"k": 1.5}</arg_value>'
)
MINIMAX = (
    '<invoke name="find_all">\n<parameter name="text">a, b</parameter>\n<parameter name="count">2</parameter>\n'
    '<parameter name="nothing">null</parameter>\n<parameter name="listed">[true, "x"]</parameter>\n'
    '<parameter name="nested">{"k": 1.5}</parameter>\n</invoke>\n'
)
GEMMA = '{text:<|"|>a, b<|"|>,count:2,nothing:null,listed:[true,<|"|>x<|"|>],nested:{k:1.5}}'
BEGINS, BEGIN, SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
END, ENDS = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
COMMENTARY = "<|channel|>commentary to=functions."
TIME_BY_NAME = '{"name": "tell_time", "arguments": {}}'
FORMS = {
    "hermes": f"<tool_call>\n{BY_NAME}\n</tool_call>\n<tool_call>\n" + '{"name": "tell_time"}</tool_call><|im_end|>',
    "qwen3-coder": f"<tool_call>\n{QWEN}\n</tool_call>\n<tool_call>\n<function=tell_time>\n</function>\n</tool_call>"
    "<|im_end|>",
    "qwen3-coder, unopened": f"{QWEN}\n</tool_call>\n<tool_call>\n<function=tell_time>\n</function>\n</tool_call>",
    "seed-oss": f"<seed:tool_call>\n{SEED}\n</seed:tool_call>\n<seed:tool_call>\n<function=tell_time>\n</function>\n"
    "</seed:tool_call>\n<seed:eos>",
    "glm-4.7": f"<tool_call>find_all{GLM}</tool_call><tool_call>tell_time</tool_call><|observation|>",
    "glm-4.5": f"<tool_call>find_all\n{GLM}\n</tool_call>\n<tool_call>tell_time\n</tool_call><|observation|>",
    "gpt-oss": f"{COMMENTARY}find_all <|constrain|>json<|message|>{IN_JSON}<|call|><|start|>assistant"
    f"{COMMENTARY}tell_time <|constrain|>json<|message|>{{}}<|call|>",
    "gpt-oss, as rendered": f" to=functions.find_all<|channel|>commentary json<|message|>{IN_JSON}<|call|>"
    "<|start|>assistant to=functions.tell_time<|channel|>commentary json<|message|><|call|>",
    "gpt-oss, no type": f"<|start|>assistant{COMMENTARY}find_all<|message|>{IN_JSON}<|end|>"
    f"<|start|>assistant{COMMENTARY}tell_time code<|message|>{{}}<|call|>",
    "mistral v3": f'[TOOL_CALLS] [{BY_NAME}, {TIME_BY_NAME[:-1]}, "id": "123456789"}}]</s>',
    "mistral v11": f"[TOOL_CALLS]find_all[CALL_ID]123456789[ARGS]{IN_JSON}[TOOL_CALLS]tell_time[ARGS]{{}}</s>",
    "mistral v13": f"[TOOL_CALLS]find_all[ARGS]{IN_JSON}[TOOL_CALLS]tell_time[ARGS]{{}}</s>",
    "mistral, no marks within": f"[TOOL_CALLS]find_all{IN_JSON}[TOOL_CALLS]tell_time{{}}",
    "gemma 4": f"<|tool_call>call:find_all{GEMMA}<tool_call|><|tool_call>call:tell_time{{}}<tool_call|>"
    "<|tool_response>",
    "functiongemma": "<start_function_call>call:find_all{text:<escape>a, b<escape>,count:2,nothing:null,"
    "listed:[true,<escape>x<escape>],nested:{k:1.5}}<end_function_call><start_function_call>call:tell_time{}"
    "<end_function_call><start_function_response>",
    "lfm2": f"<|tool_call_start|>[{IN_PYTHON}, tell_time()]<|tool_call_end|><|im_end|>",
    "lfm2, json": f'<|tool_call_start|>[{BY_NAME}, {TIME_BY_NAME}]<|tool_call_end|><|im_end|>',
    "llama 3": f'<|python_tag|>{BY_NAME}; {{"name": "tell_time"}}<|eom_id|>',
    "llama 4": f"[{IN_PYTHON}, tell_time()]<|eot|>",
    "llama 4, marked": f"<|python_start|>[{IN_PYTHON}, tell_time()]<|python_end|><|eot|>",
    "llama 4, json": f'<|python_start|><|python_end|>{BY_NAME}{{"name": "tell_time", "parameters": {{}}}}<|eot|>',
    "olmo 3": f"<function_calls>\n{IN_BOTH}\ntell_time()\n</function_calls><|im_end|>",
    "deepseek v3": f"{BEGINS}{BEGIN}function{SEP}find_all\n```json\n{IN_JSON}\n```{END}\n{BEGIN}function{SEP}"
    f"tell_time\n```json\n{{}}\n```{END}{ENDS}",
    "deepseek v3.1": f"{BEGINS}{BEGIN}find_all{SEP}{IN_JSON}{END}{BEGIN}tell_time{SEP}{{}}{END}{ENDS}",
    "granite 3": f"<|tool_call|>[{BY_NAME}, {TIME_BY_NAME}]<|end_of_text|>",
    "granite 3.1": f"<tool_call>[{BY_NAME}, {TIME_BY_NAME}]<|end_of_text|>",
    "phi-4-mini": f'<|tool_call|>[{BY_NAME}, {{"name": "tell_time"}}]<|/tool_call|><|end|>',
    "minimax-m2": f'<minimax:tool_call>\n{MINIMAX}<invoke name="tell_time">\n</invoke>\n</minimax:tool_call>[e~[',
    "kimi k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.find_all:0<|tool_call_argument_begin|>"
    f"{IN_JSON}<|tool_call_end|>"
    "<|tool_call_begin|>functions.tell_time:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|><|im_end|>",
    "kimi k2, without a section": f"<|tool_call_begin|>find_all:12<|tool_call_argument_begin|> {IN_JSON} "
    "<|tool_call_end|>\n<|tool_call_begin|>tell_time<|tool_call_argument_begin|>{}<|tool_call_end|>",
    "apertus": f'<|tools_prefix|>[{{"find_all": {IN_JSON}}}, {{"tell_time": {{}}}}]<|tools_suffix|><|assistant_end|>',
    "hunyuan a13b": f"<tool_calls>[{BY_NAME}, {TIME_BY_NAME}]</tool_calls>",
    "nemotron nano 2": f"<TOOLCALL>[{BY_NAME}, {TIME_BY_NAME}]</TOOLCALL>",
    "cohere": f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "find_all", "parameters": {IN_JSON}}},\n'
    '    {"tool_call_id": "1", "tool_name": "tell_time", "parameters": {}}\n]<|END_ACTION|><|END_OF_TURN_TOKEN|>',
}  # fmt: skip


MARK = re.compile(r"<\|.*?\|>|<\|[a-z_]+>|<[a-z_]+\|>|<｜.*?｜>|\[[A-Z_]+\]|</?(?:seed:|minimax:)?tool_call>")


def without_ids(calls):
    return [call._replace(id=None) for call in calls]


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    """As the models' own documentation has them. Behind thinking, which writes a mark too, as where it is all."""
    text = FORMS[form]
    assert without_ids(parse_tool_calls(text, SCHEMAS)) == of(A, B)
    if form in ("llama 4", "gpt-oss, as rendered"):
        return  # nothing stands before them
    for thinking in ("", "<think>"):
        turn = f"{thinking}As <tool_call>[TOOL_CALLS]{BY_NAME}</tool_call></think>So. {text}"
        found = turn_calls(turn, SCHEMAS)
        assert without_ids(found.calls) == of(A, B) and found.start == len(turn) - len(text) and found.marked
    assert parse_tool_calls(f"<think>{text}</think>That is how.", SCHEMAS) == []


def test_results_have_the_ids_that_kimi_gives_its_calls():
    """Its template shows a result by the id of the call, which the turn and the result have in messages."""
    first, second = parse_tool_calls(FORMS["kimi k2"], SCHEMAS)
    assert (first.id, second.id) == ("functions.find_all:0", "functions.tell_time:1")
    assert parse_tool_calls(FORMS["kimi k2, without a section"], SCHEMAS)[1].id is None
    result = call_tool(second, {"tell_time": lambda: "noon"})
    assert result.message == {
        "role": "tool", "name": "tell_time", "content": "noon", "tool_call_id": "functions.tell_time:1",
    }  # fmt: skip
    turn = turn_message("", FORMS["kimi k2"], SCHEMAS)
    assert [call["id"] for call in turn["tool_calls"]] == [first.id, second.id]


@pytest.mark.parametrize("form", FORMS)
def test_cut_calls_have_an_error(form):
    """A turn that ended within its first call is answered with an error: nothing is called with half its arguments."""
    text = FORMS[form]
    calls = [parse_tool_calls(text[: text.index(cut) + 4], SCHEMAS) for cut in ("find_all", "a, b", "nothing")]
    if form == "llama 4":  # without a mark it is text
        assert calls == [[], [], []]
    else:
        assert [[bool(call.error) for call in each] for each in calls[1:]] == [[True]] * 2
        assert [bool(call.error) for call in calls[0]] == ([] if "to=" in text else [True])  # a header may go on


@pytest.mark.parametrize("form", FORMS)
def test_the_start_of_a_call_is_known_before_it_is_there(form):
    """No character of a call is certain text at any time, and what comes before it is."""
    text = ("" if form in ("llama 4", "gpt-oss, as rendered") else "It is 5 < 6. ") + FORMS[form]
    start, known, position = turn_calls(text, SCHEMAS).start, CallStart(), 0
    for size in range(len(text) + 1):
        position = known.of(text[:size])
        assert position <= start
    assert position == start


def test_a_mark_in_thinking_holds_nothing_back_once_that_is_over():
    known, text = CallStart(), ""
    for piece, certain in (
        ("Hm. <think>I wr", 15), ("ite ", 19), ("<tool_", 19), ("call> or ", 19), ("not.</thi", 19), ("nk>So: 5", 51),
        ("<tool_call>{", 51),
    ):  # fmt: skip
        text += piece
        assert known.of(text) == certain, text


def test_any_text_is_read_and_no_call_is_said():
    """Marks and their parts in every order: nothing raises, arguments are JSON, and what a stream gives out of a text
    that grows is never of a call. `to=x` before a mark of another form was."""
    pieces = [
        *MARKS, *THINKING, *THINKING.values(), "</tool_call>", "<function=f>", "<function=", "<parameter=a>",
        "</parameter>", "</function>", "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>", '<invoke name="f">',
        '<parameter name="a">', "</invoke>", "</minimax:tool_call>", "</seed:tool_call>", '{"name": "f"', "}", "{", "[",
        "]", "(", ")", '"', "'", "\\", "\n", " ", "f", "a", "1", "1e999", "null", "call:f{", '<|"|>', "to=f", "to=",
        "<|start|>assistant", "<|channel|>commentary ", "<|message|>", "<|call|>", "<|end|>", "<|", "[ARGS]", "f(a=1)",
        '{"name": "f", "arguments": {"a": 1}}', "<｜tool▁sep｜>", "```", "<|eot_id|>", ", ", ":", "é",
    ]  # fmt: skip
    draw = random.Random(0)
    for text in ["to=f[TOOL_CALLS]<|", *("".join(draw.choices(pieces, k=draw.randint(1, 7))) for _ in range(300))]:
        found, known = turn_calls(text, SCHEMAS), CallStart()
        for call in found.calls:
            json.dumps(call.arguments, allow_nan=False)
        said = max(known.of(text[:size]) for size in range(1, len(text) + 1))
        assert said <= found.start or not (found.calls and found.marked), text


@pytest.mark.parametrize("size", [1, 3, 40])
@pytest.mark.parametrize("thinking", ["hello [THINK]", "<|channel|>analysis<|message|>Now."])
def test_a_call_behind_thinking_that_never_closes(thinking, size):
    """A header of Harmony may be longer than any mark."""
    call = "<|channel|>commentary to=functions.a_rather_long_function_name <|constrain|>json<|message|>{}<|call|>"
    known, text = CallStart(), thinking + call
    start = turn_calls(text, SCHEMAS).start
    assert start == len(thinking)
    assert all(known.of(text[:end]) <= start for end in range(0, len(text) + size, size))


@pytest.mark.parametrize("opening", ["", "<tool_call>", "<|channel|>", "<think>", "<think><tool_call>", "a" * 300])
def test_a_long_answer_costs_its_length(opening):
    known, text, times = CallStart(), opening, []
    for _ in range(2):
        started = time.process_time()
        for _ in range(500):
            text += "words of an answer " * 4
            known.of(text)
        times.append(time.process_time() - started)
    assert times[1] < 2 * times[0] + 0.1


def test_an_answer_of_space_costs_its_length():
    known, started = CallStart(), time.process_time()
    for end in range(0, 20_000, 10):
        assert known.of(" " * end) == 0
    assert known.of(" " * 20_000 + "x") == 20_001 and time.process_time() - started < 1.0


def test_thoughts_before_a_call_cost_their_length():
    text, started = "<think></think>" * 4000, time.process_time()
    assert turn_calls(f'{text}<tool_call>{{"name": "f", "arguments": {{}}}}</tool_call>').start == len(text)
    assert time.process_time() - started < 2.0


def test_arguments_that_are_nested_too_deep_are_an_error():
    """A copy of the message for a reward, its JSON in a table, or a template would fail on them, and end the run."""
    for depth in (60, 70, 900):
        nested = '{"a":' * depth + "1" + "}" * depth
        call = f'{{"name": "f", "arguments": {nested}}}'
        for text in (f"<tool_call>{call}</tool_call>", call):
            (found,), message = parse_tool_calls(text), turn_message(text, text)
            assert (found.error is None) is ("tool_calls" in message) is (found.arguments != {}) is (depth < 64)
    (call,) = parse_tool_calls(f"<|tool_call_start|>[f(a={'[' * 80}{']' * 80})]<|tool_call_end|>")
    assert call.error == "the arguments of f are nested more than 64 deep"


def test_types_are_those_of_the_schemas():
    """Without one, JSON that is no text is read as such."""

    def value(text, schema=None):
        properties = {} if schema is None else {"properties": {"x": schema}}
        schemas = [{"name": "f", "parameters": {"type": "object", **properties}}]
        call = f"<tool_call><function=f><parameter=x>\n{text}\n</parameter></function></tool_call>"
        ((name, arguments, error, _),) = parse_tool_calls(call, schemas)
        assert (name, error) == ("f", None)
        return arguments["x"]

    text, number = {"type": "string"}, {"type": "integer"}
    assert [value(each) for each in ("5", "a", '"5"', "[1, 2", "True", "null", "NaN", "1e999")] == [
        5, "a", '"5"', "[1, 2", True, None, "NaN", "1e999",
    ]  # fmt: skip
    assert [value(each, text) for each in ("5", "null", "[1]", "True")] == ["5", "null", "[1]", "True"]
    assert [value(each, number) for each in ("5", "five", "1" * 5000)] == [5, "five", "1" * 5000]
    assert value("null", {**text, "nullable": True}) is value("None", {"anyOf": [text, {"type": "null"}]}) is None
    assert value("5", {"anyOf": [text, {"type": "null"}]}) == value("5", {"enum": ["5", 6]}) == "5"
    assert value("6", {"enum": ["5", 6]}) == value("6", {"type": ["integer", "string"]}) == 6
    assert value("[1, {'a': None}]", {"type": "array"}) == [1, {"a": None}]
    assert value("{1, 2}", {"type": "array"}) == "{1, 2}"
    assert value("[" * 20_000, {"type": "array"}) == "[" * 20_000
    assert value("7", {"type": 5}) == value("7", True) == value("7", {"anyOf": 3, "enum": "7"}) == 7
    assert value("\n a\n", text) == "\n a\n"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<tool_call><function=f><parameter=x>1</parameter></tool_call>", "is not well formed at '<function=f>"),
        ("<tool_call><function=f>x=1</function></tool_call>", "is not well formed at 'x=1'"),
        ("<tool_call>f<arg_key>x</arg_key></tool_call>", "is not well formed at '<arg_key>x</arg_key>'"),
        ("<seed:tool_call></seed:tool_call>", "is not well formed at ''"),
        ("<minimax:tool_call>f(1)</minimax:tool_call>", "is not well formed at 'f(1)'"),
        ("<|tool_call>call:f{x:[1}<tool_call|>", "is not JSON"),
        ("<|tool_call>f{}<tool_call|>", "is not call:NAME{KEY:VALUE}"),
        ("[TOOL_CALLS]f", "is not JSON"),
        ("[TOOL_CALLS] f[ARGS]{oops", "is not JSON"),
        ("<|tool_call_start|>[f(1)]<|tool_call_end|>", "the call f(1) has arguments without a name"),
        ("<|tool_call_start|>[f(**{'x': 1})]<|tool_call_end|>", "has arguments without a name"),
        ("<|tool_call_start|>[f(x=g())]<|tool_call_end|>", "is not Python: malformed node"),
        ("<|tool_call_start|>[f(x=b'1')]<|tool_call_end|>", "is not Python: Object of type bytes"),
        ("<|tool_call_start|>[f(x={1})]<|tool_call_end|>", "is not Python: Object of type set"),
        ("<|tool_call_start|>[f]<|tool_call_end|>", "is not Python: f is no call"),
        ("<|tool_call_start|>x = f()<|tool_call_end|>", "is not Python: x = f() is no call"),
        ("<|tool_call_start|>[f(x=" + "[" * 5000, "is not Python"),
        ("<|tool_call_start|>[f(x=" + "-" * 100_000 + "1)]", "is not Python"),
        ("<|python_start|>print the time<|python_end|>", "is not JSON with name and parameters"),
        ("<|python_tag|>", "is not JSON with name and parameters"),
        ("<function_calls>f(x=1</function_calls>", "is not Python"),
        ("<｜tool▁calls▁begin｜>f(1)<｜tool▁calls▁end｜>", "are not JSON"),
        ("<|tool_call|>f(1)", "is not JSON"),
        ("<|START_ACTION|>[1]<|END_ACTION|>", "is not an object with name and arguments"),
        ("<|tool_call_begin|>functions.f:0<|tool_call_end|>", "the arguments  are not JSON"),
        ('<|tools_prefix|>[{"f": {"x": 1}, "g": {}}]', "is not an object with name and arguments"),
        ('<|tools_prefix|>[{"f": 1}]', "the arguments 1 are not an object"),
        (f"{COMMENTARY}f <|constrain|>json<|message|>{{x<|call|>", "the arguments {x are not JSON"),
        (f"{COMMENTARY}f <|constrain|>json", "is cut off before <|message|>"),
        ('<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "is not JSON: NaN is no finite number"),
        ('[TOOL_CALLS]f[ARGS]{"x": -1e999}', "is not JSON: -1e999 is no finite number"),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": Infinity}"}</tool_call>', "Infinity} are not JSON"),
        ("<|tool_call_start|>[f(x=1e999)]<|tool_call_end|>", "is not Python: Out of range float values"),
    ],
    ids=range(33),
)  # fmt: skip
def test_what_is_meant_but_malformed_has_an_error(text, error):
    (call,) = parse_tool_calls(text)
    assert error in (call.error or "")


@pytest.mark.parametrize(
    "text",
    [
        "[tell_time(), other()]",  # not offered
        "[tell_time()] is how",
        "Call tell_time() or [tell_time()].",
        "Give it to=functions.f<|end|>",
        "<|channel|>analysis<|message|>to=functions.f<|end|><|start|>assistant<|channel|>final<|message|>to=f {}",
        "<|channel|>analysis<|message|>A <tool_call>?<|end|><|start|>assistant<|channel|>final<|message|>No.",
        "[THINK]A [TOOL_CALLS]?[/THINK]No.",
        "<|channel>thought\nA <|tool_call>?<channel|>No.",
        "<|tool_call|>[]",  # of Granite, which needs none
        "[1, 2]",
    ],
)
def test_answers_are_no_calls(text):
    assert parse_tool_calls(text, SCHEMAS) == []


def test_a_call_that_writes_the_end_of_a_call():
    """In a text of its JSON, which alone has it as it is."""
    text = {"text": 'say "</tool_call>", or <tool_call>'}
    one, other = (f"<tool_call>\n{json.dumps({'name': 'find_all', 'arguments': x})}\n</tool_call>" for x in (text, {}))
    assert parse_tool_calls(f"{one}\n{other}", SCHEMAS) == [ToolCall("find_all", text), ToolCall("find_all", {})]
    assert parse_tool_calls(one.removesuffix("</tool_call>"), SCHEMAS) == [ToolCall("find_all", text)]


def test_a_call_that_writes_the_end_of_thinking():
    """Is no thinking; a prompt may have opened one, of which the turn has the end alone."""
    call = '<tool_call>{"name": "find_all", "arguments": {"text": "a </think> b"}}</tool_call>'
    wanted = of(("find_all", {"text": "a </think> b"}))
    assert parse_tool_calls(call) == parse_tool_calls(f"Hm.</think>{call}") == wanted
    assert parse_tool_calls(f"<think>Hm.</think>{call}") == wanted
    assert parse_tool_calls("<think>So: " + FORMS["hermes"], SCHEMAS) == of(A, B)  # thinking that never ends


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ("<think>x</think>Now.\n\n" + FORMS["qwen3-coder"], "<think>x</think>Now."),
        ("I look. " + FORMS["lfm2"], "I look."),
        (FORMS["llama 4"], ""),
        (f"<|channel|>analysis<|message|>Think.<|end|><|start|>assistant{FORMS['gpt-oss']}", ""),
        ("<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
         f"<|start|>assistant{FORMS['gpt-oss']}", "I look."),
    ],
    ids=range(5),
)  # fmt: skip
def test_what_a_turn_says_before_its_calls(raw, said):
    message = turn_message("", raw, SCHEMAS)
    assert message["content"] == said
    assert [tuple(call["function"].values()) for call in message["tool_calls"]] == [A, B]
