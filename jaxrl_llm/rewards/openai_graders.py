"""OpenAI's graders of reinforcement fine-tuning and evaluations as they are written there, in JSON.

{"type": "string_check", "input": "{{sample.output_text}}", "reference": "{{item.answer}}", "operation": "eq"}
"""

import ast
import asyncio
import contextlib
import functools
import json
import math
import numbers
import re
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from jaxrl_llm.config.background import in_thread
from jaxrl_llm.config.resolve import closest
from jaxrl_llm.config.user_code import contained, error_text
from jaxrl_llm.rewards.endpoint import Endpoint, EndpointSpec, log_counts
from jaxrl_llm.rewards.replies import ReplyError, json_objects
from jaxrl_llm.rewards.signatures import RewardError, Sample, is_async, openai_sample, rows_of, shorten
from jaxrl_llm.rewards.similarity import METRICS

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
    "min": min, "max": max, "abs": abs, "floor": lambda x: float(math.floor(x)),
    "ceil": lambda x: float(math.ceil(x)),
    "exp": math.exp, "sqrt": math.sqrt, "log": math.log,
}  # fmt: skip
ARITHMETIC = (ast.Expression, ast.Load, ast.UAdd, ast.USub, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow)
INSTEAD = {
    "endpoint": "write an async function grade(sample, item) that asks it, and name its file, grader.py:grade",
}
NO_METRICS = {
    "meteor": "counts WordNet's synonyms, which are no part of this library: write a python grader with nltk's "
    "meteor_score",
    "cosine": "compares embeddings by a model of OpenAI, which has it for evaluations alone: write a python grader",
}
SERVER = tuple(field.name for field in fields(EndpointSpec) if field.name != "parameters")
Grade = Callable[[Sample], Any]  # async where it asks a model


class OpenAIGrader:
    """A grader in OpenAI's JSON, a dictionary or a file: the scores of `string_check`, `text_similarity`, `python`,
    `score_model`, `label_model` or `multi`.

    `server` are the settings of the OpenAI-compatible endpoint that `score_model` and `label_model` ask, those of a
    `Judge`: its url, cache, concurrency and so on, and `model` where the grader's own is to be another. A score is
    clipped to the grader's `range`, [0, 1] unless it has one; a label is 1 where it passes and else 0. A reply without
    score or label is 0; `rewards/<name>/unreadable` is the share of rows with one. A request that the endpoint does not
    answer is an error of the row. Of the requests of a batch the counts of its endpoints are logged, `<name>/requests`.

    Templates read `{{item.COLUMN}}` and `{{sample.output_text}}`, `output_json`, `output_tools` and `choices`. What a
    completion lacks (`{{sample.output_json.answer}}` of a text that is no JSON) makes the score 0; a column that
    is null gives no reward, None. The `source` of `python`, a function `grade(sample, item)`, runs like any reward
    function of yours, but where it raises or returns no finite number, as where the formula of `multi` does, the score
    is 0, with a warning, and `rewards/<name>/invalid` is the share of these. Of `multi` the score of each grader not
    called "score" is logged as `rewards/<name>/<grader>`; where one is None, so is the reward.

    Raises RewardError: another type, a key that is missing, a variable or a formula that is none, a model without a
    server; ConfigError: a server that is none.
    """

    def __init__(
        self, grader: str | Mapping[str, Any], name: str | None = None, server: Mapping[str, Any] | None = None
    ):
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
        if unknown := [key for key in server or () if key not in SERVER]:
            raise RewardError(
                f"the server of the grader {self.name!r} has {unknown[0]!r}; it takes {', '.join(SERVER)}; the closest "
                f"is {closest(unknown[0], SERVER)}"
            )
        self.endpoints: list[Endpoint] = []
        grade = _grader(grader, self.name, server or {}, self.endpoints)
        self.grade: Callable[..., Any] = self._logging_spend(grade) if self.endpoints else grade

    def _logging_spend(self, grade: Grade) -> Callable[..., Any]:
        """The function of a batch, called by row, that logs what its requests come to."""

        async def grade_rows(
            prompts: Sequence[Any],
            completions: Sequence[Any],
            completion_ids: Sequence[list[int]],
            log_total: Any = None,
            **columns: Any,
        ) -> list[Any]:
            samples = map(Sample, prompts, completions, completion_ids, rows_of(columns, len(prompts)))
            try:
                return await asyncio.gather(*map(grade, samples))
            finally:  # a request that failed was one
                log_counts(self.endpoints, self.name, log_total)

        vars(grade_rows)["by_row"] = True
        return grade_rows

    def close(self) -> None:
        """End the connections to the server."""
        for endpoint in self.endpoints:
            endpoint.close()


