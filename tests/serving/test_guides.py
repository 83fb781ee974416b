"""Guided answers: each request has its own guide, and every answer that is whole follows it."""

import json
import re

import httpx
import jsonschema
import pytest

pytest.importorskip("starlette")
pytest.importorskip("llguidance")

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "sort:1="}]
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "count": {"type": "integer", "minimum": 3, "maximum": 99},
        "kind": {"enum": ["a", "b"]},
        "more": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
POINT = {
    "$defs": {"at": {"type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
                     "required": ["x"], "additionalProperties": False}},
    "type": "object",
    "properties": {"from": {"$ref": "#/$defs/at"}, "to": {"$ref": "#/$defs/at"}},
    "required": ["from", "to"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "move", "parameters": POINT}},
    {"type": "function", "function": {"name": "stop"}},
]
TOOLS[1]["function"]["parameters"] = {"type": "object", "properties": {}, "additionalProperties": False}


def is_item(text: str) -> bool:
    jsonschema.validate(json.loads(text), ITEM)
    return True


def is_point(text: str) -> bool:
    jsonschema.validate(json.loads(text), POINT)
    return True


BRACKETS = 'start: "(" start ")" | /[0-9]/'
CHOICES = ["yes", "no", 'it\'s "so"\n', "/\\d+/"]
# Fields of a body, and what the text of an answer must be.
GUIDES = (
    ({"structured_outputs": {"regex": r"[a-c]{2,5}-(\d{3}|/x)"}}, re.compile(r"[a-c]{2,5}-(\d{3}|/x)").fullmatch),
    ({"guided_regex": "(ab|c){1,4}é?"}, re.compile("(ab|c){1,4}é?").fullmatch),
    ({"structured_outputs": {"choice": CHOICES}}, CHOICES.__contains__),
    ({"guided_choice": ["left", "right"]}, ["left", "right"].__contains__),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "item", "schema": ITEM}}}, is_item),
    ({"guided_json": json.dumps(ITEM)}, is_item),
    ({"structured_outputs": {"json": POINT}}, is_point),
    ({"guided_grammar": BRACKETS}, lambda text: text.count("(") == text.count(")") and text.strip("()").isdigit()),
    ({"guided_grammar": 'root ::= "<" root ">" | [0-9]'}, re.compile(r"<*\d>*").fullmatch),
    ({}, lambda text: True),
)


@pytest.fixture(scope="module")
def web(running):
    with httpx.Client(base_url=running.url, timeout=240, limits=httpx.Limits(max_connections=None)) as client:
        yield client


def asked(web: httpx.Client, path: str, body: dict) -> dict:
    answer = web.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def white(sorter) -> dict[str, float]:
    """A bias against white space, of which a model that knows no JSON would write more than it has tokens for."""
    ids = [sorter.tokenizer(text, add_special_tokens=False).input_ids for text in (" ", "\n")]
    return {str(number): -8.0 for each in ids for number in each}


def follow(web: httpx.Client, each: int, seed: int, white: dict[str, float]) -> int:
    """Asks each guide so often, all at once; the number of answers that were guided, whole and right."""
    from concurrent.futures import ThreadPoolExecutor

    def one(number: int) -> int:
        fields, is_right = GUIDES[number % len(GUIDES)]
        body = {"max_tokens": 110, "seed": seed + number, "temperature": 1.2, "logit_bias": white, **fields}
        if number % 2:
            choice = asked(web, CHAT, {"messages": MESSAGES, **body})["choices"][0]
            text = choice["message"]["content"]
        else:
            choice = asked(web, TEXT, {"prompt": "x", **body})["choices"][0]
            text = choice["text"]
        assert choice["finish_reason"] == "stop" or not fields, (fields, text)
        assert is_right(text), (fields, text)
        return bool(fields)

    with ThreadPoolExecutor(16) as pool:
        return sum(pool.map(one, range(each * len(GUIDES))))


@pytest.mark.slow
def test_answers_of_mixed_guides_all_parse(web, white):
    """Ten guides and none, side by side in one grid."""
    assert follow(web, 12, 0, white) == 12 * (len(GUIDES) - 1) > 100


@pytest.mark.slow
def test_a_thousand_of_a_thousand_parse(web, white):
    assert follow(web, 112, 10_000, white) >= 1000


