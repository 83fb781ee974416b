"""Rewards for form and for mathematical answers."""

import json

import pytest

from jaxrl_llm.rewards import formats as f
from jaxrl_llm.rewards import puzzles
from jaxrl_llm.rewards.built_in import BUILT_IN
from jaxrl_llm.rewards.math import math_accuracy, numeric_answer
from jaxrl_llm.rewards.signatures import RewardError


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("\n<think>\na\n</think>\n\n<answer>\nb\n</answer>\n", 1.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer>!", 0.0),
        ("<think>a<think>b</think></think><answer>c</answer>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think> </think><answer>b</answer>", 0.0),
        ("<think>a</think><answer></answer>", 0.0),
    ],
)
def test_think_answer_format(text, reward):
    assert f.think_answer_format([text, [{"role": "assistant", "content": text}]]) == [reward] * 2


def test_regex_match():
    assert f.regex_match(["a1\nb", "b"], pattern=r"a\d.b") == [1.0, 0.0]
    assert f.regex_match(["xay", "a"], pattern="a", whole=True) == [0.0, 1.0]
    with pytest.raises(RewardError, match=r"regex_match: '\(' is no regular expression"):
        f.regex_match(["a"], pattern="(")


def test_a_pattern_that_takes_for_ever_scores_zero_with_a_warning(monkeypatch):
    monkeypatch.setattr(f, "ROW_SECONDS", 0.5)
    texts = ["aaa", "a" * 40 + "!", "aa"]
    with pytest.warns(UserWarning, match=r"the pattern '\^\(a\+\)\+\$' takes more than 0.5 seconds, .*, on 'aaa"):
        assert f.regex_match(texts, pattern="^(a+)+$") == [1.0, 0.0, 1.0]
    schema = {"type": "string", "pattern": "^(a+)+$"}
    with pytest.warns(UserWarning, match="json_schema: the schema takes more than"):
        assert f.json_schema([json.dumps(text) for text in texts], schema=schema) == [1.0, 0.0, 1.0]


def test_json_that_is_nested_too_deep_fits_nothing():
    deep = ["[" * 100_000, "[" * 900 + "]" * 900, '{"a":' * 5000, '{"a":' * 900 + "1" + "}" * 900]
    tree = {"$defs": {"tree": {"items": {"$ref": "#/$defs/tree"}}}, "$ref": "#/$defs/tree", "type": "array"}
    for schema in ({"type": "integer"}, tree):
        assert f.json_schema([*deep, "[[]]"], schema=schema)[::2] == [0.0, 0.0, float(schema is tree)]
    assert f.json_schema(["1" + "0" * 400], schema={"multipleOf": 0.5}) == [0.0]


def test_lengths_count_tokens():
    ids = [[0] * n for n in (1, 2, 4, 5)]
    assert f.length_range(ids, minimum=2, maximum=4) == [0.0, 1.0, 1.0, 0.0]
    assert f.length_penalty(ids, per_token=-0.5) == [-0.5, -1.0, -2.0, -2.5]


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "pattern": "^[A-Z]"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "pet": {"anyOf": [{"type": "null"}, {"type": "string"}]},
    },
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        ({"name": "Ada", "age": 36, "tags": ["a", "b"], "pet": None}, True),
        ({"name": "Ada", "age": 36.0}, True),
        ({"name": "Ada", "age": 36.5}, False),
        ({"name": "Ada", "age": True}, False),
        ({"name": "Ada", "age": -1}, False),
        ({"name": "ada"}, False),
        ({"name": ""}, False),
        ({"age": 3}, False),
        ({"name": "Ada", "other": 1}, False),
        ({"name": "Ada", "tags": ["c"]}, False),
        ({"name": "Ada", "tags": ["a", "a", "a"]}, False),
        ({"name": "Ada", "pet": 3}, False),
        (["Ada"], False),
    ],
)
def test_json_schema(value, fits):
    text = json.dumps(value)
    completions = [text, f"Sure:\n```json\n{text}\n```", f"{text}, or not"]
    expected = [float(fits)] * (3 if isinstance(value, dict) else 2)
    assert f.json_schema(completions[: len(expected)], schema=PERSON) == expected


