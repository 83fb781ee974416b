"""Built-in rewards for the form of a completion: tags, patterns, JSON, lengths."""

import contextlib
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator, validators
from jsonschema_specifications import REGISTRY

from jaxrl_llm.rewards.replies import json_objects
from jaxrl_llm.rewards.signatures import RewardError, shorten, text_of
from jaxrl_llm.rewards.workers.bounded import scores_in_time

ROW_SECONDS = 3.0  # for a regular expression, or a schema that may take long, on one completion
LONG_TEXT = 100_000  # characters from which on any schema may take long
# What takes more than linear time in some values.
LONG_SCHEMA = re.compile(r'"(?:pattern|patternProperties|uniqueItems|unevaluated\w+|\$ref|\$dynamicRef|contains)"')

# NaN is no JSON, but Python's parser takes it: it is a number that fits no schema of numbers.
_is_number = Draft202012Validator.TYPE_CHECKER.is_type
Validator = validators.extend(
    Draft202012Validator,
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine(
        "number", lambda _, value: _is_number(value, "number") and value == value
    ),
)
# The schema of schemas, which passes over keywords that it does not know, closed at every depth.
STRICT_SCHEMA = {
    "$schema": Validator.META_SCHEMA["$id"],
    "$id": "urn:jaxrl_llm:strict",
    "$dynamicAnchor": "meta",
    "$ref": Validator.META_SCHEMA["$id"],
    "unevaluatedProperties": False,
}


def think_answer_format(completions: Sequence[Any], **columns: Any) -> list[float]:
    """1.0 where the completion is `<think>...</think>` and then `<answer>...</answer>`, once each, else 0.0.

    White space around and between the two is free; neither is empty.
    """
    pattern = re.compile(r"<think>(.*)</think>\s*<answer>(.*)</answer>", re.DOTALL)
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    rewards = []
    for text in map(text_of, completions):
        match = pattern.fullmatch(text.strip()) if all(text.count(tag) == 1 for tag in tags) else None
        rewards.append(float(match is not None and all(part.strip() for part in match.groups())))
    return rewards


def regex_match(completions: Sequence[Any], *, pattern: str, whole: bool = False, **columns: Any) -> list[float]:
    """1.0 where the regular expression `pattern` is found in the completion (with `whole`: is all of it), else 0.0.

    The dot matches line ends too. The pattern runs in a process of its own: a completion on which it takes more than 3
    seconds scores 0.0, with a warning. Raises RewardError for a pattern that is none.
    """
    try:
        re.compile(pattern, re.DOTALL)
    except (re.error, RecursionError, OverflowError) as error:
        raise RewardError(f"regex_match: {pattern!r} is no regular expression: {error}") from error
    texts = [text_of(completion) for completion in completions]
    rows = len(texts)
    arguments = {"texts": texts, "patterns": [pattern] * rows, "wholes": [whole] * rows}
    return scores_in_time(
        "regex_match", f"{__name__}:matches", arguments, ROW_SECONDS,
        lambda row, took: f"the pattern {pattern!r} {took}, on {_with_length(texts[row])}",
    )  # fmt: skip


def matches(texts: Sequence[str], patterns: Sequence[str], wholes: Sequence[bool]) -> list[float]:
    """1.0 where a pattern matches its text, all of it where `wholes` says so, else 0.0: `regex_match` without its time
    limit."""
    rewards = []
    for text, pattern, whole in zip(texts, patterns, wholes, strict=True):
        compiled = re.compile(pattern, re.DOTALL)
        rewards.append(float((compiled.fullmatch if whole else compiled.search)(text) is not None))
    return rewards


def _with_length(text: str) -> str:
    return f"{shorten(text, 100)} ({len(text)} characters)"


def length_range(
    completion_ids: Sequence[Sequence[int]], *, minimum: int = 0, maximum: int = 2**31, **columns: Any
) -> list[float]:
    """1.0 where the completion has `minimum` to `maximum` tokens, else 0.0.

    Raises RewardError: a `minimum` above `maximum`.
    """
    if minimum > maximum:
        raise RewardError(f"length_range: minimum is {minimum}, above maximum, which is {maximum}")
    return [float(minimum <= len(ids) <= maximum) for ids in completion_ids]