@pytest.mark.slow
def test_guided_rows_do_not_change_others(web, sorter):
    """A row of no guide beside guided ones is what it is alone, and a guided one too; log-probs are the policy's."""
    from concurrent.futures import ThreadPoolExecutor

    plain = {"prompt": "x", "max_tokens": 60, "seed": 3, "ignore_eos": True, "return_token_ids": True}
    guided = {"prompt": "y", "max_tokens": 60, "seed": 4, "guided_json": POINT, "return_token_ids": True, "logprobs": 0}
    alone = [asked(web, TEXT, body)["choices"][0] for body in (plain, guided)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda body: asked(web, TEXT, body)["choices"][0], (plain, guided, guided, plain)))
    assert [choice["token_ids"] for choice in together] == [alone[i]["token_ids"] for i in (0, 1, 1, 0)]
    import numpy as np

    ids = alone[1]["token_ids"]
    logits = np.asarray(sorter(np.asarray([[*alone[1]["prompt_token_ids"], *ids]])))[0, -len(ids) - 1 : -1]
    logps = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    np.testing.assert_allclose(alone[1]["logprobs"]["token_logprobs"], logps[range(len(ids)), ids], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "move"}}])
def test_tools_that_must_be_called(web, choice):
    """Calls of the tools' schemas, whose references to their own parts are kept."""
    no_space = {str(ord(letter)): -100 for letter in " \n"}  # between the tokens of JSON, where rows are short
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "n": 6}
    body |= {"logit_bias": no_space}
    names: set[str] = set()
    for found in asked(web, CHAT, {**body, "max_tokens": 100, "seed": 5})["choices"]:
        assert found["finish_reason"] == "tool_calls" and found["message"]["content"] is None
        (call,) = found["message"]["tool_calls"]
        names.add(call["function"]["name"])
        schema = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
        jsonschema.validate(json.loads(call["function"]["arguments"]), schema[call["function"]["name"]])
    assert names == {"move"} if choice != "required" else names <= {"move", "stop"}


@pytest.mark.slow
def test_json_or_a_call(web):
    """With tools that may be called, a guided answer is of the format, or a call."""
    response = {"type": "json_schema", "json_schema": {"schema": ITEM}}
    body = {"messages": MESSAGES, "tools": TOOLS, "response_format": response, "parallel_tool_calls": True, "n": 6}
    for found in asked(web, CHAT, {**body, "max_tokens": 112, "seed": 8})["choices"]:
        message = found["message"]
        if not message.get("tool_calls") and found["finish_reason"] == "stop":
            assert is_item(message["content"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_regex": "(?=a)b"}, "guided_regex"),
        ({"guided_regex": 5}, "guided_regex"),
        ({"guided_regex": "a" * 70_000}, "guided_regex"),
        (
            {"guided_json": {"allOf": [{"anyOf": [POINT, ITEM, {"properties": {f"a{i}": {}}}]} for i in range(9)]}},
            "guided_json",
        ),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_grammar": "start: missing"}, "guided_grammar"),
        ({"guided_grammar": "(a)"}, "guided_grammar"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"not": {}}}, "guided_json"),
        ({"guided_json": {"$ref": "http://127.0.0.1/x"}}, "guided_json"),
        ({"guided_json": {"$ref": "file:///etc/passwd"}}, "guided_json"),
        ({"guided_json": {"minimum": 3, "maximum": 2, "type": "integer"}}, "guided_json"),
        ({"guided_json": json.loads('{"items":' * 200 + "{}" + "}" * 200)}, "guided_json"),
        ({"guided_regex": "a{1000000000}"}, "guided_regex"),
        ({"guided_json": ITEM, "guided_regex": "a"}, "guided_json"),
        ({"guided_json": ITEM, "ignore_eos": True}, "ignore_eos"),
        ({"guided_json": ITEM, "min_tokens": 4}, "min_tokens"),
        ({"structured_outputs": {"regex": "a", "json": ITEM}}, "structured_outputs"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs"),
        ({"structured_outputs": "a"}, "structured_outputs"),
    ],
    ids=range(26),
)
def test_guides_that_are_refused(web, fields, param):
    answer = web.post(TEXT, json={"prompt": "x", "max_tokens": 5, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param and param in answer.json()["error"]["message"]