def test_json_schema_of_a_list_in_a_fenced_block():
    """Not that of an object in it, nor of what stands before the last object."""
    schema = {"type": "array", "items": {"type": "object"}}
    texts = ['```json\n[{"a": 1}, {"a": 2}]\n```\nDone.', "```\n[]\n```", '```\n[]\n```\nNo: {"a": 1}', "```\n[{]\n```"]
    assert f.json_schema(texts, schema=schema) == [1.0, 1.0, 0.0, 0.0]
    assert f.json_schema(texts[:1], schema={"type": "object"}) == [0.0]


@pytest.mark.parametrize(
    ("schema", "value", "fits"),
    [
        ({"const": 1}, 1.0, True),
        ({"const": 1}, True, False),
        ({"oneOf": [{"type": "integer"}, {"minimum": 5}]}, 3, True),
        ({"oneOf": [{"type": "integer"}, {"minimum": 5}]}, 7, False),
        ({"allOf": [{"type": "integer"}, {"not": {"const": 3}}]}, 3, False),
        ({"type": ["string", "null"]}, None, True),
        (True, [1], True),
        ({"additionalProperties": {"type": "integer"}}, {"a": 1, "b": 2}, True),
        ({"additionalProperties": {"type": "integer"}}, {"a": "x"}, False),
        ({"enum": [[1, {"a": True}]]}, [1, {"a": True}], True),
        ({"enum": [[1, {"a": True}]]}, [1, {"a": 1}], False),
    ],
)
def test_json_schema_keywords(schema, value, fits):
    assert f.json_schema([json.dumps(value)], schema=schema) == [float(fits)]


def test_json_schemas_of_a_column_and_unknown_ones():
    schemas = ['{"type": "integer"}', {"type": "string"}, None]
    assert f.json_schema(["3", "3", "3"], schema=None, **{"column": "shape", "shape": schemas}) == [1.0, 0.0, None]
    assert f.json_schema(["no json"], schema={}) == [0.0]
    with pytest.raises(RewardError, match=r"json_schema does not know the keyword 'multipleof' \(at \$.anyOf\[0\] of"):
        f.json_schema(["3"], schema={"anyOf": [{"multipleof": 2}]})
    with pytest.raises(RewardError, match="'int' is not valid"):
        f.json_schema(["3"], schema={"type": "int"})
    with pytest.raises(RewardError, match="needs the option schema, or the column 'schema'"):
        f.json_schema(["3"])


def test_json_schema_references():
    """A reference inside the schema is followed; one to another document is an error and not a download."""
    schema = {"$defs": {"even": {"multipleOf": 2}}, "items": {"$ref": "#/$defs/even"}}
    assert f.json_schema(["[2, 4]", "[3]"], schema=schema) == [1.0, 0.0]
    with pytest.raises(Exception, match="Unresolvable"):
        f.json_schema(["3"], schema={"$ref": "http://127.0.0.1:9/schema.json"})


def test_nan_is_no_number_of_a_schema():
    assert f.json_schema(["NaN", "Infinity", "1"], schema={"type": "number"}) == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("so it is 1,234.50 in all", "1234.5", 1.0),
        ("first 3 then 4", 4, 1.0),
        ("first 4 then 3", 4, 0.0),
        ("none", "4", 0.0),
        ("-0.5", "-.5", 1.0),
        ("1e3", "1000", 1.0),
        ("3.0000001", "3", 1.0),
        ("3.001", "3", 0.0),
        ("4", "2 + 2 = 4", 1.0),
        ("4", None, None),
    ],
)
def test_numeric_answer(completion, answer, reward):
    assert numeric_answer([completion], [answer]) == [reward]


