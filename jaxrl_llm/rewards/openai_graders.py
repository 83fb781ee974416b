"""OpenAI's graders of reinforcement fine-tuning as they are written there, in JSON: string_check, python and multi.

{"type": "string_check", "input": "{{sample.output_text}}", "reference": "{{item.answer}}", "operation": "eq"}
"""

import ast
import json
import math
import re
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.config.user_code import contained, error_text
from jaxrl_llm.rewards.signatures import RewardError, Sample, is_async, openai_sample, shorten

OF_SAMPLE = ("output_text", "output_json", "output_tools", "choices")
VARIABLE = re.compile(rf"\{{\{{\s*(item|sample(?=\.(?:{'|'.join(OF_SAMPLE)})\b))((?:\.\w+|\[\d+\])+)\s*\}}\}}")
CHECKS: dict[str, Callable[[str, str], bool]] = {
    "eq": lambda text, reference: text == reference,
    "ne": lambda text, reference: text != reference,
    "neq": lambda text, reference: text != reference,
    "like": lambda text, reference: reference in text,
    "ilike": lambda text, reference: reference.lower() in text.lower(),
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min, "max": max, "abs": abs, "floor": math.floor, "ceil": math.ceil,
    "exp": math.exp, "sqrt": math.sqrt, "log": math.log,
}  # fmt: skip
ARITHMETIC = (ast.Expression, ast.Load, ast.UAdd, ast.USub, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow)
ASKS = "the reward judge asks a model: judge(url=..., model=..., template=...)"
INSTEAD = {
    "score_model": ASKS,
    "label_model": ASKS,
    "text_similarity": "write a function of completions and of the column with the reference",
}
Grade = Callable[[Sample], Any]


class OpenAIGrader:
    """A grader in OpenAI's JSON, a dictionary or a file: the scores of `string_check`, `python` or `multi`.

    Templates read `{{item.COLUMN}}` and `{{sample.output_text}}`, `output_json`, `output_tools` and `choices`. What a
    completion lacks (`{{sample.output_json.answer}}` of a text that is no JSON) makes a string_check 0; a column that
    is null gives no reward, None. The `source` of `python`, a function `grade(sample, item)`, runs like any reward
    function of yours. Of `multi` the score of each grader not called "score" is logged as `rewards/<name>/<grader>`;
    where one is None, so is the reward.

    Raises RewardError: another type, a key that is missing, a variable or a formula that is none.
    """

    def __init__(self, grader: str | Mapping[str, Any], name: str | None = None):
        if isinstance(grader, str):
            path = Path(grader).expanduser()
            if not path.is_file():
                raise RewardError(f"openai_grader: there is no file {path} (looked in {Path.cwd()})")
            try:
                grader = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise RewardError(f"openai_grader: {path} is no JSON: {error}") from error
        # A job's method holds it under this key.
        if isinstance(grader, Mapping) and "type" not in grader and isinstance(grader.get("grader"), Mapping):
            grader = grader["grader"]
        self.name = name or (isinstance(grader, Mapping) and grader.get("name")) or "openai_grader"
        self.grade: Grade = _grader(grader, self.name)


def _grader(spec: Any, name: str) -> Grade:
    kind = spec.get("type") if isinstance(spec, Mapping) else None
    made = {"string_check": _string_check, "python": _python, "multi": _multi}.get(str(kind))
    if made is None:
        raise RewardError(
            f"the grader {name!r} is {shorten(spec, 60)}; its type is one of string_check, python and multi"
            + (f". For {kind}, {INSTEAD[kind]}" if kind in INSTEAD else "")
        )
    try:
        return made(spec, name)
    except KeyError as error:
        raise RewardError(f"the grader {name!r} of type {kind} has no {error.args[0]!r}") from None