def _grader(spec: Any, name: str, server: Mapping[str, Any], endpoints: list[Endpoint]) -> Grade:
    """The function of a grader; `endpoints` gets those that it asks."""
    kind = spec.get("type") if isinstance(spec, Mapping) else None
    try:
        match kind:
            case "string_check" | "text_similarity":
                return _comparison(spec, name)
            case "python":
                return _python(spec, name)
            case "score_model":
                return _score_model(spec, name, server, endpoints)
            case "label_model":
                return _label_model(spec, name, server, endpoints)
            case "multi":
                return _multi(spec, name, server, endpoints)
        raise RewardError(
            f"the grader {name!r} is {shorten(spec, 60)}; its type is one of string_check, text_similarity, python, "
            "score_model, label_model and multi" + (f". For {kind}, {INSTEAD[kind]}" if kind in INSTEAD else "")
        )
    except KeyError as error:
        raise RewardError(f"the grader {name!r} of type {kind} has no {error.args[0]!r}") from None


def _comparison(spec: Mapping[str, Any], name: str) -> Grade:
    """The grader that compares `input` with `reference`, by an operation or a metric."""
    key, known = ("operation", CHECKS) if spec["type"] == "string_check" else ("evaluation_metric", METRICS)
    word = str(spec[key])
    if word in NO_METRICS:
        raise RewardError(f"the metric {word} of the grader {name!r} {NO_METRICS[word]}")
    if word not in known:
        raise RewardError(f"the {key} of the grader {name!r} is {spec[key]!r}; it is {', '.join(known)}")
    templates = [_template(spec[key], name) for key in ("input", "reference")]

    def grade(sample: Sample) -> float | None:
        filled = _filled(templates, sample, name)
        return float(known[word](*filled)) if isinstance(filled, list) else filled

    return grade


def _template(text: Any, name: str) -> str:
    """The template; raises RewardError for what is none."""
    if not isinstance(text, str):
        raise RewardError(f"the grader {name!r} has {shorten(text, 60)} in the place of a text")
    if other := re.search(r"\{\{.*?\}\}", VARIABLE.sub(" ", text), re.DOTALL):
        raise RewardError(
            f"the grader {name!r} has {other[0]}, which is no variable; they are {{{{item.COLUMN}}}} and "
            f"{{{{sample.X}}}} with X of {', '.join(OF_SAMPLE)}, and what those hold: .KEY or [INDEX]"
        )
    return text


def _filled(templates: Sequence[str], sample: Sample, name: str) -> list[str] | float | None:
    """The templates with their variables; or, where one has no value or a null, the score for that: None of a row's
    column, else 0.

    Raises RewardError for a column that the row does not have.
    """
    values: dict[str, Any] = {"item": sample.columns, "sample": openai_sample(sample)}
    lacks = set[str]()

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

    texts = [VARIABLE.sub(value, template) for template in templates]
    if lacks:
        return None if "item" in lacks else 0.0
    return texts


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

    def grade(sample: Sample) -> dict[str, float]:
        return _computed(lambda: function(openai_sample(sample), sample.columns), f"the source of the grader {name!r}")

    return grade


def _computed(compute: Callable[[], Any], what: str) -> dict[str, float]:
    """The score that is computed; where that raises or gives no finite number 0, which is `invalid`, with a warning.

    OpenAI's guide: any other result (exception, invalid float value, etc.) is marked invalid, and is a 0 grade.
    """
    try:
        with contained():
            score = compute()
        if isinstance(score, numbers.Real) and math.isfinite(score):
            return {"score": float(score), "invalid": 0.0}
        problem = f"returned {shorten(score, 60)}, no finite number"
    except Exception as error:
        problem = f"raised {error_text(error)}"
    warnings.warn(f"{what} {problem}: score 0", stacklevel=3)
    return {"score": 0.0, "invalid": 1.0}


def _score_model(spec: Mapping[str, Any], name: str, server: Mapping[str, Any], endpoints: list[Endpoint]) -> Grade:
    bounds = spec.get("range") or [0, 1]
    good = isinstance(bounds, Sequence) and len(bounds) == 2 and all(type(x) in (int, float) for x in bounds)
    if not (good and bounds[0] < bounds[1]):
        raise RewardError(f"the range of the grader {name!r} is {bounds!r}; it is two numbers, the lower one first")

    def read(result: Any) -> float | None:
        if type(result) not in (int, float) or result in (math.inf, -math.inf) or result != result:
            return None
        return float(min(max(result, bounds[0]), bounds[1]))

    return _asking(spec, name, server, endpoints, {"type": "number"}, read)


def _label_model(spec: Mapping[str, Any], name: str, server: Mapping[str, Any], endpoints: list[Endpoint]) -> Grade:
    labels, passing = spec["labels"], spec["passing_labels"]
    for key, texts in (("labels", labels), ("passing_labels", passing)):
        if not (isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts)):
            raise RewardError(f"{key} of the grader {name!r} is {shorten(texts, 60)}; it is a list of texts")
    if unknown := [text for text in passing if text not in labels]:
        raise RewardError(
            f"the passing label {unknown[0]!r} of the grader {name!r} is none of its labels {', '.join(labels)}"
        )

    def read(result: Any) -> float | None:
        return float(result in passing) if result in labels else None

    return _asking(spec, name, server, endpoints, {"type": "string", "enum": labels}, read)