def test_numeric_answer_without_a_number():
    assert numeric_answer(["3.01"], [3], tolerance=0.01) == [1.0]
    with pytest.raises(RewardError, match="the answer of row 0, 'four', holds no number"):
        numeric_answer(["4"], ["four"])


def test_math_accuracy():
    pytest.importorskip("math_verify")
    completions = [r"so \boxed{0.5}", r"\boxed{\frac{2}{4}}", r"\boxed{1/3}", "nothing", r"\boxed{0.5}", r"\boxed{3}"]
    answers = [r"\frac{1}{2}"] * 4 + [None, "word"]
    # A word is a product of variables to the parser, which 3 is not.
    assert math_accuracy(completions, answers) == [1.0, 1.0, 0.0, 0.0, None, 0.0]
    assert math_accuracy([r"\boxed{x^2 + 2x + 1}"], [r"$(x+1)^2$"]) == [1.0]
    boxes = ["41=42", "x=42", "2+40=42", "42 or 43", r"42 \text{ or } 43", r"\pm 42", "42} or \\boxed{43", "1" * 2000]
    completions = [rf"\boxed{{{box}}}" for box in boxes]
    assert math_accuracy(completions, ["42"] * 8) == [0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert math_accuracy([r"\boxed{42} \boxed{43}", r"\boxed{x = \pm 1}"], ["43", r"x = \pm 1"]) == [1.0, 1.0]


def test_math_accuracy_reads_numbers_as_boxes_do():
    """math-verify alone finds no number in `\\$18.90`, 0 in `0.\\overline{3}` and `5 000`, 235 in `1\\,234`."""
    pytest.importorskip("math_verify")
    numbers = {
        r"\$18.90": "18.9", r"\$32,\!348": "32348", r"0.\overline{3}": r"\frac13", r"0.1\dot{6}": r"\frac16",
        "5 000": "5000", r"1\,234": "1234", "1e5": "100000", "2 3/4": r"\frac{11}{4}", "2.5 million": "2500000",
        "5 dollars": "5", "42 km/h": "42", "5 m/s": "5", "12 000 000": "12000000", "7.": "7",
    }  # fmt: skip
    texts = {r"\lbrace 1, 2\rbrace": r"\{1,2\}", r"\varnothing": r"\emptyset", "A.": r"\text{A}", r"x = \$5": "5"}
    texts |= {"√2/2": r"\frac{\sqrt{2}}{2}", "3√(x+1)": r"3\sqrt{x+1}", "(0, ∞)": r"(0,\infty)", "５": "5"}
    bare = {
        r"-\frac\pi4": r"-\frac{\pi}{4}",
        r"\dfrac{\sqrt{3}}x": r"\frac{\sqrt3}{x}",
        r"\sqrt[3]2\sqrt\pi": r"\sqrt[3]{2}\sqrt{\pi}",
    }
    pairs = [pair for one, other in (numbers | texts | bare).items() for pair in ((one, other), (other, one))]
    got = math_accuracy([rf"\boxed{{{one}}}" for one, _ in pairs], [other for _, other in pairs])
    assert not [pair for pair, each in zip(pairs, got, strict=True) if each != 1.0]
    wrong = [
        ("0", r"0.\overline{3}"),
        ("235", r"1\,234"),
        ("0", "5 000"),
        ("5/4", "2 3/4"),
        ("1.2", r"\lbrace 1,2\rbrace"),
        (r"\frac\pi2", r"\frac\pi4"),
    ]
    assert math_accuracy([rf"\boxed{{{box}}}" for box, _ in wrong], [answer for _, answer in wrong]) == [0.0] * 6


def test_math_accuracy_behind_the_thoughts_is_that_of_trl():
    rewards = pytest.importorskip("trl.rewards")
    pytest.importorskip("math_verify")
    texts = [
        r"<think>a</think> \boxed{42}",
        r"\boxed{42}</think> \boxed{41}",
        r"<think>\boxed{42}",
        "x</think>",
        r"a</think>b</think>\boxed{42}",
    ]
    theirs = rewards.reasoning_accuracy_reward([[{"role": "assistant", "content": text}] for text in texts], ["42"] * 5)
    assert math_accuracy(texts, ["42"] * 5, after="</think>") == theirs == [1.0, 0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("reward", "cases"),
    [
        (1.0, [
            ("24", r"A = \frac12 bh = 24"), ("5", "AB = AC = 5"), ("5", "x = y = 5"), (r"10\pi", r"S = 2\pi r = 10\pi"),
            ("1,2", "x=1, x=2"), ("(1,2)", "x=1, y=2"), ("1,2", r"x=1 \text{ or } x=2"), ("1,2", r"1 \text{ and } 2"),
            (r"\{1,2\}", r"x=1 \text{ or } x=2"), (r"\{-2,2\}", r"\pm 2"), ("-2,2", r"x = \pm 2"), ("5", r"\theta = 5"),
            ("10", r"\sum_{k=1}^{4} k = 10"), ("20", r"\sum_{k=1}^{4} 5 = 20"), ("0.5", r"P(X=1) = 0.5"),
            ("12", r"A = 3 \cdot 4 = 12\text{ cm}^2"), ("1000", "10^3 = 1,000 = 1000"),
            ("2", r"\int_0^1 f(x) dx = 2"), ("2", "f(2) = 2"), ("5", "e = 5"),
            ("(1,2)", r"x = 1 \text{ and } y = 2"), (r"\frac12", r"P(A) = \frac12 = 0.5"),
        ]),
        (0.0, [
            ("42", "41=42"), ("42", "42 = 43 = 42"), ("42", "x = 41 = 42"),
            ("42", "41 = x = 42"), ("42", r"\text{total} = 41 = 42"),
            ("42", r"41 = 42\text{ cm}"), ("42", "41=42, 42"), ("1,2", "x = 1 = 3, x = 2"), ("42", "42 or 43"),
            ("42", r"42 \text{ and } 43"), ("2", r"\pm 2"), ("1,2", r"1 \text{ or } 3"), ("(1,2)", r"1 \text{ or } 2"),
            ("1,2", r"1 \text{ or } 2 \text{ or } 3"), ("42", "x=41, x=42"), ("x=5", "x=5 or x=6"),
        ]),
    ],
    ids=["right", "wrong"],
)  # fmt: skip
def test_math_accuracy_of_equations_and_several_answers(reward, cases):
    pytest.importorskip("math_verify")
    got = math_accuracy([rf"so \boxed{{{box}}}" for _, box in cases], [answer for answer, _ in cases])
    assert not [case for case, each in zip(cases, got, strict=True) if each != reward]
    assert math_accuracy(["The final answer is $41=42$."], ["42"]) == [0.0]


def test_math_accuracy_in_a_thread():
    pytest.importorskip("math_verify")
    from jaxrl_llm.rewards.runner import load_rewards

    rewards = load_rewards("math_accuracy", timeout=60.0)
    assert rewards(["p"], [r"\boxed{0.5}"], [[1]], {"answer": [r"\frac{1}{2}"]}).tolist() == [[1.0]]


def test_reasoning_gym_tasks_and_their_verifiers():
    pytest.importorskip("reasoning_gym")
    from jaxrl_llm.config.resolve import ConfigError
    from jaxrl_llm.data.tasks import generate

    rows = generate("reasoning_gym(leg_counting, size=4, seed=3)")
    other = generate("reasoning_gym(leg_counting, size=4, seed=3)", "test")
    assert len(rows) == 4 and not {row["prompt"] for row in rows} & {row["prompt"] for row in other}
    score = BUILT_IN["reasoning_gym_score"]
    places = [row["reasoning_gym"] for row in rows]
    completions = [rows[0]["answer"], f"<answer> {rows[1]['answer']} </answer>", "many", "0"]
    assert score(completions, places)[:2] == [1.0, 1.0] and max(score(completions, places)[2:]) < 0.5
    with pytest.raises(ConfigError, match="no reasoning-gym task 'leg_count'; the closest is leg_counting"):
        generate("reasoning_gym(leg_count)")

    rows = generate("reasoning_gym(polynomial_multiplication, size=8)")  # its entries differ between processes
    assert score([row["answer"] for row in rows], [row["reasoning_gym"] for row in rows]) == [1.0] * 8
    assert score([], []) == []


def test_answers_of_reasoning_gym_are_code_that_does_nothing(tmp_path, monkeypatch):
    pytest.importorskip("reasoning_gym")
    from jaxrl_llm.data.tasks import generate

    place = generate("reasoning_gym(countdown, size=1)")[0]["reasoning_gym"]
    texts = [f"__import__('os').open('{tmp_path}/proof', 65)", f"open('{tmp_path}/proof', 'w')", "1 + 1"]
    answers = [f"<answer>{text}</answer>" for text in texts]
    assert puzzles.reasoning_gym_score(answers, [place] * 3) == [0.01, 0.01, 0.05]
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(puzzles, "ROW_SECONDS", 0.5)
    with pytest.warns(UserWarning, match=r"reasoning_gym_score: '9\*\*9\*\*9' takes more than 0.5 seconds"):
        assert puzzles.reasoning_gym_score(["9**9**9"], [place]) == [0.0]


def test_answers_on_which_a_verifier_of_reasoning_gym_raises_or_finds_no_fault():
    pytest.importorskip("reasoning_gym")

    def scores(name, *answers):
        entry = puzzles._dataset(config := json.dumps({"name": name, "seed": 1, "size": 1}))[0]
        answers = [entry["answer"] if answer is None else answer for answer in answers]
        return puzzles.verified(answers, [config] * len(answers), [entry] * len(answers))

    assert scores("prime_factorization", "seven", "2 x x", None) == [0.0, 0.0, 1.0]
    assert scores("complex_arithmetic", "nan", "NaN+nanj", None) == [0.0, 0.0, 1.0]
    assert scores("n_queens", "[[valid_solutions[0]]]", None) == [0.0, 1.0]
    assert scores("string_insertion", "oracle_answer", None) == [0.0, 1.0]
    cheat = "(8 + 5 + 10 + 6)*(pi - pi) + factorial(floor(pi) + floor(pi)/floor(pi))"
    assert scores("puzzle24", cheat, None) == [0.01, 1.0]
    assert scores("simple_integration", "Integral(-34*x**7*8/15 - 5/4, x)", None) == [0.0, 1.0]
    config = json.dumps({"name": "prime_factorization"})
    with pytest.raises(KeyError):  # where a verifier fails whatever the answer is
        puzzles.verified(["2"], [config], [{}])


def test_what_may_be_evaluated():
    computes = ["82 + 20*(67 - 50)", "-9*x**8/10 + C", "sqrt(x)*exp(-x) + 3*Integral(x, x)", "5!/(2 + 3)", "1.5e3 % 2",
                "[['_', 'Q'], ['Q', '_']]", "_ Q\nQ _", "AABCD", '["1.0", "2"]', "(3 > 2) & (x != 1)"]  # fmt: skip
    does_more = ["open('f', 'w')", "__import__('os')", "(open)(5)", "[open][0](5)", "5!(3)", "x.real", "x. real",
                 "x.\\\nreal", "(x.#\nreal)", "\uff4fpen(5)", "(lambda: open)()", "max(1, key=open)", "f'{open}'",
                 "2open(5)", "exec (5)", "sqrt(eval(5))", "Function(5)"]  # fmt: skip
    assert not [answer for answer in computes if not puzzles.is_harmless(answer)]
    assert not [answer for answer in does_more if puzzles.is_harmless(answer)]