def _string_check(spec: Mapping[str, Any], name: str) -> Grade:
    text, reference, check = spec["input"], spec["reference"], CHECKS.get(str(spec["operation"]))
    if check is None:
        raise RewardError(f"the operation of the grader {name!r} is {spec['operation']!r}; it is {', '.join(CHECKS)}")
    for template in (text, reference):
        if not isinstance(template, str):
            raise RewardError(f"the grader {name!r} compares {template!r}, which is no text")
        if other := re.search(r"\{\{.*?\}\}", VARIABLE.sub(" ", template), re.DOTALL):
            raise RewardError(
                f"the grader {name!r} has {other[0]}, which is no variable; they are {{{{item.COLUMN}}}} and "
                f"{{{{sample.X}}}} with X of {', '.join(OF_SAMPLE)}, and what those hold: .KEY or [INDEX]"
            )

    def grade(sample: Sample) -> float | None:
        values, lacks = {"item": sample.columns, "sample": openai_sample(sample)}, set[str]()
        given, wanted = _filled(text, values, name, lacks), _filled(reference, values, name, lacks)
        if lacks:
            return None if "item" in lacks else 0.0
        return float(check(given, wanted))

    return grade


def _filled(template: str, values: Mapping[str, Any], name: str, lacks: set[str]) -> str:
    """The template with its variables; `lacks` gets the name of a value that does not have one, or has a null there.

    Raises RewardError for a key that the item does not have.
    """

    def value(match: re.Match[str]) -> str:
        found = values[match[1]]
        for key, index in re.findall(r"\.(\w+)|\[(\d+)\]", match[2]):
            try:
                found = found[int(index)] if index else found[key]
            except (LookupError, TypeError):
                if match[1] == "item" and found is not None:
                    known = ", ".join(values["item"]) or "none"
                    raise RewardError(
                        f"the grader {name!r} reads {match[0]}, which the row lacks; its columns are {known}"
                    ) from None
                found = None
                break
        if found is None:
            lacks.add(match[1])
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)

    return VARIABLE.sub(value, template)


def _python(spec: Mapping[str, Any], name: str) -> Grade:
    source, module = spec["source"], types.ModuleType(f"<grader {name}>")
    sys.modules[module.__name__] = module  # where dataclasses, among others, look up the names of their annotations
    try:
        with contained():
            exec(compile(source, module.__name__, "exec"), vars(module))
    except Exception as error:
        raise RewardError(f"the source of the grader {name!r} raised {error_text(error)}") from error
    function: Any = vars(module).get("grade")
    if not callable(function) or is_async(function):
        raise RewardError(f"the source of the grader {name!r} defines no plain function grade(sample, item)")
    return lambda sample: function(openai_sample(sample), sample.columns)


def _multi(spec: Mapping[str, Any], name: str) -> Grade:
    if not (isinstance(spec["graders"], Mapping) and spec["graders"]):
        raise RewardError(f"graders of the grader {name!r} is {shorten(spec['graders'], 60)}; it has graders by name")
    graders = {each: _grader(inner, f"{name}/{each}") for each, inner in spec["graders"].items()}
    formula = str(spec["calculate_output"]).strip()
    try:
        tree = ast.parse(formula.replace("^", "**"), mode="eval")
    except (SyntaxError, ValueError) as error:
        raise RewardError(f"calculate_output of the grader {name!r} is {formula!r}, which is no formula") from error
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=function)):
                is_known = function in FUNCTIONS
            case ast.Name(id=grader):
                is_known = grader in graders or node in called
            case ast.Constant(value=number):
                is_known = type(number) in (int, float)
            case ast.BinOp(op=operation) | ast.UnaryOp(op=operation):
                is_known = isinstance(operation, ARITHMETIC)
            case _:
                is_known = isinstance(node, ARITHMETIC)
        if not is_known:
            raise RewardError(
                f"calculate_output of the grader {name!r} has {ast.unparse(node)}; it may have the graders "
                f"{', '.join(graders)}, numbers, + - * / ^ and {', '.join(f'{each}()' for each in FUNCTIONS)}"
            )
    code = compile(tree, f"<grader {name}>", "eval")

    def grade(sample: Sample) -> dict[str, Any]:
        scores = {each: inner(sample) for each, inner in graders.items()}
        totals = {each: score["score"] if isinstance(score, Mapping) else score for each, score in scores.items()}
        lacks = any(total is None for total in totals.values())
        # Last, for a grader may have this name too.
        return {**totals, "score": None if lacks else eval(code, {"__builtins__": {}}, FUNCTIONS | totals)}

    return grade