def _asking(
    spec: Mapping[str, Any],
    name: str,
    server: Mapping[str, Any],
    endpoints: list[Endpoint],
    result: Mapping[str, Any],
    read: Callable[[Any], float | None],
) -> Grade:
    """The grader that asks a model for the JSON object {"steps", "result"}, `result` of a schema, which `read` scores.

    OpenAI's graders ask in this form, and prompts may name its fields. The steps come first: a reply is written in the
    order of the schema.
    """
    model = server.get("model") or spec["model"]
    if "url" not in server:
        raise RewardError(
            f"the grader {name!r} asks the model {model!r}: name the server that has it, openai_grader(grader=..., "
            "server={'url': 'https://api.openai.com/v1'})"
        )
    roles, templates = [], []
    for message in spec["input"] if isinstance(spec["input"], list) else [spec["input"]]:
        if not (isinstance(message, Mapping) and {"role", "content"} <= set(message)):
            raise RewardError(f"the input of the grader {name!r} has {shorten(message, 60)}; it is a list of messages")
        parts = message["content"] if isinstance(message["content"], list) else [message["content"]]
        texts = [part.get("text", part) if isinstance(part, Mapping) else part for part in parts]
        templates.append("".join(_template(text, name) for text in texts))
        roles.append("system" if message["role"] == "developer" else message["role"])
    sampling = dict(spec.get("sampling_params") or {})
    if "max_completions_tokens" in sampling:  # as a grader writes it, and no request
        sampling["max_completion_tokens"] = sampling.pop("max_completions_tokens")
    step = _object({"description": {"type": "string"}, "conclusion": {"type": "string"}})
    schema = _object({"steps": {"type": "array", "items": step}, "result": result})
    reply_form = {"type": "json_schema", "json_schema": {"name": "grade", "strict": True, "schema": schema}}
    # Without a temperature of its own the server's: OpenAI's models that reason take no other.
    parameters = {"temperature": None, **sampling, "response_format": reply_form}
    endpoint = Endpoint(EndpointSpec(**{**server, "model": model, "parameters": parameters}))
    endpoints.append(endpoint)

    async def grade(sample: Sample) -> Any:
        filled = _filled(templates, sample, name)
        if not isinstance(filled, list):
            return filled
        messages = [{"role": role, "content": text} for role, text in zip(roles, filled, strict=True)]
        results = []
        with contextlib.suppress(ReplyError):  # a refusal, say
            reply = await endpoint.ask(messages, {})
            results = [tree["result"] for tree in json_objects(reply.text) if "result" in tree]
        score = read(results[-1]) if results else None
        return {"score": score or 0.0, "unreadable": float(score is None)}

    return grade


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of an object that has these properties, and no others."""
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip


def _multi(spec: Mapping[str, Any], name: str, server: Mapping[str, Any], endpoints: list[Endpoint]) -> Grade:
    if not (isinstance(spec["graders"], Mapping) and spec["graders"]):
        raise RewardError(f"graders of the grader {name!r} is {shorten(spec['graders'], 60)}; it has graders by name")
    graders = {each: _grader(inner, f"{name}/{each}", server, endpoints) for each, inner in spec["graders"].items()}
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
                # Of floats alone: a power of integers, 9^9^9, may take for ever, and none of floats does.
                with contextlib.suppress(OverflowError):
                    node.value = float(number) if type(number) is int else number
                is_known = type(node.value) is float
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

    def combined(scores: Mapping[str, Any]) -> dict[str, Any]:
        totals = {each: score["score"] if isinstance(score, Mapping) else score for each, score in scores.items()}
        result: dict[str, Any] = {"score": None}
        if all(total is not None for total in totals.values()):
            numbers_of = {each: float(total) for each, total in totals.items()}
            compute = functools.partial(eval, code, {"__builtins__": {}}, FUNCTIONS | numbers_of)
            result = _computed(compute, f"calculate_output of the grader {name!r}")
        shares: dict[str, float] = {}  # of each kind of failure
        for score in (*scores.values(), result):
            for kind in {"unreadable", "invalid"} & score.keys() if isinstance(score, Mapping) else ():
                shares[kind] = max(score[kind], shares.get(kind, 0.0))
        return {**totals, **shares, "score": result["score"]}  # last, for a grader may have this name too

    def grade(sample: Sample) -> dict[str, Any]:
        return combined({each: inner(sample) for each, inner in graders.items()})

    async def grade_async(sample: Sample) -> dict[str, Any]:
        async def score(inner: Grade) -> Any:
            if is_async(inner):
                return await inner(sample)
            return await asyncio.wrap_future(in_thread(functools.partial(inner, sample), "reward"))

        scores = await asyncio.gather(*(score(inner) for inner in graders.values()))
        return combined(dict(zip(graders, scores, strict=True)))

    return grade_async if any(map(is_async, graders.values())) else grade