def length_penalty(
    completion_ids: Sequence[Sequence[int]], *, per_token: float = -0.001, **columns: Any
) -> list[float]:
    """`per_token` times the number of tokens of each completion."""
    return [per_token * len(ids) for ids in completion_ids]


def json_schema(
    completions: Sequence[Any],
    schema: Mapping[str, Any] | str | Sequence[Any] | None = None,
    *,
    column: str = "schema",
    **columns: Any,
) -> list[float | None]:
    """1.0 where the completion is JSON that fits the schema, 0.0 where it is not; None where the schema is None.

    The JSON is the whole completion, or the last object in it, or a fenced block behind which there is none, such as
    one with a list. The option `schema` is the same for all rows; without it, the data set's `column` has one for each.
    They are given as they are or as JSON text, and are those of JSON Schema, draft 2020-12, without references to other
    documents. JSON that is nested too deep to be read fits none, nor does what takes more than 3 seconds to check, with
    a warning. Raises RewardError: a schema that is none, unknown keywords included, which a validator would pass over.
    """
    if isinstance(schema, list):  # no schema, but the data's column of this name
        columns["schema"], schema = schema, None
    if schema is None and column not in columns:
        raise RewardError(
            f"json_schema needs the option schema, or the column {column!r}, which the data does not have"
        )
    schemas = [schema] * len(completions) if schema is not None else columns[column]
    rewards: list[float | None] = [None] * len(completions)
    slow: dict[str, list[Any]] = {"texts": [], "schemas": []}  # what may take long
    rows = []
    for row, (completion, wanted) in enumerate(zip(completions, schemas, strict=True)):
        if wanted is None:
            continue
        try:
            wanted = json.loads(wanted) if isinstance(wanted, str) else wanted
        except ValueError as error:
            raise RewardError(f"json_schema: the schema {shorten(wanted, 100)} is no JSON: {error}") from None
        text, shape = text_of(completion), json.dumps(wanted)
        schema_validator(shape)
        if len(text) > LONG_TEXT or LONG_SCHEMA.search(shape):
            rows.append(row)
            slow["texts"].append(text)
            slow["schemas"].append(shape)
        else:
            rewards[row] = fits([text], [shape])[0]
    scores = scores_in_time(
        "json_schema", f"{__name__}:fits", slow, ROW_SECONDS,
        lambda row, took: f"the schema {took}, on {_with_length(slow['texts'][row])}",
    )  # fmt: skip
    for row, score in zip(rows, scores, strict=True):
        rewards[row] = score
    return rewards


def fits(texts: Sequence[str], schemas: Sequence[str]) -> list[float]:
    """The rewards of `json_schema` without its time limit, for schemas as JSON text."""
    rewards = []
    for text, schema in zip(texts, schemas, strict=True):
        before, _, behind = text.rpartition("```")
        tag, _, block = before.rpartition("```")[2].partition("\n")
        is_block, values = tag.strip().lower() in ("", "json") and "{" not in behind, list[Any]()
        for whole in (text, block) if is_block else (text,):
            with contextlib.suppress(ValueError, RecursionError):
                values = values or [json.loads(whole)]
        values = values or list(json_objects(text))
        try:
            rewards.append(float(bool(values) and schema_validator(schema).is_valid(values[-1])))
        except (RecursionError, OverflowError):  # of a value that is too deep, or a number that is too large
            rewards.append(0.0)
    return rewards


@functools.lru_cache(maxsize=256)  # checking a schema takes milliseconds, and rows of a batch share theirs
def schema_validator(schema: str) -> Any:
    """The validator of a JSON schema, given as JSON text. Raises RewardError for what is no schema."""
    tree = json.loads(schema)
    errors = list(Draft202012Validator(STRICT_SCHEMA).iter_errors(tree))
    if errors:
        # An error makes every schema around it wrong as well: the innermost one is the cause.
        error = max(errors, key=lambda error: len(error.absolute_path))
        if error.validator == "unevaluatedProperties":
            unknown = next(key for key in error.instance if repr(key) in error.message)
            raise RewardError(f"json_schema does not know the keyword {unknown!r} (at {error.json_path} of the schema)")
        raise RewardError(f"json_schema: at {error.json_path} of the schema, {error.message}")
    # The registry of the specifications alone: a reference to another document is not fetched.
    return Validator(tree, registry=REGISTRY)
